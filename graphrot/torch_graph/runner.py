"""One run of a program: operands, weights, rounding, segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphrot.analysis.types import LinearRef
from graphrot.graph import node_of
from graphrot.torch_graph.ops.call import Call, Op, Signature
from graphrot.torch_graph.program import Program, Segment
from graphrot.torch_graph.rounding import Rounding, round_rows, round_tokens, round_weight
from graphrot.torch_graph.weights import Matrices, TorchWeight


class Tools:
    """Where a graph is rounded: looked up once.

    Args:
        model: the graph.
        values: its values by name.
        rounding: what is rounded.
        dtype: of the run.
    """

    def __init__(self, model: ir.Model, values: Mapping[str, ir.Value], rounding: Rounding, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rounding = rounding
        self.model = model
        self.weights: set[ir.Value] = set()
        self.forced: set[ir.Node] = set()
        self.linears: dict[ir.Node, LinearRef] = {}
        self.rows: dict[tuple[ir.Node, int], int] = {}
        if rounding.activation_bits is not None or rounding.weight_grid is not None:
            for linear in rounding.linears:
                node = node_of(values, linear.node)
                self.linears[node] = linear
                weight = node.inputs[linear.weight_input]
                assert weight is not None
                self.weights.add(weight)
        if rounding.kv_bits is not None:
            for site in rounding.sites.sites:
                for use in (site.key, site.value):
                    node = node_of(values, use.node)
                    self.rows[node, use.input] = site.head_size
                    self.forced.add(node)


@dataclass(frozen=True)
class _Rounded:
    """Key of a rounded activation in the environment of a segment."""

    value: ir.Value


_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


def _policy(_context: Any, op: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    """Products by weights cost most of the time and little of the memory, so they are not made again."""
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products() -> Any:
    make: Callable[..., Any] = create_selective_checkpoint_contexts
    return make(_policy)


class Runner:
    """Runs one program once.

    Args:
        program: what to run.
        operators: of all nodes of its segments.
        tools: where it is rounded.
        weights: of all its constants.
        matrices: of this run; ``plain`` matrices go without rounding.
    """

    def __init__(
        self,
        program: Program,
        operators: Mapping[ir.Node, tuple[Signature, Op]],
        tools: Tools,
        weights: Mapping[ir.Value, TorchWeight],
        matrices: Matrices,
    ) -> None:
        self._program = program
        self._operators = operators
        self._tools = tools
        self._weights = weights
        self._matrices = matrices
        self._sized: dict[ir.Value, torch.Tensor] = {}
        self._made: dict[ir.Value, torch.Tensor] = {}
        """Weights that are needed as numbers, once for each run."""

    def run(self, start: dict[ir.Value, torch.Tensor], *, checkpointed: bool) -> dict[ir.Value, torch.Tensor]:
        """The outputs of the program.

        Args:
            start: what ONNX Runtime has made.
            checkpointed: segment by segment.
        """
        program = self._program
        self._sized = start
        if not checkpointed:
            whole = Segment(tuple(n for s in program.segments for n in s.nodes), (), tuple(self._asked()))
            segments: Sequence[Segment] = (whole,)
        else:
            segments = program.segments
        crossing: dict[ir.Value, torch.Tensor] = {}
        last = {value: place for place, segment in enumerate(segments) for value in segment.reads}
        asked = set(program.outputs)
        for place, segment in enumerate(segments):
            run = self._prepared(segment)
            inputs = [crossing[value] for value in segment.reads]
            if checkpointed and torch.is_grad_enabled() and place < len(segments) - 1:
                outputs = checkpoint(
                    run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_products
                )
            else:
                outputs = run(*inputs)
            crossing.update(zip(segment.makes, outputs, strict=True))
            for value in segment.reads:
                if last[value] == place and value not in asked:
                    crossing.pop(value, None)
        return {value: self._output(value, crossing) for value in program.outputs}

    def _output(self, value: ir.Value, crossing: Mapping[ir.Value, torch.Tensor]) -> torch.Tensor:
        if value in crossing:
            return crossing[value]
        if value in self._sized:
            return self._sized[value]
        return self._number(value)

    def _asked(self) -> list[ir.Value]:
        made = {value for segment in self._program.segments for node in segment.nodes for value in node.outputs}
        return [value for value in self._program.outputs if value in made and value in self._program.live]

    def _prepared(self, segment: Segment) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function of a segment; its weights are made here, once, so that a second run finds them."""
        numbers: dict[ir.Value | _Rounded, torch.Tensor] = {}
        last: dict[ir.Value, int] = {}
        for place, node in enumerate(segment.nodes):
            for position, value in enumerate(node.inputs):
                if value is None:
                    continue
                last[value] = place
                if value in self._weights and value not in numbers and not self._late(node, position):
                    numbers[value] = self._weight(node, value)
        kept = set(segment.makes)

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            local: dict[ir.Value | _Rounded, torch.Tensor] = dict(numbers)
            local.update(zip(segment.reads, inputs, strict=True))
            for place, node in enumerate(segment.nodes):
                live = any(value in self._program.live for value in node.outputs)
                if not live and all(value in self._sized for value in node.outputs if value.name):
                    continue
                results = self._node(node, local)
                into = local if live else self._sized
                for value, result in zip(node.outputs, results, strict=False):
                    if result is not None:
                        into[value] = result
                for operand in node.inputs:
                    if operand is not None and last[operand] == place and operand not in kept:
                        local.pop(operand, None)
                        local.pop(_Rounded(operand), None)
            return tuple(local[value] for value in segment.makes)

        return run

    def _late(self, node: ir.Node, position: int) -> bool:
        """A weight whose rotations may be made on what is multiplied or picked."""
        if node.domain not in ("", "ai.onnx"):
            return False
        if node.op_type == "Gather":
            return position == 0
        rounded = node in self._tools.linears and self._tools.rounding.weight_grid is not None
        return node.op_type == "MatMul" and position == 1 and (self._matrices.plain or not rounded)

    def _weight(self, node: ir.Node, value: ir.Value) -> torch.Tensor:
        """The numbers of a constant operand, rounded where the node is a linear that is."""
        if value in self._made:
            return self._made[value]
        made = self._number(value)
        linear, rounding = self._tools.linears.get(node), self._tools.rounding
        if (
            linear is not None
            and rounding.weight_grid is not None
            and not self._matrices.plain
            and node.inputs[linear.weight_input] is value
        ):
            made = round_weight(
                made,
                rounding.weight_grid,
                linear.layout,
                solver=rounding.weight_solver,
                scale_gradient=rounding.scale_gradient,
            )
        self._made[value] = made
        return made

    def _number(self, value: ir.Value) -> torch.Tensor:
        return self._weights[value].numbers(self._matrices)

    def _node(self, node: ir.Node, local: dict[ir.Value | _Rounded, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        about, operator = self._operators[node]
        inputs: list[torch.Tensor | None] = []
        late: TorchWeight | None = None
        for position, value in enumerate(node.inputs):
            if value is None:
                inputs.append(None)
            elif value in self._weights and self._late(node, position):
                late = self._weights[value]
                inputs.append(None)
            else:
                inputs.append(self._operand(node, position, value, local))
        if late is not None:
            done, inputs = self._done_late(node, late, inputs)
            if done is not None:
                return [done]
        result = operator(Call(about, inputs, self._tools.dtype))
        return [result] if isinstance(result, torch.Tensor) else result

    def _operand(
        self, node: ir.Node, position: int, value: ir.Value, local: dict[ir.Value | _Rounded, torch.Tensor]
    ) -> torch.Tensor:
        found = local[value] if value in local else self._sized[value]
        if self._matrices.plain:
            return found
        rounding = self._tools.rounding
        linear = self._tools.linears.get(node)
        bits = rounding.activation_bits
        if linear is not None and bits is not None and position == 1 - linear.weight_input:
            key = _Rounded(value)
            if key not in local:
                local[key] = round_tokens(found, bits, scale_gradient=rounding.scale_gradient)
            return local[key]
        width = self._tools.rows.get((node, position))
        kv_bits: Literal[4, 8] | None = rounding.kv_bits
        return found if width is None or kv_bits is None else round_rows(found, kv_bits, width)

    def _done_late(
        self, node: ir.Node, weight: TorchWeight, inputs: list[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """The result by way of the operand, or the operands with the weight as numbers."""
        if node.op_type == "Gather":
            index = inputs[1]
            assert index is not None
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
            done = weight.rows(index, self._matrices) if axis == 0 else None
            return done, [weight.numbers(self._matrices), index] if done is None else inputs
        x = inputs[0]
        assert x is not None
        done = weight.times(x, self._matrices)
        return done, [x, weight.numbers(self._matrices)] if done is None else inputs
