# SPDX-License-Identifier: Apache-2.0
"""A rollout as a file: what comes back, on which devices, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.rl.minibatch import MiniBatch
from klear_jax.rl.rollout_file import Rollout, load_rollout, save_rollout

SHAPE = (2, 4, 6)
INTEGERS = ("tokens", "targets", "positions", "segments")


def rollout(minibatches=2):
    rng = np.random.default_rng(0)

    def leaf(name):
        if name in INTEGERS:
            return rng.integers(0, 9, SHAPE).astype(np.int32)
        return rng.random(SHAPE) < 0.5 if name == "mask" else rng.random(SHAPE).astype(np.float32)

    made = tuple(
        MiniBatch(
            RolloutBatch(**{f.name: leaf(f.name) for f in dataclasses.fields(RolloutBatch)}),
            number + 1, 0.25,
        )
        for number in range(minibatches)
    )  # fmt: skip
    return Rollout(7, 9, made, {"reward": np.float32(0.5), "groups": 3})


def same(one, other):
    def equal(x, y):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)

    assert (one.number, one.position) == (other.number, other.position)
    assert len(one.minibatches) == len(other.minibatches)
    for a, b in zip(one.minibatches, other.minibatches, strict=True):
        assert (a.microbatches, a.padding_share) == (b.microbatches, b.padding_share)
        jax.tree.map(equal, a.batch, b.batch)


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "step-00007.npz"
    about = {"model": {"layers": 3}, "config": {"tasks": ["sum"]}}
    save_rollout(path, rollout(), about)
    loaded, told = load_rollout(path)
    same(loaded, rollout())
    assert told == about
    assert loaded.values == {"reward": 0.5, "groups": 3}
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no half-written file beside it


def test_round_trip_onto_a_mesh(tmp_path):
    path = tmp_path / "step.npz"
    mesh = make_mesh(MeshSpec.parse("fsdp:4"))
    save_rollout(path, rollout(), {})
    loaded, _ = load_rollout(path, mesh)
    same(loaded, rollout())
    assert len(loaded.minibatches[0].batch.tokens.sharding.device_set) == 4
    # And from the mesh to a file again.
    save_rollout(path, loaded, {})
    same(load_rollout(path)[0], rollout())


def test_a_rollout_without_mini_batches(tmp_path):
    save_rollout(tmp_path / "step.npz", rollout(0), {})
    same(load_rollout(tmp_path / "step.npz")[0], rollout(0))


def test_a_missing_file(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        load_rollout(tmp_path / "none.npz")


def no_npz(path):
    path.write_text("nothing of the kind")


def empty(path):
    path.write_bytes(b"")


def truncated(path):
    save_rollout(path, rollout(), {})
    path.write_bytes(path.read_bytes()[:-200])


def no_record(path):
    np.savez(path, x=np.ones(2))


def no_json(path):
    np.savez(path, record=np.array("{"))


def leaf_missing(path):
    save_rollout(path, rollout(), {})
    with np.load(path) as file:
        arrays = {name: file[name] for name in file if name != "1/old_entropy"}
    np.savez(path, **arrays)


def pickled(path):
    np.savez(path, record=np.array([{"a": 1}], dtype=object))


@pytest.mark.parametrize(
    "damage", [no_npz, empty, truncated, no_record, no_json, leaf_missing, pickled]
)
def test_what_is_no_rollout_is_refused(tmp_path, damage):
    path = tmp_path / "step.npz"
    damage(path)
    with pytest.raises(ValueError, match=r"step\.npz is no rollout that this version wrote .*make"):
        load_rollout(path)


def test_a_record_of_another_version_is_refused(tmp_path):
    path = tmp_path / "step.npz"
    save_rollout(path, rollout(), {})
    with np.load(path) as file:
        arrays = dict(file)
    record = json.loads(str(arrays.pop("record")))
    del record["position"]
    np.savez(path, record=np.array(json.dumps(record)), **arrays)
    with pytest.raises(ValueError, match="position"):
        load_rollout(path)
