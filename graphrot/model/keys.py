"""Names of tensors in a checkpoint: which a model may leave unread, and which it may not. Nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|masked_bias|position_ids|causal_mask|num_batches_tracked)$"
    r"|(^|\.)(attn|attention|self_attn|self_attention)\.(bias|embed_positions)$"
)
"""Masks, positions and frequencies, which models compute themselves and old checkpoints hold nevertheless.

The ``bias`` of a whole attention is its causal mask; the biases of linears are those of its parts.
"""


def is_buffer(name: str) -> bool:
    """Whether a tensor of this name holds a mask, positions, frequencies or a counter, and no weights."""
    return _BUFFERS.search(name) is not None


def unused(names: Iterable[str], *, modules: Iterable[str], parameters: Iterable[str], prefix: str) -> list[str]:
    """Those of the tensors that a model does not read and that would change what it computes, sorted.

    They lie in a part that the model has (a bias that its config leaves out, one more layer, a norm), or in a
    further copy of such a part. Others belong to what stands beside the decoder, such as a value head.

    Args:
        names: the tensors of a checkpoint that the model does not read.
        modules: the names of the model's modules.
        parameters: the names of its parameters.
        prefix: the name of its body; checkpoints of the body alone leave it out.
    """
    parts, patterns = set(modules) - {""}, {_pattern(name) for name in parameters}

    def counts(name: str) -> bool:
        return _pattern(name) in patterns or _above(name, parts) is not None

    def counts_inside(name: str) -> bool:
        whole = f"{prefix}.{name}"
        return bool(prefix) and (_pattern(whole) in patterns or _above(whole, parts) not in (None, prefix))

    return sorted(name for name in names if not is_buffer(name) and (counts(name) or counts_inside(name)))


def some(names: list[str], most: int = 3) -> str:
    """The first of the names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", f".{name}.")


def _above(name: str, modules: set[str]) -> str | None:
    """The innermost module that would hold the tensor."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in modules:
            return name
    return None
