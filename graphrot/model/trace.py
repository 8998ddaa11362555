"""Turn a torch decoder into an ``onnx_ir`` graph with explicit caches. The only file that traces torch.

Two roads lead to the same inputs and outputs. :func:`torchscript` is fast and leaves a graph without
weights (they are attached lazily from the torch model, never copied into a protobuf). :func:`dynamo` is
some ten times slower and follows the program instead of one run of it.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from graphrot.errors import InputRefused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TORCHSCRIPT_OPSET = 20
"""The highest opset that torch's TorchScript exporter writes."""

_SIZES = (2, 3, 5)
"""Batch, sequence and past of the traced run: three different sizes, none of them 1."""


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of the decoder's graph.

    ``heads`` holds, per layer, ``(key heads, key width, value heads, value width)``.
    """

    vocabulary: int
    heads: tuple[tuple[int, int, int, int], ...]
    takes_positions: bool

    @property
    def layers(self) -> int:
        """Number of cached layers."""
        return len(self.heads)

    def inputs(self) -> dict[str, tuple[str | int, ...]]:
        """Name -> shape of the inputs, in order; strings are symbolic dimensions."""
        shapes: dict[str, tuple[str | int, ...]] = {
            "input_ids": ("batch", "sequence"),
            "attention_mask": ("batch", "total"),
        }
        if self.takes_positions:
            shapes["position_ids"] = ("batch", "sequence")
        return shapes | self._caches("past_key_values", "past")

    def outputs(self) -> dict[str, tuple[str | int, ...]]:
        """Name -> shape of the outputs, in order."""
        return {"logits": ("batch", "sequence", self.vocabulary)} | self._caches("present", "total")

    def _caches(self, prefix: str, length: str) -> dict[str, tuple[str | int, ...]]:
        shapes: dict[str, tuple[str | int, ...]] = {}
        for layer, (key_heads, key_dim, value_heads, value_dim) in enumerate(self.heads):
            shapes[f"{prefix}.{layer}.key"] = ("batch", key_heads, length, key_dim)
            shapes[f"{prefix}.{layer}.value"] = ("batch", value_heads, length, value_dim)
        return shapes


def cache_from(tensors: tuple[torch.Tensor, ...]) -> DynamicCache:
    """A cache of ``(key 0, value 0, key 1, ...)``, each ``[batch, heads, past, width]``."""
    cache = DynamicCache()
    for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
        layer = DynamicLayer()  # type: ignore[no-untyped-call]
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        layer.device = keys.device
        cache.layers.append(layer)
    return cache


def forward(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    cache: DynamicCache,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """One step of the torch model: logits ``[batch, sequence, vocabulary]`` and the grown cache tensors."""
    positions = {} if position_ids is None else {"position_ids": position_ids}
    caches = {str(_cache_argument(model)): cache}
    output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **positions, **caches)
    return output.logits, tuple(getattr(layer, kind) for layer in cache.layers for kind in ("keys", "values"))


def _cache_argument(model: PreTrainedModel) -> str | None:
    """How the model's forward calls its cache: transformers renamed it from past_key_values to cache."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in accepted), None)


class Wrapper(torch.nn.Module):
    """The decoder as a function of plain tensors, in the order of :meth:`Signature.inputs`."""

    def __init__(self, model: PreTrainedModel, signature: Signature) -> None:
        super().__init__()
        self.decoder = model
        self.takes_positions = signature.takes_positions
        # The exporter restores the wrapper's mode afterwards, and with it the decoder's: one left in
        # training mode would come back with its dropout switched on.
        self.eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *rest: torch.Tensor) -> Any:
        """Returns logits, then keys and values layer by layer."""
        positions, past = (rest[0], rest[1:]) if self.takes_positions else (None, rest)
        logits, grown = forward(self.decoder, input_ids, attention_mask, positions, cache_from(past))
        return (logits, *grown)


def read_signature(model: PreTrainedModel) -> Signature:
    """Run the model on two tokens and look at what it caches.

    Raises:
        InputRefused: the model does not take a cache of keys and values per layer, or takes no mask.
    """
    where = type(model).__name__
    accepted = inspect.signature(model.forward).parameters
    if not {"input_ids", "attention_mask"} <= set(accepted) or _cache_argument(model) is None:
        raise InputRefused(
            "The model is not a decoder with a cache of keys and values",
            where=where,
            why="its forward does not take input_ids, attention_mask and a cache",
            do="give a decoder of the AutoModelForCausalLM kind with attention in every layer",
        )
    takes_positions = "position_ids" in accepted
    ids = torch.ones(1, 2, dtype=torch.long)
    positions = torch.arange(2)[None] if takes_positions else None
    try:
        with torch.no_grad(), quiet():
            logits, grown = forward(model, ids, torch.ones_like(ids), positions, DynamicCache())
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise InputRefused(
            "The model does not run with a cache of keys and values per layer",
            where=where,
            why=f"{type(error).__name__}: {error}",
            do="export the model to ONNX by its own tools and give the .onnx file",
        ) from error
    if not grown or any(t.ndim != 4 or t.shape[2] != 2 for t in grown):
        raise InputRefused(
            "The model's cache is not [batch, heads, length, width] in every layer",
            where=where,
            why="found " + ", ".join(sorted({str(list(t.shape)) for t in grown})),
            do="export the model to ONNX by its own tools and give the .onnx file",
        )
    pairs = zip(grown[::2], grown[1::2], strict=True)
    heads = tuple((k.shape[1], k.shape[3], v.shape[1], v.shape[3]) for k, v in pairs)
    return Signature(int(logits.shape[-1]), heads, takes_positions)


def torchscript(model: PreTrainedModel, signature: Signature) -> ir.Model:
    """Trace one run; returns a graph of opset 20 whose initializers read the torch model's memory."""
    wrapper = Wrapper(model, signature)
    buffer = io.BytesIO()
    inputs, outputs = signature.inputs(), signature.outputs()
    axes = {
        name: {axis: dim for axis, dim in enumerate(shape) if isinstance(dim, str)}
        for name, shape in (inputs | outputs).items()
    }
    with torch.no_grad(), quiet(), plain_operations(model):
        torch.onnx.export(
            wrapper,
            _example(signature),
            buffer,  # type: ignore[arg-type]
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=axes,
            opset_version=TORCHSCRIPT_OPSET,
            export_params=False,
            do_constant_folding=False,
            dynamo=False,
        )
    traced = ir.from_proto(onnx.load_model_from_string(buffer.getvalue()))
    _attach_weights(traced, wrapper, frozenset(inputs))
    return traced


def dynamo(model: PreTrainedModel, signature: Signature, *, opset: int) -> ir.Model:
    """Export the program by ``torch.export``; returns a graph of ``opset``."""
    wrapper = Wrapper(model, signature)
    names = list(signature.inputs())
    dynamic = torch.export.Dim.DYNAMIC
    shapes: list[Any] = [
        {axis: dynamic for axis, dim in enumerate(shape) if isinstance(dim, str)}
        for shape in signature.inputs().values()
    ]
    with torch.no_grad(), quiet(), plain_operations(model):
        exported = torch.export.export(
            wrapper, _example(signature), dynamic_shapes=(shapes[0], shapes[1], tuple(shapes[2:])), strict=False
        )
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=opset,
            input_names=names,
            output_names=list(signature.outputs()),
            verbose=False,
        )
    assert program is not None
    return program.model


@contextlib.contextmanager
def plain_operations(model: PreTrainedModel) -> Iterator[None]:
    """Use attention and experts written in plain operations while tracing.

    Other attentions freeze "is causal" by the traced sizes, other experts sort tokens by what the traced
    ones need.
    """
    attention = model.config._attn_implementation
    experts = getattr(model.config, "_experts_implementation", None)
    model.set_attn_implementation("eager")
    if experts is not None:
        model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        if experts is not None:
            model.set_experts_implementation(experts)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' and transformers' remarks off the user's terminal; errors still raise.

    The TorchScript exporter also prints its whole graph to stdout before it raises; torch 2.13 turns this
    on whatever the setting says, so the printing function itself is exchanged.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    printing = torch._C._jit_onnx_log
    torch._C._jit_onnx_log = lambda *_: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._jit_onnx_log = printing
        logging.disable(disabled)


def _example(signature: Signature) -> tuple[torch.Tensor, ...]:
    batch, sequence, past = _SIZES
    generator = torch.Generator().manual_seed(0)
    sizes = {"batch": batch, "sequence": sequence, "past": past, "total": past + sequence}
    tensors: list[torch.Tensor] = []
    for name, shape in signature.inputs().items():
        concrete = [sizes[dim] if isinstance(dim, str) else dim for dim in shape]
        if name == "position_ids":
            tensors.append(torch.arange(past, past + sequence)[None].repeat(batch, 1))
        elif name in ("input_ids", "attention_mask"):
            tensors.append(torch.ones(concrete, dtype=torch.long))
        else:
            tensors.append(torch.randn(concrete, generator=generator))
    return tuple(tensors)


def _attach_weights(traced: ir.Model, wrapper: Wrapper, inputs: frozenset[str]) -> None:
    """Make initializers of the inputs that are not in ``inputs``: the wrapper's parameters and buffers."""
    tensors: dict[str, torch.Tensor] = dict(wrapper.named_parameters(remove_duplicate=False))
    tensors |= dict(wrapper.named_buffers(remove_duplicate=False))
    graph = traced.graph
    for value in [v for v in graph.inputs if v.name not in inputs]:
        assert value.name is not None
        graph.inputs.remove(value)
        tensor = tensors[value.name].detach()
        value.name = value.name.removeprefix("decoder.")
        value.const_value = _lazy(tensor, value.name)
        graph.initializers[value.name] = value


def _lazy(tensor: torch.Tensor, name: str) -> ir.LazyTensor:
    def read() -> ir.TensorProtocol:
        return ir.Tensor(tensor.contiguous().numpy(), name=name)

    dtype = ir.DataType.from_numpy(tensor[:0].numpy().dtype if tensor.ndim else tensor.numpy().dtype)
    return ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(tensor.shape), name=name)
