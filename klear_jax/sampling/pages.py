# SPDX-License-Identifier: Apache-2.0
"""Which slot has which pages, on the host.

Slots and pages are cut into `pieces` of equal size, one for each group of devices that holds slots
of its own; a slot only ever gets pages of its piece. Slots are numbered over all pieces, pages from
0 on each. Free pages are taken lowest first, which keeps the used part of a pool dense.
"""

import heapq

import numpy as np

from klear_jax.sampling.cache import PageMap
from klear_jax.sampling.config import EngineConfig


class PagePool:
    """Free and used pages. Nothing here is on a device; `page_map` is what a dispatch is given."""

    def __init__(self, engine: EngineConfig, *, pieces: int, pages: int, size: int):
        """Of one piece: `pages` that may be used, out of `size` that the devices have."""
        self.engine = engine
        self.pieces = pieces
        self.pages = pages
        self.size = size
        self.width = engine.slots // pieces
        """Slots of a piece."""
        self.rows: list[list[int]] = [[] for _ in range(engine.slots)]
        """Pages of each slot, in order."""
        self._free = [list(range(pages)) for _ in range(pieces)]

    def piece_of(self, slot: int) -> int:
        return slot // self.width

    def free_pages(self, piece: int) -> int:
        return len(self._free[piece])

    def missing(self, slot: int, length: int) -> int:
        """Pages that the slot lacks to hold `length` tokens."""
        return max(-(-length // self.engine.page) - len(self.rows[slot]), 0)

    def grant(self, slot: int, length: int) -> bool:
        """Give the slot pages for `length` tokens in all; nothing changes where there are too
        few."""
        need = self.missing(slot, length)
        free = self._free[self.piece_of(slot)]
        if need > len(free):
            return False
        self.rows[slot] += [heapq.heappop(free) for _ in range(need)]
        return True

    def release(self, slot: int) -> None:
        for page in self.rows[slot]:
            heapq.heappush(self._free[self.piece_of(slot)], page)
        self.rows[slot] = []

    def narrow(self, slots: list[int]) -> None:
        """Go on with these slots only, as many of each piece, renumbered in this order. The others
        must be free."""
        kept = set(slots)
        assert not any(row for slot, row in enumerate(self.rows) if slot not in kept)
        self.rows = [self.rows[slot] for slot in slots]
        self.width = len(slots) // self.pieces

    def compact(self, chunk: int) -> list[list[tuple[int, int]]]:
        """Moves (from page, to page) on each piece that close the holes, where they are as large as
        what is used; attention reads them otherwise. The pages here are renumbered at once."""
        moves = [[] for _ in range(self.pieces)]
        for piece in range(self.pieces):
            rows = self.rows[piece * self.width : (piece + 1) * self.width]
            used = sorted(page for row in rows for page in row)
            if not used or used[-1] + 1 - len(used) < max(chunk, len(used)):
                continue
            # The lowest pages that are free take what lies beyond the number of used pages.
            moves[piece] = list(
                zip(
                    [page for page in used if page >= len(used)],
                    sorted(set(range(len(used))) - set(used)),
                    strict=True,
                )
            )
            new = dict(moves[piece])
            for row in rows:
                row[:] = [new.get(page, page) for page in row]
            # Sorted, so a heap.
            self._free[piece] = list(range(len(used), self.pages))
        return moves

    def page_map(self) -> PageMap:
        """What a dispatch is given: which pages are whose, as arrays of the host."""
        slots = self.width * self.pieces
        table = np.full((slots, self.engine.slot_pages), self.size, np.int32)
        owners = np.full((self.pieces, self.size), self.width, np.int32)
        starts = np.zeros((self.pieces, self.size), np.int32)
        for slot, row in enumerate(self.rows):
            if row:
                piece = self.piece_of(slot)
                table[slot, : len(row)] = row
                owners[piece, row] = slot % self.width
                starts[piece, row] = np.arange(len(row)) * self.engine.page
        taken = owners != self.width
        used = np.where(taken.any(axis=1), self.size - taken[:, ::-1].argmax(axis=1), 0)
        return PageMap(table, owners.reshape(-1), starts.reshape(-1), used.astype(np.int32))
