"""Greedy generation on a GPU, in plain onnxruntime: the cache stays in the GPU's memory and is written in place.

    graphrot convert demo -o OUT --provider cuda
    python samples/cuda_generate.py OUT "The capital of France is" --graph

OUT is a folder with model.onnx and tokenizer.json. Past and present of every layer are one buffer on the GPU, so that a
step moves token ids one way and logits the other. With --graph a step is one CUDA graph: recorded once, then replayed.
That takes a model whose attention counts the ones of attention_mask, since every step must have the same shapes;
whether it does is tried, and said. --cpu runs the same loop on the CPU, without a graph.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

import graphrot
from graphrot.errors import GraphrotError

TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
}
BFLOAT16 = 16
"""Its number in ONNX; NumPy has no such type."""
PAST = "past_key_values"


class Decoder:
    """A model whose inputs and outputs are bound, with room for ``capacity`` tokens."""

    def __init__(self, folder: str, *, gpu: int | None, capacity: int, graph: bool) -> None:
        options = ort.SessionOptions()
        graphrot.register(options)
        # On a GPU, what onnxruntime cannot use is an error here, not a silent step back to the CPU.
        name = "CPUExecutionProvider" if gpu is None else "CUDAExecutionProvider"
        if name not in ort.get_available_providers():
            sys.exit(f"onnxruntime {ort.__version__} has no {name}: graphrot doctor says what is missing")
        settings = {} if gpu is None else {"device_id": str(gpu), "enable_cuda_graph": str(int(graph))}
        self.session = ort.InferenceSession(f"{folder}/model.onnx", options, providers=[(name, settings)])
        if self.session.get_providers()[0] != name:
            sys.exit(f"{name} does not work here: graphrot doctor says what is missing")
        self.place = ("cpu", 0) if gpu is None else ("cuda", gpu)
        self.capacity, self.length, self.graph = capacity, 0, graph
        self.types = {value.name: value.type for value in self.session.get_inputs()}
        caches = [value for value in self.session.get_inputs() if value.name.startswith(PAST)]
        self.cache = {
            value.name: self._buffer(value.type, [1, value.shape[1], capacity, value.shape[3]]) for value in caches
        }
        logits = next(value for value in self.session.get_outputs() if value.name == "logits")
        # What a recorded step reads and writes: always the same memory.
        self.step = {name: self._put(array) for name, array in self._feeds(np.zeros((1, 1)), capacity).items()}
        self.logits = self._buffer(logits.type, [1, 1, logits.shape[2]])

    def read(self, tokens: list[int]) -> np.ndarray:
        """Run some tokens, shapes as they come; returns the logits behind the last."""
        feeds = self._feeds(np.array([tokens]), self.length + len(tokens))
        binding = self._binding({name: self._put(array) for name, array in feeds.items()})
        binding.bind_output("logits", "cpu")
        self._run(binding, "-1")  # the provider records nothing under this number
        self.length += len(tokens)
        return np.array(binding.get_outputs()[-1].numpy()[0, -1])

    def next(self, token: int) -> np.ndarray:
        """The same for one token, with the same shapes and the same memory each time."""
        for name, array in self._feeds(np.array([[token]]), self.capacity).items():
            self.step[name].update_inplace(array)
        binding = self._binding(self.step)
        binding.bind_ortvalue_output("logits", self.logits)
        self._run(binding, "1" if self.graph else "-1")
        self.length += 1
        return np.array(self.logits.numpy()[0, -1])

    def counts(self, token: int) -> bool:
        """Whether a mask that is longer than the tokens says the same as one that fits; the length stays."""
        length = self.length
        padded = self.next(token)  # first: it must not find what the other one stores
        self.length = length
        plain = self.read([token])
        self.length = length
        return bool(np.abs(plain - padded).max() < 1e-2 * np.abs(plain).max())

    def _feeds(self, tokens: np.ndarray, columns: int) -> dict[str, np.ndarray]:
        """Tokens behind what is cached, and a mask of so many columns with a one for each token so far."""
        count = tokens.shape[1]
        mask = np.zeros((1, columns))
        mask[:, : self.length + count] = 1
        positions = np.arange(self.length, self.length + count)[None]
        known = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        return {n: np.ascontiguousarray(known[n], TYPES[kind]) for n, kind in self.types.items() if n in known}

    def _binding(self, feeds: dict[str, Any]) -> Any:
        binding = self.session.io_binding()
        for name, value in {**feeds, **self.cache}.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in self.cache.items():
            binding.bind_ortvalue_output(name.replace(PAST, "present"), value)
        return binding

    def _run(self, binding: Any, graph: str) -> None:
        options = ort.RunOptions()
        if self.graph:
            options.add_run_config_entry("gpu_graph_id", graph)
        self.session.run_with_iobinding(binding, options)

    def _put(self, array: np.ndarray) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(array, *self.place)

    def _buffer(self, kind: str, shape: list[int]) -> Any:
        if kind in TYPES:
            return self._put(np.zeros(shape, TYPES[kind]))
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, BFLOAT16, *self.place)


def go_on(decoder: Decoder, token: int, count: int, *, fixed: bool) -> list[int]:
    """So many tokens behind ``token``; ``fixed``: each step with the same shapes."""
    answer = []
    for _ in range(count):
        logits = decoder.next(token) if fixed else decoder.read([token])
        token = int(logits.argmax())
        answer.append(token)
    return answer


def main() -> None:
    """Read the prompt, then go on token by token."""
    parser = argparse.ArgumentParser(description="Greedy generation on a GPU in plain onnxruntime.")
    parser.add_argument("folder", help="what graphrot convert --provider cuda wrote")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new ones")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--graph", action="store_true", help="replay a step as a CUDA graph")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    given = parser.parse_args()
    if not all(Path(given.folder, name).is_file() for name in ("model.onnx", "tokenizer.json")):
        sys.exit(f"{given.folder} has no model.onnx and tokenizer.json")
    tokenizer = Tokenizer.from_file(str(Path(given.folder) / "tokenizer.json"))
    prompt = tokenizer.encode(given.prompt).ids
    if not graphrot.KVCache(Path(given.folder)).layout.shared:
        sys.exit("this model cannot write into one buffer: convert it with --kv int8 or --kv int4")
    decoder = Decoder(
        given.folder,
        gpu=None if given.cpu else given.gpu,
        capacity=len(prompt) + given.tokens,
        graph=given.graph and not given.cpu,
    )
    answer = [int(decoder.read(prompt).argmax())]
    fixed = given.graph and decoder.counts(answer[-1])
    if given.graph:
        print("every step has the same shapes" if fixed else "the mask's length counts: no graph", file=sys.stderr)
    start = time.perf_counter()
    answer += go_on(decoder, answer[-1], given.tokens - 1, fixed=fixed)
    seconds = time.perf_counter() - start
    print(given.prompt + tokenizer.decode(answer))
    print(f"{(len(answer) - 1) / seconds:.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except GraphrotError as error:
        sys.exit(str(error))
