# SPDX-License-Identifier: Apache-2.0
"""The tokens of a frozen rollout on the host: shares of tokens and mass, and single tokens.

numpy throughout, in float64; the slopes come from `rl.frozen`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Array

from klear_jax.rl.frozen import Scored, Slopes
from klear_jax.rl.surrogates import Clip, Level, log_high, log_low

SAME_LOG_RATIO = 1e-4
"""Log-ratios that differ by less are those of the same token after the same text."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The trained tokens of all mini-batches, flat; floats are float64."""

    cell: np.ndarray
    """int [n, 4]: mini-batch, micro-batch, row, column."""
    response: np.ndarray
    """Which response a token belongs to: 0, 1, ... in the order of the cells."""
    log_ratio: np.ndarray
    entropy: np.ndarray
    """Nats, under the weights of the bench."""
    old_entropy: np.ndarray
    """Nats, under the policy that sampled."""
    advantages: np.ndarray
    weights: np.ndarray
    """`RolloutBatch.loss_weights`."""

    def leveled(self, level: Level) -> np.ndarray:
        """What the bounds of a level are compared with: l, or its mean over the response."""
        if level in ("token", "geometric"):
            return self.log_ratio
        count = np.bincount(self.response)
        return (np.bincount(self.response, self.log_ratio) / count)[self.response]

    def clipped(self, clip: Clip) -> tuple[np.ndarray, np.ndarray]:
        """Where A > 0 and r > 1 + high, and where A < 0 and r < 1 - low, at the clip's level."""
        low, high = log_low(clip), log_high(clip)
        value = self.leveled(clip.level)
        return (self.advantages > 0) & (value > high), (self.advantages < 0) & (value < low)


def tokens_of(scored: Sequence[Scored]) -> Tokens:
    """Every masked token of the mini-batches, in the order of `values_at`."""
    found: dict[str, list[np.ndarray]] = {}
    responses = 0
    for number, s in enumerate(scored):
        batch = s.minibatch.batch
        mask = np.asarray(batch.mask)
        where = np.argwhere(mask)
        place = np.column_stack([where[:, :2], np.asarray(batch.segments)[mask]])
        _, index = np.unique(place, axis=0, return_inverse=True)
        index = index.reshape(-1)
        columns = {
            "cell": np.column_stack([np.full(len(where), number), where]),
            "response": index + responses,
            "log_ratio": _wide(s.logprobs, mask) - _wide(batch.old_logprobs, mask),
            "entropy": _wide(s.entropy, mask),
            "old_entropy": _wide(batch.old_entropy, mask),
            "advantages": _wide(batch.advantages, mask),
            "weights": _wide(batch.loss_weights, mask),
        }
        responses += int(index.max(initial=-1)) + 1
        for name, values in columns.items():
            found.setdefault(name, []).append(values)
    return Tokens(**{name: np.concatenate(parts) for name, parts in found.items()})


def values_at(scored: Sequence[Scored], slopes: Sequence[Slopes]) -> np.ndarray:
    """The slopes of the masked tokens, flat."""
    return np.concatenate(
        [
            _wide(part.logprobs, np.asarray(s.minibatch.batch.mask))
            for s, part in zip(scored, slopes, strict=True)
        ]
    )


def _wide(values: Array, mask: np.ndarray) -> np.ndarray:
    return np.asarray(values)[mask].astype(np.float64)


def gradient_weights(tokens: Tokens, slopes: np.ndarray) -> np.ndarray:
    """W of each token: slope = -w W A. NaN where w A is 0, which no slope can tell."""
    scale = tokens.weights * tokens.advantages
    return -slopes / np.where(scale == 0, np.nan, scale)


def masses(
    tokens: Tokens, clip: Clip, slopes: np.ndarray, unclipped: np.ndarray, base: Clip
) -> dict[str, float]:
    """Shares of tokens and of gradient mass |w W A|, as in `rl.telemetry`.

    Args:
        slopes: of the variant, whose bounds and level `clip` has.
        unclipped: of the unclipped objective at the same level.
        base: bounds of the token-level PPO that `on_ppo_clipped` speaks of.

    Returns:
        By sign of A, `clipped`: share of all tokens; `kept`: mass on those tokens, and `lost`: mass
        that the unclipped objective has more, both as a share of all the unclipped mass.
        `no_gradient`: share of the tokens with A != 0 that have W = 0. `on_ppo_clipped`: share of
        the variant's mass on tokens that token-level PPO drops.
    """
    mass, full = np.abs(slopes), np.abs(unclipped)
    lost = np.maximum(full - mass, 0.0)
    result: dict[str, float] = {}
    signs = (tokens.advantages > 0, tokens.advantages < 0)
    for name, cell, sign in zip(("pos", "neg"), tokens.clipped(clip), signs, strict=True):
        result[f"clipped_{name}"] = float(cell.mean())
        result[f"kept_{name}"] = _share(mass[cell].sum(), full.sum())
        result[f"lost_{name}"] = _share(lost[sign].sum(), full.sum())
    active = (tokens.advantages != 0) & (tokens.weights > 0)
    result["no_gradient"] = _share((active & (slopes == 0)).sum(), active.sum())
    dropped = np.logical_or(*tokens.clipped(base))
    result["on_ppo_clipped"] = _share(mass[dropped].sum(), mass.sum())
    return result


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else float("nan")


def matched_clip(tokens: Tokens, clip: Clip, base: Clip) -> Clip:
    """`clip` with the widths at which, on this batch, it clips as many tokens as `base` does.

    For sequence levels, whose mean log-ratio is far narrower than that of a token: how much depends
    on the lengths of the responses. Widths below 0 are not possible, so it may clip fewer.
    """
    value = tokens.leveled(clip.level)
    high, low = tokens.clipped(base)
    above = _edge(value[tokens.advantages > 0], int(high.sum()))
    below = _edge(-value[tokens.advantages < 0], int(low.sum()))
    return dataclasses.replace(clip, low=float(-np.expm1(-below)), high=float(np.expm1(above)))


def _edge(values: np.ndarray, count: int) -> float:
    """A bound >= 0 that at most `count` of the values exceed."""
    if not len(values):
        return 0.0
    ordered = np.sort(values)[::-1]
    # A little wider than the value itself, which the device computes in float32.
    return max(float(ordered[min(count, len(ordered) - 1)]), 0.0) * (1 + 1e-5)


def policy_change(tokens: Tokens) -> dict[str, float]:
    """How far the weights are from the policy that sampled: KL(old || new) by k3, and r."""
    log_ratio = tokens.log_ratio
    return {
        "tokens": len(log_ratio),
        "kl": float(np.mean(np.expm1(log_ratio) - log_ratio)),
        "log_ratio_max_abs": float(np.abs(log_ratio).max()),
        "ratio_min": float(np.exp(log_ratio.min())),
        "ratio_max": float(np.exp(log_ratio.max())),
    }


# --- single tokens ----------------------------------------------------------------------------

CELLS = ("A > 0, r high", "A < 0, r low", "A > 0, r low", "A < 0, r high", "inside")
"""Where a token lies: beyond a bound (PPO drops the first two), or inside. A = 0 is inside."""


def cells_of(tokens: Tokens, base: Clip) -> np.ndarray:
    """The index in `CELLS` of each token, by the bounds of `base`."""
    low, high = log_low(base), log_high(base)
    positive, negative = tokens.advantages > 0, tokens.advantages < 0
    above, below = tokens.log_ratio > high, tokens.log_ratio < low
    conditions = [positive & above, negative & below, positive & below, negative & above]
    return np.select(conditions, range(4), default=4)


def distances(slopes: Mapping[str, np.ndarray], base: np.ndarray) -> np.ndarray:
    """Of each token, the root mean square over variants of |w A| |W - W of `base`|."""
    return np.sqrt(np.mean([(s - base) ** 2 for s in slopes.values()], axis=0))


@dataclasses.dataclass(frozen=True)
class Pick:
    """A token and how often it stands after the same text, with the same ratio, in the batch."""

    index: int
    """Into `Tokens`."""
    copies: int


def largest(
    score: np.ndarray, chosen: np.ndarray, tokens: Tokens, scored: Sequence[Scored], count: int
) -> list[Pick]:
    """Up to `count` different tokens of the `chosen` with the largest positive score.

    Samples of one problem begin alike: a token that stands in several after the same text is given
    once, and counted.
    """
    candidates = np.flatnonzero(chosen & (score > 0))
    candidates = candidates[np.argsort(-score[candidates], kind="stable")]
    taken: dict[bytes, Pick] = {}
    for index in candidates:
        key = _prefix_key(scored, tokens, int(index))
        if key in taken:
            continue
        if len(taken) == count:
            break
        near = np.abs(tokens.log_ratio - tokens.log_ratio[index]) < SAME_LOG_RATIO
        copies = sum(
            _prefix_key(scored, tokens, int(other)) == key
            for other in np.flatnonzero(chosen & near)
        )
        taken[key] = Pick(int(index), copies)
    return list(taken.values())


def text_before(scored: Sequence[Scored], tokens: Tokens, index: int) -> tuple[np.ndarray, int]:
    """The ids before a token, prompt included, and its own."""
    number, piece, row, column = tokens.cell[index]
    batch = scored[number].minibatch.batch
    # The whole array: its copy on the host is made once and kept.
    segments = np.asarray(batch.segments)[piece, row, : column + 1]
    before = np.asarray(batch.tokens)[piece, row, : column + 1][segments == segments[-1]]
    return before, int(np.asarray(batch.targets)[piece, row, column])


def _prefix_key(scored: Sequence[Scored], tokens: Tokens, index: int) -> bytes:
    before, token = text_before(scored, tokens, index)
    return np.append(before, token).tobytes()
