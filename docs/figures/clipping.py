# SPDX-License-Identifier: Apache-2.0
"""The figure of docs/clipping.md: W against r for every surrogate.

Run `python docs/figures/clipping.py`; a CPU needs a few seconds.
The curves are the closed forms of `klear_jax.rl.surrogates`; dots are autodiff of the objective.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from klear_jax.rl.surrogates import SURROGATES, Clip, gradient_weight

HERE = Path(__file__).resolve().parent
INK, BLUE, VERMILLION = "#30353D", "#0072B2", "#D55E00"
BOUNDS = {"low": 0.2, "high": 0.28}
# (title, variant, its own numbers)
PANELS = (
    ("reinforce", "reinforce", {}),
    ("unclipped", "unclipped", {}),
    ("ppo", "ppo", {}),
    ("gppo", "gppo", {}),
    ("gppo, dual 3", "gppo", {"dual": 3.0}),
    ("gppo_high", "gppo_high", {}),
    ("gppo_low", "gppo_low", {}),
    ("ce_gppo, betas 0.25 and 0.75", "ce_gppo", {"beta_low": 0.25, "beta_high": 0.75}),
    ("cispo", "cispo", {}),
    ("cispo_upper", "cispo_upper", {}),
    ("sapo", "sapo", {}),
    ("aspo, dual 3", "aspo", {"dual": 3.0}),
)
TICKS = (0.25, 0.5, 1, 2, 4, 8)
LIMITS = (0.1, 10.0)
TOP = 4.6


def draw(axes, variant, own):
    clip = Clip(variant=variant, **BOUNDS, **own)
    log_ratio = np.linspace(*np.log(LIMITS), 4001)
    axes.axvspan(1 - clip.low, 1 + clip.high, color="#EEF1F4", lw=0)
    ratio = np.exp(log_ratio)
    axes.plot(ratio, ratio, color="#8A8F98", lw=0.9, ls=(0, (2, 2)), label="W = r")
    for sign, color, width in ((-1, VERMILLION, 3.4), (+1, BLUE, 1.6)):
        weight = gradient_weight(variant, log_ratio, np.array(sign), clip)
        # A jump is a gap, not a steep line.
        jump = np.abs(np.diff(weight, append=weight[-1])) > 0.05
        weight[jump] = np.nan
        alpha = 0.55 if sign < 0 else 1.0
        axes.plot(ratio, weight, color=color, lw=width, alpha=alpha,
                  label=f"A {'>' if sign > 0 else '<'} 0")  # fmt: skip
        at = np.log(np.array([0.15, 0.35, 0.6, 0.9, 1.15, 1.7, 2.6, 4.0, 7.0]))
        advantages = jnp.full(at.shape, float(sign))
        slope = jax.grad(lambda l, a=advantages: SURROGATES[variant](l, a, clip).sum())(
            jnp.asarray(at)
        )
        axes.plot(np.exp(at), slope * sign, ".", color=color, ms=4.5, alpha=alpha)


def main():
    plt.rcParams |= {"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False,
                     "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": "#B4B9C1",
                     "xtick.color": "#6B717B", "ytick.color": "#6B717B"}  # fmt: skip
    rows = -(-len(PANELS) // 4)
    figure, grid = plt.subplots(rows, 4, figsize=(11, 0.4 + 2.35 * rows), sharex=True, sharey=True,
                                layout="constrained")  # fmt: skip
    cells = list(grid.flat)
    assert {variant for _, variant, _ in PANELS} == set(SURROGATES)
    for axes in cells[len(PANELS) :]:
        axes.axis("off")
    for axes, (title, variant, own) in zip(cells, PANELS, strict=False):
        draw(axes, variant, own)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        axes.set_xscale("log")
        axes.set_xticks(TICKS, [f"{t:g}" for t in TICKS])
        axes.minorticks_off()
        axes.set(xlim=LIMITS, ylim=(-0.15, TOP))
        axes.grid(axis="y", color="#E8EAED")
    for axes in grid[:, 0]:
        axes.set_ylabel("W")
    for axes in grid[-1]:
        axes.set_xlabel("r")
    order = [2, 1, 0]
    handles, labels = cells[0].get_legend_handles_labels()
    cells[0].legend([handles[i] for i in order], [labels[i] for i in order], frameon=False)
    figure.savefig(HERE / "clipping.png", dpi=110, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    main()
