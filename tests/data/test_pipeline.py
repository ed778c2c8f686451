# SPDX-License-Identifier: Apache-2.0
"""From demonstrations to packed batches: what is learned, and that its weights are a token mean."""

import numpy as np
import pytest

from klear_jax.data import pipeline
from klear_jax.data.packing import TokenSequence
from klear_jax.data.problems import Message
from klear_jax.data.tasks import split_of
from klear_jax.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("bytes")


def sequence(number, length, prompt=2):
    return TokenSequence(np.arange(length, dtype=np.int32) + 10 * number, prompt)


def test_a_conversation_is_learned_from_the_think_block_to_the_end_token():
    messages = (Message("user", "2+2"), Message("assistant", "<think>\nadd\n</think>\n\n4"))
    encoded = pipeline.encode_conversation(TOKENIZER, messages)
    learned = encoded.tokens[encoded.prompt_length :]
    assert TOKENIZER.decode(learned.tolist(), skip_special=False) == (
        "<think>\nadd\n</think>\n\n4<|im_end|>"
    )
    assert learned[-1] == TOKENIZER.end_id
    assert encoded.tokens.dtype == np.int32


def test_batch_by_hand():
    """Rows of 6: [0..4] and a 2-token one; then [10..13]. Prompts of 2, 2 and 1 tokens."""
    examples = [sequence(0, 5), sequence(1, 4), sequence(2, 2, prompt=1)]
    batch, used = pipeline.sft_batch(examples, row_tokens=6, rows=1, microbatches=3)
    assert used == 2
    assert batch.tokens[:, 0].tolist() == [[0, 1, 2, 3, 20, 0], [10, 11, 12, 0, 0, 0], [0] * 6]
    assert batch.targets[:, 0].tolist() == [[1, 2, 3, 4, 21, 0], [11, 12, 13, 0, 0, 0], [0] * 6]
    assert batch.positions[:, 0].tolist() == [[0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 0, 0], [0] * 6]
    assert batch.segments[:, 0].tolist() == [[1, 1, 1, 1, 2, 0], [1, 1, 1, 0, 0, 0], [0] * 6]
    sixth = np.float32(1 / 6)
    assert batch.loss_weights[:, 0].tolist() == [
        [0, sixth, sixth, sixth, sixth, 0], [0, sixth, sixth, 0, 0, 0], [0] * 6,
    ]  # fmt: skip
    assert (np.asarray(batch.loss_weights) > 0).tolist() == np.asarray(batch.mask).tolist()
    assert batch.loss_weights.dtype == np.float32


@pytest.mark.parametrize(("rows", "expected"), [(1, 3), (2, 2), (3, 1), (4, 1)])
def test_used_microbatches(rows, expected):
    examples = [sequence(i, 6) for i in range(3)]
    batch, used = pipeline.sft_batch(examples, row_tokens=8, rows=rows, microbatches=4)
    assert batch.tokens.shape == (4, rows, 8)
    assert used == expected
    assert np.asarray(batch.segments)[:used].any(axis=(1, 2)).all()
    assert not np.asarray(batch.segments)[used:].any()


def test_task_examples_are_fresh_and_repeatable():
    stream = pipeline.task_examples(TOKENIZER, ("sum", "sort"), 6, seed=1)
    steps = [[s.tokens.tolist() for s in stream(n)] for n in range(3)]
    again = pipeline.task_examples(TOKENIZER, ("sum", "sort"), 6, seed=1)
    assert steps == [[s.tokens.tolist() for s in again(n)] for n in range(3)]
    assert len({tuple(t) for step in steps for t in step}) == 18
    other = pipeline.task_examples(TOKENIZER, ("sum", "sort"), 6, seed=2)
    assert steps[0] != [s.tokens.tolist() for s in other(0)]


def test_task_examples_never_show_a_held_out_question():
    stream = pipeline.task_examples(TOKENIZER, ("sum", "sort"), 200, seed=0)
    for example in stream(0):
        text = TOKENIZER.decode(example.tokens.tolist(), skip_special=False)
        question = text.partition("user\n")[2].partition("<|im_end|>")[0]
        assert split_of(question) == "train"
