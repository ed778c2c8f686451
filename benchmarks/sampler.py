# SPDX-License-Identifier: Apache-2.0
"""The sampler beside other engines, in useful tokens per CPU second of one pinned thread.

    python benchmarks/sampler.py v2k_b16 --bench=DIR                    # this project alone
    python benchmarks/sampler.py v2k_b16 v2k_b64 --bench=DIR --rounds=3 \\
        --python=OTHERS_VENV/bin/python --engines hf hfcb tunix proto   # taking turns, with ratios

DIR holds `common.py` (workloads, random weights) and one `sampler_ENGINE.py` for each other engine;
its README names the packages that they need. Each run is a process of its own, pinned to core
$CPU (1 by default), with one thread; engines take turns, and the medians over rounds are compared.
Useful tokens are those up to and with the first end token. Compilation is not timed: every engine
has a warm-up run.
"""

import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import tyro


@dataclasses.dataclass(frozen=True)
class Bench:
    """What to time."""

    workloads: tyro.conf.Positional[tuple[str, ...]]
    """Names in DIR's common.py: v2k_b16, v2k_b64, v152k_b16, v2k_b64_even, ..."""
    bench: Path
    """Folder with common.py."""
    rounds: int = 1
    """Rounds; the engines take turns."""
    python: Path | None = None
    """Python of an environment with the other engines' packages."""
    engines: tuple[str, ...] = ()
    """Other engines to run: hf hfcb tunix proto."""
    page: int = 32
    """Tokens of a page."""
    steps: int = 32
    """Decode steps of a dispatch."""
    narrowest: int | None = 1
    """`EngineConfig.narrowest`; None keeps all slots to the end."""
    worker: bool = False
    """Time this project in this process; what the driver starts."""


def main(bench: Bench) -> None:
    if bench.worker:
        for workload in bench.workloads:
            time_workload(bench, workload)
        return
    core = os.environ.get("CPU", "1")
    one_thread = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    flags = [f"--bench={bench.bench.absolute()}", f"--page={bench.page}", f"--steps={bench.steps}"]
    flags += [f"--narrowest={bench.narrowest}", "--worker"]
    for workload in bench.workloads:
        commands = {"klear_jax": [sys.executable, str(Path(__file__).absolute()), workload, *flags]}
        for name in bench.engines:
            if bench.python is None:
                sys.exit("--engines needs --python=PYTHON of an environment with their packages")
            commands[name] = [str(bench.python), f"sampler_{name}.py", workload, "1"]
        rates: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(bench.rounds):
            for name, command in commands.items():
                done = subprocess.run(
                    ["taskset", "-c", core, *command],
                    cwd=bench.bench, env=os.environ | one_thread, text=True, capture_output=True,
                )  # fmt: skip
                lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
                results = [json.loads(x.removeprefix("RESULT ")) for x in lines]
                results = [r for r in results if r["kind"] == "sampler"]
                if done.returncode or not results:
                    sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
                rates[name].append(results[-1]["tok_cpu_s"])
                print(f"{workload} round {number} {name}: {results[-1]}", flush=True)
        show(workload, rates)


def show(workload: str, rates: dict[str, list[float]]) -> None:
    """Medians over rounds, and this project's as a multiple of the others'."""
    ours = statistics.median(rates["klear_jax"])
    print(f"== {workload}: klear_jax {ours:.1f} tokens per CPU second {rates['klear_jax']}")
    for name, values in rates.items():
        if name != "klear_jax":
            median = statistics.median(values)
            print(f"== {workload}: {name} {median:.1f} {values}: {ours / median:.2f}x")


def time_workload(bench: Bench, name: str) -> None:
    sys.path.insert(0, str(bench.bench))
    common: Any = importlib.import_module("common")

    from klear_jax.model import hf
    from klear_jax.sampling.config import EngineConfig
    from klear_jax.sampling.sampler import Request, Sampler

    work = common.workload(name)
    params, cfg = hf.load(Path(common.model_dir(work["vocab"])))
    engine = EngineConfig(
        slots=work["slots"], length=common.PROMPT_BUCKET + work["max_new"],
        stop_ids=tuple(work["eos"]), page=bench.page, steps=bench.steps,
        narrowest=bench.narrowest,
    )  # fmt: skip
    sampler = Sampler(params, cfg, engine)

    def run(seed: int) -> list[int]:
        sampler.seed = seed
        requests = [
            Request(f"{p}/{g}", tuple(prompt), p * work["G"] + g, work["max_new"])
            for p, prompt in enumerate(work["prompt_ids"])
            for g in range(work["G"])
        ]
        return [len(c.tokens) for c in sampler.sample(requests)]

    # Twice: the first warm-up compiles, the second shows that nothing is left to compile.
    run(98)
    common.run_timed(run, name, "klear_jax", 1)
    print("COUNTS", dataclasses.asdict(sampler.counts), "fill", round(sampler.counts.fill, 3))


if __name__ == "__main__":
    main(tyro.cli(Bench))
