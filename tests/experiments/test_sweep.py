# SPDX-License-Identifier: Apache-2.0
"""Sweeps: what their runs are, how they are started and resumed, and a small one for real."""

import collections
import dataclasses
import itertools
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
import session
import sweep
from configs import GPPO_PRESETS, SFT_PRESETS
from session import UsageError, command_line
from sweep import Sweep, Task, open_sweep, read_command, rl_tasks, run_all, run_tasks, sft_tasks
from sweep_arms import ARMS, SETTINGS, arm_run, flags

OUT = Path("s")
SMALL = Sweep(seeds=2, arms=("ppo", "gppo"), settings=("strong",), out=OUT)


def config(arm="ppo", setting="mild", **fields):
    """The config of a run, and its sources."""
    given = {
        "seed": 3, "steps": 24, "eval_problems": 64, "init": Path("a/b"), "out": Path("c d"),
        "preflight": False,
    } | fields  # fmt: skip
    return arm_run(SETTINGS[setting], ARMS[arm], **given)


# --- arms and settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("ppo", {"variant": "ppo"}),
        ("clip_higher", {"variant": "ppo", "high": 0.28}),
        ("gppo", {"variant": "gppo"}),
        ("gppo_high", {"variant": "gppo_high"}),
        ("gppo_low", {"variant": "gppo_low"}),
        ("ce_gppo", {"variant": "ce_gppo", "beta_low": 0.5, "beta_high": 1.0}),
        ("cispo", {"variant": "cispo"}),
        ("cispo_upper", {"variant": "cispo_upper"}),
        ("gspo", {"variant": "ppo", "level": "sequence", "low": 0.03, "high": 0.04}),
        ("gppo_erc", {"variant": "gppo", "erc": (0.95, 1.05)}),
        ("unclipped", {"variant": "unclipped"}),
    ],
)
def test_treatment_of_an_arm(arm, expected):
    run = config(arm)
    plain = {"low": 0.2, "high": 0.2, "level": "token", "beta_low": 1.0, "erc": None, "dual": None}
    had = dataclasses.asdict(run.clip) | {"erc": run.objective.erc}
    assert {name: had[name] for name in plain | expected} == plain | expected
    run.clip.check_effect()


def test_every_arm_is_another_treatment_and_says_what_must_be_seen():
    treatments = [(arm.clip, arm.erc) for arm in ARMS.values()]
    assert len(set(treatments)) == len(ARMS) == 11
    assert all(arm.positive and arm.text for arm in ARMS.values())
    assert not any(set(arm.zero) & set(arm.positive) for arm in ARMS.values())


@pytest.mark.parametrize("setting", SETTINGS)
def test_arms_differ_in_the_treatment_alone(setting):
    def rest(arm):
        run = session.config_record(config(arm, setting))
        return {**run, "clip": None, "objective": {**run["objective"], "erc": None}}

    assert all(rest(arm) == rest("ppo") for arm in ARMS)
    # A token's gradient comes through the surrogate alone.
    assert rest("ppo")["objective"]["positive_nll"] == rest("ppo")["objective"]["kl_coef"] == 0


def test_settings_differ_in_how_far_the_policy_moves():
    moved = [(config(setting=s).optim.learning_rate, config(setting=s).epochs) for s in SETTINGS]
    assert moved == [(1e-4, 1), (2e-4, 1), (5e-5, 4)]
    first, *others = (
        dataclasses.replace(config(setting=s), optim=config().optim, epochs=1) for s in SETTINGS
    )
    assert all(other == first for other in others)
    assert (first.updates, first.tasks, first.eval_every) == (8, ("sort",), 12)


@pytest.mark.parametrize(("arm", "setting"), [*itertools.product(ARMS, SETTINGS)])
def test_flags_give_the_config_back(arm, setting):
    run = config(arm, setting)
    typed = shlex.split(shlex.join(flags(run, GPPO_PRESETS["demo"])))
    assert command_line(GPPO_PRESETS, typed) == run


def test_flags_say_what_differs_and_no_more():
    demo = GPPO_PRESETS["demo"]
    assert flags(demo, demo) == []
    given = flags(config("gppo_erc", preflight=True, steps=demo.steps), demo)
    assert not [flag for flag in given if flag.startswith(("--steps", "--preflight"))]
    assert given[given.index("--objective.erc") + 1 :][:2] == ["0.95", "1.05"]
    assert "--no-preflight" in flags(config(), demo)


# --- the plan ---------------------------------------------------------------------------------


def test_runs_are_paired_by_seed():
    tasks = rl_tasks(Sweep(seeds=5, sft_seeds=2), OUT)
    assert len(tasks) == 5 * 2 * len(ARMS)
    # Seed by seed, so that what an interrupted sweep holds is paired.
    assert [t.label["seed"] for t in tasks] == sorted(t.label["seed"] for t in tasks)
    same = collections.defaultdict(set)
    for task in tasks:
        config = task.label["config"]
        assert config["seed"] == task.label["seed"]
        same[config["seed"]].add(config["init"])
    assert dict(same) == {s: {f"s/sft/seed-{s % 2}"} for s in range(5)}
    assert len({t.folder for t in tasks}) == len(tasks)
    checked = [t.label["arm"] for t in tasks if t.label["config"]["preflight"]]
    assert checked == list(ARMS)


def test_sft_starts_differ_in_the_seed_and_are_those_that_runs_need():
    starts = sft_tasks(Sweep(seeds=5, sft_seeds=2, sft_steps=70), OUT)
    runs = [command_line(SFT_PRESETS, start.flags) for start in starts]
    assert [run.seed for run in runs] == [0, 1]
    assert runs[1] == dataclasses.replace(runs[0], seed=1, out=OUT / "sft" / "seed-1")
    assert (runs[0].steps, runs[0].tasks) == (70, ("sort",))
    assert len(sft_tasks(Sweep(seeds=1, sft_seeds=2), OUT)) == 1


def test_the_plan_is_declared_before_the_first_run(work):
    out = open_sweep(dataclasses.replace(SMALL, out=None))
    assert out == Path("runs/sweep-clipping-0001")
    assert [path.name for path in out.iterdir()] == ["sweep.json"]
    plan = json.loads((out / "sweep.json").read_text())
    assert (plan["baseline"], list(plan["arms"]), list(plan["settings"])) == (
        "ppo", ["ppo", "gppo"], ["strong"]
    )  # fmt: skip
    assert plan["arms"]["ppo"]["zero"] == ["mass/clipped"]
    assert plan["arms"]["gppo"]["positive"] == ["clip", "mass/clipped"]
    assert len(plan["sft"]) == 2
    for entry in plan["runs"]:
        python, script, *typed = shlex.split(entry["command"])
        assert (python, script) == ("python", "experiments/run_gppo.py")
        run = command_line(GPPO_PRESETS, typed)
        assert session.config_record(run) == entry["config"]
        assert out / entry["folder"] == run.out
        assert entry["arm"] == run.clip.variant
    assert open_sweep(dataclasses.replace(SMALL, out=None)).name == "sweep-clipping-0002"


def test_resume_takes_the_plan_of_the_folder(work):
    open_sweep(SMALL)
    found = read_command(["--resume", "--out=s", "--jobs=1"])
    assert found == dataclasses.replace(SMALL, resume=True, jobs=1)
    before = (work / "s" / "sweep.json").read_bytes()
    assert open_sweep(found) == OUT
    assert (work / "s" / "sweep.json").read_bytes() == before


@pytest.mark.parametrize(
    ("flag", "says"),
    [("--seeds=3", "seeds: the sweep has 2"), ("--steps=9", "steps"), ("--arms ppo", "arms")],
)
def test_resume_refuses_another_plan(work, flag, says):
    open_sweep(SMALL)
    with pytest.raises(UsageError, match=f"cannot be resumed with another plan .{says}"):
        read_command(["clipping", "--resume", "--out=s", *flag.split()])


def test_resume_refuses_what_other_code_planned(work):
    open_sweep(SMALL)
    file = work / "s" / "sweep.json"
    plan = json.loads(file.read_text())
    plan["runs"][0]["config"]["updates"] = 4
    file.write_text(json.dumps(plan))
    with pytest.raises(UsageError, match="planned by other code"):
        open_sweep(read_command(["--resume", "--out=s"]))


def refused(monkeypatch, capsys, *typed):
    """What a command that cannot work prints; it must have written nothing."""
    monkeypatch.setattr(sys, "argv", ["sweep.py", *typed])
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as caught:
        session.main(sweep.run_sweep)
    assert caught.value.code == 2
    assert sorted(Path().rglob("*")) == before
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("tuning", "no sweep 'tuning'"),
        ("clipping --arms ppo dpo", "must be different ones of ppo, clip_higher"),
        ("clipping --arms ppo ppo", "must be different ones of"),
        ("clipping --arms gppo", "lack ppo"),
        ("clipping --settings wild", "mild, strong, epochs"),
        ("clipping --seeds=0", "seeds 0 must be at least 1"),
        ("clipping --steps=1", "steps 1 must be at least 2"),
        ("clipping --resume", "--resume needs --out"),
        ("clipping --resume --out=none", "none holds no sweep to resume"),
        ("clipping --out=full", "full is not empty"),
        ("clipping --out=full/file", "not empty"),
    ],
)
def test_commands_that_cannot_work(work, monkeypatch, capsys, typed, says):
    (work / "full").mkdir()
    (work / "full" / "file").write_text("")
    assert says in refused(monkeypatch, capsys, *typed.split())


# --- running ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fake(Task):
    """A task that a line of Python does, which writes the file `done`."""

    code: str = ""

    @property
    def done(self):
        return (self.folder / "done").exists()

    @property
    def command(self):
        return [sys.executable, "-c", self.code]


def fakes(work, *codes):
    folders = [work / str(number) for number in range(len(codes))]
    for folder in folders:
        folder.mkdir()
    return [
        Fake(f"task {n}", folder, "x.py", (), "eval", 1, code=code.replace("DONE", f"{n}/done"))
        for n, (folder, code) in enumerate(zip(folders, codes, strict=True))
    ]


WRITE = "open('DONE', 'w')"
# Asks the sweep to stop, as Ctrl-C would, and waits until that is passed on.
STOP = "import os, signal; os.kill(os.getppid(), signal.SIGINT); signal.pause()"


def test_what_is_done_is_not_run(work):
    tasks = fakes(work, WRITE, WRITE, WRITE)
    (work / "1" / "done").write_text("")
    ran = [(task.name, status) for task, status, _ in run_all(tasks, lambda task: 7, jobs=1)]
    assert sorted(ran) == [("task 0", 7), ("task 2", 7)]


@pytest.mark.parametrize("jobs", [1, 3])
def test_one_that_fails_is_told_and_the_others_go_on(work, capsys, jobs):
    # Task 1 fails, task 2 ends without what it was to write, task 3 had been done.
    tasks = fakes(work, WRITE, "print('why'); 1 / 0", "pass", WRITE, WRITE)
    (work / "3" / "done").write_text("")
    with sweep.Workers(jobs, work / "logs") as workers:
        failed = run_tasks(tasks, workers)
    assert sorted(task.name for task in failed) == ["task 1", "task 2"]
    assert tasks[4].done
    out = capsys.readouterr().out
    assert "1 of 5 are finished already" in out
    assert "task 1: FAILED with exit status 1" in out
    assert "task 2: FAILED with exit status 0" in out
    log = (work / "logs" / "task-1.log").read_text()
    assert "why" in log
    assert "ZeroDivisionError" in log


def test_an_interruption_is_passed_on_and_starts_nothing_new(work, capsys):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    tasks = fakes(work, WRITE, STOP, WRITE)
    with sweep.Workers(1, work / "logs") as workers:
        assert run_tasks(tasks, workers) == []
        assert workers.asked
    assert [task.done for task in tasks] == [True, False, False]
    assert not (work / "logs" / "task-2.log").exists()
    assert "task 1: stopped" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_each_job_is_held_on_a_core(work):
    # The core is given once the process is there.
    code = """import os, time
end = time.monotonic() + 10
while len(os.sched_getaffinity(0)) > 1 and time.monotonic() < end:
    os.sched_yield()
open('DONE', 'w').write(str(sorted(os.sched_getaffinity(0))))"""
    tasks = fakes(work, code, code)
    with sweep.Workers(2, work / "logs") as workers:
        run_tasks(tasks, workers)
    cores = [json.loads((task.folder / "done").read_text()) for task in tasks]
    assert all(len(core) == 1 for core in cores)
    if len(os.sched_getaffinity(0)) > 1:
        assert cores[0] != cores[1]


def test_logs_have_no_live_progress_where_colour_is_forced(work, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    (task,) = fakes(work, "import rich.console; print(rich.console.Console().is_terminal)")
    with sweep.Workers(1, work / "logs") as workers:
        assert workers.run(task) == 0
    assert (work / "logs" / "task-0.log").read_text() == "False\n"


def test_a_run_that_has_begun_is_resumed(work):
    task = rl_tasks(SMALL, OUT)[0]
    assert not task.done
    assert task.command[2:] == list(task.flags)
    assert task.command[1].endswith("experiments/run_gppo.py")
    task.folder.mkdir(parents=True)
    (task.folder / "config.json").write_text("{}")
    assert task.command[2:] == ["--resume", f"--out={task.folder}"]
    assert "--resume" not in task.by_hand()


def test_runs_without_their_start_are_not_tried(work, monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(sweep.Workers, "run", lambda self, task: tried.append(task.name) or 1)
    flags = [f"--{n}={getattr(SMALL, n)}" for n in ("seeds", "out")]
    assert sweep.run_sweep(["clipping", *flags, "--arms", "ppo", "--settings", "mild"]) == 1
    assert sorted(tried) == ["SFT start, seed 0", "SFT start, seed 1"]
    err = capsys.readouterr().err
    assert "SFT start, seed 1 failed" in err
    assert "no run finished" in err


# --- for real ---------------------------------------------------------------------------------

REAL = (
    "clipping", "--seeds=2", "--sft-seeds=1", "--arms", "ppo", "gppo", "--settings", "strong",
    "--steps=4", "--eval-problems=32", "--sft-steps=220", "--out=s",
)  # fmt: skip


@pytest.mark.slow
def test_a_sweep_is_interrupted_resumed_and_mended(launch, finish, tmp_path):
    process = launch("sweep.py", *REAL, cwd=tmp_path)
    # The first run has ended, so others are under way.
    assert any(line.startswith("[1/4]") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "go on with: python experiments/sweep.py --resume --out=s" in out
    assert "failed" not in err
    folder = tmp_path / "s"
    assert not (folder / "report.html").exists()

    resume = ("--resume", "--out=s")
    status, out, err = finish("sweep.py", *resume, cwd=tmp_path)
    # Every check of the page holds: pairing, configs, and each arm's mechanism.
    assert status == 0, out + err
    assert "of 4 are finished already" in out
    page = (folder / "report.html").read_bytes()
    assert b"gppo against ppo, strong, reward of the last 2 steps" in page
    runs = sorted(folder.glob("runs/*/*/*/metrics.jsonl"))
    assert len(runs) == 4
    steps = [[json.loads(line)["step"] for line in run.open() if '"rl"' in line] for run in runs]
    assert steps == [[1, 2, 3, 4]] * 4
    csv = (folder / "sweep.csv").read_bytes()
    assert csv.startswith(b"setting,arm,seed,sft_seed,step,metric,value\n")

    # One run lost its end.
    *kept, _ = runs[0].read_text().splitlines()
    runs[0].write_text("\n".join(kept) + "\n")
    (runs[0].parent / "report.html").unlink()
    others = [run.stat().st_mtime_ns for run in runs[1:]]
    status, out, err = finish("sweep.py", *resume, cwd=tmp_path)
    assert status == 0, out + err
    assert "3 of 4 are finished already" in out
    assert "[1/1] strong gppo seed 0" in out
    assert [run.stat().st_mtime_ns for run in runs[1:]] == others

    def values(text):
        return [line for line in text.decode().splitlines() if ",seconds," not in line]

    assert values((folder / "sweep.csv").read_bytes()) == values(csv)
