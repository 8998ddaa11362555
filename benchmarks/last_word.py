"""Last words of paragraphs, guessed by several models: accuracy, perplexity, divergence and first choices in one table.

    python benchmarks/last_word.py FLOAT.onnx UNROTATED ROTATED --tokenizer DIR --text TEST.txt

The first model is the reference of the others. Items are made from the text, in the way of LAMBADA (Paperno et al.,
2016): a paragraph without its last word, which is one plain word that the paragraph has had before, and which the model
has to name. They are a local file, and lm-eval runs them. Perplexity, divergence (KL, nats a token) and equal first
choices are those of ``graphrot eval`` on windows of 1024 tokens from the start of the text.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

import graphrot

TASK = "last_word"
_LEAST, _MOST = 40, 120
"""Words of a paragraph: the least, and how many of its last ones are shown."""
_WORD = re.compile(r"[A-Za-z]{3,}")
_COLUMNS = ("accuracy", "+-", "perplexity", "KL", "top-1")


def last_words(text: str, count: int) -> list[dict[str, str]]:
    """Items ``{context, word}``, evenly from the whole text; fewer if there are fewer."""
    found = []
    for paragraph in text.split("\n"):
        words = paragraph.split()
        word = words[-1].removesuffix(".") if len(words) >= _LEAST else ""
        context = " ".join(words[-_MOST:-1])
        if _WORD.fullmatch(word) and word.lower() in re.findall(r"\w+", context.lower()):
            found.append({"context": context, "word": word})
    step = max(1.0, len(found) / count)
    return [found[int(number * step)] for number in range(min(count, len(found)))]


def write_task(items: list[dict[str, str]], folder: Path) -> Path:
    """Write the items and a task of lm-eval's form that reads them; returns the task."""
    data = (folder / f"{TASK}.jsonl").absolute()
    data.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(data.parent / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": " {{word}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
        "metadata": {"version": 1.0},
    }
    file = folder / f"{TASK}.yaml"
    file.write_text(yaml.safe_dump(task, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders or .onnx files; the first is the reference")
    parser.add_argument("--text", type=Path, required=True, help="items and windows are taken from it")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json, for models that have none beside")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    items = last_words(options.text.read_text(encoding="utf-8"), options.items)
    if not items:
        parser.error(f"{options.text} has no paragraph of {_LEAST} words that ends in a word it has had before")
    rows: list[dict[str, Any]] = []
    print(f"{len(items)} items; {options.windows} windows of {options.window} tokens\n")
    print(" ".join(["model".ljust(32), *(column.rjust(10) for column in _COLUMNS)]))
    with tempfile.TemporaryDirectory(prefix="graphrot-last-word-") as folder:
        task = write_task(items, Path(folder))
        for model in options.models:
            found = graphrot.evaluate(
                model,
                text=options.text,
                window=options.window,
                windows=options.windows,
                tokenizer=options.tokenizer,
                reference=None if model == options.models[0] else options.models[0],
                tasks=[str(task)],
            )
            rows.append({"model": str(model), **found.to_dict()})
            print(_row(rows[-1]), flush=True)
    if options.json:
        record = {"items": len(items), "rows": rows, "graphrot": graphrot.__version__}
        options.json.write_text(json.dumps(record, indent=1))


def _row(row: dict[str, Any]) -> str:
    figures = row["tasks"][TASK]
    cells = [
        f"{figures['acc']:.1%}",
        f"{figures.get('acc_stderr', 0.0):.1%}",
        f"{row['perplexity']:.2f}",
        f"{row['kl']:.4f}" if "kl" in row else "-",
        f"{row['top1']:.1%}" if "top1" in row else "-",
    ]
    model = Path(row["model"])
    name = model.absolute().parent.name if model.name == "model.onnx" else model.name
    return " ".join([name[:32].ljust(32), *(cell.rjust(10) for cell in cells)])


if __name__ == "__main__":
    main()
