"""The session runs decoders in pieces, with caches of any type, and refuses what is no decoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.evaluate import session as module
from graphrot.evaluate.layout import layout_of_proto
from graphrot.evaluate.session import DecoderSession, Unrunnable, open_decoder, target_of
from graphrot.model.save import save_model
from tests.evaluate.decoders import KINDS, VOCABULARY, Kind, decoder
from tests.exported import tiny_onnx
from tests.tiny import VOCAB


def _tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length))


def _decoder(folder: Path, body: str, inputs: str, outputs: str = "float[b,s,7] logits") -> Path:
    """Write a small decoder from its text, where ``past_0_key`` stands for ``past.0.key``."""
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {body} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.name is not None
        value.name = value.name.replace("_0_key", ".0.key")
    ir.save(model, folder / "small.onnx")
    return folder / "small.onnx"


CACHELESS = (
    "a = Cast <to = 1> (input_ids) b = CumSum(a, one) k = Constant <value_ints = [2]> () c = Unsqueeze(b, k) "
    "logits = Mul(c, row)"
)
CACHELESS_INPUTS = "int64[b,s] input_ids, int64 one = {1}, float[7] row = {1,2,3,4,5,6,7}"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("pieces", [(9,), (4, 5), (1, 1, 7), (8, 1)])
def test_pieces_give_what_the_whole_gives(name: str, pieces: tuple[int, ...]) -> None:
    decoder = open_decoder(tiny_onnx(name), threads=1)
    tokens = _tokens(2, 9)
    whole, _ = decoder.run(tokens)
    cache, parts, start = None, [], 0
    for piece in pieces:
        logits, cache = decoder.run(tokens[:, start : start + piece], cache)
        parts.append(logits)
        start += piece
    assert cache is not None and cache.length == 9
    assert np.abs(np.concatenate(parts, axis=1) - whole).max() <= 1e-5 * np.abs(whole).max()


@pytest.mark.parametrize("name", ["llama", "cacheless"])
def test_a_bound_run_is_the_same_run(name: str, tmp_path: Path) -> None:
    path = tiny_onnx(name) if name == "llama" else _decoder(tmp_path, CACHELESS, CACHELESS_INPUTS)
    decoder = open_decoder(path, threads=1)
    tokens = _tokens(1, 9) % 7
    whole, _ = decoder.run(tokens)
    bound = decoder.bind(tokens[:, :4])
    bound.run()
    cache = bound.cache()
    assert cache.length == 4
    rest, _ = decoder.run(tokens[:, 4:], cache)
    assert np.abs(rest - whole[:, 4:]).max() <= 1e-5 * np.abs(whole).max()


def test_a_bound_run_that_fails_is_refused_in_the_same_words() -> None:
    decoder = open_decoder(tiny_onnx("llama"), threads=1)
    _, cache = decoder.run(_tokens(1, 4))
    bound = decoder.bind(np.array([[VOCAB]]), cache)
    with pytest.raises(InputRefused, match="1 x 1 tokens after 4"):
        bound.run()


def test_a_cache_can_be_used_twice() -> None:
    decoder = open_decoder(tiny_onnx("llama"), threads=1)
    _, cache = decoder.run(_tokens(1, 5))
    first, _ = decoder.run(_tokens(1, 3, seed=1), cache)
    decoder.run(_tokens(1, 3, seed=2), cache)
    again, _ = decoder.run(_tokens(1, 3, seed=1), cache)
    np.testing.assert_array_equal(first, again)


def test_what_is_known_about_a_decoder() -> None:
    decoder = open_decoder(tiny_onnx("llama"))
    assert (decoder.vocabulary, decoder.has_cache, decoder.uses_library) == (VOCAB, True, False)


def test_a_folder_and_a_model_in_memory(tmp_path: Path) -> None:
    path = tiny_onnx("llama")
    expected, _ = open_decoder(path, threads=1).run(_tokens(1, 4))
    for model in (path.parent, str(path), ir.load(path)):
        logits, _ = open_decoder(model, threads=1).run(_tokens(1, 4))
        np.testing.assert_array_equal(logits, expected)


def test_without_cache_inputs_everything_runs_again(tmp_path: Path) -> None:
    decoder = open_decoder(_decoder(tmp_path, CACHELESS, CACHELESS_INPUTS))
    assert not decoder.has_cache
    whole, _ = decoder.run(np.array([[1, 2, 3, 4]]))
    first, cache = decoder.run(np.array([[1, 2]]))
    rest, cache = decoder.run(np.array([[3, 4]]), cache)
    np.testing.assert_array_equal(np.concatenate([first, rest], axis=1), whole)
    assert cache.length == 4
    np.testing.assert_array_equal(whole[0, :, 0], [1, 3, 6, 10])


@pytest.mark.parametrize("library", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_fixed_size_is_written_in_place(kind: Kind, library: bool | None, tmp_path: Path) -> None:
    """What was there stays, and the answers are those of a cache that grows; a full one gets twice the room."""
    session = open_decoder(decoder(tmp_path, kind), library=library, threads=1)
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, (1, 9))
    whole, grown = session.run(tokens)
    reserved = session.reserve(1, 6)
    assert reserved is not None and (reserved.length, reserved.capacity) == (0, 6)
    first, cache = session.run(tokens[:, :4], reserved)
    second, cache = session.run(tokens[:, 4:6], cache)
    assert [value.data_ptr() for value in cache.tensors] == [value.data_ptr() for value in reserved.tensors]
    third, cache = session.run(tokens[:, 6:7], cache)
    assert (cache.length, cache.capacity) == (7, 12)
    bound = session.bind(tokens[:, 7:8], cache)
    bound.run()
    last, after = session.run(tokens[:, 8:], bound.cache())
    assert [value.data_ptr() for value in after.tensors] == [value.data_ptr() for value in cache.tensors]
    found = np.concatenate([first, second, third], axis=1)
    assert np.abs(found - whole[:, :7]).max() <= 1e-5 * np.abs(whole).max()
    assert np.abs(last - whole[:, 8:]).max() <= 1e-5 * np.abs(whole).max()
    for kept, other in zip(after.tensors, grown.tensors, strict=True):
        np.testing.assert_array_equal(kept.numpy()[:, :, :9], other.numpy())


def test_what_cannot_be_written_in_place_is_not(tmp_path: Path) -> None:
    """Standard operators; a model that says no; one that looks at the shape of its past, or of its present."""
    assert open_decoder(tiny_onnx("llama")).reserve(1, 8) is None
    model = onnx.load(decoder(tmp_path, "float", metadata=False))
    plain, said = tmp_path / "plain.onnx", tmp_path / "said.onnx"
    onnx.save(model, plain)
    assert open_decoder(plain).reserve(1, 8) is not None
    entry = model.metadata_props.add()
    entry.key, entry.value = "graphrot.kv", json.dumps({"bits": 32, "layout": "float", "shared_buffers": False})
    onnx.save(model, said)
    assert open_decoder(said).reserve(1, 8) is None
    del model.metadata_props[:]
    for end in ("past_key_values.0.key", "present.0.value"):
        seen = onnx.ModelProto()
        seen.CopyFrom(model)
        seen.graph.node.append(onnx.helper.make_node("Shape", [end], ["shape"]))
        seen.graph.output.append(onnx.helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [4]))
        assert not layout_of_proto(seen, "seen").shared


@pytest.mark.parametrize("kind", ["int8", "uint8", "float16", "float", "double"])
def test_empty_caches_take_the_declared_type_and_shape(tmp_path: Path, kind: str) -> None:
    number = {"int8": 3, "uint8": 2, "float16": 10, "float": 1, "double": 11}[kind]
    body = (
        f"a = Cast <to = {number}> (input_ids) k = Constant <value_ints = [1, 3]> () b = Unsqueeze(a, k) "
        "new = Expand(b, shape) present_0_key = Concat <axis = 2> (past_key_values_0_key, new) "
        "f = Cast <to = 1> (present_0_key) n = Constant <value_ints = [1, 2, 3]> () "
        "s = ReduceSum <keepdims = 0> (f, n) "
        "e = Cast <to = 1> (input_ids) k2 = Constant <value_ints = [2]> () u = Unsqueeze(e, k2) w = Mul(u, row) "
        "logits = Add(w, s)"
    )
    inputs = (
        f"int64[b,s] input_ids, {kind}[b,2,p,4] past_key_values_0_key, int64[4] shape = {{1,2,1,4}}, "
        "float[7] row = {0,0,0,0,0,0,0}"
    )
    path = _decoder(tmp_path, body, inputs, f"float[b,s,7] logits, {kind}[b,2,t,4] present_0_key")
    decoder = open_decoder(path)
    first, cache = decoder.run(np.array([[1, 2]]))
    second, _ = decoder.run(np.array([[3]]), cache)
    assert first[0, 0, 0] == 8 * 3 and second[0, 0, 0] == 8 * 6


def test_half_precision_logits_come_as_float32(tmp_path: Path) -> None:
    body = CACHELESS.replace("logits = Mul(c, row)", "d = Mul(c, row) logits = Cast <to = 10> (d)")
    path = _decoder(tmp_path, body, CACHELESS_INPUTS, "float16[b,s,7] logits")
    assert open_decoder(path).run(np.array([[1, 2]]))[0].dtype == np.float32


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        ("float[b,s] x", "float[b,s] logits",
         "'x' is neither of input_ids, attention_mask, position_ids, token_type_ids nor a cache"),
        ("int64[b,s] input_ids, float[b,2,p,w] past_0_key", "float[b,s] logits, float[b,2,p,w] present_0_key",
         "leaves its width open"),
        ("int64[b,s] input_ids, float[b,2,p] past_0_key", "float[b,s] logits, float[b,2,p] present_0_key",
         "not of rank 4"),
        ("int64[b,s] input_ids, float[b,2,p,4] past_0_key", "float[b,s] logits, float[b,2,p,4] presented",
         "nor a cache"),
        ("int64[b,s] input_ids", "float[b,s] one, float[b,s] two", "no output is called logits; there are one, two"),
        ("int64[b,s] attention_mask", "float[b,s] logits", "it has no input 'input_ids'"),
    ],
)  # fmt: skip
def test_other_graphs_are_refused(tmp_path: Path, inputs: str, outputs: str, words: str) -> None:
    names = [part.split()[-1] for part in inputs.split(", ")]
    results = [part.split()[-1] for part in outputs.split(", ")]
    body = " ".join(f"{r} = Cast <to = 1> ({names[-1] if r.startswith('present') else names[0]})" for r in results)
    with pytest.raises(InputRefused, match="not those of a decoder") as caught:
        open_decoder(_decoder(tmp_path, body, inputs, outputs))
    assert words in str(caught.value)


def test_sizes_close_what_the_file_leaves_open(tmp_path: Path) -> None:
    body = "logits = Cast <to = 1> (input_ids) present_0_key = Identity(past_0_key)"
    inputs = "int64[b,s] input_ids, float[b,2,p,w] past_0_key"
    path = _decoder(tmp_path, body, inputs, "float[b,s] logits, float[b,2,p,w] present_0_key")
    _, cache = DecoderSession(path, sizes={"w": 6}).run(np.array([[1]]))
    assert cache.tensors[0].shape() == [1, 2, 0, 6]


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="There is no such model"):
        open_decoder(tmp_path / "no.onnx")
    with pytest.raises(InputRefused, match="There is no such model"):
        open_decoder(tmp_path)
    (tmp_path / "bad.onnx").write_bytes(b"no protobuf")
    with pytest.raises(InputRefused, match="is not a usable ONNX model"):
        open_decoder(tmp_path / "bad.onnx")
    path = _decoder(tmp_path, "logits = NoSuchOperator(input_ids)", "int64[b,s] input_ids")
    with pytest.raises(Unrunnable, match="does not load the model"):
        open_decoder(path)


def test_a_failing_run_names_the_sizes() -> None:
    decoder = open_decoder(tiny_onnx("llama"))
    with pytest.raises(InputRefused, match="failed to run the model") as caught:
        decoder.run(np.full((1, 3), VOCAB + 5))
    assert "1 x 3 tokens after 0" in str(caught.value)


class _Options:
    """Records the session options that the decoder is opened with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[ort.SessionOptions] = []
        self.registered = 0
        original = ort.InferenceSession

        def create(path: str, options: ort.SessionOptions, **arguments: object) -> ort.InferenceSession:
            self.seen.append(options)
            return original(path, options, **arguments)

        def register(options: ort.SessionOptions) -> None:
            self.registered += 1

        monkeypatch.setattr(module.ort, "InferenceSession", create)
        monkeypatch.setattr(module.native, "register", register)

    def accuracy(self) -> str | None:
        key = "session.qdq_matmulnbits_accuracy_level"
        options = self.seen[-1]
        try:
            return str(options.get_session_config_entry(key))
        except RuntimeError:  # not set
            return None


@pytest.fixture
def own(tmp_path: Path) -> ir.Model:
    """A model as graphrot writes it, with its domain and a recipe."""
    model = ir.load(tiny_onnx("llama"))
    model.opset_imports["graphrot"] = 1
    return model


def test_portable_files_keep_their_activations_exact(
    own: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = _Options(monkeypatch)
    for target, expected in (("portable", "0"), ("ort", None), (None, None)):
        if target:
            own.metadata_props["graphrot.recipe"] = json.dumps({"target": target})
        else:
            del own.metadata_props["graphrot.recipe"]
        save_model(own, tmp_path / "m.onnx")
        open_decoder(tmp_path / "m.onnx", library=False)
        assert options.accuracy() == expected
    DecoderSession(tmp_path / "m.onnx", library=False, accuracy_level=4)
    assert options.accuracy() == "4"
    assert target_of({"graphrot.recipe": "w4a8"}) is None and target_of({}) is None


def test_when_the_library_is_registered(own: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = _Options(monkeypatch)
    save_model(own, tmp_path / "m.onnx")
    for library, available, expected in ((None, True, 1), (None, False, 0), (True, False, 1), (False, True, 0)):
        options.registered = 0
        monkeypatch.setattr(module.native, "is_available", lambda available=available: available)
        assert open_decoder(tmp_path / "m.onnx", library=library).uses_library == bool(expected)
        assert options.registered == expected
    options.registered = 0
    open_decoder(tiny_onnx("llama"), library=True)  # it has no operator of ours
    assert options.registered == 0


def test_a_library_that_must_be_there_and_is_not(
    own: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(_: object) -> None:
        raise EnvironmentProblem("graphrot's native library is not installed")

    save_model(own, tmp_path / "m.onnx")
    monkeypatch.setattr(module.native, "register", absent)
    with pytest.raises(EnvironmentProblem, match="native library"):
        open_decoder(tmp_path / "m.onnx", library=True)
