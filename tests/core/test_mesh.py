# SPDX-License-Identifier: Apache-2.0
"""Mesh texts, sizes, and what their errors say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.mesh import AXES, TRAIN, MeshSpec, make_mesh

sizes = st.integers(1, 64)


@given(st.tuples(sizes, sizes, sizes, sizes), st.sampled_from([None, *range(4)]))
def test_parse_is_the_inverse_of_str(values, rest):
    values = [-1 if i == rest else size for i, size in enumerate(values)]
    spec = MeshSpec(*values)
    assert MeshSpec.parse(str(spec)) == spec
    assert spec.sizes == tuple(values)


@pytest.mark.parametrize(
    ("text", "spec", "canonical"),
    [
        ("fsdp:8,tensor:4", MeshSpec(fsdp=8, tensor=4), "fsdp:8,tensor:4"),
        ("tensor:4, fsdp:8", MeshSpec(fsdp=8, tensor=4), "fsdp:8,tensor:4"),
        (" seq : 2 ", None, None),
        ("fsdp:-1", MeshSpec(fsdp=-1), "fsdp:-1"),
        ("data:1", MeshSpec(), "data:1"),
        ("data:2,fsdp:1,seq:1,tensor:1", MeshSpec(data=2), "data:2"),
    ],
)
def test_texts(text, spec, canonical):
    if spec is None:
        with pytest.raises(ValueError, match="cannot read"):
            MeshSpec.parse(text)
    else:
        assert MeshSpec.parse(text) == spec
        assert str(spec) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"cannot read ''; write axis:size pairs .* \(axes: data, fsdp, seq, tensor\)"),
        ("fsdp", r"cannot read 'fsdp'"),
        ("fsdp8", r"cannot read 'fsdp8'"),
        ("fsdp:", r"cannot read 'fsdp:'"),
        ("fsdp:two", r"cannot read 'fsdp:two'"),
        ("fsdp:2.0", r"cannot read 'fsdp:2.0'"),
        ("fsdp:2,fsdp:2", r"cannot read 'fsdp:2'; .* each axis once"),
        ("model:2", r"mesh 'model:2': cannot read 'model:2'"),
        ("fsdp:2,", r"cannot read ''"),
        ("fsdp:0", r"mesh fsdp:0: a size is a positive number, or -1"),
        ("fsdp:-2", r"mesh fsdp:-2: a size is a positive number, or -1"),
        ("fsdp:-1,tensor:-1", r"-1 \(the rest of the devices\) for one axis only"),
    ],
)
def test_texts_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        MeshSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "devices", "resolved"),
    [
        ("fsdp:-1", 8, "fsdp:8"),
        ("fsdp:-1,tensor:4", 32, "fsdp:8,tensor:4"),
        ("data:2,fsdp:-1,seq:2", 4, "data:2,seq:2"),
        ("fsdp:8,tensor:4", 32, "fsdp:8,tensor:4"),
        ("data:1", 1, "data:1"),
    ],
)
def test_resolve(text, devices, resolved):
    spec = MeshSpec.parse(text).resolve(devices)
    assert str(spec) == resolved
    assert np.prod(spec.sizes) == devices


@given(st.tuples(*[st.integers(1, 12)] * 4), st.sampled_from([None, *range(4)]), st.integers(1, 96))
def test_a_suggested_spec_resolves(values, rest, devices):
    spec = MeshSpec(*[-1 if i == rest else size for i, size in enumerate(values)])
    try:
        resolved = spec.resolve(devices)
    except ValueError as error:
        text = str(error)
        assert f"mesh {spec} needs" in text
        assert f"there are {devices};" in text
        suggested = MeshSpec.parse(text.rpartition("legal here: ")[2])
        resolved = suggested.resolve(devices)
        assert resolved == suggested
    assert np.prod(resolved.sizes) == devices


def test_errors_of_resolve():
    with pytest.raises(ValueError, match=r"fsdp:8,tensor:4 needs 32 devices and there are 8; lega"):
        MeshSpec.parse("fsdp:8,tensor:4").resolve(8)
    with pytest.raises(ValueError, match=r"needs a multiple of 3 devices and there are 4; legal"):
        MeshSpec.parse("fsdp:-1,tensor:3").resolve(4)
    with pytest.raises(ValueError, match=r"needs 1 devices and there are 4; legal here: fsdp:4"):
        make_mesh(MeshSpec(), jax.devices()[:4])


def test_a_mesh_has_all_four_axes():
    mesh = make_mesh(MeshSpec.parse("tensor:-1"), jax.devices()[:4])
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "seq": 1, "tensor": 4}
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_rules_name_mesh_axes_only():
    spec = TRAIN.spec("batch", "seq", None, "embed", "heads", "layers")
    assert spec == PartitionSpec(("data", "fsdp"), "seq", None, ("fsdp", "seq"), "tensor", None)
    with pytest.raises(AttributeError):
        TRAIN.spec("nonsense")


def test_check_divides():
    mesh = make_mesh(MeshSpec.parse("fsdp:2,seq:2"), jax.devices()[:4])
    mesh_lib.check_divides(mesh, {"embed": 8, "heads": 3})
    with pytest.raises(
        ValueError, match=r"cuts embed \(size 6\) over \('fsdp', 'seq'\) into 4 pieces.*\[1, 2, 3\]"
    ):
        mesh_lib.check_divides(mesh, {"heads": 3, "embed": 6})
    assert mesh_lib.axis_size(mesh, "embed") == 4
    assert mesh_lib.axis_size(mesh, "layers") == 1


def test_place_puts_pieces_on_devices():
    mesh = make_mesh(MeshSpec.parse("fsdp:2,seq:2"), jax.devices()[:4])
    x = np.arange(16).reshape(4, 4)
    placed = mesh_lib.place({"x": x}, mesh, "batch", "seq")["x"]
    np.testing.assert_array_equal(placed, x)
    assert {s.data.shape for s in placed.addressable_shards} == {(2, 2)}


def test_without_a_mesh_nothing_is_constrained():
    x = jnp.ones((2, 4))
    assert mesh_lib.context_mesh() is None
    assert mesh_lib.constrain(x, "batch", "seq") is x
    assert mesh_lib.mesh_axis("vocab") is None
    function = lambda x: x
    assert mesh_lib.sharded(function, inputs=((),), outputs=()) is function
    np.testing.assert_array_equal(mesh_lib.take(x, jnp.array([1, 0]), out=(None, None)), x)
    out = mesh_lib.einsum("bd,bd->b", x, x, out=("batch",))
    np.testing.assert_array_equal(out, [4, 4])


@pytest.mark.parametrize("spec", ["data:2,tensor:2", "fsdp:2,seq:2"])
def test_einsum_over_a_cut_axis(spec):
    """A contraction over an axis that is cut sums over devices and says so in its type."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (4, 8)), rng.integers(-4, 5, (8, 6))
    mesh = make_mesh(MeshSpec.parse(spec), jax.devices()[:4])
    placed = (mesh_lib.place(a, mesh, "batch", "ffn"), mesh_lib.place(b, mesh, "ffn", None))
    with jax.set_mesh(mesh):
        got = mesh_lib.einsum("bf,fd->bd", *placed, out=("batch", None))
        np.testing.assert_array_equal(got, a @ b)
        assert got.sharding.is_equivalent_to(mesh_lib.sharding(mesh, "batch", None), 2)
