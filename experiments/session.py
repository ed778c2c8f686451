# SPDX-License-Identifier: Apache-2.0
"""What the scripts share around a run: command line, folder, lock and interruption.

`command_line` reads a config and `open_run` makes or reopens its folder; `inputs` has the rest.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tyro
from configs import Common

from klear_jax.train import checkpoint

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path("runs")
"""Where runs go by default, below the current folder; also the caches of SFT starts and
programs."""

LOCK = ".lock"
"""A file that is locked while a process runs in the folder."""

MAY_DIFFER = (
    "out", "resume", "steps", "mesh", "cpu_devices", "eval_every", "save_every", "slots",
    "overlap", "kl_warning", "save_rollouts", "preflight",
)  # fmt: skip
"""Fields that may change when a run is resumed: they change no step that was taken. Another number
of steps bends what is left of a cosine schedule, and a run with a lag has sampled nothing ahead of
its last step."""

Run = TypeVar("Run", bound=Common)


class UsageError(ValueError):
    """Something the user can put right; shown without a traceback."""


def command_line(
    presets: dict[str, Run],
    argv: Sequence[str],
    overlay: Callable[[Run, str], Run] | None = None,
) -> Run:
    """Read `[PRESET[+NAME]] --flag=value ...`. With --resume the config of --out is the default.

    `overlay` lays what +NAME means over the preset.

    Raises:
        UsageError: no such preset, or a combination that cannot work.
    """
    argv = list(argv)
    name = "demo"
    if argv and not argv[0].startswith("-"):
        name = argv.pop(0)
    name, _, more = name.partition("+")
    if name not in presets or (more and overlay is None):
        raise UsageError(f"no preset {name!r}; the presets are {', '.join(presets)}")
    default = presets[name]
    if more and overlay is not None:
        with usage_errors():
            default = overlay(default, more)
    folder = _flag(argv, "--out")
    if any(a in ("--resume", "--resume=True") for a in argv) and folder is not None:
        default = saved_config(Path(folder), type(default))
    with usage_errors():
        return tyro.cli(
            type(default), args=argv, default=default, prog=Path(sys.argv[0]).name,
            description=f"{inspect.getdoc(type(default))}\n\nPresets: {', '.join(presets)}.",
        )  # fmt: skip


def _flag(argv: Sequence[str], name: str) -> str | None:
    for number, text in enumerate(argv):
        if text.startswith(name + "="):
            return text.partition("=")[2]
        if text == name and number + 1 < len(argv):
            return argv[number + 1]
    return None


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Show what is wrong with the input as a `UsageError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def main(run: Callable[[Sequence[str]], int]) -> None:
    """Run a script: exit status 0 on success only; what the user can mend has no traceback."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax warns of left-overs that it handles
    try:
        sys.exit(run(sys.argv[1:]))
    except (UsageError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has gone; say nothing more
        sys.exit(1)
    except OSError as error:
        print(f"error: {error}; what was saved before is whole", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


# --- the folder of a run ---------------------------------------------------------------------


def config_record(run: Common) -> dict[str, Any]:
    """The config as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(run), default=str))


def saved_config(folder: Path, kind: type[Run]) -> Run:
    """The config that a run folder was made with.

    Raises:
        UsageError: the folder holds no run, or one of another kind.
    """
    path = folder / "config.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{folder} holds no run to resume: {error}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is no JSON ({error}); the run cannot be resumed") from error
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise UsageError(f"{path} is not the config of a run; the run cannot be resumed")
    if record.get("kind") != kind.__name__:
        raise UsageError(f"{folder} holds a {record.get('kind')}, not a {kind.__name__}")

    def decode(target: type, value: Any) -> Any:
        return target(value) if target is Path else value

    with usage_errors():
        return msgspec.convert(record["config"], kind, dec_hook=decode, strict=False)


def open_run(run: Common, name: str, *, parameters: int) -> Path:
    """Make the run's folder, or check that the one to resume has the same config.

    Raises:
        UsageError: the folder holds another run, or there is nothing to resume.
    """
    if run.out is None:
        number = 1
        while (folder := RUNS / f"{name}-{number:04d}").exists():
            number += 1
    else:
        folder = run.out
    if run.resume:
        _check_resumable(run, saved_config(folder, type(run)), folder)
        return folder
    used = folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
    if used or (folder.exists() and not folder.is_dir()):
        raise UsageError(
            f"{folder} is not empty; give another --out, or --resume to go on with the run in it"
        )
    with usage_errors():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", _record(run, parameters))
    return folder


def _record(run: Common, parameters: int) -> dict[str, Any]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "klear-jax")
    return {
        "kind": type(run).__name__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "parameters": parameters,
        "config": config_record(run),
        "sft_run": None,
    }


def _check_resumable(run: Common, saved: Common, folder: Path) -> None:
    given, before = config_record(run), config_record(saved)
    names = [n for n in given if n not in MAY_DIFFER and given[n] != before[n]]
    if names:
        lines = [f"{n}: the run has {before[n]!r}, the command {given[n]!r}" for n in names]
        raise UsageError(
            f"{folder} cannot be resumed with another config ({'; '.join(lines)}); only "
            f"{', '.join(MAY_DIFFER)} may change"
        )


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a file in one piece: it is never seen half written."""
    _write_text(path, json.dumps(record, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def rewind(folder: Path, step: int) -> set[int]:
    """Take out of the logs what comes after `step` (a resumed run logs it again) or is torn.

    Returns:
        The steps whose evaluation is in the log.
    """
    metrics = [r for r in _lines(folder / "metrics.jsonl") if r["step"] <= step]
    evaluated = {r["step"] for r in metrics if r["phase"] == "eval"}
    shown = [r for r in _lines(folder / "completions.jsonl") if r["step"] in evaluated]
    for name, records in (("metrics.jsonl", metrics), ("completions.jsonl", shown)):
        if (folder / name).exists():
            _write_text(folder / name, "".join(json.dumps(r) + "\n" for r in records))
    return evaluated


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file; a torn line is left out."""
    for line in path.read_text("utf-8", "replace").split("\n") if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def git_revision() -> str | None:
    """Commit of the code, with `+changes` where the working tree differs from it."""
    try:
        ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+changes", "--abbrev=40"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def config_hash(run: Common) -> str:
    """A short name for everything that decides the outcome of an SFT run, its code included.

    Whoever changes the tasks or the model must not be handed a start that the old code made.
    """
    same = ("out", "resume", "mesh", "cpu_devices", "save_every")
    record = {k: v for k, v in config_record(run).items() if k not in same}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for package in ("core", "data", "model", "train"):
        for path in sorted((ROOT / "klear_jax" / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a run's folder against other processes of this machine.

    Raises:
        UsageError: another process holds it (with `wait` this one waits for its turn instead).
    """
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UsageError(
                f"another process is running in {folder}; wait for it, or give another --out"
            ) from error
        yield


class Interrupt:
    """Ctrl-C ends a run after the step in hand; a second one ends it at once."""

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nending after this step and saving; Ctrl-C again ends at once", file=sys.stderr)
