# SPDX-License-Identifier: Apache-2.0
"""Evaluation: avg@k with a 95 % interval, and pass@k, on problem files.

    python experiments/run_eval.py          # the SFT start of the demo on held-out questions
    python experiments/run_eval.py --init=runs/gppo-0001
    python experiments/run_eval.py --model=8b --tokenizer=qwen3 --init=HF_DIR --samples=64 \
        --max-tokens=32768 --problems aime24.jsonl aime25.jsonl --mesh=tensor:8
"""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import rich.console
import rich.table
import run_sft
from configs import EVAL_PRESETS, EvalRun, GppoRun
from decoding import engine_of
from inputs import (
    check_init,
    check_model,
    check_positions,
    encode_problems,
    initial_params,
    model_config,
    start_backend,
    tokenizer_of,
)
from session import (
    Interrupt,
    UsageError,
    command_line,
    main,
    open_run,
    usage_errors,
    write_json,
)

from klear_jax.data.chat import encode_prompt
from klear_jax.data.problems import Problem, load_problems
from klear_jax.data.tasks import draw_problems
from klear_jax.data.tokenizer import Tokenizer
from klear_jax.evals.run import Evaluation, evaluate
from klear_jax.model import params as params_lib
from klear_jax.rewards import math as math_rewards
from klear_jax.sampling.draw import Truncation
from klear_jax.sampling.sampler import Sampler
from klear_jax.train.metrics import RunLog


def problem_sets(run: EvalRun, tokenizer: Tokenizer) -> tuple[dict[str, list[Problem]], int]:
    """Name -> problems of every file (or the tasks' held-out questions), and the longest prompt."""
    with usage_errors():
        if not run.problems:
            held_out = draw_problems(run.tasks, run.eval_problems, split="heldout", seed=0)
            read = {"held-out tasks": held_out}
        else:
            read = {path.name.split(".")[0]: load_problems(path) for path in run.problems}
    if run.problems and len(read) < len(run.problems):
        raise UsageError(f"two of {[str(p) for p in run.problems]} have the same name; rename one")
    kept, longest = {}, 0
    for name, problems in read.items():
        limit = run.max_prompt_tokens
        kept[name], length = encode_problems(tokenizer, problems, limit, name=name)
        longest = max(longest, length)
    return kept, longest


def write_results(folder: Path, results: dict[str, Evaluation]) -> dict[str, dict[str, float]]:
    """`results.json`, `completions.jsonl` and a line of `metrics.jsonl`; returns the figures."""
    figures = {
        name: result.table() | {"problems": len(result.groups), "invalid": result.invalid}
        for name, result in results.items()
    }
    write_json(folder / "results.json", figures)
    with open(folder / "completions.jsonl", "w", encoding="utf-8") as file:
        for result in results.values():
            for record in result.records():
                file.write(json.dumps({"step": 0, **record}) + "\n")
    everything = Evaluation(tuple(g for result in results.values() for g in result.groups))
    table = everything.table()
    values = {
        "heldout/sampled": table[f"avg@{everything.correct.shape[1]}"],
        "heldout/sampled_low": table["low"],
        "heldout/sampled_high": table["high"],
    }
    values |= {f"heldout/sampled/{k}": v for k, v in everything.by_source().items()}
    with RunLog(folder) as log:
        log.write("eval", 0, values)
    return figures


def show(figures: dict[str, dict[str, float]], samples: int) -> None:
    """Print the table."""
    table = rich.table.Table(title=f"{samples} samples a problem")
    names = [n for n in next(iter(figures.values())) if n.startswith("pass@")]
    for column in ("set", "problems", f"avg@{samples}", "95 % interval", *names, "invalid"):
        table.add_column(column)
    for name, f in figures.items():
        interval = f"{f['low']:.3f} - {f['high']:.3f}"
        shown = [f"{f[f'avg@{samples}']:.3f}", interval, *(f"{f[n]:.3f}" for n in names)]
        table.add_row(name, str(int(f["problems"])), *shown, str(int(f["invalid"])))
    rich.console.Console().print(table)


def run_eval(argv: Sequence[str]) -> int:
    """The command line."""
    run = command_line(EVAL_PRESETS, argv)
    check_model(run)
    tokenizer = tokenizer_of(run)
    mesh = start_backend(run)
    cfg = model_config(run, tokenizer)
    with usage_errors():
        params_lib.shardings(cfg, mesh)
    sets, longest = problem_sets(run, tokenizer)
    check_positions(cfg, longest + run.max_tokens)
    if run.init is not None:
        check_init(run.init, cfg)
    engine = engine_of(
        run, cfg, mesh, tokenizer, length=longest + run.max_tokens,
        prompts=max(len(p) for p in sets.values()),
        truncation=Truncation(top_k=run.top_k, top_p=run.top_p),
    )  # fmt: skip
    folder = open_run(run, "eval", parameters=cfg.parameter_count)

    def encode(problem: Problem) -> tuple[int, ...]:
        return tuple(encode_prompt(tokenizer, problem.messages))

    with jax.set_mesh(mesh), Interrupt() as interrupt:
        init = run.init
        if init is None and not run.problems:
            start = GppoRun(
                tokenizer=run.tokenizer, tasks=run.tasks, mesh=run.mesh, seed=run.seed,
                cpu_devices=run.cpu_devices, dtype=run.dtype,
            )  # fmt: skip
            init = run_sft.cached_start(start.sft_start(), tokenizer, mesh, interrupt)
        elif init is None:
            print("evaluating random weights: --problems is given and --init is not")
        params = initial_params(init, cfg, mesh, seed=run.seed)
        sampler = Sampler(params, cfg, engine, seed=run.seed)
        results = {
            name: evaluate(
                sampler, problems, encode, lambda ids: tokenizer.decode(ids.tolist()),
                math_rewards.grade_problem, samples=run.samples, max_tokens=run.max_tokens,
                temperature=run.temperature,
            )
            for name, problems in sets.items()
            if not interrupt.asked
        }  # fmt: skip
    math_rewards.close_pool()
    if interrupt.asked:
        raise KeyboardInterrupt
    show(write_results(folder, results), run.samples)
    from klear_jax.report import write_report

    print(f"report: {write_report(folder)}")
    return 0


if __name__ == "__main__":
    main(run_eval)
