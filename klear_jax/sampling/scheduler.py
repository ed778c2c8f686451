# SPDX-License-Identifier: Apache-2.0
"""Who waits, who runs in which slot, and who has to make room: the host's side of one call."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.engine import Emitted
from klear_jax.sampling.pages import PagePool
from klear_jax.sampling.request import Completion, Request
from klear_jax.sampling.stops import StopStrings

Decode = Callable[[np.ndarray], str]
"""Token ids -> text."""


class Running:
    """A request that has been started, or set aside, with what it has drawn so far."""

    def __init__(self, request: Request, order: int, decode: Decode | None):
        self.request = request
        self.order = order
        """Place in the queue at the start; the one with the largest is the youngest."""
        self.length = len(request.feed)
        """Tokens of prompt and completion together."""
        self.stop_strings = StopStrings(request.stop_strings, decode)
        # Tokens, log-probs, log-probs of the draw, versions; one array for each dispatch.
        self._parts: list[tuple[np.ndarray, ...]] = []
        if request.continues is not None:
            done = request.continues
            self._keep(done.tokens, done.logprobs, done.drawn_logprobs, done.versions)
            # A stop string may have begun in them.
            self.stop_strings.pass_over(done.tokens)

    @property
    def last_length(self) -> int:
        """Tokens that the cache holds at most: the last one drawn is never fed."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    @property
    def feed(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        drawn = [token for tokens, *_ in self._parts for token in tokens.tolist()]
        return self.request.prompt + tuple(drawn)

    def _keep(self, tokens, logprobs, drawn_logprobs, versions) -> None:
        drawn_logprobs = logprobs if drawn_logprobs is None else drawn_logprobs
        versions = np.zeros(len(tokens), np.int32) if versions is None else versions
        self._parts.append((tokens, logprobs, drawn_logprobs, versions))

    def add(self, emitted: Emitted, slot: int, version: int) -> bool:
        """Take what a dispatch drew, up to where a stop string is complete; whether one was."""
        tokens = np.asarray(emitted.tokens[:, slot])
        tokens = tokens[: int((tokens >= 0).sum())]
        cut = self.stop_strings.find(tokens)
        if cut is not None:
            tokens = tokens[:cut]
        count = len(tokens)
        of_draw = emitted.drawn_logprobs
        self._keep(
            tokens,
            emitted.logprobs[:count, slot],
            None if of_draw is None else of_draw[:count, slot],
            np.full(count, version, np.int32),
        )
        self.length += count
        return cut is not None

    def completion(self, stop, *, truncated: bool) -> Completion:
        empty = (np.zeros(0, np.int32), np.zeros(0, np.float32))
        parts = self._parts or [(*empty, empty[1], empty[0])]
        tokens, logprobs, of_draw, versions = (np.concatenate(p) for p in zip(*parts, strict=True))
        return Completion(
            self.request.id, tokens, logprobs, stop, of_draw if truncated else None, versions
        )


class Scheduler:
    """Requests of one call on their way through the slots.

    A request starts when a slot is free and pages for its first dispatch are; it gets more pages as
    it grows. When they run out the youngest is set aside: it goes back to the front of the queue
    and later continues from what it has drawn. The oldest always goes on, so all finish.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        engine: EngineConfig,
        pool: PagePool,
        decode: Decode | None,
    ):
        self.engine = engine
        self.pool = pool
        self.waiting = collections.deque(
            Running(request, order, decode) for order, request in enumerate(requests)
        )
        self.running: dict[int, Running] = {}
        self.width = engine.slots
        """Slots that are decoded."""
        self.set_aside = 0
        """Times that a request had to make room."""
        self._free = set(range(engine.slots))
        self._stop_ids = frozenset(engine.stop_ids)

    def grow(self) -> list[tuple[int, Running]]:
        """Give every running request pages for the next dispatch, oldest first; those that had to
        make room, with the slots they leave."""
        left = []
        for slot, one in sorted(self.running.items(), key=lambda item: item[1].order):
            while slot in self.running and not self.pool.grant(slot, self._next_length(one)):
                piece = self.pool.piece_of(slot)
                rivals = [s for s in self.running if self.pool.piece_of(s) == piece]
                victim = max(rivals, key=lambda s: self.running[s].order)
                left.append((victim, self.running[victim]))
                self._leave(victim)
        self.set_aside += len(left)
        # The oldest of them goes first again.
        for _, one in sorted(left, key=lambda item: -item[1].order):
            self.waiting.appendleft(one)
        return left

    def start(self) -> list[tuple[int, Running]]:
        """Waiting requests, in their order, that get a slot and pages now. None overtakes another,
        so a long one is not starved."""
        started = []
        while self.waiting and self._free:
            one = self.waiting[0]
            length = self._next_length(one)
            slot = self._roomiest_slot()
            piece = self.pool.piece_of(slot)
            need = self.pool.missing(slot, length)
            if self.pool.free_pages(piece) < need + self._soon(piece):
                break
            assert self.pool.grant(slot, length)
            self._free.remove(slot)
            self.running[slot] = self.waiting.popleft()
            started.append((slot, one))
        return started

    def _next_length(self, one: Running) -> int:
        """Tokens in the cache after the next dispatch, at most."""
        return min(one.length - 1 + self.engine.steps, one.last_length)

    def _soon(self, piece: int) -> int:
        """Pages that those who run on this piece may ask for after the next dispatch."""
        ahead = self.engine.steps
        return sum(
            self.pool.missing(slot, min(self._next_length(one) + ahead, one.last_length))
            for slot, one in self.running.items()
            if self.pool.piece_of(slot) == piece
        )

    def _roomiest_slot(self) -> int:
        """A free slot on the piece with most free pages."""
        pool = self.pool
        return min(self._free, key=lambda slot: (-pool.free_pages(pool.piece_of(slot)), slot))

    def _leave(self, slot: int) -> Running:
        self.pool.release(slot)
        self._free.add(slot)
        return self.running.pop(slot)

    def collect(
        self, emitted: Emitted, version: int
    ) -> tuple[list[tuple[Running, bool]], list[int]]:
        """Take what a dispatch drew: who ended (and whether by a stop string), and the slots of
        those by a stop string, which are still going on the device.

        Args:
            version: of the weights that it was drawn with.
        """
        ended, halted = [], []
        for slot, one in list(self.running.items()):
            by_string = one.add(emitted, slot, version)
            if emitted.live[slot] and not by_string:
                continue
            if emitted.live[slot]:
                halted.append(slot)
            ended.append((one, by_string))
            self._leave(slot)
        return ended, halted

    def completion(self, one: Running, by_string: bool) -> Completion:
        """What a request that ended has drawn."""
        done = one.completion("length", truncated=self.engine.truncated)
        if by_string or int(done.tokens[-1]) in self._stop_ids:
            return dataclasses.replace(done, stop="stop")
        return done

    def withdraw(self, ids: Iterable[str] | None, stop) -> tuple[list[Completion], list[int]]:
        """End requests of these ids (None: all) as they are, and the slots that are to be halted.

        Requests that have ended already are not there any more and are ignored.
        """
        chosen = None if ids is None else set(ids)

        def meant(one: Running) -> bool:
            return chosen is None or one.request.id in chosen

        slots = [slot for slot, one in self.running.items() if meant(one)]
        out = [self._leave(slot) for slot in slots]
        out += [one for one in self.waiting if meant(one)]
        self.waiting = collections.deque(one for one in self.waiting if not meant(one))
        truncated = self.engine.truncated
        return [one.completion(stop, truncated=truncated) for one in out], slots

    def narrow(self) -> np.ndarray | None:
        """Slots to go on with, [pieces, w] as numbered on each piece, where nothing waits and fewer
        will do; they are renumbered at once."""
        pieces, width = self.pool.pieces, self.pool.width
        of_piece = [
            [slot for slot in self.running if self.pool.piece_of(slot) == piece]
            for piece in range(pieces)
        ]
        most = pieces * max(map(len, of_piece))
        fewer = self.engine.width_for(most, self.width, pieces)
        if self.waiting or fewer == self.width:
            return None
        kept = []
        for piece, slots in enumerate(of_piece):
            mine = range(piece * width, (piece + 1) * width)
            kept.append([*slots, *(s for s in mine if s not in slots)][: fewer // pieces])
        flat = [slot for slots in kept for slot in slots]
        self.pool.narrow(flat)
        self.running = {new: self.running[s] for new, s in enumerate(flat) if s in self.running}
        self._free = set(range(fewer)) - set(self.running)
        self.width = fewer
        return np.asarray(kept, np.int32) % width

    def refill(self) -> int:
        """Free slots for which the next dispatch comes back early."""
        if self.waiting:
            return self.engine.refill
        if self.engine.width_for(1, self.width, self.pool.pieces) < self.width:
            return max(len(self.running) - self.width // 2, 1)
        return self.width + 1
