"""Exports agree with torch, store each weight once, and are refused when they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from graphrot.errors import InputRefused
from graphrot.model import export, trace
from graphrot.model.crosscheck import CASES, TOLERANCE, compare
from graphrot.model.export import export_decoder
from tests.exported import tiny_onnx
from tests.tiny import TINY_NAMES, VOCAB, randomized, tiny, tiny_llama


def _operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def _weight_bytes(path: Path) -> int:
    model = ir.load(path)
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_whole_text_equals_torch(name: str) -> None:
    """Without a past, against the plain torch model: no cache object, its own attention."""
    model = tiny(name)
    ids = torch.randint(0, VOCAB, (3, 11), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(input_ids=ids).logits.numpy()
    session = ort.InferenceSession(str(tiny_onnx(name)), providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {
        "input_ids": ids.numpy(),
        "attention_mask": np.ones((3, 11), dtype=np.int64),
        "position_ids": np.tile(np.arange(11), (3, 1)),
    }
    for value in session.get_inputs():
        if value.name not in feeds:
            _, heads, _, width = value.shape
            feeds[value.name] = np.zeros((3, heads, 0, width), dtype=np.float32)
    logits = session.run(["logits"], feeds)[0]
    assert np.abs(logits - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", TINY_NAMES)
def test_form_of_the_file(name: str) -> None:
    path = tiny_onnx(name)
    onnx.checker.check_model(str(path), full_check=True)
    model = ir.load(path)
    assert model.opset_imports == {"": 21}
    names = [node.name for node in model.graph]
    assert all(names) and len(set(names)) == len(names)
    layers = (len(model.graph.inputs) - 3) // 2
    past = [f"past_key_values.{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    assert [v.name for v in model.graph.inputs] == ["input_ids", "attention_mask", "position_ids", *past]
    assert [v.name for v in model.graph.outputs] == ["logits", *(p.replace("past_key_values", "present") for p in past)]
    dims = {v.name: [str(d) for d in v.shape or ()] for v in (*model.graph.inputs, *model.graph.outputs)}
    assert dims["input_ids"] == ["batch", "sequence"] and dims["attention_mask"] == ["batch", "total"]
    assert dims[past[0]][::2] == ["batch", "past"] and dims["present.0.key"][::2] == ["batch", "total"]
    assert dims["logits"] == ["batch", "sequence", str(VOCAB)]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_weight_is_stored_once_and_as_k_by_n(name: str) -> None:
    path = tiny_onnx(name)
    model = ir.load(path)
    parameters = sum(p.numel() * 4 for p in tiny(name).parameters())
    assert parameters <= _weight_bytes(path) <= parameters + 2000
    tied = 0
    for node in model.graph:
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if weight is not None and weight.is_initializer():
            tied += 1
            assert {use.node.op_type for use in weight.uses()} == {"Gather", "Transpose"}
    assert tied == int(tiny(name).config.tie_word_embeddings)


def test_idle_casts_and_repeated_constants_are_gone() -> None:
    operators = _operators(ir.load(tiny_onnx("llama")))
    assert operators.count("Cast") <= 2  # the mask, the positions
    assert operators.count("Constant") <= 25


def test_exporting_leaves_the_model_as_it_was() -> None:
    """The exporter once left models in training mode, with dropout on: they then differ from themselves."""
    model = tiny("gpt2")
    assert model.config.resid_pdrop > 0
    attention = model.config._attn_implementation
    trace.torchscript(model, trace.read_signature(model))
    assert not any(module.training for module in model.modules())
    assert model.config._attn_implementation == attention


def test_a_graph_with_another_mask_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(layers=1)
    original = trace.torchscript

    def unmasked(*arguments: Any) -> ir.Model:
        made = original(*arguments)
        for node in made.graph:
            if node.op_type == "LessOrEqual":  # the causal mask: tokens see the later ones instead
                node.op_type = "GreaterOrEqual"
        return made

    monkeypatch.setattr(trace, "torchscript", unmasked)
    with pytest.raises(InputRefused, match="No exporter gave an ONNX graph that agrees") as caught:
        export_decoder(model, tmp_path / "m.onnx", roads=("torchscript",))
    assert "differs by" in str(caught.value) and f"accepted is {TOLERANCE:g}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_comparison_sees_a_wrong_cache(tmp_path: Path) -> None:
    """Logits can agree while a returned cache does not."""
    model = tiny_llama(layers=1)
    path = tmp_path / "m.onnx"
    export_decoder(model, path)
    proto = onnx.load(path)
    for node in proto.graph.node:
        if node.output[0] == "present.0.key":
            node.output[0] = "true_key"
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            if name == "present.0.key":
                node.input[index] = "true_key"
    proto.graph.node.append(onnx.helper.make_node("Neg", ["true_key"], ["present.0.key"], name="spoil"))
    onnx.save(proto, path)
    found = compare(path, model, trace.read_signature(model))
    assert found.tensor == "present.0.key" and not found.acceptable


def test_a_failing_road_leads_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> ir.Model:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(trace, "torchscript", fails)
    steps: list[str] = []
    model = tiny_llama(layers=1, tied=True)
    done = export_decoder(model, tmp_path / "m.onnx", progress=lambda step, *_: steps.append(step))
    assert done.road == "dynamo" and done.mismatch.acceptable
    assert "exporting (dynamo)" in steps
    assert _weight_bytes(tmp_path / "m.onnx") <= sum(p.numel() * 4 for p in model.parameters()) + 2000


def test_a_failing_exporter_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch prints its whole graph to stdout when an operator has no ONNX form."""

    class Sorting(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x, 4)

    model = tiny_llama(layers=1)
    model.model.norm.register_forward_hook(lambda module, inputs, output: output + Sorting()(output).sum())
    with pytest.raises(InputRefused, match="UnsupportedOperatorError"):
        export_decoder(model, tmp_path / "m.onnx", roads=("torchscript",))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_all_roads_failing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> ir.Model:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(trace, "torchscript", fails)
    monkeypatch.setattr(trace, "dynamo", fails)
    with pytest.raises(InputRefused) as caught:
        export_decoder(tiny_llama(layers=1), tmp_path / "m.onnx")
    assert "torchscript: RuntimeError: no such operator; dynamo: RuntimeError" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_only_float32_is_exported(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="Only float32 models are exported"):
        export_decoder(tiny_llama(layers=1).half(), tmp_path / "m.onnx")


def test_models_without_a_cache_of_keys_and_values_are_refused() -> None:
    import transformers

    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=VOCAB, state_size=4)
    with pytest.raises(InputRefused, match=r"cache"):
        trace.read_signature(transformers.MambaForCausalLM(config))


def test_no_case_has_the_traced_sizes() -> None:
    batch, sequence, past = trace._SIZES
    assert all(case.sequence != sequence and case.past != past for case in CASES)
    assert {case.batch for case in CASES} == {1, batch}


def test_experts_are_exported_in_plain_operations(tmp_path: Path) -> None:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    model = randomized(transformers.MixtralForCausalLM(config), 0)
    experts = model.config._experts_implementation
    assert export_decoder(model, tmp_path / "m.onnx").road == "torchscript"
    assert model.config._experts_implementation == experts


def test_the_weights_are_not_held_twice() -> None:
    """Initializers of a fresh trace read torch's memory; nothing is copied before saving."""
    model = tiny_llama(layers=1)
    traced = trace.torchscript(model, trace.read_signature(model))
    weight = traced.graph.initializers["model.embed_tokens.weight"].const_value
    assert weight is not None
    assert np.shares_memory(weight.numpy(), model.model.embed_tokens.weight.detach().numpy())
    assert export.ROADS == ("torchscript", "dynamo")
