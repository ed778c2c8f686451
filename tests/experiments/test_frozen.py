# SPDX-License-Identifier: Apache-2.0
"""The frozen-rollout bench as a script: what it writes, what it says, and what it refuses."""

import dataclasses
import json
import sys

import frozen
import jax
import numpy as np
import pytest
import session
from configs import GppoRun

from klear_jax.core.batch import RolloutBatch
from klear_jax.data.tokenizer import load_tokenizer
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.report import frozen as report
from klear_jax.rl.minibatch import MiniBatch
from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout_file import Rollout, save_rollout
from klear_jax.rl.surrogates import Clip
from klear_jax.train.checkpoint import Checkpoints
from klear_jax.train.state import TrainState
from klear_jax.train.step import make_scorer

MODEL = ModelConfig(
    layers=1, d_model=16, q_heads=2, kv_heads=1, head_dim=8, d_ff=24, vocab=264, live_vocab=263,
    tied=True, max_positions=64, init_range=0.4,
)  # fmt: skip
RUN = GppoRun(clip=Clip(low=0.1, high=0.3), objective=Objective(positive_nll=0.2))
SHAPE = (1, 4, 16)
FEW = ("--variants", "ppo", "gppo", "gspo_matched")


def script(monkeypatch, capsys, *flags):
    """Status, stdout and stderr, run in this process."""
    monkeypatch.setattr(sys, "argv", ["frozen.py", *map(str, flags)])
    with pytest.raises(SystemExit) as caught:
        session.main(frozen.run_frozen)
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def save_run(folder, *, spread=0.5, cfg=MODEL, about=None):
    """A run of one checkpoint and one rollout: text, and a model with random weights."""
    rng = np.random.default_rng(0)
    params = params_lib.init(cfg, 0)
    ids = rng.integers(33, 127, SHAPE).astype(np.int32)
    mask = np.broadcast_to(np.arange(16) >= 6, SHAPE)
    zero = np.zeros(SHAPE, np.float32)
    advantages = np.where(mask, np.array([1.5, -1.5, 0.7, -0.7])[:, None], 0).astype(np.float32)
    batch = RolloutBatch(
        tokens=ids, targets=np.roll(ids, -1, axis=-1), segments=np.ones(SHAPE, np.int32),
        positions=np.broadcast_to(np.arange(16, dtype=np.int32), SHAPE), mask=mask,
        loss_weights=(mask / mask.sum()).astype(np.float32), positive_weights=zero,
        advantages=advantages, old_logprobs=zero, old_entropy=zero, reference_logprobs=zero,
        sampler_logprobs=zero,
    )  # fmt: skip
    batch = jax.tree.map(jax.numpy.asarray, batch)
    logprobs, entropy = make_scorer(cfg, temperature=1.0)(params, batch, 1)
    old = logprobs + rng.normal(0, spread, SHAPE).astype(np.float32)
    batch = dataclasses.replace(batch, old_logprobs=old, old_entropy=entropy)
    path = folder / "rollouts" / "step-00002.npz"
    if about is None:
        about = {"model": dataclasses.asdict(MODEL), "config": session.config_record(RUN)}
    save_rollout(path, Rollout(2, 3, (MiniBatch(batch, 1, 0.0),), {}), about)
    saves = Checkpoints(folder)
    one = np.ones(2, np.float32)
    state = TrainState(params=params, opt_state={"m": one}, updates=one, skipped=one)
    saves.save(5, state, {"model": dataclasses.asdict(cfg)})
    saves.close()
    return path


def test_what_it_writes_and_says(monkeypatch, capsys, work):
    path = save_run(work / "run")
    status, out, err = script(monkeypatch, capsys, path, *FEW)
    assert status == 0, err
    folder = work / "run" / "frozen" / "step-00002"
    for name in ("heatmap.png", "tokens.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "frozen.json").read_text())
    assert (record["step"], record["weights"]["step"], record["remark"]) == (2, 5, "")
    # The bounds are those of the run.
    assert record["bounds"] == {"low": 0.1, "high": 0.3, "dual": None}
    assert record["cosines"]["names"] == list(FEW[1:])
    values = np.array(record["cosines"]["values"])
    np.testing.assert_allclose(values, values.T)
    np.testing.assert_allclose(np.diag(values), 1)
    ppo, gppo = record["variants"]["ppo"], record["variants"]["gppo"]
    assert ppo["loss"] == pytest.approx(gppo["loss"], abs=1e-6)
    assert ppo["no_gradient"] > gppo["no_gradient"] == 0
    assert gppo["kept_pos"] + gppo["kept_neg"] > ppo["kept_pos"] + ppo["kept_neg"] == 0
    first = record["tokens"][0]
    assert first["cell"] == "A > 0, r high"
    assert (first["weights"]["ppo"], first["weights"]["gppo"]) == pytest.approx((0, 1.3))
    assert first["ratio"] > 1.3
    ids = load_tokenizer("bytes").encode(first["before"])
    assert len(ids) == first["place"][3] + 1
    assert record["tokens_by_variant"]["ppo"] == []
    assert "Cosine of ppo and gppo" in out
    assert "gspo_matched" in out
    assert f"results: {folder}" in out


def test_weights_that_sampled_have_nothing_to_compare(monkeypatch, capsys, work):
    path = save_run(work / "run", spread=0.0)
    flags = (*FEW[:3], "--terms=objective", "--out=there")
    status, out, err = script(monkeypatch, capsys, path, *flags)
    assert status == 0, err
    assert "Nothing to compare: every ratio is 1" in out
    assert "Same direction: ppo = gppo" in out
    record = json.loads((work / "there" / "frozen.json").read_text())
    assert record["tokens"] == []
    assert not (work / "there" / "tokens.png").exists()


# --- refused ----------------------------------------------------------------------------------


def assert_refused(monkeypatch, capsys, flags, *says):
    status, out, err = script(monkeypatch, capsys, *flags)
    assert status == 2, out + err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for text in says:
        assert text in err


def test_files_that_are_no_rollout(monkeypatch, capsys, work):
    path = save_run(work / "run")
    whole = path.read_bytes()
    assert_refused(monkeypatch, capsys, ["none.npz"], "No such file", "none.npz")
    for bad in (b"", b"text", whole[:-100], whole[: len(whole) // 2]):
        path.write_bytes(bad)
        assert_refused(monkeypatch, capsys, [path], "no rollout", "--save-rollouts")
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    assert_refused(monkeypatch, capsys, [path], str(path))


def test_weights_that_do_not_fit(monkeypatch, capsys, work):
    path = save_run(work / "run")
    save_run(work / "other", cfg=dataclasses.replace(MODEL, d_ff=32))
    other = "--weights=other"
    assert_refused(monkeypatch, capsys, [path, other], "another model", "d_ff: checkpoint 32, here")
    assert_refused(monkeypatch, capsys, [path, "--weights=nowhere"], "no folder nowhere")
    (work / "rollouts").mkdir()
    alone = path.rename(work / "rollouts" / "step.npz")
    assert_refused(monkeypatch, capsys, [alone], "lies in no run with a checkpoint", "--weights")


def test_rollouts_without_a_run(monkeypatch, capsys, work):
    ahead = save_run(work / "one", about={})
    assert_refused(monkeypatch, capsys, [ahead], "does not say which run", "RUN/rollouts/")
    config = {"model": dataclasses.asdict(MODEL), "config": {"steps": "many"}}
    old = save_run(work / "two", about=config)
    assert_refused(monkeypatch, capsys, [old], "another version of the program")


def test_flags(monkeypatch, capsys, work):
    path = save_run(work / "run")
    assert_refused(monkeypatch, capsys, [path, "--mesh=fsdp:3"], "fsdp:3 needs 3 devices")
    assert_refused(monkeypatch, capsys, [path, "--low=2"], "clip low 2.0 must lie in [0, 1]")
    for flags, says in ((["--variants", "dpo"], "no variant 'dpo'"), (["--tokens=0"], "tokens 0")):
        status, _, err = script(monkeypatch, capsys, path, *flags)
        assert status == 2
        assert says in err


# --- parts ------------------------------------------------------------------------------------


def test_every_variant_is_made_of_valid_numbers():
    for clip in (Clip(), Clip(variant="aspo", dual=2.0), Clip(variant="ppo", dual=10.0)):
        run = dataclasses.replace(RUN, clip=clip)
        base = frozen.base_clip(frozen.Options(), run)
        assert base.dual == (10.0 if clip.variant == "ppo" else None)
        for name in set(frozen.NAMES) - {"gspo_matched"}:
            made = frozen.variant_of(name, base, run, None).clip
            made.check_effect()
            if name == clip.variant:
                assert made == clip
    gspo = dataclasses.replace(RUN, clip=Clip(variant="ppo", level="sequence", low=3e-4, high=4e-4))
    assert frozen.base_clip(frozen.Options(), gspo).low == 0.2


def test_gradients_that_do_not_fit_the_memory():
    with pytest.raises(session.UsageError, match="choose fewer with --variants"):
        frozen.check_memory(dataclasses.replace(MODEL, layers=10**9), 16)


def test_same_direction_is_told_in_groups():
    near = np.array([[1, 1, 0.3, 0.9], [1, 1, 0.3, 0.9], [0.3, 0.3, 1, 0.2], [0.9, 0.9, 0.2, 1]])
    assert report.same_direction(["a", "b", "c", "d"], near) == [["a", "b"]]


@pytest.mark.slow
def test_default(finish, tmp_path):
    status, out, err = finish("frozen.py", cwd=tmp_path)
    assert status == 0, out + err
    folder = tmp_path / "runs" / "frozen-0001"
    record = json.loads((folder / "frozen" / "step-00003" / "frozen.json").read_text())
    assert list(record["variants"]) == list(frozen.NAMES)
    assert record["remark"] == ""
    assert 0.01 < record["policy"]["ppo_clipped_pos"] + record["policy"]["ppo_clipped_neg"] < 0.2
    values = np.array(record["cosines"]["values"], np.float64)
    at = record["cosines"]["names"].index
    assert np.isfinite(values).all()
    assert values[at("ppo"), at("gppo")] < 0.99
    assert values[at("gspo"), at("gspo_token")] > 1 - 1e-6
    # GPPO lies nearer to what it is made of than to PPO.
    assert values[at("gppo"), at("cispo")] > values[at("gppo"), at("ppo")]
