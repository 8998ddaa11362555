"""Open a session with ONNX Runtime's CUDA provider: ``python -m graphrot.doctor.ask`` prints one line of JSON."""

from __future__ import annotations

import contextlib
import io
import json

CUDA = "CUDAExecutionProvider"


def main() -> None:
    """Ask, in this process."""
    import onnx
    import onnxruntime

    offered = CUDA in onnxruntime.get_available_providers()
    found: dict[str, object] = {"works": False, "offered": offered, "runtime": onnxruntime.__version__}
    if not offered:
        found["failure"] = f"onnxruntime {onnxruntime.__version__} is built without CUDA: it offers " + ", ".join(
            onnxruntime.get_available_providers()
        )
        print(json.dumps(found))
        return
    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }'
    model = onnx.parser.parse_model(text)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[CUDA], enable_fallback=0)
        found["works"] = CUDA in session.get_providers()
    except Exception as error:  # ONNX Runtime has a class of its own for every status code
        found["failure"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
