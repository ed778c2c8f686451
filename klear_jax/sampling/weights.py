# SPDX-License-Identifier: Apache-2.0
"""How the trainer's weights become the sampler's.

Where both share mesh and type they are the same arrays and nothing is copied. Otherwise every swap
makes one copy, which is counted, and a probe compares log-probs under both: a sampler that runs on
other weights than the trainer thinks is the kind of fault that no loss curve shows.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from klear_jax.core import mesh as mesh_lib
from klear_jax.model import layers, qwen3
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params

PROBE_TOKENS = 32
"""Length of the prompt whose log-probs are compared after a swap."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of a log-prob, nats, by the type of the sampler's weights: float32 sums in
another order on another mesh; bfloat16 also rounds every weight (captured against recomputed
log-probs stay within half of it)."""


class WeightMismatchError(RuntimeError):
    """The sampler's weights give other log-probs than the trainer's."""


@dataclasses.dataclass(frozen=True)
class Swapped:
    """The sampler's weights, and what it took to get them."""

    params: Params
    copied_bytes: int
    """Bytes written, over all devices; 0 where they are the trainer's arrays."""


def swap(
    params: Params, cfg: ModelConfig, *, mesh: Mesh | None = None, dtype: Any = None
) -> Swapped:
    """The trainer's weights laid out for `mesh` (None: where they are) in `dtype` (None: theirs).

    On the same devices in the same order one jitted program reshards all weights at once. On others
    (an order of their own, or the half of the machine that trains not) they are sent leaf by leaf,
    each waited for: beside both copies of the weights, one leaf at most is held a second time.
    """
    # Arrays of numpy have no sharding yet.
    params = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), params)
    dtype = jnp.dtype(dtype or params.embed.dtype)
    if mesh is None:
        targets = jax.tree.map(lambda x: x.sharding, params)
    else:
        targets = params_lib.shardings(cfg, mesh)

    def stays(x: Array, target: Any) -> bool:
        return x.dtype == dtype and x.sharding.is_equivalent_to(target, x.ndim)

    if jax.tree.all(jax.tree.map(stays, params, targets)):
        return Swapped(params, 0)
    source = _devices(params.embed.sharding)
    if source == _devices(jax.tree.leaves(targets)[0]):
        moved = _reshard(dtype, targets)(params)  # pyright: ignore[reportArgumentType]
    else:

        def send(x: Array, target: Any) -> Array:
            # `device_put` would share a replica that lies on a target device already, and the
            # trainer donates its own: send a copy. jax reorders under the mesh that it sends to.
            copy = _copy(x, dtype)
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                return jax.block_until_ready(jax.device_put(copy, target))

        moved = jax.tree.map(send, params, targets)
    return Swapped(moved, sum(_bytes(x) for x in jax.tree.leaves(moved)))


def _devices(sharding: Any) -> tuple[Any, ...]:
    """Devices in the order in which programs see them."""
    mesh = getattr(sharding, "mesh", None)
    return tuple(mesh.devices.flat) if mesh is not None else tuple(sharding.device_set)


def _bytes(x: Array) -> int:
    return sum(shard.data.nbytes for shard in x.addressable_shards)


@functools.cache
def _reshard(dtype: Any, targets: Params) -> Callable[[Params], Params]:
    """The compiled copy into a layout."""

    def copy(params: Params) -> Params:
        return jax.tree.map(lambda x: x.astype(dtype), params)

    return jax.jit(copy, out_shardings=targets)


@functools.partial(jax.jit, static_argnames="dtype")
def _copy(x: Array, dtype: Any) -> Array:
    return jnp.copy(x).astype(dtype)


def probe(trained: Params, sampling: Params, cfg: ModelConfig, *, mesh: Mesh | None) -> float:
    """Largest difference of a log-prob of a fixed prompt under both weights, nats.

    Call where the trainer's mesh is set; `mesh` is the sampler's, None for the same.

    Raises:
        WeightMismatchError: it is larger than `TOLERANCE`, or not a number.
    """
    expected = _probe_logprobs(trained, cfg)
    if mesh is None:
        got = _probe_logprobs(sampling, cfg)
    else:
        with jax.set_mesh(mesh):
            got = _probe_logprobs(sampling, cfg)
    worst = float(np.abs(expected - got).max())
    allowed = TOLERANCE["float32" if sampling.embed.dtype == jnp.float32 else "bfloat16"]
    if not worst <= allowed:
        raise WeightMismatchError(
            f"after the weight swap a probe prompt's log-probs differ by {worst:.3g} nats between "
            f"trainer and sampler (allowed: {allowed}); the sampler does not run the trainer's "
            "weights, so the run stops before it learns from them"
        )
    return worst


def _probe_logprobs(params: Params, cfg: ModelConfig) -> Float[np.ndarray, " t"]:
    rows = mesh_lib.pieces_of("batch", mesh_lib.SAMPLE)
    # A stride that is prime to any usual vocabulary visits rows all over the table.
    tokens = (np.arange(PROBE_TOKENS + 1) * 7919 + 1) % cfg.live_vocab
    tokens = np.broadcast_to(tokens.astype(np.int32), (rows, PROBE_TOKENS + 1))
    return np.asarray(jax.device_get(_logprobs(params, tokens, cfg=cfg)))


@functools.partial(jax.jit, static_argnames="cfg")
def _logprobs(params: Params, tokens: Int[Array, "b t"], *, cfg: ModelConfig) -> Float[Array, " t"]:
    """Log-probs of the first row by the layout of sampling, without any cache."""
    rules = mesh_lib.SAMPLE
    fed = mesh_lib.constrain(tokens[:, :-1], "batch", None, rules=rules)
    positions = jnp.broadcast_to(jnp.arange(fed.shape[1]), fed.shape)
    positions = mesh_lib.constrain(positions, "batch", None, rules=rules)
    ones = jnp.ones_like(fed)
    hidden, _ = qwen3.run_blocks(params, fed, positions, ones, cfg=cfg, keep=None, rules=rules)
    hidden = mesh_lib.constrain(hidden, None, None, None, rules=rules)[0]
    hidden = layers.rms_norm(hidden, params.final_norm, eps=cfg.norm_eps)
    head = mesh_lib.constrain(qwen3.unembed(params).astype(cfg.dtype), None, None)
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    logits = jnp.where(jnp.arange(logits.shape[-1]) < cfg.live_vocab, logits, -jnp.inf)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(logprobs, tokens[0, 1:, None], axis=-1)[:, 0]
