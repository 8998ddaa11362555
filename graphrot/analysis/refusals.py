"""Places where a rotation was looked for and is not possible, with the node that says no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.analysis.gains import is_picked, is_scaled, readers_of
from graphrot.analysis.labels import Source
from graphrot.analysis.partition import Partition
from graphrot.analysis.places import reached
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.reasons import change_of
from graphrot.analysis.scope import node_name
from graphrot.analysis.spaces import Spaces
from graphrot.analysis.streams import is_stream
from graphrot.analysis.types import EmbeddingRef, Refusal, RotationSpace, SpaceKind, places
from graphrot.analysis.visit import Consumer


def find_refusals(
    provenance: Provenance, partition: Partition, spaces: Spaces, embeddings: Sequence[EmbeddingRef]
) -> tuple[Refusal, ...]:
    """Explain every embedding, contraction and linear that no space of a named kind covers.

    Returns:
        One refusal per kind and node, in graph order.
    """
    search = _Search(provenance, partition, spaces)
    found: list[Refusal] = []
    streams = [space for space in spaces.spaces if space.kind == "R1"]
    rotated = {use.node for space in streams for use in space.producers}
    for embedding in embeddings:
        if embedding.node not in rotated and (search.read(embedding) or not _leads_in(provenance, embedding, streams)):
            found.append(search.embedding(embedding))
    found.extend(_within(space, search) for space in streams if space.optional)
    for node, record in provenance.all_records():
        for reason, change in record.refused:
            found += [_refusal(kind, _at(node, reason), change) for kind in _INSIDE]
        for contraction in record.contractions:
            if node is not None and not search.covered(contraction.ids):
                found.append(search.contraction(node, contraction.ids, contraction.refused))
        for consumer in record.consumers:
            refusal = search.consumer(consumer)
            if refusal is not None:
                found.append(refusal)
    found += spaces.refused
    found.extend(search.streams(without="R1" not in {*(s.kind for s in spaces.spaces), *(r.kind for r in found)}))
    unique = {(r.kind, r.node): r for r in reversed(found)}
    order = {node.outputs[0].name: index for index, node in enumerate(provenance.scope.nodes)}
    return tuple(sorted(unique.values(), key=lambda r: (order.get(r.node, len(order)), r.kind)))


def _leads_in(provenance: Provenance, embedding: EmbeddingRef, streams: Sequence[RotationSpace]) -> bool:
    """The table's rows become a stream only behind a transform."""
    entries = {use.tensor for space in streams for use in space.online}
    start = [node for node in provenance.scope.nodes if node_name(node) == embedding.node]
    behind = (output.name for node in reached(provenance.scope, start) for output in node.outputs)
    return not entries.isdisjoint(behind)


def _within(space: RotationSpace, search: _Search) -> Refusal:
    """Why R1 is not merged where norms, or other nodes, stand in the stream or behind its branches."""
    count = len(space.online) + len(space.exits)
    place, op = (space.online[0].tensor, space.online[0].op) if space.online else (places(space)[0], space.exits[0].op)
    return Refusal(
        kind=space.kind,
        node=place,
        op=op,
        reason=search.within(place, begins=bool(space.online)),
        change=f"--online-r1 puts {count} transform{'s' * (count > 1)} of size {space.dim} in, for every token",
    )


_BETWEEN = "its gain stays between two parts of the stream, or a branch and the stream, so R1 cannot be merged"
_STAYS = "its gain is not read by constant matmuls alone, so it cannot fold"
_SHIFTS = "its shift is read by weights without a bias that are picked at run time, so its gain cannot fold"
_SCALED = "its shift is read by a product with a factor of its own (alpha), so its gain cannot fold"
_CHANGED = "its shift is scaled or added to before linears read it, so its gain cannot fold"
_JOINS = "what it makes is added to these channels, and no linear makes it"


_INSIDE: tuple[SpaceKind, ...] = ("R2", "R3")
"""What is looked for inside of an attention."""


@dataclass(frozen=True)
class _Culprit:
    node: str
    op: str
    reason: str


class _Search:
    """Looks for the first node that keeps some channels from rotating."""

    def __init__(self, provenance: Provenance, partition: Partition, spaces: Spaces) -> None:
        self._provenance = provenance
        self._partition = partition
        self._covered = np.zeros(partition.total, dtype=bool)
        self._covered[sorted(spaces.covered)] = True
        self._mixed = [ids for _, record in provenance.all_records() for ids in record.mixed]
        self._is_mixed = np.zeros(partition.total, dtype=bool)
        for ids in self._mixed:
            self._is_mixed[ids] = True
        self._gains = {s.node: s for s in provenance.graph.table.sources if s.kind == "gain"}
        self._by_coordinate = np.argsort(partition.coordinate_of, kind="stable")
        self._coordinates = partition.coordinate_of[self._by_coordinate]
        self._blocks = [(node, b) for node, record in provenance.all_records() for b in record.blocks]
        self._first_block = np.full(partition.total, len(self._blocks), dtype=np.int64)
        for number in range(len(self._blocks) - 1, -1, -1):
            self._first_block[self._blocks[number][1].ids] = number
        self._keys = [(node, key) for node, record in provenance.all_records() for key in record.keys]
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *(key.ids for _, key in self._keys)])
        order = np.argsort(ids, kind="stable")
        self._key_ids = ids[order]
        self._key_numbers = np.repeat(np.arange(len(self._keys)), [key.ids.size for _, key in self._keys])[order]
        self._known: dict[bytes, _Culprit | None] = {}
        self._readers = readers_of(provenance)
        self._explained = np.zeros(partition.total, dtype=bool)
        self._explained[sorted(spaces.explained)] = True

    def within(self, place: str, *, begins: bool) -> str:
        """Why a transform would have to stand at the tensor ``place``, where a stream begins, or else ends."""
        gain = next((s for s in self._gains.values() if s.value.name == place), None)
        if gain is None:
            return _JOINS if begins else _BETWEEN
        why = self._why_stays(gain)
        return _BETWEEN if why == _STAYS else why

    def covered(self, ids: np.ndarray) -> bool:
        return bool(self._covered[ids].all())

    def _table(self, embedding: EmbeddingRef) -> Source | None:
        tables = (s for s in self._provenance.graph.table.sources if s.kind == "table")
        return next((s for s in tables if s.value.name == embedding.node), None)

    def read(self, embedding: EmbeddingRef) -> bool:
        """Linears read the table's rows, or sums with them."""
        source = self._table(embedding)
        if source is None:
            return True
        family = self._family(source.ids)
        return any(
            np.isin(consumer.labels.channels, family).any()
            for _, record in self._provenance.all_records()
            for consumer in record.consumers
        )

    def embedding(self, embedding: EmbeddingRef) -> Refusal:
        source = self._table(embedding)
        if source is None:
            culprit = _Culprit(embedding.node, "Gather", "its rows are not followed")
        else:
            culprit = self._culprit(source.ids)
        return _refusal("R1", culprit)

    def contraction(self, node: ir.Node, ids: np.ndarray, refused: str) -> Refusal:
        if refused:
            return _refusal("R3", _at(node, refused))
        return _refusal("R3", self._culprit(ids, toward=node))

    def consumer(self, consumer: Consumer) -> Refusal | None:
        ids = consumer.labels.channels
        if self.covered(ids) or self._explained[ids].all():
            return None
        kind = self._kind(ids)
        if kind == "R4" and consumer.node.op_type == "Conv":
            return None  # a window over activations, and no down projection
        return None if kind == "other" else _refusal(kind, self._culprit(ids, toward=consumer.node))

    def streams(self, *, without: bool) -> list[Refusal]:
        """Residual streams that no space covers and no other refusal explains, the most read one first.

        A stream is a family that linears read, in which results of several nodes are added and that no attention
        mixes or contracts.

        Args:
            without: the graph has no R1 to tell of so far: also what linears read behind gains that stay is a stream,
                and where none begins at a linear or a table, the most read sum of any other nodes.
        """
        coordinates, sources = self._partition.coordinate_of, self._provenance.graph.table.sources
        readers = self._stream_readers(behind_gains=without)
        barred = [c.ids for _, record in self._provenance.all_records() for c in record.contractions]
        inside = {root for ids in (*barred, *self._mixed) for root in np.unique(coordinates[ids]).tolist()}
        owners: dict[int, list[Source]] = {}
        for root, index in np.unique(np.stack([coordinates, self._partition.source_of], 1), axis=0).tolist():
            if root in readers and root not in inside and sources[index].kind != "bias":
                owners.setdefault(root, []).append(sources[index])
        added = sorted(
            (root for root, several in owners.items() if len(several) > 1), key=lambda root: -len(readers[root])
        )
        chosen = [root for root in added if is_stream(owners[root])] or added[:without]
        firsts = {owners[root][0].index: owners[root][0] for root in chosen}.values()
        missing = (s for s in firsts if not self._covered[s.ids].any() and not self._explained[s.ids].all())
        return [_refusal("R1", self._culprit(source.ids)) for source in missing]

    def _stream_readers(self, *, behind_gains: bool) -> dict[int, set[ir.Node]]:
        """The linears that read each coordinate, directly or also behind gains that stay."""
        coordinates = self._partition.coordinate_of
        readers: dict[int, set[ir.Node]] = {}
        for _, record in self._provenance.all_records():
            for consumer in record.consumers:
                for root in np.unique(coordinates[consumer.labels.channels]).tolist():
                    readers.setdefault(root, set()).add(consumer.node)
        for node, block in reversed(self._blocks) if behind_gains else ():
            if node not in self._gains:
                continue
            behind = np.unique(coordinates[self._gains[node].ids]).tolist()
            linears = set().union(*(readers.get(root, set()) for root in behind))
            for root in np.unique(coordinates[block.ids]).tolist() if linears else []:
                readers.setdefault(root, set()).update(linears)
        return readers

    def _kind(self, ids: np.ndarray) -> SpaceKind:
        """What would have been looked for: by where the channels come from."""
        family = self._family(ids)
        kinds = {s.kind for s in self._provenance.graph.table.owners(family)}
        if "table" in kinds:
            return "R1"
        if self._is_mixed[family].any():
            return "R2"
        if kinds - {"bias"} == {"opaque"}:
            return "R4"
        caches = {pair.past for pair in self._provenance.caches}
        owners = self._provenance.graph.table.owners(family)
        stream = len(owners) > 1 and any(s.kind == "input" and s.value.name not in caches for s in owners)
        return "R1" if stream else "other"

    def _family(self, ids: np.ndarray) -> np.ndarray:
        """All channels that edges join with some of these."""
        roots = np.unique(self._partition.coordinate_of[ids])
        return np.asarray(self._by_coordinate[_ranges(self._coordinates, roots)])

    def _culprit(self, ids: np.ndarray, toward: ir.Node | None = None) -> _Culprit:
        """The first of these: 1. a gain that stays in front of these channels; 2. a node, or an end of the
        graph, that wants them alone; 3. a node that splits them; 4. the node that was to be reached."""
        family = np.sort(self._family(ids))
        name = family.tobytes()
        if name not in self._known:
            self._known[name] = self._search(family)
        found = self._known[name]
        if found is not None:
            return found
        start = self._provenance.graph.table.owners(ids)[0]
        return _at(toward or start.node or start.value, "its channels meet in more than one order")

    def _search(self, family: np.ndarray) -> _Culprit | None:
        for source in self._provenance.graph.table.owners(family):
            if source.kind == "gain" and source.node is not None:
                return _at(source.node, self._why_stays(source))
        first = int(self._first_block[family].min(initial=len(self._blocks)))
        if first < len(self._blocks):
            node, block = self._blocks[first]
            return self._reader(self._gains[node]) if node in self._gains else _at(node or block.at, block.reason)
        for number in np.unique(self._key_numbers[_ranges(self._key_ids, family)]).tolist():
            node, key = self._keys[number]
            here = np.isin(key.ids, family, assume_unique=True)
            if np.unique(key.sums[here]).size > 1:
                place = node or self._end(key.ids)
                if place is not None:
                    return _at(place, key.reason)
        owners = self._provenance.graph.table.owners(family)
        joined = next((s.node for s in owners if s.kind == "opaque"), None)
        return _at(joined, _JOINS) if joined is not None and any(s.kind == "table" for s in owners) else None

    def _why_stays(self, gain: Source) -> str:
        """A gain that matmuls alone read stays for the sake of its shift."""
        own = self._readers.get(gain.index)
        if own is None or not own.consumers or own.barred or own.partners:
            return _STAYS
        if any(is_picked(consumer) for consumer in own.consumers):
            return _SHIFTS
        return _SCALED if any(is_scaled(consumer) for consumer in own.consumers) else _CHANGED

    def _end(self, ids: np.ndarray) -> ir.Value | None:
        """The graph output that reads these channels."""
        ends = (e.value for e in self._provenance.ends.exits if np.isin(e.labels.channels, ids).any())
        return next(ends, None)

    def _reader(self, gain: Source) -> _Culprit:
        """The node that wants the gain's channels alone; or else the gain, which something but matmuls reads."""
        first = int(self._first_block[gain.ids].min(initial=len(self._blocks)))
        if first == len(self._blocks):
            return _at(gain.node, self._why_stays(gain))
        node, block = self._blocks[first]
        return _at(node or block.at, block.reason)


def _ranges(ordered: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Positions in ``ordered`` (sorted) of all elements that are in ``wanted`` (sorted, distinct)."""
    starts, stops = np.searchsorted(ordered, wanted), np.searchsorted(ordered, wanted, side="right")
    counts = stops - starts
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(np.repeat(starts, counts) + within)


def _at(place: ir.Node | ir.Value | None, reason: str) -> _Culprit:
    """A node, the node that makes a value, or a graph input."""
    if isinstance(place, ir.Value) and place.producer() is None:
        return _Culprit(place.name or "", "graph input", reason)
    node = place.producer() if isinstance(place, ir.Value) else place
    assert node is not None
    return _Culprit(node_name(node), node.op_type, reason)


def _refusal(kind: SpaceKind, culprit: _Culprit, change: str = "") -> Refusal:
    return Refusal(kind, culprit.node, culprit.op, culprit.reason, change or change_of(culprit.reason))
