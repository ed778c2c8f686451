# SPDX-License-Identifier: Apache-2.0
"""One whole GPPO step, in samples per CPU second on one pinned thread, beside other engines.

    python benchmarks/e2e.py tiny --bench=DIR                     # this project alone
    python benchmarks/e2e.py m512 --bench=DIR --reuse-sampler-logprobs
    python benchmarks/e2e.py tiny --bench=DIR --rounds=3 \\
        --trl=TRL_VENV/bin/python --tunix=TUNIX_VENV/bin/python   # taking turns, with ratios

DIR holds `e2e_common.py` (sizes, random weights, prompts, the clock, which pins the process to core
$CPU) and the scripts of the other engines; its README names the packages that they need. A step is:
sample 8 completions of each prompt, grade (parity of the sum of ids), group advantages, pack, old
log-probs, four optimizer updates. It goes through `rl.loop`'s own `roll_out` and `take_updates`, so
telemetry and the drift measurement after the last update are in it. With --reuse-sampler-logprobs
the log-probs captured while sampling are the old ones and the scoring pass is left out; set that
beside the other engine "less its old log-probs".
"""

import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Bench:
    """What to time."""

    size: tyro.conf.Positional[Literal["tiny", "m512"]]
    """0.35 M parameters, 32 prompts x 8; or 27 M, 8 x 8."""
    bench: Path
    """Folder with e2e_common.py."""
    steps: int = 5
    """Timed steps of a round, after one to warm up."""
    rounds: int = 1
    """Rounds; the engines take turns."""
    reuse_sampler_logprobs: bool = False
    """Take what the sampler captured for the old log-probs, in place of a scoring pass."""
    trl: Path | None = None
    """Python of an environment with TRL."""
    tunix: Path | None = None
    """Python of an environment with tunix."""
    slots: int | None = None
    """Sequences decoded at a time; None: what was best for the size."""
    row_tokens: int | None = None
    """Tokens of a packed row; None: the same."""
    rows: int | None = None
    """Rows of a micro-batch; None: the same."""
    worker: bool = False
    """Time this project in this process; what the driver starts."""


BEST = {"tiny": (128, 80, 4), "m512": (64, 160, 2)}
"""Slots, tokens of a row, rows of a micro-batch."""


def main(bench: Bench) -> None:
    if bench.worker:
        time_steps(bench)
        return
    flags = [bench.size, f"--bench={bench.bench.absolute()}", f"--steps={bench.steps}", "--worker"]
    flags += ["--reuse-sampler-logprobs"] if bench.reuse_sampler_logprobs else []
    for name in ("slots", "row_tokens", "rows"):
        if (value := getattr(bench, name)) is not None:
            flags.append(f"--{name.replace('_', '-')}={value}")
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
    from klear_jax.sampling.config import EngineConfig
    from klear_jax.sampling.sampler import Sampler
    from klear_jax.train import optim
    from klear_jax.train.state import init_state
    from klear_jax.train.step import make_scorer, make_step

    size = common.size(bench.size, bench.steps)
    clock = common.Clock()
    longest = size["max_prompt"] + size["max_new"]
    slots, row, rows = (
        given or best
        for given, best in zip((bench.slots, bench.row_tokens, bench.rows), BEST[bench.size],
                               strict=True)
    )  # fmt: skip
    # As many rows as mini-batches of longest sequences would need.
    most = -(-size["mini"] // (row // (longest - 1)))
    layout = Layout(row, rows, -(-most // rows))
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
    source = "sampler" if bench.reuse_sampler_logprobs else "trainer"
    objective = Objective(positive_nll=0.0, old_logprobs=source)
    cfg = loop.LoopConfig(
        steps=1 + bench.steps, samples=size["G"], keep=size["prompts"], updates=size["updates"],
        max_tokens=size["max_new"], temperature=1.0, group_filter="none", eval_every=0,
        save_every=0,
    )  # fmt: skip
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, model = hf.load(Path(common.weights(size)), mesh=mesh)
        state = init_state(params, optimizer)
        # A page holds a whole sequence: on a CPU fewer, larger products are worth the room.
        engine = EngineConfig(
            slots=slots, length=longest, stop_ids=tuple(size["eos"]), page=longest,
            prefill_rows=size["prompts"], narrowest=8,
        )  # fmt: skip
        sampler = Sampler(state.params, model, engine, seed=0)
        score = make_scorer(model, temperature=1.0)
        clip = Clip(low=common.CLIP, high=common.CLIP)
        step = make_step(
            make_policy_loss(model, clip=clip, objective=objective), optimizer=optimizer
        )
        before = jax.device_get(state.params.embed)
        values = {}
        clock.mark()
        score_timed = clock.wrap("old_logp", lambda *args: jax.block_until_ready(score(*args)))
        roll_out = clock.wrap("roll_out", loop.roll_out)
        take_updates = clock.wrap("updates", loop.take_updates)
        for number in range(cfg.steps):
            rolled = roll_out(
                cfg, number, number, state.params, problems,
                lambda problem: tuple(size["prompt_ids"][int(problem.id)]),
                lambda ids: " ".join(map(str, ids.tolist())), sampler, grade,
                lambda kind, verdict: verdict.reward, objective, layout, score_timed, mesh, None,
            )  # fmt: skip
            # Grading and packing are in it: threads grade while others still decode.
            clock.add("generate", clock.cpu.pop("roll_out") - clock.cpu.get("old_logp", 0.0))
            state, values = take_updates(cfg, state, rolled, step, score, common.LR)
            mean = rolled.values["length/mean"]
            lengths = [mean] * (size["samples"] - 1) + [rolled.values["length/max"]]
            clock.step(lengths)
        moved = float(abs(jax.device_get(state.params.embed) - before).max())
    assert values["updates"] == size["updates"]
    clock.report(
        "klear_jax", size, old_logprobs=source, moved=moved, slots=slots, row=row, rows=rows
    )


if __name__ == "__main__":
    main(tyro.cli(Bench))
