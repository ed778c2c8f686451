# SPDX-License-Identifier: Apache-2.0
"""Faults of other systems that concern sampling: noise, log-probs and their distribution.

Those of tokens and ends (tunix, dynamo#14302, Qwen3#927, verl#1015) are in
tests/rl/test_faults_tokens.py.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.numerics import linear_logprob
from klear_jax.data.packing import TokenSequence, pack
from klear_jax.data.problems import Message, Problem
from klear_jax.model import qwen3
from klear_jax.model.config import QWEN3
from klear_jax.rl.rollout import make_requests
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.draw import Truncation
from klear_jax.sampling.sampler import Sampler

CFG = QWEN3["tiny"]
ENGINE = EngineConfig(slots=8, length=64, page=8, steps=8, prefill_rows=4)


def encode(problem):
    return tuple(problem.messages[0].content.encode())


def group_requests(step, temperature=1.0, samples=8):
    problems = [
        Problem(id=f"p{n}", messages=(Message("user", f"question {n}"),), answer="1")
        for n in range(2)
    ]
    return make_requests(
        problems, encode, step=step, samples=samples, max_tokens=12, temperature=temperature
    )


def complete(params, requests, seed=0, **changes):
    engine = dataclasses.replace(ENGINE, **changes)
    return {c.id: c for c in Sampler(params, CFG, engine, seed=seed).sample(requests)}


def recomputed(params, requests, completions, temperature, cfg=CFG):
    """What the trainer's forward pass says of the captured log-probs: (captured, recomputed)."""
    done = [(request.prompt, completions[request.id]) for request in requests]
    rows = pack(
        [TokenSequence(np.array([*p, *c.tokens], np.int32), len(p)) for p, c in done],
        row=64,
        per_token={"captured": [c.logprobs for _, c in done]},
    )
    hidden = jax.jit(qwen3.forward, static_argnames="cfg")(
        params, rows.tokens, rows.positions, rows.segments, cfg=cfg
    )
    logprobs, _ = linear_logprob(
        hidden, qwen3.unembed(params), jnp.asarray(rows.targets), live_vocab=cfg.live_vocab,
        temperature=temperature,
    )  # fmt: skip
    return rows.per_token["captured"][rows.mask], np.asarray(logprobs)[rows.mask]


def test_verl_3126_same_seed_same_ids(params):
    """Two runs agree, whatever the batch; a group's members, two steps and two seeds do not."""
    first = complete(params, group_requests(1))
    again = complete(params, group_requests(1))
    assert {k: c.tokens.tolist() for k, c in first.items()} == {
        k: c.tokens.tolist() for k, c in again.items()
    }
    for request in group_requests(1):
        (alone,) = complete(params, [request], slots=1).values()
        assert alone.tokens.tolist() == first[request.id].tokens.tolist()
    for one, other in itertools.combinations(first.values(), 2):
        assert one.tokens.tolist() != other.tokens.tolist()
    for changed in (complete(params, group_requests(2)), complete(params, group_requests(1), 1)):
        assert changed.keys() == first.keys()
        assert all(changed[k].tokens.tolist() != first[k].tokens.tolist() for k in first)


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_trl_4159_captured_logprobs_are_those_of_divided_logits(params, temperature):
    requests = group_requests(1, temperature)
    completions = complete(params, requests)
    captured, expected = recomputed(params, requests, completions, temperature)
    np.testing.assert_allclose(captured, expected, rtol=0, atol=1e-5)
    _, plain = recomputed(params, requests, completions, 1.0)
    assert np.abs(captured - plain).max() > 0.5
    assert np.abs(captured - plain / temperature).max() > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"truncation": Truncation(top_k=5)},
        {"truncation": Truncation(top_p=0.7)},
        {"truncation": Truncation(min_p=0.1), "repetition_penalty": 1.3},
    ],
    ids=["top_k", "top_p", "min_p and penalty"],
)
def test_verl_6829_ratio_of_an_unchanged_policy_is_1_under_truncation(params, changes):
    """The captured log-prob is over the whole vocabulary, as the trainer's is; that of the draw,
    from which it differs much, stands beside it."""
    requests = group_requests(1, 0.8)
    completions = complete(params, requests, **changes)
    captured, expected = recomputed(params, requests, completions, 0.8)
    assert np.abs(np.exp(expected - captured) - 1).max() < 1e-5
    drawn = np.concatenate([completions[r.id].drawn_logprobs for r in requests])
    assert np.abs(drawn - captured).max() > 0.2


def test_captured_logprobs_in_bfloat16(params):
    """Weights, activations and cache: within 0.05 of what the trainer recomputes in bfloat16."""
    narrow = dataclasses.replace(CFG, dtype="bfloat16")
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    requests = group_requests(1)
    completions = {c.id: c for c in Sampler(weights, narrow, ENGINE).sample(requests)}
    captured, expected = recomputed(weights, requests, completions, 1.0, narrow)
    assert captured.size > 150
    assert 0 < np.abs(captured - expected).max() <= 0.05
