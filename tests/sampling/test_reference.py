# SPDX-License-Identifier: Apache-2.0
"""The sampler against a slow reference, which runs a forward pass over the whole sequence for each
token, and one completion of 32,768 tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.model import params as params_lib
from klear_jax.model import qwen3
from klear_jax.model.config import QWEN3
from klear_jax.sampling import engine as engine_lib
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.draw import Truncation, draw
from klear_jax.sampling.request import Request
from klear_jax.sampling.sampler import Sampler

CFG = QWEN3["tiny"]
SEED = 11
LENGTH = 40
STRINGS = ("ab", "wxy", "q")
WIDE = EngineConfig(
    slots=16, length=LENGTH, stop_ids=tuple(range(3, 263, 20)), page=8, steps=8, prefill_rows=4
)
TIGHT = dataclasses.replace(WIDE, slots=5, pages=7, truncation=Truncation(top_k=3))
"""Pages for one full sequence and a little more; only three tokens may be drawn."""


def decode(ids):
    """Every token is one letter."""
    return "".join(chr(ord("a") + int(i) % 26) for i in ids)


def random_requests(count, seed):
    """Prompts of 1 to 20 tokens, several sharing one, limits of 1 to 20, mixed temperatures; some
    have stop strings."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, 263, rng.integers(1, 21)).tolist()) for _ in range(count // 2)]
    return [
        Request(
            f"r{number}",
            prompts[rng.integers(len(prompts))],
            int(rng.integers(2**32)),
            int(rng.integers(1, 21)),
            float(rng.choice([0.0, 0.6, 1.0, 1.4])),
            STRINGS if rng.random() < 0.4 else (),
        )
        for number in range(count)
    ]


@functools.partial(jax.jit, static_argnames="truncation")
def reference_step(params, tokens, lengths, temperatures, sample_ids, truncation):
    """The next token of each row by a forward pass over all of it."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    hidden = qwen3.forward(params, tokens, positions, segments, cfg=CFG)
    last = hidden[jnp.arange(tokens.shape[0]), lengths - 1]
    noise = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(SEED), sample_ids)
    keys = jax.vmap(jax.random.fold_in)(noise, lengths)
    drawn = draw(
        last @ qwen3.unembed(params), keys, temperatures,
        live_vocab=CFG.live_vocab, truncation=truncation,
    )  # fmt: skip
    return drawn.tokens, drawn.logprobs


def ends(request, tokens):
    """Whether the last of `tokens` ends the completion."""
    text = decode(tokens)
    return (
        tokens[-1] in WIDE.stop_ids
        or len(tokens) == request.max_tokens
        or any(string in text for string in request.stop_strings)
    )


def reference_complete(params, requests, truncation):
    """(tokens, logprobs) of each request, one token at a time."""
    tokens = np.zeros((len(requests), LENGTH), np.int32)
    lengths = np.array([len(r.prompt) for r in requests], np.int32)
    for row, request in zip(tokens, requests, strict=True):
        row[: len(request.prompt)] = request.prompt
    temperatures = np.array([r.temperature for r in requests], np.float32)
    sample_ids = np.array([r.sample_id for r in requests], np.uint32)
    results = [([], []) for _ in requests]
    going = set(range(len(requests)))
    while going:
        drawn, logprobs = jax.device_get(
            reference_step(params, tokens, lengths, temperatures, sample_ids, truncation)
        )
        for i in sorted(going):
            tokens[i, lengths[i]] = drawn[i]
            lengths[i] += 1
            results[i][0].append(int(drawn[i]))
            results[i][1].append(float(logprobs[i]))
            if ends(requests[i], results[i][0]):
                going.remove(i)
    return results


def cancelling(sampler, requests, share):
    """Completions by id, where about `share` of the requests are cancelled while others finish."""
    rng = np.random.default_rng(0)
    names = [request.id for request in requests]
    got = {}
    for completion in sampler.sample(requests):
        assert completion.id not in got
        got[completion.id] = completion
        if rng.random() < share:
            sampler.cancel(str(rng.choice(names)))
    return got


@pytest.mark.parametrize("config", [WIDE, TIGHT], ids=["wide", "tight"])
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_requests_equal_the_slow_reference(params, pools, config, count):
    """Prompts, limits, stop strings and cancellations; pages that run out. Every completion is the
    reference's, a cancelled one its beginning, and every page is free in the end."""
    requests = random_requests(count, seed=3)
    sampler = Sampler(params, CFG, config, seed=SEED, decode=decode)
    got = cancelling(sampler, requests, share=0.15)
    assert got.keys() == {request.id for request in requests}
    (pool,) = pools
    assert pool.whole
    if config is TIGHT:
        assert sampler.counts.set_aside > 0
    endings = {"stop": 0, "length": 0, "cancelled": 0}
    for start in range(0, count, 100):
        chunk = requests[start : start + 100]
        expected = reference_complete(params, chunk, config.truncation)
        for request, (tokens, logprobs) in zip(chunk, expected, strict=True):
            done = got[request.id]
            kept = len(done.tokens)
            endings[done.stop] += 1
            assert kept == len(tokens) or done.stop == "cancelled"
            assert done.tokens.tolist() == tokens[:kept], request
            np.testing.assert_allclose(done.logprobs, logprobs[:kept], rtol=0, atol=2e-5)
    assert min(endings.values()) >= count // 50


def test_requests_wait_for_pages(params, pools):
    """12 pages for five slots of five: long requests take turns, all finish."""
    tight = dataclasses.replace(TIGHT, stop_ids=(), pages=12)
    long = [Request(f"r{n}", (n + 1,) * 20, n, 20) for n in range(8)]
    assert all(len(c.tokens) == 20 for c in Sampler(params, CFG, tight).sample(long))
    assert 2 <= pools[0].most_slots <= 4
    short = [Request(f"r{n}", (n + 1,) * 3, n, 5) for n in range(20)]
    assert all(len(c.tokens) == 5 for c in Sampler(params, CFG, tight).sample(short))
    assert pools[1].most_slots == 5
    assert pools[0].whole
    assert pools[1].whole


@pytest.mark.slow
def test_a_completion_of_32768_tokens():
    """In the memory that is stated: the cache (2 x layers x KV heads x head_dim x 4 bytes a token),
    as much again at most for all else; and its last log-probs are the trainer's."""
    total, prompt = 32768, 64
    cfg = dataclasses.replace(CFG, layers=2)
    params = params_lib.init(cfg, 0)
    engine = EngineConfig(slots=1, length=total + prompt, page=32, steps=512)
    cache = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * 4 * engine.pool_pages * engine.page
    assert cache <= 26 * 2**20
    state = jax.eval_shape(lambda: engine_lib.init_state(cfg, engine))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    # The pool is whole chunks of attention, 1,024 tokens each.
    assert cache <= held <= cache + 1024 * cache // (engine.pool_pages * engine.page) + 2**16
    sampler = Sampler(params, cfg, engine, seed=SEED)
    first = tuple(np.random.default_rng(0).integers(0, 263, prompt).tolist())
    (done,) = sampler.sample([Request("long", first, 0, total)])
    assert len(done.tokens) == total
    assert done.stop == "length"
    assert sampler.counts.dispatches == total // engine.steps
    # Teacher-forced by the same engine from a prompt of all but the last 20 tokens, whose prefill
    # is a forward pass of the trainer's kind: equal noise, so equal tokens.
    feed = (*first, *done.tokens[:-20].tolist())
    (again,) = sampler.sample([Request("again", feed, 0, 20)])
    assert again.tokens.tolist() == done.tokens[-20:].tolist()
    np.testing.assert_allclose(again.logprobs, done.logprobs[-20:], rtol=0, atol=1e-5)
