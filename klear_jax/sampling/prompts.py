# SPDX-License-Identifier: Apache-2.0
"""Prompts on their way into slots: packed into rows for prefill, each run once."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Int

from klear_jax.sampling.cache import Pools
from klear_jax.sampling.config import EngineConfig

SMALLEST_BUCKET = 64
"""Rows are 64, 128, 256, ... tokens, so few lengths are compiled."""

Tokens = tuple[int, ...]


def bucket(length: int, engine: EngineConfig) -> int:
    """Tokens of a row that holds a prompt of this length: a power of two, in whole pages."""
    size = SMALLEST_BUCKET
    while size < length:
        size *= 2
    size = min(size, engine.slot_pages * engine.page)
    return -(-size // engine.page) * engine.page


@dataclasses.dataclass(frozen=True)
class PackedPrompts:
    """Prompts side by side in rows, all but their last tokens, each from the start of a page on."""

    tokens: Int[np.ndarray, "n p"]
    positions: Int[np.ndarray, "n p"]
    segments: Int[np.ndarray, "n p"]
    """From 1 on in each row; 0 is padding."""
    pages: tuple[range, ...]
    """Pages of each prompt, counted over all rows."""


def pack_prompts(prompts: Sequence[Tokens], engine: EngineConfig, *, pieces: int) -> PackedPrompts:
    """As many of the prompts, in their order, as `engine.prefill_rows` rows hold (one at least), up
    to one that is so much longer that most cells would be padding.

    The number of rows is a power of two times `pieces`, so few shapes are compiled.
    """
    most = -(-engine.prefill_rows // pieces) * pieces
    needs = [-(-(len(prompt) - 1) // engine.page) for prompt in prompts]
    rows: list[list[int]] = []
    used: list[int] = []
    row_pages = 0
    for number, (prompt, need) in enumerate(zip(prompts, needs, strict=True)):
        width = max(row_pages, bucket(len(prompt), engine) // engine.page)
        row = next((i for i, count in enumerate(used) if count + need <= width), len(used))
        if row == most:
            break
        if rows and width > row_pages:
            # A long prompt would widen the rows of all short ones before it.
            area = max(row + 1, len(rows)) * width
            if area > 2 * (sum(used) + need) + width:
                break
        row_pages = width
        if row == len(used):
            rows.append([])
            used.append(0)
        rows[row].append(number)
        used[row] += need

    height = pieces
    while height < len(rows):
        height *= 2
    shape = (min(height, most), row_pages * engine.page)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    pages: dict[int, range] = {}
    for row, members in enumerate(rows):
        first = 0
        for segment, number in enumerate(members, start=1):
            prompt, start = prompts[number], first * engine.page
            cells = slice(start, start + len(prompt) - 1)
            tokens[row, cells] = prompt[:-1]
            positions[row, cells] = np.arange(len(prompt) - 1)
            segments[row, cells] = segment
            pages[number] = range(row * row_pages + first, row * row_pages + first + needs[number])
            first += needs[number]
    placed = tuple(pages[number] for number in sorted(pages))
    return PackedPrompts(tokens, positions, segments, placed)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the keys and values of a prompt are."""

    prefix: Pools
    pages: range


class PromptPool:
    """Prefilled prompts, each run once and kept until its last request has been inserted."""

    def __init__(self, engine: EngineConfig, run: Callable[[PackedPrompts], Pools], pieces: int):
        self._engine = engine
        self._run = run
        self._pieces = pieces
        self._where: dict[Tokens, Source] = {}
        self._version: int | None = None
        self._waiting: collections.Counter[Tokens] = collections.Counter()

    def expect(self, prompts: Iterable[Tokens]) -> None:
        """Each of these will be taken once."""
        self._waiting.update(prompts)

    def forget(self, prompt: Tokens) -> None:
        """One of those who would take it will not."""
        self._waiting[prompt] -= 1
        if not self._waiting[prompt]:
            del self._waiting[prompt]
            self._where.pop(prompt, None)

    def has(self, prompt: Tokens, version: int) -> bool:
        """Whether the prompt has been run with these weights and is kept."""
        return version == self._version and prompt in self._where

    def take(self, prompt: Tokens, version: int) -> Source:
        """Where the prompt is under the weights of this version; it is run now if it has not been.

        Those that wait behind it are run along where no others are kept: what is kept lies outside
        the page pool, and so stays one prefill of `engine.prefill_rows` rows, beside that of the
        prompt at hand. A prefix is let go of when all its prompts have been taken; equal prompts
        are to come one after the other.
        """
        if version != self._version:
            self._where, self._version = {}, version
        if prompt not in self._where:
            others = () if self._where else (p for p in self._waiting if p != prompt)
            todo = [prompt, *others]
            packed = pack_prompts(todo, self._engine, pieces=self._pieces)
            prefix = self._run(packed)
            new = zip(todo, packed.pages, strict=False)
            self._where |= {tokens: Source(prefix, pages) for tokens, pages in new}
        source = self._where[prompt]
        self.forget(prompt)
        return source
