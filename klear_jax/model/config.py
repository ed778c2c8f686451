# SPDX-License-Identifier: Apache-2.0
"""Shapes and constants of the dense Qwen3 models."""

import dataclasses
from typing import Literal

QWEN3_VOCAB = 151_936
"""Embedding rows of every released Qwen3 model."""
QWEN3_LIVE_VOCAB = 151_669
"""Rows that a token of the Qwen3 tokenizer has; the rest must never be drawn."""

Remat = Literal["none", "dots", "attention", "full"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One dense Qwen3. `QWEN3` has the released sizes and `tiny`."""

    layers: int
    d_model: int
    """Width of the residual stream."""
    q_heads: int
    kv_heads: int
    head_dim: int
    """Width of one head; q_heads * head_dim need not be d_model (0.6B, 4B, 32B)."""
    d_ff: int
    """Width of the gated feed-forward layer."""
    vocab: int = QWEN3_VOCAB
    """Embedding rows."""
    live_vocab: int = QWEN3_LIVE_VOCAB
    """Ids below this have a token; the others have probability 0 in trainer and sampler."""
    tied: bool = False
    """Whether the output matrix is the embedding table."""
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    max_positions: int = 40_960
    init_range: float = 0.02
    """Standard deviation of freshly drawn weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and of the weights inside matrix products; masters stay float32."""
    remat: Remat = "none"
    """What the backward pass recomputes in each layer: nothing, all but matrix products, all but
    the attention output, or everything."""

    def __post_init__(self):
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"{self.q_heads} query heads cannot share {self.kv_heads} KV heads evenly; "
                "kv_heads must divide q_heads"
            )
        if not 0 < self.live_vocab <= self.vocab:
            raise ValueError(
                f"live_vocab {self.live_vocab} must lie in 1..{self.vocab} (vocab, the number of "
                "embedding rows); give a larger vocab"
            )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Logical axis name -> size, for the parameters."""
        return {
            "layers": self.layers,
            "embed": self.d_model,
            "heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "ffn": self.d_ff,
            "vocab": self.vocab,
        }

    @property
    def axis_sizes_cut(self) -> dict[str, int]:
        """The axes that a mesh may cut, each with its size."""
        return {k: v for k, v in self.axis_sizes.items() if k not in ("layers", "head_dim")}

    @property
    def parameter_count(self) -> int:
        """Number of weights, embedding tables included."""
        attention = self.d_model * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        norms = 2 * self.d_model + 2 * self.head_dim
        block = attention + 3 * self.d_model * self.d_ff + norms
        tables = self.vocab * self.d_model * (1 if self.tied else 2)
        return self.layers * block + tables + self.d_model


def _qwen3(layers: int, d_model: int, d_ff: int, q_heads: int, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        layers=layers, d_model=d_model, d_ff=d_ff, q_heads=q_heads, kv_heads=8, head_dim=128,
        tied=tied, dtype="bfloat16", remat="full",
    )  # fmt: skip


QWEN3: dict[str, ModelConfig] = {
    "0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "8b": _qwen3(36, 4096, 12_288, 32),
    "14b": _qwen3(40, 5120, 17_408, 40),
    "32b": _qwen3(64, 5120, 25_600, 64),
    "tiny": ModelConfig(
        layers=3, d_model=96, d_ff=256, q_heads=4, kv_heads=2, head_dim=24, vocab=264,
        live_vocab=263, tied=True, rope_theta=1e4, max_positions=4096, init_range=0.05,
    ),
}  # fmt: skip
"""Dense Qwen3 sizes (technical report and published configs), and `tiny`: 0.3 M parameters, one
embedding row for each of the 263 tokens of the `bytes` tokenizer and one spare."""


def with_vocab(cfg: ModelConfig, live_vocab: int) -> ModelConfig:
    """`cfg` with room for a tokenizer of `live_vocab` ids (rows rounded up to a multiple of 8).

    A config that already has the rows keeps them: only `live_vocab` changes.
    """
    if live_vocab <= cfg.vocab and cfg.vocab - live_vocab < 1024:
        return dataclasses.replace(cfg, live_vocab=live_vocab)
    rows = QWEN3_VOCAB if live_vocab == QWEN3_LIVE_VOCAB else -(-live_vocab // 8) * 8
    return dataclasses.replace(cfg, vocab=rows, live_vocab=live_vocab)
