# SPDX-License-Identifier: Apache-2.0
"""Named algorithms as presets of fields, to be laid over a preset of a run: `demo+gspo`.

Each changes the objective and nothing else (model, data, batch and learning rate stay), so that two
runs differ in the algorithm alone. Flags on the command line still change single fields.
"""

import dataclasses
from typing import Any

from configs import GppoRun

from klear_jax.rl.objective import Objective
from klear_jax.rl.surrogates import Clip

ALGORITHMS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300, eq. 3: one clip width, mean of sequence means, KL by k3.
    "grpo": {
        "clip": Clip(low=0.2, high=0.2, variant="ppo"),
        "objective": Objective(
            aggregation="sequence_mean", positive_nll=0.0, kl_coef=0.04, kl_estimator="k3"
        ),
    },
    # arXiv 2503.14476: clip-higher, token mean, dynamic sampling; no KL.
    "dapo": {
        "clip": Clip(low=0.2, high=0.28, variant="ppo"),
        "objective": Objective(positive_nll=0.0),
        "group_filter": "accuracy",
        "rounds": 3,
    },
    # arXiv 2503.20783: neither std nor response length divides.
    "dr_grpo": {
        "clip": Clip(low=0.2, high=0.2, variant="ppo"),
        "objective": Objective(advantage="mean_centred", aggregation="constant", positive_nll=0.0),
        "group_filter": "none",
    },
    # arXiv 2507.18071, with the paper's widths.
    "gspo": {
        "clip": Clip(low=3e-4, high=4e-4, variant="ppo", level="sequence"),
        "objective": Objective(aggregation="sequence_mean", positive_nll=0.0),
    },
    "gspo_token": {
        "clip": Clip(low=3e-4, high=4e-4, variant="ppo", level="sequence_token"),
        "objective": Objective(aggregation="sequence_mean", positive_nll=0.0),
    },
    # arXiv 2507.20673: exp(+-0.4) around 1.
    "gmpo": {
        "clip": Clip(low=0.32968, high=0.491825, variant="unclipped", level="geometric"),
        "objective": Objective(aggregation="sequence_mean", positive_nll=0.0),
    },
    # arXiv 2402.14740: no ratio at all.
    "rloo": {
        "clip": Clip(low=0.2, high=0.2, variant="reinforce"),
        "objective": Objective(advantage="leave_one_out", aggregation="constant", positive_nll=0.0),
        "group_filter": "none",
    },
    # arXiv 2501.03262: rewards normalised over the batch, PPO's clip, KL by k2.
    "reinforce_pp": {
        "clip": Clip(low=0.2, high=0.2, variant="ppo"),
        "objective": Objective(
            advantage="batch_normalised", positive_nll=0.0, kl_coef=0.001, kl_estimator="k2"
        ),
        "group_filter": "none",
    },
}
"""Algorithm name -> fields of `GppoRun`."""


def with_algorithm(run: GppoRun, name: str) -> GppoRun:
    """The run with an algorithm's fields.

    Raises:
        ValueError: there is no such algorithm, or its fields do not go with the run's.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"no algorithm {name!r}; the algorithms are {', '.join(ALGORITHMS)}")
    return dataclasses.replace(run, **ALGORITHMS[name])
