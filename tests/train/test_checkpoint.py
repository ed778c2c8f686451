# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is written comes back bit for bit, half-written ones never do, and another
model's is refused before a weight is read."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.train import checkpoint
from klear_jax.train.checkpoint import CheckpointError, Checkpoints, load_params, saved_model
from klear_jax.train.optim import OptimConfig, make_optimizer
from klear_jax.train.state import TrainState, abstract_state

CFG = ModelConfig(
    layers=2, d_model=16, q_heads=4, kv_heads=2, head_dim=8, d_ff=24, vocab=32, live_vocab=30
)
OPTIMIZER = make_optimizer(OptimConfig())
RECORD = {"kind": "gppo", "seed": 7, "model": dataclasses.asdict(CFG)}


@functools.cache
def mesh_of(spec="data:1"):
    count = int(np.prod(MeshSpec.parse(spec).sizes))
    return make_mesh(MeshSpec.parse(spec), jax.devices()[:count])


def state_of(seed, spec="data:1"):
    """A state with random moments and counts."""
    rng = np.random.default_rng(seed)
    abstract = abstract_state(CFG, OPTIMIZER, mesh_of(spec))

    def draw(leaf):
        value = rng.normal(size=leaf.shape) if leaf.dtype == jnp.float32 else rng.integers(1, 99)
        return jax.device_put(np.asarray(value, leaf.dtype), leaf.sharding)

    return jax.tree.map(draw, abstract)


def abstract_of(spec="data:1"):
    return abstract_state(CFG, OPTIMIZER, mesh_of(spec))


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(expected))


def save(run: Path, steps, **options):
    saves = Checkpoints(run, **options)
    for step in steps:
        saves.save(step, state_of(step), RECORD | {"step": step})
    saves.close()


def test_a_state_comes_back_whole(tmp_path):
    save(tmp_path, [3])
    saves = Checkpoints(tmp_path)
    assert saves.latest() == 3
    assert saves.record(3) == RECORD | {"step": 3}
    state = saves.restore(3, abstract_of())
    assert isinstance(state, TrainState)
    assert_same(state, state_of(3))
    assert_same(saves.restore_params(3, abstract_of().params), state_of(3).params)
    assert state.params.embed.dtype == jnp.float32


@pytest.mark.parametrize("spec", ["fsdp:2,tensor:2", "data:2,fsdp:2", "fsdp:2,seq:2"])
def test_another_mesh(tmp_path, spec):
    save(tmp_path, [1])
    state = Checkpoints(tmp_path).restore(1, abstract_of(spec))
    assert_same(state, state_of(1))
    layout = params_lib.shardings(CFG, mesh_of(spec))
    jax.tree.map(
        lambda x, s: None if x.sharding == s else pytest.fail(str(s)), state.params, layout
    )
    back = Checkpoints(tmp_path / "b")
    back.save(1, state, RECORD)
    assert_same(back.restore(1, abstract_of()), state_of(1))


def test_the_last_two_are_kept(tmp_path):
    save(tmp_path, [1, 2, 3])
    assert sorted(p.name for p in (tmp_path / checkpoint.FOLDER).iterdir()) == ["2", "3"]
    assert_same(Checkpoints(tmp_path).restore(2, abstract_of()), state_of(2))


def test_no_checkpoint(tmp_path):
    assert Checkpoints(tmp_path).latest() is None
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_params(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_params(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_save_that_was_killed_is_ignored(tmp_path):
    """The temporary folder of a save of step 5, and one that was half renamed."""
    save(tmp_path, [4])
    folder = tmp_path / checkpoint.FOLDER
    (folder / "5.orbax-checkpoint-tmp-12").mkdir()
    (folder / "5.orbax-checkpoint-tmp-12" / "params").mkdir()
    saves = Checkpoints(tmp_path)
    assert saves.latest() == 4
    assert_same(saves.restore(4, abstract_of()), state_of(4))
    saves.save(5, state_of(5), RECORD)
    assert_same(saves.restore(5, abstract_of()), state_of(5))


def full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_a_full_disk(tmp_path, monkeypatch):
    save(tmp_path, [1, 2])
    saves = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full_disk)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            saves.save(3, state_of(3), RECORD)
    assert "--resume from step 2" in str(caught.value)
    assert "\n" not in str(caught.value)
    for step in (1, 2):
        assert_same(Checkpoints(tmp_path).restore(step, abstract_of()), state_of(step))


FULL = """
import resource, sys
import test_checkpoint as t
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
saves = t.Checkpoints(t.Path(sys.argv[1]))
try:
    saves.save(3, t.state_of(3), t.RECORD)
except t.CheckpointError as error:
    print(error)
    sys.exit(7)
"""


def test_writes_that_fail_half_way(tmp_path):
    """A limit on the size of files, as a stand-in for a disk that fills up inside a save."""
    save(tmp_path, [1, 2])
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], env=env, capture_output=True, text=True
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "cannot write checkpoint 3" in done.stdout
    saves = Checkpoints(tmp_path)
    assert saves.latest() == 2
    for step in (1, 2):
        assert_same(saves.restore(step, abstract_of()), state_of(step))


# --- whose checkpoint -------------------------------------------------------------------------


def never(*args, **kwargs):
    pytest.fail("a weight was read or made")


def test_restore_or_init(tmp_path):
    abstract = abstract_of()
    saves = Checkpoints(tmp_path)
    state, step = checkpoint.restore_or_init(saves, RECORD, abstract, lambda: state_of(9))
    assert step == 0
    assert_same(state, state_of(9))
    saves.save(4, state_of(4), RECORD)
    state, step = checkpoint.restore_or_init(saves, RECORD, abstract, never)
    assert step == 4
    assert_same(state, state_of(4))


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"seed": 8}, "seed: checkpoint 7, here 8"), ({"kind": "sft"}, "kind: checkpoint 'gppo'"),
     ({"problems": "abc"}, "problems: checkpoint None, here 'abc'")],
)  # fmt: skip
def test_another_run_is_refused(tmp_path, monkeypatch, change, expected):
    save(tmp_path, [4])
    saves = Checkpoints(tmp_path)
    monkeypatch.setattr(Checkpoints, "restore", never)
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.restore_or_init(
            saves, RECORD | {"step": 4} | change, abstract_of(), lambda: never()
        )


@pytest.mark.parametrize(
    "change", [{"layers": 3}, {"d_ff": 32}, {"tied": True}, {"norm_eps": 1e-5}]
)
def test_another_model_is_refused(tmp_path, monkeypatch, change):
    save(tmp_path, [4])
    saves = Checkpoints(tmp_path)
    monkeypatch.setattr(Checkpoints, "restore", never)
    other = dataclasses.asdict(dataclasses.replace(CFG, **change))
    record = RECORD | {"step": 4, "model": other}
    with pytest.raises(CheckpointError, match=f"'{next(iter(change))}'"):
        checkpoint.restore_or_init(saves, record, abstract_of(), lambda: never())


def test_how_it_is_computed_may_differ(tmp_path):
    save(tmp_path, [4])
    other = dataclasses.replace(CFG, dtype="bfloat16", remat="full", max_positions=77)
    record = RECORD | {"step": 4, "model": dataclasses.asdict(other)}
    state, step = checkpoint.restore_or_init(Checkpoints(tmp_path), record, abstract_of(), never)
    assert step == 4
    assert_same(state, state_of(4))


def test_check_same_names_each_field():
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_same({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4}, what="X")
    assert str(caught.value) == (
        "X: b: checkpoint 2, here 5; c: checkpoint 3, here None; d: checkpoint None, here 4"
    )
    checkpoint.check_same({"a": 1}, {"a": 1}, what="X")


# --- parameters alone -------------------------------------------------------------------------


def test_load_params(tmp_path, monkeypatch):
    save(tmp_path, [2, 5])
    params, cfg = load_params(tmp_path)
    assert cfg == CFG == saved_model(tmp_path)
    assert_same(params, state_of(5).params)
    params, _ = load_params(tmp_path, mesh=mesh_of("fsdp:2,tensor:2"))
    assert_same(params, state_of(5).params)
    assert params.embed.sharding == params_lib.shardings(CFG, mesh_of("fsdp:2,tensor:2")).embed
    monkeypatch.setattr(Checkpoints, "restore_params", never)
    assert saved_model(tmp_path) == CFG
