# SPDX-License-Identifier: Apache-2.0
"""The sampler against slow references: a forward pass over the whole sequence for each token."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.core.numerics import linear_logprob
from klear_jax.data.packing import TokenSequence, pack
from klear_jax.model import params as params_lib
from klear_jax.model import qwen3
from klear_jax.model.config import QWEN3
from klear_jax.sampling import engine as engine_lib
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.draw import Truncation
from klear_jax.sampling.prompts import bucket
from klear_jax.sampling.request import Request, check_request
from klear_jax.sampling.sampler import Sampler

CFG = QWEN3["tiny"]
STOPS = tuple(range(3, 263, 20))
"""13 ids, so that completions end by stop and by length alike."""
LENGTH, PAGE = 96, 8
SEED = 11


def engine(slots=3, **changes):
    fields = {"slots": slots, "length": LENGTH, "page": PAGE, "steps": 8, "prefill_rows": 4}
    return EngineConfig(stop_ids=STOPS, **(fields | changes))


MAIN = engine()
WIDE = engine(16)
TIGHT = engine(5, pages=16, truncation=Truncation(top_k=3))
"""Pages for one full sequence and a little more; only three tokens may be drawn."""


def prompt_of(length, seed=0):
    return tuple(np.random.default_rng(1000 * seed + length).integers(0, 263, length).tolist())


def request_of(number, length, max_tokens, temperature=1.0, seed=0):
    return Request(
        str(number),
        prompt_of(length, seed),
        (7919 * number + 2**31) % 2**32,
        max_tokens,
        temperature,
    )


def complete(params, config, requests, seed=SEED):
    """Completions by id; each request has exactly one."""
    completions = list(Sampler(params, CFG, config, seed=seed).sample(requests))
    by_id = {c.id: c for c in completions}
    assert len(completions) == len(by_id) == len(requests)
    for request in requests:
        check(by_id[request.id], request)
    return by_id


def check(completion, request):
    """What holds for every completion of every request."""
    tokens = completion.tokens
    assert 1 <= len(tokens) == len(completion.logprobs) <= request.max_tokens
    assert tokens.dtype == np.int32
    assert ((tokens >= 0) & (tokens < CFG.live_vocab)).all()
    assert np.isfinite(completion.logprobs).all()
    assert (completion.logprobs <= 0).all()
    assert not set(tokens[:-1].tolist()) & set(STOPS)
    if completion.stop == "stop":
        assert int(tokens[-1]) in STOPS
    else:
        assert completion.stop == "length"
        assert len(tokens) == request.max_tokens
        assert int(tokens[-1]) not in STOPS


def assert_equal(got, expected, atol=2e-5):
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].tokens.tolist() == expected[name].tokens.tolist(), name
        assert got[name].stop == expected[name].stop
        np.testing.assert_allclose(got[name].logprobs, expected[name].logprobs, atol=atol)


# Groups of several temperatures, and prompts on and around the boundaries of a page (8) and of a
# bucket (64), of one token, and as long as the engine allows.
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 72, 95)
REQUESTS = [
    request_of(number, LENGTHS[number % 12], min(24, LENGTH - LENGTHS[number % 12]), temperature)
    for number, temperature in enumerate([1.0] * 12 + [0.8] * 12 + [0.0] * 12)
]


@pytest.fixture(scope="module")
def baseline(params):
    """`REQUESTS` in three slots."""
    return complete(params, MAIN, REQUESTS)


def test_baseline_is_no_special_case(baseline):
    ends = collections.Counter(c.stop for c in baseline.values())
    assert min(ends["stop"], ends["length"]) >= 8
    assert len({int(c.tokens[-1]) for c in baseline.values() if c.stop == "stop"}) >= 4
    texts = [tuple(c.tokens.tolist()) for c in baseline.values() if len(c.tokens) > 2]
    assert len(set(texts)) == len(texts)
    # Greedy completions do not just repeat a token.
    assert len({int(t) for n in range(24, 36) for t in baseline[str(n)].tokens}) > 30


@pytest.mark.parametrize("slots", [2, 16])
def test_slots_do_not_matter(params, baseline, slots):
    assert_equal(complete(params, engine(slots), REQUESTS), baseline)


@pytest.mark.parametrize("narrowest", [1, 5])
def test_fewer_slots_at_the_end_change_nothing(params, baseline, pools, narrowest):
    assert_equal(complete(params, engine(16, narrowest=narrowest), REQUESTS), baseline)
    (pool,) = pools
    assert pool.whole
    assert pool.width == {1: 1, 5: 8}[narrowest]


def test_widths_are_halves_that_hold_what_is_going():
    config = engine(48, narrowest=6)
    widths = {going: config.width_for(going, 48) for going in (48, 25, 24, 13, 12, 7, 6, 1)}
    assert widths == {48: 48, 25: 48, 24: 24, 13: 24, 12: 12, 7: 12, 6: 6, 1: 6}
    assert engine(48).width_for(1, 48) == 48
    # Cut into four pieces, each keeps as many.
    config = engine(48, narrowest=1)
    widths = {going: config.width_for(going, 48, 4) for going in (25, 24, 12, 4, 1)}
    assert widths == {25: 48, 24: 24, 12: 12, 4: 12, 1: 12}


@pytest.mark.parametrize("narrowest", [0, 17])
def test_narrowest_must_be_a_number_of_slots(narrowest):
    with pytest.raises(ValueError, match=f"narrowest {narrowest} .*16"):
        engine(16, narrowest=narrowest)


def test_order_does_not_matter(params, baseline):
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(REQUESTS))
        assert_equal(complete(params, MAIN, [REQUESTS[i] for i in order]), baseline)


def test_rerun_is_bit_equal(params, baseline):
    again = complete(params, MAIN, REQUESTS)
    for name, completion in baseline.items():
        assert again[name].tokens.tobytes() == completion.tokens.tobytes()
        assert again[name].logprobs.tobytes() == completion.logprobs.tobytes()


def test_seed_and_sample_id_name_the_noise(params, baseline):
    other_seed = complete(params, MAIN, REQUESTS[:24], seed=SEED + 1)
    sampled = [n for n in map(str, range(24)) if len(baseline[n].tokens) > 2]
    assert len(sampled) > 12
    assert all(other_seed[n].tokens.tolist() != baseline[n].tokens.tolist() for n in sampled)

    # Ids that differ in the lowest and in the highest bit, for one prompt.
    prompt = prompt_of(5)
    ids = [0, 1, 2, 3, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    group = complete(params, MAIN, [Request(str(i), prompt, i, 12) for i in ids])
    assert len({tuple(c.tokens[:6].tolist()) for c in group.values()}) == len(ids)
    # The name of a request is not part of the noise.
    (renamed,) = complete(params, MAIN, [Request("other", prompt, 3, 12)]).values()
    assert renamed.tokens.tolist() == group["3"].tokens.tolist()


def test_greedy_ignores_the_seed(params, baseline):
    greedy = complete(params, MAIN, REQUESTS[24:], seed=SEED + 1)
    assert_equal(greedy, {r.id: baseline[r.id] for r in REQUESTS[24:]})


@pytest.fixture(scope="module")
def packed(params, baseline):
    """The requests' tokens packed into rows, with what the sampler captured, and hidden states."""
    sequences, extras = [], {"captured": [], "drawn": [], "temperature": []}
    for request in REQUESTS:
        completion = baseline[request.id]
        tokens = np.concatenate([np.array(request.prompt, np.int32), completion.tokens])
        sequences.append(TokenSequence(tokens, len(request.prompt)))
        extras["captured"].append(completion.logprobs)
        extras["drawn"].append(completion.tokens)
        extras["temperature"].append(np.full(len(completion.tokens), request.temperature))
    rows = pack(sequences, row=128, per_token=extras)
    hidden = jax.jit(functools.partial(qwen3.forward, cfg=CFG))(
        params, rows.tokens, rows.positions, rows.segments
    )
    return rows, hidden


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_captured_logprobs_equal_the_trainers(params, packed, temperature):
    rows, hidden = packed
    assert (rows.targets == rows.per_token["drawn"])[rows.mask].all()
    expected, _ = linear_logprob(
        hidden, qwen3.unembed(params), jnp.asarray(rows.targets),
        live_vocab=CFG.live_vocab, temperature=temperature or 1.0,
    )  # fmt: skip
    here = rows.mask & (rows.per_token["temperature"] == temperature)
    assert here.sum() > 50
    captured = rows.per_token["captured"][here]
    np.testing.assert_allclose(captured, np.asarray(expected)[here], rtol=0, atol=1e-5)


def test_greedy_tokens_are_the_argmax_of_the_packed_forward(params, packed):
    rows, hidden = packed
    logits = np.asarray(hidden @ qwen3.unembed(params))[..., : CFG.live_vocab]
    greedy = rows.mask & (rows.per_token["temperature"] == 0)
    np.testing.assert_array_equal(logits.argmax(axis=-1)[greedy], rows.targets[greedy])


def test_a_limit_of_one_token(params, baseline):
    """Is the first token of the longer completion; counts as a stop where that is an end token."""
    short = [Request(r.id, r.prompt, r.sample_id, 1, r.temperature) for r in REQUESTS]
    for name, completion in complete(params, MAIN, short).items():
        assert completion.tokens.tolist() == baseline[name].tokens[:1].tolist()


def test_a_longer_limit_only_continues(params, baseline):
    """Also past the end of a dispatch (8 steps)."""
    for limit in (7, 8, 9):
        cut = [
            Request(r.id, r.prompt, r.sample_id, min(limit, r.max_tokens), r.temperature)
            for r in REQUESTS
        ]
        for name, completion in complete(params, MAIN, cut).items():
            assert completion.tokens.tolist() == baseline[name].tokens[:limit].tolist()


def test_one_prefill_a_group(params):
    """Eight samples a prompt in three slots: each prompt is run once, all but its last token."""
    lengths = [9, 1, 30, 17, 64, 5]
    requests = [
        Request(f"{n}/{g}", prompt_of(length), 100 * n + g, 4)
        for n, length in enumerate(lengths)
        for g in range(8)
    ]
    sampler = Sampler(params, CFG, MAIN, seed=SEED)
    completions = list(sampler.sample(requests))
    assert len(completions) == 48
    assert sampler.counts.prefilled_tokens == sum(length - 1 for length in lengths)
    assert sampler.counts.live_steps == sum(len(c.tokens) for c in completions)
    assert sampler.counts.dispatches <= sampler.counts.steps <= 48 * 4
    # Order of arrival: samples of a prompt together or apart, the prompt runs once.
    list(sampler.sample(sorted(requests, key=lambda r: r.sample_id % 100)))
    assert sampler.counts.prefilled_tokens == sum(length - 1 for length in lengths)


def test_truncation_reaches_the_engine(params):
    """Each token is one of the three most likely, and all three occur."""
    request = Request("a", prompt_of(10), 1, 20, 1.4)
    requests = [Request(str(i), request.prompt, i, 20, 1.4) for i in range(12)]
    completions = complete(params, TIGHT, requests)
    sequences = [
        TokenSequence(np.append(np.array(request.prompt, np.int32), c.tokens), 10)
        for c in completions.values()
    ]
    rows = pack(sequences, row=32)
    hidden = qwen3.forward(
        params, *(jnp.asarray(x) for x in (rows.tokens, rows.positions, rows.segments)), cfg=CFG
    )
    logits = np.asarray(hidden @ qwen3.unembed(params))[..., : CFG.live_vocab]
    rank = (logits > np.take_along_axis(logits, rows.targets[..., None], axis=-1)).sum(axis=-1)
    assert set(rank[rows.mask].tolist()) == {0, 1, 2}


def test_an_abandoned_iterator_leaves_nothing_behind(params, baseline):
    sampler = Sampler(params, CFG, MAIN, seed=SEED)
    left = sampler.sample(REQUESTS)
    next(left)
    got = {c.id: c for c in sampler.sample(REQUESTS)}
    assert_equal(got, baseline)
    assert sampler.counts.live_steps == sum(len(c.tokens) for c in got.values())
    # The old iterator's slots are gone: it says so instead of yielding what others drew.
    with pytest.raises(RuntimeError, match="later call"):
        list(left)


def test_of_two_calls_the_earlier_one_is_refused(params):
    """Also where it had not begun: it would decode into the other's cache."""
    sampler = Sampler(params, CFG, MAIN, seed=SEED)
    first, second = sampler.sample(REQUESTS[:4]), sampler.sample(REQUESTS[4:8])
    next(second)
    with pytest.raises(RuntimeError, match="later call"):
        next(first)
    assert len(list(second)) == 3


def test_the_cache_goes_when_a_call_is_left(params, monkeypatch):
    """It is memory that the training step can use."""
    sampler = Sampler(params, CFG, MAIN, seed=SEED)
    running = sampler.sample(REQUESTS)
    assert sampler._state is None
    next(running)
    assert sampler._state is not None
    running.close()
    assert sampler._state is None
    # Also where the caller takes as many as there are, and does not ask for more.
    running = sampler.sample(REQUESTS[:5])
    for _ in range(5):
        next(running)
    assert sampler._state is None

    def broken(*args, **kwargs):
        raise OSError("device lost")

    monkeypatch.setattr(engine_lib, "generate", broken)
    with pytest.raises(OSError, match="lost"):
        list(sampler.sample(REQUESTS))
    assert sampler._state is None


def test_slots_left_going_are_stopped(params, baseline):
    """They would go on drawing, into pages that the next call gives to others."""
    sampler = Sampler(params, CFG, WIDE, seed=SEED)
    next(sampler.sample([Request(str(i), (1, 2, 3), i, 64) for i in range(16)]))
    request = REQUESTS[7]
    assert len(request.prompt) == 63
    (completion,) = sampler.sample([request])
    assert_equal({request.id: completion}, {request.id: baseline[request.id]})
    assert sampler.counts.live_steps == len(completion.tokens)


def test_two_calls_in_turn(params, baseline):
    sampler = Sampler(params, CFG, MAIN, seed=SEED)
    assert list(sampler.sample([])) == []
    for part in (REQUESTS[:10], REQUESTS[10:20]):
        got = {c.id: c for c in sampler.sample(iter(part))}
        assert_equal(got, {r.id: baseline[r.id] for r in part})


def test_ids_past_the_live_vocabulary_are_never_drawn(host_params, params):
    """The spare embedding row made the most likely by far; also when greedy.

    The output matrix is the embedding table, so prompts must not use the row; none may.
    """
    hidden_like = np.asarray(host_params.embed).copy()
    hidden_like[CFG.live_vocab :] = 1e4 * hidden_like[5]
    huge = jax.tree.map(jnp.asarray, host_params).replace(embed=jnp.asarray(hidden_like))
    requests = [request_of(n, 6, 16, t) for n, t in enumerate([0.0, 0.7, 1.0, 2.0] * 3)]
    got = complete(huge, MAIN, requests)
    # Nothing else of the row is seen: tokens and log-probs are those of the plain weights.
    assert_equal(got, complete(params, MAIN, requests))


@pytest.fixture(scope="module")
def uniform(host_params):
    """Completions of a model whose tokens are all equally likely: the noise itself."""
    zero = jax.tree.map(lambda x: jnp.zeros_like(jnp.asarray(x)), host_params)
    requests = [Request(str(i), (1, 2, 3), i, 64) for i in range(320)]
    by_id = complete(zero, WIDE, requests)
    for completion in by_id.values():
        np.testing.assert_allclose(completion.logprobs, -np.log(263), rtol=1e-5)
    return [by_id[str(i)].tokens for i in range(320)]


def independence(pairs, cells=6):
    """Chi-square of a table of pairs in standard deviations."""
    table = np.zeros((cells, cells))
    for a, b in pairs:
        table[a * cells // 263, b * cells // 263] += 1
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    freedom = (cells - 1) ** 2
    return (((table - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def test_noise_of_positions_and_members_is_independent(uniform):
    """Neighbouring positions, and neighbouring sample ids at one position, are unrelated."""
    positions = [(a, b) for t in uniform for a, b in itertools.pairwise(t)]
    assert len(positions) > 3000
    assert abs(independence(positions)) < 4
    members = [
        pair
        for one, two in itertools.pairwise(uniform)
        for pair in zip(one.tolist(), two.tolist(), strict=False)
    ]
    assert len(members) > 1500
    assert abs(independence(members)) < 4
    assert abs(np.mean([a == b for a, b in members]) - 1 / 263) < 0.01
    # The first token of each, and every token, are spread evenly.
    for tokens in (np.array([t[0] for t in uniform]), np.concatenate(uniform)):
        counts = np.bincount(tokens * 8 // 263, minlength=8)
        width = np.bincount(np.arange(263) * 8 // 263) / 263
        score = ((counts - width * len(tokens)) ** 2 / (width * len(tokens))).sum()
        assert score < 7 + 4 * np.sqrt(14)
    # 13 of 263 end a completion.
    ended = np.mean([t[-1] in STOPS for t in uniform])
    assert abs(ended - (1 - (250 / 263) ** 64)) < 0.05


@pytest.mark.parametrize("spec", [None, pytest.param("data:2,tensor:2", marks=pytest.mark.slow)])
def test_the_form_for_a_large_output_matrix_changes_nothing(params, baseline, spec, monkeypatch):
    """Many rows, and few at the end; an output matrix of its own that equals the tied one."""
    monkeypatch.setattr(engine_lib, "LARGE_TABLE", 1)
    sizes, real = set(), engine_lib._large_product

    def product(hidden, head):
        sizes.add(hidden.shape[0])
        return real(hidden, head)

    monkeypatch.setattr(engine_lib, "_large_product", product)
    assert CFG.tied
    cfg = dataclasses.replace(CFG, tied=False)
    untied = params.replace(unembed=params.embed.T)
    if spec is None:
        completions = list(Sampler(untied, cfg, engine(4, narrowest=2), seed=SEED).sample(REQUESTS))
        assert sizes == {2, 4}
    else:
        mesh = make_mesh(MeshSpec.parse(spec), devices=jax.devices()[:4])
        with jax.set_mesh(mesh):
            untied = jax.tree.map(jax.device_put, untied, params_lib.shardings(cfg, mesh))
            sampler = Sampler(untied, cfg, engine(8, narrowest=4), seed=SEED)
            completions = list(sampler.sample(REQUESTS))
        assert sizes == {2, 4}
    assert_equal({c.id: c for c in completions}, baseline)


@pytest.mark.slow
def test_completions_on_a_cut_mesh(host_params, params, baseline):
    """Weights, heads and vocabulary cut over fsdp and tensor give the same tokens."""
    mesh = make_mesh(MeshSpec.parse("fsdp:2,tensor:2"), devices=jax.devices()[:4])
    layout = params_lib.shardings(CFG, mesh)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(jax.device_put, host_params, layout)
        got = complete(placed, engine(8, narrowest=4), REQUESTS)
    assert_equal(got, baseline)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ()}, "needs a prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 94}, "exceed the engine's length 96"),
        ({"prompt": (1, 2, 263)}, "0..262"),
        ({"prompt": (-1, 2, 3)}, "-1"),
        ({"sample_id": -1}, "sample_id"),
        ({"sample_id": 2**32}, "sample_id"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": np.nan}, "temperature"),
    ],
)
def test_requests_that_are_refused(params, fields, words):
    """At the call, before anything is drawn, and by name."""
    good = {"id": "q7", "prompt": (1, 2, 3), "sample_id": 5, "max_tokens": 93}
    sampler = Sampler(params, CFG, MAIN)
    with pytest.raises(ValueError, match=rf"q7.*{words}"):
        sampler.sample([Request(**good), Request(**(good | fields))])
    check_request(Request(**good), CFG, MAIN, pages=12)


@pytest.mark.parametrize(
    "fields",
    [{"slots": 0}, {"length": 0}, {"page": 0}, {"steps": 0}, {"prefill_rows": 0}, {"pages": 0}],
)
def test_engine_sizes_that_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        engine(**fields)
    assert engine(pages=12).slot_pages == 12
    assert engine(4).pool_pages == 48


def test_buckets():
    """Powers of two from 64, whole pages, never more than a slot holds."""
    sizes = [bucket(n, engine(length=200, page=16)) for n in (1, 64, 65, 128, 129, 199)]
    assert sizes == [64, 64, 128, 128, 208, 208]
    assert bucket(1, engine(length=20, page=8)) == 24
    assert bucket(100, engine(length=300, page=48)) == 144
