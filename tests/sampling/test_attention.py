# SPDX-License-Identifier: Apache-2.0
"""Attention over pages: the plain one against a dense float64 oracle, and both kernels' adapters
against it; what cannot run on a CPU is lowered or compiled for its platform."""

import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as library
from jax.extend.core import jaxprs_in_params

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.model.config import QWEN3, ModelConfig
from klear_jax.sampling import attention_gpu, attention_tpu, cache
from klear_jax.sampling.attention import JAX
from klear_jax.sampling.attention_gpu import GPU
from klear_jax.sampling.attention_tpu import TPU
from klear_jax.sampling.cache import Backend, PageMap

PAGE, SLOT_PAGES, POOL_PAGES, LAYERS = 16, 5, 128, 3
LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1, SLOT_PAGES * PAGE, 3 * PAGE, 37)
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
"""Largest error of values of about 1; bfloat16 has 8 bits."""


def config(kv_heads=2, group=2, dtype="float32", **changes) -> ModelConfig:
    heads = {"q_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 128}
    fields = {"layers": LAYERS, "d_model": 64, "d_ff": 64, "dtype": dtype, **heads, **changes}
    return ModelConfig(vocab=8, live_vocab=8, **fields)


def traceable_reference(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, *, sm_scale):
    """The library's `ref_ragged_paged_attention` for one query a sequence, without its loop over
    concrete lengths, so that it can be traced."""
    s, h, e = q.shape
    cells = kv_pages[page_indices].reshape(s, -1, kv_pages.shape[2], e)
    seen = jnp.arange(cells.shape[1]) < kv_lens[:, None]
    cells = jnp.where(seen[..., None, None], cells, 0)
    k, v = (jnp.repeat(cells[:, :, i::2], 2 * h // cells.shape[2], axis=2) for i in (0, 1))
    scores = jnp.einsum("she,sche->shc", q, k, preferred_element_type=jnp.float32) * sm_scale
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30))
    return jnp.einsum("shc,sche->she", weights.astype(v.dtype), v).astype(q.dtype)


def with_options(backend: Backend, **options) -> Backend:
    return dataclasses.replace(backend, attend=functools.partial(backend.attend, **options))


BACKENDS = {
    "jax": JAX,
    "tpu": with_options(TPU, kernel=traceable_reference),
    "gpu": with_options(GPU, interpret=True),
}
"""As they run on a CPU."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Slots of some lengths, their tokens and their pages."""

    cfg: ModelConfig
    lengths: np.ndarray
    q: np.ndarray
    """[s, h, e]; it and the others are rounded to the type of the config."""
    k: np.ndarray
    """[s, c, k, e]"""
    v: np.ndarray
    table: np.ndarray
    """[s, slot_pages] in pages of the slot's piece."""
    pieces: int

    @property
    def pages(self) -> int:
        """Pages in the pools, of all pieces together."""
        return POOL_PAGES * self.pieces


def make_case(cfg, lengths=LENGTHS, *, seed=0, pieces=1, used=POOL_PAGES) -> Case:
    """Pages of the slots are drawn out of the first `used` ones of their piece, in no order."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    s, cap = len(lengths), SLOT_PAGES * PAGE
    q, k, v = (
        np.asarray(jnp.asarray(rng.normal(size=shape), cfg.dtype))
        for shape in (
            (s, cfg.q_heads, cfg.head_dim),
            (s, cap, cfg.kv_heads, cfg.head_dim),
            (s, cap, cfg.kv_heads, cfg.head_dim),
        )
    )
    table = np.full((s, SLOT_PAGES), POOL_PAGES, np.int32)
    for slots in np.split(np.arange(s), pieces):
        free = list(rng.permutation(used))
        for slot in slots:
            for i in range(-(-lengths[slot] // PAGE)):
                table[slot, i] = free.pop()
    return Case(cfg, lengths, q, k, v, table, pieces)


def page_map(case: Case) -> PageMap:
    s = len(case.lengths) // case.pieces
    owners = np.full((case.pieces, POOL_PAGES), s, np.int32)
    starts = np.zeros((case.pieces, POOL_PAGES), np.int32)
    used = np.zeros(case.pieces, np.int32)
    for slot, row in enumerate(case.table):
        for i, number in enumerate(row):
            if number < POOL_PAGES:
                piece = slot // s
                owners[piece, number], starts[piece, number] = slot % s, i * PAGE
                used[piece] = max(used[piece], number + 1)
    fields = (case.table, owners.reshape(-1), starts.reshape(-1), used)
    return PageMap(*(jnp.asarray(x) for x in fields))


def fill_pools(case: Case, backend: Backend, *, layer=1, rest=np.nan):
    """Pools with the case's tokens in one layer; all cells that nobody should read hold `rest`."""
    k, v = case.k.copy(), case.v.copy()
    for slot, length in enumerate(case.lengths):
        k[slot, length:] = v[slot, length:] = rest
    blocks = backend.as_pages(jnp.asarray(k), jnp.asarray(v), PAGE)
    pieces = np.repeat(np.arange(case.pieces), len(case.table) // case.pieces)
    numbers = (case.table + pieces[:, None] * POOL_PAGES).reshape(-1)
    owned = (case.table < POOL_PAGES).reshape(-1)
    pools = []
    for block in blocks:
        pool = jnp.full((LAYERS, case.pages, *block.shape[1:]), rest, case.cfg.dtype)
        pools.append(pool.at[layer, numbers[owned]].set(block[owned]))
    return tuple(pools)


def dense(case: Case) -> np.ndarray:
    """Softmax attention in float64, slot by slot; 0 for a slot of length 0."""
    out = np.zeros(case.q.shape)
    group = case.cfg.q_heads // case.cfg.kv_heads
    for slot, length in enumerate(case.lengths):
        for head in range(case.cfg.q_heads if length else 0):
            k, v = (x[slot, :length, head // group].astype(np.float64) for x in (case.k, case.v))
            scores = k @ case.q[slot, head].astype(np.float64) / math.sqrt(k.shape[1])
            weights = np.exp(scores - scores.max())
            out[slot, head] = weights @ v / weights.sum()
    return out


def run(case: Case, backend: Backend, pools=None) -> np.ndarray:
    pools = fill_pools(case, backend) if pools is None else pools
    args = (pools, jnp.int32(1), jnp.asarray(case.q), page_map(case), jnp.asarray(case.lengths))
    # A function of its own, since a trace would keep the sizes that a test has patched.
    return np.asarray(jax.jit(lambda *a: backend.attend(*a))(*args), np.float64)


def check(case: Case, got: np.ndarray) -> None:
    np.testing.assert_allclose(got, dense(case), atol=TOLERANCE[case.cfg.dtype], rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_dense_attention(name, group, dtype):
    """Every cell that belongs to no token holds NaN: in free pages, in other layers, and after the
    last token of a slot."""
    case = make_case(config(group=group, dtype=dtype), seed=group, used=100)
    check(case, run(case, BACKENDS[name]))


@pytest.mark.parametrize("name", BACKENDS)
def test_random_lengths(name):
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, SLOT_PAGES * PAGE + 1, 12)
    case = make_case(config(kv_heads=1, group=3), lengths, seed=6)
    check(case, run(case, BACKENDS[name]))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_slot_without_a_page_is_finite_whatever_its_length(name):
    """A finished slot keeps its position when its pages go back."""
    case = make_case(config(), (0, 20, 0))
    case = dataclasses.replace(case, table=case.table.copy())
    pools = fill_pools(case, BACKENDS[name])
    stale = dataclasses.replace(case, lengths=np.array([33, 20, 80], np.int32))
    got = run(stale, BACKENDS[name], pools)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[1], dense(case)[1], atol=2e-6, rtol=0)


def test_a_long_slot_on_a_gpu_is_walked_in_parts(monkeypatch):
    """Parts of two pages, some of them empty, and one page or two scored at a time."""
    monkeypatch.setattr(attention_gpu, "PART_TOKENS", 2 * PAGE)
    case = make_case(config(), seed=8)
    for bytes_at_once in (PAGE * 128 * 4, attention_gpu.BLOCK_BYTES):
        monkeypatch.setattr(attention_gpu, "BLOCK_BYTES", bytes_at_once)
        check(case, run(case, BACKENDS["gpu"]))


def test_the_plain_one_walks_no_further_than_the_used_pages():
    """Chunks past `used` are not read: there an owner could even be a slot."""
    case = make_case(config(), used=60)
    pages = page_map(case)
    assert JAX.chunk(PAGE) == 64 < POOL_PAGES
    owners = pages.owners.at[64:].set(2)
    pools = fill_pools(case, JAX)
    args = (pools, jnp.int32(1), jnp.asarray(case.q))
    lengths = jnp.asarray(case.lengths)
    check(case, np.asarray(JAX.attend(*args, pages.replace(owners=owners), lengths)))
    beyond = pages.replace(owners=owners, used=jnp.array([65]))
    assert np.isnan(np.asarray(JAX.attend(*args, beyond, lengths))[2]).all()


def attend_and_write(case: Case, backend: Backend, live, pools):
    """One step: the last token of each slot is the new one."""
    last = np.maximum(case.lengths - 1, 0)
    new = [jnp.asarray(x[np.arange(len(last)), last][:, None]) for x in (case.k, case.v)]
    call = functools.partial(
        cache.attend_and_write, cfg=case.cfg, page=PAGE, backend=backend, layer=jnp.int32(1)
    )

    @jax.jit
    def step(pools, q, new, pages, positions, live):
        return call(pools, q[:, None], *new, pages=pages, positions=positions, live=live)

    args = (jnp.asarray(case.q), new, page_map(case), jnp.asarray(last), jnp.asarray(live))
    mixed, pools = step(pools, *args)
    return np.asarray(mixed[:, 0], np.float64), pools


def without_last(case: Case) -> Case:
    return dataclasses.replace(case, lengths=np.maximum(case.lengths - 1, 0))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mesh", [None, "data:2,tensor:2"])
def test_write_then_attend(name, mesh, monkeypatch):
    """On a mesh slots and pages are cut in two, and so are the heads."""
    backend = BACKENDS[name]
    if name == "gpu":
        # What the interpreter of kernels makes says of no value over which axes it differs.
        # `test_lowers_for_its_platform` has the check on.
        unchecked = functools.partial(jax.shard_map, check_vma=False)
        monkeypatch.setattr(jax, "shard_map", unchecked)
    case = make_case(config(group=2), seed=3, pieces=2 if mesh else 1)
    live = case.lengths > 0
    before = fill_pools(without_last(case), backend, rest=0)
    if mesh:
        with jax.set_mesh(make_mesh(MeshSpec.parse(mesh))):
            axes = cache.pool_axes(case.cfg, PAGE, backend)
            before = tuple(
                mesh_lib.constrain(x, *a, rules=cache.SAMPLE)
                for x, a in zip(before, axes, strict=True)
            )
            got, after = attend_and_write(case, backend, live, before)
    else:
        got, after = attend_and_write(case, backend, live, before)
    check(case, np.where(live[:, None, None], got, 0))
    expected = fill_pools(case, backend, rest=0)
    for x, y in zip(after, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_slot_that_is_not_live_writes_nowhere(name):
    case = make_case(config(), seed=4)
    pools = fill_pools(without_last(case), BACKENDS[name], rest=0)
    _, after = attend_and_write(case, BACKENDS[name], np.zeros(len(case.lengths), bool), pools)
    for x, y in zip(after, pools, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_the_tpu_adapter_feeds_the_library_what_it_wants():
    """Run eagerly, since the library's reference loops over concrete lengths."""
    case = make_case(config(group=4), (0, 1, PAGE + 1, 37), seed=7)
    seen = {}

    def reference(*args, sm_scale):
        seen["args"] = args
        return library.ref_ragged_paged_attention(*args, sm_scale=sm_scale)

    pools = fill_pools(case, TPU)
    args = (pools, jnp.int32(1), jnp.asarray(case.q), page_map(case), jnp.asarray(case.lengths))
    check(case, np.asarray(attention_tpu.attend(*args, kernel=reference), np.float64))
    library.dynamic_validate_inputs(*seen["args"], sm_scale=1.0)
    _, kv_pages, kv_lens, page_indices, *_ = seen["args"]
    assert kv_pages.shape == (LAYERS * POOL_PAGES, PAGE, 4, 128)
    assert (page_indices >= POOL_PAGES).all()
    assert (page_indices < 2 * POOL_PAGES).all()
    assert kv_lens.min() == 1, "the kernel never awaits the fetch of a sequence of length 0"


class Buffer:
    """A buffer of pages as the library's kernel looks at it: JAX's interpreter can neither reshape
    nor bitcast a reference, so both are done to what it holds."""

    def __init__(self, held):
        self.held = held

    shape = property(lambda self: self.held.shape)
    dtype = property(lambda self: self.held.dtype)

    def reshape(self, *shape):
        return Buffer(self.held[...].reshape(shape))

    def bitcast(self, dtype):
        rows, width = self.held.shape
        pairs = self.held.reshape(rows // 2, 2, width).swapaxes(1, 2)
        return Buffer(jax.lax.bitcast_convert_type(pairs, dtype))

    def __getitem__(self, index):
        return self.held[index]


@pytest.mark.parametrize(("group", "dtype"), [(1, "float32"), (4, "float32"), (8, "bfloat16")])
def test_the_tpu_kernel_interpreted(group, dtype, monkeypatch):
    """Fetches, semaphores and all, on a simulated TPU core."""
    wait = library.MultiPageAsyncCopyDescriptor.wait
    patched = lambda self: Buffer(wait(self))
    monkeypatch.setattr(library.MultiPageAsyncCopyDescriptor, "wait", patched)
    # Slots whose last block is full, and more pages than one block has.
    monkeypatch.setattr(attention_tpu, "BLOCK_TOKENS", 2 * PAGE)
    case = make_case(config(group=group, dtype=dtype), seed=group, used=100)
    with pltpu.force_tpu_interpret_mode():
        check(case, run(case, TPU))


def nested_jaxprs(jaxpr):
    """A jaxpr and all that its equations hold, but not what runs inside a kernel."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(eqn.params):
                yield from nested_jaxprs(inner)


@pytest.mark.parametrize("backend", [TPU, GPU], ids=lambda b: b.name)
def test_no_copy_of_a_pool_is_asked_for(backend):
    """Only the write in place and the flattening give arrays as large as one layer of a pool."""
    case = make_case(config(dtype="bfloat16"))
    pools = jax.eval_shape(functools.partial(fill_pools, case, backend))
    layer_size = min(pool.size for pool in pools) // LAYERS

    def step(pools, q, k, v):
        pages = page_map(case)
        pools = backend.write(pools, 1, pages.table[:, 0], pages.table[:, 1], k, v)
        return pools, backend.attend(pools, jnp.int32(1), q, pages, jnp.asarray(case.lengths))

    rows = jax.ShapeDtypeStruct((len(LENGTHS), 2, 128), jnp.bfloat16)
    closed = jax.make_jaxpr(step)(
        pools, jax.ShapeDtypeStruct(case.q.shape, jnp.bfloat16), rows, rows
    )
    large = {
        eqn.primitive.name
        for jaxpr in nested_jaxprs(closed.jaxpr)
        for eqn in jaxpr.eqns
        if any(getattr(out.aval, "size", 0) >= layer_size for out in eqn.outvars)
    }
    assert large == {"scatter", "reshape"}


def step_of(cfg: ModelConfig, backend: Backend, *, slots, slot_pages, pages, page):
    """A function that decodes one token a slot through all layers, and its abstract arguments,
    laid out on the mesh that is set."""

    def step(pools, q, k, v, table, owners, starts, used, positions):
        def layer_step(carry, layer):
            pools, x = carry
            return cache.attend_and_write(
                pools, q + x, k, v, layer=layer, pages=PageMap(table, owners, starts, used),
                positions=positions, live=positions >= 0, cfg=cfg, page=page, backend=backend,
            )[::-1], None  # fmt: skip

        return jax.lax.scan(layer_step, (pools, q), jnp.arange(cfg.layers))[0]

    mesh = jax.sharding.get_abstract_mesh()
    if not jax.sharding.get_mesh().empty:
        mesh = jax.sharding.get_mesh()

    def array(shape, axes, dtype=jnp.int32):
        layout = mesh_lib.sharding(mesh, *axes, rules=cache.SAMPLE)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)

    shapes = [shape for shape, _ in backend.blocks(cfg, page).values()]
    heads, kv_heads = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    pieces = mesh_lib.axis_size(mesh, "batch", cache.SAMPLE)
    args = (
        tuple(
            array((cfg.layers, pages, *shape), axes, cfg.dtype)
            for shape, axes in zip(shapes, cache.pool_axes(cfg, page, backend), strict=True)
        ),
        array((slots, 1, cfg.q_heads, cfg.head_dim), heads, cfg.dtype),
        *[array((slots, 1, cfg.kv_heads, cfg.head_dim), kv_heads, cfg.dtype)] * 2,
        array((slots, slot_pages), ("batch", None)),
        *[array((n,), ("batch",)) for n in (pages, pages, pieces, slots)],
    )
    return jax.jit(step, donate_argnums=0), args


KERNEL_CALL = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}
DEVICE_KIND = {"tpu": "TPU v5", "cuda": "NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(("platform", "backend"), [("tpu", TPU), ("cuda", GPU)])
def test_lowers_for_its_platform(platform, backend):
    """Inside `shard_map`, which checks over which axes each result differs."""
    device = jax.sharding.AbstractDevice(
        device_kind=DEVICE_KIND[platform], platform=platform, num_cores=1
    )
    explicit = (jax.sharding.AxisType.Explicit,) * len(mesh_lib.AXES)
    mesh = jax.sharding.AbstractMesh(
        (2, 1, 1, 2), mesh_lib.AXES, axis_types=explicit, abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        step, args = step_of(
            config(group=4, dtype="bfloat16"), backend, slots=8, slot_pages=4, pages=64, page=32
        )
        text = step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"@{KERNEL_CALL[platform]}(") == 1


H100 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 28 }
runtime_version { major: 13 minor: 0 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What the compiler has to know of a GPU that is not there."""

COMPILERS = {
    "tpu": ("libtpu", {"topology_name": "v5e:2x2"}),
    "cuda": ("jax_cuda13_plugin", {"topology": "1x1x4", "target_config": H100}),
}
"""Package that has the compiler, and four devices to compile for."""


@pytest.mark.slow
# What was compiled for devices that are not there cannot be loaded for them, and is compiled anew.
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(("platform", "backend"), [("tpu", TPU), ("cuda", GPU)])
def test_decoding_qwen3_8b_is_in_place(platform, backend, monkeypatch):
    """Compiled for devices that are not there: 64 slots of 32K tokens, heads and slots cut in two.
    Beside the pools no room is taken for a copy of one, or of one layer of one."""
    package, target = COMPILERS[platform]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, and no other package compiles for {platform}")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    cfg = dataclasses.replace(QWEN3["8b"], dtype="bfloat16")
    devices = topologies.get_topology_desc(platform=platform, **target).devices
    with jax.set_mesh(make_mesh(MeshSpec.parse("data:2,tensor:2"), devices)):
        step, args = step_of(cfg, backend, slots=64, slot_pages=256, pages=2048, page=128)
        compiled = step.trace(*args).lower(lowering_platforms=(platform,)).compile()
    assert KERNEL_CALL[platform] in compiled.as_text()
    memory = compiled.memory_analysis()
    layer = 2048 * 128 * 8 * 2 * 128 * 2 // len(devices)
    assert memory.alias_size_in_bytes >= cfg.layers * layer, "the pools are not donated"
    assert memory.temp_size_in_bytes < layer // 4


@pytest.mark.parametrize(
    ("backend", "changes", "page", "words"),
    [
        (TPU, {"head_dim": 64}, 128, "width 128, not 64"),
        (GPU, {"head_dim": 96}, 32, "head_dim, not 96"),
        (GPU, {}, 24, r"EngineConfig\.page, not 24"),
        (GPU, {}, 8, r"EngineConfig\.page, not 8"),
        (GPU, {}, 256, "choose a smaller page"),
    ],
)
def test_sizes_that_a_kernel_cannot_do(backend, changes, page, words):
    with pytest.raises(ValueError, match=words) as error:
        cache.init_pools(config(**changes), pages=2, page=page, backend=backend)
    assert 'EngineConfig.backend="jax"' in str(error.value)


@pytest.mark.parametrize(
    ("slots", "kv_heads", "words"), [(2000, 2, "a table of 2000 slots"), (2, 3, "cannot tile 3 KV")]
)
def test_sizes_that_the_tpu_kernel_cannot_do_on_one_device(slots, kv_heads, words):
    cfg = config(kv_heads)
    pools = cache.init_pools(cfg, pages=2, page=PAGE, backend=TPU)
    q = jnp.zeros((slots, cfg.q_heads, cfg.head_dim))
    lists = (jnp.zeros((slots, 2), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32))
    pages = PageMap(*lists, jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=words):
        TPU.attend(pools, jnp.int32(0), q, pages, jnp.ones(slots, jnp.int32))
