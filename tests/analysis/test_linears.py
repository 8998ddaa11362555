"""Linears, embeddings, the head, and whether it is tied."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.analysis import tied
from graphrot.analysis.analyze import analyze
from tests.analysis.graphs import FFN, HIDDEN, INT64, VOCAB, Builder, decoder, rms_norm
from tests.exported import tiny_onnx


def test_every_linear_is_listed_in_order() -> None:
    model, _ = decoder(bias=True)
    facts = analyze(model)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    weights = [n.outputs[0].name for n in products if n.inputs[1] is not None and n.inputs[1].is_initializer()]
    assert [linear.node for linear in facts.linears] == weights
    assert [linear.bias is not None for linear in facts.linears] == [True] * 4 + [False] * 4
    assert [(linear.in_features, linear.out_features) for linear in facts.linears][-3:] == [
        (HIDDEN, FFN), (FFN, HIDDEN), (HIDDEN, VOCAB),
    ]  # fmt: skip
    assert [linear.is_head for linear in facts.linears] == [False] * 7 + [True]


@pytest.mark.parametrize(("name", "count"), [("llama", 15), ("phi3", 9), ("gpt2", 9)])
def test_linears_of_tiny_decoders(name: str, count: int) -> None:
    facts = analyze(ir.load(tiny_onnx(name)))
    assert len(facts.linears) == count
    (head,) = [linear for linear in facts.linears if linear.is_head]
    assert head is facts.linears[-1]
    (embedding,) = facts.embeddings
    assert (embedding.rows, embedding.dim) == (head.out_features, head.in_features)
    assert (facts.tied is not None) == (name == "gpt2")


Ending = Callable[[Builder, str], str]


def _softcap(b: Builder, y: str) -> str:
    return b.op("Mul", b.op("Tanh", b.op("Div", y, b.constant(30.0))), b.constant(30.0))


def _last_token(b: Builder, y: str) -> str:
    return b.op("Slice", b.op("Cast", y, to=1), b.ints(-1), b.ints(9), b.ints(1))


ENDINGS: dict[str, tuple[Ending, bool]] = {
    "bias": (lambda b, y: b.op("Add", y, b.vector(VOCAB)), True),
    "softcap": (_softcap, True),
    "last token": (_last_token, True),
    "softmax": (lambda b, y: b.op("Softmax", y, axis=-1), False),
    "narrowed": (lambda b, y: b.op("Slice", y, b.ints(0), b.ints(5), b.ints(2)), False),
}


def _with_head(
    ending: Ending, make: Callable[[Builder, str, np.ndarray], str], table: np.ndarray | None = None
) -> ir.Model:
    b = Builder()
    rows = b.rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32) if table is None else table
    name = b.constant(rows)
    x = b.op("Gather", name, b.input("ids", ["b", "s"], INT64))
    x = b.op(
        "Add", x, b.op("Gather", b.constant(b.rng.standard_normal((64, HIDDEN))), b.input("at", ["b", "s"], INT64))
    )
    h = rms_norm(b, x)
    y = b.op("MatMul", h, make(b, name, rows))
    b.result(ending(b, y), "y")
    b.output("y", ["b", None, None])
    return b.model()


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_head_is_what_reaches_the_output(ending: str) -> None:
    end, expected = ENDINGS[ending]
    facts = analyze(_with_head(end, lambda b, name, rows: b.matrix(HIDDEN, VOCAB)))
    assert [linear.is_head for linear in facts.linears] == [expected]


def test_the_token_table_has_as_many_rows_as_the_head_has_outputs() -> None:
    facts = analyze(_with_head(ENDINGS["bias"][0], lambda b, name, rows: b.matrix(HIDDEN, VOCAB)))
    assert [e.rows for e in facts.embeddings] == [VOCAB]
    without_head = analyze(_with_head(ENDINGS["softmax"][0], lambda b, name, rows: b.matrix(HIDDEN, VOCAB)))
    assert [e.rows for e in without_head.embeddings] == [64]


def _changed(rows: np.ndarray) -> np.ndarray:
    other = rows.T.copy()
    other[-1, -1] += 1e-3
    return other


HEADS: dict[str, tuple[Callable[[Builder, str, np.ndarray], str], bool]] = {
    "same tensor": (lambda b, name, rows: b.op("Transpose", name, perm=[1, 0]), True),
    "equal numbers, other layout": (lambda b, name, rows: b.constant(rows.T.copy()), True),
    "equal numbers behind a transpose": (lambda b, name, rows: b.op("Transpose", b.constant(rows.copy())), True),
    "behind a cast": (lambda b, name, rows: b.op("Transpose", b.op("Cast", b.op("Identity", name), to=1)), True),
    "one number differs": (lambda b, name, rows: b.constant(_changed(rows)), False),
    "its own": (lambda b, name, rows: b.matrix(HIDDEN, VOCAB), False),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("block", [5, 2048])
def test_tied_heads(head: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied, "_ROWS", block)
    make, expected = HEADS[head]
    facts = analyze(_with_head(lambda b, y: b.op("Identity", y), make))
    assert (facts.tied is not None) == expected
    if facts.tied is not None:
        assert facts.tied.embedding == facts.embeddings[0] and facts.tied.head == facts.linears[-1]


def test_a_square_head_that_is_the_table_turned_round_is_not_tied() -> None:
    """As many tokens as channels: the table itself as ``[K, N]`` weight is not its transpose."""
    table = np.random.default_rng(1).standard_normal((HIDDEN, HIDDEN)).astype(np.float32)
    facts = analyze(_with_head(lambda b, y: b.op("Identity", y), lambda b, name, rows: name, table))
    assert [linear.is_head for linear in facts.linears] == [True] and facts.tied is None
