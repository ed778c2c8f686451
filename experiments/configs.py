# SPDX-License-Identifier: Apache-2.0
"""The configuration of each kind of run, and the presets.

The program text is the schema: `tyro` turns the fields into flags and the docstrings under them
into help. Every combination that cannot work is refused when a config is made.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout import GroupFilter, Overlong
from klear_jax.rl.surrogates import Clip
from klear_jax.sampling.draw import Truncation
from klear_jax.train.optim import OptimConfig

INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Common:
    """What every run has."""

    model: str = "tiny"
    """A name of `QWEN3` (0.6b 1.7b 4b 8b 14b 32b tiny)."""
    tokenizer: str = "bytes"
    """bytes (embedded, 263 ids), qwen3, or a folder with tokenizer.json."""
    tasks: tuple[str, ...] = ("sum", "sort")
    """Embedded tasks (sum sort reverse); without effect where a file of problems or data is
    given."""
    init: Path | None = None
    """Start from these weights: the folder of a run, or one with config.json and safetensors."""
    mesh: str = "fsdp:-1"
    """Device mesh, such as fsdp:8,tensor:4; axes data fsdp seq tensor, -1 once for the rest."""
    cpu_devices: int = 1
    """On a CPU: devices to cut the machine into, to try a mesh."""
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Compute type; model: what the model's config says. Masters and moments are float32."""
    microbatch_rows: int | None = 8
    """Packed rows that pass through the model at a time, over the whole mesh; None for one row on
    each device (of those that the batch is cut over)."""
    row_tokens: int | None = None
    """Tokens in a packed row; by default the longest sequence, rounded up to 64 or to a multiple of
    128."""
    seed: int = 0
    """Of fresh weights, of the order of problems and of sampling noise."""
    out: Path | None = None
    """Folder of the run; by default the next free runs/KIND-NNNN."""
    resume: bool = False
    """Go on with the run in --out from its last checkpoint; its config is the default then."""

    def __post_init__(self):
        no_rows = self.microbatch_rows is not None and self.microbatch_rows < 1
        if no_rows or self.cpu_devices < 1:
            raise ValueError(
                f"microbatch_rows {self.microbatch_rows} and cpu_devices {self.cpu_devices} must "
                "be at least 1"
            )
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out, the folder of the run to go on with")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} must be >= 0")


@dataclasses.dataclass(frozen=True)
class Decoding(Common):
    """What every run that samples has."""

    slots: int = 64
    """Sequences that the sampler decodes at a time, on all devices together."""
    page: int = 32
    """Tokens in a page of the key/value cache; 128 on a TPU."""
    cache_tokens: int | None = None
    """Tokens that the key/value cache holds, on all devices together; None: as many as all slots at
    full length need. With fewer, requests wait for pages, and the youngest make room."""
    narrowest: int | None = None
    """At the end of a rollout decode half the slots, a quarter, ... down to this many; each width
    is compiled once. None: always all."""

    def __post_init__(self):
        super().__post_init__()
        if min(self.slots, self.page) < 1 or (self.cache_tokens or self.page) < self.page:
            raise ValueError(
                f"slots {self.slots} and page {self.page} must be at least 1, and cache_tokens "
                f"{self.cache_tokens} at least a page"
            )


_SFT_OPTIM = OptimConfig(
    learning_rate=2e-3, warmup_steps=20, schedule="cosine", final_learning_rate=2e-4,
    b2=0.95, weight_decay=0.01,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SftStart:
    """The SFT that comes before GPPO on the embedded tasks; everything else is as in the run."""

    steps: int = 450
    """Optimizer updates."""
    batch: int = 32
    """Demonstrations an update."""
    optim: OptimConfig = _SFT_OPTIM

    def __post_init__(self):
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"steps {self.steps} and batch {self.batch} must be at least 1")


@dataclasses.dataclass(frozen=True)
class SftRun(Common):
    """Supervised fine-tuning."""

    data: Path | None = None
    """JSONL of conversations (`messages` ending with the assistant) in place of the tasks."""
    steps: int = SftStart.steps
    """Optimizer updates."""
    batch: int = SftStart.batch
    """Examples an update."""
    max_example_tokens: int = 32_768
    """Longer examples of --data are dropped and counted."""
    save_every: int = 0
    """Steps between checkpoints; 0 for the last only."""
    optim: OptimConfig = _SFT_OPTIM

    def __post_init__(self):
        super().__post_init__()
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"steps {self.steps} and batch {self.batch} must be at least 1")
        if self.save_every < 0:
            raise ValueError(f"save_every {self.save_every} must be >= 0; 0 saves at the end only")


@dataclasses.dataclass(frozen=True)
class GppoRun(Decoding):
    """Reinforcement learning with verifiable rewards.

    Without --init and --problems, an SFT start for the tasks is trained first (with `sft`) and
    cached by a hash of its config.
    """

    problems: Path | None = None
    """JSONL of training problems in place of the tasks."""
    heldout: Path | None = None
    """JSONL of problems for the periodic evaluation; by default the tasks' held-out questions."""
    steps: int = 40
    """Rollout batches."""
    problems_per_step: int = 32
    """Groups to train on in a step, at most."""
    oversample: int = 1
    """Problems sampled in a step = oversample x problems_per_step; the filter picks among them."""
    samples: int = 8
    """Completions a problem (the paper's G)."""
    rounds: int = 1
    """Dynamic sampling (DAPO): sample up to this many batches of problems until problems_per_step
    groups pass the filter; if they never do, the step trains on those that did. 1: no refill."""
    updates: int = 4
    """Mini-batches a step, of nearly equal numbers of whole groups; each is one optimizer update.
    With fewer groups than this there are fewer updates (metric updates_missing)."""
    minibatch_groups: int | None = None
    """Groups a mini-batch instead, the short last one weighted by its share (released code);
    problems_per_step / minibatch_groups must then be `updates`."""
    epochs: int = 1
    """Passes over the mini-batches of a step."""
    lag: int = 0
    """Steps between sampling a rollout and training on it; 0 samples with the current weights."""
    overlap: bool = False
    """Sample the next rollouts while the updates run (one-step-off with lag 1)."""
    max_prompt_tokens: int = 4096
    """Longer prompts are dropped and counted."""
    max_tokens: int = 35
    """Most tokens of a completion."""
    temperature: float = 1.0
    """Sampling temperature of rollouts; the policy of the loss is taken at the same one."""
    group_filter: GroupFilter = "reward"
    """Which groups are trained on: reward (valid rewards differ), accuracy (released code),
    none."""
    training_reward: Literal["raw", "paper", "released"] = "raw"
    """How a verdict becomes a reward: as it is, as the paper says, or as the released code does."""
    overlong: Overlong = Overlong()
    clip: Clip = Clip(low=0.2, high=0.2)
    objective: Objective = Objective()
    optim: OptimConfig = OptimConfig(
        learning_rate=1e-4, warmup_steps=2, schedule="cosine", final_learning_rate=1e-5, b2=0.99
    )
    eval_every: int = 10
    """Steps between evaluations on held-out problems; 0 for the first and last only."""
    eval_problems: int = 256
    """Held-out questions of the tasks."""
    eval_samples: int = 1
    """Sampled completions a held-out problem; a greedy one is drawn besides."""
    eval_temperature: float = 1.0
    """Temperature of the sampled completions at evaluations."""
    eval_top_p: float = 1.0
    """Nucleus of the sampled completions at evaluations, in (0, 1]; 1 keeps every token."""
    save_every: int = 10
    """Steps between checkpoints; 0 for the last only."""
    slots: int = 128
    """Sequences that the sampler decodes at a time, on all devices together."""
    rollout_mesh: str | None = None
    """Another mesh to sample on, of all devices (weights are resharded at each swap) or of those
    that --mesh leaves over (it takes the first). None: the training mesh, nothing is copied."""
    rollout_dtype: Literal["trained", "float32", "bfloat16"] = "trained"
    """Type of the sampler's weights; another than the trainer's costs a copy at each swap."""
    kl_warning: float = 0.1
    """Warn of a step whose updates moved the policy further than this, in KL(old || new), nats a
    token."""
    save_rollouts: bool = False
    """Keep every rollout that is trained on in rollouts/ of the run, for experiments/frozen.py."""
    preflight: bool = True
    """Check the parts against each other before the first step (seconds on tiny)."""
    sft: SftStart = SftStart()

    def __post_init__(self):
        super().__post_init__()
        counts = ("steps", "problems_per_step", "oversample", "samples", "updates", "max_tokens")
        counts += ("rounds", "epochs")
        for name in (*counts, "eval_problems", "eval_samples", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        Truncation(top_p=self.eval_top_p)  # refuses what is no probability
        if min(self.eval_every, self.save_every) < 0 or not 0 <= self.eval_temperature < INF:
            raise ValueError(
                f"eval_every {self.eval_every}, save_every {self.save_every} and eval_temperature "
                f"{self.eval_temperature} must be >= 0"
            )
        if self.samples == 1 and self.group_filter != "none":
            raise ValueError(
                "samples 1 leaves every group without a difference, so the filter drops all; use "
                "samples >= 2"
            )
        if not 0 < self.temperature < INF:
            raise ValueError(
                f"temperature {self.temperature} must be > 0: a greedy policy has no ratio"
            )
        if not self.kl_warning > 0:
            raise ValueError(f"kl_warning {self.kl_warning} must be > 0; inf never warns")
        self._check_updates()
        self._check_overlong()
        self.clip.check_effect()

    def _check_updates(self) -> None:
        groups, size = self.problems_per_step, self.minibatch_groups
        if self.updates > groups:
            raise ValueError(
                f"{self.updates} updates need at least as many groups; problems_per_step is "
                f"{groups}"
            )
        if size is not None and not (size >= 1 and -(-groups // size) == self.updates):
            raise ValueError(
                f"minibatch_groups {size} cuts problems_per_step {groups} into "
                f"{-(-groups // size) if size > 0 else 'no'} mini-batches, and updates is "
                f"{self.updates}; make them agree"
            )
        if self.rounds > 1 and self.group_filter == "none":
            raise ValueError(
                f"rounds {self.rounds} has no effect with group_filter none: the first round "
                "gives all the groups"
            )
        if self.lag < 0 or (self.overlap and self.lag < 1):
            raise ValueError(
                f"lag {self.lag} must be >= 0, and overlap needs a lag of at least 1: what is "
                "sampled during an update cannot come from the weights after it"
            )
        within = self.objective.advantage != "batch_normalised"
        if self.samples == 1 and within and not self.objective.positive_nll:
            raise ValueError(
                f"samples 1 gives every sample the advantage 0 under {self.objective.advantage}, "
                "and positive_nll is 0: nothing would be learned; use samples >= 2, or the "
                "advantage batch_normalised"
            )

    def _check_overlong(self) -> None:
        if self.overlong.buffer > self.max_tokens:
            raise ValueError(
                f"overlong buffer {self.overlong.buffer} is longer than max_tokens "
                f"{self.max_tokens}"
            )

    def sft_start(self) -> SftRun:
        """The config of the SFT start."""
        names = ("model", "tokenizer", "tasks", "mesh", "cpu_devices", "dtype", "seed")
        same = {name: getattr(self, name) for name in (*names, "microbatch_rows")}
        own = {field.name: getattr(self.sft, field.name) for field in dataclasses.fields(SftStart)}
        return SftRun(**same, **own)


@dataclasses.dataclass(frozen=True)
class EvalRun(Decoding):
    """Evaluation of one model on problem files: avg@k with an interval, and pass@k."""

    problems: tuple[Path, ...] = ()
    """JSONL files; by default the tasks' held-out questions."""
    samples: int = 4
    """Completions a problem (k)."""
    eval_problems: int = 256
    """Held-out questions of the tasks."""
    max_prompt_tokens: int = 4096
    """Longer prompts are dropped and counted."""
    max_tokens: int = 48
    """Most tokens of a completion."""
    temperature: float = 0.6
    """0 is greedy."""
    top_p: float = 0.95
    """Nucleus, in (0, 1]; 1 keeps every token."""
    top_k: int | None = None
    """Only the k most likely tokens; None keeps all."""

    def __post_init__(self):
        super().__post_init__()
        if self.samples < 1 or self.max_tokens < 1:
            raise ValueError(
                f"samples {self.samples} and max_tokens {self.max_tokens} must be at least 1"
            )
        Truncation(top_k=self.top_k, top_p=self.top_p)  # refuses what truncates nothing
        if not 0 <= self.temperature < INF or self.eval_problems < 1:
            raise ValueError(
                f"temperature {self.temperature} must be >= 0, 0 is greedy, and eval_problems "
                f"{self.eval_problems} at least 1"
            )
        if self.resume:
            raise ValueError("an evaluation has nothing to resume; run it again")


_KLEAR = GppoRun(
    model="8b",
    tokenizer="qwen3",
    microbatch_rows=None,
    problems_per_step=128,
    samples=8,
    max_prompt_tokens=4096,
    max_tokens=32_768,
    row_tokens=36_864,
    training_reward="paper",
    clip=Clip(low=0.2, high=0.28),
    optim=OptimConfig(learning_rate=1e-6, weight_decay=0.1, clip_norm=1.0),
    eval_every=5,
    eval_temperature=0.6,
    eval_top_p=0.95,
    save_every=5,
    slots=256,
    page=128,
    # 256 slots of 8,192 tokens, the middle of long chains of thought: 288 GiB at 144 KiB a token.
    cache_tokens=256 * 8192,
)
"""What the math and the code stage share (paper, section on RL training)."""


def _released(run: GppoRun) -> GppoRun:
    """The released code's numbers where they differ from the paper's (docs/deviations.md)."""
    return dataclasses.replace(
        run,
        oversample=2,
        group_filter="accuracy",
        training_reward="released",
        clip=dataclasses.replace(run.clip, dual=10.0),
        objective=dataclasses.replace(run.objective, advantage="group_normalised_sample"),
        minibatch_groups=run.problems_per_step // run.updates,
        optim=dataclasses.replace(run.optim, warmup_steps=10),
    )


_MATH = dataclasses.replace(_KLEAR, steps=240, updates=8)
_CODE = dataclasses.replace(
    _KLEAR, steps=100, updates=4, optim=dataclasses.replace(_KLEAR.optim, learning_rate=5e-7)
)

GPPO_PRESETS: dict[str, GppoRun] = {
    "demo": GppoRun(),
    "klear_8b_math": _MATH,
    "klear_8b_code": _CODE,
    "klear_8b_math_released": _released(_MATH),
    "klear_8b_code_released": _released(_CODE),
}
"""`demo` is the embedded CPU default. The paper does not say how many steps were run: 240 and 100
are the lengths of its curves."""

SFT_PRESETS: dict[str, SftRun] = {
    "demo": SftRun(),
    "klear_8b_sft": SftRun(
        model="8b",
        tokenizer="qwen3",
        steps=10_000,
        batch=256,
        row_tokens=32_768,
        microbatch_rows=None,
        save_every=500,
        optim=OptimConfig(
            learning_rate=8e-5, warmup_steps=100, schedule="cosine", final_learning_rate=4e-5
        ),
    ),
}
"""`klear_8b_sft` has the paper's learning rates and length; batch, warm-up and steps are ours."""

EVAL_PRESETS: dict[str, EvalRun] = {"demo": EvalRun()}
