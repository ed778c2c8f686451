# SPDX-License-Identifier: Apache-2.0
"""GPPO training: the page to read first.

One step: sample every problem of the step G times, grade while others still decode, keep the groups
that can teach something, pack them into mini-batches, recompute the old log-probs, and take one
optimizer step on each. Everything the loop needs is an argument, so a notebook or a test can hand
it fakes.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from klear_jax.data.sources import ProblemStream
from klear_jax.rewards.verdict import Kind, Verdict
from klear_jax.rl import rollout
from klear_jax.rl.rollout import Decode, Encode, Grader, Group, GroupFilter, Layout, Objective
from klear_jax.sampling.sampler import Sampler
from klear_jax.train.state import TrainState
from klear_jax.train.step import Step


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """What one GPPO step does."""

    steps: int
    """Rollout batches in the whole run."""
    samples: int
    """Completions a problem (G)."""
    keep: int
    """Most groups that are trained on; a larger rollout batch oversamples."""
    updates: int
    """Mini-batches, and so optimizer updates, a rollout batch."""
    max_tokens: int
    temperature: float
    group_filter: GroupFilter
    eval_every: int
    """Steps between evaluations; 0 for none but the first and the last."""
    save_every: int
    """Steps between checkpoints; 0 for the last only."""


class Hooks(Protocol):
    """What the loop tells the outside."""

    def log(self, phase: str, step: int, values: dict[str, Any]) -> None: ...

    def evaluate(self, state: TrainState, step: int) -> None: ...

    def save(self, state: TrainState, step: int) -> None: ...

    def stop(self) -> bool:
        """Whether to end after the step that has just been taken."""
        ...


def train_gppo(
    cfg: LoopConfig,
    *,
    state: TrainState,
    first_step: int,
    problems: ProblemStream,
    encode: Encode,
    decode: Decode,
    sampler: Sampler,
    grade: Grader,
    reward: Callable[[Kind, Verdict], float],
    objective: Objective,
    layout: Layout,
    score: Callable[[Any, Any, int], jax.Array],
    step: Step,
    learning_rate: Callable[[int], float],
    mesh: Mesh,
    hooks: Hooks,
) -> TrainState:
    """Run steps `first_step` .. `cfg.steps - 1` and return the final state."""
    for number in range(first_step, cfg.steps):
        start = time.monotonic()
        groups = sample_groups(cfg, number, state, problems(number), encode, decode, sampler, grade)
        sampled = time.monotonic()

        rewards = rollout.training_rewards(groups, reward)
        kept = rollout.keep_informative(groups, rewards, cfg.group_filter, cfg.keep)
        minibatches = rollout.assemble(
            [groups[i] for i in kept], rewards[kept], objective,
            updates=cfg.updates, layout=layout, max_tokens=cfg.max_tokens,
        )  # fmt: skip
        # All old log-probs come from the policy that sampled, so before the first update.
        score_now = functools.partial(score, state.params)
        scored = list(rollout.with_old_logprobs(minibatches, score_now, mesh))

        rate, updates = learning_rate(number), []
        for minibatch in scored:
            state, metrics = step(state, minibatch.batch, minibatch.microbatches, rate)
            updates.append(metrics)
        values = merge_updates(jax.device_get(updates))
        trained = time.monotonic()

        values |= rollout.summarise(groups, rewards, kept)
        values |= {
            "lr": rate,
            "updates": len(updates) - values["updates_skipped"],
            "padding_share": np.mean([m.padding_share for m in minibatches])
            if minibatches
            else 0.0,
            "seconds/sample": sampled - start,
            "seconds/train": trained - sampled,
            "tokens_per_second": values["tokens/sampled"] / (trained - start),
        }
        done = number + 1
        hooks.log("rl", done, values)
        stop = hooks.stop()
        last = done == cfg.steps
        if last or (not stop and cfg.eval_every and done % cfg.eval_every == 0):
            hooks.evaluate(state, done)
        if last or stop or (cfg.save_every and done % cfg.save_every == 0):
            hooks.save(state, done)
        if stop:
            break
    return state


def sample_groups(
    cfg: LoopConfig, number: int, state: TrainState, batch, encode, decode, sampler, grade
) -> list[Group]:
    """Roll the step's problems out under the current parameters."""
    requests = rollout.make_requests(
        batch, encode, step=number, samples=cfg.samples,
        max_tokens=cfg.max_tokens, temperature=cfg.temperature,
    )  # fmt: skip
    sampler.params = state.params
    completions = sampler.sample(requests)
    return rollout.collect(batch, requests, completions, decode=decode, grade=grade)


def merge_updates(updates: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """One set of metrics for a rollout batch: means over updates, maxima, sums of counts.

    A skipped update, and one without a value (such as one with no positive sample), does not enter
    a mean. No update at all (no group could teach anything) gives only the counts.
    """
    merged: dict[str, Any] = {"updates_skipped": sum(int(u["updates_skipped"]) for u in updates)}
    if not updates:
        return merged
    taken = [u for u in updates if not u["updates_skipped"]] or updates
    for name in updates[0]:
        values = np.stack([u[name] for u in taken])
        if name == "updates_skipped":
            continue
        if name in ("ratio_histogram", "tokens/trained"):
            merged[name] = values.sum(axis=0)
        elif name.endswith("max"):
            merged[name] = values.max()
        else:
            known = values[~np.isnan(values)]
            merged[name] = known.mean() if known.size else np.nan
    merged["grad_norm_max"] = max(float(u["grad_norm"]) for u in taken)
    return merged
