"""Tasks of lm-eval on our decoders, beside lm-eval's own model on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerFast

from graphrot.errors import EnvironmentProblem, InputRefused, UsageError
from graphrot.evaluate import tasks
from graphrot.evaluate.harness import HarnessModel
from graphrot.evaluate.session import open_decoder
from graphrot.evaluate.tasks import check_tasks, run_tasks
from graphrot.evaluate.text import Tokenizer
from graphrot.progress import silent
from tests.exported import tiny_onnx, write_tokenizer
from tests.tiny import tiny

DOCS = [
    {"context": "The cat sat on the", "word": "mat", "choices": ["mat", "dog", "sun"], "answer": 0},
    {"context": "Two and two are", "word": "four", "choices": ["five", "four"], "answer": 1},
    {"context": "It rained all", "word": "day", "choices": ["x", "y", "z"], "answer": 2},
]
TASKS: dict[str, dict[str, Any]] = {
    "last": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": " {{word}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    },
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}} {{word}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": ["q"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tokenizer(folder)
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS), encoding="utf-8")
    data = {"data_files": {"test": str(folder / "docs.jsonl")}, "cache_dir": str(folder / "cache")}
    shared = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "metadata": {"version": 1}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **shared, **task}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(place: Path) -> HarnessModel:
    return HarnessModel(open_decoder(tiny_onnx("llama"), threads=1), Tokenizer(place))


def test_the_same_figures_as_lm_evals_own_model(
    place: Path, model: HarnessModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(place / f"{name}.yaml") for name in TASKS]
    check_tasks(files)
    ours = run_tasks(model, files, limit=None, progress=silent)
    assert capsys.readouterr().out == "", "stdout belongs to --json"
    words = PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    reference = HFLM(pretrained=tiny("llama"), tokenizer=words, batch_size=1, max_length=1024, device="cpu")
    monkeypatch.setattr(tasks, "_adapter", lambda _: reference)
    theirs = run_tasks(model, files, limit=None, progress=silent)
    assert set(ours) == set(theirs) == set(TASKS)
    for name, figures in theirs.items():
        assert ours[name] == pytest.approx(figures, rel=1e-3), name
    assert set(ours["last"]) == {"acc", "acc_stderr", "perplexity"}
    assert ours["last"]["perplexity"] > 100 and ours["whole"]["word_perplexity"] > 100


def test_a_limit(place: Path, model: HarnessModel) -> None:
    one = run_tasks(model, [str(place / "last.yaml")], limit=1, progress=silent)["last"]
    both = run_tasks(model, [str(place / "last.yaml")], limit=2, progress=silent)["last"]
    assert one["perplexity"] != both["perplexity"]


def test_standard_errors() -> None:
    """Those of a mean, ``std / sqrt(n)``; what is no mean of its items has none."""
    metrics = {"alias": "t", "acc,none": 0.75, "acc_stderr,none": "N/A", "f1,strict": 0.5, "sample_len": 4}
    samples = [{"acc": hit, "filter": "none", "f1": 1.0} for hit in (1, 1, 1, 0)]
    found = tasks._figures(metrics, samples)
    assert found == {"acc": 0.75, "acc_stderr": pytest.approx(0.25), "f1,strict": 0.5}
    strict = tasks._figures({"f1,strict": 0.5}, [{"f1": value, "filter": "strict"} for value in (0.0, 1.0)])
    assert strict == {"f1,strict": 0.5, "f1_stderr,strict": pytest.approx(0.5)}


def test_tasks_that_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in ([], ["a.yaml", ""]):
        with pytest.raises(UsageError, match="A task has no name"):
            check_tasks(names)
    with pytest.raises(InputRefused, match="no such task file"):
        check_tasks([str(place / "nowhere.yaml")])
    monkeypatch.setattr(tasks, "_manager", lambda _: type("Known", (), {"all_tasks": ["known"]}))
    check_tasks(["known"])
    with pytest.raises(UsageError, match="lm-eval knows no such task") as caught:
        check_tasks(["known", "unknown"])
    assert "unknown" in str(caught.value)
    monkeypatch.setattr(tasks, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem, match="need the package 'lm-eval'") as missing:
        check_tasks(["known"])
    assert 'pip install "graphrot[eval]"' in str(missing.value)


@pytest.mark.parametrize("content", ["task: [", "task: t\ndataset_path: json\n", "a: b\n"])
def test_files_that_are_no_tasks(content: str, tmp_path: Path, model: HarnessModel) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InputRefused, match="A task cannot be run") as caught:
        run_tasks(model, [str(file)], limit=None, progress=silent)
    assert str(file) in str(caught.value)


def test_a_data_set_out_of_reach(place: Path, model: HarnessModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**_: object) -> None:
        raise ConnectionError("no way to the hub")

    monkeypatch.setattr("lm_eval.simple_evaluate", offline)
    with pytest.raises(EnvironmentProblem, match="cannot be reached"):
        run_tasks(model, [str(place / "last.yaml")], limit=None, progress=silent)
