# SPDX-License-Identifier: Apache-2.0
"""The forward pass of Qwen3 over packed rows. Read `forward`, then `block`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from klear_jax.core.mesh import TRAIN, Rules, constrain, einsum, take
from klear_jax.model import layers
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Blocks, Params

ROW = ("batch", "seq", "width")
"""Logical axes of the residual stream."""

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("attention_out"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def forward(
    params: Params,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    segments: Int[Array, "b t"],
    *,
    cfg: ModelConfig,
) -> Float[Array, "b t d"]:
    """Hidden states after the final norm.

    `positions` restart at 0 in each segment; a token attends to earlier tokens of its own segment
    only. Padding has a segment number of its own (0), so it never meets a real token.
    """
    hidden, _ = run_blocks(params, tokens, positions, segments, cfg=cfg, keep=None)
    return layers.rms_norm(hidden, params.final_norm, eps=cfg.norm_eps)


def run_blocks(
    params: Params,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    segments: Int[Array, "b t"],
    *,
    cfg: ModelConfig,
    keep: Callable[[Array, Array, Array], Any] | None,
    rules: Rules = TRAIN,
) -> tuple[Float[Array, "b t d"], Any]:
    """Embed and run every block; returns the residual stream and what `keep` saved of each layer.

    `keep(hidden, k, v)` picks what a caller wants of a layer (the sampler its keys and values, a
    test the hidden states), stacked on a leading layer axis; None keeps nothing.
    """
    hidden = embed(params, tokens, cfg=cfg, rules=rules)
    angles = layers.rope_angles(positions, head_dim=cfg.head_dim, theta=cfg.rope_theta)

    def body(hidden, weights):
        attention = functools.partial(
            layers.packed_attention, positions=positions, segments=segments, rules=rules
        )
        hidden, k, v = block(hidden, weights, angles, attention, cfg=cfg, rules=rules)
        return hidden, None if keep is None else keep(hidden, k, v)

    if cfg.remat != "none":
        body = jax.checkpoint(body, policy=REMAT_POLICIES[cfg.remat])
    return jax.lax.scan(body, hidden, params.blocks)


def embed(
    params: Params, tokens: Int[Array, "b t"], *, cfg: ModelConfig, rules: Rules = TRAIN
) -> Float[Array, "b t d"]:
    """Rows of the embedding table, in the compute type."""
    table = constrain(params.embed.astype(cfg.dtype), None, None)
    return take(table, tokens, out=ROW, rules=rules)


def unembed(params: Params) -> Float[Array, "d v"]:
    """The output matrix: its own, or the embedding table where the model ties them."""
    return params.embed.T if params.unembed is None else params.unembed


def block(
    hidden: Float[Array, "b t d"],
    weights: Blocks,
    angles: Float[Array, "b t half"],
    attention: Callable[[Array, Array, Array], Array],
    *,
    cfg: ModelConfig,
    rules: Rules = TRAIN,
) -> tuple[Float[Array, "b t d"], Float[Array, "b t k e"], Float[Array, "b t k e"]]:
    """One pre-norm block; `weights` is one layer of `Blocks` and `attention(q, k, v)` mixes tokens.

    Returns the new residual stream, and this layer's rotated keys and values.
    """
    attn, mlp = weights.attn, weights.mlp
    product = functools.partial(einsum, rules=rules)
    heads, kv_heads = ("batch", "seq", "heads", None), ("batch", "seq", "kv_heads", None)

    def gathered(weight, *axes):
        # FSDP's gather, written out: from here on the width of the weight is whole.
        return constrain(weight.astype(cfg.dtype), *axes)

    x = layers.rms_norm(hidden, weights.attn_norm, eps=cfg.norm_eps)
    q = product("btd,dhe->bthe", x, gathered(attn.wq, None, "heads", None), out=heads)
    k = product("btd,dke->btke", x, gathered(attn.wk, None, "kv_heads", None), out=kv_heads)
    v = product("btd,dke->btke", x, gathered(attn.wv, None, "kv_heads", None), out=kv_heads)
    q = layers.rope(layers.rms_norm(q, attn.q_norm, eps=cfg.norm_eps), angles)
    k = layers.rope(layers.rms_norm(k, attn.k_norm, eps=cfg.norm_eps), angles)
    mixed = checkpoint_name(attention(q, k, v), "attention_out")
    hidden += product("bthe,hed->btd", mixed, gathered(attn.wo, "heads", None, None), out=ROW)

    x = layers.rms_norm(hidden, weights.mlp_norm, eps=cfg.norm_eps)
    wide = ("batch", "seq", "ffn")
    gate = product("btd,df->btf", x, gathered(mlp.gate, None, "ffn"), out=wide)
    up = product("btd,df->btf", x, gathered(mlp.up, None, "ffn"), out=wide)
    down = gathered(mlp.down, "ffn", None)
    hidden += product("btf,fd->btd", jax.nn.silu(gate) * up, down, out=ROW)
    return hidden, k, v
