"""From blocks of channels to rotation spaces with a kind, producers, consumers and online places.

Blocks with the same coordinates need the same matrix: they make one *site*. Sites that differ only in the
head they belong to (same sources, same size, same role) could have a matrix each; they get one, and make
one space whose groups list the heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from graphrot.analysis.labels import Labels, Source
from graphrot.analysis.means import Means
from graphrot.analysis.online import online_use
from graphrot.analysis.partition import Partition
from graphrot.analysis.places import inner
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.reasons import change_of
from graphrot.analysis.scope import node_name
from graphrot.analysis.streams import is_stream
from graphrot.analysis.types import (
    MeanNorm,
    MeanReader,
    OnlineExit,
    OnlineUse,
    Placement,
    Refusal,
    RotationSpace,
    Runs,
    SpaceKind,
    WeightUse,
    encode_runs,
)
from graphrot.analysis.visit import Consumer, Exit, Record

T = TypeVar("T")

_NOT_TILED = (
    "the channels that may rotate there are not equal blocks that tile the last axis, "
    "so no online transform can stand behind it"
)
_IN_PARTS = "it does not read whole groups of the channels that would have to rotate together"
_CACHED_IN_PARTS = "the cache holds these channels in parts, or not in every head, so it cannot be rotated as a whole"


@dataclass
class Reader:
    """The groups of positions in which the blocks stand along a consumer's operand."""

    consumer: Consumer
    groups: dict[int, list[np.ndarray]]
    """Block -> per copy, positions in coordinate order."""


@dataclass
class Leaving:
    """The groups of positions in which the blocks stand along the rows of an exit."""

    exit: Exit
    groups: dict[int, list[np.ndarray]]


@dataclass
class Site:
    """Blocks that share one matrix."""

    blocks: list[int]
    sources: list[Source]
    readers: list[Reader] = field(default_factory=list)
    contractions: list[ir.Node] = field(default_factory=list)
    exits: list[Leaving] = field(default_factory=list)
    mixed: bool = False
    mean: bool = False
    broken: Consumer | None = None
    """A consumer that does not read whole blocks: the site is lost."""

    entries: set[int] = field(default_factory=set)
    """Sources behind which a transform must stand, by index."""

    @property
    def online(self) -> bool:
        return bool(self.entries or self.exits)

    def kind(self) -> SpaceKind:
        """Names for people.

        R2 is what stands between two linears and nothing else: the values of a head, and the narrow rows between
        two factors of one weight (latent queries, keys and values).
        """
        if self.contractions:
            return "R3"
        if self.mixed:
            return "R2"
        if any(s.kind == "table" for s in self.sources) or (self.readers and is_stream(self.sources)):
            return "R1"
        starts = {s.kind for s in self.sources} - {"bias"}
        windows = self.readers and all(r.consumer.node.op_type == "Conv" for r in self.readers)
        if starts == {"weight"} and self.readers and not windows:
            return "R2"
        return "R4" if starts == {"opaque"} and not windows else "other"


class Spaces:
    """All rotation spaces of a graph.

    Args:
        provenance: labels and records, gains folded.
        partition: the blocks.
    """

    def __init__(self, provenance: Provenance, partition: Partition) -> None:
        self.provenance = provenance
        self.partition = partition
        self.refused: list[Refusal] = []
        self.covered: set[int] = set()
        """Ids of channels that a space of a named kind rotates."""
        self._means = Means(provenance, partition)
        self.explained: set[int] = set()
        """Ids of channels of sites that :attr:`refused` tells of."""
        self._cache_pairs = {pair.past: pair.present for pair in provenance.caches}
        sites = self._sites()
        self.spaces = self._build(sites)

    def _sites(self) -> list[Site]:
        blocks = self.partition.blocks
        by_coordinates: dict[bytes, list[int]] = defaultdict(list)
        for block, ids in blocks.items():
            by_coordinates[self.partition.coordinate_of[ids].tobytes()].append(block)
        sites: list[Site] = []
        site_of: dict[int, Site] = {}
        table = self.provenance.graph.table
        for members in by_coordinates.values():
            owners = {int(self.partition.source_of[blocks[b][0]]) for b in members}
            site = Site(members, [table.sources[i] for i in sorted(owners)])
            site.entries = {s.index for s in site.sources if self._starts_online(s)}
            sites.append(site)
            site_of.update(dict.fromkeys(members, site))
        for node, record in self.provenance.all_records():
            self._attach(site_of, node, record)
        for site in sites:
            if site.broken is not None:
                self._refuse([site], site.broken.node, _IN_PARTS)
        return [s for s in sites if s.broken is None and (s.readers or s.contractions)]

    def _starts_online(self, source: Source) -> bool:
        return source.kind in ("opaque", "gain") or (
            source.kind == "input" and source.value in self.provenance.graph.open
        )

    def _attach(self, site_of: Mapping[int, Site], node: ir.Node | None, record: Record) -> None:
        for consumer in record.consumers:
            reader = self._reader(consumer)
            for site in _distinct(site_of[b] for b in reader.groups):
                site.readers.append(reader)
                if not self._whole(reader, site):
                    site.broken = site.broken or consumer
        for end in record.exits:
            leaving = Leaving(end, self._groups(end.labels, end.labels.rank - 1))
            for site in _distinct(site_of[b] for b in leaving.groups):
                site.exits.append(leaving)
        for contraction in record.contractions:
            assert node is not None
            for site in self._touched(site_of, contraction.ids):
                site.contractions.append(node)
        for ids in record.mixed:
            for site in self._touched(site_of, ids):
                site.mixed = True
        for ids in record.means:
            for site in self._touched(site_of, ids):
                site.mean = True

    def _touched(self, site_of: Mapping[int, Site], ids: np.ndarray) -> list[Site]:
        blocks = np.unique(self.partition.block_of[ids]).tolist()
        return _distinct(site_of[b] for b in blocks if b in site_of)

    def _reader(self, consumer: Consumer) -> Reader:
        return Reader(consumer, self._groups(consumer.labels, consumer.axis))

    def _groups(self, labels: Labels, axis: int) -> dict[int, list[np.ndarray]]:
        """Where the blocks stand in the first row; keys and edges make all rows alike."""
        row = labels.rows(axis)[0]
        ids, copies = row.ids, row.copies
        block = self.partition.block_of[ids]
        order = np.lexsort((self.partition.coordinate_of[ids], copies, block))
        change = (np.diff(block[order]) != 0) | (np.diff(copies[order]) != 0)
        groups: dict[int, list[np.ndarray]] = defaultdict(list)
        for part in np.split(order, np.flatnonzero(change) + 1):
            if int(block[part[0]]) in self.partition.blocks:
                groups[int(block[part[0]])].append(part)
        return dict(groups)

    def _whole(self, reader: Reader, site: Site) -> bool:
        """Every group of the site's blocks holds each channel of its block once."""
        row = reader.consumer.labels.rows(reader.consumer.axis)[0].ids
        return all(
            np.array_equal(row[part], self.partition.blocks[block])
            for block in site.blocks
            for part in reader.groups.get(block, [])
        )

    def _build(self, sites: Sequence[Site]) -> tuple[RotationSpace, ...]:
        """Merge sites of one role and number them in graph order."""
        roles: dict[tuple[object, ...], list[Site]] = defaultdict(list)
        for site in sites:
            size = self.partition.blocks[site.blocks[0]].size
            role = (site.kind(), site.online, size, site.mean, tuple(s.index for s in site.sources))
            roles[role].append(site)
        built: list[tuple[int, RotationSpace]] = []
        for group in roles.values():
            space = self._space(group)
            if space is None:
                continue
            built.append((min(self._order(s) for site in group for s in site.sources), space))
            if space.kind != "other":
                for site in group:
                    for block in site.blocks:
                        self.covered.update(self.partition.blocks[block].tolist())
        built.sort(key=lambda item: item[0])
        counters: dict[str, int] = defaultdict(int)
        numbered: list[RotationSpace] = []
        for _, space in built:
            number = counters[space.kind]
            counters[space.kind] += 1
            numbered.append(replace(space, id=f"{space.kind}.{number}"))
        return tuple(numbered)

    def _order(self, source: Source) -> int:
        """Graph order of a source: inputs come after the nodes they meet."""
        return len(self.provenance.scope.nodes) if source.node is None else self.provenance.scope.index[source.node]

    def _space(self, sites: list[Site]) -> RotationSpace | None:
        first = sites[0]
        sources = sorted(first.sources, key=lambda s: (self._order(s), s.index))
        orders = [self._basis(site, sources) for site in sites]
        placement: Placement = "online" if first.online else "merged"
        producers: list[WeightUse] = []
        online: list[OnlineUse] = []
        for source in sources:
            ids = [
                self.partition.blocks[block][order]
                for site, order in zip(sites, orders, strict=True)
                for block in site.blocks
                if self.partition.source_of[self.partition.blocks[block][0]] == source.index
            ]
            if source.kind in ("weight", "table", "bias"):
                producers.append(_producer(source, [x - source.base for x in ids]))
            elif source.index in first.entries:
                use = online_use(self.provenance, source, ids)
                if use is None:
                    if first.kind() != "other":
                        self._refuse(sites, source.node or source.value, _NOT_TILED)
                    return None
                online.append(use)
            elif not _whole_rows(source, [x - source.base for x in ids]):
                self._refuse_cache(sites)
                return None
        exits = self._exits(sites, orders)
        if exits is None:
            return None
        caches = [s.value.name or "" for s in sources if s.kind == "input" and s.index not in first.entries]
        nodes = _distinct(n for site in sites for n in site.contractions)
        norms, reader = self._mean(sites, online, caches)
        return RotationSpace(
            id="",
            kind=first.kind(),
            placement=placement,
            dim=int(self.partition.blocks[first.blocks[0]].size),
            producers=tuple(producers),
            consumers=self._consumers(sites, orders),
            online=tuple(online),
            contractions=tuple(node_name(n) for n in sorted(nodes, key=lambda n: self.provenance.scope.index[n])),
            cache_inputs=tuple(caches),
            cache_outputs=tuple(self._cache_pairs[c] for c in caches),
            mean_preserving=first.mean,
            exits=exits,
            optional=first.kind() == "R1" and first.online and inner(self.provenance, sources, *_places(sites)),
            norms=norms,
            mean_reader=reader,
        )

    def _mean(
        self, sites: Sequence[Site], online: Sequence[OnlineUse], caches: Sequence[str]
    ) -> tuple[tuple[MeanNorm, ...], MeanReader | None]:
        """The norms that take the mean of the space's channels away, and what else the mean reaches."""
        if not sites[0].mean:
            return (), None
        norms, reader = self._means.of(block for site in sites for block in site.blocks)
        if caches:
            reader = reader or MeanReader(caches[0], "graph input", "it brings channels with their mean")
        for use in online:
            if use.width != self.partition.blocks[sites[0].blocks[0]].size:
                reader = reader or MeanReader(use.tensor, use.op, "its rows hold several groups of these channels")
        return norms, reader

    def _exits(self, sites: Sequence[Site], orders: Sequence[np.ndarray]) -> tuple[OnlineExit, ...] | None:
        """Inverse transforms, in graph order; None (and a refusal) where the channels do not tile the rows."""
        found: dict[int, tuple[Leaving, list[list[int]]]] = {}
        for site, order in zip(sites, orders, strict=True):
            for leaving in site.exits:
                entry = found.setdefault(id(leaving), (leaving, []))
                entry[1].extend(part[order].tolist() for block in site.blocks for part in leaving.groups.get(block, []))
        made: list[OnlineExit] = []
        for leaving, groups in found.values():
            node, value = leaving.exit.node, leaving.exit.value
            width = leaving.exit.labels.shape[-1]
            size = self.partition.blocks[sites[0].blocks[0]].size
            tiles = [list(range(start, start + size)) for start in range(0, width, size)]
            if sorted(groups) != tiles:
                self._refuse(sites, node or value, _NOT_TILED)
                return None
            groups_of = tuple(encode_runs(tile) for tile in tiles)
            name = "" if node is None else node_name(node)
            made.append(
                OnlineExit(name, "graph output" if node is None else node.op_type, value.name or "", groups_of, width)
            )
        return tuple(made)

    def _basis(self, site: Site, sources: Sequence[Source]) -> np.ndarray:
        """The order of coordinates: positions in the first online tensor, or the order of the first channels."""
        for source in sources:
            if source.index not in site.entries:
                continue
            for block in site.blocks:
                ids = self.partition.blocks[block]
                if self.partition.source_of[ids[0]] == source.index:
                    return np.argsort(ids, kind="stable")
        for leaving in site.exits:
            for block in site.blocks:
                for part in leaving.groups.get(block, []):
                    return np.argsort(part, kind="stable")
        return np.arange(self.partition.blocks[site.blocks[0]].size)

    def _consumers(self, sites: Sequence[Site], orders: Sequence[np.ndarray]) -> tuple[WeightUse, ...]:
        found: dict[int, tuple[Reader, list[np.ndarray]]] = {}
        for site, order in zip(sites, orders, strict=True):
            members = set(site.blocks)
            for reader in site.readers:
                entry = found.setdefault(id(reader), (reader, []))
                entry[1].extend(part[order] for b, parts in reader.groups.items() if b in members for part in parts)
        ordered = sorted(found.values(), key=lambda e: self.provenance.scope.index[e[0].consumer.node])
        uses: list[WeightUse] = []
        for reader, groups in ordered:
            consumer = reader.consumer
            operand = consumer.node.inputs[consumer.operand]
            assert operand is not None and operand.name
            uses.append(
                WeightUse(
                    node=node_name(consumer.node),
                    op=consumer.node.op_type,
                    input=consumer.operand,
                    tensor=operand.name,
                    axis=consumer.operand_axis,
                    groups=_sorted_groups(groups),
                )
            )
        return tuple(uses)

    def _refuse(self, sites: Sequence[Site], place: ir.Node | ir.Value, reason: str) -> None:
        name = (place.name or "") if isinstance(place, ir.Value) else node_name(place)
        op = "end of the graph" if isinstance(place, ir.Value) else place.op_type
        self.refused.append(Refusal(sites[0].kind(), name, op, reason, change_of(reason)))
        for site in sites:
            for block in site.blocks:
                self.explained.update(self.partition.blocks[block].tolist())

    def _refuse_cache(self, sites: Sequence[Site]) -> None:
        nodes = [n for site in sites for n in (*site.contractions, *(r.consumer.node for r in site.readers))]
        self._refuse(sites, min(nodes, key=lambda n: self.provenance.scope.index[n]), _CACHED_IN_PARTS)


def _places(sites: Sequence[Site]) -> tuple[list[Source], list[Exit], list[ir.Node]]:
    """Of sites that make one space: where channels come in and leave by transforms, and the linears that read them."""
    entries = [s for s in sites[0].sources if s.index in sites[0].entries]
    exits = [leaving.exit for site in sites for leaving in site.exits]
    return entries, exits, _distinct(r.consumer.node for site in sites for r in site.readers)


def _producer(source: Source, groups: list[np.ndarray]) -> WeightUse:
    assert source.node is not None and source.operand is not None and source.operand_axis is not None
    operand = source.node.inputs[source.operand]
    assert operand is not None and operand.name
    role = {"table": "table", "bias": "bias"}.get(source.kind, "weight")
    return WeightUse(
        node=node_name(source.node),
        op=source.node.op_type,
        input=source.operand,
        tensor=operand.name,
        axis=source.operand_axis,
        groups=_sorted_groups(groups),
        role=role,  # type: ignore[arg-type]
    )


def _whole_rows(source: Source, groups: list[np.ndarray]) -> bool:
    """A cache is rotated along its last axis, whole, in all heads alike; of one for keys and values, either half."""
    last = len(source.shape) - 1
    if not source.axes or source.axes[-1] != last:
        return False
    width = source.shape[last]
    rows = [int(ids[0]) // width for ids in groups]
    in_order = all(np.array_equal(ids, row * width + np.arange(width)) for ids, row in zip(groups, rows, strict=True))
    count = source.count // width
    halves = [range(count)] if len(source.shape) == 4 else [range(count), range(count // 2), range(count // 2, count)]
    return in_order and sorted(rows) in [list(half) for half in halves]


def _sorted_groups(groups: Iterable[np.ndarray]) -> tuple[Runs, ...]:
    ordered = sorted((g.tolist() for g in groups), key=min)
    return tuple(encode_runs(g) for g in ordered)


def _distinct(items: Iterable[T]) -> list[T]:
    return list({id(item): item for item in items}.values())
