# SPDX-License-Identifier: Apache-2.0
"""The frozen-rollout bench: one saved rollout, scored under every clipping variant.

    python experiments/frozen.py            # makes a small run on this CPU and looks at it, minutes
    python experiments/frozen.py runs/gppo-0001/rollouts/step-00005.npz
    python experiments/frozen.py STEP.npz --weights=HF_DIR --variants ppo gppo gspo

A rollout is what `run_gppo.py --save-rollouts` keeps. Under the policy that sampled it every ratio
is 1 and the variants agree, so it is scored with weights that have moved since: by default the last
checkpoint of its run. Writes a table, frozen.json, heatmap.png and tokens.png.
"""

import dataclasses
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import msgspec
import numpy as np
import rich.console
import rich.table
import run_gppo
import tyro
from algorithms import ALGORITHMS
from configs import Common, GppoRun
from inputs import check_init, initial_params, start_backend
from jax.sharding import Mesh
from session import RUNS, UsageError, main, usage_errors, write_json

from klear_jax.core import mesh as mesh_lib
from klear_jax.data.tokenizer import Tokenizer, load_tokenizer
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.report import frozen as report
from klear_jax.rl import frozen as bench
from klear_jax.rl import frozen_tokens as host
from klear_jax.rl.frozen import Scored, Variant
from klear_jax.rl.frozen_tokens import CELLS, Pick, Tokens
from klear_jax.rl.rollout_file import Rollout, load_rollout
from klear_jax.rl.surrogates import READS, SURROGATES, Clip, Level
from klear_jax.train import checkpoint
from klear_jax.train.step import make_scorer

NAMES = (*SURROGATES, "gppo+erc", "gspo", "gspo_matched", "gspo_token", "gmpo")
"""What may be compared: every surrogate at the level of tokens; GPPO with entropy-ratio clipping;
and the sequence levels, GSPO also with widths matched to the batch."""
ERC = (0.95, 1.05)
"""Of gppo+erc, where the run had none."""
TEXT_TOKENS = 48
"""Tokens of text kept before a token of frozen.json."""
TABLE_WIDTH = 150
"""Columns of the terminal that the table takes."""
DEMO = GppoRun(steps=6, eval_every=0, eval_problems=32, save_rollouts=True)
"""The run that is made where no rollout is given."""
DEMO_STEP = 3
"""Which of its rollouts is looked at: three steps before its last weights."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Score one saved rollout under every clipping variant."""

    batch: Annotated[Path | None, tyro.conf.Positional] = None
    """A file of RUN/rollouts/, from run_gppo.py --save-rollouts; by default a small run is made."""
    weights: Path | None = None
    """What scores it: the folder of a run (its last checkpoint), or one with config.json and
    safetensors; by default the run that the batch lies in."""
    variants: tuple[str, ...] = NAMES
    """Which to compare. The gradients of all are held on the host: 4 bytes a parameter each."""
    terms: Literal["surrogate", "objective"] = "surrogate"
    """Whether loss, gradient norm and cosines are of the surrogate alone, or with the run's terms
    beside it (likelihood of positives, KL, entropy): these are the same vector for every variant,
    so they draw all cosines towards 1."""
    low: float | None = None
    """Clip width below 1 at token level; by default the batch's run's."""
    high: float | None = None
    """Clip width above 1 at token level; by default the batch's run's."""
    tokens: int = 4
    """Tokens shown of each place beyond a bound (four places), and kept of each variant in the
    JSON."""
    mesh: str = "fsdp:-1"
    """Device mesh, such as fsdp:8,tensor:4."""
    cpu_devices: int = 1
    """On a CPU: devices to cut the machine into, to try a mesh."""
    out: Path | None = None
    """Where the results go; by default frozen/STEP beside the rollouts folder."""

    def __post_init__(self):
        if unknown := [name for name in self.variants if name not in NAMES]:
            raise ValueError(f"no variant {unknown[0]!r}; the variants are {', '.join(NAMES)}")
        if not self.variants or len(set(self.variants)) < len(self.variants):
            raise ValueError(f"variants {self.variants} must be one or more, each once")
        if self.tokens < 1 or self.cpu_devices < 1:
            raise ValueError(
                f"tokens {self.tokens} and cpu_devices {self.cpu_devices} must be at least 1"
            )


@dataclasses.dataclass(frozen=True)
class Input:
    """A rollout file and what its run was."""

    path: Path
    rollout: Rollout
    """On the host."""
    cfg: ModelConfig
    run: GppoRun
    weights: Path


# --- input ------------------------------------------------------------------------------------


def read_input(options: Options, path: Path) -> Input:
    """Read the rollout and check it against the weights; no weight is read.

    Raises:
        UsageError: the file is no rollout of a run, or there are no weights to score it with.
        CheckpointError: the weights are of another model.
    """
    with usage_errors():
        try:
            rollout, about = load_rollout(path)
        except zlib.error as error:
            raise UsageError(f"{path} is damaged ({error}); copy it again") from error
    if not isinstance(about, dict) or not {"model", "config"} <= about.keys():
        raise UsageError(
            f"{path} does not say which run it is of; give a file of RUN/rollouts/, from "
            "run_gppo.py --save-rollouts"
        )
    try:
        cfg = ModelConfig(**about["model"])
        run = msgspec.convert(about["config"], GppoRun, dec_hook=_decode, strict=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is of another version of the program: {error}") from error
    weights = path.absolute().parent.parent if options.weights is None else options.weights
    if options.weights is None and not (weights / checkpoint.FOLDER).is_dir():
        raise UsageError(
            f"{path} lies in no run with a checkpoint (looked in {weights}); give --weights, the "
            "folder of a run or one with config.json and safetensors"
        )
    check_init(weights, cfg)
    if not rollout.minibatches:
        raise UsageError(
            f"{path} holds no mini-batch: no group of that step could teach anything; give the "
            "rollout of another step"
        )
    return Input(path, rollout, cfg, run, weights)


def _decode(kind: type, value: Any) -> Any:
    return kind(value) if kind is Path else value


def base_clip(options: Options, run: GppoRun) -> Clip:
    """PPO at token level with the run's widths and dual bound, or those asked for.

    A run at another level has widths that say nothing about tokens: the default's stand in.
    """
    own = run.clip if run.clip.level == "token" else GppoRun.clip
    low = own.low if options.low is None else options.low
    high = own.high if options.high is None else options.high
    # The dual of aspo is its largest weight and no bound of r.
    dual = None if own.variant == "aspo" else own.dual
    with usage_errors():
        return Clip(low=low, high=high, dual=dual, variant="ppo")


def variant_of(name: str, base: Clip, run: GppoRun, tokens: Tokens) -> Variant:
    """One of `NAMES`, with the widths of `base` where it works on tokens."""
    if name == "gppo+erc":
        clip = dataclasses.replace(base, variant="gppo")
        return Variant(clip, erc=run.objective.erc or ERC)
    if name == "gspo_matched":
        return Variant(host.matched_clip(tokens, ALGORITHMS["gspo"]["clip"], base))
    if name in ALGORITHMS:
        return Variant(ALGORITHMS[name]["clip"])
    own: dict[str, Any] = {}
    if name == run.clip.variant:
        own = {field: getattr(run.clip, field) for field in READS[name]}
    elif name == "ce_gppo":
        own = {"beta_low": 0.5, "beta_high": 1.0}
    elif name == "aspo":
        # The largest weight; it must lie above the upper bound.
        own = {"dual": 3.0 if 1 + base.high < 3.0 else None}
    if name != "aspo" and "dual" in READS[name]:
        own["dual"] = base.dual
    return Variant(Clip(**{"low": base.low, "high": base.high, "variant": name, **own}))


def check_memory(cfg: ModelConfig, count: int) -> None:
    """Refuse what the memory of the host cannot hold."""
    need = 4 * count * cfg.parameter_count
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        raise UsageError(
            f"the gradients of {count} variants take {need / 1e9:.0f} GB on the host, which has "
            f"{have / 1e9:.0f}; choose fewer with --variants"
        )


def demo_rollout(options: Options) -> Path:
    """Make a small run and return one of its rollouts.

    Raises:
        KeyboardInterrupt: it was ended before its last step.
    """
    number = 1
    while (folder := RUNS / f"frozen-{number:04d}").exists():
        number += 1
    print(f"no BATCH is given: making a run of {DEMO.steps} steps in {folder}")
    demo = dataclasses.replace(DEMO, out=folder, mesh=options.mesh, cpu_devices=options.cpu_devices)
    outcome = run_gppo.execute(demo)
    if outcome.done < DEMO.steps:
        raise KeyboardInterrupt
    return folder / "rollouts" / f"step-{DEMO_STEP:05d}.npz"


# --- the bench --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything that was measured."""

    base: Clip
    variants: dict[str, Variant]
    tokens: Tokens
    slopes: dict[str, np.ndarray]
    """d loss / d log pi of each token, of the surrogate alone; of each variant, and "base"."""
    summary: dict[str, dict[str, float]]
    cosines: np.ndarray
    seconds: dict[str, float]


def measure(options: Options, given: Input, mesh: Mesh) -> tuple[Result, list[Scored]]:
    """Score, differentiate and compare."""
    start = time.monotonic()
    run, base = given.run, base_clip(options, given.run)
    params = initial_params(given.weights, given.cfg, mesh, seed=0)
    minibatches = [
        dataclasses.replace(m, batch=mesh_lib.place(m.batch, mesh, None, "batch", "seq"))
        for m in given.rollout.minibatches
    ]
    score = make_scorer(given.cfg, temperature=run.temperature)
    scored = bench.score_minibatches(params, minibatches, score)
    tokens = host.tokens_of(scored)
    scored_at = time.monotonic()

    variants = {name: variant_of(name, base, run, tokens) for name in options.variants}
    levels: tuple[Level, ...] = ("token", "sequence", "sequence_token")
    free = {level: Variant(Clip(variant="unclipped", level=level)) for level in levels}
    on_device = bench.token_slopes(
        scored, {"base": Variant(base), **free, **variants}, run.objective
    )
    slopes = {name: host.values_at(scored, parts) for name, parts in on_device.items()}
    sloped_at = time.monotonic()

    wanted = {name: on_device[name] for name in variants}
    if options.terms == "objective":
        other = bench.other_slopes(scored, run.objective)
        wanted = {name: bench.added(parts, other) for name, parts in wanted.items()}
    ends = [time.monotonic()]
    pull = bench.make_pullback(given.cfg, temperature=run.temperature)
    rows = bench.gradients(params, scored, wanted, pull, lambda _: ends.append(time.monotonic()))
    norms, cosines = bench.norms_and_cosines(rows)
    summary = {
        name: {"loss": float(np.mean([part.loss for part in wanted[name]])), "grad_norm": norm}
        | host.masses(tokens, v.clip, slopes[name], slopes[_free_level(v.clip)], base)
        for (name, v), norm in zip(variants.items(), norms.tolist(), strict=True)
    }
    seconds = {
        "load and score": scored_at - start,
        "slopes of all variants": sloped_at - scored_at,
        "first gradient, with compilation": ends[1] - ends[0],
        "each further gradient": (ends[-1] - ends[1]) / max(len(variants) - 1, 1),
        "total": time.monotonic() - start,
    }
    slopes = {name: slopes[name] for name in ("base", *variants)}
    return Result(base, variants, tokens, slopes, summary, cosines, seconds), scored


def _free_level(clip: Clip) -> str:
    return "token" if clip.level == "geometric" else clip.level


# --- output -----------------------------------------------------------------------------------


def record_of(
    options: Options, given: Input, result: Result, scored: Sequence[Scored], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Everything that frozen.json says, as plain values with null for what is no number."""
    tokens, base = result.tokens, result.base
    cells = host.cells_of(tokens, base)
    own = {name: result.slopes[name] for name in result.variants}
    weights = {name: host.gradient_weights(tokens, slopes) for name, slopes in own.items()}

    def told(picks: Sequence[Pick]) -> list[dict[str, Any]]:
        return [_token(pick, tokens, cells, weights, scored, tokenizer) for pick in picks]

    def most(score: np.ndarray, chosen: np.ndarray) -> list[dict[str, Any]]:
        return told(host.largest(score, chosen, tokens, scored, options.tokens))

    distance = host.distances(own, result.slopes["base"])
    everywhere = np.ones_like(cells, bool)
    pos, neg = (float(cell.mean()) for cell in tokens.clipped(base))
    change = host.policy_change(tokens) | {"ppo_clipped_pos": pos, "ppo_clipped_neg": neg}
    record = {
        "batch": str(given.path),
        "step": given.rollout.number,
        "weights": _weights(given.weights),
        "terms": options.terms,
        "bounds": {"low": base.low, "high": base.high, "dual": base.dual},
        "objective": dataclasses.asdict(given.run.objective),
        "policy": change,
        "remark": report.remark(change),
        "seconds": result.seconds,
        "variants": {
            name: dataclasses.asdict(v) | result.summary[name]
            for name, v in result.variants.items()
        },
        "cosines": {"names": list(result.variants), "values": result.cosines.tolist()},
        "tokens": [t for n in range(len(CELLS) - 1) for t in most(distance, cells == n)],
        "tokens_by_variant": {
            name: most(np.abs(slopes - result.slopes["base"]), everywhere)
            for name, slopes in own.items()
        },
    }
    return report.plain(record)


def _weights(path: Path) -> dict[str, Any]:
    if not (path / checkpoint.FOLDER).is_dir():
        return {"path": str(path), "name": path.name, "step": None}
    saves = checkpoint.Checkpoints(path)
    step = saves.latest()
    saves.close()
    return {"path": str(path), "name": f"{path.name} after {step} steps", "step": step}


def _token(
    pick: Pick, tokens: Tokens, cells: np.ndarray, weights: dict[str, np.ndarray],
    scored: Sequence[Scored], tokenizer: Tokenizer,
) -> dict[str, Any]:  # fmt: skip
    index = pick.index
    before, token = host.text_before(scored, tokens, index)
    return {
        "cell": CELLS[cells[index]],
        "place": tokens.cell[index].tolist(),
        "before": tokenizer.decode(before[-TEXT_TOKENS:].tolist()),
        "token": tokenizer.decode([token], skip_special=False),
        "copies": pick.copies,
        "log_ratio": float(tokens.log_ratio[index]),
        "ratio": float(np.exp(tokens.log_ratio[index])),
        "advantage": float(tokens.advantages[index]),
        "entropy": float(tokens.entropy[index]),
        "old_entropy": float(tokens.old_entropy[index]),
        "weights": {name: float(values[index]) for name, values in weights.items()},
    }


def show(record: dict[str, Any]) -> None:
    """Print the table and what it says."""
    shown = report.table(record)
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for number, name in enumerate(shown.header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in shown.rows:
        table.add_row(*row)
    console = rich.console.Console(highlight=False)
    # A table that is cut to a narrow pipe could not be read at all.
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
    print(f"\n{report.LEGEND}\n\n{report.cosine_note(record)}")
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in record["seconds"].items())
    print(f"seconds: {seconds}")


def write(out: Path, record: dict[str, Any]) -> None:
    """Write frozen.json and the figures, and print the table."""
    write_json(out / "frozen.json", record)
    for name, png in report.figures(record).items():
        (out / name).write_bytes(png)
    show(record)
    print(f"results: {out}")


def run_frozen(argv: Sequence[str]) -> int:
    """The command line."""
    with usage_errors():
        options = tyro.cli(Options, args=list(argv), description=__doc__)
    # Before anything that needs a device, so that the number of devices can still be set.
    mesh = start_backend(Common(mesh=options.mesh, cpu_devices=options.cpu_devices))
    path = demo_rollout(options) if options.batch is None else options.batch
    given = read_input(options, path)
    base_clip(options, given.run)
    check_memory(given.cfg, len(options.variants))
    with usage_errors():
        tokenizer = load_tokenizer(given.run.tokenizer)
    _, rows, cells = given.rollout.minibatches[0].batch.tokens.shape
    with usage_errors():
        params_lib.shardings(given.cfg, mesh)
        mesh_lib.check_divides(mesh, {"batch": rows, "seq": cells})
    out = options.out or path.absolute().parent.parent / "frozen" / path.stem
    with usage_errors():
        out.mkdir(parents=True, exist_ok=True)
    with jax.set_mesh(mesh):
        result, scored = measure(options, given, mesh)
    write(out, record_of(options, given, result, scored, tokenizer))
    return 0


if __name__ == "__main__":
    main(run_frozen)
