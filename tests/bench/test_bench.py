"""``graphrot bench`` on tiny decoders: what it prints, that the work is real, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import graphrot
from graphrot.bench import compare, machine, memory
from graphrot.bench.contender import Contender, find_file
from graphrot.bench.timing import Stopwatch
from graphrot.cli.main import run
from graphrot.errors import EnvironmentProblem, InputRefused, UsageError
from tests.contrib.built import built
from tests.exported import tiny_onnx

FIGURE = {"median", "p10", "p90", "ratio"}
SMALL = ["--prefill", "12", "--decode", "3", "--context", "4,9", "--turns", "2"]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> list[memory.Job]:
    """Memory without its processes: the jobs that would have run; each next one takes a byte more."""
    jobs: list[memory.Job] = []

    def peak(job: memory.Job) -> int:
        jobs.append(job)
        return 100 + len(jobs)

    monkeypatch.setattr(compare, "peak_rss_bytes", peak)
    return jobs


def _of_batch(batch: int, folder: Path) -> Path:
    """The tiny Llama, with a batch that is fixed."""
    model = onnx.load(tiny_onnx("llama"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(model, folder / "fixed.onnx")
    return folder / "fixed.onnx"


def _without_cache(folder: Path) -> Path:
    table = helper.make_tensor("table", TensorProto.FLOAT, [7, 7], np.eye(7).ravel())
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", 7])
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["logits"])], "g", [ids], [logits], [table]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "x.onnx")
    return folder / "x.onnx"


def test_the_json_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """The processes that measure memory run here."""
    first, second = tiny_onnx("llama").parent, built("llama", "int4")
    assert run(["bench", str(first), str(second), *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert set(content) == {
        *("machine", "versions", "commit", "isa", "prefill", "decode", "context", "batch", "threads", "turns"),
        *("clock", "models", "notes"),
    }
    assert (content["context"], content["clock"], content["batch"]) == ([4, 9], "thread cpu", 1)
    assert set(content["machine"]) == {"cpu", "flags", "cores", "system", "load", "load_after"}
    assert content["versions"]["onnxruntime"]
    assert [(entry["model"], entry["kind"]) for entry in content["models"]] == [
        (str(first), "onnx"),
        (str(second), "onnxruntime-genai"),
    ]
    for entry in content["models"]:
        assert set(entry) == {
            *("model", "kind", "vocabulary", "kernels", "prefill_tokens_per_s", "decode_tokens_per_s"),
            *("peak_rss_bytes", "wall"),
        }
        assert set(entry["wall"]) == {"prefill_tokens_per_s", "decode_tokens_per_s"}
        for speeds in (entry, entry["wall"]):
            assert list(speeds["decode_tokens_per_s"]) == ["4", "9"]
            for one in (speeds["prefill_tokens_per_s"], *speeds["decode_tokens_per_s"].values()):
                assert set(one) == FIGURE
                assert set(one["ratio"]) == FIGURE - {"ratio"}
                assert 0 < one["p10"] <= one["median"] <= one["p90"]
        assert entry["peak_rss_bytes"]["median"] > 20e6  # an interpreter and a runtime are in there
        assert entry["vocabulary"] == 131
    assert content["models"][0]["prefill_tokens_per_s"]["ratio"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert "runs in plain ONNX Runtime" in err
    assert content["notes"] == [f"{second}: runs in plain ONNX Runtime, like the others"]


def test_the_table_names_the_models(light: list[memory.Job], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_onnx("llama"))
    assert run(["bench", path, path, *SMALL]) == 0
    out = capsys.readouterr().out
    for words in ("prefill 12", "decode at 4", "decode at 9", "peak memory", "thread cpu", "1 thread", "load"):
        assert words in out
    assert [job.model for job in light] == [path, path] * 2
    assert {(job.prefill, job.batch, job.threads) for job in light} == {(12, 1, 1)}


def test_rates_are_tokens_of_all_rows_by_seconds(light: list[memory.Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """One model takes 2 s and 0.5 s for everything, the other 1 s and 0.25 s."""

    def took(contender: Contender, *_: object) -> Stopwatch:
        watch = Stopwatch()
        watch.cpu, watch.wall = (2.0, 0.5) if contender.model == first else (1.0, 0.25)
        return watch

    first, second = tiny_onnx("llama"), tiny_onnx("qwen2")
    monkeypatch.setattr(Contender, "prefill", took)
    monkeypatch.setattr(Contender, "decode", took)
    options: dict[str, Any] = {"prefill": 12, "decode": 3, "context": [5], "batch": 4, "turns": 2}
    a, b = graphrot.bench(first, second, **options).models
    assert (a.speeds.prefill.figure.median, b.speeds.prefill.figure.median) == (24.0, 48.0)
    assert (a.speeds.decode[5].figure.median, b.speeds.decode[5].ratio.median) == (6.0, 2.0)
    assert a.wall.prefill.figure.median == 96.0
    assert a.peak_rss is not None and a.peak_rss.figure.median == 102.0
    result = graphrot.bench(first, threads=2, **options)
    assert result.settings.clock == "wall"
    assert result.models[0].speeds.prefill.figure.median == 96.0
    assert "wall time" in result.notes[0]


@pytest.mark.parametrize("model", ["plain", "genai"])
@pytest.mark.parametrize("batch", [1, 4])
def test_decoding_goes_on_with_the_cache(model: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is the model's own, of the length that was asked for, in every row; each step makes it longer."""
    path = tiny_onnx("llama") if model == "plain" else built("llama", "int4")
    contender = Contender(path, threads=1, batch=batch)
    tokens = np.random.default_rng(1).integers(0, contender.vocabulary, 300)  # filled in two pieces
    cache = contender.fill(tokens[:200])
    caches = [cache]
    bind = contender.decoder.bind
    monkeypatch.setattr(
        contender.decoder, "bind", lambda tokens, cache=None: (caches.append(cache), bind(tokens, cache))[1]
    )
    assert contender.decode([3, 4, 5], cache).wall > 0
    assert [one.length for one in caches[1:]] == [200, 201, 202]
    assert {tuple(value.shape()) for value in caches[-1].tensors} == {(batch, 1, 202, 16)}
    whole, _ = contender.decoder.run(tokens[None, :201])
    steps, _ = contender.decoder.run(np.full((batch, 1), tokens[200]), cache)
    assert np.abs(steps - whole[:, -1:]).max() < 2e-2 * np.abs(whole).max()


def test_a_long_context_is_filled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    contender = Contender(tiny_onnx("llama"), threads=1, batch=1)
    sizes: list[int] = []
    bind = contender.decoder.bind
    monkeypatch.setattr(
        contender.decoder, "bind", lambda tokens, cache=None: (sizes.append(tokens.shape[1]), bind(tokens, cache))[1]
    )
    assert contender.fill(np.zeros(300, np.int64)).length == 300
    assert sizes == [256, 44]


def test_a_batch_that_is_fixed(tmp_path: Path) -> None:
    path = _of_batch(2, tmp_path)
    contender = Contender(path, threads=1, batch=2)
    assert {value.shape()[0] for value in contender.fill(np.arange(5)).tensors} == {2}
    with pytest.raises(InputRefused, match="takes a batch of 2 only"):
        Contender(path, threads=1, batch=4)


def test_what_a_folder_holds(tmp_path: Path) -> None:
    assert find_file(tiny_onnx("llama").parent) == (tiny_onnx("llama"), "onnx")
    assert find_file(built("llama", "int4"))[1] == "onnxruntime-genai"
    other = tmp_path / "named"
    other.mkdir()
    shutil.copy(built("llama", "int4") / "model.onnx", other / "decoder.onnx")
    config = json.loads((built("llama", "int4") / "genai_config.json").read_text(encoding="utf-8"))
    config["model"]["decoder"]["filename"] = "decoder.onnx"
    (other / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert find_file(other) == (other / "decoder.onnx", "onnxruntime-genai")
    (other / "graphrot.json").write_text("{}", encoding="utf-8")
    shutil.move(other / "decoder.onnx", other / "model.onnx")
    assert find_file(other) == (other / "model.onnx", "graphrot")


def test_vocabularies_may_differ_and_it_is_said(light: list[memory.Job], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([131, 100] * 9)
    monkeypatch.setattr(Contender, "vocabulary", property(lambda _: next(sizes)))
    drawn: list[np.ndarray] = []

    def prefill(_: Contender, tokens: np.ndarray) -> Stopwatch:
        drawn.append(tokens)
        return Stopwatch()

    monkeypatch.setattr(Contender, "prefill", prefill)
    path = tiny_onnx("llama")
    notes = graphrot.bench(path, path, prefill=900, decode=1, context=[1], turns=1).notes
    assert notes == ("vocabularies differ (100, 131): tokens are drawn below 100",)
    assert max(int(tokens.max()) for tokens in drawn) == 99
    assert all(np.array_equal(tokens, drawn[0]) for tokens in drawn)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context", "many"], "no list of lengths"),
        (["--context", "8,0"], "contexts are 8, 0"),
        (["--context", "8,8"], "contexts are 8, 8"),
    ],
)
def test_usage(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "no-such-model", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and "do:" in err


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "genai_config.json").write_text("{}", encoding="utf-8")
    encoder = tmp_path / "encoder.onnx"
    model = onnx.load(_without_cache(tmp_path))
    model.graph.input[0].name = model.graph.node[0].input[1] = "pixels"
    onnx.save(model, encoder)
    cases = [
        (tmp_path / "absent", "There is no such model"),
        (tmp_path / "empty", "it has no model.onnx"),
        (tmp_path / "odd", "names no decoder"),
        (tmp_path / "x.onnx", "The model has no KV cache"),
        (encoder, "not those of a decoder"),
    ]
    for path, words in cases:
        assert run(["bench", str(path), *SMALL]) == 3
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("input refused: ") and words in err and "do:" in err


def test_a_length_that_the_model_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 has a table of 64 positions."""
    assert run(["bench", str(tiny_onnx("gpt2")), "--prefill", "8", "--decode", "2", "--context", "63"]) == 3
    assert "1 x 1 tokens after 64" in capsys.readouterr().err
    with pytest.raises(UsageError, match="prefill is 0"):
        graphrot.bench(tiny_onnx("gpt2"), prefill=0)
    with pytest.raises(UsageError, match="No model is given"):
        graphrot.bench()


@pytest.mark.parametrize(("code", "error"), [(1, InputRefused), (-9, EnvironmentProblem)])
def test_a_process_that_fails(code: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], code, "", "it broke")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(error, match=r"in a process of its own|ended by the system"):
        memory.peak_rss_bytes(memory.Job("m", 4, 1, 1))


def test_no_memory_figure_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "peak_rss_bytes", lambda _: None)
    path = tiny_onnx("llama")
    result = graphrot.bench(path, prefill=4, decode=1, context=[4], turns=1)
    assert result.models[0].to_dict()["peak_rss_bytes"] is None
    assert result.notes == ("this system does not tell the peak memory of a process",)


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    package = tmp_path / "graphrot"
    package.mkdir()
    monkeypatch.setattr(machine.graphrot.errors, "__file__", str(package / "errors.py"))
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert machine.commit() == head.stdout.strip()
    (package / "errors.py").write_text("", encoding="utf-8")
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    assert machine.commit() == f"{head.stdout.strip()}-dirty"
    monkeypatch.setattr(machine.graphrot.errors, "__file__", str(package / "deeper" / "errors.py"))
    assert machine.commit() is None
