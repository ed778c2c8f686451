# SPDX-License-Identifier: Apache-2.0
"""The scripts on the import path, one program cache for them, and an empty folder to run in."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "experiments"

sys.path.insert(0, str(SCRIPTS))

COMPILED: list[str] = []
"""One entry for each program that was compiled or read from the cache in this process."""

jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILED.append(event) if "backend_compile" in event else None
)


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    """The current folder: empty; runs and caches of a script go there, compiled programs do not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax-tests"))
    monkeypatch.setenv("COLUMNS", "400")
    return tmp_path


@pytest.fixture
def compiled() -> list[str]:
    """What was compiled since the test began."""
    COMPILED.clear()
    return COMPILED


def script_environment() -> dict[str, str]:
    """For a script as a process of its own: one device, the shared program cache."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests")}
    return environment | cache | {"COLUMNS": "400"}


@pytest.fixture(scope="session")
def launch():
    """`launch(name, *flags, cwd=folder)` starts a script; `.communicate()` ends it."""
    started = []

    def start(name: str, *flags: str, cwd: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / name), *map(str, flags)], cwd=cwd, text=True,
            env=script_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def finish(launch):
    """`finish(name, *flags, cwd=folder)` runs a script to its end: (status, stdout, stderr)."""

    def run(name: str, *flags: str, cwd: Path) -> tuple[int, str, str]:
        process = launch(name, *flags, cwd=cwd)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err

    return run
