# SPDX-License-Identifier: Apache-2.0
"""Whole runs as processes: what they leave behind, interruption, kill and resume, real input."""

import collections
import json
import os
import re
import signal
import time

import jax
import numpy as np
import pytest

from klear_jax.data.tokenizer import load_tokenizer
from klear_jax.train.checkpoint import load_params

SMALL = (
    "--problems-per-step=4", "--samples=4", "--updates=2", "--max-tokens=40", "--slots=8",
    "--eval-problems=8", "--sft.steps=3", "--sft.batch=8", "--group-filter=none",
)  # fmt: skip
TIMES = (
    "time", "tokens_per_second", "seconds/sample", "seconds/train", "seconds/score", "step_seconds",
)  # fmt: skip


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def steady(file):
    """Every line of a log but its times."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines_of(file)]


def steps_of(lines, phase):
    return [line["step"] for line in lines if line["phase"] == phase]


def assert_same_weights(one, two):
    one, two = load_params(one)[0], load_params(two)[0]
    jax.tree.map(np.testing.assert_array_equal, one, two)


# --- one run, and what it leaves behind -------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder in which runs share their SFT start."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(base, finish):
    """Two steps on the tasks, after an SFT start of three steps."""
    status, out, err = finish("run_gppo.py", *SMALL, "--steps=2", cwd=base)
    assert status == 0, out + err
    return base / "runs" / "gppo-0001", out


def test_config_of_a_run(finished):
    record = json.loads((finished[0] / "config.json").read_text())
    assert record["kind"] == "GppoRun"
    config = record["config"]
    assert (config["steps"], config["samples"], config["clip"]["variant"]) == (2, 4, "gppo")
    assert config["sft"]["steps"] == 3
    revision = record["git_revision"]
    assert revision is None or len(revision.removesuffix("+changes")) >= 40
    assert record["versions"].keys() >= {"jax", "numpy", "orbax-checkpoint"}
    assert (finished[0].parents[1] / record["sft_run"] / "checkpoints").is_dir()


def test_metrics_of_a_run(finished):
    lines = lines_of(finished[0] / "metrics.jsonl")
    assert steps_of(lines, "eval") == [0, 2]
    assert steps_of(lines, "rl") == [1, 2]
    for line in lines:
        if line["phase"] == "rl":
            assert (line["updates"], line["updates_skipped"]) == (2, 0)
            assert line["tokens/sampled"] >= line["tokens/trained"] > 0
            assert sum(line["ratio_histogram"]["counts"]) == line["tokens/trained"]
            assert {"loss", "grad_norm", "entropy", "kl", "clip", "lr"} <= line.keys()
        else:
            assert 0 <= line["heldout/sampled"] <= 1
            assert {"heldout/greedy", "heldout/sampled/sum", "heldout/greedy_low"} <= line.keys()


def test_files_of_a_run(finished):
    folder, out = finished
    page = (folder / "report.html").read_text()
    assert len(page) > 5000
    assert f"report: {folder.relative_to(folder.parents[1]) / 'report.html'}" in out
    events = list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert sum(file.stat().st_size for file in events) > 500
    shown = lines_of(folder / "completions.jsonl")
    assert collections.Counter(record["step"] for record in shown) == {0: 8, 2: 8}
    assert not list(folder.glob("*.part"))
    load_params(folder)


@pytest.mark.slow
def test_the_sft_start_is_kept_and_used_again(finished, base, finish):
    """A run of another config finds the start of the first."""
    (start,) = (base / "runs" / "cache").glob("sft-*")
    before = (start / "metrics.jsonl").read_bytes()
    assert steps_of(lines_of(start / "metrics.jsonl"), "sft") == [3]
    status, out, err = finish(
        "run_gppo.py", *SMALL, "--steps=1", "--clip.variant=ppo", "--eval-every=0", cwd=base
    )
    assert status == 0, out + err
    assert "SFT" not in out
    assert (start / "metrics.jsonl").read_bytes() == before
    assert steps_of(lines_of(base / "runs" / "gppo-0002" / "metrics.jsonl"), "rl") == [1]


@pytest.mark.slow
def test_resume_of_a_run_that_is_done(finished, base, finish):
    logged = steady(finished[0] / "metrics.jsonl")
    status, out, err = finish("run_gppo.py", "--resume", f"--out={finished[0]}", cwd=base)
    assert status == 0, out + err
    assert steady(finished[0] / "metrics.jsonl") == logged


def test_evaluation_of_a_run(finished, base, finish):
    status, out, err = finish(
        "run_eval.py", f"--init={finished[0]}", "--eval-problems=8", "--samples=2", "--out=scores",
        "--slots=8", "--max-tokens=40", cwd=base,
    )  # fmt: skip
    assert status == 0, out + err
    (figures,) = json.loads((base / "scores" / "results.json").read_text()).values()
    assert figures.keys() >= {"avg@2", "low", "high", "pass@1", "pass@2", "problems", "invalid"}
    assert (figures["problems"], figures["invalid"]) == (8, 0)
    assert len(lines_of(base / "scores" / "completions.jsonl")) == 16
    assert (base / "scores" / "report.html").is_file()
    assert "avg@2" in out


# --- preflight --------------------------------------------------------------------------------


def test_preflight_is_reported_and_changes_nothing(finished, base, finish):
    """The same run without it has the same numbers."""
    assert len(re.findall(r"^preflight: 9 checks passed in [0-9.]+ s$", finished[1], re.M)) == 1
    assert not (finished[0] / "preflight").exists()
    status, out, err = finish(
        "run_gppo.py", *SMALL, "--steps=2", "--no-preflight", "--out=unchecked", cwd=base
    )
    assert status == 0, out + err
    assert "preflight" not in out
    assert steady(base / "unchecked" / "metrics.jsonl") == steady(finished[0] / "metrics.jsonl")
    assert_same_weights(base / "unchecked", finished[0])


@pytest.mark.slow
def test_preflight_refuses_a_learning_rate_and_leaves_no_run(finished, base, finish):
    flags = ("run_gppo.py", *SMALL, "--steps=1", "--out=refused", "--optim.learning-rate=0.5")
    status, out, err = finish(*flags, cwd=base)
    assert status == 2, out + err
    assert "Traceback" not in err
    assert "error: the preflight refuses the run" in err
    assert "learning_rate 0.5 breaks the policy" in err
    assert "--no-preflight" in err
    assert "held-out" not in out
    assert [path.name for path in (base / "refused").iterdir()] == [".lock"]


# --- interruption -----------------------------------------------------------------------------

LONG = (*SMALL, "--steps=9", "--eval-every=1", "--save-every=2")


@pytest.fixture(scope="module")
def whole(base, finish):
    """Nine steps without an interruption."""
    status, out, err = finish("run_gppo.py", *LONG, "--out=whole", cwd=base)
    assert status == 0, out + err
    lines = steady(base / "whole" / "metrics.jsonl")
    assert steps_of(lines, "eval") == list(range(10))
    assert steps_of(lines, "rl") == list(range(1, 10))
    return base / "whole"


def wait_for(process, text):
    """Read the output of a run up to a line that holds the text."""
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"no {text!r}: {process.stderr.read()}")


def assert_resumes_to(whole, base, finish, name):
    status, out, err = finish("run_gppo.py", "--resume", f"--out={name}", cwd=base)
    assert status == 0, out + err
    for file in ("metrics.jsonl", "completions.jsonl"):
        assert steady(base / name / file) == steady(whole / file)
    assert_same_weights(base / name, whole)


@pytest.mark.slow
@pytest.mark.parametrize("after", ["step 0", "GPPO 3/", "GPPO 5/"])
def test_killed_and_resumed(whole, base, launch, finish, after):
    """Lines after the last checkpoint, and a torn one, are logged again and not twice."""
    name = f"killed {after[-3:-1]}"
    process = launch("run_gppo.py", *LONG, f"--out={name}", cwd=base)
    wait_for(process, after)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with open(base / name / "metrics.jsonl", "a") as file:
        file.write('{"phase": "rl", "step": 8, "lo')
    assert len(steady_or_torn(base / name)) < len(steady(whole / "metrics.jsonl"))
    assert_resumes_to(whole, base, finish, name)


def steady_or_torn(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 3])
def test_interrupted_once_and_resumed(whole, base, launch, finish, at):
    """Every step has an evaluation; the one that the interruption left out is made on resume."""
    name = f"interrupted {at}"
    process = launch("run_gppo.py", *LONG, f"--out={name}", cwd=base)
    wait_for(process, f"GPPO {at}/")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "ending after this step and saving" in err
    assert "Traceback" not in err
    done = steps_of(lines_of(base / name / "metrics.jsonl"), "rl")[-1]
    assert f"stopped at step {done} of 9; go on with --resume --out={name}" in out
    assert (base / name / "checkpoints" / str(done)).is_dir()
    assert (base / name / "report.html").is_file()
    assert_resumes_to(whole, base, finish, name)


@pytest.mark.slow
def test_interrupted_in_the_sft_start(base, launch, finish):
    flags = [f for f in SMALL if "sft.steps" not in f]
    process = launch("run_gppo.py", *flags, "--sft.steps=60", "--steps=1", "--out=early", cwd=base)
    wait_for(process, "SFT 10/")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    status, out, err = finish("run_gppo.py", "--resume", "--out=early", cwd=base)
    assert status == 0, out + err
    assert "SFT 60/60" in out
    assert "SFT 10/60" not in out
    assert steps_of(lines_of(base / "early" / "metrics.jsonl"), "rl") == [1]


@pytest.mark.slow
def test_interrupted_twice(finished, base, launch):
    """The second one does not wait for the step, which takes far longer."""
    flags = ("--init=runs/gppo-0001", "--samples=64", "--max-tokens=1500", "--slots=16")
    process = launch(
        "run_gppo.py", *SMALL[:1], *flags, "--eval-problems=1", "--out=twice", cwd=base
    )
    wait_for(process, "step 0")
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert time.monotonic() - start < 20
    assert "Traceback" not in err
    assert err.rstrip().endswith("interrupted")
    assert steps_of(lines_of(base / "twice" / "metrics.jsonl"), "rl") == []


@pytest.mark.slow
def test_sft_killed_and_resumed(base, launch, finish):
    flags = ("--steps=60", "--batch=8", "--save-every=15")
    status, out, err = finish("run_sft.py", *flags, "--out=sft-whole", cwd=base)
    assert status == 0, out + err
    process = launch("run_sft.py", *flags, "--out=sft-killed", cwd=base)
    wait_for(process, "SFT 20/")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    status, out, err = finish("run_sft.py", "--resume", "--out=sft-killed", cwd=base)
    assert status == 0, out + err
    assert steady(base / "sft-killed" / "metrics.jsonl") == steady(
        base / "sft-whole" / "metrics.jsonl"
    )
    assert_same_weights(base / "sft-killed", base / "sft-whole")


@pytest.mark.slow
def test_resumed_on_another_mesh(base, launch, finish):
    status, out, err = finish("run_gppo.py", *SMALL, "--steps=2", "--out=mesh", cwd=base)
    assert status == 0, out + err
    before = load_params(base / "mesh")[0]
    status, out, err = finish(
        "run_gppo.py", "--resume", "--out=mesh", "--steps=3", "--cpu-devices=4",
        "--mesh=fsdp:2,tensor:2", cwd=base,
    )  # fmt: skip
    assert status == 0, out + err
    assert "SFT" not in out
    assert steps_of(lines_of(base / "mesh" / "metrics.jsonl"), "rl") == [1, 2, 3]
    after = load_params(base / "mesh")[0]
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after, before)
    assert 0 < max(jax.tree.leaves(moved)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "copies"),
    [
        (("--mesh=fsdp:2", "--rollout-mesh=tensor:2"), 1),
        (("--mesh=fsdp:4", "--rollout-mesh=data:2,tensor:2"), 2),
        (("--mesh=fsdp:2,tensor:2", "--rollout-mesh=fsdp:2,tensor:2"), 0),
    ],
)
def test_sampling_on_another_mesh(finished, base, finish, meshes, copies):
    """Halves of the devices, all in another layout, the same: the rollouts of the run on one
    device, for as many copies of the weights as the layout needs; a small cache changes nothing."""
    out = "-".join(["rollouts", *meshes]).replace(":", "").replace(",", "")
    status, said, err = finish(
        "run_gppo.py", *SMALL, "--steps=2", "--cpu-devices=4", *meshes, "--cache-tokens=768",
        f"--out={out}", cwd=base,
    )  # fmt: skip
    assert status == 0, said + err
    weights = sum(x.nbytes for x in jax.tree.leaves(load_params(base / out)[0]))
    for one, other in zip(
        lines_of(base / out / "metrics.jsonl"), lines_of(finished[0] / "metrics.jsonl"), strict=True
    ):
        if one["phase"] == "rl":
            # Norms lie on every device that shares them.
            assert copies * weights <= one["sampler/copied_bytes"] <= 1.1 * copies * weights
            assert other["sampler/copied_bytes"] == 0
        for name in ("reward", "accuracy", "length/mean", "tokens/trained"):
            if name in other:
                assert one[name] == pytest.approx(other[name], rel=1e-6), name


@pytest.mark.slow
def test_sampling_in_bfloat16(base, finish):
    status, out, err = finish(
        "run_gppo.py", *SMALL, "--steps=1", "--rollout-dtype=bfloat16", "--out=narrow", cwd=base
    )
    assert status == 0, out + err
    (step,) = (x for x in lines_of(base / "narrow" / "metrics.jsonl") if x["phase"] == "rl")
    weights = sum(x.nbytes for x in jax.tree.leaves(load_params(base / "narrow")[0]))
    assert step["sampler/copied_bytes"] == weights // 2
    assert 0 < step["sampler_gap"] < 0.05


# --- real questions ---------------------------------------------------------------------------


@pytest.mark.slow
def test_real_questions_with_nothing_to_learn(shared, base, finish):
    """Random weights solve no AIME question: every step is skipped and counted, status 0."""
    status, out, err = finish(
        "run_gppo.py", "--model=tiny", "--tokenizer=qwen3", "--out=aime",
        f"--problems={shared / 'questions' / 'aime24.qs.jsonl'}", "--steps=2", "--max-tokens=128",
        cwd=base,
    )  # fmt: skip
    assert status == 0, out + err
    assert "starting from random weights" in out
    lines = lines_of(base / "aime" / "metrics.jsonl")
    assert steps_of(lines, "rl") == [1, 2]
    for line in lines:
        assert (line["updates"], line["groups/trained"], line["groups/informative"]) == (0, 0, 0)
        assert line["reward"] == 0
        assert line["invalid"] == 0
        assert "loss" not in line
    assert (base / "aime" / "report.html").is_file()


@pytest.mark.slow
def test_real_questions_without_a_filter_move_the_weights(shared, base, finish):
    """All rewards are 0, so it is the weight decay alone that moves them, and nothing is NaN."""
    flags = (
        "--model=tiny", "--tokenizer=qwen3", "--group-filter=none", "--samples=2",
        "--problems-per-step=8", "--max-tokens=32", "--optim.warmup-steps=0",
        f"--problems={shared / 'questions' / 'aime24.qs.jsonl'}", "--save-every=1",
    )  # fmt: skip
    status, out, err = finish("run_gppo.py", *flags, "--steps=2", "--out=moved", cwd=base)
    assert status == 0, out + err
    lines = lines_of(base / "moved" / "metrics.jsonl")
    assert [line["updates"] for line in lines] == [4, 4]
    assert [line["updates_skipped"] for line in lines] == [0, 0]
    last = load_params(base / "moved")[0]
    os.rename(base / "moved" / "checkpoints" / "2", base / "second")
    first = load_params(base / "moved")[0]
    assert not np.array_equal(first.embed, last.embed)
    assert np.isfinite(last.embed).all()


@pytest.mark.slow
def test_evaluation_of_real_questions(shared, base, finish):
    files = sorted((shared / "questions").glob("*.jsonl"))
    assert len(files) == 3
    status, out, err = finish(
        "run_eval.py", "--tokenizer=qwen3", "--samples=1", "--max-tokens=16", "--slots=32",
        "--out=scored", "--problems", *files, cwd=base,
    )  # fmt: skip
    assert status == 0, out + err
    figures = json.loads((base / "scored" / "results.json").read_text())
    assert sorted(figures) == ["HMMT-202502", "aime24", "aime25"]
    for table in figures.values():
        assert table["problems"] == 30
        assert 0 <= table["low"] <= table["avg@1"] <= table["high"] <= 1
        assert table["invalid"] == 0
    assert len(lines_of(base / "scored" / "completions.jsonl")) == 90


@pytest.mark.slow
def test_no_id_without_a_token_is_drawn(shared):
    """The model has 151,936 rows and the tokenizer 151,669 ids; random weights prefer none."""
    from configs import EvalRun
    from inputs import model_config

    from klear_jax.model import params as params_lib
    from klear_jax.sampling.config import EngineConfig
    from klear_jax.sampling.sampler import Request, Sampler

    tokenizer = load_tokenizer("qwen3")
    cfg = model_config(EvalRun(tokenizer="qwen3"), tokenizer)
    assert (cfg.vocab, cfg.live_vocab) == (151_936, 151_669)
    params = params_lib.init(cfg, 0)
    # The rows without a token would be drawn nearly always if they were not shut out.
    rows = np.asarray(params.embed).copy()
    rows[151_669:] = 0.05 * np.sign(rows[:267])
    params = params.replace(embed=np.concatenate([rows[:151_669], 30 * rows[151_669:]]))
    engine = EngineConfig(slots=8, length=64, stop_ids=tokenizer.stop_ids)
    prompt = tuple(tokenizer.encode("What is 1+1?"))
    requests = [
        Request(str(i), prompt, i, 40, temperature=0.0 if i < 2 else 1.0) for i in range(16)
    ]
    for completion in Sampler(params, cfg, engine).sample(requests):
        assert (completion.tokens < 151_669).all()
        assert (completion.tokens >= 0).all()
