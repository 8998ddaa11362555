"""The same numbers on any number of processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def steady_blas() -> Iterator[None]:
    """Let NumPy's linear algebra use one thread, in the whole process, while the context lasts.

    OpenBLAS and its like cut a product differently for every number of threads, and then round differently:
    enough to turn a weight that lies between two codes. ONNX Runtime on the CPU cuts along rows and columns
    only and gives the same bits on any number of threads.
    """
    import numpy  # noqa: F401 - a library is found once it is loaded
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield
