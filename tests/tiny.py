"""Tiny decoders with random weights, built from transformers configs; nothing is downloaded.

Norm gains and all biases are random too (a gain of one or a bias of zero would hide a wrong fold), and
sizes are odd on purpose: hidden sizes 48 = 12 * 4 and 80 = 20 * 4 need Hadamard matrices of orders
that are not powers of two, and no two sizes of one model are equal unless the architecture demands it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY_NAMES = ("llama", "llama_tied", "qwen2", "qwen3", "phi3", "gpt2")
"""The names that :func:`tiny` takes."""

VOCAB = 131


def tiny_llama(*, tied: bool = False, seed: int = 0, layers: int = 2, **overrides: Any) -> PreTrainedModel:
    """Llama: RMSNorm, RoPE, GQA 3:1, SwiGLU, no biases. Hidden 48, FFN 112 = 28 * 4, heads 3 of 16."""
    config = transformers.LlamaConfig(
        hidden_size=48, num_attention_heads=3, num_key_value_heads=1, head_dim=16, intermediate_size=112,
        **_common(layers, tie_word_embeddings=tied, **overrides),
    )  # fmt: skip
    return randomized(transformers.LlamaForCausalLM(config), seed)


def tiny_qwen2(*, seed: int = 0, layers: int = 2, **overrides: Any) -> PreTrainedModel:
    """Qwen2: as Llama, with biases on q, k and v. Hidden 80 = 20 * 4, heads 5 of 16, no GQA."""
    config = transformers.Qwen2Config(
        hidden_size=80, num_attention_heads=5, num_key_value_heads=5, intermediate_size=96,
        **_common(layers, tie_word_embeddings=False, **overrides),
    )  # fmt: skip
    return randomized(transformers.Qwen2ForCausalLM(config), seed)


def tiny_qwen3(*, seed: int = 0, layers: int = 3, **overrides: Any) -> PreTrainedModel:
    """Qwen3: RMSNorm on each head of q and k, heads wider than the hidden size (6 * 16 over 48), GQA 3:1."""
    config = transformers.Qwen3Config(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=80,
        **_common(layers, tie_word_embeddings=True, **overrides),
    )  # fmt: skip
    return randomized(transformers.Qwen3ForCausalLM(config), seed)


def tiny_phi3(*, seed: int = 0, layers: int = 2, **overrides: Any) -> PreTrainedModel:
    """Phi-3: one weight for q, k and v, one for gate and up. Hidden 64, GQA 2:1."""
    config = transformers.Phi3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        pad_token_id=0, **_common(layers, tie_word_embeddings=False, **overrides),
    )  # fmt: skip
    return randomized(transformers.Phi3ForCausalLM(config), seed)


def tiny_gpt2(*, seed: int = 0, layers: int = 2, **overrides: Any) -> PreTrainedModel:
    """GPT-2: LayerNorm, learned positions, Conv1D with biases, fused q, k and v, GELU, tied. Hidden 80."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=80, n_head=5, n_layer=layers, bos_token_id=1, eos_token_id=2,
        **overrides,
    )  # fmt: skip
    return randomized(transformers.GPT2LMHeadModel(config), seed)


def tiny(name: str, *, seed: int = 0) -> PreTrainedModel:
    """Build one of :data:`TINY_NAMES`."""
    builders = {
        "llama": tiny_llama,
        "qwen2": tiny_qwen2,
        "qwen3": tiny_qwen3,
        "phi3": tiny_phi3,
        "gpt2": tiny_gpt2,
    }
    return tiny_llama(tied=True, seed=seed) if name == "llama_tied" else builders[name](seed=seed)


def randomized(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Fill every parameter from one generator: gains 1 + 0.3 n, biases 0.1 n, matrices scaled by fan-in.

    Embeddings get a standard deviation of a half, so that logits are of the order of 1 to 10 and the
    residual stream is not dwarfed by the first block.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                value = 0.1 * noise
            elif parameter.ndim == 1:
                value = 1 + 0.3 * noise
            elif any(part in name for part in ("embed", "wte", "wpe")):
                value = 0.5 * noise
            else:
                value = noise * min(parameter.shape) ** -0.5
            parameter.copy_(value)
    return model.eval()


def _common(layers: int, **overrides: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return settings | overrides
