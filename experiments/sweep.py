# SPDX-License-Identifier: Apache-2.0
"""Sweeps: many runs that differ in one thing each, paired by seed, and one page about them.

    python experiments/sweep.py clipping --seeds=5 --jobs=2      # under an hour on two cores
    python experiments/sweep.py clipping --seeds=1 --arms ppo gppo --settings mild
    python experiments/sweep.py clipping --resume --out=runs/sweep-clipping-0001

Every run is a process of `run_gppo.py` with a command that can be repeated by hand (sweep.json has
them all). Runs are ordered by seed, so that an interrupted sweep holds the same seeds of all arms.
Exit status: 0 when every run finished and every check of the page holds, 1 otherwise, 2 for a
command that cannot work, 130 after an interruption.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import inspect
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tyro
from configs import GPPO_PRESETS, SFT_PRESETS, GppoRun, SftRun
from session import (
    LOCK,
    ROOT,
    RUNS,
    Interrupt,
    UsageError,
    config_record,
    git_revision,
    locked,
    main,
    usage_errors,
    write_json,
)
from sweep_arms import ARMS, BASELINE, RUN, SETTINGS, arm_run, flags

from klear_jax.report.sweep_data import PLAN, finished

MAY_DIFFER = ("jobs", "out", "resume")
"""What may change when a sweep is resumed. Seeds may not: to add some after a look at the results
changes what the p-values mean."""
NO_TERMINAL = {"TTY_COMPATIBLE": "0"}
"""Keeps live progress out of the logs where colour is forced, as notebooks do."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The clipping sweep on the sort task: every arm in every setting with every seed."""

    seeds: int = 5
    """RL seeds 0 .. seeds - 1; the same ones for all arms."""
    sft_seeds: int = 2
    """SFT starts; RL seed s begins from start s modulo this."""
    jobs: int = 2
    """Runs at a time, each held on a core of its own."""
    steps: int = 24
    """Rollout batches of a run."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Which arms; ppo, which the others are compared with, must be among them."""
    settings: tuple[str, ...] = ("mild", "strong")
    """How off-policy: mild, strong, epochs."""
    eval_problems: int = 256
    """Held-out questions; asked before, in the middle of, and after a run."""
    sft_steps: int = 450
    """Updates of an SFT start."""
    out: Path | None = None
    """Folder of the sweep; by default the next free runs/sweep-clipping-NNNN."""
    resume: bool = False
    """Go on with the sweep in --out; what is finished is kept."""

    def __post_init__(self):
        for name in ("seeds", "sft_seeds", "jobs", "eval_problems", "sft_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.steps < 2:
            raise ValueError(f"steps {self.steps} must be at least 2: a first and a last part")
        for name, known in (("arms", ARMS), ("settings", SETTINGS)):
            given = getattr(self, name)
            if not given or not set(given) <= set(known) or len(set(given)) < len(given):
                raise ValueError(
                    f"{name} {' '.join(given)} must be different ones of {', '.join(known)}"
                )
        if BASELINE not in self.arms:
            raise ValueError(
                f"arms {' '.join(self.arms)} lack {BASELINE}, which the others are compared with; "
                "add it"
            )
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out, the folder of the sweep to go on with")


SWEEPS = {"clipping": Sweep()}


@dataclasses.dataclass(frozen=True)
class Task:
    """One process to run, and how to tell that it has been done."""

    name: str
    folder: Path
    script: str
    flags: tuple[str, ...]
    phase: str
    """Phase of the log whose last step is written last."""
    steps: int
    label: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Setting, arm, seed and SFT seed, and the config that the run must turn out to have had."""

    @property
    def done(self) -> bool:
        return finished(self.folder, self.phase, self.steps)

    @property
    def command(self) -> list[str]:
        """Starts the run, or goes on with it where it has begun."""
        begun = (self.folder / "config.json").exists()
        flags = ("--resume", f"--out={self.folder}") if begun else self.flags
        return [sys.executable, str(ROOT / "experiments" / self.script), *flags]

    def by_hand(self) -> str:
        return shlex.join(["python", f"experiments/{self.script}", *self.flags])


# --- what is to be run ------------------------------------------------------------------------


def sft_tasks(sweep: Sweep, out: Path) -> list[Task]:
    """The SFT starts."""
    tasks = []
    used = min(sweep.sft_seeds, sweep.seeds)
    for seed in range(used):
        folder = out / "sft" / f"seed-{seed}"
        run: SftRun = dataclasses.replace(
            RUN.sft_start(), seed=seed, steps=sweep.sft_steps, out=folder
        )
        given = tuple(flags(run, SFT_PRESETS["demo"]))
        name = f"SFT start, seed {seed}"
        tasks.append(Task(name, folder, "run_sft.py", given, "sft", sweep.sft_steps))
    return tasks


def rl_tasks(sweep: Sweep, out: Path) -> list[Task]:
    """The runs, seed by seed."""
    tasks = []
    for seed in range(sweep.seeds):
        sft_seed = seed % sweep.sft_seeds
        for setting in sweep.settings:
            for arm in sweep.arms:
                folder = out / "runs" / setting / arm / f"seed-{seed}"
                run = arm_run(
                    SETTINGS[setting], ARMS[arm], seed=seed, steps=sweep.steps,
                    eval_problems=sweep.eval_problems, init=out / "sft" / f"seed-{sft_seed}",
                    # Once for every arm: the other runs have the same parts.
                    out=folder, preflight=seed == 0 and setting == sweep.settings[0],
                )  # fmt: skip
                tasks.append(_rl_task(run, folder, setting, arm, sft_seed))
    return tasks


def _rl_task(run: GppoRun, folder: Path, setting: str, arm: str, sft_seed: int) -> Task:
    label = {"setting": setting, "arm": arm, "seed": run.seed, "sft_seed": sft_seed}
    return Task(
        f"{setting} {arm} seed {run.seed}", folder, "run_gppo.py",
        tuple(flags(run, GPPO_PRESETS["demo"])), "eval", run.steps,
        label | {"config": config_record(run)},
    )  # fmt: skip


def plan(sweep: Sweep, out: Path) -> dict[str, Any]:
    """What sweep.json says: declared before the first run, and all that the page knows of arms."""
    arms = {
        name: {"text": ARMS[name].text, "zero": ARMS[name].zero, "positive": ARMS[name].positive}
        for name in sweep.arms
    }
    runs = [
        task.label | {"folder": str(task.folder.relative_to(out)), "command": task.by_hand()}
        for task in rl_tasks(sweep, out)
    ]
    record = {
        "kind": "clipping",
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "command": shlex.join(["python", *sys.argv]),
        "config": json.loads(json.dumps(dataclasses.asdict(sweep), default=str)),
        "out": str(out),
        "baseline": BASELINE,
        "settings": {name: SETTINGS[name].text for name in sweep.settings},
        "arms": arms,
        "steps": sweep.steps,
        "sft": [task.by_hand() for task in sft_tasks(sweep, out)],
        "runs": runs,
    }
    return json.loads(json.dumps(record))


def read_command(argv: Sequence[str]) -> Sweep:
    """Read `clipping --flag=value ...`; with --resume the config of --out is the default.

    Raises:
        UsageError: no such sweep, or a combination that cannot work.
    """
    argv = list(argv)
    name = argv.pop(0) if argv and not argv[0].startswith("-") else "clipping"
    if name not in SWEEPS:
        raise UsageError(f"no sweep {name!r}; the sweeps are {', '.join(SWEEPS)}")
    about = {"prog": "sweep.py", "description": inspect.getdoc(Sweep)}
    with usage_errors():
        sweep = tyro.cli(Sweep, args=argv, default=SWEEPS[name], **about)
        if not sweep.resume or sweep.out is None:
            return sweep
        saved = _saved(sweep.out)
        sweep = tyro.cli(Sweep, args=argv, default=saved, **about)
    given, before = dataclasses.asdict(sweep), dataclasses.asdict(saved)
    names = [n for n in given if n not in MAY_DIFFER and given[n] != before[n]]
    if names:
        lines = [f"{n}: the sweep has {before[n]!r}, the command {given[n]!r}" for n in names]
        raise UsageError(
            f"{sweep.out} cannot be resumed with another plan ({'; '.join(lines)}), which would "
            "change what its p-values mean; give another --out"
        )
    return sweep


def _saved(out: Path) -> Sweep:
    try:
        record = json.loads((out / PLAN).read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{out} holds no sweep to resume: {error!r}") from error
    return msgspec.convert(record, Sweep, dec_hook=lambda kind, value: kind(value), strict=False)


def open_sweep(sweep: Sweep) -> Path:
    """Make the sweep's folder with its plan, or check that the one there has the same.

    Raises:
        UsageError: the folder holds something else, or runs that this code would not start.
    """
    out = sweep.out
    if out is None:
        number = 1
        while (out := RUNS / f"sweep-clipping-{number:04d}").exists():
            number += 1
    if sweep.resume:
        before = json.loads((out / PLAN).read_text(encoding="utf-8"))
        # The configs and commands of the runs hold the folder as it was first given.
        first = Path(before["out"])
        if first.resolve() != out.resolve():
            raise UsageError(
                f"{out} was started as {first}, which is no name of it from here; resume it from "
                "the folder in which it was started, and do not move it before it has ended"
            )
        if before["runs"] != plan(sweep, first)["runs"]:
            raise UsageError(
                f"{out} was planned by other code: its runs have other configs than this version "
                "would give them; check that version out, or start anew with another --out"
            )
        return first
    if out.exists() and (not out.is_dir() or any(p.name != LOCK for p in out.iterdir())):
        raise UsageError(f"{out} is not empty; give another --out, or --resume to go on with it")
    with usage_errors():
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / PLAN, plan(sweep, out))
    return out


# --- running it -------------------------------------------------------------------------------


class Workers(Interrupt):
    """Runs tasks as processes; Ctrl-C is passed on to them, and no further one is started."""

    def __init__(self, jobs: int, logs: Path):
        super().__init__()
        self.logs, self.jobs = logs, jobs
        self.running: set[subprocess.Popen] = set()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self.cores: queue.Queue[int] = queue.Queue()
        for number in range(jobs):
            self.cores.put(cores[number % len(cores)])

    def __enter__(self) -> "Workers":
        super().__enter__()
        self._term = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *problem: object) -> None:
        signal.signal(signal.SIGTERM, self._term)
        super().__exit__(*problem)

    def _handle(self, *_: object) -> None:
        for process in tuple(self.running):
            process.send_signal(signal.SIGINT)
        super()._handle()

    def run(self, task: Task) -> int | None:
        """Exit status of a task's process; None where it was not started any more."""
        if self.asked:
            return None
        core, process = self.cores.get(), None
        self.logs.mkdir(exist_ok=True)
        try:
            with open(self.logs / f"{task.name.replace(' ', '-')}.log", "a") as log:
                # A session of its own: the terminal's Ctrl-C comes through us, once.
                process = subprocess.Popen(
                    task.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True, env=os.environ | NO_TERMINAL,
                )  # fmt: skip
                self.running.add(process)
                with contextlib.suppress(AttributeError, OSError):
                    # Before it makes threads: XLA counts the cores it may use when it starts.
                    os.sched_setaffinity(process.pid, {core})
                if self.asked:  # between the check above and now
                    process.send_signal(signal.SIGINT)
                return process.wait()
        finally:
            if process is not None:
                self.running.discard(process)
            self.cores.put(core)


def run_all(
    tasks: Sequence[Task], run: Callable[[Task], int | None], jobs: int
) -> Iterator[tuple[Task, int | None, float]]:
    """Run tasks, `jobs` at a time; yields each with its exit status and its seconds, as they end.

    A task that is done already is not run and not named.
    """

    def timed(task: Task) -> tuple[int | None, float]:
        start = time.monotonic()
        return run(task), time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        jobs_of = {pool.submit(timed, task): task for task in tasks if not task.done}
        for future in concurrent.futures.as_completed(jobs_of):
            yield jobs_of[future], *future.result()


def run_tasks(tasks: Sequence[Task], workers: Workers) -> list[Task]:
    """Run tasks with a line for each; returns those that failed."""
    failed = []
    left = sum(not task.done for task in tasks)
    if left < len(tasks):
        print(f"{len(tasks) - left} of {len(tasks)} are finished already")
    ended = 0
    start = time.monotonic()
    for task, status, seconds in run_all(tasks, workers.run, workers.jobs):
        if status is None:
            continue
        ended += 1
        rest = (time.monotonic() - start) / ended * (left - ended)
        word = f"{seconds:.0f} s"
        if status != 0 or not task.done:
            # Interrupted while it was still importing, a script ends with another status than 130.
            word = "stopped" if workers.asked else f"FAILED with exit status {status}"
            if not workers.asked:
                failed.append(task)
        print(f"[{ended}/{left}] {task.name}: {word}; about {rest / 60:.0f} min left", flush=True)
    return failed


def run_sweep(argv: Sequence[str]) -> int:
    """The command line."""
    sweep = read_command(argv)
    out = open_sweep(sweep)
    print(f"sweep in {out}", flush=True)
    with locked(out), Workers(sweep.jobs, out / "logs") as workers:
        failed = run_tasks(sft_tasks(sweep, out), workers)
        # A run whose start is missing could only fail too.
        gone = {str(task.folder) for task in failed}
        tasks = [t for t in rl_tasks(sweep, out) if t.label["config"]["init"] not in gone]
        if not workers.asked:
            failed += run_tasks(tasks, workers)
        interrupted = workers.asked
    for task in failed:
        log = out / "logs" / f"{task.name.replace(' ', '-')}.log"
        print(f"error: {task.name} failed; its output is in {log}", file=sys.stderr)
    if interrupted:
        print(f"stopped; go on with: python experiments/sweep.py --resume --out={out}")
        return 130
    if not any(task.done for task in tasks):
        print("error: no run finished, so there is no page", file=sys.stderr)
        return 1
    from klear_jax.report.sweep_page import write_sweep_page

    page, faults = write_sweep_page(out)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(f"report: {page}")
    return 1 if failed or faults else 0


if __name__ == "__main__":
    main(run_sweep)
