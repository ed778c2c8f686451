# SPDX-License-Identifier: Apache-2.0
"""Advantages of the samples of a problem, from their rewards alone (host, numpy)."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

Rewards = Float[np.ndarray, "n g"]
Valid = Bool[np.ndarray, "n g"]


def group_normalised(rewards: Rewards, valid: Valid) -> Rewards:
    """(R - mean) / std over the valid samples of each problem, std over G (paper, section 3).

    A group of equal rewards, and one with a single valid sample, has advantage exactly 0; an
    invalid sample has 0 and does not enter the statistics.
    """
    return _normalised(rewards, valid, ddof=0, eps=0.0)


def group_normalised_sample(rewards: Rewards, valid: Valid) -> Rewards:
    """(R - mean) / (std + 1e-6), std over G - 1 (released code); same rules otherwise."""
    return _normalised(rewards, valid, ddof=1, eps=1e-6)


def _normalised(rewards: Rewards, valid: Valid, *, ddof: int, eps: float) -> Rewards:
    rewards = np.where(valid, rewards, 0.0).astype(np.float64)
    count = valid.sum(axis=1, keepdims=True)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(valid, rewards - mean, 0.0)
    variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count - ddof, 1)
    informative = is_informative(rewards, valid)[:, None]
    scale = np.where(informative, np.sqrt(variance) + eps, 1.0)
    return np.where(informative, centred / scale, 0.0)


def is_informative(values: Rewards, valid: Valid) -> Bool[np.ndarray, " n"]:
    """Whether the valid values of a problem differ (otherwise nothing can be learned from it)."""
    high = np.where(valid, values, -np.inf).max(axis=1)
    low = np.where(valid, values, np.inf).min(axis=1)
    return high > low


ADVANTAGES: dict[str, Callable[[Rewards, Valid], Rewards]] = {
    "group_normalised": group_normalised,
    "group_normalised_sample": group_normalised_sample,
}
"""Estimator name -> function `(rewards[n, g], valid[n, g]) -> [n, g]`."""
