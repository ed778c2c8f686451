# SPDX-License-Identifier: Apache-2.0
"""The layer functions against numpy float64, and what a token may see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.model import layers, qwen3
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig

CFG = ModelConfig(
    layers=2, d_model=16, q_heads=4, kv_heads=2, head_dim=6, d_ff=24, vocab=32, live_vocab=32,
    tied=True,
)  # fmt: skip
SEGMENTS = jnp.repeat(jnp.asarray([1, 2, 0]), jnp.asarray([7, 6, 3]))[None]
POSITIONS = jnp.concatenate([jnp.arange(7), jnp.arange(6), jnp.arange(3)])[None]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def params():
    """Large random weights, so that attention is far from flat."""
    rng = np.random.default_rng(1)
    infos = params_lib.describe(CFG)
    return jax.tree.map(lambda w: jnp.asarray(rng.normal(0, 0.4, w.shape), jnp.float32), infos)


def test_rms_norm(rng):
    x, scale = rng.normal(0, 3, (2, 5, 16)), rng.uniform(0.5, 1.5, 16)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    got = layers.rms_norm(jnp.float32(x), jnp.float32(scale), eps=1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    tiny = layers.rms_norm(jnp.float32(x * 1e-4), jnp.float32(scale), eps=1e-2)
    np.testing.assert_allclose(tiny, x * 1e-4 / np.sqrt(1e-2) * scale, rtol=1e-3)
    half = layers.rms_norm(jnp.bfloat16(x), jnp.float32(scale), eps=1e-6)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(half), want, rtol=0.02, atol=0.02)


def rotated(x, positions, theta):
    """RoPE by complex multiplication, float64."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[..., None, :]
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rope(rng, theta):
    x = rng.normal(size=(2, 6, 3, 8))
    positions = np.array([[0, 1, 2, 3, 4, 5], [0, 7, 256, 257, 1000, 4000]])
    angles = layers.rope_angles(jnp.asarray(positions), head_dim=8, theta=theta)
    got = layers.rope(jnp.float32(x), angles)
    # Angles are float32: 4000 radians are known to 2.4e-4.
    np.testing.assert_allclose(got, rotated(x, positions, theta), atol=1e-3)
    np.testing.assert_allclose(got[0], rotated(x, positions, theta)[0], atol=2e-6)
    assert layers.rope(jnp.bfloat16(x), angles).dtype == jnp.bfloat16


def test_rope_positions_are_not_bfloat16(rng):
    """In bfloat16 256 and 257 are one number."""
    angles = layers.rope_angles(jnp.asarray([[256, 257]]), head_dim=8, theta=1e4)
    assert angles.dtype == jnp.float32
    assert float(angles[0, 1, 0] - angles[0, 0, 0]) == 1.0


def dense_attention(q, k, v, positions, segments):
    """float64, one head at a time."""
    b, _, h, e = q.shape
    out = np.zeros_like(q)
    group = h // k.shape[2]
    for row in range(b):
        for head in range(h):
            scores = q[row, :, head] @ k[row, :, head // group].T / np.sqrt(e)
            same = segments[row][:, None] == segments[row]
            visible = same & (positions[row][:, None] >= positions[row])
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[row, :, head] = weights @ v[row, :, head // group]
    return out


def qkv(rng, heads, kv_heads, t=16):
    shapes = [(1, t, heads, 8), (1, t, kv_heads, 8), (1, t, kv_heads, 8)]
    return [rng.normal(0, 1.5, shape) for shape in shapes]


def attend(q, k, v):
    return layers.attend(q, k, v, POSITIONS, SEGMENTS, POSITIONS, SEGMENTS)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_attend_shares_kv_heads_in_consecutive_groups(rng, heads, kv_heads):
    q, k, v = qkv(rng, heads, kv_heads)
    got = attend(*map(jnp.float32, (q, k, v)))
    np.testing.assert_allclose(
        got, dense_attention(q, k, v, np.asarray(POSITIONS), np.asarray(SEGMENTS)), atol=2e-6
    )


@pytest.mark.parametrize("block", [4, 7, 8])
def test_blocks_equal_the_plain_path(rng, monkeypatch, block):
    """Same values and gradients when a row is longer than QUERY_BLOCK."""
    q, k, v = map(jnp.float32, qkv(rng, 4, 2))
    weights = jnp.float32(rng.normal(size=q.shape))

    def both():
        loss = lambda *args: (attend(*args) * weights).sum()
        return attend(q, k, v), *jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    plain = both()
    monkeypatch.setattr(layers, "QUERY_BLOCK", block)
    assert "while" in jax.jit(attend).lower(q, k, v).as_text()
    for one, other in zip(both(), plain, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_a_query_that_sees_nothing_is_finite(rng):
    q, k, v = map(jnp.float32, qkv(rng, 2, 2))
    alone = jnp.full_like(SEGMENTS, 9)

    def total(q, k, v):
        return layers.attend(q, k, v, POSITIONS, alone, POSITIONS, SEGMENTS).sum()

    value, grads = jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)
    assert bool(jnp.isfinite(value))
    assert all(bool(jnp.isfinite(g).all()) for g in grads)


@pytest.mark.parametrize("block", [512, 4, 3])
def test_segments_and_future_are_invisible(params, monkeypatch, block):
    """Exactly: the other tokens get weight 0.0, so not a bit of a hidden state may change."""
    monkeypatch.setattr(layers, "QUERY_BLOCK", block)
    run = jax.jit(lambda tokens: qwen3.forward(params, tokens, POSITIONS, SEGMENTS, cfg=CFG)[0])
    tokens = np.random.default_rng(2).integers(0, 32, SEGMENTS.shape)
    before = np.asarray(run(tokens))
    for changed, untouched, touched in [
        (3, [*range(3), *range(7, 16)], range(3, 7)),  # inside the first segment
        (8, [*range(8), *range(13, 16)], range(8, 13)),  # inside the second
        (14, range(14), range(14, 16)),  # inside the padding
    ]:
        other = tokens.copy()
        other[0, changed] = (other[0, changed] + 1) % 32
        after = np.asarray(run(other))
        np.testing.assert_array_equal(after[list(untouched)], before[list(untouched)])
        assert (np.abs(after - before)[list(touched)].max(-1) > 1e-4).all()


def test_no_gradient_crosses_segments(params):
    """Token 0 stands in the first segment alone; its row gets exactly no gradient."""
    tokens = jnp.maximum(jnp.arange(16) - 6, 0)[None]

    @jax.jit
    def gradient(params):
        run = lambda p: qwen3.forward(p, tokens, POSITIONS, SEGMENTS, cfg=CFG)[0, 7:13].sum()
        return jax.grad(run)(params).embed

    rows = np.abs(np.asarray(gradient(params))).max(-1)
    assert rows[0] == 0
    assert (rows[1:7] > 0).all()


@pytest.mark.parametrize("spec", ["seq:2,tensor:2", "data:2,fsdp:2"])
def test_forward_on_a_mesh(params, spec):
    rng = np.random.default_rng(3)
    tokens = jnp.asarray(rng.integers(0, 32, (4, 16)))
    batch = (tokens, jnp.repeat(POSITIONS, 4, 0), jnp.repeat(SEGMENTS, 4, 0))
    alone = qwen3.forward(params, *batch, cfg=CFG)
    mesh = make_mesh(MeshSpec.parse(spec), jax.devices()[:4])
    placed = jax.device_put(params, params_lib.shardings(CFG, mesh))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda params, *batch: qwen3.forward(params, *batch, cfg=CFG))
        got = run(placed, *batch)
    np.testing.assert_allclose(got, alone, atol=5e-6)


@pytest.mark.parametrize(
    "remat", ["full", *(pytest.param(r, marks=pytest.mark.slow) for r in ("dots", "attention"))]
)
def test_recomputation_changes_nothing(params, remat):
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 32, SEGMENTS.shape))

    def gradient(remat):
        cfg = dataclasses.replace(CFG, remat=remat)
        run = lambda p: (qwen3.forward(p, tokens, POSITIONS, SEGMENTS, cfg=cfg) ** 2).sum()
        return jax.jit(jax.grad(run))(params)

    check = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(check, gradient(remat), gradient("none"))
