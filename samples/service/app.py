"""A text service on ONNX Runtime, as people run it. It knows nothing of graphrot: only the file changes.

    pip install fastapi uvicorn onnxruntime tokenizers
    MODEL=deployed/model.onnx uvicorn app:app            the model that is deployed today
    MODEL=rotated/model.onnx uvicorn app:app             the same after: graphrot convert deployed/model.onnx -o rotated

The tokenizer lies beside the model. ``CUSTOM_OPS`` may name a library of custom operators (what
``graphrot.library_path()`` returns); without it the model runs all the same, by the functions inside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from fastapi import FastAPI
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Service:
    """One session, shared by all requests: ``InferenceSession.run`` may be called from many threads."""

    def __init__(self, model: Path, library: str | None = None) -> None:
        options = ort.SessionOptions()
        if library:
            options.register_custom_ops_library(library)
        self.session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self.tokenizer = Tokenizer.from_file(str(model.parent / "tokenizer.json"))
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.presents = [value.name for value in self.session.get_outputs() if value.name.startswith("present")]

    def complete(self, prompt: str, count: int) -> str:
        """The likeliest continuation of ``count`` tokens."""
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        cache = {name: self.empty(name) for name in self.inputs if name.startswith("past")}
        new, made = ids, list[int]()
        for past in (0, *range(len(ids), len(ids) + count - 1)):
            total = past + len(new)
            feeds: dict[str, Any] = {"input_ids": [new], "attention_mask": [[1] * total]}
            if "position_ids" in self.inputs:
                feeds["position_ids"] = [list(range(past, total))]
            feeds = {name: np.asarray(value, np.int64) for name, value in feeds.items()} | cache
            logits, *grown = self.session.run(["logits", *self.presents], feeds)
            cache = dict(zip(cache, grown, strict=True))
            new = [int(logits[0, -1].argmax())]
            made += new
        return self.tokenizer.decode(made)

    def empty(self, name: str) -> np.ndarray:
        """A cache of no tokens, ``[1, heads, 0, width]``."""
        value = self.inputs[name]
        return np.zeros((1, value.shape[1], 0, value.shape[3]), TYPES[value.type])


class Request(BaseModel):
    """What a client sends."""

    prompt: str = Field(min_length=1)
    tokens: int = Field(default=32, ge=1, le=512)


app = FastAPI()
service = Service(Path(os.environ["MODEL"]), os.environ.get("CUSTOM_OPS"))


@app.post("/complete")
def complete(request: Request) -> dict[str, str]:
    """Continue a prompt."""
    return {"text": service.complete(request.prompt, request.tokens)}
