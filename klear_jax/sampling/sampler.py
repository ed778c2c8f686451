# SPDX-License-Identifier: Apache-2.0
"""Continuous batching on the host: requests in, completions out as each one finishes."""

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params
from klear_jax.sampling import engine as engine_lib
from klear_jax.sampling.engine import EngineConfig, Insertion, Prefix

SMALLEST_BUCKET = 64
"""Prompts are padded to 64, 128, 256, ... tokens, so few lengths are compiled."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to be drawn. Requests with the same prompt share its prefill."""

    id: str
    prompt: tuple[int, ...]
    sample_id: int
    """Names the noise: equal (seed, sample_id, weights, prompt) give equal tokens. 32 bits."""
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was drawn for a request."""

    id: str
    tokens: np.ndarray
    """int32; with the end token where there is one."""
    logprobs: np.ndarray
    """Nats, at the sampling temperature over the live vocabulary; as many as tokens."""
    stop: Literal["stop", "length"]
    """Whether an end token or the limit of tokens ended it."""


@dataclasses.dataclass
class SampleCounts:
    """What a call of `sample` did; for benchmarks and tests."""

    prefilled_tokens: int = 0
    dispatches: int = 0
    steps: int = 0
    live_steps: int = 0
    """Steps x slots that drew a token."""


class Sampler:
    """Draws completions from `params`; call inside `jax.set_mesh` where the parameters are cut."""

    def __init__(self, params: Params, cfg: ModelConfig, engine: EngineConfig, *, seed: int = 0):
        self.params = params
        self.cfg = cfg
        self.engine = engine
        self.seed = seed
        self.counts = SampleCounts()
        self._state = None
        self._call = 0

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions in the order in which they finish.

        Raises:
            ValueError: a request is empty, too long for the engine, or has no room for a token.
        """
        requests = list(requests)
        for request in requests:
            check_request(request, self.cfg, self.engine)
        self.counts = SampleCounts()
        # An earlier call that was left half-way may have slots going: start from a clean state, and
        # let go of the old cache first, so that there are never two.
        self._state = None
        self._state = engine_lib.init_state(self.cfg, self.engine)
        self._call += 1
        return self._run(requests, self._call)

    def _run(self, requests: Sequence[Request], call: int) -> Iterator[Completion]:
        table = _PageTable(self.engine)
        prompts = _PromptPool(self, requests)
        waiting = collections.deque(requests)
        running: dict[int, _Running] = {}
        seed = jnp.asarray(self.seed, jnp.int32)
        width = self.engine.slots
        while waiting or running:
            if call != self._call:
                raise RuntimeError(
                    "a later call of sample() has taken the slots of this one; finish an iterator "
                    "before the next call, or use a Sampler of its own"
                )
            if waiting:
                self._fill(waiting, running, table, prompts)
            refill = max(width // 8, 1)
            if not waiting:
                running, width = self._narrow(running, width)
                # Come back when the next halving is due; where there is none, when all have ended.
                halves = self.engine.width_for(1, width) < width
                refill = len(running) - width // 2 if halves else width + 1
            self._state, emitted = engine_lib.generate(
                self.params, self._state, seed, jnp.asarray(refill), cfg=self.cfg,
                engine=self.engine,
            )  # fmt: skip
            emitted = jax.device_get(emitted)
            self.counts.dispatches += 1
            self.counts.steps += int(emitted.steps)
            self.counts.live_steps += int((emitted.tokens >= 0).sum())
            for slot in [s for s in running if not emitted.live[s]]:
                record = running.pop(slot)
                record.add(emitted, slot)
                table.release(record.place)
                yield record.completion(self.engine.stop_ids)
            for slot, record in running.items():
                record.add(emitted, slot)
        # The cache is memory that the training step can use.
        self._state = None

    def _fill(self, waiting, running, table: "_PageTable", prompts: "_PromptPool") -> None:
        """Give waiting requests free slots, in their order, as far as pages reach."""
        by_prefix: dict[int, list[tuple[int, int, Request]]] = collections.defaultdict(list)
        while waiting and table.reserve(waiting[0]):
            request = waiting.popleft()
            slot = table.newest
            running[slot] = _Running(request, slot)
            batch, row = prompts.locate(request)
            by_prefix[batch].append((slot, row, request))
        for batch, members in by_prefix.items():
            new = self._insertion(members, table)
            self._state = engine_lib.insert(self._state, prompts.prefixes[batch], new)
        prompts.forget(waiting)

    def _narrow(
        self, running: dict[int, "_Running"], width: int
    ) -> tuple[dict[int, "_Running"], int]:
        """Go on with as few of `width` slots as the engine allows; what runs in them, and how
        many they are."""
        fewer = self.engine.width_for(len(running), width)
        if fewer == width:
            return running, width
        assert self._state is not None
        free = [slot for slot in range(width) if slot not in running]
        slots = np.asarray([*running, *free][:fewer], np.int32)
        self._state = engine_lib.narrow(self._state, slots)
        return dict(enumerate(running.values())), fewer

    def _insertion(self, members, table: "_PageTable") -> Insertion:
        slots = self.engine.slots
        missing = slots - len(members)
        requests = [request for _, _, request in members]

        def column(values, dtype, fill=0):
            return np.asarray(list(values) + [fill] * missing, dtype)

        return Insertion(
            slots=column((slot for slot, _, _ in members), np.int32, slots),
            rows=column((row for _, row, _ in members), np.int32),
            table=np.stack([table.rows[slot] for slot, _, _ in members] + [table.none] * missing),
            tokens=column((r.prompt[-1] for r in requests), np.int32),
            positions=column((len(r.prompt) - 1 for r in requests), np.int32),
            budgets=column((r.max_tokens for r in requests), np.int32),
            sample_ids=column((r.sample_id for r in requests), np.uint32),
            temperatures=column((r.temperature for r in requests), np.float32),
        )

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefix:
        """Run up to `engine.prefill_rows` prompts, padded to the bucket of the longest."""
        length = bucket(max(len(p) for p in prompts), self.engine)
        tokens = np.zeros((self.engine.prefill_rows, length), np.int32)
        lengths = np.zeros(self.engine.prefill_rows, np.int32)
        for row, prompt in enumerate(prompts):
            # The last token is left to the first decode step.
            tokens[row, : len(prompt) - 1] = prompt[:-1]
            lengths[row] = len(prompt) - 1
        self.counts.prefilled_tokens += int(lengths.sum())
        return engine_lib.prefill(self.params, tokens, lengths, cfg=self.cfg)


def bucket(length: int, engine: EngineConfig) -> int:
    """Tokens that a prompt of this length is padded to: a power of two, in whole pages."""
    size = SMALLEST_BUCKET
    while size < length:
        size *= 2
    size = min(size, engine.slot_pages * engine.page)
    return -(-size // engine.page) * engine.page


def check_request(request: Request, cfg: ModelConfig, engine: EngineConfig) -> None:
    """Refuse what the engine cannot draw.

    Raises:
        ValueError: names the request and what would fit.
    """
    prompt, limit = len(request.prompt), engine.length
    if not prompt or request.max_tokens < 1:
        raise ValueError(
            f"request {request.id}: needs a prompt and max_tokens >= 1, has {prompt} prompt tokens "
            f"and max_tokens {request.max_tokens}"
        )
    if prompt + request.max_tokens > limit:
        raise ValueError(
            f"request {request.id}: {prompt} prompt tokens and up to {request.max_tokens} more "
            f"exceed the engine's length {limit}; shorten it or raise EngineConfig.length"
        )
    if not 0 <= min(request.prompt) <= max(request.prompt) < cfg.live_vocab:
        raise ValueError(
            f"request {request.id}: prompt ids lie in {min(request.prompt)}.."
            f"{max(request.prompt)}, the model knows 0..{cfg.live_vocab - 1}; is it the model's "
            "own tokenizer?"
        )
    if not 0 <= request.sample_id < 2**32 or not request.temperature >= 0:
        raise ValueError(
            f"request {request.id}: sample_id {request.sample_id} must be an unsigned 32-bit "
            f"number and temperature {request.temperature} be >= 0"
        )


class _Running:
    """A request in a slot and what it has drawn so far."""

    def __init__(self, request: Request, place: int):
        self.request = request
        self.place = place
        """Its slot in the page table; the one on the device changes when slots become fewer."""
        self.tokens: list[np.ndarray] = []
        self.logprobs: list[np.ndarray] = []

    def add(self, emitted, slot: int) -> None:
        count = int((emitted.tokens[:, slot] >= 0).sum())
        self.tokens.append(emitted.tokens[:count, slot])
        self.logprobs.append(emitted.logprobs[:count, slot])

    def completion(self, stop_ids: tuple[int, ...]) -> Completion:
        tokens = np.concatenate(self.tokens)
        stop = "stop" if int(tokens[-1]) in stop_ids else "length"
        return Completion(self.request.id, tokens, np.concatenate(self.logprobs), stop)


class _PageTable:
    """Free slots and pages. A request reserves all pages it may need before it starts."""

    def __init__(self, engine: EngineConfig):
        self.engine = engine
        self.none = np.full(engine.slot_pages, engine.pool_pages, np.int32)
        self.rows: dict[int, np.ndarray] = {}
        self._free_slots = list(range(engine.slots))
        # Lowest ids first keeps the used part of the pool dense.
        self._free_pages = list(range(engine.pool_pages))

    def reserve(self, request: Request) -> bool:
        """Take a slot (then `newest`) and pages for the request; False where there are none."""
        need = self.engine.pages_for(len(request.prompt) + request.max_tokens)
        if not self._free_slots or len(self._free_pages) < need:
            return False
        self.newest = heapq.heappop(self._free_slots)
        row = self.none.copy()
        row[:need] = [heapq.heappop(self._free_pages) for _ in range(need)]
        self.rows[self.newest] = row
        return True

    def release(self, slot: int) -> None:
        for page in self.rows.pop(slot):
            if page != self.engine.pool_pages:
                heapq.heappush(self._free_pages, int(page))
        heapq.heappush(self._free_slots, slot)


class _PromptPool:
    """Prefilled prompts, each run once and kept until its last request has been inserted."""

    def __init__(self, sampler: Sampler, requests: Sequence[Request]):
        self._sampler = sampler
        self._todo = collections.deque(dict.fromkeys(request.prompt for request in requests))
        self._where: dict[tuple[int, ...], tuple[int, int]] = {}
        self.prefixes: dict[int, Prefix] = {}
        self._batches = 0

    def locate(self, request: Request) -> tuple[int, int]:
        """(prefix, row) of the request's prompt; runs the next prompts in the queue if needed."""
        while request.prompt not in self._where:
            rows = min(self._sampler.engine.prefill_rows, len(self._todo))
            batch = [self._todo.popleft() for _ in range(rows)]
            self.prefixes[self._batches] = self._sampler.prefill(batch)
            self._where |= {prompt: (self._batches, row) for row, prompt in enumerate(batch)}
            self._batches += 1
        return self._where[request.prompt]

    def forget(self, waiting: Iterable[Request]) -> None:
        """Drop prefixes that no waiting request refers to."""
        needed = {self._where[r.prompt][0] for r in waiting if r.prompt in self._where}
        self.prefixes = {k: v for k, v in self.prefixes.items() if k in needed}
