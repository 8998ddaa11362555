"""Operators that act on every number by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from graphrot.torch_graph.ops.call import MICROSOFT, Call, Op


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Op:
    return lambda call: function(call.tensor(0))


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Op:
    return lambda call: function(call.tensor(0), call.tensor(1))


def _many(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Op:
    def run(call: Call) -> torch.Tensor:
        first, *others = call.tensors()
        for other in others:
            first = function(first, other)
        return first

    return run


def _div(call: Call) -> torch.Tensor:
    first, second = call.tensor(0), call.tensor(1)
    if first.is_floating_point():
        return first / second
    return torch.div(first, second, rounding_mode="trunc")


def _mod(call: Call) -> torch.Tensor:
    function = torch.fmod if call.integer("fmod") else torch.remainder
    return function(call.tensor(0), call.tensor(1))


def _pow(call: Call) -> torch.Tensor:
    base, exponent = call.tensor(0), call.tensor(1)
    if exponent.numel() == 1 and exponent.ndim <= base.ndim:
        number = exponent.item()
        return base * base if number == 2 else base.pow(number).to(base.dtype)
    return base.pow(exponent).to(base.dtype)


def _clip(call: Call) -> torch.Tensor:
    x, low, high = call.tensor(0), call.maybe(1), call.maybe(2)
    if low is None and "min" in call.about.attributes:
        low = torch.tensor(call.floating("min"), dtype=x.dtype)
    if high is None and "max" in call.about.attributes:
        high = torch.tensor(call.floating("max"), dtype=x.dtype)
    return x if low is None and high is None else torch.clamp(x, low, high)


def _where(call: Call) -> torch.Tensor:
    return torch.where(call.tensor(0), call.tensor(1), call.tensor(2))


def _cast(call: Call) -> torch.Tensor:
    return call.tensor(0).to(call.type_of(call.integer("to")))


def _cast_like(call: Call) -> torch.Tensor:
    return call.tensor(0).to(call.tensor(1).dtype)


def _gelu(call: Call) -> torch.Tensor:
    approximate = "tanh" if call.text("approximate", "none") == "tanh" else "none"
    return functional.gelu(call.tensor(0), approximate=approximate)


def _bias_gelu(call: Call) -> torch.Tensor:
    return functional.gelu(call.tensor(0) + call.tensor(1))


def _fast_gelu(call: Call) -> torch.Tensor:
    x, bias = call.tensor(0), call.maybe(1)
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


def _quick_gelu(call: Call) -> torch.Tensor:
    x = call.tensor(0)
    return x * torch.sigmoid(x * call.floating("alpha", 1.702))


def _swish(call: Call) -> torch.Tensor:
    x = call.tensor(0)
    return x * torch.sigmoid(x * call.floating("alpha", 1.0))


def _hard_sigmoid(call: Call) -> torch.Tensor:
    return (call.tensor(0) * call.floating("alpha", 0.2) + call.floating("beta", 0.5)).clamp(0.0, 1.0)


def _hard_swish(call: Call) -> torch.Tensor:
    x = call.tensor(0)
    return x * (x / 6.0 + 0.5).clamp(0.0, 1.0)


def _leaky(call: Call) -> torch.Tensor:
    return functional.leaky_relu(call.tensor(0), call.floating("alpha", 0.01))


def _elu(call: Call) -> torch.Tensor:
    return functional.elu(call.tensor(0), call.floating("alpha", 1.0))


def _is_inf(call: Call) -> torch.Tensor:
    x = call.tensor(0)
    found = torch.zeros_like(x, dtype=torch.bool)
    if call.integer("detect_positive", 1):
        found = found | (x == math.inf)
    if call.integer("detect_negative", 1):
        found = found | (x == -math.inf)
    return found


def _dropout(call: Call) -> list[torch.Tensor]:
    if call.has(2) and bool(call.tensor(2)):
        raise call.refuse("it drops at random (training_mode)")
    x = call.tensor(0)
    return [x, torch.ones_like(x, dtype=torch.bool)]


ELEMENTWISE: dict[tuple[str, str], Op] = {
    ("", "Abs"): _unary(torch.abs),
    ("", "Add"): _binary(torch.add),
    ("", "And"): _binary(torch.logical_and),
    ("", "Cast"): _cast,
    ("", "CastLike"): _cast_like,
    ("", "Ceil"): _unary(torch.ceil),
    ("", "Clip"): _clip,
    ("", "Cos"): _unary(torch.cos),
    ("", "Div"): _div,
    ("", "Dropout"): _dropout,
    ("", "Elu"): _elu,
    ("", "Equal"): _binary(torch.eq),
    ("", "Erf"): _unary(torch.erf),
    ("", "Exp"): _unary(torch.exp),
    ("", "Floor"): _unary(torch.floor),
    ("", "Gelu"): _gelu,
    ("", "Greater"): _binary(torch.gt),
    ("", "GreaterOrEqual"): _binary(torch.ge),
    ("", "HardSigmoid"): _hard_sigmoid,
    ("", "HardSwish"): _hard_swish,
    ("", "Identity"): _unary(lambda x: x),
    ("", "IsInf"): _is_inf,
    ("", "IsNaN"): _unary(torch.isnan),
    ("", "LeakyRelu"): _leaky,
    ("", "Less"): _binary(torch.lt),
    ("", "LessOrEqual"): _binary(torch.le),
    ("", "Log"): _unary(torch.log),
    ("", "Max"): _many(torch.maximum),
    ("", "Min"): _many(torch.minimum),
    ("", "Mod"): _mod,
    ("", "Mul"): _binary(torch.mul),
    ("", "Neg"): _unary(torch.neg),
    ("", "Not"): _unary(torch.logical_not),
    ("", "Or"): _binary(torch.logical_or),
    ("", "Pow"): _pow,
    ("", "Reciprocal"): _unary(torch.reciprocal),
    ("", "Relu"): _unary(torch.relu),
    ("", "Round"): _unary(torch.round),
    ("", "Sigmoid"): _unary(torch.sigmoid),
    ("", "Sign"): _unary(torch.sign),
    ("", "Sin"): _unary(torch.sin),
    ("", "Softplus"): _unary(functional.softplus),
    ("", "Sqrt"): _unary(torch.sqrt),
    ("", "Sub"): _binary(torch.sub),
    ("", "Sum"): _many(torch.add),
    ("", "Swish"): _swish,
    ("", "Tanh"): _unary(torch.tanh),
    ("", "Where"): _where,
    ("", "Xor"): _binary(torch.logical_xor),
    (MICROSOFT, "BiasGelu"): _bias_gelu,
    (MICROSOFT, "FastGelu"): _fast_gelu,
    (MICROSOFT, "Gelu"): _gelu,
    (MICROSOFT, "QuickGelu"): _quick_gelu,
}
