# SPDX-License-Identifier: Apache-2.0
"""What the sizes of the decode engine change: time where they should not, and bits of a log-prob.

    taskset -c 1 python benchmarks/engine_sizes.py time --bench=DIR
    taskset -c 1 python benchmarks/engine_sizes.py tokens --bench=DIR

DIR holds `common.py`, which writes the bench model (27 M parameters, random weights).

`time`: the same requests, about 128 live tokens each, in engines of several lengths that take
turns; a step should cost what its live tokens cost. Timed are the dispatches after the first, each
waited for: prompts and the empty cache, which a call pays once, are left out.

`tokens`: the same requests in engines of several numbers of slots. A product of another number of
rows is summed in another order, so a log-prob moves in its last bits and, rarely, a draw falls the
other way; from then on two completions are unrelated. Log-probs are compared up to there: same
tokens after same tokens.
"""

import dataclasses
import importlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import numpy as np
import tyro

from klear_jax.model import hf
from klear_jax.sampling import engine as engine_lib
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.sampler import Completion, Request, Sampler


@dataclasses.dataclass(frozen=True)
class Bench:
    """What to measure."""

    what: tyro.conf.Positional[Literal["time", "tokens"]]
    bench: Path
    """Folder with common.py."""
    slots: tuple[int, ...] = (2, 8, 64)
    """`tokens`: engines compared with the first one."""
    lengths: tuple[int, ...] = (256, 4096)
    """`time`: engines compared with the first one; each runs 16 slots."""
    rounds: int = 5
    """`time`: rounds; the engines take turns."""
    requests: int = 128
    """`tokens`: completions of at most 128 tokens."""


def main(bench: Bench) -> None:
    sys.path.insert(0, str(bench.bench.absolute()))
    common: Any = importlib.import_module("common")
    params, cfg = hf.load(Path(common.model_dir(2048)))
    if bench.what == "time":
        step_times(bench, params, cfg)
    else:
        divergence(bench, params, cfg)


def step_times(bench: Bench, params, cfg) -> None:
    """Prints CPU time of a decode step at 80 to 176 live tokens, by the engine's length."""
    random = np.random.default_rng(0)
    requests = [
        Request(str(i), tuple(random.integers(1, 2048, 48).tolist()), i, max_tokens=128)
        for i in range(16)
    ]
    real, spent = engine_lib.generate, []

    def generate(*args, **kwargs):
        start = time.process_time()
        state, emitted = jax.block_until_ready(real(*args, **kwargs))
        spent.append((time.process_time() - start) / int(emitted.steps))
        return state, emitted

    engine_lib.generate = generate
    samplers = {n: Sampler(params, cfg, EngineConfig(slots=16, length=n)) for n in bench.lengths}
    times: dict[int, list[float]] = {n: [] for n in samplers}
    for number in range(bench.rounds + 1):
        for length, sampler in samplers.items():
            spent.clear()
            list(sampler.sample(requests))
            if number:  # The first compiles.
                times[length].append(statistics.mean(spent[1:]) * 1e3)
    first = statistics.median(times[bench.lengths[0]])
    for length, values in times.items():
        median = statistics.median(values)
        print(f"length {length}: {median:.2f} ms of CPU a step ", end="")
        print(f"{[round(x, 2) for x in values]}, {median / first:.2f}x")


def divergence(bench: Bench, params, cfg) -> None:
    """Prints, by the number of slots, the largest difference of a log-prob on equal prefixes, and
    how many completions part."""
    random = np.random.default_rng(0)
    lengths = random.integers(8, 64, bench.requests)
    requests = [
        Request(str(i), tuple(random.integers(1, 2048, n).tolist()), i, max_tokens=128)
        for i, n in enumerate(lengths)
    ]

    def run(slots: int) -> dict[str, Completion]:
        sampler = Sampler(params, cfg, EngineConfig(slots=slots, length=256))
        return {c.id: c for c in sampler.sample(requests)}

    first = run(bench.slots[0])
    for slots in bench.slots[1:]:
        parted, tokens, largest = 0, 0, 0.0
        for id, other in run(slots).items():
            one = first[id]
            same = one.tokens == other.tokens
            common = len(same) if same.all() else int(np.argmin(same))
            parted += common < len(same)
            tokens += common
            difference = np.abs(one.logprobs[:common] - other.logprobs[:common])
            largest = max(largest, float(difference.max(initial=0)))
        rate = tokens / parted if parted else np.inf
        print(
            f"{slots} slots against {bench.slots[0]}: {parted} of {bench.requests} completions "
            f"part, one in {rate:,.0f} tokens ({tokens:,} equal); "
            f"log-probs of equal prefixes within {largest:.1e}"
        )


if __name__ == "__main__":
    main(tyro.cli(Bench))
