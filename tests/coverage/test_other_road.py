"""A checkpoint that one exporter cannot trace is converted by way of the other."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import graphrot
from tests.exported import write_tokenizer
from tests.tiny import VOCAB, randomized


def test_interleaved_rope_takes_the_second_road(tmp_path: Path) -> None:
    """The TorchScript exporter has no shapes for how Cohere pairs neighbouring channels."""
    config = transformers.CohereConfig(
        vocab_size=VOCAB, hidden_size=80, num_attention_heads=5, num_key_value_heads=5, intermediate_size=96,
        num_hidden_layers=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    randomized(transformers.CohereForCausalLM(config), 0).save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    steps: list[str] = []
    done = graphrot.convert(
        tmp_path / "hf", output=tmp_path / "out", recipe="rotate-only", progress=lambda step, *_: steps.append(step)
    )
    assert steps.index("exporting (torchscript)") < steps.index("exporting (dynamo)")
    assert [r.space.kind for r in done.plan.rotations] == ["R1", "R2", "R3", "R4"]
    assert done.certificate is not None and done.certificate.relative <= done.certificate.tolerance
    assert len(graphrot.generate(tmp_path / "out", prompt="ab", max_new_tokens=2, greedy=True).tokens) <= 2
