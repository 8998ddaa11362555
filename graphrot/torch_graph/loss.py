"""End-to-end losses of a rounded model: what the language model itself is judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch

from graphrot.analysis.types import CachePair
from graphrot.errors import InputRefused, UsageError
from graphrot.quant.feeds import token_feeds
from graphrot.torch_graph.graph import TorchGraph
from graphrot.torch_graph.rounding import Rounding

_CHUNK = 1 << 23
"""Logits worked on at once."""


class EndToEnd:
    """The loss of a rotated and rounded model on tokens, differentiable in its rotations.

    ``ce``: cross-entropy of the next token, in nats. ``kl``: divergence from the float model's distribution to the
    rounded one's, in nats for each token; the float model is the same graph without rotations and rounding, which is
    the same function. With ``top_k``, the k likeliest tokens of the float model count one by one, and all others
    together as one event.

    Args:
        model: a decoder from :func:`graphrot.prepare.rotated_graph`; only read.
        rounding: what is rounded.
        loss: ce or kl.
        top_k: tokens that kl looks at; None: all.
        caches: what the analysis found; says how wide caches are whose declaration leaves it open.
        dtype: float32, or float64 for checks.
        checkpointed: keep only what crosses from layer to layer.

    Raises:
        UsageError: ``top_k`` without kl.
        InputRefused: the graph is not a decoder, or an operator is not differentiated.
    """

    def __init__(
        self,
        model: ir.Model,
        rounding: Rounding,
        loss: Literal["ce", "kl"] = "ce",
        top_k: int | None = None,
        *,
        caches: Sequence[CachePair] = (),
        dtype: torch.dtype = torch.float32,
        checkpointed: bool = False,
    ) -> None:
        if top_k is not None and (loss != "kl" or top_k < 1):
            raise UsageError("top_k counts tokens of the loss kl", do="give 1 or more, or leave it out")
        self._model = model
        self._caches = caches
        self._loss = loss
        self._top_k = top_k
        self._checkpointed = checkpointed
        self._logits = _logits(model)
        self.graph = TorchGraph(model, rounding=rounding, dtype=dtype)

    def __call__(self, matrices: Mapping[str, torch.Tensor], tokens: np.ndarray) -> torch.Tensor:
        """The mean loss over all tokens that follow another one.

        Args:
            matrices: ``[dim, dim]`` by key.
            tokens: ``[B, S]`` int64; every row starts anew.

        Returns:
            A scalar.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 2 or ids.shape[1] < 2:
            raise UsageError(f"A loss needs rows of two tokens or more, not {list(ids.shape)}")
        feeds = token_feeds(self._model, ids, self._caches)
        reference = None
        if self._loss == "kl":
            with torch.no_grad():
                reference = self._run(feeds, {}, plain=True)
        logits = self._run(feeds, matrices, plain=False)
        if reference is not None:
            return _apply_divergence(logits, reference, self._top_k or 0)
        return _apply_entropy(logits, torch.from_numpy(ids.astype(np.int64)))

    def _run(
        self, feeds: Mapping[str, np.ndarray], matrices: Mapping[str, torch.Tensor], *, plain: bool
    ) -> torch.Tensor:
        found = self.graph.run(feeds, [self._logits], matrices=matrices, checkpointed=self._checkpointed, plain=plain)[
            self._logits
        ]
        if found.ndim != 3:
            raise InputRefused(
                "The model's logits are not [batch, tokens, vocabulary]", where=f"output {self._logits!r}"
            )
        return found


class _Entropy(torch.autograd.Function):
    """Mean cross-entropy; the gradient is made with it, in pieces, so that no third array of logits exists."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        grad, count = torch.zeros_like(logits), tokens[:, 1:].numel()
        total = torch.zeros((), dtype=torch.float64)
        for row, part in _pieces(logits):
            logs = torch.log_softmax(logits[row, part], -1)
            picked = tokens[row, part.start + 1 : part.stop + 1, None]
            total -= logs.gather(1, picked).sum(dtype=torch.float64)
            spread = logs.exp_()
            spread.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=spread.dtype))
            grad[row, part] = spread.div_(count)
        ctx.save_for_backward(grad)
        return (total / count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _times(ctx.saved_tensors[0], grads[0]), None


class _Divergence(torch.autograd.Function):
    """Mean of ``sum p (log p - log q)``, likewise."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, reference: torch.Tensor, top_k: int) -> torch.Tensor:
        grad, count = torch.zeros_like(logits), logits[:, 1:, 0].numel()
        total = torch.zeros((), dtype=torch.float64)
        for row, part in _pieces(logits):
            q, p = (torch.log_softmax(x[row, part], -1) for x in (logits, reference))
            if not top_k or top_k >= logits.shape[-1] - 1:
                weight = p.exp()
                total += (weight * (p - q)).sum(dtype=torch.float64)
                grad[row, part] = (q.exp_() - weight).div_(count)
                continue
            chosen = p.topk(top_k, -1).indices
            first, second = p.gather(1, chosen), q.gather(1, chosen)
            # All other tokens are one event: its probability, and how the gradient spreads over them.
            rest_p, rest_q = (_rest(x, chosen) for x in (p, q))
            weight = first.exp()
            total += (weight * (first - second)).sum(dtype=torch.float64)
            total += (rest_p.exp() * (rest_p - rest_q)).sum(dtype=torch.float64)
            # d/d logit = q - p on the chosen tokens, and q (1 - P_rest / Q_rest) on the others.
            spread = q.exp_()
            kept = spread.gather(1, chosen)
            spread = spread * (1 - (rest_p - rest_q).exp())
            grad[row, part] = spread.scatter_(1, chosen, kept - weight).div_(count)
        ctx.save_for_backward(grad)
        return (total / count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _times(ctx.saved_tensors[0], grads[0]), None, None


def _pieces(logits: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Rows and runs of tokens; the last token of a row has none after it. A copy of all logits is never made."""
    batch, length, width = logits.shape
    step = max(1, _CHUNK // width)
    for row in range(batch):
        for start in range(0, length - 1, step):
            yield row, slice(start, min(start + step, length - 1))


def _times(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return grad if factor.item() == 1.0 else grad * factor


_apply_entropy: Callable[..., torch.Tensor] = _Entropy.apply
_apply_divergence: Callable[..., torch.Tensor] = _Divergence.apply


def _rest(logs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Log of the probability of all tokens that were not chosen, ``[rows, 1]``."""
    return logs.scatter(1, chosen, -torch.inf).logsumexp(-1, keepdim=True)


def _logits(model: ir.Model) -> str:
    """The output called logits, or the first one."""
    names = [value.name or "" for value in model.graph.outputs]
    return "logits" if "logits" in names else names[0]
