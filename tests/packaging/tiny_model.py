"""Write the tiny model and its tokenizer into a folder: ``python -m tests.packaging.tiny_model FOLDER``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.exported import tiny_onnx, write_tokenizer


def main(folder: Path) -> None:
    shutil.copytree(tiny_onnx("llama").parent, folder)
    write_tokenizer(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
