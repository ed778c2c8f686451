# SPDX-License-Identifier: Apache-2.0
"""What a preflight check is and needs, and the checks that need no forward pass.

`rl.preflight` has those that do, and makes them all.
"""

import collections
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from klear_jax.core.batch import RolloutBatch
from klear_jax.data.problems import Problem
from klear_jax.data.tokenizer import Tokenizer
from klear_jax.rewards.verdict import Kind, Reason, Verdict, format_of
from klear_jax.rl import rollout
from klear_jax.rl.minibatch import Layout
from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout import Decode, Encode, Grader
from klear_jax.sampling.sampler import Completion, Request, Sampler
from klear_jax.train.checkpoint import CheckpointError, Checkpoints
from klear_jax.train.optim import OptimConfig
from klear_jax.train.state import TrainState
from klear_jax.train.step import LossFn, Scorer, Step

STEP = "preflight"
"""Names the noise of the samples that are drawn here; no step of a run has this name."""
SAMPLES, TOKENS = 2, 48
"""Most samples a problem, and tokens a completion, that are drawn."""
FEW_TOKENS, DRAWN_LOGITS = 16, 2**28
"""Fewer tokens, though not below the first number, where all the decode slots together would make
more logits than the second (seconds on a CPU with a vocabulary of 152,000)."""
SAVE_LIMIT = 64 * 2**20
"""Bytes of the training state above which a single leaf makes the checkpoint round trip."""
WRONG = ("987654321.5", "123456789.5")
"""Answers that no problem has; the second for a problem that has the first."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far log-probs that should be equal may lie apart, in nats.

    With `exact` arithmetic the largest difference counts; otherwise their root mean square, since
    one token in hundreds is always far off.
    """

    exact: bool
    same: float
    """Between two passes of the trainer."""
    sampler: float
    """Between sampler and trainer, which order their sums differently."""

    def figure(self, difference: np.ndarray) -> float:
        """The figure of an array of differences."""
        if difference.size == 0:
            return 0.0
        size = np.abs(np.asarray(difference, np.float64))
        return float(size.max() if self.exact else np.sqrt((size**2).mean()))

    @property
    def name(self) -> str:
        return "largest" if self.exact else "root mean square"


EXACT = Tolerance(exact=True, same=1e-5, sampler=1e-4)
"""Full float32 products; measured on the tiny model: 2e-6 and 4e-6."""
ROUNDED = Tolerance(exact=False, same=0.05, sampler=0.1)
"""Products of 8 bits (bfloat16, and float32 on a TPU) or 11 (float32 on a GPU); measured on the
tiny model in bfloat16: up to 0.002 and 0.013, and an eight-bit mantissa loses 0.4 % of a logit."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One check and what it found."""

    name: str
    measured: str
    """What `figure` is, in words and with its unit."""
    figure: float
    limit: float
    """Largest figure that passes."""
    cause: str
    """What makes it fail, and what to do."""
    detail: str = ""
    """The first fault that was found."""
    skipped: str = ""
    """Why the check was not made; empty where it was."""

    @property
    def passed(self) -> bool:
        # NaN compares false, so it never passes.
        return bool(self.skipped) or self.figure <= self.limit

    def __str__(self) -> str:
        found = f"{self.name}: {self.measured} {self.figure:.3g}, at most {self.limit:.3g} allowed"
        return f"{found}{f' ({self.detail})' if self.detail else ''}. {self.cause}"


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    state: TrainState
    mesh: Mesh
    layout: Layout
    tokenizer: Tokenizer
    encode: Encode
    decode: Decode
    sampler: Sampler
    grade: Grader
    reward: Callable[[Kind, Verdict], float]
    objective: Objective
    optim: OptimConfig
    loss: LossFn
    """What `step` differentiates; used on its own only where the state is too large to copy."""
    score: Scorer
    step: Step
    samples: int
    """Completions a problem (G)."""
    max_tokens: int
    temperature: float
    seed: int
    folder: Path
    """Where the checkpoint round trip may write; the run's own disk."""
    checkpoints: Callable[[Path], Checkpoints] = Checkpoints
    reference: Any = None

    @property
    def tolerance(self) -> Tolerance:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        wide = "float32" == self.sampler.cfg.dtype == self.sampler.params.embed.dtype
        return EXACT if wide and (cpu or precision in ("highest", "float32")) else ROUNDED


def requests_of(parts: Parts, problems: Sequence[Problem], step: int | str) -> list[Request]:
    """Requests as the run makes them, only fewer and shorter."""
    logits = parts.sampler.engine.slots * parts.sampler.cfg.vocab
    tokens = min(TOKENS, max(DRAWN_LOGITS // logits, FEW_TOKENS))
    return rollout.make_requests(
        problems, parts.encode, step=step, samples=min(SAMPLES, parts.samples),
        max_tokens=min(tokens, parts.max_tokens), temperature=parts.temperature,
    )  # fmt: skip


def check_end_token(
    parts: Parts,
    completions: Sequence[Completion],
    batch: RolloutBatch,
    short: Sequence[tuple[np.ndarray, RolloutBatch]],
    trained: int,
) -> Check:
    """Completions end where the tokenizer says, and all of their tokens are trained on.

    Args:
        batch: the mini-batch of the completions, on the host.
        short: made-up completions that end with each stop id, with their mini-batches.
        trained: tokens that the loss counted.
    """
    faults = list(_stop_faults(parts, completions))
    for tokens, where in [*((c.tokens, batch) for c in completions), *short]:
        if tuple(tokens.tolist()) not in _trained(where):
            faults.append(f"a completion of {len(tokens)} tokens that ends with {tokens[-1]}")
    expected = sum(len(c.tokens) for c in completions)
    if trained != expected:
        faults.append(f"the loss counts {trained} tokens of {expected}")
    return Check(
        "end token", "completions that are not trained on whole", len(faults), 0,
        "The end token left the completion, the mask or the weights, or the sampler stops at other "
        "ids than the tokenizer's: masks must come from lengths, never from comparing with a pad "
        "id, and the engine needs tokenizer.stop_ids",
        "; ".join(faults[:2]),
    )  # fmt: skip


def _stop_faults(parts: Parts, completions: Sequence[Completion]) -> Iterator[str]:
    """What is wrong with where the completions end."""
    stops, live = set(parts.tokenizer.stop_ids), parts.sampler.cfg.live_vocab
    for stop in sorted(stops):
        if stop not in parts.sampler.engine.stop_ids:
            yield f"the sampler does not stop at {stop}"
        if not 0 <= stop < live:
            yield f"the model has no row for the stop id {stop}"
    for completion in completions:
        tokens = completion.tokens.tolist()
        if stops & set(tokens[:-1]):
            yield f"completion {completion.id} goes on after a stop id"
        if (tokens[-1] in stops) != (completion.stop == "stop"):
            yield f"completion {completion.id} ends with {tokens[-1]} for {completion.stop!r}"


def _trained(batch: RolloutBatch) -> collections.Counter[tuple[int, ...]]:
    """The targets under the mask with a weight, segment by segment."""
    found = collections.Counter()
    row_tokens = batch.targets.shape[-1]
    names = ("targets", "segments", "mask", "loss_weights")
    rows = [np.asarray(getattr(batch, name)).reshape(-1, row_tokens) for name in names]
    for targets, segments, mask, weights in zip(*rows, strict=True):
        chosen = mask & (weights > 0)
        for number in range(1, segments.max() + 1):
            found[tuple(targets[chosen & (segments == number)].tolist())] += 1
    return found


def check_noise(parts: Parts, problems: Sequence[Problem], position: int) -> Check:
    """Samples of a group, of two steps and of the preflight each have noise of their own."""
    ids = [
        r.sample_id
        for step in (STEP, position, position + 1)
        for r in requests_of(parts, problems, step)
    ]
    other = parts.sampler.seed != parts.seed
    return Check(
        "noise", "samples that share their noise with another", len(ids) - len(set(ids)) + other, 0,
        "Noise must be named by step, problem and sample (rl.rollout.sample_id), under the run's "
        "seed; give problems different ids",
        f"the sampler has seed {parts.sampler.seed}, the run {parts.seed}" if other else "",
    )  # fmt: skip


def check_grader(parts: Parts, problems: Sequence[Problem]) -> Check:
    """The grader tells each problem's own answer from a wrong one and from none."""
    faults: list[str] = []
    for problem in problems:
        if problem.answer is None:
            continue
        wrong = next(answer for answer in WRONG if answer != problem.answer)
        right, missed = (_verdict(parts, problem, _response(a)) for a in (problem.answer, wrong))
        silent = _verdict(parts, problem, "")
        for verdict, fine, what in (
            (right, right.correct, f"its own answer {problem.answer!r}"),
            (missed, missed.valid and not missed.correct, f"the wrong answer {wrong}"),
            (silent, silent.reason is Reason.NO_ANSWER, "an empty response"),
        ):
            if not fine:
                said = f"{verdict.reason.value} {verdict.detail}".strip()
                faults.append(f"{problem.id}: {what} was graded {said}")
        paid, unpaid = (parts.reward(problem.kind, v) for v in (right, missed))
        if right.correct and not missed.correct and not paid > unpaid:
            faults.append(f"{problem.id}: right earns {paid:g} and wrong {unpaid:g}")
    return Check(
        "grader", "verdicts that are not as they must be", len(faults), 0,
        "Rewards would teach something else: check the grader, its worker processes, the training "
        "reward, and that decoding keeps </think> and the box",
        "; ".join(faults[:2]),
    )  # fmt: skip


def _response(answer: str) -> str:
    return f"<think>\n...\n</think>\n\n\\boxed{{{answer}}}"


def _verdict(parts: Parts, problem: Problem, response: str) -> Verdict:
    """The verdict of a response that has gone through the tokenizer, as a sampled one does."""
    ids = [*parts.tokenizer.encode(response), parts.tokenizer.end_id]
    text = parts.decode(np.asarray(ids, np.int32))
    try:
        return parts.grade(problem, text)
    except Exception as error:  # a user's grader may raise anything
        return Verdict.invalid(Reason.INFRASTRUCTURE, format=format_of(text), detail=repr(error))


def check_checkpoint(parts: Parts) -> Check:
    """What is saved is what is restored, bit for bit; a single leaf of a large state."""
    state, folder = parts.state, parts.folder / "preflight"
    if sum(x.nbytes for x in jax.tree.leaves(state)) > SAVE_LIMIT:
        # The largest leaf below the limit; a leaf is all the layers' at once.
        leaves = sorted(jax.tree.leaves(state.params), key=lambda x: x.nbytes)
        leaf = [leaves[0], *(x for x in leaves if x.nbytes <= SAVE_LIMIT)][-1]
        state = TrainState({"leaf": leaf}, {}, state.updates, state.skipped)  # pyright: ignore
    different, detail = 0, ""
    saves = None
    try:
        saves = parts.checkpoints(folder)
        saves.save(0, state, {})
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        restored = saves.restore(0, abstract)
        for (path, one), two in zip(
            jax.tree.leaves_with_path(state), jax.tree.leaves(restored), strict=True
        ):
            if not _same_bits(one, two):
                different += 1
                detail = detail or f"the first is {jax.tree_util.keystr(path)}"
    except (CheckpointError, OSError, ValueError) as error:
        different, detail = 1, str(error)
    finally:
        if saves is not None:
            saves.close()
        shutil.rmtree(folder, ignore_errors=True)
    return Check(
        "checkpoint", "arrays that a save and a restore do not bring back", different, 0,
        f"The run could not be resumed: check the disk of {parts.folder}, its free space, and "
        "orbax's version",
        detail,
    )  # fmt: skip


def _same_bits(one: jax.Array, two: jax.Array) -> bool:
    """Compared piece by piece on the host, so nothing is gathered."""
    return all(
        np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        for a, b in zip(one.addressable_shards, two.addressable_shards, strict=True)
    )
