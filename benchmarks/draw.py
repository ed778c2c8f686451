# SPDX-License-Identifier: Apache-2.0
"""What drawing a token costs, with its log-prob, in milliseconds of CPU time.

    taskset -c 1 python benchmarks/draw.py                     # 16 slots x 151,936 tokens
    taskset -c 1 python benchmarks/draw.py --slots=64 --vocab=2048

Every kind of draw is compiled first; then they take turns, and medians over rounds are shown.
"""

import dataclasses
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import tyro

from klear_jax.sampling.draw import Truncation, draw

KINDS: dict[str, dict] = {
    "sampled": {},
    "greedy": {"temperature": 0.0},
    "top_k 50": {"truncation": Truncation(top_k=50)},
    "top_p 0.95": {"truncation": Truncation(top_p=0.95)},
    "min_p 0.05": {"truncation": Truncation(min_p=0.05)},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "all of them": {
        "truncation": Truncation(top_k=50, top_p=0.95, min_p=0.05), "repetition_penalty": 1.1,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Bench:
    """What to time."""

    slots: int = 16
    """Tokens drawn at a time."""
    vocab: int = 151_936
    """Logits of each."""
    rounds: int = 5
    """Rounds; the kinds of draw take turns."""
    calls: int = 20
    """Calls that are timed together."""


def main(bench: Bench) -> None:
    logits = 3 * jax.random.normal(jax.random.key(0), (bench.slots, bench.vocab), jnp.float32)
    keys = jax.random.split(jax.random.key(1), bench.slots)
    seen = jax.random.bernoulli(jax.random.key(2), 0.01, logits.shape)
    calls = {name: _compiled(logits, keys, seen, **kind) for name, kind in KINDS.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(bench.rounds):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(bench.calls):
                jax.block_until_ready(call())
            times[name].append((time.process_time() - start) / bench.calls * 1e3)
    print(f"{bench.slots} slots x {bench.vocab} tokens, ms of CPU time a draw")
    for name, values in times.items():
        print(f"{name:24} {statistics.median(values):7.2f}  {[round(x, 2) for x in values]}")


def _compiled(logits, keys, seen, *, temperature=0.8, **kind):
    temperatures = jnp.full(logits.shape[0], temperature, jnp.float32)
    extra = (seen,) if "repetition_penalty" in kind else ()

    def call(logits, keys, temperatures, *extra):
        seen = extra[0] if extra else None
        return draw(logits, keys, temperatures, live_vocab=logits.shape[-1], seen=seen, **kind)

    run = jax.jit(call).lower(logits, keys, temperatures, *extra).compile()
    run(logits, keys, temperatures, *extra)
    return lambda: run(logits, keys, temperatures, *extra)


if __name__ == "__main__":
    main(tyro.cli(Bench))
