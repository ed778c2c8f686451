# SPDX-License-Identifier: Apache-2.0
"""What the objective is made of beside the clip: one frozen record, read on host and device.

`rl.advantages` and `rl.minibatch` read the part that becomes weights of tokens on the host;
`rl.loss` reads the rest.
"""

import dataclasses
import math
from typing import Literal

AdvantageName = Literal[
    "group_normalised", "group_normalised_sample", "mean_centred", "leave_one_out",
    "batch_normalised",
]  # fmt: skip
Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """How rewards become the weights of tokens, and the terms beside the surrogate.

    A number that nothing would read, because its term is off, must keep its default.
    """

    advantage: AdvantageName = "group_normalised"
    """(R - mean) / std over G (paper), or with std over G - 1 plus 1e-6 (released code), R - mean
    (Dr. GRPO), R - mean of the others (RLOO), or (R - mean) / std over the batch (REINFORCE++)."""
    aggregation: Aggregation = "token_mean"
    """What one mini-batch averages over: its tokens, its sequences' token means, or sequences
    divided by the constant `max_tokens`."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Who says what the policy that sampled thought of a token: a scoring pass of the trainer, or
    the sampler as it drew it. The latter saves the pass, and takes the sampler's rounding into the
    ratio."""
    positive_nll: float = 0.1
    """alpha, the weight of the mean negative log-likelihood of positive samples' tokens."""
    positive_threshold: float = 1.0
    """A sample is positive when its training reward is at least this."""
    kl_coef: float = 0.0
    """Weight of the KL term to a frozen reference, the weights that the run started from; 0: no
    such term, and no reference is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """d = log pi_ref - log pi of a drawn token: k2 = d^2 / 2, k3 = exp(d) - d - 1. k1 = -d is
    refused: the expectation of its gradient is 0."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    tis: Literal["none", "token", "sequence"] = "none"
    """Truncated importance sampling: a detached weight min(p_old / p_sampler, tis_cap) where
    sampler and trainer disagree, of a token or of the product over its response."""
    tis_cap: float = 2.0
    """The largest such weight."""
    erc: tuple[float, float] | None = None
    """Entropy-ratio clipping: a token keeps its gradient where its entropy, as a multiple of that
    under the old policy, lies strictly between these two; such as 0.95 1.05."""

    def __post_init__(self):
        finite = ("positive_nll", "kl_coef", "entropy_coef")
        if bad := [n for n in finite if not 0 <= getattr(self, n) < math.inf]:
            given = ", ".join(f"{n} {getattr(self, n)}" for n in bad)
            raise ValueError(f"{given}: must be >= 0 and finite; 0 turns it off")
        if self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 as a loss has a gradient of expectation 0: it adds noise and no "
                "pull; use k2 or k3"
            )
        if not 1 <= self.tis_cap < math.inf:
            raise ValueError(
                f"tis_cap {self.tis_cap} must be >= 1 and finite: below 1 it would scale tokens on "
                "which sampler and trainer agree"
            )
        if self.erc is not None and not 0 <= self.erc[0] < 1 < self.erc[1]:
            raise ValueError(f"erc {self.erc} must be two numbers around 1, such as 0.95 1.05")
        if self.old_logprobs == "sampler" and (self.tis != "none" or self.erc is not None):
            raise ValueError(
                f"old_logprobs sampler leaves tis {self.tis} nothing to correct and erc {self.erc} "
                "without old entropies; use old_logprobs trainer with them"
            )
        if math.isnan(self.positive_threshold):
            raise ValueError("positive_threshold is no number")
        switches = (
            ("kl_estimator", "kl_coef", self.kl_coef == 0),
            ("tis_cap", "tis", self.tis == "none"),
            ("positive_threshold", "positive_nll", self.positive_nll == 0),
        )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, switch, off in switches:
            if off and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} {getattr(self, name)} has no effect while {switch} is "
                    f"{getattr(self, switch)}; set {switch}, or leave {name} at {defaults[name]}"
                )
