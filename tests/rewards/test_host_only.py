# SPDX-License-Identifier: Apache-2.0
"""Host packages import no jax, and nothing slow, so that graders start fast and touch no device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# grain imports jax, and `pipeline` imports grain.
EXEMPT = {"klear_jax.data.pipeline"}
MODULES = sorted(
    f"klear_jax.{folder}.{path.stem}"
    for folder in ("data", "rewards")
    for path in (ROOT / "klear_jax" / folder).glob("*.py")
    if path.stem != "__init__"
)
SLOW = ("jax", "flax", "optax", "torch", "transformers", "tokenizers", "sympy", "math_verify")


def test_the_list_is_not_empty() -> None:
    assert {"klear_jax.data.tokenizer", "klear_jax.rewards.math"} <= set(MODULES)


@pytest.mark.parametrize("folder", ["data", "rewards"])
def test_import_is_light(folder: str) -> None:
    chosen = [m for m in MODULES if m.split(".")[1] == folder and m not in EXEMPT]
    program = (
        f"import importlib, sys\nfor name in {chosen}: importlib.import_module(name)\n"
        f"print([m for m in {SLOW} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_using_tokenizer_and_grader_imports_no_jax() -> None:
    program = (
        "import sys\n"
        "from klear_jax.data.tokenizer import load_tokenizer\n"
        "from klear_jax.rewards.math import grade\n"
        "from klear_jax.rewards.symbolic import answer_request\n"
        "load_tokenizer('bytes').encode('a')\n"
        "assert grade('x+1', r'\\boxed{1+x}').correct\n"
        "assert answer_request({'gold': 'x', 'answers': ['x'], 'boxed': True}) == 'right'\n"
        "print([m for m in ('jax', 'flax', 'optax') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"
