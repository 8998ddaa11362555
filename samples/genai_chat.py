"""Chat with a model in onnxruntime-genai: answers come as they are made, in the model's own chat template.

    graphrot convert SOURCE -o FOLDER --target genai
    python samples/genai_chat.py FOLDER

FOLDER is any that onnxruntime-genai loads: one of its own builder's, or one that graphrot made. Nothing here is
graphrot's but the folder. Questions are read line by line, from the keyboard or from a pipe; an empty one ends.

One generator lives through the whole conversation. Each turn is rendered anew by the chat template, the generator is
rewound to where the new text departs from what it holds, and only the rest goes through the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime_genai as og


class Chat:
    """A conversation with one model.

    Args:
        folder: with genai_config.json, the model and its tokenizer.
        system: what the model is told first; None: what its template says.
        context: tokens that the conversation may have; memory for them is taken at once where the model writes its
            cache in place.
        sample: draw from the likeliest tokens instead of taking the likeliest.
    """

    def __init__(self, folder: str, *, system: str | None = None, context: int = 2048, sample: bool = False) -> None:
        self.model = og.Model(folder)
        self.tokenizer = og.Tokenizer(self.model)
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        parameters = og.GeneratorParams(self.model)
        self.context = min(context, int(parameters.get_search_options()["max_length"]))
        parameters.set_search_options(max_length=self.context, do_sample=sample, temperature=0.7, top_p=0.9)
        self.generator = og.Generator(self.model, parameters)

    def ask(self, question: str, limit: int) -> Iterator[str]:
        """The answer, piece by piece, of at most ``limit`` tokens."""
        self.messages.append({"role": "user", "content": question})
        self._read(self.tokenizer.encode(self.tokenizer.apply_chat_template(json.dumps(self.messages))))
        words, answer = self.tokenizer.create_stream(), ""
        ends = {int(token) for token in self.tokenizer.eos_token_ids}
        for _ in range(limit):
            if self.generator.is_done():
                break
            self.generator.generate_next_token()
            token = int(self.generator.get_next_tokens()[0])
            if token in ends:
                break
            piece = words.decode(token)
            answer += piece
            yield piece
        self.messages.append({"role": "assistant", "content": answer})

    def _read(self, tokens: Sequence[int]) -> None:
        """Let the generator hold exactly ``tokens``."""
        if len(tokens) >= self.context:
            raise SystemExit(f"the conversation has {len(tokens)} tokens: give a larger --context")
        held = self.generator.get_sequence(0) if self.generator.token_count() else np.zeros(0, np.int32)
        # The newest token has been drawn, but the model has not read it yet: it always goes in again.
        most, same = min(len(held), len(tokens)) - 1, 0
        while same < most and held[same] == tokens[same]:
            same += 1
        if same < len(held):
            self.generator.rewind_to(same)
        self.generator.append_tokens(np.asarray(tokens[same:], np.int32))


def main() -> None:
    """Read questions, print answers."""
    parser = argparse.ArgumentParser(description="Chat with a model in onnxruntime-genai.")
    parser.add_argument("folder")
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the whole conversation")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of one answer, at most")
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    given = parser.parse_args()
    if not Path(given.folder, "genai_config.json").is_file():
        parser.error(f"{given.folder} has no genai_config.json: convert with --target genai")
    chat = Chat(given.folder, system=given.system, context=given.context, sample=given.sample)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        question = sys.stdin.readline().strip()
        if not question:
            return
        for piece in chat.ask(question, given.tokens):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
