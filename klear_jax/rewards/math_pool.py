# SPDX-License-Identifier: Apache-2.0
"""A pool of algebra workers with a hard limit on each comparison.

Owns processes, pipes and kills. Workers are started by exec, not by `multiprocessing`: its spawn
and forkserver methods run the caller's main script again in every worker, which would import jax
there, and plain fork is unsafe under jax's threads. Any thread may call; each call has a worker
to itself.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

WORKER = "klear_jax.rewards.symbolic"


class OverLimit(Exception):
    """The comparison went over its limit of time or memory; its worker was killed."""


class WorkerFailed(Exception):
    """A worker died or would not start, twice in a row."""


class MathPool:
    """Up to `size` workers, started when needed, replaced after a kill or `max_tasks` tasks."""

    def __init__(
        self, size: int, *, limit_s: float = 2.0, start_s: float = 120.0, max_tasks: int = 5_000
    ) -> None:
        """`limit_s` is for one comparison; `start_s` for the start of a worker, not counted."""
        self.owner = os.getpid()
        self._limit_s = limit_s
        self._start_s = start_s
        self._max_tasks = max_tasks
        self._free = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    def call(self, request: dict[str, Any]) -> str:
        """Outcome of a request (see `symbolic.answer_request`). Waits when all are busy.

        Raises:
            OverLimit: it took too long or too much memory.
            WorkerFailed: two workers failed at it.
        """
        with self._free:
            failure = ""
            for _ in range(2):
                try:
                    return self._once(request)
                except (OSError, EOFError, ValueError) as error:
                    failure = f"{type(error).__name__}: {error}"
            raise WorkerFailed(failure)

    def _once(self, request: dict[str, Any]) -> str:
        worker = self._take()
        healthy = False
        try:
            worker.wait_ready(self._start_s)
            worker.send(request)
            reply = worker.receive(self._limit_s)
            if reply is None:
                raise OverLimit(f"no result in {self._limit_s} s")
            if reply["outcome"] == "limit":
                raise OverLimit(reply["detail"])
            healthy = worker.tasks < self._max_tasks
            return reply["outcome"]
        finally:
            self._put(worker, healthy=healthy)

    def _take(self) -> "_Worker":
        with self._lock:
            if self._closed:
                raise OSError("the pool is closed")
            if self._idle:
                return self._idle.pop()
            worker = _Worker()
            self._all.add(worker)
            return worker

    def _put(self, worker: "_Worker", *, healthy: bool) -> None:
        """Keep a healthy worker; replace another at once, so that its successor warms up."""
        if not healthy:
            worker.end()
        with self._lock:
            if not healthy:
                self._all.discard(worker)
                if self._closed:
                    return
                try:
                    worker = _Worker()
                except OSError:
                    return
                self._all.add(worker)
            self._idle.append(worker)

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        with self._lock:
            return sorted(worker.process.pid for worker in self._all)

    def close(self) -> None:
        """End all workers; calls under way fail."""
        with self._lock:
            self._closed = True
            workers, self._all, self._idle = list(self._all), set(), []
        for worker in workers:
            worker.end()


class _Worker:
    """One worker process and its two pipes."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A session of its own: an interrupt at the terminal is for the run, which then ends
            # the pool.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in = self.process.stdin
        self._out = self.process.stdout.fileno()
        self._buffer = b""
        self._ready = False
        self.tasks = 0

    def wait_ready(self, limit_s: float) -> None:
        """Wait for the greeting of a fresh worker."""
        if not self._ready:
            if self.receive(limit_s) is None:
                raise OSError(f"a math worker did not start in {limit_s} s")
            self._ready = True

    def send(self, request: dict[str, Any]) -> None:
        self.tasks += 1
        self._in.write(json.dumps(request).encode() + b"\n")
        self._in.flush()

    def receive(self, limit_s: float) -> dict[str, str] | None:
        """The next reply, or None when it is late. EOFError when the worker is gone."""
        end = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            chunk = os.read(self._out, 65536)
            if not chunk:
                raise EOFError("a math worker died")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass
