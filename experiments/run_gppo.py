# SPDX-License-Identifier: Apache-2.0
"""GPPO reinforcement learning.

    python experiments/run_gppo.py          # the embedded demo on this CPU, a few minutes
    python experiments/run_gppo.py demo+gspo --clip.low=0.03 --clip.high=0.04
    python experiments/run_gppo.py klear_8b_math --init=SFT_DIR --problems=math.jsonl \
        --heldout=aime24.jsonl --mesh=fsdp:16,tensor:4
    python experiments/run_gppo.py --resume --out=runs/gppo-0001
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import run_sft
from ahead import load_ahead, save_ahead
from algorithms import with_algorithm
from configs import GPPO_PRESETS, GppoRun
from decoding import engine_of, start_meshes
from inputs import (
    check_init,
    check_learned,
    check_model,
    check_positions,
    encode_problems,
    initial_params,
    microbatch_rows,
    model_config,
    row_tokens,
    tokenizer_of,
)
from jax.sharding import Mesh
from preflight_run import check_parts
from progress import Progress
from session import (
    Interrupt,
    UsageError,
    command_line,
    config_record,
    locked,
    main,
    open_run,
    rewind,
    usage_errors,
)

from klear_jax.data.chat import encode_prompt
from klear_jax.data.problems import Problem, fingerprint, load_problems
from klear_jax.data.sources import ProblemStream, file_stream, task_stream
from klear_jax.data.tasks import draw_problems
from klear_jax.data.tokenizer import Tokenizer
from klear_jax.evals.run import Evaluation, evaluate
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.rewards import math as math_rewards
from klear_jax.rewards.verdict import TRAINING_REWARDS
from klear_jax.rl.checks import Parts
from klear_jax.rl.loop import LoopConfig, train_gppo
from klear_jax.rl.loss import make_policy_loss
from klear_jax.rl.minibatch import Layout
from klear_jax.rl.rollout_file import Rollout, save_rollout
from klear_jax.rl.telemetry import readable
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.draw import Truncation
from klear_jax.sampling.sampler import Sampler
from klear_jax.train import checkpoint, optim
from klear_jax.train import state as state_lib
from klear_jax.train.metrics import RunLog
from klear_jax.train.state import TrainState
from klear_jax.train.step import make_scorer, make_step

SAFE_TOKENS = 32_768
"""Below this length the released code's notes advise the overlong filter."""
SHOWN = 16
"""Held-out completions kept at each evaluation, for the report."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything that is known before the first weight is made."""

    run: GppoRun
    cfg: ModelConfig
    tokenizer: Tokenizer
    stream: ProblemStream
    heldout: tuple[Problem, ...]
    engine: EngineConfig
    layout: Layout
    fingerprint: dict[str, Any]
    """What a checkpoint of this run must agree with."""
    rollout_mesh: Mesh | None

    def sampler(self, params: Any, seed: int, truncation: Truncation = Truncation()) -> Sampler:
        """A sampler of the trainer's `params` on the rollout mesh."""
        given = self.run.rollout_dtype
        return Sampler(
            params, self.cfg, dataclasses.replace(self.engine, truncation=truncation), seed=seed,
            mesh=self.rollout_mesh, dtype=None if given == "trained" else given,
        )  # fmt: skip

    def encode(self, problem: Problem) -> tuple[int, ...]:
        return tuple(encode_prompt(self.tokenizer, problem.messages))

    def decode(self, tokens) -> str:
        return self.tokenizer.decode(tokens.tolist())


def prepare(
    run: GppoRun, tokenizer: Tokenizer, mesh: Mesh, rollout_mesh: Mesh | None = None
) -> Prepared:
    """Check the config and read the problems; nothing is compiled and nothing written."""
    cfg = model_config(run, tokenizer)
    with usage_errors():
        params_lib.shardings(cfg, mesh)
    count = run.problems_per_step * run.oversample
    limit = run.max_prompt_tokens
    if run.problems is None:
        with usage_errors():
            stream = task_stream(run.tasks, count, seed=run.seed)
        drawn = stream(0)
        fitting, longest = encode_problems(tokenizer, drawn, limit, name="tasks")
        if len(fitting) < len(drawn):
            raise UsageError(
                f"max_prompt_tokens {limit} is too few for {'/'.join(run.tasks)}; raise it"
            )
        data = "/".join(run.tasks)
    else:
        with usage_errors():
            problems = load_problems(run.problems)
        problems, longest = encode_problems(tokenizer, problems, limit, name=str(run.problems))
        if len(problems) < count:
            print(
                f"{run.problems}: {len(problems)} problems, so {len(problems)} a step, not {count}"
            )
        stream = file_stream(problems, min(count, len(problems)), seed=run.seed)
        data = fingerprint(problems)
    if mesh.size > 1 and run.overlap:
        raise UsageError(
            f"overlap samples and trains from two threads, which only one device takes in a fixed "
            f"order; the mesh has {mesh.size} devices. Use --lag alone: it has the same results"
        )
    if run.max_tokens < SAFE_TOKENS and not run.overlong.filter:
        print(
            f"note: completions are cut at {run.max_tokens} tokens, and cut ones are trained on; "
            f"--overlong.filter leaves them out, as is advised below {SAFE_TOKENS}"
        )
    heldout, longest_heldout = _heldout(run, tokenizer)
    if run.init is not None:
        check_init(run.init, cfg)

    check_positions(cfg, max(longest, longest_heldout) + run.max_tokens)
    # A sequence of n tokens takes n - 1 cells of a row.
    layout = _layout(run, mesh, longest + run.max_tokens - 1)
    engine = engine_of(
        run, cfg, rollout_mesh or mesh, tokenizer, prompts=count,
        length=max(longest, longest_heldout) + run.max_tokens,
    )  # fmt: skip
    return Prepared(
        run=run,
        cfg=cfg,
        tokenizer=tokenizer,
        stream=stream,
        heldout=heldout,
        engine=engine,
        layout=layout,
        fingerprint={"kind": "gppo", "seed": run.seed, "problems": data},
        rollout_mesh=rollout_mesh,
    )


def _heldout(run: GppoRun, tokenizer: Tokenizer) -> tuple[tuple[Problem, ...], int]:
    if run.heldout is not None:
        with usage_errors():
            problems = load_problems(run.heldout)
    elif run.problems is None:
        with usage_errors():
            # One fixed set for all seeds, so that runs are compared on the same questions.
            problems = draw_problems(run.tasks, run.eval_problems, split="heldout", seed=0)
    else:
        return (), 0
    name = str(run.heldout or "held-out tasks")
    kept, longest = encode_problems(tokenizer, problems, run.max_prompt_tokens, name=name)
    return tuple(kept), longest


def _layout(run: GppoRun, mesh: Mesh, cells: int) -> Layout:
    """Room for the largest mini-batch, whatever the lengths turn out to be."""
    row = row_tokens(run, cells)
    groups = run.minibatch_groups or -(-run.problems_per_step // run.updates)
    sequences = groups * run.samples
    rows = -(-sequences // (row // cells))
    at_a_time = microbatch_rows(run, mesh, row)
    return Layout(row, at_a_time, -(-rows // at_a_time))


class RunHooks:
    """Log, evaluate and save for one run folder (see `rl.loop.Hooks`)."""

    def __init__(
        self, prepared: Prepared, folder: Path, saves: checkpoint.Checkpoints, log: RunLog,
        progress: Progress, interrupt: Interrupt,
    ):  # fmt: skip
        self.prepared, self.folder, self.saves = prepared, folder, saves
        self.logger, self.progress, self.interrupt = log, progress, interrupt
        self.results: dict[str, float] = {}

    def log(self, phase: str, step: int, values: dict[str, Any]) -> None:
        record = self.logger.write(phase, step, readable(values))
        names = ("reward", "entropy", "clip", "grad_norm", "tokens_per_second")
        self.progress.show(step, record, names)
        if not record.get("updates"):
            why = f"{record['groups/trained']} groups to train on, {record['updates_skipped']}"
            self.progress.note(f"step {step}: no update was taken: {why} updates not finite")
        limit = self.prepared.run.kl_warning
        if (kl := record.get("rollout/kl")) is not None and kl > limit:
            self.progress.note(
                f"step {step}: its updates moved the policy by KL {kl:.3g} a token, over "
                f"kl_warning {limit:g}; a lower learning rate or fewer updates keep it closer"
            )

    def rolled_out(self, done: Rollout) -> None:
        if self.prepared.run.save_rollouts:
            about = {
                "model": dataclasses.asdict(self.prepared.cfg),
                "config": config_record(self.prepared.run),
            }
            path = self.folder / "rollouts" / f"step-{done.number:05d}.npz"
            save_rollout(path, done, about)

    def evaluate(self, state: TrainState, step: int) -> None:
        prepared, run = self.prepared, self.prepared.run
        if not prepared.heldout:
            return
        # The noise of evaluations is the same for all seeds, as the questions are.
        evaluator = prepared.sampler(state.params, 0, Truncation(top_p=run.eval_top_p))
        values: dict[str, Any] = {}
        for name, samples, temperature in (
            ("sampled", run.eval_samples, run.eval_temperature),
            ("greedy", 1, 0.0),
        ):
            result = evaluate(
                evaluator, prepared.heldout, prepared.encode, prepared.decode,
                math_rewards.grade_problem,
                samples=samples, max_tokens=run.max_tokens, temperature=temperature,
            )  # fmt: skip
            table = result.table()
            values[f"heldout/{name}"] = table.pop(f"avg@{samples}")
            values |= {f"heldout/{name}_{k}": v for k, v in table.items()}
            values |= {f"heldout/{name}/{k}": v for k, v in result.by_source().items()}
            values[f"heldout/{name}_invalid"] = result.invalid
            if name == "sampled":
                self._keep_completions(result, step)
        self.results = values
        self.logger.write("eval", step, values)
        sampled, greedy = values["heldout/sampled"], values["heldout/greedy"]
        self.progress.note(
            f"step {step}: held-out accuracy {sampled:.3f} sampled, {greedy:.3f} greedy"
        )

    def _keep_completions(self, result: Evaluation, step: int) -> None:
        shown = Evaluation(result.groups[:SHOWN])
        with open(self.folder / "completions.jsonl", "a", encoding="utf-8") as file:
            for record in shown.records():
                file.write(json.dumps({"step": step, **record}) + "\n")

    def save(self, state: TrainState, step: int, position: int, ahead: Sequence[Rollout]) -> None:
        save_ahead(self.folder, step, position, ahead)
        record = self.prepared.fingerprint | {"model": dataclasses.asdict(self.prepared.cfg)}
        self.saves.save(step, state, record)

    def stop(self) -> bool:
        return self.interrupt.asked


def train(
    prepared: Prepared, mesh: Mesh, folder: Path, interrupt: Interrupt, *, init: Path | None
) -> tuple[TrainState, dict[str, float], int]:
    """Train from `init` (or fresh weights), or from the last checkpoint in `folder`.

    Returns:
        The state, the last evaluation, and the steps done.
    """
    run, cfg = prepared.run, prepared.cfg
    optimizer = optim.make_optimizer(run.optim)
    saves = checkpoint.Checkpoints(folder)
    record = prepared.fingerprint | {"model": dataclasses.asdict(cfg)}
    state, first = checkpoint.restore_or_init(
        saves, record, state_lib.abstract_state(cfg, optimizer, mesh),
        lambda: state_lib.init_state(initial_params(init, cfg, mesh, seed=run.seed), optimizer),
    )  # fmt: skip
    if first >= run.steps:
        print(f"{folder} is at step {first} already; nothing is left to do")
    position, ahead = load_ahead(folder, first, mesh)
    # The weights that the run started from, kept beside those that move.
    reference = initial_params(init, cfg, mesh, seed=run.seed) if run.objective.kl_coef else None
    sampler = prepared.sampler(state.params, run.seed)
    reward = TRAINING_REWARDS[run.training_reward]
    score = make_scorer(cfg, temperature=run.temperature)
    loss = make_policy_loss(
        cfg, clip=run.clip, objective=run.objective, temperature=run.temperature
    )
    step = make_step(loss, optimizer=optimizer)
    if run.preflight and first < run.steps:
        parts = Parts(
            state=state, mesh=mesh, layout=prepared.layout, tokenizer=prepared.tokenizer,
            encode=prepared.encode, decode=prepared.decode, sampler=sampler,
            grade=math_rewards.grade_problem, reward=reward, objective=run.objective,
            optim=run.optim, loss=loss, score=score, step=step, samples=run.samples,
            max_tokens=run.max_tokens, temperature=run.temperature, seed=run.seed, folder=folder,
            reference=reference,
        )  # fmt: skip
        check_parts(parts, prepared.stream(position), position, fresh=not run.resume)
    evaluated = rewind(folder, first)
    with RunLog(folder) as log, Progress("GPPO", run.steps, first) as progress:
        hooks = RunHooks(prepared, folder, saves, log, progress, interrupt)
        # A run that was interrupted at this step has left its evaluation to us.
        due = first == 0 or (run.eval_every and first % run.eval_every == 0)
        if due and first not in evaluated:
            hooks.evaluate(state, first)
        state = train_gppo(
            LoopConfig(
                steps=run.steps, samples=run.samples, keep=run.problems_per_step,
                updates=run.updates, max_tokens=run.max_tokens, temperature=run.temperature,
                group_filter=run.group_filter, eval_every=run.eval_every, save_every=run.save_every,
                minibatch_groups=run.minibatch_groups, rounds=run.rounds, epochs=run.epochs,
                lag=run.lag, overlap=run.overlap, overlong=run.overlong,
            ),
            state=state, first_step=first, problems=prepared.stream, encode=prepared.encode,
            decode=prepared.decode, sampler=sampler, grade=math_rewards.grade_problem,
            reward=reward, objective=run.objective, layout=prepared.layout, score=score, step=step,
            learning_rate=optim.make_schedule(run.optim, run.steps), mesh=mesh, hooks=hooks,
            reference=reference, position=position, ahead=ahead,
        )  # fmt: skip
    done = saves.latest() or 0
    saves.close()
    return state, hooks.results, done


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    folder: Path
    report: Path
    state: TrainState
    results: dict[str, float]
    """The last evaluation."""
    done: int
    """Steps done; fewer than asked for after an interruption."""


def execute(run: GppoRun) -> Outcome:
    """Do a whole run: check, SFT start where one is needed, train, report.

    Raises:
        UsageError: the config cannot work; nothing was written.
    """
    check_model(run)
    if run.model != "tiny" and run.problems is None:
        raise UsageError(f"model {run.model} needs training problems: give --problems=FILE")
    tokenizer = tokenizer_of(run)
    mesh, rollout_mesh = start_meshes(run)
    prepared = prepare(run, tokenizer, mesh, rollout_mesh)
    folder = open_run(run, "gppo", parameters=prepared.cfg.parameter_count)
    with locked(folder), jax.set_mesh(mesh), Interrupt() as interrupt:
        init = run.init
        fresh = not run.resume or checkpoint.Checkpoints(folder).latest() is None
        if fresh and init is None and run.problems is None:
            init = run_sft.cached_start(run.sft_start(), tokenizer, mesh, interrupt)
            run_sft.note_start(folder, init)
        elif init is None and run.problems is None and run.objective.kl_coef:
            init = run_sft.noted_start(folder)
        elif fresh and init is None:
            print("starting from random weights: --problems is given and --init is not")
        state, results, done = train(prepared, mesh, folder, interrupt, init=init)
    math_rewards.close_pool()
    from klear_jax.report import write_report

    return Outcome(folder, write_report(folder), state, results, done)


def run_gppo(argv: Sequence[str]) -> int:
    """The command line."""
    run = command_line(GPPO_PRESETS, argv, with_algorithm)
    outcome = execute(run)
    print(f"report: {outcome.report}")
    check_learned(outcome.state)
    if outcome.done < run.steps:
        resume = f"--resume --out={outcome.folder}"
        print(f"stopped at step {outcome.done} of {run.steps}; go on with {resume}")
        return 130
    return 0


if __name__ == "__main__":
    main(run_gppo)
