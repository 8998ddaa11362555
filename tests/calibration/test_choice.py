"""The words of --calibration."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphrot.calibration.choice import Choice, DatasetChoice, choose
from graphrot.errors import InputRefused, UsageError


@pytest.mark.parametrize(
    ("spec", "choice"),
    [
        (None, Choice("default", "pydoc_data.topics")),
        ("folder/words.txt", Choice("text", "words.txt", file=Path("folder/words.txt"))),
        ("words.json", Choice("text", "words.json", file=Path("words.json"))),
        ("a/ids.npy", Choice("tokens", "ids.npy", file=Path("a/ids.npy"))),
        ("ids.NPZ", Choice("tokens", "ids.NPZ", file=Path("ids.NPZ"))),
        ("ids.tokens.json", Choice("tokens", "ids.tokens.json", file=Path("ids.tokens.json"))),
        ("self", Choice("self", "self:0")),
        ("self:07", Choice("self", "self:7", seed=7)),
        ("./self", Choice("text", "self", file=Path("self"))),
        (Path("self"), Choice("text", "self", file=Path("self"))),
        ("selfish.txt", Choice("text", "selfish.txt", file=Path("selfish.txt"))),
    ],
)
def test_what_is_meant(spec: str | Path | None, choice: Choice) -> None:
    assert choose(spec) == choice
    assert choice.needs_tokenizer == (choice.kind in ("default", "text", "dataset"))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("wikitext", DatasetChoice("wikitext", None, "train", None)),
        ("owner/name", DatasetChoice("owner/name", None, "train", None)),
        ("owner/name/config-v1:validation", DatasetChoice("owner/name", "config-v1", "validation", None)),
        ("owner/name:train[:1%]:story", DatasetChoice("owner/name", None, "train[:1%]", "story")),
        ("owner/name:train+validation:a:b", DatasetChoice("owner/name", None, "train+validation", "a:b")),
        ("owner/name:a[:2]+b[3:]:c", DatasetChoice("owner/name", None, "a[:2]+b[3:]", "c")),
        ("owner/name:contest", DatasetChoice("owner/name", None, "contest", None)),
    ],
)
def test_data_sets(words: str, meant: DatasetChoice) -> None:
    choice = choose(f"datasets:{words}")
    assert choice.dataset == meant and choice.kind == "dataset" and choice.name == f"datasets:{words}"


def test_a_folder_is_the_longest_beginning_that_is_one(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for rest, config in (("", None), ("/c", "c")):
        assert choose(f"datasets:{tmp_path}/a/b{rest}").dataset == DatasetChoice(
            f"{tmp_path}/a/b", config, "train", None
        )


@pytest.mark.parametrize("split", ["test", "test[:10%]", "Test", "evaluation", "train[:5]+test[5:]", "my-test"])
def test_splits_to_measure_on_are_refused(split: str) -> None:
    with pytest.raises(InputRefused, match="kept for measuring") as caught:
        choose(f"datasets:owner/name:{split}")
    assert repr(split) in str(caught.value) and "validation" in str(caught.value)


@pytest.mark.parametrize("spec", ["datasets:", "datasets::train", "datasets:a:", "datasets:a:[1]", "self:", "self:-1"])
def test_words_that_mean_nothing(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose(spec)
    assert spec in str(caught.value)
