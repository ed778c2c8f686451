# SPDX-License-Identifier: Apache-2.0
"""The terms beside the surrogate: refusals, TIS, ERC, KL, entropy, and sums over micro-batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.core.mesh import MeshSpec, make_mesh, place
from klear_jax.model import params as params_lib
from klear_jax.model import qwen3
from klear_jax.model.config import ModelConfig
from klear_jax.rl.loss import KL_ESTIMATORS, PLAIN, make_policy_loss, policy_loss
from klear_jax.rl.objective import Objective
from klear_jax.rl.surrogates import SURROGATES, Clip, gradient_weight
from klear_jax.train.step import loss_and_gradient

ROWS, TOKENS = 4, 20
SEGMENTS = np.repeat([1, 2, 3, 0], [7, 5, 5, 3])
"""Of every row; the first token of a segment belongs to the prompt."""


def case(seed=0, **changes):
    """(log-probs, batch): three responses a row; changes replace fields of the batch."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, TOKENS)
    segments = np.broadcast_to(SEGMENTS, shape)
    first = np.append(True, np.diff(SEGMENTS) != 0)
    mask = np.broadcast_to((SEGMENTS > 0) & ~first, shape)
    logprobs = -rng.exponential(size=shape)
    old = logprobs + rng.normal(scale=0.3, size=shape)
    fields = {
        "tokens": rng.integers(0, 31, shape), "targets": rng.integers(0, 31, shape),
        "positions": np.broadcast_to(np.r_[:7, :5, :5, :3], shape), "segments": segments,
        "mask": mask,
        "loss_weights": mask / mask.sum(),
        "positive_weights": np.zeros(shape),
        "advantages": mask * rng.normal(size=shape),
        "old_logprobs": old, "old_entropy": rng.uniform(0.5, 2.0, shape),
        "reference_logprobs": old + rng.normal(scale=0.3, size=shape),
        "sampler_logprobs": old + rng.normal(-0.2, 0.8, size=shape),
    }  # fmt: skip
    fields |= changes
    batch = RolloutBatch(
        **{k: jnp.asarray(v, np.float32 if v.dtype.kind == "f" else None)
           for k, v in fields.items()}
    )  # fmt: skip
    return jnp.asarray(logprobs, jnp.float32), batch


def outcome(logprobs, batch, clip, objective, entropy=None):
    """Loss, its gradients by log-prob and by entropy, and metrics."""
    entropy = batch.old_entropy if entropy is None else jnp.asarray(entropy, jnp.float32)

    def loss(logprobs, entropy):
        return policy_loss(logprobs, entropy, batch, clip=clip, objective=objective)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, metrics), (by_logprob, by_entropy) = run(logprobs, entropy)
    summary = {k: np.asarray(v) for k, v in metrics.summarise().items()}
    return float(value), np.asarray(by_logprob), np.asarray(by_entropy), summary


def spans():
    """(row, cells) of every response."""
    for row in range(ROWS):
        for segment in (1, 2, 3):
            yield row, np.flatnonzero(segment == SEGMENTS)[1:]


# --- the record -------------------------------------------------------------------------------


def test_defaults_are_the_paper():
    assert dataclasses.asdict(Objective()) == {
        "advantage": "group_normalised", "aggregation": "token_mean", "old_logprobs": "trainer",
        "positive_nll": 0.1,
        "positive_threshold": 1.0, "kl_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0,
        "tis": "none", "tis_cap": 2.0, "erc": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positive_nll": -0.1}, r"positive_nll -0\.1: must be >= 0"),
        ({"positive_nll": np.nan}, "positive_nll nan: must be >= 0 and finite"),
        ({"kl_coef": -1.0}, r"kl_coef -1\.0: must be >= 0"),
        ({"kl_coef": np.inf}, "kl_coef inf"),
        ({"entropy_coef": -0.1}, r"entropy_coef -0\.1"),
        ({"kl_estimator": "k1"}, "gradient of expectation 0.*use k2 or k3"),
        ({"kl_estimator": "k1", "kl_coef": 0.1}, "gradient of expectation 0"),
        ({"tis": "token", "tis_cap": 0.0}, r"tis_cap 0\.0 must be >= 1"),
        ({"tis": "token", "tis_cap": np.nan}, "tis_cap nan"),
        ({"old_logprobs": "sampler", "tis": "token"}, "leaves tis token nothing to correct"),
        ({"old_logprobs": "sampler", "erc": (0.9, 1.1)}, "without old entropies"),
        ({"erc": (1.0, 1.05)}, "two numbers around 1"),
        ({"erc": (0.95, 1.0)}, "two numbers around 1"),
        ({"erc": (-0.1, 1.05)}, "two numbers around 1"),
        ({"erc": (np.nan, 1.05)}, "two numbers around 1"),
        ({"positive_threshold": np.nan}, "positive_threshold is no number"),
        ({"kl_estimator": "k2"}, r"kl_estimator k2 has no effect while kl_coef is 0\.0"),
        ({"tis_cap": 3.0}, r"tis_cap 3\.0 has no effect while tis is none"),
        ({"positive_nll": 0.0, "positive_threshold": 0.5}, "no effect while positive_nll is"),
    ],
)
def test_what_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Objective(**fields)


# --- truncated importance sampling ------------------------------------------------------------


def tis_weight(batch, kind, cap):
    """The weight in float64, by a loop over responses."""
    gap = np.asarray(batch.old_logprobs, np.float64) - np.asarray(batch.sampler_logprobs)
    total = np.zeros(gap.shape)
    for row, cells in spans():
        total[row, cells] = gap[row, cells].sum() if kind == "sequence" else gap[row, cells]
    return np.minimum(np.exp(total), cap)


@pytest.mark.parametrize("cap", [2.0, 3.01])
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_tis_weights_the_surrogate(kind, cap):
    """Detached: value and gradient of every token times the weight, which is that of numpy."""
    logprobs, batch = case()
    weight, mask = tis_weight(batch, kind, cap), np.asarray(batch.mask)
    loss, gradient, _, metrics = outcome(logprobs, batch, Clip(), Objective(tis=kind, tis_cap=cap))
    _, plain, _, _ = outcome(logprobs, batch, Clip(), PLAIN)
    np.testing.assert_allclose(gradient, weight * plain, rtol=2e-5, atol=1e-9)
    values = SURROGATES["gppo"](logprobs - batch.old_logprobs, batch.advantages, Clip())
    expected = -(np.asarray(batch.loss_weights) * weight * np.asarray(values))[mask].sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["tis/weight"], weight[mask].mean(), rtol=1e-5)
    # 3.01 is a cap that the exponential of its own logarithm does not reach in float32.
    capped = (weight == cap)[mask].mean()
    assert 0 < capped < 1
    np.testing.assert_allclose(metrics["tis/capped"], capped, rtol=1e-6)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_tis_is_one_where_sampler_and_trainer_agree(kind):
    logprobs, batch = case()
    batch = dataclasses.replace(batch, sampler_logprobs=batch.old_logprobs)
    with_tis = outcome(logprobs, batch, Clip(), Objective(tis=kind))
    plain = outcome(logprobs, batch, Clip(), PLAIN)
    assert with_tis[0] == plain[0]
    np.testing.assert_array_equal(with_tis[1], plain[1])
    assert (with_tis[3]["tis/weight"], with_tis[3]["tis/capped"]) == (1, 0)


def test_a_token_that_the_sampler_found_impossible_has_the_cap():
    """prime-rl#2972: trainer -2, sampler -91; and the other way round the weight is 0."""
    for sampled, expected in ((-91.0, 2.0), (-2.0 + 200.0, 0.0)):
        logprobs, batch = case()
        batch = dataclasses.replace(
            batch, sampler_logprobs=jnp.full_like(logprobs, sampled),
            old_logprobs=jnp.full_like(logprobs, -2.0),
        )  # fmt: skip
        loss, gradient, _, metrics = outcome(logprobs, batch, Clip(), Objective(tis="token"))
        assert np.isfinite(loss)
        assert np.isfinite(gradient).all()
        assert metrics["tis/weight"] == expected


# --- entropy-ratio clipping -------------------------------------------------------------------

ERC = Objective(erc=(0.95, 1.05))


def test_erc_keeps_all_at_the_first_update():
    """The entropy is then that of the old policy, also where that is 0."""
    for entropy in (0.0, 1e-7, 3.0):
        logprobs, batch = case(old_entropy=np.full((ROWS, TOKENS), entropy))
        with_erc, plain = (outcome(logprobs, batch, Clip(), o) for o in (ERC, PLAIN))
        assert with_erc[0] == plain[0]
        np.testing.assert_array_equal(with_erc[1], plain[1])
        assert with_erc[3]["erc/dropped"] == 0


@pytest.mark.parametrize("variant", SURROGATES)
def test_erc_weight_is_an_indicator_times_that_of_the_variant(variant):
    """A dropped token has its value in the loss and no gradient, and it stays in the count."""
    logprobs, batch = case()
    mask = np.asarray(batch.mask)
    ratio = np.random.default_rng(3).choice([0.5, 0.94, 0.96, 1.0, 1.04, 1.06, 2.0], mask.shape)
    entropy = ratio * np.asarray(batch.old_entropy)
    clip = Clip(variant=variant)
    loss, gradient, by_entropy, metrics = outcome(logprobs, batch, clip, ERC, entropy)
    plain_loss = outcome(logprobs, batch, clip, PLAIN, entropy)[0]
    assert loss == plain_loss
    kept = (ratio > 0.95) & (ratio < 1.05)
    advantages = np.asarray(batch.advantages)
    weight = gradient_weight(variant, np.asarray(logprobs - batch.old_logprobs), advantages, clip)
    expected = np.where(mask & kept, -weight * advantages * np.asarray(batch.loss_weights), 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-9)
    np.testing.assert_array_equal(by_entropy, 0)
    np.testing.assert_allclose(metrics["erc/dropped"], (~kept)[mask].mean(), rtol=1e-6)
    assert metrics["tokens/trained"] == mask.sum()


@pytest.mark.parametrize("level", ["sequence", "sequence_token", "geometric"])
def test_erc_drops_a_token_at_every_level(level):
    """Also where the term of one token holds the gradient of all tokens of its response."""
    logprobs, batch = case()
    clip = Clip(variant="unclipped", level=level)
    entropy = np.asarray(batch.old_entropy).copy()
    entropy[:, 3] *= 2
    loss, gradient, _, _ = outcome(logprobs, batch, clip, ERC, entropy)
    plain_loss, plain, _, _ = outcome(logprobs, batch, clip, PLAIN, entropy)
    assert loss == plain_loss
    np.testing.assert_array_equal(gradient[:, 3], 0)
    others = np.arange(TOKENS) != 3
    np.testing.assert_allclose(gradient[:, others], plain[:, others], rtol=1e-6, atol=1e-10)
    assert plain[:, 3].any()


# --- KL and entropy ---------------------------------------------------------------------------


def one_by_one(estimator):
    """An estimator of one number."""
    return lambda distance: estimator(jnp.full((1, 1), distance))[0, 0]


@pytest.mark.parametrize(("name", "value", "slope"), [("k2", 0.125, 0.5), ("k3", 0.10653, 0.39347)])
def test_kl_by_hand(name, value, slope):
    """log p = -1, reference -1.5; d/d log p, and the same through the loss of one token."""
    estimate = one_by_one(KL_ESTIMATORS[name])
    got, pull = jax.value_and_grad(lambda logp: estimate(-1.5 - logp))(-1.0)
    assert float(got) == pytest.approx(value, abs=5e-6)
    assert float(pull) == pytest.approx(slope, abs=5e-6)
    ones = np.ones((ROWS, TOKENS))
    _, batch = case(reference_logprobs=-1.5 * ones, advantages=0 * ones, old_logprobs=-ones)
    objective = Objective(kl_coef=0.4, kl_estimator=name)
    loss, gradient, _, metrics = outcome(jnp.full(ones.shape, -1.0), batch, Clip(), objective)
    assert loss == pytest.approx(0.4 * value, abs=5e-6)
    expected = 0.4 * slope * np.asarray(batch.loss_weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)
    assert metrics["kl_reference"] == pytest.approx(value, abs=5e-6)


def test_k1_pulls_nowhere_on_average():
    """Over a softmax policy the mean gradient of k1 is 0; that of k2 is the gradient of the KL."""
    logits, reference = np.array([0.3, -1.0, 2.0, 0.0]), np.array([-0.5, 0.2, 1.0, -2.0])
    logp, target = (x - np.log(np.exp(x).sum()) for x in (logits, reference))
    policy = np.exp(logp)

    def mean_gradient(estimator):
        """By the logits: the slope of each token's estimate times d log p = one-hot - policy."""
        distance = jnp.asarray((target - logp)[None], jnp.float32)
        slopes = -np.asarray(jax.grad(lambda d: estimator(d).sum())(distance))[0]
        return (policy * slopes) @ (np.eye(4) - policy)

    np.testing.assert_allclose(mean_gradient(lambda distance: -distance), 0, atol=1e-7)
    exact = policy * (logp - target - policy @ (logp - target))
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(mean_gradient(KL_ESTIMATORS["k2"]), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("distance", [-1000.0, -30.0, 30.0, 1000.0])
def test_kl_stays_finite(name, distance):
    value, slope = jax.value_and_grad(one_by_one(KL_ESTIMATORS[name]))(distance)
    assert np.isfinite(value)
    assert np.isfinite(slope)
    assert float(value) >= 0
    if distance < 0:  # the policy is far above the reference: it must be pulled down
        assert float(slope) <= -1


def test_entropy_bonus_is_the_gradient_of_the_entropy():
    """Through `make_policy_loss`: loss difference and gradient against autodiff of the entropy."""
    batch = case(advantages=np.zeros((ROWS, TOKENS)))[1]
    params = params_lib.init(MODEL, 0)

    def loss(objective):
        return lambda p: make_policy_loss(MODEL, clip=Clip(), objective=objective)(p, batch)[0]

    def entropy(params):
        hidden = qwen3.forward(params, batch.tokens, batch.positions, batch.segments, cfg=MODEL)
        logits = (hidden @ qwen3.unembed(params))[..., : MODEL.live_vocab]
        logp = jax.nn.log_softmax(logits)
        return (batch.loss_weights * -(jnp.exp(logp) * logp).sum(-1)).sum()

    functions = (loss(PLAIN), loss(Objective(entropy_coef=0.5)), entropy)
    both = jax.jit(lambda p: [jax.value_and_grad(f)(p) for f in functions])
    (plain, _), (value, gradient), (expected, slope) = both(params)
    np.testing.assert_allclose(value, plain - 0.5 * expected, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(got, -0.5 * want, rtol=1e-3, atol=1e-6)


# --- micro-batches and meshes -----------------------------------------------------------------

MODEL = ModelConfig(
    layers=1, d_model=16, q_heads=2, kv_heads=2, head_dim=8, d_ff=16, vocab=32, live_vocab=31,
    tied=True, rope_theta=1e4, max_positions=64, init_range=0.05, dtype="float32",
)  # fmt: skip
EVERYTHING = Objective(
    kl_coef=0.2, entropy_coef=0.03, tis="sequence", tis_cap=1.5, erc=(0.6, 1.4)
)  # fmt: skip
GSPO = Clip(variant="gppo", level="sequence")


def full_batch():
    rng = np.random.default_rng(4)
    near = lambda scale: rng.normal(-3.4, scale, (ROWS, TOKENS))
    return case(
        old_logprobs=near(0.4), reference_logprobs=near(0.4), sampler_logprobs=near(0.4),
        old_entropy=rng.uniform(1.5, 4.0, (ROWS, TOKENS)),
        positive_weights=np.where(SEGMENTS == 2, 1e-3, 0) * np.ones((ROWS, 1)),
    )[1]  # fmt: skip


@functools.cache
def run_in(pieces, spec=None):
    batch = jax.tree.map(
        lambda x: np.asarray(x).reshape(pieces, ROWS // pieces, TOKENS), full_batch()
    )
    loss = make_policy_loss(MODEL, clip=GSPO, objective=EVERYTHING)
    compute = jax.jit(functools.partial(loss_and_gradient, loss))
    if spec is None:
        (value, metrics), gradient = compute(params_lib.init(MODEL, 0), batch, pieces)
    else:
        mesh = make_mesh(MeshSpec.parse(spec))
        with jax.set_mesh(mesh):
            placed = place(batch, mesh, None, "batch", "seq")
            (value, metrics), gradient = compute(params_lib.init(MODEL, 0, mesh), placed, pieces)
    return jax.device_get((value, metrics.summarise(), gradient))


@pytest.mark.parametrize(
    ("pieces", "spec"),
    [(2, None), (4, None), pytest.param(2, "fsdp:2,tensor:2", marks=pytest.mark.slow)],
)
def test_every_term_adds_up(pieces, spec):
    """KL, TIS, ERC, entropy, GSPO and the NLL term: the same in 1, 2 or 4 pieces and on a mesh."""
    value, metrics, gradient = run_in(pieces, spec)
    expected, expected_metrics, expected_gradient = run_in(1)
    for name in ("tis/capped", "erc/dropped", "clip", "kl_reference"):
        assert 0 < expected_metrics[name] < 1, name
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for name, want in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], want, rtol=2e-6, atol=1e-6, err_msg=name)
    for got, want in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
