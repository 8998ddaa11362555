"""Where a session computes: on the CPU, or in ONNX Runtime's CUDA provider, whose tensors lie on the GPU.

Between the two ONNX Runtime copies by itself what is bound on the other side. A cache is bound where it is used, and no
run copies it. What else has to be moved is moved by tiny models, since ONNX Runtime alone knows the device, and its
Python package has no array type for bfloat16.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from graphrot.doctor.cuda import CUDA, ask_cuda
from graphrot.errors import EnvironmentProblem, UsageError
from graphrot.evaluate.values import array_of, ort_value

if TYPE_CHECKING:
    import onnxruntime as ort

Provider = Literal["cpu", "cuda"]
PROVIDERS: tuple[Provider, ...] = ("cpu", "cuda")

_CPU = "CPUExecutionProvider"
_TOKENS_AXIS = -2
"""Of a cache tensor."""


def provider_named(name: str) -> Provider:
    """The provider of this name.

    Raises:
        UsageError: there is none.
    """
    for provider in PROVIDERS:
        if name == provider:
            return provider
    raise UsageError(f"There is no provider {name!r}", where="--provider", do=f"name one of {', '.join(PROVIDERS)}")


class Device:
    """A provider, and tensors in its memory.

    Args:
        provider: ``cpu`` or ``cuda``.
    """

    def __init__(self, provider: Provider = "cpu") -> None:
        self.provider = provider
        self._movers: dict[tuple[int, int], ort.InferenceSession] = {}

    @property
    def place(self) -> str:
        """Where outputs are bound that stay."""
        return self.provider

    @property
    def is_cpu(self) -> bool:
        return self.provider == "cpu"

    def open(self, model: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        """A session of the provider.

        Raises:
            EnvironmentProblem: ONNX Runtime has no CUDA provider here, or cannot use it.
        """
        import onnxruntime as ort

        if self.is_cpu:
            return ort.InferenceSession(model, options, providers=[_CPU])
        if CUDA not in ort.get_available_providers():
            raise no_cuda()
        preload()
        try:
            session = ort.InferenceSession(model, options, providers=[CUDA], enable_fallback=0)
        except Exception as error:  # ONNX Runtime has a class of its own for every status code
            if not ask_cuda().works:
                raise no_cuda() from error
            raise
        if CUDA not in session.get_providers():
            raise no_cuda()
        return session

    def put(self, array: np.ndarray) -> Any:
        """An ``OrtValue`` with these numbers in the provider's memory; over the array's own memory on the CPU."""
        if self.is_cpu:
            return ort_value(array)
        if array.dtype == ml_dtypes.bfloat16:
            return self._moved(ort_value(array), self.place)
        import onnxruntime as ort

        return ort.OrtValue.ortvalue_from_numpy(array, self.place, 0)

    def take(self, value: Any) -> np.ndarray:
        """The numbers of a tensor, wherever it is; a copy, unless it is on the CPU."""
        if self.is_cpu:
            return array_of(value)
        return np.array(array_of(self._moved(value, "cpu")))

    def write(self, value: Any, array: np.ndarray) -> None:
        """Fill a tensor of a cache that :meth:`put` made with other numbers; on the CPU the array is its memory."""
        if not self.is_cpu:
            self._moved(ort_value(np.ascontiguousarray(array)), value)

    def repeated(self, value: Any, times: int) -> Any:
        """A cache tensor whose tokens are there ``times`` times, one after the other: a longer buffer that begins with
        what the old one held.

        Raises:
            EnvironmentProblem: there is no memory for it.
        """
        try:
            return self._moved(value, self.place, times)
        except Exception as error:  # as above
            raise EnvironmentProblem(
                "There is no memory for a longer cache", why=str(error).strip()[:300], do="use a cache of fewer bits"
            ) from error

    def _moved(self, value: Any, target: Any, times: int = 1) -> Any:
        """A copy of a tensor in another place, or into a tensor that is there."""
        session = self._mover(value.element_type(), times)
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", value)
        if isinstance(target, str):
            binding.bind_output("y", target)
        else:
            binding.bind_ortvalue_output("y", target)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]

    def _mover(self, element: int, times: int) -> ort.InferenceSession:
        import onnxruntime as ort
        from onnx import helper

        key = (element, times)
        if key not in self._movers:
            ends = [helper.make_tensor_value_info(name, element, None) for name in ("x", "y")]
            node = helper.make_node("Concat", ["x"] * times, ["y"], axis=_TOKENS_AXIS)
            graph = helper.make_graph([node], "mover", ends[:1], ends[1:])
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
            options = ort.SessionOptions()
            options.log_severity_level = 4
            self._movers[key] = self.open(model.SerializeToString(), options)
        return self._movers[key]


def preload() -> None:
    """Let ONNX Runtime find the CUDA libraries that pip brought; older releases look by themselves."""
    import onnxruntime as ort

    load = getattr(ort, "preload_dlls", None)
    if load is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            load()


def no_cuda() -> EnvironmentProblem:
    """Why the CUDA provider cannot be had, in ONNX Runtime's own words."""
    import onnxruntime as ort

    answer = ask_cuda()
    return EnvironmentProblem(
        "ONNX Runtime's CUDA provider cannot be used",
        where=f"onnxruntime {ort.__version__}",
        why=answer.said,
        do=f"{answer.fix}; graphrot doctor looks at the rest; --provider cpu runs on the CPU",
    )
