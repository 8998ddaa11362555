"""Every graph of the table: its sites are all found, exact on two roads, and told in the docs as they are."""

from __future__ import annotations

import pytest

from graphrot.analysis.types import Facts
from graphrot.plan.build import PlanRequest, build_plan
from tests.coverage.measured import error_of_facts, error_of_passes, measured
from tests.coverage.rows import ROWS, Row
from tests.coverage.table import DOCUMENT, line

DOUBLE, SINGLE = 1e-12, 2e-5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    found = measured(row)
    assert " ".join(f"{kind}:{count}" for kind, count in sorted(found.sites().items())) == row.sites
    assert tuple(f"{r.kind} {r.op}" for r in found.facts.refused) == row.refused
    tolerance = DOUBLE if row.double else SINGLE
    assert error_of_facts(row) <= tolerance
    assert error_of_passes(row) <= tolerance
    assert no_site_is_lost_or_bound_to_a_mean(found.facts)
    assert line(row) in DOCUMENT.read_text(encoding="utf-8"), "run python -m tests.coverage.table"


def no_site_is_lost_or_bound_to_a_mean(facts: Facts) -> bool:
    """The plan takes every site, LayerNorm or not, and its matrices are plain Hadamard ones."""
    plan = build_plan(facts, PlanRequest(("R1", "R2", "R3", "R4", "O"), "hadamard"), source_hash="0")
    folded = {fold.space for fold in plan.mean_folds}
    return (
        [r.space.id for r in plan.rotations] == [s.id for s in facts.spaces if s.kind != "other" and not s.optional]
        and not any(r.matrix.mean_preserving for r in plan.rotations)
        and folded == {r.space.id for r in plan.rotations if r.space.mean_preserving}
    )


def test_the_table_has_these_rows_and_no_others() -> None:
    names = [text.split(" | ")[0].removeprefix("| ") for text in DOCUMENT.read_text(encoding="utf-8").splitlines()]
    start = names.index("|---|---|---|---|---|---|---|---|---|")
    assert names[start + 1 :] == [row.name for row in ROWS]
    assert len(ROWS) >= 26
