"""genai_config.json out of what Hugging Face writes: config.json, generation_config.json, tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphrot.emit.genai_model import LOGITS, MASK, POSITIONS, TOKENS, Caches
from graphrot.emit.genai_tokenizer import read_json, special_token
from graphrot.errors import InputRefused

TYPES = frozenset(
    "chatglm decoder ernie4_5 gemma gemma2 gemma3_text gemma4_text gptoss granite hunyuandensev1 internlm2 llama "
    "mistral nemotron olmo phi phi3 phi3small phimoe qwen2 qwen3 smollm3".split()
)
"""Types that onnxruntime-genai 0.18 runs as a plain decoder; any other model is called ``decoder``, which is one."""

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_SEARCH = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""What generation_config.json may change, as in onnxruntime-genai's own builder."""


def provider_options(provider: str) -> list[dict[str, Any]]:
    """What a config says of the provider: nothing for the CPU."""
    return [] if provider == "cpu" else [{provider: {}}]


def made_config(
    model: ir.Model, caches: Caches, folder: Path, tokenizer: Path, *, provider: str = "cpu"
) -> dict[str, Any]:
    """The content of genai_config.json.

    Args:
        model: the decoder, with the usual names.
        caches: its caches.
        folder: holds config.json, and generation_config.json if there is one.
        tokenizer: the tokenizer's folder.
        provider: ``cpu`` or ``cuda``.

    Raises:
        InputRefused: a file does not parse, or does not say which token ends a text or how long it may be.
    """
    config, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    if caches.heads is None or caches.width is None:
        raise InputRefused(
            "The caches of the model are not all of one known size",
            where=f"inputs {caches.past[0]}, {caches.past[1]}",
            why="genai_config.json says one number of heads and one width",
            do="use --target ort, and run the model by ONNX Runtime itself",
        )
    ends = _ends(config, generation, tokenizer, folder)
    length = _length(config, tokenizer, folder)
    inputs, outputs = [v.name for v in model.graph.inputs], {v.name: v for v in model.graph.outputs}
    plain = {name: name for name in (TOKENS, MASK, POSITIONS) if name in inputs}
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": provider_options(provider)},
        "filename": "model.onnx",
        "head_size": caches.width,
        "inputs": {**plain, "past_key_names": caches.past[0], "past_value_names": caches.past[1]},
        "outputs": {
            LOGITS: LOGITS,
            "present_key_names": caches.present[0],
            "present_value_names": caches.present[1],
        },
        "num_hidden_layers": caches.layers,
        "num_key_value_heads": caches.heads,
    }
    for name, keys in (("hidden_size", _HIDDEN), ("num_attention_heads", _HEADS)):
        if (number := _first(config, keys)) is not None:
            decoder[name] = number
    begin = _token("bos_token", generation, config, tokenizer)
    pad = _token("pad_token", generation, config, tokenizer)
    kind = config.get("model_type")
    return {
        "model": {
            "bos_token_id": ends[0] if begin is None else begin,
            "context_length": length,
            "decoder": decoder,
            "eos_token_id": ends if len(ends) > 1 else ends[0],
            "pad_token_id": ends[0] if pad is None else pad,
            "type": kind if kind in TYPES else "decoder",
            "vocab_size": _vocabulary(outputs.get(LOGITS), config, folder),
        },
        "search": {
            "diversity_penalty": 0.0,
            **{key: _taken(generation, key, default) for key, default in _SEARCH.items()},
            "early_stopping": True,
            "length_penalty": 1.0,
            "max_length": length,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": caches.shared,
            "repetition_penalty": 1.0,
        },
    }


def _ends(config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Path, folder: Path) -> list[int]:
    """Tokens that end a text: those of generation_config.json or else of config.json, and the tokenizer's own."""
    named = generation.get("eos_token_id", config.get("eos_token_id"))
    own = special_token(tokenizer, "eos_token")
    found = _unique([*(named if isinstance(named, Sequence) else [named]), own])
    if not found:
        raise _missing("which token ends a text", "eos_token_id", folder)
    return found


def _token(name: str, generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Path) -> int | None:
    key = f"{name}_id"
    found = _unique([generation.get(key), config.get(key), special_token(tokenizer, name)])
    return found[0] if found else None


def _unique(ids: Iterable[object]) -> list[int]:
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0))


def _length(config: Mapping[str, Any], tokenizer: Path, folder: Path) -> int:
    length = _first(config, _LENGTHS)
    if length is None:
        length = _first(read_json(tokenizer / "tokenizer_config.json"), ("model_max_length",))
    if length is None:
        raise _missing("how long a text may be", _LENGTHS[0], folder)
    return length


def _vocabulary(logits: ir.Value | None, config: Mapping[str, Any], folder: Path) -> int:
    size = None if logits is None or logits.shape is None else logits.shape[-1]
    found = size if isinstance(size, int) else _first(config, ("vocab_size",))
    if found is None:
        raise _missing("how many tokens there are", "vocab_size", folder)
    return found


def _first(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """The first of the keys with a number that can be a size: not the huge one that stands for no limit."""
    values = (config.get(key) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 2**31), None)


def _taken(generation: Mapping[str, Any], key: str, default: float | bool) -> float | int | bool:
    value = generation.get(key)
    return value if isinstance(value, bool if isinstance(default, bool) else int | float) else default


def _missing(what: str, key: str, folder: Path) -> InputRefused:
    return InputRefused(
        f"The source does not say {what}",
        where=str(folder / "config.json"),
        why=f"there is no {key} in it, and onnxruntime-genai needs one",
        do=f"add {key} to config.json, or use --target ort",
    )
