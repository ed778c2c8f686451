# SPDX-License-Identifier: Apache-2.0
"""The list of sections of a page, from what a run's files hold: read `build_sections`.

A section that nothing fills is left out, and what is missing is named in one line at the end of the
page.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from klear_jax.report import cards, figures
from klear_jax.report.completions import pairs, pairs_table
from klear_jax.report.figures import FigureSpec
from klear_jax.report.plots import Panel
from klear_jax.report.records import Card, Picture, Section, Table
from klear_jax.report.runfiles import Run, flatten, number

Draw = Callable[[str, Panel, str], Picture]
"""Draws and saves one figure: (file name without ending, panel, caption) to a picture."""

TOY_PARAMETERS = 10_000_000
"""Below this size a page says what so small a model cannot show."""

CLIP_CELLS = (
    (
        "clip/pos_high",
        "A > 0, r above the upper bound: clipped",
        "a good token is already much likelier",
    ),
    (
        "clip/neg_low",
        "A < 0, r below the lower bound: clipped",
        "a bad token is already much rarer",
    ),
    (
        "outside/pos_low",
        "A > 0, r below the lower bound",
        "a good token became rarer",
    ),
    (
        "outside/neg_high",
        "A < 0, r above the upper bound",
        "a bad token became likelier",
    ),
)
_KEPT = "keeps a gradient for clipped tokens, weighted by the bound instead of the ratio"
_WEIGHT = "clips the weight of a token and never its gradient"
CLIPPED_TOKENS = {
    "reinforce": "REINFORCE has no ratio, so the bounds only mark the cells below.",
    "unclipped": "The objective is not clipped, so the bounds only mark the cells below.",
    "ppo": "PPO gives clipped tokens no gradient.",
    "gppo": f"GPPO {_KEPT}.",
    "gppo_high": f"GPPO-high {_KEPT}, at the upper bound only.",
    "gppo_low": f"GPPO-low {_KEPT}, at the lower bound only.",
    "ce_gppo": f"CE-GPPO {_KEPT} and scaled by beta.",
    "cispo": f"CISPO {_WEIGHT}.",
    "cispo_upper": f"CISPO {_WEIGHT}; here the lower bound only marks the cells below.",
    "sapo": "SAPO lets the weight fall off smoothly; the bounds only mark the cells below.",
    "aspo": "ASPO turns the ratio of good tokens upside down, and drops clipped tokens.",
}
FACTS = (
    ("Model", ("model.name", "model")),
    ("Parameters", ("parameters",)),
    ("Clip variant", ("clip.variant", "variant")),
    ("Ratio level", ("clip.level",)),
    ("Clip widths", ("clip.low", "clip.high", "clip.dual")),
    ("Learning rate", ("lr", "learning_rate", "peak_lr")),
    (
        "Batch",
        ("batch", "batch_size", "problems", "problems_per_step", "prompts", "prompts_per_step"),
    ),
    ("Completions per problem", ("samples", "samples_per_problem", "group", "group_size")),
    ("Steps", ("steps",)),
    ("Seed", ("seed",)),
)


def build_sections(run: Run, sft: Run | None, draw: Draw) -> tuple[list[Section], list[str]]:
    """The sections of a run in reading order, and the names of what its files cannot fill.

    `sft` is the run that holds the fine-tuning curve: the run itself, or the one that made its
    starting weights.
    """
    page = _Page(draw)
    if run.rows("rl"):
        _reinforcement(page, run)
    elif run.rows("eval") and not run.rows("sft"):
        page.add(
            "Evaluation", run, figures.PROGRESS[1:], cards.eval_cards(run), cards.task_table(run)
        )
    _completions(page, run)
    if sft is not None and sft.rows("sft"):
        intro = "Where the starting weights come from: next-token training on demonstrations."
        # With reinforcement learning on the page, the evaluations belong to that and not to the
        # fine-tuning.
        own = run is sft and not run.rows("rl") and bool(run.rows("eval"))
        specs = (*figures.SFT, figures.PROGRESS[1]) if own else figures.SFT
        table = cards.task_table(sft) if own else None
        page.add("Supervised fine-tuning", sft, specs, cards.sft_cards(sft), table, intro=intro)
    elif run.rows("rl"):
        page.missing.append("supervised fine-tuning")
    if (note := scale_note(run)) is not None:
        page.sections.append(Section("What this can and cannot show", note))
    _configuration(page, run)
    return page.sections, page.missing


def scale_note(run: Run) -> str | None:
    """What a tiny model on toy tasks is evidence of; None for a model that is not tiny."""
    size = parameter_count(run)
    if size >= TOY_PARAMETERS or not run.rows("rl"):
        return None
    model = f"has {size / 1e6:.1f} million parameters" if size == size else "is tiny"
    return (
        f"This model {model} and its problems are toys that a few lines of code solve. The page "
        "can show whether the parts work together: whether sampling, grading, advantages, "
        "clipping and updates raise the accuracy on problems kept out of training. In the "
        "built-in demo the demonstrations that the model first learns from are deliberately "
        "flawed, so that there is a habit to unlearn; better demonstrations would leave less to "
        "gain. The page cannot show how large language models reason or learn, nor which "
        "clipping variant is better at scale. It is also one seed: a difference between two runs "
        "of this size means little before it is repeated over several."
    )


def parameter_count(run: Run) -> float:
    """Model parameters as config.json gives them, or NaN."""
    outer = number(run.info.get("parameters"))
    return outer if outer == outer else number(run.setting("parameters"))


@dataclass
class _Page:
    """Collects sections; a section without content is not added."""

    draw: Draw
    sections: list[Section] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(
        self,
        title: str,
        source: Run,
        specs: Sequence[FigureSpec],
        headline: tuple[Card, ...] = (),
        table: Table | None = None,
        *,
        intro: str = "",
    ) -> None:
        """Draw the figures that `source` has metrics for; add the section unless it is empty."""
        pictures: list[Picture] = []
        for spec in specs:
            panel = spec.panel(source)
            if panel is None:
                self.missing.append(spec.name.replace("_", " "))
            else:
                pictures.append(self.draw(spec.name, panel, spec.caption))
        if pictures or headline or table:
            self.sections.append(Section(title, intro, headline, tuple(pictures), table))


def _reinforcement(page: _Page, run: Run) -> None:
    page.add("Results", run, figures.PROGRESS, cards.rl_cards(run), cards.task_table(run))
    page.add(
        "Exploration and clipping",
        run,
        figures.POLICY,
        table=clip_table(run),
        intro="A step samples once and then updates several times; the later updates see ratios "
        "away from 1. " + CLIPPED_TOKENS.get(run.variant, ""),
    )
    page.add("Updates", run, figures.UPDATES)
    page.add("Sampling and time", run, figures.SAMPLING)


def clip_table(run: Run) -> Table | None:
    """The four cells beyond a bound: meaning, mean share over the run, largest share of a step."""
    rows = tuple(
        (where, meaning, f"{curve.finite.mean():.2%}", f"{curve.finite.max():.2%}")
        for key, where, meaning in CLIP_CELLS
        if (curve := run.curve("rl", key)) is not None
    )
    header = ("Trained tokens with", "meaning", "mean share", "largest step")
    return Table(header, rows, kind="cells") if rows else None


def _completions(page: _Page, run: Run) -> None:
    shown, first, last = pairs(run.completions)
    if not shown:
        page.missing.append("completions")
        return
    intro = (
        "The same problems at the first and the last recorded step, taken in file order and task "
        "by task, not by how well they went. Text is shown as the model wrote it."
    )
    title = "Completions before and after" if last > first else "Completions"
    page.sections.append(Section(title, intro, table=pairs_table(shown, first, last)))


def _configuration(page: _Page, run: Run) -> None:
    if not run.info:
        page.missing.append("configuration")
        return
    facts = _facts(run)
    fold = ("Full configuration", json.dumps(run.info, indent=2, default=str))
    table = Table((), facts, kind="facts") if facts else None
    page.sections.append(Section("Configuration", table=table, fold=fold))


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    """Short (label, value) rows; a setting of several parts of the configuration shows all."""
    flat = flatten(run.config)
    rows: list[tuple[str, str]] = []
    for label, endings in FACTS:
        found = [
            (name, value)
            for name, value in flat.items()
            if value is not None and any(f".{name}".endswith(f".{ending}") for ending in endings)
        ]
        if label == "Parameters":
            size = parameter_count(run)
            found = [("parameters", f"{size:,.0f}")] if size == size else []
        if len(found) == 1:
            rows.append((label, str(found[0][1])))
        elif found:
            rows.append((label, ", ".join(f"{name} = {value}" for name, value in found[:6])))
    outer = (("Command", "command"), ("Created", "created"), ("Git revision", "git_revision"))
    rows += [(label, str(run.info[key])) for label, key in outer if run.info.get(key)]
    versions = run.info.get("versions")
    if isinstance(versions, dict) and versions:
        rows.append(("Versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
    return tuple(rows)
