# SPDX-License-Identifier: Apache-2.0
"""Meshes and shardings: the only module that names a mesh axis.

A mesh always has the four axes of `AXES`; an axis that is not used has size 1. Arrays are described
by *logical* axis names ("embed", "heads", ...), and one table, `Rules`, says which mesh axes each
logical name is cut over. Read `Rules` first.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "seq", "tensor")

EXPLICIT_AXES = True
"""Explicit axis types: the sharding is part of an array's type, so a reshard that nobody wrote is
an error while tracing. False gives automatic axes and the same maths (docs/sharding.md compares).
"""


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the four mesh axes, written `fsdp:8,tensor:4`; -1, at most once, means "the
    rest"."""

    data: int = 1
    """Copies of the parameters; the batch is cut over it. The axis to lay across slow links."""
    fsdp: int = 1
    """The batch and every parameter are cut over it (parameters are gathered layer by layer)."""
    seq: int = 1
    """Tokens of a row are cut over it, and parameters too."""
    tensor: int = 1
    """Heads, feed-forward units and vocabulary are cut over it."""

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        bad = {axis: size for axis, size in sizes.items() if size < 1 and size != -1}
        if bad or list(sizes.values()).count(-1) > 1:
            raise ValueError(
                f"mesh {self}: a size is a positive number, or -1 (the rest of the devices) for "
                "one axis only"
            )

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Read `axis:size` pairs joined by commas, the inverse of `str(spec)`.

        Raises:
            ValueError: an unknown or repeated axis, or a size that is no number.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, colon, size = part.strip().partition(":")
            try:
                number = int(size)
            except ValueError:
                number = None
            if not colon or axis not in AXES or axis in sizes or number is None:
                raise ValueError(
                    f"mesh {text!r}: cannot read {part!r}; write axis:size pairs joined by commas, "
                    f"each axis once, such as fsdp:8,tensor:4 (axes: {', '.join(AXES)})"
                )
            sizes[axis] = number
        return cls(**sizes)

    def __str__(self) -> str:
        used = [f"{axis}:{getattr(self, axis)}" for axis in AXES if getattr(self, axis) != 1]
        return ",".join(used) or f"{AXES[0]}:1"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    def resolve(self, device_count: int) -> "MeshSpec":
        """Replace -1 by what is left of `device_count` and check that the sizes use all devices.

        Raises:
            ValueError: the sizes do not multiply to `device_count`; the text names a legal spec.
        """
        fixed = math.prod(size for size in self.sizes if size != -1)
        if -1 in self.sizes and device_count % fixed == 0:
            rest = AXES[self.sizes.index(-1)]
            return dataclasses.replace(self, **{rest: device_count // fixed})
        if fixed != device_count or -1 in self.sizes:
            tensor = math.gcd(max(self.tensor, 1), device_count)
            legal = MeshSpec(fsdp=device_count // tensor, tensor=tensor)
            raise ValueError(
                f"mesh {self} needs {'a multiple of ' if -1 in self.sizes else ''}{fixed} devices "
                f"and there are {device_count}; legal here: {legal}"
            )
        return self


def make_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices (all of them by default) out as `spec` says."""
    devices = jax.devices() if devices is None else devices
    spec = spec.resolve(len(devices))
    kind = AxisType.Explicit if EXPLICIT_AXES else AxisType.Auto
    return jax.make_mesh(spec.sizes, AXES, axis_types=(kind,) * len(AXES), devices=devices)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis name -> mesh axes it is cut over (None: every device holds all of it)."""

    batch: str | tuple[str, ...] | None = ("data", "fsdp")
    """Packed rows of a training batch."""
    seq: str | tuple[str, ...] | None = "seq"
    """Tokens of a row."""
    embed: str | tuple[str, ...] | None = ("fsdp", "seq")
    """Model width *of a parameter*. Activations keep their width whole ("width")."""
    heads: str | tuple[str, ...] | None = "tensor"
    kv_heads: str | tuple[str, ...] | None = "tensor"
    ffn: str | tuple[str, ...] | None = "tensor"
    vocab: str | tuple[str, ...] | None = "tensor"
    width: None = None
    layers: None = None
    head_dim: None = None

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The partition of an array whose dimensions have these logical names."""
        return PartitionSpec(*(None if name is None else getattr(self, name) for name in logical))


TRAIN = Rules()
"""The layout of parameters, optimizer state and training batches."""


SAMPLE = Rules(batch=("data", "fsdp", "seq"), seq=None)
"""The layout while sampling: the same parameters; decode slots ("batch") are cut over every axis
but tensor, and heads, feed-forward units and vocabulary as in training."""


def context_mesh() -> Any | None:
    """The mesh set by `jax.set_mesh`, or None where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def constrain(x: jax.Array, *logical: str | None, rules: Rules = TRAIN) -> jax.Array:
    """Lay `x` out by its logical axes; nothing happens where no mesh is set."""
    mesh = context_mesh()
    if mesh is None:
        return x
    if EXPLICIT_AXES:
        return jax.sharding.reshard(x, rules.spec(*logical))
    return jax.lax.with_sharding_constraint(x, rules.spec(*logical))


def einsum(
    equation: str,
    *operands: jax.Array,
    out: Sequence[str | None],
    rules: Rules = TRAIN,
    dtype: Any = None,
) -> jax.Array:
    """`jnp.einsum` whose result has the logical axes `out` (a contraction may cross a cut axis).

    Args:
        dtype: type of the sums and the result; by default that of the operands.
    """
    product = functools.partial(jnp.einsum, equation, *operands, preferred_element_type=dtype)
    if context_mesh() is None:
        return product()
    if EXPLICIT_AXES:
        return product(out_sharding=rules.spec(*out))
    return constrain(product(), *out, rules=rules)


def take(
    table: jax.Array, indices: jax.Array, *, out: Sequence[str | None], rules: Rules = TRAIN
) -> jax.Array:
    """Rows of `table` at `indices`, laid out by the logical axes `out`."""
    if context_mesh() is None or not EXPLICIT_AXES:
        return constrain(table[indices], *out, rules=rules)
    return table.at[indices].get(out_sharding=rules.spec(*out))


def sharded(
    function: Callable,
    *,
    inputs: Sequence[Sequence[str | None]],
    outputs: Any,
    rules: Rules = TRAIN,
) -> Callable:
    """Run `function` on each device's own piece of its inputs (`jax.shard_map`).

    `inputs` has the logical axes of each positional argument; `outputs` those of the result, or a
    tuple of such tuples for several results. Where no mesh is set this is `function` itself.
    """
    if context_mesh() is None:
        return function
    in_specs = tuple(rules.spec(*axes) for axes in inputs)
    several = outputs and isinstance(outputs[0], tuple)
    out_specs = tuple(rules.spec(*o) for o in outputs) if several else rules.spec(*outputs)
    mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)

    def call(*args):
        return mapped(
            *(constrain(x, *axes, rules=rules) for x, axes in zip(args, inputs, strict=True))
        )

    return call


def platform() -> str:
    """Platform of the devices of the mesh that is set, or of the default ones: cpu, tpu, gpu."""
    mesh = jax.sharding.get_mesh()
    return jax.default_backend() if mesh.empty else mesh.devices.flat[0].platform


def pieces_of(logical: str, rules: Rules = TRAIN) -> int:
    """Into how many pieces the mesh that is set cuts a logical axis; 1 where none is set."""
    mesh = context_mesh()
    return 1 if mesh is None else axis_size(mesh, logical, rules)


def mesh_axis(logical: str, rules: Rules = TRAIN) -> Any | None:
    """The mesh axis to name in a collective over `logical`, or None where no mesh is set."""
    return None if context_mesh() is None else getattr(rules, logical)


def differs_over(x: jax.Array, *logical: str, rules: Rules = TRAIN) -> jax.Array:
    """Inside `sharded`: treat `x`, the same on all devices of these axes, as each one's own.

    Its gradient is then summed over the axes once, here, and not at each place where `x` is used.
    """
    axes = _mesh_axes(logical, rules)
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def any_over(x: jax.Array, *logical: str, rules: Rules = TRAIN) -> jax.Array:
    """Inside `sharded`: whether `x` is true on any device of these axes; the same on all of them.

    A branch that holds a collective must be taken by all devices or by none: one that went the
    other way would leave the rest waiting for ever.
    """
    axes = _mesh_axes(logical, rules)
    return jax.lax.pmax(x.astype(jnp.int32), axes) > 0 if axes else x


def _mesh_axes(logical: Sequence[str], rules: Rules) -> tuple[str, ...]:
    """The mesh axes of logical ones; none where no mesh is set."""
    names = [getattr(rules, name) for name in logical] if context_mesh() is not None else []
    return tuple(a for name in names for a in ((name,) if isinstance(name, str) else name or ()))


def sharding(mesh: Mesh, *logical: str | None, rules: Rules = TRAIN) -> NamedSharding:
    """The `NamedSharding` of an array with these logical axes."""
    return NamedSharding(mesh, rules.spec(*logical))


def axis_size(mesh: Mesh, logical: str, rules: Rules = TRAIN) -> int:
    """Into how many pieces `mesh` cuts the logical axis."""
    axes = getattr(rules, logical)
    axes = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[axis] for axis in axes)


def check_divides(mesh: Mesh, sizes: dict[str, int], rules: Rules = TRAIN) -> None:
    """Check that the mesh cuts each logical axis of the given size into equal pieces.

    Raises:
        ValueError: names the axis, its size, the pieces asked for, and the sizes that would do.
    """
    for logical, size in sizes.items():
        pieces = axis_size(mesh, logical, rules)
        if size % pieces:
            axes = getattr(rules, logical)
            legal = [n for n in range(1, pieces + 1) if size % n == 0]
            raise ValueError(
                f"the mesh cuts {logical} (size {size}) over {axes} into {pieces} pieces, which do "
                f"not divide it; choose a size of {axes} out of {legal}"
            )


def place(tree: Any, mesh: Mesh, *logical: str | None, rules: Rules = TRAIN) -> Any:
    """Put every host array of `tree` on the devices, all with the same logical axes."""
    target = sharding(mesh, *logical, rules=rules)
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), target), tree)
