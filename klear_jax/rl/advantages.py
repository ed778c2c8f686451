# SPDX-License-Identifier: Apache-2.0
"""Advantages of the samples of a problem, from their rewards alone (host, numpy).

Rules that all estimators share: an invalid sample does not enter any statistic and has advantage 0;
a group of equal rewards has advantage exactly 0 under every estimator that compares within the
group, and so has a group with a single valid sample, which has nothing to be compared with.
`batch_normalised` compares over the batch instead, so there such groups count.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

Rewards = Float[np.ndarray, "n g"]
Valid = Bool[np.ndarray, "n g"]


def group_normalised(rewards: Rewards, valid: Valid) -> Rewards:
    """(R - mean) / std over the valid samples of each problem, std over G (paper, section 3)."""
    return _normalised(rewards, valid, ddof=0, eps=0.0)


def group_normalised_sample(rewards: Rewards, valid: Valid) -> Rewards:
    """(R - mean) / (std + 1e-6), std over G - 1 (released code)."""
    return _normalised(rewards, valid, ddof=1, eps=1e-6)


def mean_centred(rewards: Rewards, valid: Valid) -> Rewards:
    """R - mean over the valid samples of each problem (Dr. GRPO, arXiv 2503.20783)."""
    return _centred(rewards, valid)


def leave_one_out(rewards: Rewards, valid: Valid) -> Rewards:
    """R - mean of the problem's other valid samples (RLOO, arXiv 2402.14740)."""
    count = valid.sum(axis=1, keepdims=True)
    return _centred(rewards, valid) * count / np.maximum(count - 1, 1)


def batch_normalised(rewards: Rewards, valid: Valid) -> Rewards:
    """(R - mean) / std over all valid samples of the batch (REINFORCE++, arXiv 2501.03262)."""
    flat = (1, rewards.size)
    return group_normalised(rewards.reshape(flat), valid.reshape(flat)).reshape(rewards.shape)


def _normalised(rewards: Rewards, valid: Valid, *, ddof: int, eps: float) -> Rewards:
    centred = _centred(rewards, valid)
    count = valid.sum(axis=1, keepdims=True)
    variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count - ddof, 1)
    informative = is_informative(rewards, valid)[:, None]
    return centred / np.where(informative, np.sqrt(variance) + eps, 1.0)


def _centred(rewards: Rewards, valid: Valid) -> Rewards:
    """R - mean; exactly 0 in a group without a difference, whatever the mean rounds to."""
    rewards = np.where(valid, rewards, 0.0).astype(np.float64)
    count = valid.sum(axis=1, keepdims=True)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    informative = is_informative(rewards, valid)[:, None]
    return np.where(valid & informative, rewards - mean, 0.0)


def is_informative(values: Rewards, valid: Valid) -> Bool[np.ndarray, " n"]:
    """Whether the valid values of a problem differ (otherwise nothing can be learned from it)."""
    high = np.where(valid, values, -np.inf).max(axis=1)
    low = np.where(valid, values, np.inf).min(axis=1)
    return high > low


ADVANTAGES: dict[str, Callable[[Rewards, Valid], Rewards]] = {
    "group_normalised": group_normalised,
    "group_normalised_sample": group_normalised_sample,
    "mean_centred": mean_centred,
    "leave_one_out": leave_one_out,
    "batch_normalised": batch_normalised,
}
"""Estimator name -> function `(rewards[n, g], valid[n, g]) -> [n, g]`."""
