"""Tiny torch modules with random weights, and what an exporter gets of them: a function of plain tensors.

No cache: keys and values live inside one call, as in most files that people export by hand. Sizes are odd
on purpose, and no two sizes of one model are equal unless the architecture demands it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

from tests.tiny import VOCAB, randomized

BATCH, LENGTH, ENCODED = 2, 7, 9
"""Sizes of the traced run; ``ENCODED`` is the length of a second sequence."""


class _Wrapped(torch.nn.Module):
    def __init__(self, module: Any, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self._forward(self.module, *tensors)


@dataclass(frozen=True)
class Program:
    """A module, example inputs, and the axes of each input that are dynamic: axis -> name."""

    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    axes: tuple[dict[int, str], ...]


def program(name: str, *, layers: int | None = None) -> Program:
    """Build one of the methods below by its name; ``layers``: instead of those that its config says."""
    kind, config, options = _CONFIGS[name]
    if layers is not None:
        options = {**options, "num_hidden_layers" if "num_hidden_layers" in options else "n_layer": layers}
    if isinstance(kind, tuple):
        build, forward, inputs, axes = kind
    else:
        build, (forward, inputs, axes) = kind, _DECODER
    torch.manual_seed(0)
    module = build(config(**options))
    return Program(_Wrapped(randomized(module, 0), forward).eval(), inputs(), axes)


def _ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))


def _mask() -> torch.Tensor:
    return torch.ones(BATCH, LENGTH, dtype=torch.long)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


_TEXT = {0: "batch", 1: "sequence"}


def _logits(m: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return m(input_ids=ids, attention_mask=mask, use_cache=False).logits


def _encoded(m: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return m(input_ids=ids, attention_mask=mask).logits


def _pixels(m: Any, pixels: torch.Tensor) -> torch.Tensor:
    return m(pixel_values=pixels).logits


def _speech(m: Any, mel: torch.Tensor) -> torch.Tensor:
    return m.model.encoder(mel).last_hidden_state


def _spoken(m: Any, ids: torch.Tensor, mask: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    decoder = m.model.decoder
    states = decoder(input_ids=ids, attention_mask=mask, encoder_hidden_states=states, use_cache=False)
    return m.proj_out(states.last_hidden_state)


def _heard(m: Any, samples: torch.Tensor) -> torch.Tensor:
    return m(samples).logits


def _translated(m: Any, ids: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return m(input_ids=ids, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits


_DECODER = (_logits, lambda: (_ids(), _mask()), (_TEXT, _TEXT))
_ENCODER = (_encoded, lambda: (_ids(), _mask()), (_TEXT, _TEXT))
_IMAGE = (_pixels, lambda: (_noise(BATCH, 3, 24, 24),), ({0: "batch"},))
_MEL = (_speech, lambda: (_noise(BATCH, 12, 2 * ENCODED),), ({0: "batch"},))
_CROSS = (_spoken, lambda: (_ids(), _mask(), _noise(BATCH, ENCODED, 60)), (_TEXT, _TEXT, {0: "batch"}))
_SOUND = (_heard, lambda: (_noise(BATCH, 400),), ({0: "batch", 1: "samples"},))
_PAIR = (_translated, lambda: (_ids(), _mask(), _ids(4)), (_TEXT, _TEXT, {0: "batch", 1: "target"}))

_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BASE = {**_TOKENS, "num_hidden_layers": 2, "max_position_embeddings": 64, "attn_implementation": "eager"}
_ROPED = {**_BASE, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 112}
_GROUPED = {**_ROPED, "head_dim": 20}  # 3 * 20 = 60 beside a hidden size of 48
_PLAIN = {**_BASE, "hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 96}
_SAME = {**_PLAIN, "num_key_value_heads": 5}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
_WHISPER = {
    **{k: v for k, v in _BASE.items() if k not in ("num_hidden_layers", "max_position_embeddings")},
    "d_model": 60,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "num_mel_bins": 12,
    "max_source_positions": ENCODED,
    "max_target_positions": 64,
    "decoder_start_token_id": 1,
}
_VISION = {
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "image_size": 24,
    "patch_size": 8,
    "num_labels": 11,
    "attn_implementation": "eager",
}

_CONFIGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {**_GROUPED, "tie_word_embeddings": True}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {**_ROPED, "tie_word_embeddings": False}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {**_GROUPED, "sliding_window": 4}),
    "phi2": (hf.PhiForCausalLM, hf.PhiConfig, {**_SAME, "partial_rotary_factor": 0.5}),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {**_ROPED, "hidden_size": 60}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**_GROUPED, "sliding_window": 4}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**_GROUPED, "sliding_window": 4}),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {**_TOKENS, "n_positions": 64, "n_embd": 60, "n_head": 5, "n_layer": 2, "attn_implementation": "eager"},
    ),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig,
        {**_PLAIN, "hidden_size": 60, "word_embed_proj_dim": 60, "ffn_dim": 96, "dropout": 0.0},
    ),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {**_PLAIN, "rotary_pct": 0.5}),
    "falcon": (
        hf.FalconForCausalLM,
        hf.FalconConfig,
        {**_PLAIN, "multi_query": True, "parallel_attn": True, "bias": True, "ffn_hidden_size": 96},
    ),
    "falcon_grouped": (
        hf.FalconForCausalLM,
        hf.FalconConfig,
        {
            **_PLAIN, "num_attention_heads": 4, "num_kv_heads": 2,
            "new_decoder_architecture": True, "ffn_hidden_size": 96,
        },
    ),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig, {**_TOKENS, "hidden_size": 60, "n_head": 5, "n_layer": 2}),
    "cohere": (hf.CohereForCausalLM, hf.CohereConfig, {**_SAME, "num_hidden_layers": 1}),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, _ROPED),
    "stablelm": (hf.StableLmForCausalLM, hf.StableLmConfig, _SAME),
    "mixtral": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        {**_GROUPED, **_EXPERTS, "num_hidden_layers": 1, "num_local_experts": 4, "sliding_window": None},
    ),
    "qwen2_moe": (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig,
        {
            **_ROPED, **_EXPERTS, "num_hidden_layers": 1, "num_experts": 4, "decoder_sparse_step": 1,
            "moe_intermediate_size": 80, "shared_expert_intermediate_size": 96,
        },
    ),
    "granite": (
        hf.GraniteForCausalLM,
        hf.GraniteConfig,
        {
            **_ROPED, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "smollm3": (hf.SmolLM3ForCausalLM, hf.SmolLM3Config, {**_ROPED, "no_rope_layer_interval": 2}),
    "bert": ((hf.BertForMaskedLM, *_ENCODER), hf.BertConfig, {**_PLAIN, "hidden_size": 60}),
    "vit": ((hf.ViTForImageClassification, *_IMAGE), hf.ViTConfig, {**_VISION, "intermediate_size": 96}),
    "dinov2": ((hf.Dinov2ForImageClassification, *_IMAGE), hf.Dinov2Config, {**_VISION, "mlp_ratio": 2}),
    "whisper_encoder": ((hf.WhisperForConditionalGeneration, *_MEL), hf.WhisperConfig, _WHISPER),
    "whisper_decoder": ((hf.WhisperForConditionalGeneration, *_CROSS), hf.WhisperConfig, _WHISPER),
    "deepseek_v3": (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config,
        {
            **_ROPED, **_EXPERTS, "num_key_value_heads": 3, "kv_lora_rank": 16, "q_lora_rank": 24,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20, "moe_intermediate_size": 80,
            "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    "lfm2": (
        hf.Lfm2ForCausalLM,
        hf.Lfm2Config,
        {**_ROPED, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "phimoe": (
        hf.PhimoeForCausalLM,
        hf.PhimoeConfig,
        {**_ROPED, **_EXPERTS, "num_hidden_layers": 1, "num_local_experts": 4},
    ),
    "gpt_neox_japanese": (
        hf.GPTNeoXJapaneseForCausalLM,
        hf.GPTNeoXJapaneseConfig,
        {**{k: v for k, v in _PLAIN.items() if k != "intermediate_size"}, "intermediate_multiple_size": 2},
    ),
    "deberta_v2": (
        (hf.DebertaV2ForMaskedLM, *_ENCODER),
        hf.DebertaV2Config,
        {
            **_PLAIN, "hidden_size": 60, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False,
        },
    ),
    "mobilebert": (
        (hf.MobileBertForMaskedLM, *_ENCODER),
        hf.MobileBertConfig,
        {
            **_PLAIN, "hidden_size": 60, "num_attention_heads": 4, "embedding_size": 36, "intra_bottleneck_size": 40,
            "num_feedforward_networks": 2,
        },
    ),
    "wav2vec2": (
        (hf.Wav2Vec2ForCTC, *_SOUND),
        hf.Wav2Vec2Config,
        {
            "vocab_size": VOCAB, "pad_token_id": 0, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 5,
            "intermediate_size": 96, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
            "attn_implementation": "eager",
        },
    ),
    "t5": (
        (hf.T5ForConditionalGeneration, *_PAIR),
        hf.T5Config,
        {
            **_TOKENS, "d_model": 60, "d_kv": 12, "num_heads": 3, "d_ff": 80, "num_layers": 2,
            "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
        },
    ),
}  # fmt: skip
