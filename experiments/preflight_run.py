# SPDX-License-Identifier: Apache-2.0
"""Preflight of a run: make the checks of `klear_jax.rl.preflight`, and go on or refuse."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from session import LOCK, RUNS, UsageError

from klear_jax.data.problems import Problem
from klear_jax.rl.checks import Check, Parts
from klear_jax.rl.preflight import preflight
from klear_jax.train import checkpoint


def check_parts(parts: Parts, problems: Sequence[Problem], position: int, *, fresh: bool) -> None:
    """Print one line when all checks pass.

    Args:
        fresh: the run has just made its folder, which a refusal empties again.

    Raises:
        UsageError: some did not; names each with its figure and the likely cause.
    """
    start = time.monotonic()
    checks = preflight(parts, problems, position=position)
    if failed := [check for check in checks if not check.passed]:
        if fresh:
            forget(parts.folder)
        raise UsageError(refusal(failed))
    print(summary(checks, time.monotonic() - start), flush=True)


def refusal(failed: Sequence[Check]) -> str:
    lines = "\n".join(f"  {check}" for check in failed)
    return (
        f"the preflight refuses the run, before any step of it:\n{lines}\n"
        "Nothing was trained, evaluated or saved; --no-preflight runs without these checks"
    )


def summary(checks: Sequence[Check], seconds: float) -> str:
    skipped = [check for check in checks if check.skipped]
    text = f"preflight: {len(checks) - len(skipped)} checks passed in {seconds:.1f} s"
    return "; ".join([text, *(f"{check.name} skipped: {check.skipped}" for check in skipped)])


def forget(folder: Path) -> None:
    """Take a folder back to what it was before a fresh run opened it, so that it can be used again.

    Whatever else is in it stays; a folder that the run has numbered itself goes.
    """
    (folder / "config.json").unlink(missing_ok=True)
    shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)
    if folder.parent == RUNS:
        (folder / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
