# SPDX-License-Identifier: Apache-2.0
"""Qwen3 folders in the Hugging Face layout, in and out. Read `WEIGHTS`, then `load` and `export`.

A folder has `config.json` and either `model.safetensors` or several files with
`model.safetensors.index.json`. Tokenizer files are neither read nor written.
"""

import contextlib
import dataclasses
import json
import math
import operator
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.model.hf_config import config_json, load_config, read_json
from klear_jax.model.params import Params, WeightInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Size at which `export` starts another file."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One Hugging Face tensor (of every layer, where its name has a `{layer}`)."""

    name: str
    path: str
    """Where it stands in `Params`."""
    layout: tuple[tuple[str, ...], ...]
    """Logical axes of each dimension on disk, where heads and their width are one dimension."""

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.name


def _weights(text: str) -> tuple[Weight, ...]:
    """One `Weight` a line: name, path, and layout with its dimensions joined by commas."""
    rows = [line.split(maxsplit=2) for line in text.strip().splitlines()]
    return tuple(
        Weight(name, path, tuple(tuple(d.split()) for d in layout.split(",")))
        for name, path, layout in rows
    )


WEIGHTS = _weights("""
    model.embed_tokens.weight                             embed             vocab, embed
    model.layers.{layer}.input_layernorm.weight           blocks.attn_norm  width
    model.layers.{layer}.self_attn.q_proj.weight          blocks.attn.wq    heads head_dim, embed
    model.layers.{layer}.self_attn.k_proj.weight          blocks.attn.wk    kv_heads head_dim, embed
    model.layers.{layer}.self_attn.v_proj.weight          blocks.attn.wv    kv_heads head_dim, embed
    model.layers.{layer}.self_attn.o_proj.weight          blocks.attn.wo    embed, heads head_dim
    model.layers.{layer}.self_attn.q_norm.weight          blocks.attn.q_norm  head_dim
    model.layers.{layer}.self_attn.k_norm.weight          blocks.attn.k_norm  head_dim
    model.layers.{layer}.post_attention_layernorm.weight  blocks.mlp_norm   width
    model.layers.{layer}.mlp.gate_proj.weight             blocks.mlp.gate   ffn, embed
    model.layers.{layer}.mlp.up_proj.weight               blocks.mlp.up     ffn, embed
    model.layers.{layer}.mlp.down_proj.weight             blocks.mlp.down   embed, ffn
    model.norm.weight                                     final_norm        width
    lm_head.weight                                        unembed           vocab, embed
""")
"""Every tensor of a dense Qwen3. torch keeps [out, in]; `Params` keeps inputs first."""

COMPARED_ROWS = 8192
"""Rows of two tables compared at a time."""

HEAD, EMBED = WEIGHTS[-1].name, WEIGHTS[0].name


def load(
    path: str | os.PathLike[str], *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> tuple[Params, ModelConfig]:
    """Read a folder as parameters of type `dtype`.

    With a mesh, every process reads only the slices that its own devices hold. One stacked leaf at
    a time is on the host beside the result. Names, shapes and types are checked before any weight
    is read. `cfg.dtype` (the compute type) stays at its default; choose it with
    `dataclasses.replace`.

    Raises:
        FileNotFoundError: the folder or one of its files is absent.
        ValueError: a model that is not implemented, a tensor that is missing, unexpected or of the
            wrong shape, a damaged file, or a mesh that does not divide the model.
    """
    folder = Path(path)
    cfg = load_config(folder)
    infos = params_lib.describe(cfg)
    # Refuses a mesh that does not fit; a wrong size should not cost minutes of reading.
    layouts = None if mesh is None else params_lib.shardings(cfg, mesh)
    with contextlib.ExitStack() as stack:
        files = _open(folder, stack)
        _check(files, cfg, infos)

        def leaf(key, info, layout=None):
            pieces: dict[str, np.ndarray] = {}

            def read(index):
                # jax asks once for each device, also for those that hold the same piece.
                if str(index) not in pieces:
                    pieces[str(index)] = _read(files, _weight_of(key), info, index, dtype)
                return pieces[str(index)]

            if layout is None:
                return jnp.asarray(read(tuple(slice(None) for _ in info.shape)))
            return jax.make_array_from_callback(info.shape, layout, read)

        trees = (infos,) if layouts is None else (infos, layouts)
        return jax.tree_util.tree_map_with_path(leaf, *trees), cfg


def _weight_of(key: tuple[Any, ...]) -> Weight:
    path = ".".join(part.name for part in key)
    return next(weight for weight in WEIGHTS if weight.path == path)


# Reading

Files = dict[str, tuple[Path, Any]]
"""Tensor name -> its file, and the open handle of that file."""


def _open(folder: Path, stack: contextlib.ExitStack) -> Files:
    """Open every weight file of the folder; reads their headers only."""
    index = folder / INDEX
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(f"{index} has no weight_map; download it again")
    elif (folder / SINGLE).is_file():
        listed = None
    else:
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE} nor {INDEX}; other formats are not read, so save the "
            "model with safe_serialization first"
        )
    found: Files = {}
    for name in sorted(set(listed.values())) if listed is not None else [SINGLE]:
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is absent and {index} names it; download it again")
        try:
            # Reads, not a memory map: mapped pages would count as memory of this process.
            handle = stack.enter_context(safe_open(file, "np", backend="pread"))
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}); download it again") from error
        found |= dict.fromkeys(handle.keys(), (file, handle))
    for tensor, name in (listed or {}).items():
        if tensor not in found:
            raise ValueError(f"{folder / name} has no tensor {tensor!r} and {index} says it has")
    return found


def _names(weight: Weight, cfg: ModelConfig) -> list[str]:
    layers = range(cfg.layers) if weight.stacked else range(1)
    return [weight.name.format(layer=layer) for layer in layers]


def _disk_shape(weight: Weight, info: WeightInfo) -> list[int]:
    sizes = dict(zip(info.axes, info.shape, strict=True))
    return [math.prod(sizes[axis] for axis in group) for group in weight.layout]


def _present(infos: Params) -> list[tuple[Weight, Any]]:
    """The tensors of this model, each with its leaf of `infos` (a tied model has no head)."""
    pairs = [(weight, operator.attrgetter(weight.path)(infos)) for weight in WEIGHTS]
    return [(weight, leaf) for weight, leaf in pairs if leaf is not None]


def _check(files: Files, cfg: ModelConfig, infos: Params) -> None:
    """Compare names, shapes and types on disk with what the config asks for."""
    expected = {
        name: _disk_shape(weight, info)
        for weight, info in _present(infos)
        for name in _names(weight, cfg)
    }
    where = next(iter(files.values()))[0].parent if files else "the weight file"
    for name, shape in expected.items():
        if name not in files:
            raise ValueError(
                f"{where} has no tensor {name!r}; config.json asks for {len(expected)} tensors and "
                f"the files hold {len(files)}"
            )
        file, handle = files[name]
        found = handle.get_slice(name)
        if found.get_shape() != shape:
            raise ValueError(
                f"{file}: tensor {name!r} has shape {found.get_shape()} and config.json asks for "
                f"{shape}; the two are of different models"
            )
        if found.get_dtype() not in ("F32", "BF16", "F16"):
            raise ValueError(
                f"{file}: tensor {name!r} is of type {found.get_dtype()}; it must be F32, BF16 or "
                "F16"
            )
    if cfg.tied and HEAD in files:
        _check_same(files, HEAD, EMBED)
    for name in sorted(set(files) - set(expected) - ({HEAD} if cfg.tied else set())):
        raise ValueError(
            f"{files[name][0]}: unexpected tensor {name!r}; a Qwen3 of {cfg.layers} layers has none"
        )


def _check_same(files: Files, head: str, embed: str) -> None:
    """Some tied models store the table twice; a head that differs means that they are not tied."""
    (file, one), (_, two) = files[head], files[embed]
    shape = two.get_slice(embed).get_shape()
    same = one.get_slice(head).get_shape() == shape
    for start in range(0, shape[0], COMPARED_ROWS):
        cut = slice(start, min(start + COMPARED_ROWS, shape[0]))
        same = same and np.array_equal(one.get_slice(head)[cut], two.get_slice(embed)[cut])
    if not same:
        raise ValueError(
            f"{file}: tensor {head!r} differs from {embed!r} and config.json says they are tied; "
            "set tie_word_embeddings to false"
        )


def _read(
    files: Files, weight: Weight, info: WeightInfo, index: tuple[slice, ...], dtype: Any
) -> np.ndarray:
    """One piece of a leaf, `index` in the leaf's own axes, filled layer by layer."""
    sizes = dict(zip(info.axes, info.shape, strict=True))
    bounds = {
        axis: cut.indices(size)[:2] for (axis, size), cut in zip(sizes.items(), index, strict=True)
    }
    first, last = bounds.pop("layers", (0, 1))
    lengths = {axis: stop - start for axis, (start, stop) in bounds.items()}
    flat = [axis for group in weight.layout for axis in group]
    order = [flat.index(axis) for axis in lengths]
    cuts = []
    for outer, *inner in weight.layout:
        # Only the outer axis of a dimension (heads, not their width) may be cut.
        step = math.prod(sizes[axis] for axis in inner)
        cuts.append(slice(bounds[outer][0] * step, bounds[outer][1] * step))

    out = np.empty((last - first, *lengths.values()), dtype)
    for row, layer in enumerate(range(first, last)):
        name = weight.name.format(layer=layer)
        piece = files[name][1].get_slice(name)[tuple(cuts)]
        out[row] = piece.reshape([lengths[axis] for axis in flat]).transpose(order)
    return out if weight.stacked else out[0]


# Writing

Tensor = tuple[str, Weight, int]
"""Name on disk, what it is, and its layer (0 where it is not stacked)."""


def export(
    params: Params,
    cfg: ModelConfig,
    path: str | os.PathLike[str],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers, vLLM and `load` read, in the type of `params`.

    The folder appears whole or not at all. Files hold about `shard_bytes` bytes, which is also what
    the host needs beside `params`. Token ids (bos, eos) are not part of `cfg` and are not written.

    Raises:
        FileExistsError: `path` exists and is not an empty folder.
        ValueError: `params` are not of the shapes of `cfg`, of mixed types, or spread over several
            processes.
    """
    folder = Path(path)
    check_free(folder)
    dtype = _check_exportable(params, cfg)
    names = [
        (name, weight, layer)
        for weight, _ in _present(params)
        for layer, name in enumerate(_names(weight, cfg))
    ]
    shards = _split(names, params, cfg, shard_bytes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.part"
    part.mkdir()
    try:
        _write_shards(part, shards, params, cfg)
        (part / "config.json").write_text(json.dumps(config_json(cfg, dtype), indent=2) + "\n")
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def check_free(folder: Path) -> None:
    """Check that `export` may write here.

    Raises:
        FileExistsError: the path exists and is not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; choose another folder")


def _check_exportable(params: Params, cfg: ModelConfig) -> str:
    """The one type of all leaves, as a name."""
    infos = params_lib.describe(cfg)
    types = set()
    for weight in WEIGHTS:
        info, leaf = (operator.attrgetter(weight.path)(tree) for tree in (infos, params))
        given = None if leaf is None else leaf.shape
        wanted = None if info is None else info.shape
        if given != wanted:
            raise ValueError(
                f"parameter {weight.path} has shape {given} and the config asks for {wanted}; "
                "export with the config that the parameters were made from"
            )
        if leaf is not None:
            types.add(str(leaf.dtype))
            if not getattr(leaf, "is_fully_addressable", True):
                raise ValueError(
                    f"parameter {weight.path} is spread over several processes; save a checkpoint "
                    "and export it in one process (experiments/convert_hf.py)"
                )
    if len(types) != 1 or not types <= {"float32", "bfloat16", "float16"}:
        raise ValueError(
            f"parameters are of type {sorted(types)}; cast them all to float32, bfloat16 or float16"
        )
    return types.pop()


def _split(
    names: list[Tensor], params: Params, cfg: ModelConfig, shard_bytes: int
) -> list[list[Tensor]]:
    """Cut the list of tensors into files of about `shard_bytes` bytes."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for name, weight, layer in names:
        leaf = operator.attrgetter(weight.path)(params)
        size = leaf.size * leaf.dtype.itemsize // (cfg.layers if weight.stacked else 1)
        if filled and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, weight, layer))
        filled += size
    return shards


def _write_shards(part: Path, shards: list[list[Tensor]], params: Params, cfg: ModelConfig) -> None:
    infos = params_lib.describe(cfg)
    where: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, weight, layer in shard:
            info, leaf = (operator.attrgetter(weight.path)(tree) for tree in (infos, params))
            tensors[name] = _to_disk(weight, info, leaf, layer)
            where[name] = file
            total += tensors[name].nbytes
        save_file(tensors, part / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (part / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _to_disk(weight: Weight, info: WeightInfo, leaf: jax.Array, layer: int) -> np.ndarray:
    """One tensor as torch keeps it."""
    # One layer leaves the devices at a time: np.asarray of the whole leaf would keep its host copy.
    one = jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False) if weight.stacked else leaf
    axes = [axis for axis in info.axes if axis != "layers"]
    order = [axes.index(axis) for group in weight.layout for axis in group]
    disk = np.asarray(one).transpose(order).reshape(_disk_shape(weight, info))
    return np.ascontiguousarray(disk)
