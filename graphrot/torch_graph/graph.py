"""An ``onnx_ir`` graph in torch, differentiable in the rotations that its weights are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from graphrot.errors import InputRefused, UsageError
from graphrot.folded import FoldedTensor, Rotate
from graphrot.graph import iter_values, value_map
from graphrot.torch_graph.fed import FedPart
from graphrot.torch_graph.ops.call import Op, Signature, signature
from graphrot.torch_graph.ops.table import operator
from graphrot.torch_graph.program import Program, plan_program
from graphrot.torch_graph.rounding import Rounding
from graphrot.torch_graph.runner import Runner, Tools
from graphrot.torch_graph.weights import Matrices, TorchWeight, is_learnable, torch_copy


class TorchGraph:
    """Runs a graph whose weights are still lists of edits.

    Only what depends on such weights, or is rounded, runs in torch; masks, positions and rotary tables come from
    ONNX Runtime for the feeds at hand.

    Args:
        model: from :func:`graphrot.prepare.rotated_graph`, nodes in topological order; only read. Weights that no
            edit names are constants.
        rounding: what is rounded, straight through; None: nothing.
        dtype: float32, or float64 for checks: every float type of the graph becomes this one.

    Raises:
        InputRefused: an operator of the differentiable part is not known, or a linear is not in the graph.
    """

    def __init__(
        self, model: ir.Model, *, rounding: Rounding | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise UsageError(f"A graph runs in float32 or float64, not in {dtype}")
        self._model = model
        self._dtype = dtype
        self._values = {value.name: value for value in iter_values(model) if value.name}
        self._tools = Tools(model, value_map(model), rounding or Rounding(), dtype)
        self._programs: dict[tuple[str, ...], tuple[Program, FedPart]] = {}
        self._operators: dict[ir.Node, tuple[Signature, Op]] = {}
        self._weights: dict[ir.Value, TorchWeight] = {}
        self._shared: dict[tuple[object, ...], TorchWeight] = {}
        self._roots = self._tools.weights | {
            value
            for value in model.graph.initializers.values()
            if isinstance(value.const_value, FoldedTensor) and value.const_value.dtype.is_floating_point()
        }
        self._refuse_unknown()

    @property
    def keys(self) -> dict[str, int]:
        """The learnable rotations: key -> number of channels."""
        edits = (
            edit
            for value in self._roots
            if isinstance(value.const_value, FoldedTensor)
            for edit in value.const_value.edits
            if is_learnable(edit)
        )
        return {edit.matrix.key or "": edit.matrix.dim for edit in edits if isinstance(edit, Rotate)}

    def run(
        self,
        feeds: Mapping[str, np.ndarray],
        outputs: Sequence[str],
        *,
        matrices: Mapping[str, torch.Tensor] | None = None,
        checkpointed: bool = False,
        plain: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Run the graph.

        Args:
            feeds: arrays for the graph's inputs, by name.
            outputs: names of values to compute: outputs of the graph, or anything inside of it.
            matrices: ``[dim, dim]`` for every key (:attr:`keys`).
            checkpointed: keep only what crosses from layer to layer, and compute the rest again for the gradient.
            plain: without learnable rotations and rounding: what the float model answers.

        Returns:
            Name -> tensor, attached to the matrices.

        Raises:
            UsageError: a matrix or feed is missing, or no value has a name.
            InputRefused: a form of an operator that is not followed.
        """
        program, fed = self._program(tuple(outputs))
        given = Matrices(matrices or {}, self._dtype, plain=plain)
        start = {value: torch_copy(array, self._dtype) for value, array in fed.run(feeds).items()}
        runner = Runner(program, self._operators, self._tools, self._weights, given)
        found = runner.run(start, checkpointed=checkpointed)
        return {name: found[value] for name, value in zip(outputs, program.outputs, strict=True)}

    def _program(self, outputs: tuple[str, ...]) -> tuple[Program, FedPart]:
        if outputs not in self._programs:
            missing = [name for name in outputs if name not in self._values]
            if missing:
                raise UsageError(f"The graph has no value {missing[0]!r}", do="name outputs of the graph")
            program = plan_program(
                self._model, [self._values[name] for name in outputs], self._roots, self._tools.forced
            )
            for value in program.constants:
                if value not in self._weights:
                    self._weights[value] = self._weight(value)
            self._programs[outputs] = program, FedPart(self._model, program)
        return self._programs[outputs]

    def _weight(self, value: ir.Value) -> TorchWeight:
        content = value.const_value
        key = content.key if isinstance(content, FoldedTensor) else (id(value),)
        if key not in self._shared:
            self._shared[key] = TorchWeight(value, self._dtype)
        return self._shared[key]

    def _refuse_unknown(self) -> None:
        """Refuse what cannot be run before anything runs."""
        program = plan_program(self._model, list(self._model.graph.outputs), self._roots, self._tools.forced)
        for segment in program.segments:
            for node in segment.nodes:
                run = operator(node.domain, node.op_type)
                if run is None:
                    domain = f"{node.domain}::" if node.domain else ""
                    raise InputRefused(
                        f"The operator {domain}{node.op_type} is not differentiated",
                        where=f"the node {node.name!r} that makes {node.outputs[0].name!r}",
                        why="it depends on weights that are learned or rounded, and its gradient is not known here",
                        do="use a loss that needs no gradients through the model (local, data-free)",
                    )
                opset = self._model.opset_imports.get(node.domain, 1)
                self._operators[node] = signature(node, opset), run
