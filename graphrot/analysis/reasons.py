"""What would change a refusal: for every reason that the analysis gives, the change to the graph that lifts it.

A reason is one sentence about one node. Reasons that hold a name are known by how they begin.
"""

from __future__ import annotations

from collections.abc import Mapping

_SIZES = "export the model so that it comes from constants and from the sizes of the inputs (Shape) alone"
_STORED = "store it as an initializer"
_MEAN = "put the LayerNorms in front of the branches instead of on the stream, or RMS norms in their place"
_WHOLE = "let it work on exactly the channels that rotate together: the whole row, or every head for itself"

CHANGES: Mapping[str, str] = {
    # sums and products
    "a constant makes its rows longer": "bring the tensor to its full shape (Expand) before the constant is added",
    "it adds a constant that cannot be rewritten": "store the constant as an initializer with one number for each "
    "channel",
    "one number is added to whole rows": "add the same number to all channels that rotate together, or a constant "
    "with one number for each channel",
    "its elements are added to whole rows of channels": "compute that number from channels that do not rotate, behind "
    "a linear",
    "it multiplies each channel by its own constant": "let constant matmuls alone read the product, so that the "
    "constants fold into their weights, or multiply the weights in front by them",
    "it multiplies groups of channels by different numbers": "use one factor for all channels that rotate together",
    "it sets groups of channels to zero by different conditions": "use one condition for all channels that rotate "
    "together",
    "its elements multiply whole rows of channels": "compute the factor from channels that do not rotate, behind a "
    "linear or a norm",
    "it sums squares over a part of the channels": _WHOLE,
    "it sums over a part of the channels": _WHOLE,
    "it sums rows": "sum rows that hold the same channels in the same order",
    # movement
    "it turns the values into another type": "keep the values in a float type up to the linears that read them",
    "its target shape depends on data": _SIZES,
    "how often it repeats depends on data": _SIZES,
    "its parts depend on data": _SIZES,
    "its bounds depend on data": _SIZES,
    "its index depends on data": _SIZES,
    "it picks channels at run time": "pick whole rows at run time, and channels by constants",
    "one of its parts is not read, so the size is not known": "take parts of the row by Slice, or give all parts names",
    "it joins tensors of different kinds": "join results of linears, lookups and caches with their like only",
    "it joins channels that do not come from one matmul": "let one linear make the whole row, or give each part a "
    "linear of its own to read it",
    "it adds zeros beside different channels": "pad along the axis of tokens, not along the channels",
    # norms
    "its mean or deviation is read as well": "let nothing read more than the norm's first output",
    "it normalizes a part of the channels": _WHOLE,
    "it multiplies each channel by its own gain": "put the norm in front of the branch, where linears alone read it, "
    "instead of on the residual stream",
    "its gain stays between two parts of the stream": "--online-r1 puts a transform behind every such norm, for every "
    "token",
    "it reads a part of the channels": _WHOLE,
    "it reads these channels with their mean": _MEAN,
    "it brings channels with their mean": _MEAN,
    "it reads, or adds, one number for a whole row of these channels": _MEAN,
    "its rows are not just these channels": _MEAN,
    "its rows hold several groups of these channels": _MEAN,
    "it adds a shift that does not fold": _MEAN,
    "its gain is computed at run time": _STORED,
    "its shift is computed at run time": _STORED,
    "its gain is not read by constant matmuls alone, so it cannot fold": "put the norm in front of the branch, where "
    "linears alone read it, instead of on the residual stream",
    "its shift is read by weights without a bias that are picked at run time, so its gain cannot fold": "use a norm "
    "without a shift there, as RMSNorm is",
    "its shift is read by a product with a factor of its own (alpha), so its gain cannot fold": "multiply the weight "
    "by alpha, and leave alpha at 1",
    "its shift is scaled or added to before linears read it, so its gain cannot fold": "let linears read the norm as "
    "it is, or use a norm without a shift there, as RMSNorm is",
    # products
    "it multiplies a part of the channels by its weight": "let every linear read whole rows, or whole heads",
    "its weight comes out of": "store the weight itself as an initializer, computed before the export",
    "its bias is computed at run time": _STORED,
    "its bias cannot be rewritten": "store the bias as an initializer with one number for each output",
    "its rows are the same in every run and stay as they are": "nothing: no activation is rounded here",
    "it contracts a part of the channels": "multiply queries and keys over whole heads",
    "it averages a part of the channels": "let attention weigh the whole values of a head at once",
    "it weighs rows of channels": "compute the weights from channels that do not rotate, behind Softmax",
    # attention
    "it normalizes queries and keys inside, behind which no transform can stand": "normalize them by nodes of their "
    "own in front of the attention",
    "it applies rotary positions inside (do_rotary=1), where no transform can stand behind them": "take rotary "
    "positions out of the node: RotaryEmbedding in front of it and do_rotary=0",
    "it keeps keys and values in an order of its own, which is not followed": "give the model as it was before its "
    "attention was fused, or converted for a beam search",
    "its cache does not carry channels": "give the cache as an input [batch, heads, length, width] of the graph",
    "its cache does not fit its new keys and values": "declare the cache with the heads and the width of the new keys "
    "and values",
    "it shapes the attention weights": "compute masks and biases from channels that do not rotate",
    # across heads
    "its result is an output of the graph, which must stay": "take the output off",
    "it reads the merged heads in another way than a linear over all of them": "let linears alone read them",
    "it puts other channels beside those of the heads, and one linear reads them all": "give the others a linear of "
    "their own",
    "it sums the heads along another axis than the last": "merge the heads along the last axis, in front of the linear",
    "it multiplies each head by a matrix of its own": "let one linear read all heads",
    "its weight is picked at run time, and others may read what is picked": "let one matmul alone read what is picked",
    # joins
    "it joins copies of channels that do not match": "join the channels of equal places only",
    "its channels meet in more than one order": "let each channel of the one meet the same channel of the other "
    "everywhere",
    "what it makes is added to these channels, and no linear makes it": "put a linear behind it before it is added, or "
    "keep it off these channels",
    "the channels that may rotate there are not equal blocks that tile the last axis, "
    "so no online transform can stand behind it": "lay the channels along the last axis, in blocks of one size",
    "it does not read whole groups of the channels that would have to rotate together": "let it read all channels of "
    "each group, or none",
    "the cache holds these channels in parts, or not in every head, so it cannot be rotated as a whole": "let it hold "
    "whole heads, [batch, heads, length, width], all made alike",
    # ends
    "its rows are not followed": "look token embeddings up with Gather from a constant [V, D] or [D, V] table",
    "it is the graph output": "take the output off, or put a linear in front of it",
    "it is the graph input": "let a constant linear read the input and begin the channels",
    "no row of its result was there in the runs that show the shapes, so its channels are not known": "export it "
    "without choosing rows by data, as experts in one batched matmul do",
}
"""Reason, or how it begins -> what would change it."""

_OTHERWISE = "keep the node off these channels: behind a linear, where channels begin anew"


def change_of(reason: str) -> str:
    """What would make a refusal go away; for an operator that is not understood, that it stands elsewhere."""
    exact = CHANGES.get(reason)
    return exact or next((change for start, change in CHANGES.items() if reason.startswith(start)), _OTHERWISE)
