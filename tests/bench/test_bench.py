"""``graphrot bench`` on tiny decoders: what it prints, that the work is real, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
from tests.evaluate.decoders import KINDS, KV_HEADS, Kind, decoder
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
        *("clock", "models", "notes", "provider"),
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
            *("peak_rss_bytes", "wall", "cache_in_place", "cache_bytes", "decode_peak_rss_bytes"),
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
        assert entry["cache_in_place"] == (entry["kind"] == "onnxruntime-genai")
        assert entry["cache_bytes"] == {str(tokens): tokens * 2 * 2 * 16 * 4 for tokens in (4, 9)}
        assert list(entry["decode_peak_rss_bytes"]) == ["4", "9"]
        assert min(entry["decode_peak_rss_bytes"].values()) > 20e6
    assert content["models"][0]["prefill_tokens_per_s"]["ratio"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert "runs in plain ONNX Runtime" in err
    assert content["notes"] == [
        f"{first}: copies its cache with every token; it takes lengths from its shape",
        f"{second}: runs in plain ONNX Runtime, like the others",
    ]


def test_the_table_names_the_models(light: list[memory.Job], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_onnx("llama"))
    assert run(["bench", path, path, *SMALL]) == 0
    out = capsys.readouterr().out
    for words in ("prefill 12", "decode at 4", "decode at 9", "peak memory", "thread cpu", "1 thread", "load"):
        assert words in out
    for words in ("cache at 4", "cache at 9", "memory at 9"):
        assert words in " ".join(out.replace("\u2502", " ").split())
    assert [job.model for job in light] == [path] * 8
    assert {(job.prefill, job.batch, job.threads) for job in light} == {(12, 1, 1)}
    assert [job.context for job in light] == [None] * 4 + [4, 9] * 2


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
def test_decoding_goes_on_behind_the_cache(model: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has the length that was asked for, in every row; each step adds a token, in place where that goes."""
    path = tiny_onnx("llama") if model == "plain" else built("llama", "int4")
    contender = Contender(path, threads=1, batch=batch)
    cache = contender.fill(200, 3)
    caches = [cache]
    bind = contender.decoder.bind
    monkeypatch.setattr(
        contender.decoder, "bind", lambda tokens, cache=None: (caches.append(cache), bind(tokens, cache))[1]
    )
    assert contender.decode([3, 4, 5], cache).wall > 0
    assert [one.length for one in caches[1:]] == [200, 201, 202]
    assert contender.in_place == (model == "genai")
    tokens = 203 if contender.in_place else 202
    assert {tuple(value.shape()) for value in caches[-1].tensors} == {(batch, 1, tokens, 16)}
    same = {one.data_ptr() for one in caches[-1].tensors} == {one.data_ptr() for one in cache.tensors}
    assert same == contender.in_place
    assert contender.cache_bytes(200) == batch * 200 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_contents_are_random_rows_of_the_layout(kind: Kind, tmp_path: Path) -> None:
    """All slots hold numbers as the model stores them; the token behind them sees what they say."""
    contender = Contender(decoder(tmp_path, kind), threads=1, batch=2)
    cache = contender.fill(150, 5)
    arrays = [value.numpy() for value in cache.tensors]
    assert {array.shape for array in arrays} == {(2, KV_HEADS, 155, arrays[0].shape[3])}
    assert all(array.reshape(2 * KV_HEADS, 155, -1).any(axis=(0, 2)).all() for array in arrays)
    assert len(np.unique(arrays[0][..., :8])) > 12
    if kind.startswith("rows"):
        scales = np.ascontiguousarray(arrays[0][..., -4:]).view("<f2")
        assert np.isfinite(scales).all() and (scales[..., 0] > 0).all()
    logits, _ = contender.decoder.run(np.zeros((2, 1), np.int64), cache)
    empty, _ = contender.decoder.run(np.zeros((2, 1), np.int64))
    assert np.isfinite(logits).all() and np.abs(logits - empty).max() > 0.1


def test_a_batch_that_is_fixed(tmp_path: Path) -> None:
    path = _of_batch(2, tmp_path)
    contender = Contender(path, threads=1, batch=2)
    assert {value.shape()[0] for value in contender.fill(5, 1).tensors} == {2}
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


def test_no_length_that_the_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 has a table of 64 positions."""
    assert run(["bench", str(tiny_onnx("gpt2")), "--prefill", "8", "--decode", "2", "--context", "63,70"]) == 3
    assert "1 x 1 tokens after 64" in capsys.readouterr().err
    with pytest.raises(UsageError, match="prefill is 0"):
        graphrot.bench(tiny_onnx("gpt2"), prefill=0)
    with pytest.raises(UsageError, match="No model is given"):
        graphrot.bench()


def test_a_length_that_one_does_not_take_is_left_out(
    light: list[memory.Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """For that model alone; a ratio to a first that is not there is none."""
    models = [str(tiny_onnx(name)) for name in ("gpt2", "llama")]
    assert run(["bench", *models, "--prefill", "8", "--decode", "2", "--context", "20,63", "--turns", "1"]) == 0
    out, err = capsys.readouterr()
    assert f"left out: {models[0]}: 1 x 1 tokens after 64" in err
    assert " - " in out
    result = graphrot.bench(*models, prefill=8, decode=2, context=[20, 63], turns=1).to_dict()
    gpt2, llama = (model["decode_tokens_per_s"] for model in result["models"])
    assert gpt2["63"] is None and gpt2["20"]["median"] > 0
    assert llama["63"]["ratio"] is None and llama["63"]["median"] > 0 and llama["20"]["ratio"]["median"] > 0
    assert [model["decode_peak_rss_bytes"]["63"] is None for model in result["models"]] == [True, False]
    assert result["models"][0]["cache_bytes"]["63"] > 0


def test_the_chart(light: list[memory.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes say what they are; every figure that there is is drawn, and no display is asked for."""
    from matplotlib.figure import Figure

    monkeypatch.setenv("DISPLAY", "nowhere:9")
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k))[1])
    path = tmp_path / "chart.png"
    result = graphrot.bench(
        tiny_onnx("gpt2"), tiny_onnx("llama"), prefill=8, decode=2, context=[20, 63], turns=1, chart=path
    )
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    speed, cache, rss = drawn[0].axes
    for axes, words in ((speed, "tokens per second"), (cache, "MB"), (rss, "MB")):
        assert words in axes.get_ylabel() and "context" in axes.get_xlabel() and axes.get_title()
        assert [label.get_text() for label in axes.get_xticklabels()] == ["20", "63"]
    lines = [[list(map(float, line.get_xdata())) for line in axes.get_lines()] for axes in (speed, cache, rss)]
    assert lines == [[[20], [20, 63]], [[20, 63], [20, 63]], [[20], [20, 63]]]
    median = result.models[1].speeds.decode[63]
    assert median is not None and float(speed.get_lines()[1].get_ydata()[1]) == median.figure.median
    assert [text.get_text() for text in speed.get_legend().get_texts()] == [
        str(tiny_onnx(n)) for n in ("gpt2", "llama")
    ]


def test_a_chart_that_cannot_be_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(compare, "Contender", never)
    for path in (tmp_path / "absent" / "x.png", tmp_path / "x.svg", tmp_path):
        assert run(["bench", str(tiny_onnx("llama")), "--chart", str(path)]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["bench", str(tiny_onnx("llama")), "--chart", str(tmp_path / "x.png")]) == 4
    with pytest.raises(EnvironmentProblem, match="not installed") as caught:
        graphrot.bench(tiny_onnx("llama"), chart=tmp_path / "x.png")
    assert "graphrot[chart]" in str(caught.value)


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
