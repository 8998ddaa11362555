"""One HTML page about a conversion: nothing is loaded from elsewhere, and every figure says where it is from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from graphrot.report import charts
from graphrot.report.diagram import LayerDiagram
from graphrot.report.heat import HeatMap, heat_maps, surface
from graphrot.report.measured import Measured
from graphrot.report.trace import NONE, Trace, key

_ROWS = 60
"""Refusals that the page lists; the others are counted."""
_KINDS = {
    "R1": "the residual stream",
    "R2": "values, head by head, up to the output projection",
    "R3": "queries and keys, behind their rotary positions",
    "R4": "the input of the down projection",
    "O": "all heads together, in front of the output projection",
}
_CALIBRATION = {
    "default": "the help topics of Python",
    "text": "the text",
    "tokens": "the tokens of",
    "dataset": "the data set",
    "self": "the model's own samples",
}
_BASES = {
    "source": "The plan was replayed on the source, and the rotated float model ran: both sides are exact.",
    "model": "The written model ran; before is its own activations, rotated back by the plan's matrices. The gains of "
    "norms, which are part of the weights now, are left out.",
    "none": "The written model ran as it is.",
}


@dataclass(frozen=True)
class _Kind:
    """The rotations of one kind, in a row."""

    name: str
    words: str
    path: str
    example: str
    placement: str
    matrix: str
    producer: str
    consumer: str


def build_page(record: Mapping[str, Any], measured: Measured | None, *, folder: str, without: str) -> str:
    """The page.

    Args:
        record: the content of ``graphrot.json``, of this version or an earlier one.
        measured: the activations; None: they could not be measured.
        folder: what the user calls the model.
        without: why there are no activations.
    """
    content = {**_whole(record), **({} if measured is None else {"measured": measured.record()})}
    maps = [] if measured is None else heat_maps(measured)
    if measured is not None:
        content["measured"] |= _pictured(measured, maps)
    trace = Trace(content)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_resource("page.html.j2"))
    entries = content["quantized"]
    return template.render(
        r=content,
        trace=trace,
        key=key,
        dash=NONE,
        style=Markup(_resource("style.css")),
        title=f"{content['source']['name']}, {content['recipe'].get('name', 'converted')}",
        lead=_lead(content),
        folder=folder,
        parts=_parts(content),
        kinds=_kinds(content),
        notes=_notes(content),
        chosen=_chosen(content),
        most=_ROWS,
        perplexity=_perplexity(content),
        outlier_kinds=sorted({entry["kind"] for entry in content["outliers"]}, key=lambda kind: (kind == "O", kind)),
        compared=any(entry.get("error_without_rotation") is not None for entry in entries),
        calibration=_CALIBRATION,
        charts=_charts(content),
        heat=[_styled(one) for one in maps],
        surfaces=_surfaces(measured),
        rotated=measured is not None and measured.rotated,
        basis="" if measured is None else _BASES[measured.basis],
        without=without,
        embedded=Markup(json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")),
    )


def _whole(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the parts that earlier versions did not have; without fingerprints, which are for machines."""
    lists: dict[str, Any] = {name: [] for name in ("quantized", "outliers", "evaluations", "choices")}
    content = {**lists, "seconds": {}, "versions": {}, **record}
    for part in (content, content.get("learning") or {}):
        known = part.get("calibration")
        if known:
            part["calibration"] = {name: value for name, value in known.items() if name != "fingerprint"}
    return content


def _resource(name: str) -> str:
    return files("graphrot.report").joinpath(name).read_text(encoding="utf-8")


def _lead(content: Mapping[str, Any]) -> str:
    recipe, said = content["recipe"], []
    weights = recipe.get("weights")
    group = recipe.get("group")
    if weights:
        per = "output channel" if group == "channel" else f"{group} weights"
        said.append(f"weights in {weights} with a scale per {per}")
    else:
        said.append("float weights")
    if recipe.get("activations"):
        said.append(f"activations in {recipe['activations']} per token")
    if recipe.get("kv"):
        said.append(f"a cache in {recipe['kv']}")
    rotations = recipe.get("rotations")
    known = {"hadamard": "Hadamard rotations", "auto": "rotations where measuring found them useful"}
    learned = "learned rotations" if content.get("learning") else f"{rotations} rotations"
    said.append(known.get(str(rotations), learned) if rotations else "no rotation")
    comma = "," if len(said) > 2 else ""
    return f"{said[0][0].upper()}{said[0][1:]}{''.join(f', {part}' for part in said[1:-1])}{comma} and {said[-1]}."


def _parts(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    every = [
        ("accuracy", "Accuracy and size", True),
        ("certificate", "Certificate", True),
        ("rotations", "Rotations", True),
        ("outliers", "Outliers", True),
        ("errors", "Errors", True),
        ("learning", "Learning", bool(content.get("learning"))),
        ("choices", "Choices", bool(content["choices"])),
        ("provenance", "Provenance", True),
    ]
    return [(name, words) for name, words, there in every if there]


def _kinds(content: Mapping[str, Any]) -> list[_Kind]:
    rotations = (content.get("plan") or {}).get("rotations") or []
    rows = []
    for name, words in _KINDS.items():
        members = [(number, entry) for number, entry in enumerate(rotations) if entry["kind"] == name]
        if not members:
            continue
        number, example = members[len(members) // 2]
        placements = dict.fromkeys(entry["placement"] for _, entry in members)
        matrices = dict.fromkeys(entry["matrix"].get("construction", NONE) for _, entry in members)
        rows.append(
            _Kind(
                name,
                words,
                f"plan.rotations[kind={name}]",
                f"plan.rotations[{number}]",
                " and ".join({"merged": "folded into weights", "online": "runs as a transform"}[p] for p in placements),
                ", ".join({"file": "learned"}.get(matrix, matrix) for matrix in matrices),
                next(iter(example["producers"]), ""),
                next(iter(example["consumers"]), ""),
            )
        )
    return rows


def _notes(content: Mapping[str, Any]) -> list[str]:
    """Where the plan remarks something about a matrix; each remark once."""
    rotations = (content.get("plan") or {}).get("rotations") or []
    found = {entry["matrix"]["note"]: n for n, entry in enumerate(rotations) if entry["matrix"].get("note")}
    return [f"plan.rotations[{number}].matrix.note" for number in found.values()]


def _chosen(content: Mapping[str, Any]) -> dict[str, Any]:
    """Places of the choices: those of weights, which are many, and the others; and the grids by their number."""
    places = list(enumerate(content["choices"]))
    grids = [choice["chosen"] for _, choice in places if choice["kind"] == "weight"]
    return {
        "few": [number for number, choice in places if choice["kind"] != "weight"],
        "weights": [number for number, choice in places if choice["kind"] == "weight"],
        "grids": sorted(set(grids), key=lambda grid: (-grids.count(grid), grid)),
    }


def _perplexity(content: Mapping[str, Any]) -> str:
    """The path of the last evaluation with a perplexity."""
    found = [n for n, entry in enumerate(content["evaluations"]) if entry.get("perplexity") is not None]
    return f"evaluations[{found[-1]}]" if found else ""


def _charts(content: Mapping[str, Any]) -> dict[str, Markup]:
    made: dict[str, str] = {"diagram": LayerDiagram(content).markup()}
    if content.get("sizes"):
        made["sizes"] = charts.size_bars(content["sizes"]["source_bytes"], content["sizes"]["model_bytes"])
    if content.get("certificate"):
        made["certificate"] = charts.certificate_chart(content["certificate"])
    if content["outliers"]:
        made["outliers"] = charts.outlier_chart(content["outliers"])
    if content["quantized"]:
        made["errors"] = charts.error_chart(content["quantized"])
    learned = content.get("learning")
    if learned and (learned["curve"] or learned["heldout"]):
        made["loss"] = charts.loss_chart(content["learning"])
    return {name: Markup(markup) for name, markup in made.items()}


def _pictured(measured: Measured, maps: Sequence[HeatMap]) -> dict[str, Any]:
    """The figures that stand beside the pictures."""
    surfaces = [
        {
            "kind": kind,
            "tensor": found.site.tensor,
            "tokens": len(found.before),
            "channels": found.site.channels,
            "before": float(found.before.max()),
            "after": float(found.after.max()),
        }
        for kind, found in measured.surfaces.items()
    ]
    return {"heat": [one.figures for one in maps], "surfaces": surfaces}


def _styled(one: HeatMap) -> dict[str, Any]:
    pixels = min(360, max(96, one.rows * 5))
    fields = ("kind", "before", "after", "ticks", "words")
    return {**{name: getattr(one, name) for name in fields}, "pixels": pixels}


def _surfaces(measured: Measured | None) -> list[dict[str, Any]]:
    if measured is None:
        return []
    return [
        {
            "kind": kind,
            "tensor": found.site.tensor,
            "before": Markup(surface(found, rotated=False)),
            "after": Markup(surface(found, rotated=True)),
        }
        for kind, found in measured.surfaces.items()
    ]
