"""Sizes for the probe, from the structure of the graph's inputs; names mean nothing.

Equal symbolic dimensions share one size; a dimension without a name stands alone. What a dimension can
be follows from where it stands:

1. first axis of an input of rank 2 and more: the batch ``b``;
2. other axis of a cache (a float input of rank 4 that a graph output of rank 4 carries on, or of rank 5, keys
   and values in one): the past ``p``; but the last axis is a head's size, from the widths of matmuls and the head
   counts that attention nodes declare;
3. second axis of an input of rank 2: the sequence ``s``, the past, or both together ``t = p + s``; the
   ids of a table lookup come first and are ``s``;
4. the only axis of an input of rank 1: ``s``, ``t`` or ``b``;
5. other axes of masks of rank 3 and 4: ``s`` and ``t``; axes before the last two of a mask of rank 4: 1.

The right choice among several is the first one with which the graph runs.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from graphrot.analysis.scope import Scope, constant_shape
from graphrot.errors import UsageError
from graphrot.graph import FLOATS

Role = str
"""``b``, ``s``, ``p``, ``t``, or a number."""

_MAX_CHOICES = 96

_SAMPLES = (1607, 2411)
"""Sizes of an axis of samples: some windows of 400 that begin 320 apart, as encoders of speech read them."""

_NAMELESS = "?"
"""First letter of the names we give to dimensions without one."""

_CARRIERS = frozenset(
    {
        *("Identity", "Cast", "Concat", "Transpose", "TensorScatter", "ScatterND", "ScatterElements"),
        *("Gather", "Split", "Squeeze", "Unsqueeze"),
        *("Attention", "GroupQueryAttention", "MultiHeadAttention", "DecoderMaskedMultiHeadAttention"),
    }
)
"""Operators that put a cache and new rows together, or pass it on."""


@dataclass(frozen=True)
class Run:
    """The sizes of one run."""

    batch: int
    sequence: int
    past: int

    def size(self, role: Role) -> int:
        if role.isdecimal():
            return int(role)
        return {"b": self.batch, "s": self.sequence, "p": self.past, "t": self.past + self.sequence}[role]


@dataclass(frozen=True)
class Choice:
    """One role for every free dimension."""

    roles: Mapping[str, Role]
    fixed: Mapping[str, int]
    dims: Mapping[str, tuple[int | str, ...]]

    def shapes(self, run: Run) -> dict[str, tuple[int, ...]]:
        """Concrete shapes of all graph inputs."""
        known = {name: run.size(role) for name, role in self.roles.items()} | dict(self.fixed)
        return {
            name: tuple(d if isinstance(d, int) else _evaluate(d, known) for d in dims)
            for name, dims in self.dims.items()
        }

    def words(self, run: Run) -> str:
        return ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes(run).items())


class Sizes:
    """All sensible choices for the inputs of a graph.

    Args:
        scope: the graph.
        fixed: sizes given by the user for symbolic dimensions, by name.

    Raises:
        UsageError: ``fixed`` names a dimension that no input has, or a size below 1.
    """

    def __init__(self, scope: Scope, fixed: Mapping[str, int] | None) -> None:
        self._scope = scope
        graph = scope.model.graph
        self.inputs = [v for v in graph.inputs if v.name not in graph.initializers and v.uses()]
        """Those that something reads."""
        self._fixed = dict(fixed or {})
        self._dims: dict[str, tuple[int | str, ...]] = {}
        self.declared: list[str] = []
        for value in self.inputs:
            assert value.name
            self._dims[value.name] = tuple(self._dim(value, k) for k in range(len(value.shape or ())))
        self._check_fixed()
        self._candidates = self._collect()

    def _dim(self, value: ir.Value, axis: int) -> int | str:
        assert value.shape is not None
        dim = value.shape[axis]
        if isinstance(dim, int):
            return dim
        if dim.value is None:
            return f"{_NAMELESS}{value.name}?{axis}"
        if dim.value not in self.declared:
            self.declared.append(dim.value)
        return dim.value

    def _check_fixed(self) -> None:
        for name, size in self._fixed.items():
            if name not in self.declared:
                raise UsageError(
                    f"There is no symbolic dimension {name!r} among the graph's inputs",
                    where="sizes",
                    do=f"the names are {', '.join(self.declared) or 'none'}",
                )
            if size < 0:
                raise UsageError(f"The size of dimension {name!r} is {size}", where="sizes", do="give 0 or more")

    def static_sizes(self) -> set[int]:
        """Numbers that a free size should not equal, so that it cannot be taken for one of them."""
        return {d for dims in self._dims.values() for d in dims if isinstance(d, int)} | set(self._fixed.values())

    def is_cache(self, value: ir.Value) -> bool:
        """A float input of rank 4, or ``[2, B, H, T, D]``, that a graph output of the same rank carries on."""
        dims = self._dims[value.name or ""]
        if (len(dims) != 4 and dims[:-4] != (2,)) or value.dtype not in FLOATS:
            return False
        return any(
            all(
                not isinstance(d, int) or not isinstance(e, int) or d == e
                for d, e in zip(dims[-3::2], end[-3::2], strict=True)
            )
            for end in self._ends(value, len(dims))
        )

    def _ends(self, value: ir.Value, rank: int) -> Iterator[tuple[int | ir.SymbolicDim, ...]]:
        """Shapes of the graph outputs of this rank that hold the value, joined with others at most."""
        stack, visited = [value], {value}
        while stack:
            current = stack.pop()
            shape = current.shape
            if current.is_graph_output() and shape is not None and len(shape) == rank:
                yield tuple(shape)
            for user, _ in self._scope.uses(current):
                if user.op_type in _CARRIERS:
                    fresh = [o for o in user.outputs if o not in visited]
                    visited.update(fresh)
                    stack.extend(fresh)

    def _is_lookup_index(self, value: ir.Value) -> bool:
        stack, visited = [value], {value}
        while stack:
            for node, position in self._scope.uses(stack.pop()):
                if node.op_type == "Gather" and position == 1 and self._scope.readable(node.inputs[0]):
                    return True
                if node.op_type in ("Cast", "Reshape", "Identity"):
                    fresh = [o for o in node.outputs if o not in visited]
                    visited.update(fresh)
                    stack.extend(fresh)
        return False

    def _collect(self) -> dict[str, tuple[Role, ...]]:
        """The roles that each free dimension may have, by its first place: caches, then ids, then the rest."""
        cached = any(self.is_cache(v) for v in self.inputs)
        order = sorted(self.inputs, key=lambda v: (not self.is_cache(v), not self._is_lookup_index(v)))
        found: dict[str, tuple[Role, ...]] = {}
        for value in order:
            for axis, dim in enumerate(self._dims[value.name or ""]):
                if isinstance(dim, str) and dim not in self._fixed and not self._is_expression(dim):
                    found.setdefault(dim, self._roles(value, axis, cached))
        return found

    def _is_expression(self, dim: str) -> bool:
        """Made of other dimensions of the inputs, as ``past + sequence``; ``batch-size`` is a name."""
        parts = _symbols(dim)
        return dim not in parts and bool(parts) and all(part in self.declared for part in parts)

    def _roles(self, value: ir.Value, axis: int, cached: bool) -> tuple[Role, ...]:
        rank = len(self._dims[value.name or ""])
        cache = self.is_cache(value)
        if axis == (rank - 4 if cache else 0) and rank >= 2:
            return ("b",)
        if cache:
            return tuple(str(n) for n in self._head_sizes()) or ("p",) if axis == rank - 1 else ("p",)
        if rank == 1:
            return ("s", "t", "b") if cached else ("s", "b")
        if not cached:
            return ("1", "s") if rank == 4 and axis == 1 else ("s",)
        if rank == 2:
            return ("s",) if self._is_lookup_index(value) else ("t", "s", "p")
        if rank == 4 and axis == 1:
            return ("1",)
        return ("s", "t") if axis < rank - 1 else ("t", "s")

    def _head_sizes(self) -> list[int]:
        """Sizes a head may have, in ascending order."""
        widths: set[int] = set()
        counts: set[int] = set()
        for node in self._scope.nodes:
            names = [n for n in ("num_heads", "q_num_heads", "kv_num_heads") if n in node.attributes]
            heads = [node.attributes[n].as_int() for n in names]
            if heads:
                counts |= {heads[0], heads[0] + 2 * heads[-1]}
            if (
                node.op_type in ("MatMul", "Gemm")
                and self._scope.readable(node.inputs[1])
                and node.inputs[1] is not None
            ):
                widths |= set((constant_shape(node.inputs[1]) or ())[-2:])
        return sorted({w // c for w in widths for c in counts if c and w % c == 0 and w > c})

    def choices(self) -> Iterator[Choice]:
        """From the most to the least sensible, at most a few dozen."""
        names = list(self._candidates)
        ranked = itertools.product(*(range(len(self._candidates[n])) for n in names))
        for picks in sorted(itertools.islice(ranked, 4096), key=sum)[:_MAX_CHOICES]:
            roles = {name: self._candidates[name][k] for name, k in zip(names, picks, strict=True)}
            yield Choice(roles, self._fixed, self._dims)

    def runs(self) -> list[tuple[Run, Run]]:
        """Pairs of runs: every role has two sizes, none of them a static one.

        Some operators run only with one sequence at a time when there is a past, or one token at a time
        for several sequences; graphs that hold them are probed with the later pairs. The third pair is for
        graphs that run at batch 1 only, the fourth for those that take one token at a time, whatever the batch,
        once there is a past; the last, where something else than tokens is read, for those that take samples of
        sound, of which a window takes hundreds.
        """
        taken = self.static_sizes()
        free = [n for n in range(2, 64) if n not in taken]
        batch, sequence, past = _three(free, taken)
        other_batch, other_sequence, other_past = _three([n for n in free if n not in (batch, sequence, past)], taken)
        pairs = [
            (Run(batch, sequence, past), Run(other_batch, other_sequence, other_past)),
            (Run(1, sequence, past), Run(other_batch, 1, other_past)),
            (Run(1, sequence, past), Run(1, other_sequence, other_past)),
            (Run(batch, 1, past), Run(other_batch, other_sequence, 0)),
        ]
        if any(value.dtype in FLOATS and not self.is_cache(value) for value in self.inputs):
            pairs.append((Run(batch, _SAMPLES[0], past), Run(other_batch, _SAMPLES[1], other_past)))
        fixed = self._fixed_sequence()
        if fixed is None:
            return pairs
        return [(replace(first, sequence=fixed), replace(second, sequence=fixed)) for first, second in pairs]

    def _fixed_sequence(self) -> int | None:
        """Tokens that the graph takes at once, if it takes no other number: one, in many decoders with a cache."""
        found = {
            dims[1]
            for value in self.inputs
            if len(dims := self._dims[value.name or ""]) == 2 and isinstance(dims[1], int)
            if self._is_lookup_index(value)
        }
        return min(found) if found else None


def _three(free: list[int], taken: set[int]) -> tuple[int, int, int]:
    for first, second, third in itertools.combinations(free, 3):
        if second + third not in taken | {first}:
            return first, second, third
    return 2, 3, 5


def _symbols(expression: str) -> list[str]:
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        return [expression]
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


def _evaluate(expression: str, known: Mapping[str, int]) -> int:
    """A symbol, or sums, differences and products of symbols and integers."""
    if expression in known:
        return known[expression]
    return _number(ast.parse(expression, mode="eval").body, known)


def _number(node: ast.expr, known: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left, known), _number(node.right, known)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
    raise UsageError(
        f"The dimension {ast.unparse(node)!r} is not understood",
        where="graph inputs",
        do="export the model with plain names for its dynamic dimensions, or give `sizes`",
    )
