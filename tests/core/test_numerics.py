# SPDX-License-Identifier: Apache-2.0
"""`linear_logprob` against dense float64, its gradients, its layouts and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.mesh import MeshSpec, make_mesh, place
from klear_jax.core.numerics import linear_logprob, masked_sum

B, T, D, V = 2, 8, 6, 24
LIVE = 21


@pytest.fixture(scope="module")
def case():
    """Hidden states, head and targets of live tokens; logits up to about 8."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(0, 1.2, (B, T, D)).astype(np.float32)
    head = rng.normal(0, 1.0, (D, V)).astype(np.float32)
    targets = rng.integers(0, LIVE, (B, T)).astype(np.int32)
    targets[0, :2] = [0, LIVE - 1]
    return tuple(map(jnp.asarray, (hidden, head, targets)))


def oracle(hidden, head, targets, temperature, live):
    """Log-probability and entropy, dense numpy float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)[:, :live] / temperature
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logprobs, np.asarray(targets)[..., None], -1)[..., 0]
    return chosen, -(np.exp(logprobs) * logprobs).sum(-1)


def dense(hidden, head, targets, temperature=1.0):
    """The same in plain JAX, for gradients."""
    logits = (hidden @ head)[..., :LIVE] / temperature
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
    return chosen, -(jnp.exp(logprobs) * logprobs).sum(-1)


def gradients(function, hidden, head, targets):
    """Of a mix of both results that differs from token to token."""
    weights = jax.device_put(
        np.sin(np.arange(B * T, dtype=np.float32)).reshape(B, T), targets.sharding
    )

    def loss(hidden, head):
        logprobs, entropy = function(hidden, head, targets)
        return (weights * logprobs).sum() + (weights**2 * entropy).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, head)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("chunk", [None, 1, 5, 16, 100])
def test_values(case, chunk, temperature):
    got = linear_logprob(*case, live_vocab=LIVE, temperature=temperature, chunk=chunk)
    for ours, exact in zip(got, oracle(*case, temperature, LIVE), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, exact, atol=5e-6)


@pytest.mark.parametrize(("chunk", "temperature"), [(None, 1.0), (5, 0.5)])
def test_gradients(case, chunk, temperature):
    ours = functools.partial(linear_logprob, live_vocab=LIVE, temperature=temperature, chunk=chunk)
    got = gradients(ours, *case)
    want = gradients(functools.partial(dense, temperature=temperature), *case)
    for one, other in zip(got, want, strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert not got[1][:, LIVE:].any()


@pytest.mark.parametrize("spec", ["tensor:2", "fsdp:2", "seq:2"])
def test_on_a_mesh(case, spec):
    """Same values and gradients; the vocabulary of tensor:2 has its dead rows on one device."""
    ours = functools.partial(linear_logprob, live_vocab=LIVE, chunk=3)
    mesh = make_mesh(MeshSpec.parse(spec), jax.devices()[:2])
    hidden, head, targets = case
    placed = (
        place(hidden, mesh, "batch", "seq", None),
        place(head, mesh, "embed", "vocab"),
        place(targets, mesh, "batch", "seq"),
    )
    with jax.set_mesh(mesh):
        values = jax.jit(ours)(*placed)
        got = gradients(ours, *placed)
    for one, exact in zip(values, oracle(*case, 1.0, LIVE), strict=True):
        np.testing.assert_allclose(one, exact, atol=5e-6)
    for one, other in zip(got, gradients(dense, *case), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("spec", [None, "fsdp:2", "tensor:2"])
def test_only_needed_tokens(case, spec):
    """Needed tokens have the values and gradients of all; a NaN elsewhere does not count."""
    hidden, head, targets = case
    needed = jnp.asarray(np.random.default_rng(1).random((B, T)) < 0.3)
    spoiled = jnp.where(needed[..., None], hidden, jnp.nan)

    def loss(function, hidden, head, targets, needed):
        results = function(hidden, head, targets)
        return sum(jnp.where(needed, x, 0.0).sum() for x in results)

    dense_loss = functools.partial(loss, dense)
    exact = jax.grad(dense_loss, argnums=(0, 1))(hidden, head, targets, needed)
    arguments = (spoiled, head, targets, needed)
    mesh = make_mesh(MeshSpec.parse(spec or "data:1"), devices=jax.devices()[: 2 if spec else 1])
    with jax.set_mesh(mesh):
        hidden, targets, needed = place((spoiled, targets, needed), mesh, "batch", "seq")
        head = place(head, mesh, None, "vocab")
        ours = functools.partial(linear_logprob, live_vocab=LIVE, needed=needed, chunk=2)
        got = jax.jit(ours)(hidden, head, targets)
        grads = jax.jit(jax.grad(functools.partial(loss, ours), argnums=(0, 1)))(
            hidden, head, targets, needed
        )
    for x in got:
        assert (np.asarray(x)[~arguments[3]] == 0).all()
    for x, y in zip(got, oracle(*case, 1.0, LIVE), strict=True):
        np.testing.assert_allclose(np.asarray(x)[arguments[3]], y[arguments[3]], atol=5e-6)
    for x, y in zip(grads, exact, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("spec", ["fsdp:2,tensor:2", "data:2,tensor:2", "seq:2,tensor:2", "fsdp:4"])
def test_devices_may_skip_different_chunks(spec):
    """No device waits in a skipped chunk for another: the head's gradient is summed outside.

    Row 0 has many needed tokens, row 1 one and the others none.
    """
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(4, 16, 8)).astype(np.float32)
    head = rng.normal(size=(8, 24)).astype(np.float32)
    targets = rng.integers(0, LIVE, (4, 16)).astype(np.int32)
    needed = np.zeros((4, 16), bool)
    needed[0, :9] = needed[1, 3] = True

    def loss(hidden, head, targets, needed):
        results = linear_logprob(hidden, head, targets, live_vocab=LIVE, needed=needed, chunk=4)
        return sum(x.sum() for x in results)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    exact = gradient(hidden, head, targets, needed)
    mesh = make_mesh(MeshSpec.parse(spec))
    with jax.set_mesh(mesh):
        rows = place((targets, needed), mesh, "batch", "seq")
        placed = place(hidden, mesh, "batch", "seq", None), place(head, mesh, "embed", "vocab")
        got = gradient(*placed, *rows)
    for x, y in zip(got, exact, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


def test_chunks_of_tokens_that_are_not_needed_are_skipped(monkeypatch):
    """Counted by the chunks that reach the matrix product."""
    seen = []
    width, vocab, tokens, chunk = 4, 8, 64, 8
    needed = jnp.zeros((1, tokens), bool).at[0, 5:60:5].set(True)

    def spy(x):
        jax.debug.callback(lambda _: seen.append(1), x.sum())
        return x

    product = jnp.matmul
    monkeypatch.setattr(jnp, "matmul", lambda a, b, **kwargs: spy(product(a, b, **kwargs)))
    linear_logprob(
        jnp.ones((1, tokens, width)), jnp.ones((width, vocab)), jnp.zeros((1, tokens), int),
        live_vocab=vocab, needed=needed, chunk=chunk,
    )  # fmt: skip
    jax.effects_barrier()
    assert int(needed.sum()) == 11
    assert len(seen) == 2


def test_dead_target(case):
    """A row that no token has: probability 0, and no harm to its neighbours."""
    hidden, head, targets = case
    dead = targets.at[0, 3].set(LIVE)
    logprobs, entropy = linear_logprob(hidden, head, dead, live_vocab=LIVE)
    assert logprobs[0, 3] == -jnp.inf
    exact = oracle(*case, 1.0, LIVE)
    others = np.ones((B, T), bool)
    others[0, 3] = False
    np.testing.assert_allclose(logprobs[others], exact[0][others], atol=5e-6)
    np.testing.assert_allclose(entropy, exact[1], atol=5e-6)

    def loss(function, hidden, head, targets):
        logprobs, entropy = function(hidden, head, targets)
        return masked_sum(logprobs, jnp.asarray(others)) + entropy.sum()

    grads = [
        jax.grad(functools.partial(loss, f), argnums=(0, 1))(hidden, head, ids)
        for f, ids in ((functools.partial(linear_logprob, live_vocab=LIVE), dead), (dense, targets))
    ]
    for one, other in zip(*grads, strict=True):
        assert bool(jnp.isfinite(one).all())
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_temperature_divides_logits():
    """Logits [2, 0] at T = 0.5: ln(1 / (1 + e^-4)); -0.12693 without T, -0.25386 on logprobs."""
    hidden, head = jnp.array([[[1.0]]]), jnp.array([[2.0, 0.0]])
    logprobs, _ = linear_logprob(hidden, head, jnp.array([[0]]), live_vocab=2, temperature=0.5)
    assert float(logprobs[0, 0]) == pytest.approx(-0.01815, abs=5e-6)


def test_extreme_logits_stay_finite():
    """Logits of +-1e4: a sure choice has entropy 0, and its opposite a finite log-probability."""
    hidden, head = jnp.array([[[1e4], [-1e4]]]), jnp.array([[1.0, -1.0]])
    run = lambda h: linear_logprob(h, head, jnp.array([[0, 0]]), live_vocab=2)
    np.testing.assert_array_equal(run(hidden)[0], [[0.0, -2e4]])
    np.testing.assert_array_equal(run(hidden)[1], [[0.0, 0.0]])
    grad = jax.grad(lambda h: sum(x.sum() for x in run(h)))(hidden)
    assert bool(jnp.isfinite(grad).all())


def test_bfloat16_hidden_states(case):
    """Products in bfloat16, sums and softmax in float32."""
    hidden, head, targets = case
    half = hidden.astype(jnp.bfloat16)
    got = linear_logprob(half, head, targets, live_vocab=LIVE)
    rounded = np.asarray(head.astype(jnp.bfloat16), np.float64)
    exact = oracle(np.asarray(half, np.float64), rounded, targets, 1.0, LIVE)
    for ours, want in zip(got, exact, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, want, atol=5e-5)


def temporary_bytes(tokens: int, vocab: int, width: int, chunk: int) -> int:
    """Scratch memory of the compiled value and gradient; nothing is allocated."""

    def loss(hidden, head, targets):
        logprobs, entropy = linear_logprob(hidden, head, targets, live_vocab=vocab, chunk=chunk)
        return logprobs.sum() + entropy.sum()

    shapes = (
        jax.ShapeDtypeStruct((1, tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    )
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_no_tensor_of_all_logits():
    """Scratch stays under one logits tensor, of many chunks, and does not grow with it."""
    vocab, width, chunk = 32_768, 8, 32
    few, many = (temporary_bytes(n, vocab, width, chunk) for n in (512, 1024))
    logits = 4 * 512 * vocab
    print(f"scratch {few / 2**20:.1f} and {many / 2**20:.1f} MiB, logits {logits / 2**20:.1f} MiB")
    assert few < logits / 2
    assert many < 2.2 * few
    assert many < logits


def test_masked_sum_ignores_what_is_masked():
    x = jnp.array([[1.0, jnp.nan, jnp.inf, 4.0]])
    mask = jnp.array([[True, False, False, True]])
    assert float(masked_sum(x, mask)) == 5.0
    grad = jax.grad(lambda x: masked_sum(x * x, mask))(x)
    np.testing.assert_array_equal(grad[mask], [2.0, 8.0])
