"""Settings that all tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import onnxruntime

# Helpers are imported as tests.<name>. Appended, so that an installed graphrot comes before the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

onnxruntime.set_default_logger_severity(4)

hypothesis.settings.register_profile("graphrot", deadline=None, derandomize=True, max_examples=25, database=None)
hypothesis.settings.load_profile("graphrot")
