# SPDX-License-Identifier: Apache-2.0
"""One step: equal under micro-batching, packing, order and mesh; layout, donation and skipping."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from klear_jax.core.batch import RolloutBatch, SftBatch
from klear_jax.core.mesh import MeshSpec, axis_size, make_mesh, place
from klear_jax.core.numerics import linear_logprob
from klear_jax.data.packing import TokenSequence, pack
from klear_jax.model import params as params_lib
from klear_jax.model import qwen3
from klear_jax.model.config import QWEN3
from klear_jax.rl.loss import make_policy_loss
from klear_jax.rl.surrogates import Clip
from klear_jax.train.metrics import Metrics
from klear_jax.train.optim import OptimConfig, make_optimizer
from klear_jax.train.sft import make_sft_loss
from klear_jax.train.state import abstract_state, init_state
from klear_jax.train.step import make_scorer, make_step

CFG = QWEN3["tiny"]
ROW = 40
CUT = "fsdp:2,tensor:2"
CLIP = Clip(low=0.2, high=0.28, dual=4.0)


@functools.cache
def start():
    """Host copies of the parameters, spread so that tokens differ in probability."""
    rng = np.random.default_rng(0)
    params = params_lib.init(CFG, 0)
    return jax.tree.map(lambda x: np.asarray(x) * rng.uniform(0.5, 1.5, x.shape[-1:]), params)


def fresh(mesh=None):
    """Parameters on the devices; the step donates them."""
    if mesh is None:
        return jax.tree.map(lambda x: jnp.array(x, jnp.float32), start())
    layout = params_lib.shardings(CFG, mesh)
    return jax.tree.map(lambda x, s: jax.device_put(x.astype(np.float32), s), start(), layout)


@functools.cache
def samples():
    """Eight sequences, each with a prompt, its advantage, and old log-probs near the policy's."""
    rng = np.random.default_rng(1)
    lengths = [31, 12, 9, 20, 3, 41, 17, 2]
    # Prompts of every length, and the pad id 0 both as a token and as an end token.
    sequences = [
        TokenSequence(np.append(rng.integers(0, 263, n - 1), 0).astype(np.int32), int(p))
        for n, p in zip(lengths, [20, 4, 1, 5, 2, 9, 16, 1], strict=True)
    ]
    tokens = [s.tokens.shape[0] - s.prompt_length for s in sequences]
    advantages = [np.full(n, a) for n, a in zip(tokens, rng.normal(size=8), strict=True)]
    old = [rng.normal(-5.4, 1.0, n) for n in tokens]
    gaps = [rng.normal(0, 0.1, n) for n in tokens]
    return sequences, {"advantages": advantages, "old_logprobs": old, "gap": gaps}


def rollout_batch(shape, order=range(8), packed=True):
    """The samples as `[m, b, t]`, 8 rows; `packed=False` gives each a row of its own."""
    sequences, extras = samples()
    chosen = [sequences[i] for i in order]
    extras = {k: [v[i] for i in order] for k, v in extras.items()}
    if packed:
        rows = pack(chosen, row=ROW, rows=shape[0] * shape[1], per_token=extras)
    else:
        single = [
            pack([s], row=ROW, per_token={k: v[i : i + 1] for k, v in extras.items()})
            for i, s in enumerate(chosen)
        ]
        rows = jax.tree.map(
            lambda *x: np.concatenate(x),
            *[vars(s) | {"per_token": dict(s.per_token)} for s in single],
        )
        rows = type(single[0])(**rows)
    mask = rows.mask
    positive = mask & (rows.per_token["advantages"] > 0)
    batch = RolloutBatch(
        tokens=rows.tokens, targets=rows.targets, positions=rows.positions, segments=rows.segments,
        mask=mask,
        loss_weights=mask / mask.sum(),
        positive_weights=0.1 * positive / positive.sum(),
        advantages=rows.per_token["advantages"],
        old_logprobs=rows.per_token["old_logprobs"],
        old_entropy=mask * 5.4,
        reference_logprobs=rows.per_token["old_logprobs"] - rows.per_token["gap"],
        sampler_logprobs=rows.per_token["old_logprobs"] + rows.per_token["gap"],
    )  # fmt: skip
    return jax.tree.map(
        lambda x: (x.astype(np.float32) if x.dtype == np.float64 else x).reshape(*shape, ROW), batch
    )


LOSS = make_policy_loss(CFG, clip=CLIP, temperature=0.8)
GRADIENT = optax.trace(decay=0.0)
"""An optimizer whose state is the gradient of the last step."""
STEP = make_step(LOSS, optimizer=GRADIENT)


def outcome(batch, used, mesh=None):
    """(metrics, gradient) of one step, on the host; the parameters stay (learning rate 0)."""
    state, values = STEP(init_state(fresh(mesh), GRADIENT), batch, used, 0.0)
    return jax.device_get((values, state.opt_state.trace))


@functools.cache
def reference():
    return outcome(rollout_batch((1, 8)), 1)


def assert_same(result):
    (values, gradient), (expected, expected_gradient) = result, reference()
    assert values.keys() == expected.keys()
    for name in expected:
        # The largest of all ratios is exp of one token's rounding error, not a mean of many.
        rtol = 1e-5 if name == "ratio/max" else 1e-6
        # A bin of a histogram may hold next to nothing beside the others.
        atol = 1e-6 * np.abs(expected[name]).max() if np.ndim(expected[name]) else 0
        np.testing.assert_allclose(values[name], expected[name], rtol=rtol, atol=atol, err_msg=name)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(expected_gradient))
    assert largest > 1e-3
    for got, want in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * largest)


def test_reference_is_no_special_case():
    """The samples reach every branch, so that equality below means something."""
    values, _ = reference()
    for name in ("clip/pos_high", "clip/neg_low", "outside/pos_low", "outside/neg_high"):
        assert 0.01 < values[name] < 0.6, name
    sequences, _ = samples()
    trained = sum(len(s.tokens) - s.prompt_length for s in sequences)
    assert values["tokens/trained"] == values["ratio_histogram"].sum() == trained
    assert values["ratio/max"] > CLIP.dual


@pytest.mark.parametrize("pieces", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_micro_batches(pieces):
    assert_same(outcome(rollout_batch((pieces, 8 // pieces)), pieces))


def test_row_and_sequence_order():
    batch = rollout_batch((1, 8))
    rows = np.array([3, 5, 0, 4, 7, 1, 2, 6])
    assert_same(outcome(jax.tree.map(lambda x: x[:, rows], batch), 1))
    order = np.random.default_rng(5).permutation(8)
    assert_same(outcome(rollout_batch((2, 4), order), 2))


def test_one_sequence_a_row():
    assert_same(outcome(rollout_batch((1, 8), packed=False), 1))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "spec", [pytest.param("fsdp:2", marks=SLOW), pytest.param("tensor:2", marks=SLOW), CUT]
)
def test_mesh(spec):
    spec = MeshSpec.parse(spec)
    mesh = make_mesh(spec, devices=jax.devices()[: int(np.prod(spec.sizes))])
    with jax.set_mesh(mesh):
        batch = place(rollout_batch((4, 2)), mesh, None, "batch", "seq")
        assert_same(outcome(batch, 4, mesh))


@pytest.fixture(scope="module")
def cut_mesh():
    return make_mesh(MeshSpec.parse(CUT), devices=jax.devices()[:4])


def test_bytes_on_each_device(cut_mesh):
    """Every matrix, and both of its moments, is cut into as many pieces as the mesh asks for."""
    described = params_lib.describe(CFG)
    with jax.set_mesh(cut_mesh):
        state = init_state(fresh(cut_mesh), make_optimizer(OptimConfig()))
    adam = state.opt_state[1]
    for tree in (state.params, adam.mu, adam.nu):
        for info, leaf in zip(jax.tree.leaves(described), jax.tree.leaves(tree), strict=True):
            pieces = np.prod([axis_size(cut_mesh, axis) for axis in info.axes], dtype=int)
            assert pieces == (4 if info.init == "normal" else 1)
            assert leaf.nbytes == 4 * np.prod(info.shape)
            sizes = [shard.data.nbytes for shard in leaf.addressable_shards]
            assert sizes == [leaf.nbytes // pieces] * 4


@pytest.mark.parametrize("spec", [None, CUT])
def test_abstract_state_is_a_real_states_shape(spec, cut_mesh):
    optimizer = make_optimizer(OptimConfig())
    mesh = cut_mesh if spec else None
    if mesh is None:
        state = init_state(fresh(), optimizer)
    else:
        with jax.set_mesh(mesh):
            state = init_state(fresh(mesh), optimizer)
    abstract = abstract_state(CFG, optimizer, mesh)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for real, plan in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (real.shape, real.dtype) == (plan.shape, plan.dtype)
        if mesh is not None:
            assert real.sharding == plan.sharding


@pytest.mark.parametrize("spec", [None, CUT])
def test_one_program_for_any_number_of_micro_batches(spec, cut_mesh):
    """20 steps, 1 to 3 pieces used, changing rates: traced and compiled once; moved every time."""
    traced = []

    def loss_fn(params, batch):
        traced.append(1)
        x = params["w"][batch["ids"]].sum()
        return (x * x), Metrics(means={"x": (x, jnp.ones(()))})

    optimizer = make_optimizer(OptimConfig(learning_rate=1e-3))
    step = make_step(loss_fn, optimizer=optimizer)
    mesh = (
        jax.set_mesh(cut_mesh) if spec else jax.set_mesh(make_mesh(MeshSpec(), jax.devices()[:1]))
    )
    with mesh:
        state = init_state({"w": jnp.ones(5)}, optimizer)
        batch = {"ids": jnp.arange(3)[:, None]}
        seen = []
        for number in range(20):
            state, values = step(state, batch, 1 + number % 3, 1e-3 * number)
            seen.append(float(values["x"]))
            if number == 0:
                count = len(traced)
        assert len(traced) == count
        # In a process with thousands of programs jax may have let go of this one already.
        assert step._cache_size() <= 1
    assert len(set(seen)) > 15
    assert int(state.updates) == 20


def test_a_real_step_compiles_once_and_donates(cut_mesh):
    """On a cut mesh the state that comes back has the layout of the one that went in."""
    with jax.set_mesh(cut_mesh):
        batch = place(rollout_batch((4, 2)), cut_mesh, None, "batch", "seq")
        state = init_state(fresh(cut_mesh), GRADIENT)
        layout = jax.tree.map(lambda x: x.sharding, state)
        compiled = None
        for used in (4, 1, 2):
            old = state
            state, values = STEP(state, batch, used, 1e-3)
            assert all(x.is_deleted() for x in jax.tree.leaves(old))
            assert jax.tree.map(lambda x: x.sharding, state) == layout
            assert int(values["updates_skipped"]) == 0
            compiled = compiled or STEP._cache_size()
        assert STEP._cache_size() == compiled
    assert int(state.updates) == 3


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("field", ["advantages", "loss_weights", "old_logprobs"])
def test_non_finite_step_changes_nothing(field):
    batch = rollout_batch((1, 8))
    bad = getattr(batch, field).copy()
    bad[
        np.nonzero(batch.mask)[0][0], np.nonzero(batch.mask)[1][0], np.nonzero(batch.mask)[2][0]
    ] = np.nan
    state, _ = STEP(init_state(fresh(), GRADIENT), batch, 1, 1e-3)
    before = bits((state.params, state.opt_state))
    state, values = STEP(state, batch.replace(**{field: bad}), 1, 1e-3)
    assert bits((state.params, state.opt_state)) == before
    assert (int(state.updates), int(state.skipped), int(values["updates_skipped"])) == (1, 1, 1)
    state, values = STEP(state, batch, 1, 1e-3)
    assert bits(state.params) != before[: len(jax.tree.leaves(state.params))]
    assert (int(state.updates), int(state.skipped), int(values["updates_skipped"])) == (2, 1, 0)


@pytest.mark.parametrize("used", [1, 2])
def test_infinite_gradient_of_a_finite_loss_is_skipped(used):
    """The root at 0 is 0 and its slope infinite; Adam's moments must not see it."""
    optimizer = make_optimizer(OptimConfig())

    def loss_fn(params, batch):
        return jnp.sqrt(params["w"] * batch["x"]).sum(), Metrics()

    step = make_step(loss_fn, optimizer=optimizer)
    state = init_state({"w": jnp.array([0.0, 4.0])}, optimizer)
    before = bits((state.params, state.opt_state))
    state, values = step(state, {"x": jnp.ones((used, 2))}, used, 0.1)
    assert float(values["loss"]) == 2.0 * used
    assert bits((state.params, state.opt_state)) == before
    assert (int(state.updates), int(state.skipped)) == (0, 1)


def direct_logprobs(batch, cfg, temperature):
    """Log-probs `[b, t]` by a plain softmax over the live vocabulary, float64."""
    rows = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))
    hidden = qwen3.forward(fresh(), *rows, cfg=cfg)
    logits = np.asarray(hidden, np.float64) @ np.asarray(qwen3.unembed(start()), np.float64)
    logits = logits[..., : cfg.live_vocab] / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.take_along_axis(logprobs, batch.targets[..., None], axis=-1)[..., 0]


def test_scorer_equals_the_losss_own_logprobs():
    """So the first update after sampling has ratio 1; pieces that are not used stay 0."""
    batch = rollout_batch((2, 4))
    score = make_scorer(CFG, temperature=0.8)
    params = fresh()
    scored = np.asarray(score(params, batch, 2)[0])
    part = np.asarray(score(params, batch, 1)[0])
    np.testing.assert_array_equal(part[0], scored[0])
    assert (part[1] == 0).all()
    assert score._cache_size() == 1

    flat = jax.tree.map(lambda x: jnp.asarray(x.reshape(8, ROW)), batch)
    expected = direct_logprobs(flat, CFG, 0.8)
    mask = batch.mask
    np.testing.assert_allclose(scored[mask], expected.reshape(2, 4, ROW)[mask], atol=1e-5)

    hidden = qwen3.forward(params, flat.tokens, flat.positions, flat.segments, cfg=CFG)
    own, _ = linear_logprob(
        hidden, qwen3.unembed(params), flat.targets, live_vocab=CFG.live_vocab, temperature=0.8
    )
    assert np.abs(np.exp(np.asarray(own).reshape(2, 4, ROW) - scored)[mask] - 1).max() < 1e-5

    values, _ = outcome(batch.replace(old_logprobs=scored), 2)
    assert abs(values["ratio/max"] - 1) < 1e-5
    assert abs(values["kl"]) < 1e-6
    # All tokens in the two bins that meet at ratio 1.
    assert values["ratio_histogram"][19:21].sum() == mask.sum()
    assert values["clip/pos_high"] == values["clip/neg_low"] == 0


def test_sft_step_in_bfloat16_keeps_float32_masters():
    """The SFT loss is -sum(weights * log p); small updates reach masters, moments stay float32."""
    cfg = dataclasses.replace(CFG, dtype="bfloat16")
    batch = rollout_batch((1, 8))
    weights = np.where(batch.mask, np.random.default_rng(3).uniform(0, 0.02, batch.mask.shape), 0)
    sft = SftBatch(
        tokens=batch.tokens, targets=batch.targets, positions=batch.positions,
        segments=batch.segments, mask=batch.mask, loss_weights=weights.astype(np.float32),
    )  # fmt: skip
    optimizer = make_optimizer(OptimConfig(weight_decay=0.0))
    step = make_step(make_sft_loss(cfg), optimizer=optimizer)
    state, values = step(init_state(fresh(), optimizer), sft, 1, 1e-6)

    flat = jax.tree.map(lambda x: x[0], batch)
    logprobs = direct_logprobs(flat, CFG, 1.0)
    np.testing.assert_allclose(values["loss"], -(weights[0] * logprobs).sum(), rtol=2e-2)
    np.testing.assert_allclose(values["nll"], -logprobs[flat.mask].mean(), rtol=2e-2)
    assert int(values["tokens"]) == batch.mask.sum()

    leaves = jax.tree.leaves((state.params, state.opt_state[1].mu, state.opt_state[1].nu))
    assert all(x.dtype == jnp.float32 for x in leaves)
    # Adam's first update is the learning rate for every weight whose gradient is not tiny.
    moved = np.abs(np.asarray(state.params.blocks.mlp.gate) - start().blocks.mlp.gate)
    assert np.mean((moved > 5e-7) & (moved < 1.5e-6)) > 0.95


def test_sft_loss_ignores_what_is_masked():
    """NaN weights of masked cells would poison a product; prompts and padding carry no loss."""
    batch = rollout_batch((1, 8))
    flat = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    sft = SftBatch(
        tokens=flat.tokens, targets=flat.targets, positions=flat.positions,
        segments=flat.segments, mask=flat.mask, loss_weights=flat.loss_weights,
    )  # fmt: skip
    loss_fn = make_sft_loss(CFG)
    loss, metrics = loss_fn(fresh(), sft)
    expected = -direct_logprobs(flat, CFG, 1.0)[np.asarray(flat.mask)].mean()
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5)
    other = jnp.where(flat.mask, flat.targets, 7)
    changed, _ = loss_fn(fresh(), sft.replace(targets=other))
    assert float(changed) == float(loss)
    assert int(metrics.sums["tokens"]) == flat.mask.sum()
