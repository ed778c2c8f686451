# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning.

    python experiments/run_sft.py           # the embedded tasks on this CPU, about a minute
    python experiments/run_sft.py klear_8b_sft --init=HF_DIR --data=demos.jsonl \
        --mesh=fsdp:16,tensor:4
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import jax
from configs import SFT_PRESETS, SftRun
from inputs import (
    check_init,
    check_learned,
    check_model,
    check_positions,
    initial_params,
    microbatch_rows,
    model_config,
    row_tokens,
    start_backend,
    tokenizer_of,
)
from jax.sharding import Mesh
from progress import Progress
from session import (
    RUNS,
    Interrupt,
    UsageError,
    command_line,
    config_hash,
    locked,
    main,
    open_run,
    rewind,
    usage_errors,
    write_json,
)

from klear_jax.core import mesh as mesh_lib
from klear_jax.data import pipeline
from klear_jax.data.packing import TokenSequence
from klear_jax.data.problems import load_conversations
from klear_jax.data.sources import file_stream
from klear_jax.data.tokenizer import Tokenizer
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.train import checkpoint, optim, sft
from klear_jax.train import state as state_lib
from klear_jax.train.metrics import RunLog
from klear_jax.train.state import TrainState
from klear_jax.train.step import make_step

LOG_EVERY = 10
"""Updates between lines of the log."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything that is known before the first weight is made."""

    run: SftRun
    cfg: ModelConfig
    examples: pipeline.ExampleStream
    row_tokens: int
    rows: int
    microbatches: int
    fingerprint: dict[str, object]
    """What a checkpoint of this run must agree with."""


def prepare(run: SftRun, tokenizer: Tokenizer, mesh: Mesh) -> Prepared:
    """Check the config and read the data; nothing is compiled and nothing written."""
    cfg = model_config(run, tokenizer)
    with usage_errors():
        params_lib.shardings(cfg, mesh)
        examples, longest, data = _examples(run, tokenizer)
    check_positions(cfg, longest)
    if run.init is not None:
        check_init(run.init, cfg)
    row = row_tokens(run, longest)
    at_a_time = microbatch_rows(run, mesh, row)
    per_row = row // longest
    rows = -(-run.batch // per_row)
    return Prepared(
        run=run,
        cfg=cfg,
        examples=examples,
        row_tokens=row,
        rows=at_a_time,
        microbatches=-(-rows // at_a_time),
        fingerprint={"kind": "sft", "seed": run.seed, "data": data},
    )


def _examples(run: SftRun, tokenizer: Tokenizer) -> tuple[pipeline.ExampleStream, int, str]:
    """The stream of examples, the cells of the longest, and a name for what they are drawn from."""
    if run.data is None:
        stream = pipeline.task_examples(tokenizer, run.tasks, run.batch, seed=run.seed)
        # A slip may write one more or one less digit than the right answer.
        return stream, max(s.cells for n in range(8) for s in stream(n)) + 1, "/".join(run.tasks)
    encoded = [
        pipeline.encode_conversation(tokenizer, messages)
        for messages in load_conversations(run.data)
    ]
    kept = [e for e in encoded if len(e.tokens) <= run.max_example_tokens]
    if not kept:
        raise UsageError(f"{run.data}: every example has over {run.max_example_tokens} tokens")
    if len(kept) < len(encoded):
        print(
            f"{run.data}: dropped {len(encoded) - len(kept)} of {len(encoded)} examples: too long"
        )
    longest = max(e.cells for e in kept)
    data = hashlib.sha256(run.data.read_bytes()).hexdigest()
    return file_stream(kept, run.batch, seed=run.seed, setting="batch"), longest, data


def train(
    prepared: Prepared, mesh: Mesh, folder: Path, interrupt: Interrupt
) -> tuple[TrainState, int]:
    """Train to the last step, or to an interruption; returns the state and the steps done."""
    run, cfg = prepared.run, prepared.cfg
    optimizer = optim.make_optimizer(run.optim)
    learning_rate = optim.make_schedule(run.optim, run.steps)
    step = make_step(sft.make_sft_loss(cfg), optimizer=optimizer)
    saves = checkpoint.Checkpoints(folder)
    record = prepared.fingerprint | {"model": dataclasses.asdict(cfg)}
    state, first = checkpoint.restore_or_init(
        saves, record, state_lib.abstract_state(cfg, optimizer, mesh),
        lambda: state_lib.init_state(
            initial_params(run.init, cfg, mesh, seed=run.seed), optimizer
        ),
    )  # fmt: skip
    rewind(folder, first)
    done = first
    with RunLog(folder) as log, Progress("SFT", run.steps, first) as progress:
        for number in range(first, run.steps):
            examples = prepared.examples(number)
            progress.count(sum(e.cells for e in examples))
            batch, microbatches = batch_of(prepared, examples)
            batch = mesh_lib.place(batch, mesh, None, "batch", "seq")
            rate = learning_rate(number)
            state, metrics = step(state, batch, microbatches, rate)
            done = number + 1
            last = done == run.steps or interrupt.asked
            if done % LOG_EVERY == 0 or last:
                values = jax.device_get(metrics) | {"lr": rate}
                values["tokens_per_second"] = progress.rate()
                progress.show(
                    done, log.write("sft", done, values), ("loss", "entropy", "grad_norm")
                )
            if last or (run.save_every and done % run.save_every == 0):
                saves.save(done, state, record)
            if interrupt.asked:
                break
    saves.close()
    return state, done


def batch_of(prepared: Prepared, sequences: Sequence[TokenSequence]):
    """Pack one update's examples; see `pipeline.sft_batch`."""
    return pipeline.sft_batch(
        sequences,
        row_tokens=prepared.row_tokens,
        rows=prepared.rows,
        microbatches=prepared.microbatches,
    )


def cached_start(start: SftRun, tokenizer: Tokenizer, mesh: Mesh, interrupt: Interrupt) -> Path:
    """The folder of an SFT run with this config; it is trained where there is none yet.

    An interrupted one is gone on with the next time.
    """
    folder = RUNS / "cache" / f"sft-{config_hash(start)}"
    finished = folder / "finished"
    folder.mkdir(parents=True, exist_ok=True)
    # Runs that are started together share one start: the first trains it, the others wait.
    with locked(folder, wait=True):
        if finished.exists():
            return folder
        resume = (folder / "config.json").exists()
        start = dataclasses.replace(start, out=folder, resume=resume)
        prepared = prepare(start, tokenizer, mesh)
        open_run(start, "sft", parameters=prepared.cfg.parameter_count)
        state, done = train(prepared, mesh, folder, interrupt)
        if done < start.steps:
            raise KeyboardInterrupt
        check_learned(state)
        finished.touch()
    return folder


def run_sft(argv: Sequence[str]) -> int:
    """The command line."""
    run = command_line(SFT_PRESETS, argv)
    check_model(run)
    tokenizer = tokenizer_of(run)
    mesh = start_backend(run)
    prepared = prepare(run, tokenizer, mesh)
    folder = open_run(run, "sft", parameters=prepared.cfg.parameter_count)
    with locked(folder), jax.set_mesh(mesh), Interrupt() as interrupt:
        state, done = train(prepared, mesh, folder, interrupt)
    from klear_jax.report import write_report

    print(f"report: {write_report(folder)}")
    check_learned(state)
    if done < run.steps:
        print(f"stopped at step {done} of {run.steps}; go on with --resume --out={folder}")
        return 130
    return 0


def note_start(folder: Path, sft: Path) -> None:
    """Say in the run's config.json where its SFT start is, for the report."""
    path = folder / "config.json"
    record = json.loads(path.read_text(encoding="utf-8")) | {"sft_run": str(sft.absolute())}
    write_json(path, record)


def noted_start(folder: Path) -> Path:
    """The SFT start of a run that is resumed, which is the reference of its KL term.

    Raises:
        UsageError: it is gone.
    """
    noted = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("sft_run")
    if noted is None or not (Path(noted) / checkpoint.FOLDER).is_dir():
        raise UsageError(
            f"the run's KL term needs the weights that it started from, and {noted} is not there; "
            "put it back, or start the run again"
        )
    return Path(noted)


if __name__ == "__main__":
    main(run_sft)
