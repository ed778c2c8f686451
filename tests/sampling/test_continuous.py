# SPDX-License-Identifier: Apache-2.0
"""Making room, stop strings, cancelling, interrupting: nothing changes what is drawn."""

import dataclasses
import functools
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3
from klear_jax.sampling import cache as cache_lib
from klear_jax.sampling import engine as engine_lib
from klear_jax.sampling import sampler as sampler_lib
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.draw import Truncation
from klear_jax.sampling.pages import PagePool
from klear_jax.sampling.prompts import PromptPool, pack_prompts
from klear_jax.sampling.request import Request
from klear_jax.sampling.sampler import Sampler
from klear_jax.sampling.stops import StopStrings

CFG = dataclasses.replace(QWEN3["tiny"], layers=2)
STOPS = tuple(range(3, 263, 40))
ENGINE = EngineConfig(
    slots=4, length=96, stop_ids=STOPS, page=8, steps=8, prefill_rows=2, narrowest=None
)


@functools.cache
def weights(seed=0):
    """Weights so large that what a token sees decides what it says."""
    return jax.tree.map(lambda x: 4 * x, params_lib.init(CFG, seed))


def decode(ids):
    """Every token is one letter."""
    return "".join(chr(ord("a") + int(i) % 26) for i in ids)


def sampler(seed=0, **changes):
    return Sampler(
        weights(seed), CFG, dataclasses.replace(ENGINE, **changes), seed=5, decode=decode
    )


def requests(count=24, seed=0, **fields):
    rng = np.random.default_rng(seed)
    return [
        Request(
            f"r{n}",
            tuple(rng.integers(0, 263, rng.integers(1, 40)).tolist()),
            int(rng.integers(2**32)),
            int(rng.integers(1, 50)),
            float(rng.choice([0.0, 0.7, 1.0])),
            **fields,
        )
        for n in range(count)
    ]


def by_id(completions):
    completions = list(completions)
    out = {c.id: c for c in completions}
    assert len(out) == len(completions)
    return out


def same(got, expected, atol=2e-4):
    """Equal tokens. Log-probs of such weights feel the order of a sum in the fourth digit; captured
    ones are held to 1e-5 in `test_sampler`."""
    assert got.tokens.tolist() == expected.tokens.tolist(), got.id
    assert got.stop == expected.stop
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=atol)
    assert len(got.versions) == len(got.tokens)


@pytest.fixture(scope="module")
def baseline():
    """Nobody ever has to make room."""
    return by_id(sampler().sample(requests()))


# --- room -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"pages": 12}, {"pages": 17}, {"pages": 12, "steps": 3}])
def test_who_makes_room_goes_on_where_it_was(baseline, changes):
    tight = sampler(slots=6, **changes)
    got = by_id(tight.sample(requests()))
    assert tight.counts.set_aside >= 2
    for name, completion in baseline.items():
        same(got[name], completion)


def test_the_youngest_makes_room():
    """Four sequences that outgrow the pool: the oldest is never set aside, so it ends first."""
    long = [Request(f"r{n}", (n + 1,), n, 90, 0.0) for n in range(4)]
    plain = dataclasses.replace(ENGINE, stop_ids=(), pages=20)
    run = Sampler(weights(), CFG, plain, seed=5)
    done = list(run.sample(long))
    assert run.counts.set_aside >= 1
    assert [c.id for c in done] == ["r0", "r1", "r2", "r3"]
    assert all(len(c.tokens) == 90 for c in done)


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(ValueError, match=r"request a: .*need 7 pages of 8 tokens.*have 6"):
        sampler(pages=6).sample([Request("a", (1, 2, 3), 0, 54)])
    list(sampler(pages=6).sample([Request("a", (1, 2, 3), 0, 46)]))


def test_two_requests_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same id"):
        sampler().sample([Request("a", (1,), 0, 4), Request("a", (2,), 1, 4)])


@pytest.mark.parametrize("steps", [1, 3, 64])
def test_length_of_a_dispatch_does_not_matter(baseline, steps):
    got = by_id(sampler(steps=steps).sample(requests()))
    for name, completion in baseline.items():
        same(got[name], completion)


def test_holes_are_closed_and_nothing_changes(baseline, monkeypatch):
    """Pages of one token and no patience, so that moves happen all the time."""
    moved = []

    class Eager(PagePool):
        def compact(self, chunk):
            moves = super().compact(1)
            moved.extend(moves[0])
            return moves

    monkeypatch.setattr(sampler_lib, "PagePool", Eager)
    got = by_id(sampler(page=2, slots=6).sample(requests()))
    assert len(moved) > 8
    for name, completion in baseline.items():
        same(got[name], completion)


def test_compact():
    pool = PagePool(ENGINE, pieces=1, pages=48, size=64)
    for slot in range(4):
        assert pool.grant(slot, 8 * (slot + 1))
    assert pool.page_map().used.tolist() == [10]
    for slot in (0, 1):
        pool.release(slot)
    assert pool.compact(8) == [[]]
    pool.release(2)
    before = pool.page_map()
    assert before.used.tolist() == [10]
    (moves,) = pool.compact(4)
    assert moves == [(6, 0), (7, 1), (8, 2), (9, 3)]
    after = pool.page_map()
    assert after.used.tolist() == [4]
    assert after.table[3, :4].tolist() == [0, 1, 2, 3]
    assert after.owners[:5].tolist() == [3, 3, 3, 3, 4]
    assert after.starts[:4].tolist() == [0, 8, 16, 24]
    assert pool.free_pages(0) == 44
    assert not pool.grant(0, 8 * 45)
    assert pool.grant(0, 8 * 44)


def test_pages_of_a_piece_stay_with_it():
    pool = PagePool(ENGINE, pieces=2, pages=5, size=8)
    assert pool.grant(0, 40)
    assert not pool.grant(1, 1)
    assert pool.grant(3, 16)
    here = pool.page_map()
    assert here.owners.reshape(2, 8).tolist() == [[0] * 5 + [2] * 3, [1] * 2 + [2] * 6]
    assert here.used.tolist() == [5, 2]
    assert here.table[3].tolist() == [0, 1] + [8] * 10


# --- stop strings -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5, 32])
def test_stop_strings_end_with_the_token_that_completes_them(baseline, steps):
    """Wherever a dispatch ends, also in the middle of a string."""
    strings = ("ab", "xyz", "q")
    texts = {name: decode(c.tokens) for name, c in baseline.items()}
    got = by_id(sampler(steps=steps).sample(requests(stop_strings=strings)))
    cut = 0
    for name, text in texts.items():
        ends = [text.find(s) + len(s) for s in strings if s in text]
        expected = min(ends, default=len(text))
        assert got[name].tokens.tolist() == baseline[name].tokens[:expected].tolist()
        assert len(got[name].logprobs) == expected
        if ends:
            cut += expected < len(text)
            assert got[name].stop == "stop"
    assert cut >= 5


def test_a_stop_string_of_two_tokens_across_any_border():
    whole = np.array([0, 1, 2, 3, 4, 5])
    for cuts in itertools.product([0, 1], repeat=5):
        watch = StopStrings(("cde",), decode)
        parts = np.split(whole, [i + 1 for i, cut in enumerate(cuts) if cut])
        found, before = None, 0
        for part in parts:
            found = watch.find(part)
            if found is not None:
                break
            before += len(part)
        assert found is not None
        assert before + found == 5


def test_stop_strings_of_bytes_that_make_a_letter():
    """A letter of three bytes, each a token: only the last completes it."""
    text = "a\u20acb".encode()
    watch = StopStrings(("\u20ac",), lambda ids: bytes(ids.tolist()).decode(errors="replace"))
    assert [watch.find(np.array([b])) for b in text] == [None, None, None, 1, None]


def test_stop_strings_beside_tokens_without_text():
    """Special tokens that the decoder leaves out, however many, do not break a string in two, and
    are not decoded again and again."""
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "".join("" if i == 0 else chr(i) for i in ids)

    for gap, size in itertools.product((0, 1, 5, 40), (1, 3, 64)):
        ids = np.array([ord("x"), ord("a"), *[0] * gap, ord("b"), *[0] * gap, ord("c"), ord("y")])
        watch, found = StopStrings(("abc", "q"), decode), []
        for start in range(0, len(ids), size):
            end = watch.find(ids[start : start + size])
            if end is not None:
                found.append(start + end)
                break
        assert found == [len(ids) - 1], (gap, size)
    decoded.clear()
    watch = StopStrings(("abc",), decode)
    for _ in range(100):
        assert watch.find(np.zeros(32, np.int32)) is None
    assert sum(decoded) < 100 * 32 * 4


@pytest.mark.parametrize("kept", ["abxxxxab", "xxxxab", "abab", "xxxxxa", ""])
def test_stop_strings_that_were_complete_before_do_not_count(kept):
    """Nor does what they are made of; one that begins in the old tokens does."""

    def decode(ids):
        return "".join(map(chr, ids))

    for strings, new, expected in (
        (("ab", "xq"), "zzz", None),
        (("ab", "xq"), "zab", 3),
        (("ab", "bxy"), "xyz", 2 if kept.endswith("ab") else None),
        (("ab", "xq"), "b", 1 if kept.endswith("a") else None),
    ):
        watch = StopStrings(strings, decode)
        watch.pass_over(np.array([ord(c) for c in kept], np.int32))
        assert watch.find(np.array([ord(c) for c in new], np.int32)) == expected, (strings, new)


def test_stop_strings_need_a_decoder():
    plain = Sampler(weights(), CFG, ENGINE)
    with pytest.raises(ValueError, match="decode"):
        plain.sample([Request("a", (1,), 0, 4, stop_strings=("x",))])
    with pytest.raises(ValueError, match="empty"):
        sampler().sample([Request("a", (1,), 0, 4, stop_strings=("",))])


# --- cancel, interrupt, continue --------------------------------------------------------------


def test_cancelled_requests_keep_what_they_have(baseline):
    """One that runs, one that waits, one that is done, and one that never was."""
    run = sampler()
    got = {}
    for number, completion in enumerate(run.sample(requests())):
        got[completion.id] = completion
        if number == 3:
            running = [r.id for r in requests() if r.id not in got][:2]
            for name in (*running, "r23", completion.id, "nobody"):
                run.cancel(name)
    assert got.keys() == baseline.keys()
    cancelled = {name for name, c in got.items() if c.stop == "cancelled"}
    assert "r23" in cancelled
    assert cancelled <= {*running, "r23"}
    assert got["r23"].tokens.size == 0 == got["r23"].logprobs.size
    for name, completion in baseline.items():
        if name in cancelled:
            kept = len(got[name].tokens)
            assert got[name].tokens.tolist() == completion.tokens[:kept].tolist()
        else:
            same(got[name], completion)
    # The next call is not touched.
    again = by_id(run.sample(requests()))
    same(again["r23"], baseline["r23"])


@pytest.mark.parametrize("after", [0, 5, 15])
def test_interrupted_requests_can_be_continued(baseline, after):
    run = sampler()
    asked, done, left = requests(), {}, {}
    while asked:
        for number, completion in enumerate(run.sample(asked)):
            (left if completion.stop == "partial" else done)[completion.id] = completion
            if number == after:
                run.interrupt()
        asked = [
            dataclasses.replace(r, continues=left.pop(r.id)) for r in requests() if r.id in left
        ]
    for name, completion in baseline.items():
        same(done[name], completion)


def test_each_token_knows_its_weights():
    """Interrupted, then continued with other weights: what those would draw after what is there."""
    run = sampler(stop_ids=(), steps=4)
    asked = [Request(f"r{n}", (n + 1, 7), n, 20 if n else 3) for n in range(4)]
    left = {}
    for completion in run.sample(asked):
        if completion.stop == "partial":
            left[completion.id] = completion
        else:
            run.interrupt()
    assert sorted(left) == ["r1", "r2", "r3"]
    assert run.version == 0
    run.update(weights(1))
    assert run.version == 1
    run.update(weights(1))
    assert run.version == 1
    again = [dataclasses.replace(r, continues=left[r.id]) for r in asked[1:]]
    for completion in run.sample(again):
        kept = len(left[completion.id].tokens)
        assert 0 < kept < 20 == len(completion.tokens)
        assert completion.versions.tolist() == [0] * kept + [1] * (20 - kept)
        assert completion.tokens[:kept].tolist() == left[completion.id].tokens.tolist()
        # As a longer prompt under the new weights: the noise of a position is its own.
        number = int(completion.id[1:])
        prompt = (number + 1, 7, *completion.tokens[:kept].tolist())
        (fresh,) = sampler(1, stop_ids=()).sample([Request("f", prompt, number, 20 - kept)])
        assert completion.tokens[kept:].tolist() == fresh.tokens.tolist()
        np.testing.assert_allclose(completion.logprobs[kept:], fresh.logprobs, atol=2e-4)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_stop_string_across_an_interruption(steps):
    """Interrupted again and again, so a string begins before and is complete after."""
    strings = tuple(a + b + c for a, b, c in itertools.product("abcdefghijklm", repeat=3))
    asked = requests(stop_strings=strings)
    expected = by_id(sampler(steps=steps).sample(asked))
    assert sum(c.stop == "stop" and len(c.tokens) > steps for c in expected.values()) >= 5
    run, done, waiting = sampler(steps=steps, slots=24), {}, list(asked)
    while waiting:
        left = {}
        running = run.sample([Request("first", (1,), 0, 1), *waiting])
        for completion in running:
            if completion.id == "first":
                run.interrupt()
            elif completion.stop == "partial":
                left[completion.id] = completion
            else:
                done[completion.id] = completion
        waiting = [dataclasses.replace(r, continues=left[r.id]) for r in asked if r.id in left]
    for name, completion in expected.items():
        same(done[name], completion)


def test_weights_that_change_in_mid_call():
    """Each token has the version of the dispatch that drew it, also of the one in flight; who
    starts later has nothing of the old weights, though its prompt was run with them."""
    plain = {"stop_ids": (), "steps": 4, "slots": 2}
    asked = [Request(f"r{n}", (n + 1, 7, 9), n, 4 if n == 1 else 22) for n in range(5)]
    old = by_id(sampler(0, **plain).sample(asked))
    new = by_id(sampler(1, **plain).sample(asked))
    run, got = sampler(0, **plain), {}
    for completion in run.sample(asked):
        got[completion.id] = completion
        if completion.id == "r1":
            run.update(weights(1))
    switched = got["r0"]
    # Four of the first dispatch, and four of that which was on its way when r1 was handed out.
    assert switched.versions.tolist() == [0] * 8 + [1] * 14
    before = np.abs(switched.logprobs - old["r0"].logprobs)
    assert switched.tokens[:8].tolist() == old["r0"].tokens[:8].tolist()
    assert before[:8].max() < 2e-4 < before[8]
    for name in ("r3", "r4"):
        assert (got[name].versions == 1).all()
        same(got[name], new[name])


def test_a_failed_change_of_weights_can_be_repeated(monkeypatch):
    run = sampler()
    first = by_id(run.sample(requests(4)))
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise MemoryError

        patch.setattr(sampler_lib.weights, "swap", full)
        with pytest.raises(MemoryError):
            run.update(weights(1))
    with pytest.raises(RuntimeError, match=r"update\(params\)"):
        run.sample(requests(4))
    run.update(weights(0))
    again = by_id(run.sample(requests(4)))
    for name, completion in first.items():
        same(again[name], completion)


def test_weights_that_share_an_array_are_still_others():
    run = sampler()
    run.update(weights().replace(final_norm=2 * weights().final_norm))
    assert run.version == 1
    assert np.array_equal(run.params.final_norm, 2 * weights().final_norm)
    run.update(run.params)
    assert run.version == 1


def test_prompts_run_ahead_are_bounded():
    """What is kept beside the pool: one prefill with those behind it, and that of one prompt."""
    sizes = []

    def run(packed):
        sizes.append(packed.tokens.size)
        return (len(sizes),)

    pool = PromptPool(dataclasses.replace(ENGINE, prefill_rows=2), run, 1)
    prompts = [(n,) * 60 for n in range(1, 9)]
    pool.expect(prompts)
    pool.take(prompts[0], 0)
    set_aside = [(n,) * 61 for n in range(9, 20)]
    for one in set_aside:
        pool.expect([one])
        pool.take(one, 0)
    for one in prompts[1:]:
        pool.take(one, 0)
    assert sizes == [2 * 64, *[64] * 11, 2 * 64, 2 * 64, 2 * 64]


@pytest.mark.parametrize("changes", [{"slots": 16}, {"slots": 8, "pages": 40}, {"slots": 2}])
def test_few_prefixes_are_alive_at_a_time(changes, monkeypatch):
    """However many slots start at once, whoever is set aside, and in whatever order prompts come:
    one prefill and that of one prompt. Each prompt is run once, but for those set aside."""
    run = sampler(stop_ids=(), **changes)
    real, most = engine_lib.prefill, 0
    held, sizes = set(), []

    def prefill(*args, **kwargs):
        nonlocal most
        prefix = real(*args, **kwargs)
        number = len(sizes)
        sizes.append(args[1].size)
        held.add(number)
        weakref.finalize(prefix[0], held.discard, number)
        most = max(most, len(held))
        return prefix

    monkeypatch.setattr(engine_lib, "prefill", prefill)
    prompts = [(n + 1,) * 60 for n in range(12)]
    asked = [
        Request(f"{n}/{g}", p, 100 * n + g, 30) for g in range(2) for n, p in enumerate(prompts)
    ]
    assert len(list(run.sample(asked))) == 24
    assert most <= 2
    assert len(sizes) <= 6 + run.counts.set_aside
    assert (run.counts.set_aside > 0) == ("pages" in changes)
    assert held == set()


def test_what_cannot_be_continued(baseline):
    done = baseline["r0"]
    for fields, words in (
        ({"continues": done}, "stopped as partial"),
        ({"continues": dataclasses.replace(done, id="x", stop="partial")}, "request x"),
        ({"continues": dataclasses.replace(done, stop="partial"), "max_tokens": 1}, "no room"),
    ):
        request = dataclasses.replace(requests()[0], **fields)
        with pytest.raises(ValueError, match=words):
            sampler().sample([request])


# --- drawing ----------------------------------------------------------------------------------


def test_logprobs_of_the_draw_are_kept_beside_the_trainers(baseline):
    assert all(c.drawn_logprobs is None for c in baseline.values())
    got = by_id(sampler(truncation=Truncation(top_k=3)).sample(requests()))
    for completion in got.values():
        assert (completion.drawn_logprobs >= completion.logprobs - 1e-5).all()
        assert (completion.drawn_logprobs <= 1e-6).all()
    assert max(float(np.abs(c.drawn_logprobs - c.logprobs).max()) for c in got.values()) > 0.1


def test_repetition_penalty_knows_prompt_and_completion():
    """So large that a greedy completion never repeats a token while fresh ones are left."""
    asked = [Request(f"r{n}", tuple(range(n, n + 30)), n, 60, 0.0) for n in range(5)]
    plain = by_id(sampler(stop_ids=()).sample(asked))
    got = by_id(sampler(stop_ids=(), repetition_penalty=1e6).sample(asked))
    fresh = [len({*r.prompt, *got[r.id].tokens.tolist()}) for r in asked]
    repeated = [len({*r.prompt, *plain[r.id].tokens.tolist()}) for r in asked]
    assert fresh > repeated
    # Logits above 0 go to nearly 0 and those below far down, so what is seen comes back only when
    # all others are below 0.
    assert min(fresh) >= 80


# --- counts -----------------------------------------------------------------------------------


def test_one_fetch_a_dispatch_and_nothing_compiled_anew(monkeypatch):
    run = sampler(slots=4, narrowest=2)
    list(run.sample(requests(seed=1)))
    fetched, traced = [], []
    real_get, real_step = jax.device_get, engine_lib.decode_step
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(1) or real_get(x))
    monkeypatch.setattr(
        engine_lib, "decode_step", lambda *a, **k: traced.append(1) or real_step(*a, **k)
    )
    insert = engine_lib.insert.jitted("cpu")._cache_size()
    list(run.sample(requests(seed=2)))
    assert len(fetched) == run.counts.dispatches == run.counts.fetches > 5
    assert traced == []
    assert engine_lib.insert.jitted("cpu")._cache_size() <= max(insert, 1)


@pytest.mark.parametrize("slots", [4, 32])
def test_slots_are_filled_while_requests_wait(slots):
    """Lengths with a heavy tail; a slot is refilled when it, or one in sixteen, is free."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 12, 12 * slots), 80)
    asked = [Request(f"r{n}", (1, 2), n, int(m)) for n, m in enumerate(lengths)]
    run = sampler(slots=slots, stop_ids=())
    list(run.sample(asked))
    assert run.counts.fill >= 0.95
    assert run.counts.busy_row_steps > slots * 40


def test_work_follows_what_is_there_and_not_what_could_be(monkeypatch):
    """The same chunks are walked in an engine of 96 tokens and in one sixteen times as long."""
    walked = {}
    for length in (96, 16 * 96):
        used = walked.setdefault(length, [])
        real = PagePool.page_map

        def watch(self, used=used, real=real):
            made = real(self)
            used.append(made.used.tolist())
            return made

        monkeypatch.setattr(PagePool, "page_map", watch)
        list(sampler(length=length).sample(requests(8)))
        monkeypatch.setattr(PagePool, "page_map", real)
    assert walked[96] == walked[16 * 96]


@pytest.mark.parametrize(("tied", "large"), [(True, 2**23), (False, 2**23), (False, 1)])
@pytest.mark.parametrize("slots", [2, 8])
def test_nothing_large_is_copied_in_a_dispatch(tied, large, slots, monkeypatch):
    """The compiled decode loop writes the pages in place: no copy of a pool, for any of its steps
    or layers; and no transposed table of the vocabulary."""
    monkeypatch.setattr(engine_lib, "LARGE_TABLE", large)
    cfg = dataclasses.replace(CFG, tied=tied, vocab=4096)
    engine = dataclasses.replace(ENGINE, backend="jax", slots=slots, length=4096)
    state = jax.eval_shape(lambda: engine_lib.init_state(cfg, engine))
    params = jax.eval_shape(lambda: params_lib.init(cfg, 0))
    pages = engine_lib.pages_of_piece(engine, 1)
    shapes = [(slots, engine.slot_pages), (pages,), (pages,), (1,)]
    page_map = cache_lib.PageMap(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = (
        engine_lib.generate.jitted("cpu")
        .lower(params, state, page_map, number, number, cfg=cfg, engine=engine)
        .compile()
    )
    pool = sum(p.size * 4 for p in state.pools)
    assert compiled.memory_analysis().temp_size_in_bytes < pool / 4
    shapes = [state.pools[0].shape, (cfg.vocab, cfg.d_model), (cfg.d_model, cfg.vocab)]
    sizes = ["f32[" + ",".join(map(str, shape)) + "]" for shape in shapes]
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if any(s in line.split(" copy(")[0] for s in sizes) and " copy(" in line
    ]
    assert copies == []


# --- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 3])
def test_prompts_share_rows(pieces):
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(1, 9, n).tolist()) for n in (20, 9, 1, 30, 12, 60, 90)]
    packed = pack_prompts(prompts, dataclasses.replace(ENGINE, prefill_rows=6), pieces=pieces)
    assert packed.tokens.shape[0] % pieces == 0
    assert len(packed.pages) == len(prompts)
    seen = set()
    for prompt, pages in zip(prompts, packed.pages, strict=True):
        assert len(pages) == -(-(len(prompt) - 1) // 8)
        assert not seen & set(pages)
        seen |= set(pages)
        cells = [8 * page + i for page in pages for i in range(8)][: len(prompt) - 1]
        assert packed.tokens.reshape(-1)[cells].tolist() == list(prompt[:-1])
        assert packed.positions.reshape(-1)[cells].tolist() == list(range(len(prompt) - 1))
        assert len(set(packed.segments.reshape(-1)[cells].tolist())) <= 1
    assert (packed.segments > 0).sum() == sum(len(p) - 1 for p in prompts)


def test_no_more_prompts_than_fit():
    prompts = [(1,) * 60] * 9
    packed = pack_prompts(prompts, ENGINE, pieces=1)
    assert packed.tokens.shape == (2, 64)
    assert len(packed.pages) == 2


def test_a_long_prompt_does_not_widen_the_rows_of_short_ones():
    wide = dataclasses.replace(ENGINE, length=4096, prefill_rows=16)
    short = [(1,) * 64] * 8
    packed = pack_prompts([*short, (1,) * 4000, *short], wide, pieces=1)
    assert packed.tokens.shape == (8, 64)
    assert len(packed.pages) == 8
    packed = pack_prompts([(1,) * 4000, *short, *short], wide, pieces=1)
    assert packed.tokens.shape == (2, 4096)
    assert len(packed.pages) == 17
    # Lengths that are not far apart share a prefill.
    packed = pack_prompts([(1,) * n for n in (60, 90, 120, 200)], wide, pieces=1)
    assert len(packed.pages) == 4
