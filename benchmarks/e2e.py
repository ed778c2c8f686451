# SPDX-License-Identifier: Apache-2.0
"""One whole GPPO step, in samples per CPU second on one pinned thread, for comparison with others.

    python benchmarks/e2e.py --bench=DIR --size=tiny                  # this project alone
    python benchmarks/e2e.py --bench=DIR --size=m512 --rounds=3 \
        --trl=TRL_VENV/bin/python --tunix=TUNIX_VENV/bin/python       # interleaved, with ratios

DIR holds `e2e_common.py` (sizes, random weights, prompts, the clock) and the scripts of the other
engines. A step is: sample 8 completions of each prompt, grade (parity of the sum of ids), group
advantages, pack, old log-probs, four optimizer updates; it goes through `rl.loop`'s own `roll_out`
and `take_updates`, so the drift measurement after the last update is in it. With
`--old-logprobs=sampler` the scoring pass is left out.
"""

import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Bench:
    """What to time."""

    bench: Path
    """Folder with e2e_common.py."""
    size: Literal["tiny", "m512"] = "tiny"
    """0.35 M parameters, 32 prompts x 8; or 27 M, 8 x 8."""
    steps: int = 5
    """Timed steps of a round, after one to warm up."""
    rounds: int = 1
    """Rounds; the engines take turns."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Score with the trainer, or reuse what the sampler captured."""
    trl: Path | None = None
    """Python of an environment with TRL."""
    tunix: Path | None = None
    """Python of an environment with tunix."""
    slots: int | None = None
    """Sequences decoded at a time; by default 128 (tiny) or 32 (m512)."""
    row_tokens: int | None = None
    """Tokens of a packed row; by default 80, one longest sequence."""
    rows: int = 8
    """Rows of a micro-batch."""
    worker: bool = False
    """Time this project in this process; what the driver starts."""


def main(bench: Bench) -> None:
    if bench.worker:
        time_steps(bench)
        return
    flags = [f"--bench={bench.bench.absolute()}", f"--size={bench.size}", f"--steps={bench.steps}"]
    flags += [f"--old-logprobs={bench.old_logprobs}", f"--rows={bench.rows}", "--worker"]
    flags += [f"--slots={bench.slots}"] if bench.slots else []
    flags += [f"--row-tokens={bench.row_tokens}"] if bench.row_tokens else []
    commands = {"klear_jax": ([sys.executable, __file__, *flags], {})}
    other = [bench.size, str(bench.steps)]
    if bench.trl:
        commands["trl"] = ([str(bench.trl), "e2e_trl.py", *other], {})
    if bench.tunix:
        commands["tunix"] = ([str(bench.tunix), "e2e_tunix.py", *other], {"MODE": "parts"})
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for number in range(bench.rounds):
        for name, (command, extra) in commands.items():
            done = subprocess.run(
                command, cwd=bench.bench, env=os.environ | extra, text=True, capture_output=True
            )
            lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
            if done.returncode or not lines:
                sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
            result = json.loads(lines[-1].removeprefix("RESULT "))
            results[name].append(result)
            print(f"round {number} {name}: {result['samples_cpu_s']} samples/CPU s, phases "
                  f"{result['phases_cpu_s']}", flush=True)  # fmt: skip
    show(results)


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    """Medians over rounds, and this project's rate as a multiple of the others'."""

    def rate(result: dict[str, Any], without: str | None = None) -> float:
        seconds = result["cpu_s"] - result["phases_cpu_s"].get(without, 0.0)
        return result["samples"] / seconds

    ours = statistics.median(rate(r) for r in results["klear_jax"])
    print(f"klear_jax: {ours:.1f} samples per CPU second")
    for name in results.keys() - {"klear_jax"}:
        whole = statistics.median(rate(r) for r in results[name])
        less = statistics.median(rate(r, "old_logp") for r in results[name])
        print(
            f"{name}: {whole:.1f} ({ours / whole:.2f}x); less its old log-probs {less:.1f} "
            f"({ours / less:.2f}x)"
        )


def time_steps(bench: Bench) -> None:
    sys.path.insert(0, str(bench.bench))
    # Before jax: it pins the process to one core, and so the backend to one thread.
    common = importlib.import_module("e2e_common")

    import jax

    from klear_jax.core.mesh import MeshSpec, make_mesh
    from klear_jax.data.problems import Message, Problem
    from klear_jax.model import hf
    from klear_jax.rewards.verdict import Format, Reason, Verdict
    from klear_jax.rl import loop
    from klear_jax.rl.loss import make_policy_loss
    from klear_jax.rl.minibatch import Layout
    from klear_jax.rl.objective import Objective
    from klear_jax.rl.surrogates import Clip
    from klear_jax.sampling.engine import EngineConfig
    from klear_jax.sampling.sampler import Sampler
    from klear_jax.train import optim
    from klear_jax.train.state import init_state
    from klear_jax.train.step import make_scorer, make_step

    size = common.size(bench.size, bench.steps)
    clock = common.Clock()
    longest = size["max_prompt"] + size["max_new"]
    row = bench.row_tokens or longest
    groups = size["prompts"] // size["updates"]
    per_row = row // (longest - 1)
    rows = -(-groups * size["G"] // per_row)
    layout = Layout(row, bench.rows, -(-rows // bench.rows))
    prompts = {
        str(n): Problem(str(n), (Message("user", "-"),), "-")
        for n in range(len(size["prompt_ids"]))
    }
    whole = Format(think_opened=True, think_closed=True, boxed=True)

    def grade(problem: Problem, text: str) -> Verdict:
        ids = [int(i) for i in text.split()]
        right = common.parity(ids) == 1.0
        return Verdict.right(format=whole) if right else Verdict.miss(Reason.WRONG, format=whole)

    def problems(number: int) -> list[Problem]:
        first = number * size["prompts"]
        return [prompts[str(n)] for n in range(first, first + size["prompts"])]

    adam = optim.OptimConfig(
        learning_rate=common.LR, b1=common.B1, b2=common.B2, eps=common.EPS, weight_decay=0.0,
        clip_norm=common.CLIP_NORM,
    )  # fmt: skip
    optimizer = optim.make_optimizer(adam)
    objective = Objective(positive_nll=0.0, old_logprobs=bench.old_logprobs)
    cfg = loop.LoopConfig(
        steps=1 + bench.steps, samples=size["G"], keep=size["prompts"], updates=size["updates"],
        max_tokens=size["max_new"], temperature=1.0, group_filter="none", eval_every=0,
        save_every=0,
    )  # fmt: skip
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, model = hf.load(Path(common.weights(size)), mesh=mesh)
        state = init_state(params, optimizer)
        slots = bench.slots or {"tiny": 128, "m512": 32}[bench.size]
        engine = EngineConfig(
            slots=slots, length=longest, stop_ids=tuple(size["eos"]),
            prefill_rows=min(32, size["prompts"]),
        )  # fmt: skip
        sampler = Sampler(state.params, model, engine, seed=0)
        score = make_scorer(model, temperature=1.0)
        clip = Clip(low=common.CLIP, high=common.CLIP)
        step = make_step(
            make_policy_loss(model, clip=clip, objective=objective), optimizer=optimizer
        )
        before = jax.device_get(state.params.embed)
        clock.mark()
        for number in range(cfg.steps):
            begin = time.process_time()
            rolled = loop.roll_out(
                cfg, number, number, state.params, problems,
                lambda problem: tuple(size["prompt_ids"][int(problem.id)]),
                lambda ids: " ".join(map(str, ids.tolist())), sampler, grade,
                lambda kind, verdict: verdict.reward, objective, layout, score, mesh, None,
            )  # fmt: skip
            share = rolled.values["seconds/score"]
            spent = time.process_time() - begin
            # One thread: the seconds of scoring are CPU seconds, less what others took meanwhile.
            wall = rolled.values["seconds/sample"] + share
            clock.add("old_logp", spent * share / wall)
            clock.add("generate", spent * (1 - share / wall))
            begin = time.process_time()
            state, values = loop.take_updates(cfg, state, rolled, step, score, common.LR)
            clock.add("updates", time.process_time() - begin)
            mean = rolled.values["length/mean"]
            lengths = [mean] * (size["samples"] - 1) + [rolled.values["length/max"]]
            clock.step(lengths)
        moved = float(abs(jax.device_get(state.params.embed) - before).max())
    assert values["updates"] == size["updates"]
    clock.report("klear_jax", size, old_logprobs=bench.old_logprobs, moved=moved)


if __name__ == "__main__":
    main(tyro.cli(Bench))
