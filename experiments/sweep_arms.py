# SPDX-License-Identifier: Apache-2.0
"""The arms and the settings of the sweeps: what differs between runs, and what must then be seen.

An arm changes how tokens beyond a ratio bound are treated, and nothing else. A setting says how far
the policy moves between two rollouts. A new arm or setting is a line in `ARMS` or `SETTINGS`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from configs import GPPO_PRESETS, GppoRun

from klear_jax.rl.surrogates import Clip

BASELINE = "ppo"
"""The arm that every other one is compared with."""
KEPT = "mass/clipped"
"""Share of the gradient mass that lies on clipped tokens."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One treatment, and the metrics that show whether it happened."""

    text: str
    """What it does, in a line."""
    clip: Clip
    erc: tuple[float, float] | None = None
    """Entropy-ratio clipping on top (see `Objective.erc`)."""
    zero: tuple[str, ...] = ()
    """Metrics that must be exactly 0 at every step of every run."""
    positive: tuple[str, ...] = ()
    """Metrics that must be above 0 at some step of every run."""


def _clip(variant: Any, **fields: Any) -> Clip:
    return Clip(**{"low": 0.2, "high": 0.2, "variant": variant} | fields)


ARMS: dict[str, Arm] = {
    "ppo": Arm(
        "clipped tokens have no gradient", _clip("ppo"), zero=(KEPT,), positive=("clip",)
    ),
    "clip_higher": Arm(
        "ppo with a wider upper bound (DAPO)", _clip("ppo", high=0.28),
        zero=(KEPT,), positive=("clip",),
    ),
    "gppo": Arm(
        "clipped tokens keep the bound as their weight", _clip("gppo"), positive=("clip", KEPT)
    ),
    "gppo_high": Arm(
        "gppo at the upper bound, ppo at the lower", _clip("gppo_high"),
        zero=("mass/clipped_neg",), positive=("clip", "mass/clipped_pos"),
    ),
    "gppo_low": Arm(
        "gppo at the lower bound, ppo at the upper", _clip("gppo_low"),
        zero=("mass/clipped_pos",), positive=("clip", "mass/clipped_neg"),
    ),
    "ce_gppo": Arm(
        "gppo with half the weight at the lower bound (CE-GPPO, 0.5 and 1)",
        _clip("ce_gppo", beta_low=0.5, beta_high=1.0), positive=("clip", KEPT),
    ),
    "cispo": Arm(
        "the weight is clipped on both sides, no token is dropped", _clip("cispo"),
        positive=("clip", KEPT),
    ),
    "cispo_upper": Arm(
        "the weight is clipped from above only (MiniMax-M1)", _clip("cispo_upper"),
        positive=("clip", KEPT),
    ),
    # Of some 20 response tokens the geometric mean moves less than one token and more than in
    # GSPO's long ones, hence widths between 0.2 and the paper's 0.0003.
    "gspo": Arm(
        "ppo on the ratio of the whole response",
        _clip("ppo", low=0.03, high=0.04, level="sequence"), zero=(KEPT,), positive=("clip",),
    ),
    "gppo_erc": Arm(
        "gppo, and tokens whose entropy moved by over 5 % have no gradient", _clip("gppo"),
        erc=(0.95, 1.05), positive=("clip", "erc/dropped"),
    ),
    "unclipped": Arm(
        "no bound at all: the weight is the ratio", _clip("unclipped"),
        zero=("mass/lost",), positive=("clip", KEPT),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting:
    """How off-policy the updates are."""

    text: str
    learning_rate: float
    """Peak of the schedule."""
    epochs: int = 1
    """Passes over a rollout."""


SETTINGS: dict[str, Setting] = {
    "mild": Setting("learning rate 1e-4, 8 updates a rollout", 1e-4),
    "strong": Setting("learning rate 2e-4, 8 updates a rollout", 2e-4),
    "epochs": Setting("learning rate 5e-5, 4 passes of 8 updates a rollout", 5e-5, epochs=4),
}

_DEMO = GPPO_PRESETS["demo"]
RUN = dataclasses.replace(
    _DEMO,
    tasks=("sort",),
    updates=8,
    # A positive token must get its gradient through the surrogate alone, or no arm could drop it.
    objective=dataclasses.replace(_DEMO.objective, positive_nll=0.0),
)
"""What all runs of the clipping sweep have in common."""


def arm_run(
    setting: Setting, arm: Arm, *, seed: int, steps: int, eval_problems: int, init: Path, out: Path,
    preflight: bool,
) -> GppoRun:  # fmt: skip
    """The config of one run. Prompts and noise follow from `seed` alone, the same for all arms."""
    optim = dataclasses.replace(RUN.optim, learning_rate=setting.learning_rate)
    return dataclasses.replace(
        RUN,
        clip=arm.clip,
        objective=dataclasses.replace(RUN.objective, erc=arm.erc),
        optim=optim,
        epochs=setting.epochs,
        seed=seed,
        steps=steps,
        eval_every=-(-steps // 2),
        eval_problems=eval_problems,
        init=init,
        out=out,
        preflight=preflight,
    )


def flags(config: Any, default: Any, prefix: str = "") -> list[str]:
    """The command-line flags that turn `default` into `config`; they can be typed by hand."""
    found: list[str] = []
    for field in dataclasses.fields(config):
        value, before = getattr(config, field.name), getattr(default, field.name)
        name = field.name.replace("_", "-")
        if value == before:
            continue
        if dataclasses.is_dataclass(value):
            found += flags(value, before, f"{prefix}{name}.")
        elif isinstance(value, bool):
            found.append(f"--{prefix}{name}" if value else f"--{prefix}no-{name}")
        elif isinstance(value, tuple):
            found += [f"--{prefix}{name}", *map(str, value)]
        else:
            found.append(f"--{prefix}{name}={value}")
    return found
