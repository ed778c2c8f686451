# SPDX-License-Identifier: Apache-2.0
"""Import order, sizes, host code without jax, and no config field that nothing reads."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "klear_jax"
ORDER = ("core", "data", "rewards", "model", "train", "sampling", "rl", "evals", "report")
"""A package imports only itself and what stands before it."""
ALLOWED = {
    "core": set(),
    "data": set(),
    "rewards": {"data.problems"},
    "model": {"core"},
    "train": {"core", "model"},
    "sampling": {"core", "model"},
    "rl": {"core", "data", "rewards", "model", "train", "sampling"},
    "evals": {"core", "data", "rewards", "model", "train", "sampling", "rl"},
    "report": set(),
}
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "experiments").glob("*.py")])
MAX_FILE, MAX_FUNCTION = 420, 80
LONG_FUNCTIONS = {"train_gppo"}
"""The page to read first is one function on purpose."""


def imports(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", ORDER)
def test_import_order(package):
    allowed = ALLOWED[package] | {package}
    # The pipeline makes device batches; grain imports it in its workers.
    extra = {"data/pipeline.py": {"core"}}
    for path in (PACKAGE / package).rglob("*.py"):
        more = extra.get(str(path.relative_to(PACKAGE)), set())
        for name in imports(path):
            if name.startswith("klear_jax."):
                target = name.removeprefix("klear_jax.")
                fits = any(target == a or target.startswith(a + ".") for a in allowed | more)
                assert fits, f"{path.relative_to(ROOT)} imports {name}"


def test_nothing_imports_the_experiments():
    scripts = {p.stem for p in (ROOT / "experiments").glob("*.py")}
    for path in PACKAGE.rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports(path)}
        assert not tops & (scripts | {"experiments"}), path


def test_only_the_mesh_module_names_a_mesh_axis():
    axes = {"fsdp", "tensor"}
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "core" / "mesh.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} & axes
        assert not named, f"{path.relative_to(ROOT)} names {named}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes_and_names(path):
    text = path.read_text(encoding="utf-8")
    assert path.name not in ("utils.py", "common.py")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert len(text.splitlines()) <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name not in LONG_FUNCTIONS:
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION, node.name


def config_classes():
    sys.path.insert(0, str(ROOT / "experiments"))
    import configs

    from klear_jax.model.config import ModelConfig
    from klear_jax.rl.loop import LoopConfig
    from klear_jax.sampling.config import EngineConfig

    nested = (configs.Clip, configs.Objective, configs.Overlong, configs.OptimConfig)
    runs = (configs.SftRun, configs.GppoRun, configs.EvalRun)
    return (*runs, *nested, ModelConfig, LoopConfig, EngineConfig)


def is_check(name: str) -> bool:
    return name == "__post_init__" or name.startswith(("_check_", "check_effect"))


def test_every_config_field_is_read():
    """Read: an attribute of its name is loaded somewhere; a check of the value alone is no use."""
    read = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        checks = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and is_check(function.name)
            for node in ast.walk(function)
        }
        read |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and id(node) not in checks
        }
    unread = [
        f"{cls.__name__}.{field.name}"
        for cls in config_classes()
        for field in dataclasses.fields(cls)
        if field.name not in read
    ]
    assert not unread


def test_host_packages_do_not_load_jax():
    code = (
        "import sys, klear_jax.data.tasks, klear_jax.data.chat, klear_jax.data.packing,"
        "klear_jax.data.sources, klear_jax.rewards.math, klear_jax.report;"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_package_never_imports_torch():
    for path in SOURCES:
        assert not any(name.partition(".")[0] == "torch" for name in imports(path)), path
