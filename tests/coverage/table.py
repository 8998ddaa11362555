"""``docs/coverage.md``, made from what the rows measure.

``python -m tests.coverage.table`` writes it; the tests fail where a line of it is not what they measure.
"""

from __future__ import annotations

from pathlib import Path

from graphrot.analysis.types import places
from graphrot.plan.means import mean_refusal
from graphrot.report.inspection import inspection
from tests.coverage.measured import Measured, measured
from tests.coverage.rows import ROWS, Row

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"

_TEXT = """# What is found in which graph

Rotations are found by structure: no family, no name of a node or tensor decides anything. This table is made from
tiny models with random weights, gains and biases. Before each is analysed, its names are exchanged for misleading
ones, and its nodes and initializers are put in another order. Then all sites are rotated, once by code of the tests
with random dense matrices and once by graphrot's own passes, and the outputs are compared.

- A number counts the sites, each with a matrix of its own; *merged*: the rotation goes into the weights and costs
  nothing at run time; *online*: a Hadamard transform stands in the graph. (R3 is merged where no rotary positions
  stand between the linears and the product of q and k. O, the transform across heads in front of the attention's
  output projection, is an option: `--only R1,R2,R3,R4,O`.)
- R1 is *online* where the residual stream begins behind something that is no lookup or linear, or ends in something
  that reads it as it is (states that go out): one transform stands there, however deep the model is. Where norms
  keep a gain behind every branch, or stand in the stream itself, there would be transforms in every layer, and R1
  is taken with `--online-r1` alone.
- *refused by* names the (first) node that stands in the way, by operator and output, and why.
- *exact*: the largest relative error that the tests allow. It is 1e-12, in float64, wherever ONNX Runtime has
  float64 kernels for all operators of the graph, and 2e-5, in float32, elsewhere.

`graphrot inspect` shows the same of your file. `python -m tests.coverage.table` writes this page anew.

"""
_HEAD = "| graph | what is special | exporter, opset | R1 | R2 | R3 | R4 | O | exact |\n" + "|---" * 9 + "|\n"
_KINDS = ("R1", "R2", "R3", "R4", "O")


def line(row: Row) -> str:
    """The row as it is measured."""
    found = measured(row)
    cells = [row.name, row.what, f"{row.road}, {row.opset}", *(_cell(found, kind, row) for kind in _KINDS)]
    return "| " + " | ".join([*cells, "1e-12" if row.double else "2e-5"]) + " |\n"


def _cell(found: Measured, kind: str, row: Row) -> str:
    counts = [(place, found.sites()[kind + mark]) for place, mark in (("merged", ""), ("online", "~"))]
    parts = [f"{number} {place}" for place, number in counts if number]
    refused = [refusal for refusal in inspection(found.facts).refused if refusal.kind == kind]
    for refusal in refused[:1]:
        node = found.names.get(refusal.node, refusal.node)
        more = f" (and at {len(refused) - 1} more)" if len(refused) > 1 else ""
        parts.append(f"refused by {refusal.op} `{node}`: {refusal.reason}{more}")
    optional = [s for s in found.facts.spaces if s.kind == kind and s.optional]
    options = [len(places(s)) for s in optional if mean_refusal(s) is None]
    if options:
        parts.append(f"{len(options)} online with `--online-r1` ({sum(options)} transforms)")
    return "; ".join(parts) or "none"


if __name__ == "__main__":
    DOCUMENT.write_text(_TEXT + _HEAD + "".join(line(row) for row in ROWS), encoding="utf-8")
