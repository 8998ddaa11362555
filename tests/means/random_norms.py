"""Random graphs around LayerNorms in all forms, and around nodes that read the mean as well."""

from __future__ import annotations

from tests.analysis.random_graphs import RandomGraph


class RandomNorms(RandomGraph):
    """A :class:`RandomGraph` whose steps are mostly norms, the sums they read, and what else may read those."""

    def _step(self) -> None:
        self._one(
            *[self._block] * 3, *[self._layer] * 3, self._linear, self._linear, self._linear, self._residual,
            self._residual, self._nonlinear, self._move, self._heads, self._attention, self._by_constant, self._mean,
            self._reduce, self._norm, self._parts, self._join,
        )  # fmt: skip

    def _layer(self) -> None:
        """A LayerNorm as an operator, with the sum in front, or decomposed; with or without gain and shift."""
        x = self._any()
        if x is None:
            return
        b, width = self.b, x.width
        gain = b.vector(width, around=1, spread=0.3 * (self._pick(3) > 0))
        shift = b.vector(width, spread=0.3 * (self._pick(3) == 0))
        kind = self._pick(4)
        if kind == 0:
            y = b.op("LayerNormalization", x.name, gain, shift, axis=-1, epsilon=1e-2)
        elif kind == 1 and len(x.shape) == 3:
            other = next(t for t in self.tensors if t.shape == x.shape)
            outputs = 4 if self._pick(2) else 1
            more = (b.vector(width),) if self._pick(3) == 0 else ()
            y = b.op(
                "SkipLayerNormalization", x.name, other.name, gain, shift, *more,
                outputs=outputs, domain="com.microsoft", epsilon=1e-2,
            )  # fmt: skip
            if outputs == 4:
                node = b.nodes[-1]
                node.output[1], node.output[2] = "", ""
                self._add(node.output[3], *x.shape)
        else:
            mean = b.op("ReduceMean", x.name, b.ints(-1))
            centred = b.op("Sub", x.name, mean)
            squares = b.op("Mul", centred, centred) if kind == 2 else b.op("Pow", centred, b.constant(2.0))
            root = b.op("Sqrt", b.op("Add", b.op("ReduceMean", squares, b.ints(-1)), b.constant(1e-2)))
            y = b.op("Div", b.op("Sub", x.name, mean) if self._pick(3) == 0 else centred, root)
            y = b.op("Mul", y, gain) if self._pick(3) else y
            y = b.op("Add", y, shift) if self._pick(3) == 0 else y
            if self._pick(8) == 0:
                self._add(centred, *x.shape)
        self._add(y, *x.shape)

    def _mean(self) -> None:
        """The mean alone, added back, or taken away twice."""
        x = self._any()
        if x is None:
            return
        b = self.b
        mean = b.op("ReduceMean", x.name, b.ints(-1))
        kind = self._pick(3)
        if kind == 0:
            self._add(b.op("Add", x.name, mean), *x.shape)
        elif kind == 1:
            self._add(b.op("Sub", mean, x.name), *x.shape)
        else:
            self._add(b.op("Sub", b.op("Sub", x.name, mean), mean), *x.shape)
