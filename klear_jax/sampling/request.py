# SPDX-License-Identifier: Apache-2.0
"""What is asked of the sampler and what it gives back."""

import dataclasses
from typing import Literal

import numpy as np

from klear_jax.model.config import ModelConfig
from klear_jax.sampling.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was drawn for a request."""

    id: str
    tokens: np.ndarray
    """int32; with the end token where there is one."""
    logprobs: np.ndarray
    """Nats, at the sampling temperature over the live vocabulary; as many as tokens. This is what
    the trainer recomputes: an unchanged policy has ratio 1."""
    stop: Literal["stop", "length", "partial", "cancelled"]
    """What ended it: an end token or stop string, the limit of tokens, `Sampler.interrupt` (it can
    be continued), or `Sampler.cancel`."""
    drawn_logprobs: np.ndarray | None = None
    """Nats, under the distribution that the token was drawn from, after truncation and penalty;
    None where neither is on, since it is `logprobs` then."""
    versions: np.ndarray | None = None
    """int32; `Sampler.version` of the weights that each token was drawn with."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to be drawn. Requests with the same prompt share its prefill."""

    id: str
    prompt: tuple[int, ...]
    sample_id: int
    """Names the noise: equal (seed, sample_id, weights, prompt) give equal tokens. 32 bits."""
    max_tokens: int
    """Most tokens of the completion, with those it continues."""
    temperature: float = 1.0
    """0 is greedy."""
    stop_strings: tuple[str, ...] = ()
    """A completion whose text has one of these ends with the token that completes it."""
    continues: Completion | None = None
    """A completion of this request that was interrupted: its tokens are kept, and drawing goes on
    after them, perhaps with other weights."""

    @property
    def feed(self) -> tuple[int, ...]:
        """All tokens that are there when drawing begins."""
        return self.prompt + (() if self.continues is None else _ids(self.continues.tokens))


def _ids(tokens: np.ndarray) -> tuple[int, ...]:
    return tuple(tokens.tolist())


def check_request(
    request: Request, cfg: ModelConfig, engine: EngineConfig, *, pages: int, decodes: bool = True
) -> None:
    """Refuse what the engine cannot draw.

    Args:
        pages: that one request may have.
        decodes: whether the sampler can turn tokens into text.

    Raises:
        ValueError: names the request and what would fit.
    """
    prompt, limit = len(request.prompt), engine.length
    name = f"request {request.id}"
    if not prompt or request.max_tokens < 1:
        raise ValueError(
            f"{name}: needs a prompt and max_tokens >= 1, has {prompt} prompt tokens and "
            f"max_tokens {request.max_tokens}"
        )
    if prompt + request.max_tokens > limit:
        raise ValueError(
            f"{name}: {prompt} prompt tokens and up to {request.max_tokens} more exceed the "
            f"engine's length {limit}; shorten it or raise EngineConfig.length"
        )
    need = engine.pages_for(prompt + request.max_tokens)
    if need > pages:
        raise ValueError(
            f"{name}: {prompt} prompt tokens and up to {request.max_tokens} more need {need} pages "
            f"of {engine.page} tokens, and a slot can have {pages}; it could never finish: shorten "
            "it or raise EngineConfig.pages"
        )
    if not 0 <= min(request.prompt) <= max(request.prompt) < cfg.live_vocab:
        raise ValueError(
            f"{name}: prompt ids lie in {min(request.prompt)}..{max(request.prompt)}, the model "
            f"knows 0..{cfg.live_vocab - 1}; is it the model's own tokenizer?"
        )
    if not 0 <= request.sample_id < 2**32 or not request.temperature >= 0:
        raise ValueError(
            f"{name}: sample_id {request.sample_id} must be an unsigned 32-bit number and "
            f"temperature {request.temperature} be >= 0"
        )
    if request.stop_strings and (not decodes or not all(request.stop_strings)):
        raise ValueError(
            f"{name}: stop strings {request.stop_strings} need a Sampler(..., decode=...) that "
            "turns tokens into text, and must not be empty"
        )
    _check_continued(request, name)


def _check_continued(request: Request, name: str) -> None:
    done = request.continues
    if done is None:
        return
    if done.id != request.id or done.stop != "partial":
        raise ValueError(
            f"{name}: can continue a completion of its own that stopped as partial, not one of "
            f"request {done.id} that stopped as {done.stop}"
        )
    if len(done.tokens) >= request.max_tokens:
        raise ValueError(
            f"{name}: the {len(done.tokens)} tokens it continues leave no room below max_tokens "
            f"{request.max_tokens}"
        )
