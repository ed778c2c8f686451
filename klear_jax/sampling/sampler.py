# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests in, completions out as each one finishes. Read `Sampler._run`."""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from klear_jax.core import mesh as mesh_lib
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params
from klear_jax.sampling import backends, weights
from klear_jax.sampling import engine as engine_lib
from klear_jax.sampling.cache import Pools
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.engine import Copies, Insertion
from klear_jax.sampling.pages import PagePool
from klear_jax.sampling.prompts import PackedPrompts, PromptPool, Source
from klear_jax.sampling.request import Completion, Request, check_request
from klear_jax.sampling.scheduler import Decode, Running, Scheduler


@dataclasses.dataclass
class SampleCounts:
    """What a call of `sample` did; for benchmarks and tests."""

    prefilled_tokens: int = 0
    dispatches: int = 0
    fetches: int = 0
    """Times that the host waited for a result."""
    steps: int = 0
    row_steps: int = 0
    """Steps x slots that were decoded."""
    live_steps: int = 0
    """Those of them that drew a token."""
    busy_row_steps: int = 0
    """Row steps while requests waited."""
    busy_live_steps: int = 0
    set_aside: int = 0
    """Times that a request had to make room for an older one."""

    def __add__(self, other: "SampleCounts") -> "SampleCounts":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return SampleCounts(*(a + b for a, b in pairs))

    @property
    def fill(self) -> float:
        """Share of slots in use while requests waited; NaN where none ever did."""
        return self.busy_live_steps / self.busy_row_steps if self.busy_row_steps else float("nan")


class Sampler:
    """Draws completions from `params`; call inside `jax.set_mesh` where the parameters are cut."""

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        engine: EngineConfig,
        *,
        seed: int = 0,
        decode: Decode | None = None,
        mesh: Mesh | None = None,
        dtype: Any = None,
    ):
        """
        Args:
            params: the trainer's.
            decode: turns tokens into text, for requests with stop strings. Only what it shows can
                be found: `Tokenizer.decode` leaves special tokens out unless told not to.
            mesh: to sample on; None: the one that is set by the caller, where `params` lie.
            dtype: of the sampler's weights; None: that of `params`.
        """
        self.cfg = cfg
        self.mesh = mesh
        self.dtype = dtype
        self.version = -1
        """Number of the weights: 0 for the first, one more for each `update` with others."""
        self.copied_bytes = 0
        """Bytes that the last change of weights copied; 0 where they are the trainer's arrays."""
        self._params: Params | None = None
        # The trainer's arrays behind them, which may be gone by now.
        self._sources: tuple[Callable[[], Any], ...] = ()
        self.update(params)
        self.engine = engine
        self.seed = seed
        self.decode = decode
        self.counts = SampleCounts()
        self._state: Any = None
        self._call = 0
        self._lock = threading.Lock()
        self._cancelled: set[str] = set()
        self._interrupted = False

    def update(self, params: Params) -> None:
        """Go on with the trainer's weights `params`; nothing happens where they are the same.

        Call where the trainer's mesh is set, and not while a call of `sample` is running, unless
        tokens of two versions in one completion are wanted.

        Raises:
            WeightMismatchError: the copy gives other log-probs than `params`.
        """
        leaves = jax.tree.leaves(params)
        known = [source() for source in self._sources]
        if len(leaves) == len(known) and all(a is b for a, b in zip(leaves, known, strict=True)):
            return
        self.release()
        swapped = weights.swap(params, self.cfg, mesh=self.mesh, dtype=self.dtype)
        if swapped.copied_bytes:
            weights.probe(params, swapped.params, self.cfg, mesh=self.mesh)
        self._params = swapped.params
        self.copied_bytes = swapped.copied_bytes
        self.version += 1
        self._sources = tuple(weakref.ref(leaf) for leaf in leaves)

    @property
    def params(self) -> Params:
        """The weights that are sampled with.

        Raises:
            RuntimeError: there are none, since `release`, or an `update` that failed.
        """
        if self._params is None:
            raise RuntimeError(
                "this Sampler has let go of its weights (release(), or an update() that failed); "
                "give it some with update(params) before it samples"
            )
        return self._params

    def release(self) -> None:
        """Let go of the weights, so that those of the next `update` are not held beside them."""
        self._params = None
        # Should that update fail, another must not take these for the ones that are here.
        self._sources = ()

    def _on_mesh(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions in the order in which they finish.

        Raises:
            ValueError: a request is empty, can never fit, or has no room for a token; the mesh does
                not divide slots or pages.
            RuntimeError: there are no weights.
        """
        _ = self.params
        with self._on_mesh():
            return self._start(list(requests))

    def _start(self, requests: list[Request]) -> Iterator[Completion]:
        pieces = mesh_lib.pieces_of("batch", mesh_lib.SAMPLE)
        engine = dataclasses.replace(
            self.engine,
            backend=backends.choose(self.engine.backend, self.cfg, self.engine.page).name,
        )
        engine.check_cut(pieces)
        pages = engine.pool_pages // pieces
        for request in requests:
            check_request(request, self.cfg, engine, pages=pages, decodes=self.decode is not None)
        if len({request.id for request in requests}) < len(requests):
            raise ValueError("two requests of one call have the same id; ids name completions")
        self.counts = SampleCounts()
        # An earlier call that was left half-way may have slots going: this one starts from a clean
        # state, and lets go of the old cache first, so that there are never two.
        self._state = None
        self._call += 1
        with self._lock:
            self._cancelled, self._interrupted = set(), False
        size = engine_lib.pages_of_piece(engine, pieces)
        pool = PagePool(engine, pieces=pieces, pages=pages, size=size)
        # Equal prompts one after the other, so that each is run once and need not be kept for long.
        first: dict[tuple[int, ...], int] = {}
        requests.sort(key=lambda request: first.setdefault(request.feed, len(first)))
        return self._run(requests, engine, pool, self._call)

    def cancel(self, request_id: str) -> None:
        """End a request of the running call; it is yielded as it is then, with stop `cancelled`.

        From any thread. A request that has ended already stays as it is.
        """
        with self._lock:
            self._cancelled.add(request_id)

    def interrupt(self) -> None:
        """End the running call: every request that has not ended is yielded with stop `partial`, to
        be continued by a later call (`Request.continues`), perhaps with other weights.

        From any thread.
        """
        with self._lock:
            self._interrupted = True

    def _run(
        self, requests: Sequence[Request], engine: EngineConfig, pool: PagePool, call: int
    ) -> Iterator[Completion]:
        """One turn of the loop: make room, fill free slots, send a dispatch; hand out what the
        dispatch before it ended, while the device works; then wait for the new one."""
        self._check_current(call)
        try:
            yield from self._turns(requests, engine, pool, call)
        finally:
            # Also where this was left half-way.
            if call == self._call:
                self._state = None

    def _turns(
        self, requests: Sequence[Request], engine: EngineConfig, pool: PagePool, call: int
    ) -> Iterator[Completion]:
        with self._on_mesh():
            self._state = engine_lib.init_state(self.cfg, engine)
        schedule = Scheduler(requests, engine, pool, self.decode)
        prompts = PromptPool(engine, self._prefill_with(engine), pool.pieces)
        prompts.expect(request.feed for request in requests)
        ended: list[tuple[Running, bool]] = []
        while True:
            with self._on_mesh():
                withdrawn = self._withdraw(schedule, prompts)
                self._make_room(schedule, prompts)
                self._fill(schedule, prompts)
                version = self.version
                sent = self._dispatch(schedule) if schedule.running else None
            if sent is None:
                # The cache is memory that the caller can use.
                self._state = None
            for one, by_string in ended:
                yield schedule.completion(one, by_string)
                self._check_current(call)
            for completion in withdrawn:
                yield completion
                self._check_current(call)
            if sent is None:
                break
            emitted = jax.device_get(sent)
            self._count(schedule, emitted)
            ended, halted = schedule.collect(emitted, version)
            with self._on_mesh():
                self._halt(halted, schedule.width)

    def _check_current(self, call: int) -> None:
        if call != self._call:
            raise RuntimeError(
                "a later call of sample() has taken the slots of this one; finish an iterator "
                "before the next call, or use a Sampler of its own"
            )

    def _withdraw(self, schedule: Scheduler, prompts: PromptPool) -> list[Completion]:
        """End what `cancel` and `interrupt` asked to end since the last turn."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            interrupted = self._interrupted
        done: list[Completion] = []
        for ids, stop in ((cancelled, "cancelled"), (None, "partial")):
            if (ids is None and not interrupted) or ids == set():
                continue
            waiting = list(schedule.waiting)
            completions, slots = schedule.withdraw(ids, stop)
            self._halt(slots, schedule.width)
            for one in waiting:
                if one not in schedule.waiting:
                    prompts.forget(one.feed)
            done += completions
        return done

    def _make_room(self, schedule: Scheduler, prompts: PromptPool) -> None:
        """Pages for those who run, at the cost of the youngest; fewer slots at the tail."""
        left = schedule.grow()
        self._halt([slot for slot, _ in left], schedule.width)
        prompts.expect(one.feed for _, one in left)
        self.counts.set_aside = schedule.set_aside
        if schedule.running and (slots := schedule.narrow()) is not None:
            self._state = engine_lib.narrow(self._state, slots)

    def _fill(self, schedule: Scheduler, prompts: PromptPool) -> None:
        """Give waiting requests free slots, and copy their prompts' pages there."""
        members: list[tuple[int, Running, Source]] = []

        def insert() -> None:
            if members:
                new, prefix = self._insertion(members, schedule), members[0][2].prefix
                self._state = engine_lib.insert(
                    self._state, prefix, new, cfg=self.cfg, engine=schedule.engine
                )
                members.clear()

        def add(slot: int, one: Running) -> None:
            # One prefix at a time: the last one is let go of before another is made.
            if not prompts.has(one.feed, self.version):
                insert()
            source = prompts.take(one.feed, self.version)
            if members and members[0][2].prefix is not source.prefix:
                insert()
            members.append((slot, one, source))

        for slot, one in schedule.start():
            add(slot, one)
        insert()

    def _insertion(
        self, members: Sequence[tuple[int, Running, Source]], schedule: Scheduler
    ) -> Insertion:
        width, pool = schedule.width, schedule.pool

        def column(values, dtype):
            filled = np.zeros(width, dtype)
            for (slot, _, _), value in zip(members, values, strict=True):
                filled[slot] = value
            return filled

        runs = [one for _, one, _ in members]
        pairs = [
            (slot, source_page, page)
            for slot, _, source in members
            for source_page, page in zip(source.pages, pool.rows[slot], strict=False)
        ]
        seen = None
        if self.engine.repetition_penalty != 1:
            seen = np.zeros((width, self.cfg.vocab), bool)
            for slot, one, _ in members:
                seen[slot, list(one.feed)] = True
        return Insertion(
            fresh=column([True] * len(runs), bool),
            tokens=column((one.feed[-1] for one in runs), np.int32),
            positions=column((one.length - 1 for one in runs), np.int32),
            budgets=column((one.last_length + 1 - one.length for one in runs), np.int32),
            sample_ids=column((one.request.sample_id for one in runs), np.uint32),
            temperatures=column((one.request.temperature for one in runs), np.float32),
            seen=seen,
            copies=_copies(
                [[p[1:] for p in pairs if pool.piece_of(p[0]) == i] for i in range(pool.pieces)],
                schedule.engine,
            ),
        )

    def _dispatch(self, schedule: Scheduler) -> engine_lib.Emitted:
        """Send up to `engine.steps` decode steps; the result is not waited for."""
        engine = schedule.engine
        moves = schedule.pool.compact(engine_lib.backend_of(engine).chunk(engine.page))
        if any(moves):
            self._state = engine_lib.move_pages(
                self._state, _copies(moves, engine), cfg=self.cfg, engine=engine
            )
        self._state, emitted = engine_lib.generate(
            self.params, self._state, schedule.pool.page_map(), np.int32(self.seed),
            np.int32(schedule.refill()), cfg=self.cfg, engine=engine,
        )  # fmt: skip
        return emitted

    def _count(self, schedule: Scheduler, emitted: engine_lib.Emitted) -> None:
        counts, live = self.counts, int((emitted.tokens >= 0).sum())
        rows = int(emitted.steps) * schedule.width
        counts.dispatches += 1
        counts.fetches += 1
        counts.steps += int(emitted.steps)
        counts.row_steps += rows
        counts.live_steps += live
        if schedule.waiting:
            counts.busy_row_steps += rows
            counts.busy_live_steps += live

    def _halt(self, slots: Sequence[int], width: int) -> None:
        if slots:
            mask = np.zeros(width, bool)
            mask[list(slots)] = True
            self._state = engine_lib.halt(self._state, mask)

    def _prefill_with(self, engine: EngineConfig):
        def run(packed: PackedPrompts) -> Pools:
            self.counts.prefilled_tokens += int((packed.segments > 0).sum())
            return engine_lib.prefill(
                self.params, packed.tokens, packed.positions, packed.segments,
                cfg=self.cfg, engine=engine,
            )  # fmt: skip

        return run


def _copies(of_piece: Sequence[Sequence[tuple[int, int]]], engine: EngineConfig) -> Copies:
    """Lists of (from page, to page), one for each piece, as arrays of one size."""
    most = engine.slots * engine.slot_pages
    sources, destinations = (np.zeros((len(of_piece), most), np.int32) for _ in range(2))
    for piece, pairs in enumerate(of_piece):
        for array, pages in zip((sources, destinations), zip(*pairs, strict=True), strict=False):
            array[piece, : len(pages)] = pages
    return Copies(sources, destinations, np.asarray([len(p) for p in of_piece], np.int32))
