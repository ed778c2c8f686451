# SPDX-License-Identifier: Apache-2.0
"""The presets of the paper and of its released code against tables typed from klear_spec.md."""

import dataclasses
import math

import inputs
import pytest
from algorithms import ALGORITHMS, with_algorithm
from configs import EVAL_PRESETS, GPPO_PRESETS, SFT_PRESETS, EvalRun, GppoRun, SftRun
from jax.sharding import AbstractMesh
from session import UsageError, command_line

from klear_jax.core.mesh import AXES, MeshSpec, check_divides
from klear_jax.model.config import QWEN3
from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout import Overlong
from klear_jax.rl.surrogates import Clip
from klear_jax.train.optim import make_schedule

MACHINE = (
    "mesh", "cpu_devices", "dtype", "microbatch_rows", "slots", "page", "cache_tokens",
    "narrowest", "rollout_mesh", "rollout_dtype", "seed", "out", "resume", "init",
    "tasks", "problems", "heldout", "eval_problems", "sft", "overlap", "kl_warning",
    "save_rollouts", "preflight",
)  # fmt: skip
"""Fields that say where and on what a run is done."""

PAPER_MATH = {
    "model": "8b",
    "tokenizer": "qwen3",
    "row_tokens": 36_864,
    "steps": 240,
    "problems_per_step": 128,
    "oversample": 1,
    "samples": 8,
    "updates": 8,
    "max_prompt_tokens": 4096,
    "max_tokens": 32_768,
    "temperature": 1.0,
    "group_filter": "reward",
    "training_reward": "paper",
    "rounds": 1,
    "minibatch_groups": None,
    "epochs": 1,
    "lag": 0,
    "overlong": {"buffer": 0, "factor": 1.0, "filter": False},
    "clip": {
        "low": 0.2,
        "high": 0.28,
        "dual": None,
        "variant": "gppo",
        "level": "token",
        "beta_low": 1.0,
        "beta_high": 1.0,
        "tau_positive": 1.0,
        "tau_negative": 1.05,
    },
    "objective": {
        "advantage": "group_normalised",
        "aggregation": "token_mean",
        "old_logprobs": "trainer",
        "positive_nll": 0.1,
        "positive_threshold": 1.0,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "entropy_coef": 0.0,
        "tis": "none",
        "tis_cap": 2.0,
        "erc": None,
    },
    "optim": {
        "learning_rate": 1e-6,
        "warmup_steps": 0,
        "schedule": "constant",
        "final_learning_rate": 0.0,
        "b1": 0.9,
        "b2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
    },
    "eval_every": 5,
    "eval_samples": 1,
    "eval_temperature": 0.6,
    "eval_top_p": 0.95,
    "save_every": 5,
}


def changed(base, **changes):
    """A copy with other values; `a__b` is field b of a."""
    copy = {k: dict(v) if isinstance(v, dict) else v for k, v in base.items()}
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            assert inner in copy[outer]
            copy[outer][inner] = value
        else:
            assert outer in copy
            copy[outer] = value
    return copy


CODE = {"steps": 100, "updates": 4, "optim__learning_rate": 5e-7}
RELEASED = {
    "oversample": 2, "group_filter": "accuracy", "training_reward": "released",
    "clip__dual": 10.0, "objective__advantage": "group_normalised_sample",
    "optim__warmup_steps": 10,
}  # fmt: skip
TABLES = {
    "klear_8b_math": PAPER_MATH,
    "klear_8b_code": changed(PAPER_MATH, **CODE),
    "klear_8b_math_released": changed(PAPER_MATH, **RELEASED, minibatch_groups=16),
    "klear_8b_code_released": changed(PAPER_MATH, **CODE, **RELEASED, minibatch_groups=32),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_the_recipe(name):
    fields = dataclasses.asdict(GPPO_PRESETS[name])
    assert {k: v for k, v in fields.items() if k not in MACHINE} == TABLES[name]


@pytest.mark.parametrize(("name", "minibatch"), [("math", 16), ("code", 32)])
def test_prompts_of_a_minibatch(name, minibatch):
    for twin in ("", "_released"):
        run = GPPO_PRESETS[f"klear_8b_{name}{twin}"]
        assert run.problems_per_step / run.updates == minibatch


@pytest.mark.parametrize("name", TABLES)
def test_a_prompt_and_its_completion_fit(name):
    run = GPPO_PRESETS[name]
    assert run.row_tokens == run.max_prompt_tokens + run.max_tokens
    assert run.row_tokens <= QWEN3[run.model].max_positions


def test_learning_rate_of_the_first_steps():
    """The paper's is constant; the released code's rises from 0 over ten steps."""
    paper, released = (
        make_schedule(GPPO_PRESETS[name].optim, 240)
        for name in ("klear_8b_math", "klear_8b_math_released")
    )
    assert [paper(n) for n in (0, 5, 239)] == pytest.approx([1e-6] * 3)
    assert [released(n) for n in (0, 1, 5, 10, 239)] == pytest.approx([0, 1e-7, 5e-7, 1e-6, 1e-6])


def test_sft():
    """Klear's lr 8e-5 falling as a cosine to 4e-5, and 32K tokens; the rest is ours."""
    run = SFT_PRESETS["klear_8b_sft"]
    assert (run.model, run.tokenizer, run.row_tokens) == ("8b", "qwen3", 32_768)
    assert run.max_example_tokens == 32_768
    optim = run.optim
    assert (optim.learning_rate, optim.final_learning_rate) == (8e-5, 4e-5)
    assert optim.schedule == "cosine"
    rate = make_schedule(optim, run.steps)
    assert rate(optim.warmup_steps) == pytest.approx(8e-5)
    assert rate(run.steps - 1) == pytest.approx(4e-5)


def test_names():
    assert GPPO_PRESETS.keys() == {"demo", *TABLES}
    assert SFT_PRESETS.keys() == {"demo", "klear_8b_sft"}
    assert EVAL_PRESETS.keys() == {"demo"}
    assert GPPO_PRESETS["demo"] == GppoRun()
    assert SFT_PRESETS["demo"] == SftRun()


def test_evaluation_samples_as_the_paper_does():
    assert (EvalRun().temperature, EvalRun().top_p, EvalRun().top_k) == (0.6, 0.95, None)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (GppoRun, {"samples": 1}, "samples 1 leaves every group without a difference"),
        (GppoRun, {"temperature": 0.0}, "a greedy policy has no ratio"),
        (GppoRun, {"problems_per_step": 3, "updates": 4}, "4 updates need at least as many groups"),
        (GppoRun, {"steps": 0}, "steps 0 must be at least 1"),
        (GppoRun, {"slots": 0}, "slots 0 and page 32 must be at least 1"),
        (GppoRun, {"save_every": -1}, "save_every -1"),
        (GppoRun, {"eval_temperature": -0.1}, "eval_temperature -0.1"),
        (GppoRun, {"eval_top_p": 0.0}, "top_p 0.0"),
        (GppoRun, {"microbatch_rows": 0}, "microbatch_rows 0"),
        (GppoRun, {"seed": -1}, "seed -1"),
        (GppoRun, {"resume": True}, "--resume needs --out"),
        (GppoRun, {"lag": -1}, "lag -1"),
        (GppoRun, {"overlap": True}, "overlap needs a lag of at least 1"),
        (GppoRun, {"rounds": 2, "group_filter": "none"}, "rounds 2 has no effect"),
        (GppoRun, {"rounds": 0}, "rounds 0"),
        (GppoRun, {"epochs": 0}, "epochs 0"),
        (GppoRun, {"minibatch_groups": 5}, "into 7 mini-batches, and updates is 4"),
        (GppoRun, {"minibatch_groups": 0}, "minibatch_groups 0"),
        (GppoRun, {"kl_warning": 0.0}, "kl_warning 0.0"),
        (GppoRun, {"overlong": Overlong(buffer=36)}, "overlong buffer 36 is longer"),
        (GppoRun, {"clip": Clip(variant="cispo", dual=10.0)}, "dual 10.0 has no effect on"),
        (GppoRun, {"clip": Clip(level="geometric")}, "goes with variant unclipped"),
        (
            GppoRun,
            {"samples": 1, "group_filter": "none", "objective": Objective(positive_nll=0.0)},
            "nothing would be learned",
        ),
        (SftRun, {"batch": 0}, "batch 0"),
        (SftRun, {"save_every": -2}, "save_every -2"),
        (EvalRun, {"samples": 0}, "samples 0"),
        (EvalRun, {"temperature": -1.0}, "temperature -1.0"),
        (EvalRun, {"top_p": 1.5}, "top_p 1.5"),
        (EvalRun, {"top_k": 0}, "top_k 0"),
        (EvalRun, {"eval_problems": 0}, "eval_problems 0"),
    ],
)
def test_what_cannot_work_is_refused(kind, fields, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is compared
        kind(**fields)
    assert message in str(caught.value)


def test_a_single_sample_needs_no_filter():
    assert GppoRun(samples=1, group_filter="none").samples == 1


def test_the_sft_start_is_that_of_the_run():
    run = GppoRun(tokenizer="qwen3", tasks=("reverse",), mesh="fsdp:2", cpu_devices=2, seed=5)
    start = run.sft_start()
    for name in ("model", "tokenizer", "tasks", "mesh", "cpu_devices", "dtype", "seed"):
        assert getattr(start, name) == getattr(run, name)
    assert (start.steps, start.batch, start.optim) == (run.sft.steps, run.sft.batch, run.sft.optim)


@pytest.mark.parametrize("name", [n for n in GPPO_PRESETS if n != "demo"])
def test_the_printed_mesh_cuts_the_presets(name):
    """README's mesh, 64 devices that are only described."""
    run = GPPO_PRESETS[name]
    mesh = AbstractMesh(MeshSpec.parse("fsdp:16,tensor:4").sizes, AXES)
    assert inputs.microbatch_rows(run, mesh, run.row_tokens) == 16
    check_divides(mesh, QWEN3[run.model].axis_sizes_cut)
    with pytest.raises(UsageError, match="the mesh cuts batch"):
        inputs.microbatch_rows(dataclasses.replace(run, microbatch_rows=8), mesh, run.row_tokens)


# (variant, level, advantage, aggregation, KL, alpha, filter): what the papers say of each.
ALGORITHM_TABLE = {
    "grpo": ("ppo", "token", "group_normalised", "sequence_mean", "k3", "reward"),
    "dapo": ("ppo", "token", "group_normalised", "token_mean", None, "accuracy"),
    "dr_grpo": ("ppo", "token", "mean_centred", "constant", None, "none"),
    "gspo": ("ppo", "sequence", "group_normalised", "sequence_mean", None, "reward"),
    "gspo_token": ("ppo", "sequence_token", "group_normalised", "sequence_mean", None, "reward"),
    "gmpo": ("unclipped", "geometric", "group_normalised", "sequence_mean", None, "reward"),
    "rloo": ("reinforce", "token", "leave_one_out", "constant", None, "none"),
    "reinforce_pp": ("ppo", "token", "batch_normalised", "token_mean", "k2", "none"),
}


@pytest.mark.parametrize("name", ALGORITHM_TABLE)
@pytest.mark.parametrize("preset", ["demo", "klear_8b_math"])
def test_algorithms(name, preset):
    run = with_algorithm(GPPO_PRESETS[preset], name)
    clip, objective = run.clip, run.objective
    kl = objective.kl_estimator if objective.kl_coef else None
    assert ALGORITHM_TABLE[name] == (
        clip.variant, clip.level, objective.advantage, objective.aggregation, kl, run.group_filter
    )  # fmt: skip
    assert objective.positive_nll == 0
    # Nothing but the objective changes.
    changed_fields = {
        field.name for field in dataclasses.fields(run)
        if getattr(run, field.name) != getattr(GPPO_PRESETS[preset], field.name)
    }  # fmt: skip
    assert changed_fields <= {"clip", "objective", "group_filter", "rounds"}


def test_widths_of_the_algorithms():
    clips = {name: fields["clip"] for name, fields in ALGORITHMS.items()}
    assert ALGORITHMS.keys() == ALGORITHM_TABLE.keys()
    assert (clips["dapo"].low, clips["dapo"].high) == (0.2, 0.28)
    for name in ("gspo", "gspo_token"):
        assert (clips[name].low, clips[name].high) == (3e-4, 4e-4)
    bounds = [math.log(1 - clips["gmpo"].low), math.log(1 + clips["gmpo"].high)]
    assert bounds == pytest.approx([-0.4, 0.4], abs=1e-5)
    with pytest.raises(ValueError, match=r"no algorithm 'ppo2'; the algorithms are grpo, dapo"):
        with_algorithm(GppoRun(), "ppo2")


def test_an_algorithm_on_the_command_line():
    run = command_line(GPPO_PRESETS, ["demo+gspo", "--clip.low=0.03", "--steps=2"], with_algorithm)
    assert (run.clip.low, run.clip.high, run.clip.level, run.steps) == (0.03, 4e-4, "sequence", 2)
    with pytest.raises(UsageError, match="no algorithm 'nope'"):
        command_line(GPPO_PRESETS, ["demo+nope"], with_algorithm)
    with pytest.raises(UsageError, match="no preset 'demo"):
        command_line(SFT_PRESETS, ["demo+gspo"])
