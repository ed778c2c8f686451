# SPDX-License-Identifier: Apache-2.0
"""GPPO training: the page to read first.

One step: sample every problem of the step G times, grade while others still decode, keep the groups
that can teach something, pack them into mini-batches, recompute the old log-probs, and take one
optimizer step on each. Everything the loop needs is an argument, so a notebook or a test can hand
it fakes.

How off-policy an update is has three dials: `updates` and `epochs` (later updates of a rollout see
a policy that has moved), and `lag` (a rollout is sampled that many steps before it is trained on).
"""

import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from klear_jax.data.sources import ProblemStream
from klear_jax.rewards.verdict import Kind, Verdict
from klear_jax.rl import minibatch, rollout
from klear_jax.rl.minibatch import Layout
from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout import Decode, Encode, Grader, Group, GroupFilter, Overlong
from klear_jax.rl.rollout_file import Rollout
from klear_jax.rl.telemetry import drift
from klear_jax.sampling.sampler import SampleCounts, Sampler
from klear_jax.train.state import TrainState
from klear_jax.train.step import Scorer, Step


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
    """Mini-batches of a rollout batch."""
    max_tokens: int
    temperature: float
    group_filter: GroupFilter
    eval_every: int
    """Steps between evaluations; 0 for none but the first and the last."""
    save_every: int
    """Steps between checkpoints; 0 for the last only."""
    minibatch_groups: int | None = None
    """Groups in a mini-batch, in place of an even split (`rl.minibatch.assemble`)."""
    rounds: int = 1
    """Most batches of problems that are sampled to find `keep` groups (dynamic sampling)."""
    epochs: int = 1
    """Passes over the mini-batches of a rollout batch, each in the same order."""
    lag: int = 0
    """Steps between sampling a rollout and training on it."""
    overlap: bool = False
    """Sample ahead in a thread while the updates run; needs a lag of at least 1."""
    overlong: Overlong = dataclasses.field(default_factory=Overlong)


class Hooks(Protocol):
    """What the loop tells the outside."""

    def log(self, phase: str, step: int, values: dict[str, Any]) -> None: ...

    def rolled_out(self, done: Rollout) -> None:
        """A rollout is about to be trained on."""
        ...

    def evaluate(self, state: TrainState, step: int) -> None: ...

    def save(self, state: TrainState, step: int, position: int, ahead: Sequence[Rollout]) -> None:
        """Keep the state after `step` steps, and what was drawn and sampled ahead of them."""
        ...

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
    score: Scorer,
    step: Step,
    learning_rate: Callable[[int], float],
    mesh: Mesh,
    hooks: Hooks,
    reference: Any = None,
    position: int | None = None,
    ahead: Sequence[Rollout] = (),
) -> TrainState:
    """Run steps `first_step` .. `cfg.steps - 1` and return the final state.

    Args:
        reference: parameters of the frozen reference, where the objective has a KL term.
        position, ahead: of a resumed run, as `Hooks.save` got them.

    Raises:
        ValueError: the objective has a KL term and there is no reference.
    """
    if objective.kl_coef and reference is None:
        raise ValueError(
            f"kl_coef {objective.kl_coef} needs a reference: give the parameters that the KL term "
            "is taken to"
        )
    queue = collections.deque(ahead)
    drawn = first_step if position is None else position

    def sample_ahead(first: int, last: int, params: Any) -> None:
        """Fill the queue, which starts at step `first`, up to step `last`, all under `params`."""
        nonlocal drawn
        for number in range(first + len(queue), min(last, cfg.steps - 1) + 1):
            made = roll_out(
                cfg, number, drawn, params, problems, encode, decode, sampler, grade, reward,
                objective, layout, score, mesh, reference,
            )  # fmt: skip
            drawn = made.position
            queue.append(made)

    for number in range(first_step, cfg.steps):
        start = time.monotonic()
        # With a lag, rollouts wait in the queue: step n trains on what step n - lag sampled.
        sample_ahead(number, number if cfg.overlap else number + cfg.lag, state.params)
        rolled = queue.popleft()
        hooks.rolled_out(rolled)
        rate = learning_rate(number)
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            job = None
            if cfg.overlap:
                # The step gives the buffers of its state away, so the sampler gets its own; its
                # last ones go first.
                sampler.release()
                run = functools.partial(_in_mesh, mesh, sample_ahead, number + 1, number + cfg.lag)
                job = beside.submit(run, jax.tree.map(jnp.copy, state.params))
            state, values = take_updates(cfg, state, rolled, step, score, rate)
            if job is not None:
                job.result()

        seconds = time.monotonic() - start
        values |= rolled.values | {
            "lr": rate,
            "step_seconds": seconds,
            "tokens_per_second": rolled.values["tokens/sampled"] / seconds,
        }
        done = number + 1
        hooks.log("rl", done, values)
        stop = hooks.stop()
        last = done == cfg.steps
        if last or (not stop and cfg.eval_every and done % cfg.eval_every == 0):
            hooks.evaluate(state, done)
        if last or stop or (cfg.save_every and done % cfg.save_every == 0):
            hooks.save(state, done, drawn, tuple(queue))
        if stop:
            break
    return state


def _in_mesh(mesh: Mesh, function: Callable, *args: Any) -> None:
    """Call a function in a thread, which does not inherit the mesh."""
    with jax.set_mesh(mesh):
        function(*args)


def take_updates(
    cfg: LoopConfig, state: TrainState, rolled: Rollout, step: Step, score: Scorer, rate: float
) -> tuple[TrainState, dict[str, Any]]:
    """`epochs` passes over the mini-batches of a rollout, and how far they moved the policy."""
    start = time.monotonic()
    updates = []
    for _ in range(cfg.epochs):
        for piece in rolled.minibatches:
            state, metrics = step(state, piece.batch, piece.microbatches, rate)
            updates.append(metrics)
    values = merge_updates(jax.device_get(updates))
    if rolled.minibatches:
        # The first mini-batch: all the other updates came after its own.
        piece = rolled.minibatches[0]
        logprobs, _ = score(state.params, piece.batch, piece.microbatches)
        values |= jax.device_get(drift(logprobs, piece.batch))
    return state, values | {
        "updates": len(updates) - values["updates_skipped"],
        "updates_missing": cfg.updates * cfg.epochs - len(updates),
        "padding_share": np.mean([m.padding_share for m in rolled.minibatches] or [0.0]),
        "seconds/train": time.monotonic() - start,
    }


def roll_out(
    cfg: LoopConfig, number: int, position: int, params: Any, problems, encode, decode, sampler,
    grade, reward, objective, layout, score, mesh, reference,
) -> Rollout:  # fmt: skip
    """Sample, grade, filter and pack the rollout of step `number` under `params`.

    Batches of problems are drawn from `position` on, at most `cfg.rounds` of them, until `cfg.keep`
    groups pass the filter. If they do not, the groups there are make the step; with none it takes
    no update.
    """
    start = time.monotonic()
    groups: list[Group] = []
    rounds, counts = 0, SampleCounts()
    while True:
        drawn = position + rounds
        new = problems(drawn)
        groups += sample_groups(cfg, drawn, params, new, encode, decode, sampler, grade)
        rounds, counts = rounds + 1, counts + sampler.counts
        rewards = rollout.training_rewards(groups, reward, cfg.overlong, cfg.max_tokens)
        valid = rollout.trainable(groups, cfg.overlong)
        kept = rollout.keep_informative(groups, rewards, valid, cfg.group_filter, cfg.keep)
        if len(kept) == cfg.keep or rounds == cfg.rounds:
            break
    minibatches = minibatch.assemble(
        [groups[i] for i in kept], rewards[kept], valid[kept], objective, updates=cfg.updates,
        minibatch_groups=cfg.minibatch_groups, layout=layout, max_tokens=cfg.max_tokens,
    )  # fmt: skip
    sampled = time.monotonic()
    # Old log-probs come from the policy that sampled, so before any update.
    scored = minibatch.with_old_logprobs(
        minibatches,
        functools.partial(score, params) if objective.old_logprobs == "trainer" else None,
        mesh,
        reference=None if reference is None else functools.partial(score, reference),
    )
    done = tuple(scored)
    jax.block_until_ready([piece.batch for piece in done])
    values = rollout.summarise(groups, rewards, valid, kept) | {
        "rounds": rounds,
        "sampler/fill": counts.fill,
        "sampler/set_aside": counts.set_aside,
        "sampler/copied_bytes": sampler.copied_bytes,
        "seconds/sample": sampled - start,
        "seconds/score": time.monotonic() - sampled,
    }
    return Rollout(number, position + rounds, done, values)


def sample_groups(
    cfg: LoopConfig, position: int, params: Any, batch, encode, decode, sampler, grade
) -> list[Group]:
    """Complete the problems of one batch under `params`; its position names the noise."""
    requests = rollout.make_requests(
        batch, encode, step=position, samples=cfg.samples,
        max_tokens=cfg.max_tokens, temperature=cfg.temperature,
    )  # fmt: skip
    sampler.update(params)
    completions = sampler.sample(requests)
    return rollout.collect(batch, requests, completions, decode=decode, grade=grade)


BY_UPDATE = (
    "loss", "grad_norm", "entropy", "kl", "clip", "clip/pos_high", "clip/neg_low",
    "outside/pos_low", "outside/neg_high", "mass/clipped", "mass/lost", "ratio/max",
)  # fmt: skip
"""Metrics that are also reported update by update, in the order in which they were taken."""


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
        if values.ndim > 1 or name == "tokens/trained":
            merged[name] = values.sum(axis=0)
        elif name.endswith("max"):
            merged[name] = values.max()
        else:
            known = values[~np.isnan(values)]
            merged[name] = known.mean() if known.size else np.nan
    merged["grad_norm_max"] = max(float(u["grad_norm"]) for u in taken)
    for name in BY_UPDATE:
        if name in updates[0]:
            merged[f"by_update/{name}"] = [float(u[name]) for u in updates]
    return merged
