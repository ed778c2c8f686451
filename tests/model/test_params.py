# SPDX-License-Identifier: Apache-2.0
"""Shapes, counts, initial values and layouts of the parameter tree."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from klear_jax.core.mesh import AXES, TRAIN, MeshSpec, make_mesh
from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3, ModelConfig, with_vocab

# Total, and what is outside the embedding tables (klear_spec.md 8.2).
COUNTS = {
    "0.6b": (596_049_920, 440_467_456),
    "1.7b": (1_720_574_976, 1_409_410_048),
    "4b": (4_022_468_096, 3_633_511_936),
    "8b": (8_190_735_360, 6_946_075_648),
    "14b": (14_768_307_200, 13_212_482_560),
    "32b": (32_762_123_264, 31_206_298_624),
}
SMALL = ModelConfig(
    layers=8, d_model=64, q_heads=4, kv_heads=2, head_dim=6, d_ff=64, vocab=32, live_vocab=31,
    tied=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    """Drawn without a mesh."""
    return params_lib.init(SMALL, 3)


def abstract_mesh(text: str) -> AbstractMesh:
    """A mesh of any size without devices."""
    sizes = MeshSpec.parse(text).sizes
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    cfg = QWEN3[name]
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(params_lib.abstract(cfg))]
    total, inner = COUNTS[name]
    tables = cfg.vocab * cfg.d_model * (1 if cfg.tied else 2)
    assert (sum(sizes), sum(sizes) - tables) == (total, inner)
    assert cfg.parameter_count == total
    assert (params_lib.describe(cfg).unembed is None) == cfg.tied


@pytest.mark.parametrize("cfg", [QWEN3["tiny"], SMALL, dataclasses.replace(SMALL, tied=False)])
def test_count_formula_of_small_models(cfg):
    shapes = jax.tree.leaves(params_lib.abstract(cfg))
    assert sum(math.prod(x.shape) for x in shapes) == cfg.parameter_count


def test_values_do_not_depend_on_the_mesh(alone):
    mesh = make_mesh(MeshSpec.parse("fsdp:2,tensor:2"), jax.devices()[:4])
    placed = params_lib.init(SMALL, 3, mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7), placed, alone)

    def same_layout(leaf, target):
        assert leaf.sharding.is_equivalent_to(target, leaf.ndim)

    jax.tree.map(same_layout, placed, params_lib.shardings(SMALL, mesh))
    assert {x.dtype for x in jax.tree.leaves(alone)} == {np.dtype("float32")}


def test_scales_of_initial_values(alone):
    params = alone
    assert float(params.embed.std()) == pytest.approx(0.02, rel=0.1)
    assert float(params.blocks.mlp.up.std()) == pytest.approx(0.02, rel=0.05)
    # What writes into the residual stream is smaller by sqrt(2 * layers).
    assert float(params.blocks.mlp.down.std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert float(params.blocks.attn.wo.std()) == pytest.approx(0.02 / 4, rel=0.05)
    for norm in (params.final_norm, params.blocks.attn_norm, params.blocks.attn.q_norm):
        assert bool((norm == 1).all())
    assert not np.array_equal(params.blocks.mlp.up[0], params.blocks.mlp.up[1])
    assert not np.array_equal(params.blocks.mlp.up, params.blocks.mlp.gate)


@pytest.mark.parametrize(
    ("name", "mesh", "text"),
    [
        ("8b", "tensor:16", r"kv_heads \(size 8\) over tensor into 16 .* \[1, 2, 4, 8\]"),
        ("8b", "fsdp:12", r"embed \(size 4096\) over .*fsdp.* into 12 pieces.*\[1, 2, 4, 8\]"),
        ("0.6b", "fsdp:3,seq:5", r"embed \(size 1024\) over .*'fsdp', 'seq'.* 15 pieces.*\[1, 2"),
        ("tiny", "tensor:4", r"kv_heads \(size 2\) .* out of \[1, 2\]"),
    ],
)
def test_mesh_that_does_not_divide(name, mesh, text):
    with pytest.raises(ValueError, match=text):
        params_lib.shardings(QWEN3[name], abstract_mesh(mesh))


@pytest.mark.parametrize("mesh", ["fsdp:64,tensor:4", "fsdp:8", "data:4,fsdp:4,seq:4,tensor:8"])
def test_bytes_a_device_of_8b(mesh):
    """Matrices are cut over every axis but `data`; norms (0.004 % of the weights) are whole."""
    cfg, spec = QWEN3["8b"], MeshSpec.parse(mesh)
    leaves = jax.tree.leaves(params_lib.abstract(cfg, abstract_mesh(mesh)))
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    norms = cfg.layers * (2 * cfg.d_model + 2 * cfg.head_dim) + cfg.d_model
    matrices = cfg.parameter_count - norms
    assert held == 4 * (matrices // (spec.fsdp * spec.seq * spec.tensor) + norms)


def test_abstract_types():
    half = params_lib.abstract(QWEN3["8b"], dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(half)} == {np.dtype(jnp.bfloat16)}


def test_every_weight_names_known_axes():
    def check(info):
        assert len(info.shape) == len(info.axes)
        assert TRAIN.spec(*info.axes) is not None

    jax.tree.map(check, params_lib.describe(SMALL))


def test_config_refuses():
    with pytest.raises(ValueError, match=r"4 query heads cannot share 3 KV heads.*must divide"):
        dataclasses.replace(SMALL, kv_heads=3)
    with pytest.raises(ValueError, match=r"live_vocab 33 must lie in 1..32"):
        dataclasses.replace(SMALL, live_vocab=33)


def test_with_vocab():
    tiny = QWEN3["tiny"]
    assert with_vocab(tiny, 260) == dataclasses.replace(tiny, live_vocab=260)
    grown = with_vocab(tiny, 1001)
    assert (grown.vocab, grown.live_vocab) == (1008, 1001)
    assert with_vocab(tiny, 151_669).vocab == 151_936
    assert with_vocab(QWEN3["8b"], 263).vocab == 264
