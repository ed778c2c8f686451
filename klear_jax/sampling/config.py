# SPDX-License-Identifier: Apache-2.0
"""Sizes of the decode engine."""

import dataclasses
from typing import Literal

from klear_jax.sampling.draw import Truncation


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the decode engine, and what ends or truncates a draw."""

    slots: int = 64
    """Sequences decoded at a time, on all devices together."""
    length: int = 256
    """Most tokens of a prompt and its completion together."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion (they stay part of it)."""
    page: int = 32
    """Tokens in a page of the cache. On a TPU 128 fills the lanes."""
    pages: int | None = None
    """Pages in the pool, on all devices together; by default every slot can be full at the same
    time. With fewer, requests wait for pages, and the youngest is set aside when they run out."""
    steps: int = 32
    """Most decode steps in one dispatch."""
    prefill_rows: int = 8
    """Most rows, each of a bucket's length, in one prefill; short prompts share a row."""
    narrowest: int | None = None
    """When nothing waits any more and at most half of the slots are going, decode half as many, and
    so on down to this; each width is compiled once. None: always all slots."""
    truncation: Truncation = Truncation()
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the completion already has are divided by this where
    they are positive and multiplied where negative; 1 is off."""
    backend: Literal["jax", "tpu", "gpu"] | None = None
    """Attention over pages (`sampling.backends`); None: the one of the devices' platform."""

    def __post_init__(self):
        small = {k: getattr(self, k) for k in ("slots", "length", "page", "steps", "prefill_rows")}
        if min(small.values()) < 1:
            raise ValueError(f"engine sizes must be at least 1, not {small}")
        if self.narrowest is not None and not 1 <= self.narrowest <= self.slots:
            raise ValueError(
                f"narrowest {self.narrowest} must lie in 1..{self.slots} (slots); None keeps all"
            )
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"pages {self.pages} must be at least 1, or None for full slots")
        if not self.repetition_penalty > 0:
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty} must be above 0; 1 is off"
            )

    @property
    def slot_pages(self) -> int:
        """Pages of one full slot."""
        return self.pages_for(self.length)

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from another distribution than the trainer's."""
        return self.truncation.on or self.repetition_penalty != 1

    def pages_for(self, length: int) -> int:
        """Pages of a sequence; its last token is never fed, so it needs no place in the cache."""
        return max(-(-(length - 1) // self.page), 1)

    @property
    def pool_pages(self) -> int:
        return self.slots * self.slot_pages if self.pages is None else self.pages

    @property
    def refill(self) -> int:
        """Free slots for which a dispatch ends early while requests wait: few, so that nearly all
        slots are in use, and more than one where there are many, so that dispatches stay long."""
        return max(self.slots // 16, 1)

    def width_for(self, going: int, width: int, pieces: int = 1) -> int:
        """Slots to decode when `going` of `width` are left and nothing waits; a multiple of the
        pieces that they are cut into."""
        least = max(going, self.narrowest or width)
        while width // 2 >= least and width // 2 % pieces == 0:
            width //= 2
        return width

    def check_cut(self, pieces: int) -> None:
        """Check that slots and pages can be cut over the devices that hold different slots.

        Raises:
            ValueError: names the number that has to change.
        """
        for name, number in (("slots", self.slots), ("pages", self.pool_pages)):
            if number % pieces:
                raise ValueError(
                    f"the mesh cuts slots and pages into {pieces} pieces (all its axes but "
                    f"tensor), which do not divide {name} {number}; choose a multiple of {pieces}"
                )
