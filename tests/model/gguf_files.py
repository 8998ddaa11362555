"""Write tiny decoders of transformers as GGUF files, as llama.cpp's converter does, tokenizer included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

from tests.exported import CHAT_TEMPLATE, write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    **{f"self_attn.{a}_proj.{k}": f"attn_{b}.{k}" for a, b in zip("qkvo", ("q", "k", "v", "output"), strict=True)
       for k in ("weight", "bias")},
}  # fmt: skip
Q8, F16, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    architecture: str | None = None,
    tokenizer: bool = True,
    leave_out: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
    parts: int = 1,
    scaling: gguf.RopeScalingType | None = None,
) -> None:
    """Write a Llama or Qwen2 model; matrices whose rows allow it are stored as ``kind``.

    ``leave_out`` names a tensor to omit, ``extra`` adds some, ``parts`` claims that the file is one of several, and
    ``scaling`` that positions are stretched.
    """
    config = model.config
    name = architecture or config.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    if tokenizer:
        _add_tokenizer(writer, path.parent / f"{path.stem}.words", config.vocab_size)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for key, parameter in model.named_parameters():
        tensor = _name(key)
        if tensor == leave_out:
            continue
        array = parameter.detach().numpy()
        if config.model_type == "llama" and tensor.split(".")[-2] in ("attn_q", "attn_k"):
            count = heads[tensor.split(".")[-2][-1]]
            array = array.reshape(count, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        stored = kind if array.ndim > 1 and (kind != Q8 or array.shape[-1] % 32 == 0) else F32
        writer.add_tensor(tensor, gguf.quantize(array, stored), raw_dtype=stored)
    for key, array in (extra or {}).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(key: str) -> str:
    if key in NAMES:
        return NAMES[key]
    _, _, layer, rest = key.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    write_tokenizer(folder)
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(words["vocab"], key=lambda token: words["vocab"][token])
    count = len(tokens)
    tokens += [f"<unused{i}>" for i in range(size - count)]
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([control if i < 3 else normal if i < count else unused for i in range(size)])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in words["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
