# SPDX-License-Identifier: Apache-2.0
"""Four CPU devices, one compile cache for all tests, and the folder of shared inputs."""

import os
from pathlib import Path

# Before anything starts a backend.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with question files: `$KLEAR_SHARED`, by default `../shared`."""
    folder = Path(os.environ.get("KLEAR_SHARED", ROOT.parent / "shared"))
    if not (folder / "questions").is_dir():
        pytest.skip(f"no question files: {folder} is absent (set KLEAR_SHARED)")
    return folder
