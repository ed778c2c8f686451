# SPDX-License-Identifier: Apache-2.0
"""The trainer's weights on their way to the sampler, and completions on meshes of all kinds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3
from klear_jax.sampling import weights
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.draw import Truncation
from klear_jax.sampling.request import Request
from klear_jax.sampling.sampler import Sampler

CFG = dataclasses.replace(QWEN3["tiny"], layers=2)
ENGINE = EngineConfig(
    slots=8, length=64, stop_ids=tuple(range(3, 263, 40)), page=8, steps=8, prefill_rows=4
)
MOVES = {
    "other shape": ("fsdp:2,tensor:2", "data:4", [0, 1, 2, 3], [0, 1, 2, 3]),
    "other order": ("fsdp:2,tensor:2", "data:2,tensor:2", [0, 1, 2, 3], [2, 0, 3, 1]),
    "halves": ("fsdp:2", "tensor:2", [0, 1], [2, 3]),
    "one of four": ("fsdp:4", "data:1", [0, 1, 2, 3], [3]),
}


@functools.cache
def host_weights(seed=0):
    """Weights so large that what a token sees decides what it says."""
    return jax.tree.map(lambda x: np.asarray(4 * x), params_lib.init(CFG, seed))


def mesh_of(spec, places):
    """A mesh with its devices in exactly this order."""
    devices = [jax.devices()[i] for i in places]
    return make_mesh(MeshSpec.parse(spec), devices)


def placed(mesh, seed=0):
    return jax.tree.map(jax.device_put, host_weights(seed), params_lib.shardings(CFG, mesh))


def requests():
    rng = np.random.default_rng(0)
    return [
        Request(
            f"r{n}", tuple(rng.integers(0, 263, rng.integers(1, 30)).tolist()), n,
            int(rng.integers(1, 30)), float(rng.choice([0.0, 0.7, 1.0])),
        )
        for n in range(20)
    ]  # fmt: skip


def drawn(sampler):
    completions = list(sampler.sample(requests()))
    assert len(completions) == 20
    return {c.id: c for c in completions}


@functools.cache
def baseline(truncated=False, seed=0):
    """On one device."""
    return drawn(Sampler(jax.tree.map(jnp.asarray, host_weights(seed)), CFG, engine(truncated)))


def engine(truncated):
    """Plain, or with everything that changes the draw, in a pool that is too small."""
    if not truncated:
        return ENGINE
    odd = {"truncation": Truncation(20, 0.9, 0.01), "repetition_penalty": 1.3, "pages": 32}
    return dataclasses.replace(ENGINE, narrowest=4, **odd)


def assert_same(got, expected):
    for name, one in expected.items():
        assert got[name].tokens.tolist() == one.tokens.tolist(), name
        assert got[name].stop == one.stop
        np.testing.assert_allclose(got[name].logprobs, one.logprobs, atol=2e-4)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        "data:2,tensor:2",
        *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("data:4", "fsdp:2,seq:2")),
    ],
)
def test_completions_do_not_depend_on_the_mesh(spec, truncated):
    """Slots and pages over all axes but tensor, heads and vocabulary over that."""
    mesh = mesh_of(spec, range(4))
    with jax.set_mesh(mesh):
        got = drawn(Sampler(placed(mesh), CFG, engine(truncated)))
    assert_same(got, baseline(truncated))


@pytest.mark.parametrize("move", MOVES)
def test_completions_after_a_swap(move):
    """Every swap is one counted copy of all weights that leaves the trainer's alone, and what is
    drawn then is what the trainer's weights say."""
    source, target, here, there = MOVES[move]
    train, rollout = mesh_of(source, here), mesh_of(target, there)
    with jax.set_mesh(train):
        params = placed(train)
        sampler = Sampler(params, CFG, ENGINE, mesh=rollout)
        held = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(sampler.params)
            for shard in leaf.addressable_shards
        )
        assert sampler.copied_bytes == held >= sum(x.nbytes for x in jax.tree.leaves(params))
        assert_same(drawn(sampler), baseline())
        after = placed(train, seed=1)
        sampler.update(after)
        assert sampler.version == 1
        assert_same(drawn(sampler), baseline(seed=1))
    for leaf, layout in zip(
        jax.tree.leaves(sampler.params),
        jax.tree.leaves(params_lib.shardings(CFG, rollout)),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(layout, leaf.ndim)
    # The trainer's own are where they were, and donating them leaves the sampler's alone.
    for leaf, host in zip(jax.tree.leaves(params), jax.tree.leaves(host_weights()), strict=True):
        np.testing.assert_array_equal(leaf, host)
        leaf.delete()
    for leaf in jax.tree.leaves(after):
        leaf.delete()
    with jax.set_mesh(train):
        assert_same(drawn(sampler), baseline(seed=1))


@pytest.mark.parametrize("spec", [None, "fsdp:2,tensor:2"])
def test_equal_mesh_and_type_share_the_arrays(spec):
    """Also where the rollout mesh is named: no byte is copied."""
    mesh = mesh_of("fsdp:2,tensor:2", range(4))
    with jax.set_mesh(mesh):
        params = placed(mesh)
        sampler = Sampler(params, CFG, ENGINE, mesh=spec and mesh_of(spec, range(4)))
    assert sampler.copied_bytes == 0
    pairs = zip(jax.tree.leaves(sampler.params), jax.tree.leaves(params), strict=True)
    assert all(one is other for one, other in pairs)


def test_a_swap_on_equal_devices_is_one_program(monkeypatch):
    """No leaf is sent by itself."""
    monkeypatch.setattr(jax, "device_put", None)
    train, rollout = mesh_of("fsdp:4", range(4)), mesh_of("data:2,tensor:2", range(4))
    params = jax.jit(
        lambda: params_lib.init(CFG, 0), out_shardings=params_lib.shardings(CFG, train)
    )()
    assert weights.swap(params, CFG, mesh=rollout).copied_bytes > 0


def test_narrow_weights_stay_close():
    """bfloat16 in the sampler, float32 in the trainer: half the bytes, log-probs within 0.05."""
    params = params_lib.init(CFG, 0)
    swapped = weights.swap(params, CFG, dtype="bfloat16")
    assert swapped.copied_bytes == sum(x.nbytes for x in jax.tree.leaves(params)) // 2
    assert 0 < weights.probe(params, swapped.params, CFG, mesh=None) < 0.05


@pytest.mark.parametrize("fault", ["stale", "mixed up", "nan"])
def test_a_swap_that_went_wrong_stops_the_run(monkeypatch, fault):
    """Old weights, two matrices that changed places, or no numbers: never silently."""
    real = weights.swap
    stale = params_lib.init(CFG, 1)

    def swap(params, *args, **kw):
        good = real(params, *args, dtype="bfloat16")
        blocks = good.params.blocks
        mixed = dataclasses.replace(blocks.attn, wk=blocks.attn.wv, wv=blocks.attn.wk)
        bad = {
            "stale": jax.tree.map(lambda x: x.astype(jnp.bfloat16), stale),
            "mixed up": dataclasses.replace(
                good.params, blocks=dataclasses.replace(blocks, attn=mixed)
            ),
            "nan": dataclasses.replace(good.params, final_norm=good.params.final_norm * jnp.nan),
        }[fault]
        return dataclasses.replace(good, params=bad)

    monkeypatch.setattr(weights, "swap", swap)
    with pytest.raises(weights.WeightMismatchError, match="probe prompt's log-probs differ by"):
        Sampler(params_lib.init(CFG, 0), CFG, ENGINE, dtype="bfloat16")


@pytest.mark.parametrize(
    ("changes", "words"), [({"slots": 6}, "slots 6"), ({"pages": 30}, "pages 30")]
)
def test_what_the_mesh_does_not_cut_is_refused(changes, words):
    mesh = mesh_of("data:4", range(4))
    with jax.set_mesh(mesh):
        sampler = Sampler(placed(mesh), CFG, dataclasses.replace(ENGINE, **changes))
        with pytest.raises(ValueError, match=rf"into 4 pieces.* {words}; choose a multiple of 4"):
            sampler.sample(requests())


def test_a_request_must_fit_its_piece_of_the_pages():
    """A quarter of the pages is all that a slot can have on four devices."""
    mesh = mesh_of("data:4", range(4))
    with jax.set_mesh(mesh):
        sampler = Sampler(placed(mesh), CFG, dataclasses.replace(ENGINE, pages=16))
        with pytest.raises(ValueError, match=r"need 5 pages of 8 tokens, and a slot can have 4"):
            sampler.sample([Request("a", (1, 2, 3), 0, 34)])
