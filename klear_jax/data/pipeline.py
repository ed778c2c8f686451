# SPDX-License-Identifier: Apache-2.0
"""From demonstrations to the packed batches of supervised fine-tuning.

The one module of `data` that may see jax, since it makes `core.batch.SftBatch`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from klear_jax.core.batch import SftBatch
from klear_jax.data.chat import encode_example
from klear_jax.data.packing import TokenSequence, first_fit, pack
from klear_jax.data.problems import Message
from klear_jax.data.tasks import draw_demonstrations
from klear_jax.data.tokenizer import Tokenizer

ExampleStream = Callable[[int], list[TokenSequence]]
"""Step number -> the examples of that step."""


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> TokenSequence:
    """Ids of a conversation; its last assistant turn is what is learned."""
    tokens, mask = encode_example(tokenizer, messages)
    return TokenSequence(np.asarray(tokens, np.int32), mask.index(True))


def task_examples(
    tokenizer: Tokenizer, names: Sequence[str], count: int, *, seed: int
) -> ExampleStream:
    """Fresh, deliberately flawed demonstrations of the embedded tasks at every step."""

    def stream(step: int) -> list[TokenSequence]:
        shown = draw_demonstrations(names, count, seed=seed * 1_000_003 + step)
        return [encode_conversation(tokenizer, messages) for messages in shown]

    return stream


def sft_batch(
    sequences: Sequence[TokenSequence], *, row_tokens: int, rows: int, microbatches: int
) -> tuple[SftBatch, int]:
    """Pack examples as `[microbatches, rows, row_tokens]`; the loss is their token mean.

    Returns:
        The batch, and how many leading micro-batches hold anything.
    """
    responses = sum(len(s.tokens) - s.prompt_length for s in sequences)
    used = len(first_fit([s.cells for s in sequences], row=row_tokens))
    packed = pack(sequences, row=row_tokens, rows=rows * microbatches)

    def pieces(x: np.ndarray) -> Any:
        # Any: the record's fields are device arrays, which these become when it is placed.
        return x.reshape(microbatches, rows, row_tokens)

    batch = SftBatch(
        tokens=pieces(packed.tokens),
        targets=pieces(packed.targets),
        positions=pieces(packed.positions),
        segments=pieces(packed.segments),
        mask=pieces(packed.mask),
        loss_weights=pieces(packed.mask.astype(np.float32) / np.float32(responses)),
    )
    return batch, -(-used // rows)
