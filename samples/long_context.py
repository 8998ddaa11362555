"""A sentence in a long text, found again by a model with a quantized key/value cache, in plain onnxruntime.

    graphrot convert demo -o OUT --recipe rotate-only --kv int4
    python samples/long_context.py OUT ["a sentence to hide" "its beginning" [TOKENS]]

OUT is a folder with model.onnx and tokenizer.json. The text is what Python's own help says, cut to TOKENS tokens
(1500), with the sentence in its middle; the model gets the text and the sentence's beginning, and ends it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

import graphrot

SENTENCE = "The password of the library is marmalade."
BEGINNING = "The password of the library is"
ANSWER = 8
"""Tokens."""
PIECE = 256
"""Tokens of one run of the prompt."""


def prompt(tokenizer: Tokenizer, sentence: str, beginning: str, tokens: int) -> list[int]:
    """``tokens`` tokens: text, the sentence, text, the beginning."""
    words = " ".join(" ".join(topics[name] for name in ("while", "with", "import", "class", "global", "try")).split())
    help_text = tokenizer.encode(words, add_special_tokens=False).ids
    room = tokens - len(tokenizer.encode(f"\n\n{sentence}\n\n{beginning}", add_special_tokens=False).ids)
    if not 1 < room <= len(help_text):
        sys.exit(f"give a number of tokens below {len(help_text)}")
    first, second = (tokenizer.decode(part) for part in (help_text[: room // 2], help_text[room // 2 : room]))
    return list(tokenizer.encode(f"{first}\n\n{sentence}\n\n{second}\n\n{beginning}", add_special_tokens=False).ids)


def main(folder: str, sentence: str = SENTENCE, beginning: str = BEGINNING, tokens: str = "1500") -> None:
    """Ask, and print the answer and what the cache takes."""
    options = onnxruntime.SessionOptions()
    graphrot.register(options)
    if not Path(folder, "model.onnx").is_file() or not tokens.isdigit():
        sys.exit(__doc__)
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options)
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    ids = prompt(tokenizer, sentence, beginning, int(tokens))

    # One buffer of fixed size, written in place, where the model can do that; else a cache that grows.
    cache = graphrot.KVCache(session)
    if cache.layout.shared:
        cache = graphrot.KVCache(session, capacity=len(ids) + ANSWER)
    for start in range(0, len(ids), PIECE):
        logits = cache.run(session, {"input_ids": np.array([ids[start : start + PIECE]])}, ["logits"])[0]
    answer: list[int] = []
    while len(answer) < ANSWER:
        answer.append(int(logits[0, -1].argmax()))
        logits = cache.run(session, {"input_ids": np.array([answer[-1:]])}, ["logits"])[0]

    print(f"{len(ids)} tokens, then: {beginning}")
    print(f"answer: {tokenizer.decode(answer)!r}")
    stored, wide = cache.nbytes, cache.float_nbytes
    print(
        f"cache: {stored} bytes of {cache.layout.bits} bits for {cache.length} tokens; float32 {wide} bytes, ", end=""
    )
    print(f"{wide / stored:.2f} times as many")
    cache.trim(len(ids))  # back to the prompt: the next question would go on from here
    print(f"cut back to {cache.length} tokens")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4, 5):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except graphrot.errors.GraphrotError as error:
        sys.exit(str(error))
