# SPDX-License-Identifier: Apache-2.0
"""Runs with every dial of off-policyness turned, as processes: killed, resumed, and overlapped."""

import json
import signal

import jax
import numpy as np
import pytest

from klear_jax.train.checkpoint import load_params

FLAGS = (
    "--tasks=sum", "--steps=6", "--problems-per-step=4", "--samples=4", "--updates=2",
    "--max-tokens=40", "--slots=8", "--eval-problems=8", "--eval-every=0", "--save-every=2",
    "--sft.steps=3", "--sft.batch=8", "--lag=1", "--epochs=2", "--group-filter=none",
    "--objective.kl-coef=0.1", "--objective.entropy-coef=0.1", "--objective.tis=token",
    "--objective.erc", "0.5", "2.0",
    "--save-rollouts",
)  # fmt: skip
TIMES = (
    "time", "tokens_per_second", "seconds/sample", "seconds/train", "seconds/score", "step_seconds",
)  # fmt: skip


def log_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_killed_and_resumed(tmp_path, launch, finish, overlap):
    """Rollouts that were sampled ahead, and the place in the problems, come back bit for bit."""
    status, out, err = finish("run_gppo.py", *FLAGS, "--out=whole", cwd=tmp_path)
    assert status == 0, out + err
    process = launch("run_gppo.py", *FLAGS, "--out=killed", cwd=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("GPPO 3/"):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resume = ["--resume", "--out=killed"] + (["--overlap"] if overlap else [])
    status, out, err = finish("run_gppo.py", *resume, cwd=tmp_path)
    assert status == 0, out + err
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert log_of(whole) == log_of(killed)
    one, two = load_params(whole)[0], load_params(killed)[0]
    jax.tree.map(np.testing.assert_array_equal, one, two)
    # What a rollout file holds is the same, too.
    names = sorted(path.name for path in (whole / "rollouts").iterdir())
    assert names == [f"step-{n:05d}.npz" for n in range(6)]
    for name in names:
        with np.load(whole / "rollouts" / name) as a, np.load(killed / "rollouts" / name) as b:
            for key in a:
                if key != "record":
                    np.testing.assert_array_equal(a[key], b[key], err_msg=f"{name} {key}")
    steps = [line for line in log_of(whole) if line["phase"] == "rl"]
    # The first update of a step sees a policy that has moved since it was sampled, by a step (the
    # first step of the warm-up has rate 0 and moves nothing).
    assert [line["by_update/kl"][0] > 0 for line in steps] == [False] * 2 + [True] * 4
    assert all(len(line["by_update/kl"]) == 4 for line in steps)


@pytest.mark.slow
def test_the_reference_of_a_resumed_run_must_be_there(tmp_path, finish):
    """Its KL term cannot go on without the weights that it started from."""
    status, out, err = finish("run_gppo.py", *FLAGS, "--out=run", cwd=tmp_path)
    assert status == 0, out + err
    (start,) = (tmp_path / "runs" / "cache").glob("sft-*")
    start.rename(tmp_path / "gone")
    status, out, err = finish("run_gppo.py", "--resume", "--out=run", "--steps=8", cwd=tmp_path)
    assert status == 2, out + err
    assert "needs the weights that it started from" in err
    assert "Traceback" not in err
