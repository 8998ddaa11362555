"""The shortest way through the Python interface: convert, look at what was done, generate.

    python samples/quickstart.py SOURCE OUT ["a prompt"]

SOURCE is anything that ``graphrot convert`` takes, ``demo`` among it; OUT is a folder. An .onnx file needs its
tokenizer beside it for the prompt.
"""

from __future__ import annotations

import sys

import onnxruntime

import graphrot
from graphrot.errors import GraphrotError


def main(source: str, output: str, prompt: str = "The capital of France is") -> None:
    """Convert ``source`` to 4-bit weights and 8-bit activations and continue a prompt with it."""
    result = graphrot.convert(source, output=output, recipe="w4a8")
    for rotation in result.report.plan.rotations:
        print(f"{rotation.kind}  {rotation.placement:7}  {rotation.dim:5} channels  {rotation.space}")
    if result.certificate is not None:
        print(f"rotated model against its source: relative error {result.certificate.relative:.1e}")
    sizes = result.report.sizes
    print(f"{sizes.source_bytes / 1e6:.2f} MB -> {sizes.model_bytes / 1e6:.2f} MB")
    print(prompt + graphrot.generate(output, prompt=prompt, max_new_tokens=32, greedy=True).text)

    # The file is plain ONNX Runtime's; graphrot need not be installed where it runs.
    options = onnxruntime.SessionOptions()
    graphrot.register(options)  # the kernels; without this line the functions inside the model run
    session = onnxruntime.InferenceSession(f"{output}/model.onnx", options)
    print("inputs:", ", ".join(value.name for value in session.get_inputs()))


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except GraphrotError as error:
        sys.exit(str(error))
