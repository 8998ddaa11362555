"""Run the graph twice at tiny, different sizes to learn concrete shapes and index values.

Both runs have every optimization off. What differs between them is dynamic, the rest is static.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphrot.analysis.probe_graph import ProbeGraph, contracted
from graphrot.analysis.probe_sizes import Choice, Run, Sizes
from graphrot.analysis.scope import Scope, node_name
from graphrot.errors import InputRefused
from graphrot.graph import FLOATS, read_constant
from graphrot.ops.foreign import register_custom_ops
from graphrot.ops.runtime import runtime, too_new, without_kernel

_ADVICE = {
    r"\bCPU\b": "give the model as it was before its operators were fused for a GPU",
    r"while running Decoder\w+ node": "give the model as it was before its attention was converted for a beam search",
}
"""What helps where ONNX Runtime does not run a graph, by what it says; else other sizes may."""
_ELEMENTS = {int(t) for t in FLOATS}


@dataclass(frozen=True)
class Seen:
    """A tensor in the first run."""

    shape: tuple[int, ...]
    static: tuple[bool, ...]
    """Per axis: the same size in both runs."""
    is_float: bool
    is_double: bool = False


class Probe:
    """Shapes and index values of a graph at tiny sizes.

    Args:
        scope: the graph.
        sizes: sizes for symbolic dimensions of the inputs, by name, instead of those that are tried.

    Raises:
        InputRefused: the graph runs at none of the sizes that its inputs suggest.
        UsageError: ``sizes`` names a dimension that does not exist.
        EnvironmentProblem: ONNX Runtime is not installed.
    """

    def __init__(self, scope: Scope, sizes: Mapping[str, int] | None = None) -> None:
        self._scope = scope
        self._sizes = Sizes(scope, sizes)
        _refuse_other_inputs(self._sizes.inputs)
        self._exposed = _wanted(scope)
        found = ((node, contracted(scope, node)) for node in scope.nodes)
        self._widths = [(node, *pair) for node, pair in found if pair is not None]
        self._session = self._load()
        self.run: Run
        self.choice: Choice
        first, second = self._search()
        self._seen: dict[ir.Value, Seen] = {}
        self._tensors: dict[ir.Value, Any] = {}
        for value in [*self._exposed, *self._sizes.inputs]:
            a, b = first.get(value), second.get(value)
            if a is None or b is None or not a.is_tensor() or not b.is_tensor():
                continue
            self._seen[value] = _compare(a, b)
            self._tensors[value] = a if not self._seen[value].is_float or _count(a) <= 4096 else None

    def seen(self, value: ir.Value) -> Seen | None:
        """What a value looked like; constants are static in every axis."""
        found = self._seen.get(value)
        if found is None and self._scope.readable(value):
            array = read_constant(value)
            found = Seen(tuple(array.shape), (True,) * array.ndim, _is_float(array.dtype))
            self._seen[value] = found
        return found

    def number(self, value: ir.Value) -> np.ndarray | None:
        """The numbers of a trusted (data-independent) value in the first run."""
        if not self._scope.trusted(value):
            return None
        if self._scope.readable(value):
            return read_constant(value)
        tensor = self._tensors.get(value)
        return None if tensor is None else np.asarray(tensor.numpy())

    def is_cache_input(self, value: ir.Value) -> bool:
        return value in self._sizes.inputs and self._sizes.is_cache(value)

    def _load(self) -> Any:
        ort = runtime()
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.enable_mem_pattern = False
        register_custom_ops(options)
        data = ProbeGraph(self._scope, self._sizes.inputs, self._exposed).build()
        try:
            return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises types of its own, without a common base
            raise (
                too_new(str(error), None)
                or without_kernel(str(error), None)
                or InputRefused(
                    "ONNX Runtime does not load the graph",
                    why=_first_line(error),
                    do="check the model with onnx.checker",
                )
            ) from error

    def _search(self) -> tuple[dict[ir.Value, Any], dict[ir.Value, Any]]:
        failure: tuple[Choice, Run, str] | None = None
        for runs in self._sizes.runs():
            for choice in self._sizes.choices():
                outputs = []
                for run in runs:
                    try:
                        outputs.append(self._execute(choice.shapes(run)))
                    except InputRefused as error:
                        failure = failure or (choice, run, str(error.what))
                        break
                if len(outputs) == 2:
                    self.run = runs[0]
                    self.choice = choice
                    return outputs[0], outputs[1]
        assert failure is not None
        choice, run, message = failure
        raise InputRefused(
            "The graph runs at none of the sizes that its inputs suggest",
            where=f"first tried: {choice.words(run)}",
            why=message,
            do=next(
                (advice for pattern, advice in _ADVICE.items() if re.search(pattern, message)),
                "give `sizes` for its symbolic dimensions: "
                + (", ".join(self._sizes.declared) or "they have no names"),
            ),
        )

    def _execute(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[ir.Value, Any]:
        import onnxruntime as ort

        options = ort.RunOptions()
        options.log_severity_level = 4
        feeds = {v.name: _feed(v, shapes[v.name or ""]) for v in self._sizes.inputs}
        names = [o.name for o in self._session.get_outputs()]
        try:
            results = self._session.run_with_ort_values(names, feeds, options)
        except Exception as error:  # see _load
            raise InputRefused(_first_line(error)) from error
        found: dict[ir.Value, Any] = dict(zip(self._exposed, results, strict=True))
        for value in self._sizes.inputs:
            found[value] = feeds[value.name]
        for node, value, width in self._widths:
            shape = found[value].shape() if value in found else [width]
            if not shape or shape[-1] != width:
                raise InputRefused(
                    f"The {node.op_type} that makes {node.outputs[0].name!r} takes rows of {width}, got {list(shape)}"
                )
        return found


def _wanted(scope: Scope) -> list[ir.Value]:
    """Every data-dependent value, and the trusted ones that data-dependent nodes read."""
    wanted: dict[ir.Value, None] = {}
    for node in scope.nodes:
        if all(scope.trusted(o) and o not in scope.followed for o in node.outputs):
            continue
        for value in node.inputs:
            if value is not None and value.name and scope.trusted(value) and not scope.readable(value):
                wanted[value] = None
        for value in node.outputs:
            if value.name:
                wanted[value] = None
    return list(wanted)


def _refuse_other_inputs(inputs: Sequence[ir.Value]) -> None:
    for value in inputs:
        if not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.STRING:
            raise InputRefused(
                f"The graph input {value.name!r} is not a tensor of numbers",
                where=f"input {value.name!r}, {value.type}, read by {', '.join(_users(value))}",
                why="sequences, optional inputs, sparse tensors and texts are not followed",
                do="export the model with plain tensors as inputs; an input that no node reads may be of any type",
            )


def _users(value: ir.Value) -> list[str]:
    return [f"{use.node.op_type} {node_name(use.node)!r}" for use in list(value.uses())[:3]]


def _feed(value: ir.Value, shape: tuple[int, ...]) -> Any:
    """Ones for integers (valid as ids, masks and positions alike), small noise for floats."""
    import onnxruntime as ort

    assert value.name
    dtype = value.dtype
    assert dtype is not None
    if dtype in FLOATS:
        noise = np.random.default_rng(0).standard_normal(shape)
        if dtype == ir.DataType.BFLOAT16:
            raw = noise.astype(ml_dtypes.bfloat16).view(np.uint16)
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, int(dtype))
        return ort.OrtValue.ortvalue_from_numpy(noise.astype(dtype.numpy()))
    return ort.OrtValue.ortvalue_from_numpy(np.ones(shape, dtype=dtype.numpy()))


def _compare(first: Any, second: Any) -> Seen:
    a, b = tuple(first.shape()), tuple(second.shape())
    static = tuple(x == y for x, y in zip(a, b, strict=True)) if len(a) == len(b) else (False,) * len(a)
    return Seen(a, static, first.element_type() in _ELEMENTS, first.element_type() == int(ir.DataType.DOUBLE))


def _count(tensor: Any) -> int:
    return int(np.prod(tensor.shape(), dtype=np.int64))


def _is_float(dtype: np.dtype[Any]) -> bool:
    return bool(np.issubdtype(dtype, np.floating)) or dtype == np.dtype(ml_dtypes.bfloat16)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:500] if str(error).strip() else type(error).__name__
