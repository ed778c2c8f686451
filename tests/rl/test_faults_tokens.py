# SPDX-License-Identifier: Apache-2.0
"""Faults of other systems, group "Tokens, packing, positions, stop".

Every report of that group and its test, here where no file is named:

- tunix, tunix PR 1148, trl PR 6357, pytorch/rl PR 3580, Megatron-Bridge PR 4660 (end token that
  is the pad): `test_tunix_*`; for SFT test_packing.py.
- dynamo#14302, TensorRT-LLM PR 18190: `test_dynamo_14302_*`. Every completion of
  test_sampler.py is checked so.
- Qwen3#927: `test_qwen3_927_*`; which files are read, and Qwen3's own: test_tokenizer.py.
- nanoVLM#201, #204, LlamaFactory PR 7318, transformers PR 46634: `test_nanovlm_201_*`; of hidden
  states, exactly, test_layers.py.
- open-instruct PR 1642: `test_open_instruct_1642_*`; test_step.py `test_one_sequence_a_row`.
- unsloth PR 6738: `test_unsloth_6738_*`.
- slime PR 330, trl#6361, PR 6363, speculators PR 346: `test_slime_330_*`; test_chat.py.
- verl#1015, verl PR 6079, ms-swift PR 10192: `test_verl_1015_*`; test_sampler.py refuses a prompt
  that the engine cannot hold.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.data.chat import encode_example, encode_prompt
from klear_jax.data.packing import TokenSequence, pack
from klear_jax.data.problems import Message, Problem
from klear_jax.data.tokenizer import load_tokenizer
from klear_jax.model import params as params_lib
from klear_jax.model.config import QWEN3
from klear_jax.rewards.verdict import Format, Verdict
from klear_jax.rl import minibatch
from klear_jax.rl.loss import token_factor
from klear_jax.rl.minibatch import Layout
from klear_jax.rl.objective import Objective
from klear_jax.rl.rollout import Group
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.sampler import Completion, Request, Sampler
from klear_jax.train.step import make_scorer

ROOT = Path(__file__).resolve().parents[2]
BYTES = load_tokenizer("bytes")
CFG = dataclasses.replace(QWEN3["tiny"], layers=1)


@functools.cache
def weights():
    """Weights so large that what a token sees decides what it says."""
    return jax.tree.map(lambda x: 2 * x, params_lib.init(CFG, 0))


@functools.cache
def scorer():
    return make_scorer(CFG, temperature=0.8)


def batch_of(rows):
    """Packed rows as one micro-batch."""
    zeros = np.zeros(rows.tokens.shape, np.float32)
    fields = (f.name for f in dataclasses.fields(RolloutBatch))
    given = {name: getattr(rows, name, zeros) for name in fields}
    return RolloutBatch(**{name: x[None] for name, x in given.items()})


def logprobs_of(rows):
    return np.asarray(scorer()(weights(), batch_of(rows), 1)[0][0])


# --- end tokens -------------------------------------------------------------------------------


def test_tunix_the_end_token_is_trained_though_it_is_the_pad():
    """Completion [5, 6, END] with pad = END: mask 1, 1, 1 and then zeros."""
    end = 0
    done = Completion("0/0", np.array([5, 6, end], np.int32), np.zeros(3), "stop")
    problem = Problem("p", (Message("user", "q"),), "1")
    right = Verdict.right(format=Format(think_opened=True, think_closed=True, boxed=True))
    (made,) = minibatch.assemble(
        [Group(problem, (7,), (done,), ("",), (right,))], np.ones((1, 1)), np.ones((1, 1), bool),
        Objective(), updates=1, layout=Layout(8, 1, 1), max_tokens=8,
    )  # fmt: skip
    assert made.batch.mask.ravel().tolist() == [True, True, True] + 5 * [False]
    assert made.batch.targets.ravel().tolist() == [5, 6, end, 0, 0, 0, 0, 0]


def sampled(stop_ids, count=6, max_tokens=12, stop_strings=(), decode=None):
    engine = EngineConfig(slots=4, length=32, stop_ids=stop_ids, page=8, steps=4, prefill_rows=2)
    requests = [
        Request(str(i), (65, 66), i, max_tokens, stop_strings=stop_strings) for i in range(count)
    ]
    return {c.id: c for c in Sampler(weights(), CFG, engine, decode=decode).sample(requests)}


@pytest.fixture(scope="module")
def endless():
    """Completions of a sampler that knows no end token."""
    return sampled(())


@pytest.fixture(scope="module")
def ended(endless, tmp_path_factory):
    """(stop ids of a folder whose base and chat files name one end each, completions)."""
    folder = tmp_path_factory.mktemp("model")
    base, chat = int(endless["0"].tokens[3]), int(endless["1"].tokens[5])
    assert base != chat
    BYTES._backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": base}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [chat]}))
    stops = load_tokenizer(folder).stop_ids
    assert set(stops) == {base, chat, BYTES.pad_id, BYTES.end_id}
    return stops, sampled(stops)


def test_qwen3_927_stops_on_every_end_that_a_file_names(endless, ended):
    stops, completions = ended
    ends = set()
    for name, done in completions.items():
        free = endless[name].tokens.tolist()
        length = next((i + 1 for i, t in enumerate(free) if t in stops), len(free))
        assert done.tokens.tolist() == free[:length]
        assert done.stop == ("stop" if free[length - 1] in stops else "length")
        ends.add(int(done.tokens[-1]))
    assert {int(endless["0"].tokens[3]), int(endless["1"].tokens[5])} <= ends


def test_dynamo_14302_one_logprob_a_token_however_it_ends(endless, ended):
    _, completions = ended
    assert {done.stop for done in completions.values()} == {"stop", "length"}
    text = BYTES.decode(endless["2"].tokens.tolist())
    string = next(text[i : i + 2] for i in range(2, 9) if text[i : i + 2].isascii())
    cut = sampled((), stop_strings=(string,), decode=lambda ids: BYTES.decode(ids.tolist()))
    assert cut["2"].stop == "stop"
    assert len(cut["2"].tokens) < len(endless["2"].tokens)
    assert string in BYTES.decode(cut["2"].tokens.tolist())
    assert string not in BYTES.decode(cut["2"].tokens[:-1].tolist())
    for done in [*endless.values(), *completions.values(), *cut.values()]:
        assert len(done.tokens) == len(done.logprobs)
        assert np.isfinite(done.logprobs).all()


# --- packing and positions --------------------------------------------------------------------


def test_nanovlm_201_positions_restart_and_nothing_leaks():
    """[5, 6, 7] and [8, 9] in a row: changing the first changes no log-prob of the second."""
    first, second = np.array([5, 6, 7, 1], np.int32), np.array([8, 9, 1], np.int32)
    rows = pack([TokenSequence(first, 1), TokenSequence(second, 1)], row=64, rows=5)
    assert rows.tokens[0, :6].tolist() == [5, 6, 7, 8, 9, 0]
    assert rows.positions[0, :5].tolist() == [0, 1, 2, 0, 1]
    changed = dataclasses.replace(rows, tokens=np.where(rows.tokens == 6, 200, rows.tokens))
    before, after = logprobs_of(rows), logprobs_of(changed)
    np.testing.assert_array_equal(before[0, 3:], after[0, 3:])
    assert np.abs(before - after)[0, 1:3].max() > 1e-3


def test_open_instruct_1642_packed_rows_equal_single_rows():
    """Log-probs to 1e-5, so that TIS between the two is 1 and caps nothing."""
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(rng.integers(0, 263, n).astype(np.int32), 2) for n in (9, 30, 14, 21, 5)
    ]
    packed = pack(sequences, row=64, rows=5)
    assert packed.segments.max() >= 3
    together = logprobs_of(packed)
    alone = np.zeros_like(together)
    for i, sequence in enumerate(sequences):
        single = pack([sequence], row=64, rows=5)
        alone[packed.index == i] = logprobs_of(single)[single.index == 0]
    assert np.abs(alone).max() > 5
    np.testing.assert_allclose(together, alone, atol=1e-5)
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), batch_of(packed))
    batch = dataclasses.replace(
        batch, old_logprobs=jnp.asarray(together), sampler_logprobs=jnp.asarray(alone)
    )
    factor = token_factor(batch, Objective(tis="sequence", tis_cap=1.001))
    np.testing.assert_allclose(factor, 1, atol=1e-4)


def test_unsloth_6738_a_long_row_behind_pads():
    """4,028 cells behind 67 pads, and as they are: log-probs equal to 1e-5."""
    tokens = np.random.default_rng(1).integers(0, 263, 4029).astype(np.int32)
    rows = pack([TokenSequence(tokens, 10)], row=4096)
    fields = ("tokens", "targets", "positions", "segments", "mask")
    moved = {name: np.roll(getattr(rows, name), 67, axis=-1) for name in fields}
    moved["tokens"] = np.where(moved["segments"] > 0, moved["tokens"], 99)
    padded = np.roll(logprobs_of(dataclasses.replace(rows, **moved)), -67, axis=-1)
    plain = logprobs_of(rows)
    assert np.abs(plain).max() > 5
    np.testing.assert_allclose(padded, plain, atol=1e-5)


# --- prompts ----------------------------------------------------------------------------------


def test_slime_330_one_think_block_in_the_loss():
    """Turn "reasoning</think>answer": one block, the reasoning is learned, the prompt is not."""
    turns = [Message("user", "1+1?"), Message("assistant", "reasoning</think>answer")]
    ids, learned = encode_example(BYTES, turns)
    for name in ("<think>", "</think>"):
        assert ids.count(BYTES.token_id(name)) == 1
    text = BYTES.decode([i for i, m in zip(ids, learned, strict=True) if m], skip_special=False)
    assert text == "<think>\nreasoning\n</think>\n\nanswer<|im_end|>"
    prompt = encode_prompt(BYTES, turns[:1])
    assert ids[: len(prompt)] == prompt
    assert not any(learned[: len(prompt)])
    rows = pack([TokenSequence(np.array(ids, np.int32), len(prompt))], row=128)
    assert rows.targets[rows.mask].tolist() == ids[len(prompt) :]


def problem_of(length):
    """A problem whose prompt has so many tokens."""
    empty = len(encode_prompt(BYTES, (Message("user", ""),)))
    return Problem(f"p{length}", (Message("user", "x" * (length - empty)),), "1")


def test_verl_1015_a_long_prompt_is_dropped_and_counted(monkeypatch, capsys):
    """558 tokens and a limit of 512: never cut in the middle of the template."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    from inputs import encode_problems
    from session import UsageError

    problems = [problem_of(length) for length in (100, 558, 512, 513)]
    assert len(encode_prompt(BYTES, problems[1].messages)) == 558
    kept, longest = encode_problems(BYTES, problems, 512, name="file")
    assert ([p.id for p in kept], longest) == (["p100", "p512"], 512)
    assert "dropped 2 of 4 problems: prompt over 512 tokens" in capsys.readouterr().out
    with pytest.raises(UsageError, match="every prompt is longer than max_prompt_tokens 512"):
        encode_problems(BYTES, problems[1:2], 512, name="file")


def test_verl_1015_the_sampler_refuses_what_it_cannot_hold():
    engine = EngineConfig(slots=2, length=512)
    prompt = tuple(encode_prompt(BYTES, problem_of(558).messages))
    with pytest.raises(ValueError, match=r"558 prompt tokens .*exceed the engine's length 512"):
        Sampler(weights(), CFG, engine).sample([Request("0", prompt, 0, 8)])
