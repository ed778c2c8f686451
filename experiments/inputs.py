# SPDX-License-Identifier: Apache-2.0
"""What a run is made of, loaded and checked before anything is compiled: devices, tokenizer, model,
weights and problems. Every function refuses what cannot work with a `UsageError`.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
from configs import Common
from jax.sharding import Mesh
from session import RUNS, UsageError, usage_errors

from klear_jax.core import mesh as mesh_lib
from klear_jax.data.chat import encode_prompt
from klear_jax.data.problems import Problem
from klear_jax.data.tokenizer import Tokenizer, load_tokenizer
from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3, ModelConfig, with_vocab
from klear_jax.model.params import Params
from klear_jax.rewards import math as math_rewards
from klear_jax.train import checkpoint
from klear_jax.train.state import TrainState


def start_backend(run: Common) -> Mesh:
    """Set up devices and the program cache; returns the mesh.

    Raises:
        UsageError: the mesh does not fit the devices.
    """
    start_devices(run)
    with usage_errors():
        spec = mesh_lib.MeshSpec.parse(run.mesh)
        return mesh_lib.make_mesh(spec)


def start_devices(run: Common) -> None:
    """Set up devices and the program cache."""
    if run.cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", run.cpu_devices)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str((RUNS / "cache" / "xla").absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def check_model(run: Common) -> None:
    """Check that there is such a model, and weights to start from unless it is the tiny one."""
    if run.model not in QWEN3:
        raise UsageError(f"no model {run.model!r}; the models are {', '.join(QWEN3)}")
    if run.model != "tiny" and run.init is None:
        raise UsageError(f"model {run.model} starts from weights: give --init=DIR")


def model_config(run: Common, tokenizer: Tokenizer) -> ModelConfig:
    """The model that the config names, with rows for the tokenizer and the asked compute type."""
    cfg = with_vocab(QWEN3[run.model], tokenizer.vocab_size)
    return cfg if run.dtype == "model" else dataclasses.replace(cfg, dtype=run.dtype)


def tokenizer_of(run: Common) -> Tokenizer:
    with usage_errors():
        return load_tokenizer(run.tokenizer)


def check_init(path: Path, cfg: ModelConfig) -> None:
    """Compare the model of a checkpoint with the one asked for, before any weight is read."""
    with usage_errors():
        saved = _saved_model(path)
    checkpoint.check_same(
        checkpoint.model_record(saved), checkpoint.model_record(cfg),
        what=f"{path} is a checkpoint of another model",
    )  # fmt: skip


def _saved_model(path: Path) -> ModelConfig:
    if (path / checkpoint.FOLDER).is_dir():
        return checkpoint.saved_model(path)
    from klear_jax.model import hf

    return hf.load_config(path)


def initial_params(path: Path | None, cfg: ModelConfig, mesh: Mesh, *, seed: int) -> Params:
    """Weights of a run or of an HF folder, or fresh ones."""
    if path is None:
        return params_lib.init(cfg, seed, mesh)
    if (path / checkpoint.FOLDER).is_dir():
        return checkpoint.load_params(path, mesh=mesh)[0]
    from klear_jax.model import hf

    with usage_errors():
        return hf.load(path, mesh=mesh)[0]


def encode_problems(
    tokenizer: Tokenizer, problems: Sequence[Problem], limit: int, *, name: str
) -> tuple[list[Problem], int]:
    """The problems whose prompt has at most `limit` tokens, and the longest prompt of them.

    Longer ones are dropped and counted on the terminal, never cut.

    Raises:
        UsageError: none is left, or one needs a grader that does not exist.
    """
    code = [p.id for p in problems if p.kind == "code"]
    if code:
        raise UsageError(
            f"{name}: {len(code)} problems ({code[0]}, ...) are code problems, and there is no "
            "sandbox to run programs in yet; give math problems"
        )
    lengths = [len(encode_prompt(tokenizer, p.messages)) for p in problems]
    _check_golds(problems, name)
    kept = [p for p, n in zip(problems, lengths, strict=True) if n <= limit]
    if not kept:
        raise UsageError(
            f"{name}: every prompt is longer than max_prompt_tokens {limit} (the shortest has "
            f"{min(lengths)} tokens)"
        )
    dropped = len(problems) - len(kept)
    if dropped:
        print(f"{name}: dropped {dropped} of {len(problems)} problems: prompt over {limit} tokens")
    return kept, max(n for n in lengths if n <= limit)


def _check_golds(problems: Sequence[Problem], name: str) -> None:
    """Refuse answers that no response could be graded against; they would teach nothing."""
    faults = []
    for problem in problems:
        try:
            math_rewards.validate_gold(problem.answer or "")
        except ValueError as error:
            faults.append(f"{problem.id}: {error}")
    if faults:
        raise UsageError(
            f"{name}: {len(faults)} of {len(problems)} problems have an answer that cannot be "
            f"graded against; mend or remove them. {'; '.join(faults[:3])}"
        )


def check_learned(state: TrainState) -> None:
    """Refuse to call a run a success in which no update was finite."""
    if int(state.skipped) and not int(state.updates):
        raise UsageError(
            f"all {int(state.skipped)} updates were skipped: loss or gradient was not finite; "
            "lower the learning rate, or look for the cause in metrics.jsonl"
        )


def row_tokens(run: Common, longest: int) -> int:
    """Cells of a packed row; `longest` is the cells of the longest sequence.

    Raises:
        UsageError: the longest sequence does not fit the given row.
    """
    if run.row_tokens is None:
        return 64 if longest <= 64 else -(-longest // 128) * 128
    if run.row_tokens < longest:
        raise UsageError(
            f"row_tokens {run.row_tokens} is shorter than the longest sequence, {longest} tokens; "
            "raise it, or lower max_tokens or max_prompt_tokens"
        )
    return run.row_tokens


def check_positions(cfg: ModelConfig, tokens: int) -> None:
    """Refuse sequences that are longer than the model's positions."""
    if tokens > cfg.max_positions:
        raise UsageError(
            f"the longest prompt and max_tokens make {tokens} tokens, and the model has "
            f"{cfg.max_positions} positions; lower max_tokens or max_prompt_tokens"
        )


def microbatch_rows(run: Common, mesh: Mesh, tokens: int) -> int:
    """Rows of a micro-batch of rows of so many tokens.

    Raises:
        UsageError: the mesh does not cut them into equal pieces.
    """
    rows = run.microbatch_rows or mesh_lib.axis_size(mesh, "batch")
    with usage_errors():
        mesh_lib.check_divides(mesh, {"batch": rows, "seq": tokens})
    return rows
