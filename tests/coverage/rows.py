"""The table: which graphs, and what must be found in them. A site that gets lost fails here."""

from __future__ import annotations

from dataclasses import dataclass

from tests.coverage.graphs import Road


@dataclass(frozen=True)
class Row:
    """One graph.

    ``sites`` counts spaces: kind, ``~`` for an online one, ``?`` for one that is taken on request, and how many.
    ``refused`` names kind and operator.
    ``double``: the graph runs in float64, so the tolerance is that of float64.
    """

    name: str
    road: Road
    opset: int
    sites: str
    what: str = ""
    refused: tuple[str, ...] = ()
    double: bool = True
    batch: int = 2
    """The exporter writes cosines of batch 1 for RotaryEmbedding, which ONNX Runtime refuses for more."""

    @property
    def id(self) -> str:
        return f"{self.name}-{self.road}-{self.opset}".replace(" ", "_")


ROPE = "O~:2 R1:1 R2:2 R3~:2 R4~:2"
LEARNED = "O~:2 R1:1 R2:2 R3:2 R4~:2"
ONE_ROPE = "O~:1 R1:1 R2:1 R3~:1 R4~:1"
ONE = "O~:1 R1:1 R2:1 R3:1 R4~:1"
ENTERED = "O~:2 R1~:1 R2:2 R3:2 R4~:2"
POST = "O~:2 R1~?:1 R2:2 R3~:2 R4~:2"

ROWS = (
    Row("llama", "torchscript", 20, ROPE, "tied, grouped heads wider than their share"),
    Row("qwen2", "torchscript", 18, ROPE, "biases on q, k, v"),
    Row("qwen3", "torchscript", 19, ROPE, "norms on the heads of q and k"),
    Row("mistral", "torchscript", 17, ROPE, "sliding window"),
    Row("phi2", "torchscript", 17, ROPE, "LayerNorm, half of each head rotary, parallel branches"),
    Row("phi3", "torchscript", 20, ROPE, "fused q, k, v; fused gate and up"),
    Row("gemma2", "torchscript", 17, POST, "norms behind the branches, softcaps", ("R1 Mul",)),
    Row("gemma3", "torchscript", 18, POST, "norms behind the branches and on heads", ("R1 Mul",)),
    Row("gpt2", "torchscript", 17, LEARNED, "Conv1D as Gemm, positions from the shape, tied"),
    Row("opt", "torchscript", 17, LEARNED, "positions from the mask, ReLU"),
    Row("gpt_neox", "torchscript", 17, ROPE, "interleaved q, k, v; parallel branches", double=False),
    Row("falcon", "torchscript", 17, ROPE, "one key head, biases", double=False),
    Row("falcon_grouped", "torchscript", 18, ROPE, "q, k, v by groups", double=False),
    Row(
        "bloom",
        "torchscript",
        17,
        ENTERED,
        "ALiBi, norm on the embedding",
    ),
    Row("olmo2", "torchscript", 17, POST, "norms behind the branches alone", ("R1 Mul",)),
    Row("stablelm", "torchscript", 17, ROPE, "LayerNorm, a quarter of each head rotary"),
    Row("mixtral", "torchscript", 17, ONE_ROPE, "experts"),
    Row("qwen2_moe", "torchscript", 18, "O~:1 R1:1 R2:1 R3~:1 R4~:2", "experts and a shared one"),
    Row("granite", "torchscript", 17, ROPE, "scalar multipliers everywhere"),
    Row("smollm3", "torchscript", 17, "O~:2 R1:1 R2:2 R3:1 R3~:1 R4~:2", "every other layer without RoPE"),
    Row(
        "bert",
        "torchscript",
        17,
        "O~:2 R1~?:4 R2:2 R3:2 R4~:3",
        "encoder, norms in the stream",
        ("R1 LayerNormalization",) * 4,
        double=False,
    ),
    Row("vit", "torchscript", 17, LEARNED, "patches by Conv, class token, fixed length", double=False),
    Row(
        "dinov2",
        "torchscript",
        17,
        "O~:2 R1~:1 R2:2 R3:2 R4~:2 other~:1",
        "patches by Conv, gains behind the branches, resized positions",
        double=False,
    ),
    Row(
        "whisper_encoder",
        "torchscript",
        17,
        ENTERED,
        "convolutions, fixed length, states go out",
        double=False,
    ),
    Row("whisper_decoder", "torchscript", 17, "O~:4 R1:1 R2:4 R3:4 R4~:2", "cross attention", double=False),
    Row("deepseek_v3", "torchscript", 17, "O~:2 R1:1 R2:6 R3~:2 R4~:3", "latent queries, keys and values; experts"),
    Row(
        "phimoe",
        "torchscript",
        17,
        "O~:1 R1~?:1 R2:1 R3~:1 R4~:1 other~:1",
        "LayerNorm in front of experts",
        ("R1 LayerNormalization",),
    ),
    Row(
        "lfm2",
        "torchscript",
        17,
        "O~:1 R1:1 R2:1 R3~:1 R4~:3",
        "padding masked behind a norm, gated convolutions",
        double=False,
    ),
    Row("gpt_neox_japanese", "torchscript", 18, ROPE, "biases expanded to the rows", double=False),
    Row(
        "deberta_v2",
        "torchscript",
        17,
        "O~:2 R1~?:4 R2:2 R3:2 R4~:3",
        "positions in relation, by q, k, v's own weights",
        ("R1 LayerNormalization",) * 4,
        double=False,
    ),
    Row(
        "mobilebert",
        "torchscript",
        17,
        "O~:2 R1:1 R1~?:6 R2:4 R3:2 R4~:5",
        "neighbours beside each token, bottlenecks, gains without norms",
        ("R1 Mul",) * 6,
    ),
    Row(
        "wav2vec2",
        "torchscript",
        17,
        "O~:2 R1~?:4 R2:2 R3:2 R4~:3",
        "samples of sound, convolutions",
        ("R1 LayerNormalization",) * 4,
        double=False,
    ),
    Row("t5", "torchscript", 17, "O~:6 R1:2 R2:6 R3:6 R4~:4", "encoder and decoder, relative positions"),
    Row("cohere", "dynamo", 18, ONE_ROPE, "interleaved RoPE, parallel branches, tied"),
    Row("llama", "dynamo", 23, ONE_ROPE, "RotaryEmbedding as an operator", double=False, batch=1),
    Row("gpt2", "dynamo", 21, ONE, "Conv1D as Gemm"),
    Row("vit", "dynamo", 22, ONE, "patches by Conv, class token, fixed length", double=False),
    Row("qwen3", "dynamo", 24, ONE_ROPE, "norms on the heads of q and k"),
    Row(
        "operators",
        "by hand",
        23,
        ONE_ROPE,
        "RMSNormalization, RotaryEmbedding, Attention",
        double=False,
    ),
    Row(
        "operators",
        "by hand",
        24,
        ONE_ROPE,
        "RMSNormalization, RotaryEmbedding, Attention",
        double=False,
    ),
    Row(
        "wrapped weights",
        "by hand",
        21,
        LEARNED,
        "behind Transpose, Cast, Constant, Concat, Slice, ...",
    ),
    Row("shared weights", "by hand", 18, LEARNED, "two layers of one set of weights, one gain, one table"),
    Row("half with float islands", "by hand", 20, ONE, "float16, norms and softmax in float32"),
    Row("interleaved heads", "by hand", 19, ONE, "q, k, v by heads in one weight"),
    Row("experts", "by hand", 22, ONE, "weights picked by Gather"),
    Row("gains behind branches", "by hand", 20, ONE, "and shifts in front of them"),
    Row("known positions", "by hand", 18, ONE, "a constant kind of token, scalar multipliers"),
)
