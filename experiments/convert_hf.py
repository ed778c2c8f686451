# SPDX-License-Identifier: Apache-2.0
"""Check a Hugging Face Qwen3 folder, or export a checkpoint of a run as one.

    python experiments/convert_hf.py HF_DIR
    python experiments/convert_hf.py --checkpoint RUN_DIR --out HF_DIR

Exit status: 0, or 2 with one line on stderr where the input cannot be used.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import tyro

from klear_jax.model import hf
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params


@dataclasses.dataclass(frozen=True)
class Options:
    """Check a Hugging Face Qwen3 folder, or export a checkpoint of a run as one."""

    hf_dir: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder with config.json and safetensors files to read and check."""
    checkpoint: Path | None = None
    """Run folder to export; needs --out."""
    out: Path | None = None
    """Folder to write; must be absent or empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights. float32 keeps the masters exactly; bfloat16 is half the size
    and what servers of the model load."""

    def __post_init__(self):
        if (self.hf_dir is None) == (self.checkpoint is None):
            raise ValueError(
                "give either HF_DIR (to check it) or --checkpoint RUN_DIR --out HF_DIR"
            )
        if (self.out is None) != (self.checkpoint is None):
            raise ValueError("--checkpoint and --out belong together: give both or neither")


def check(folder: Path) -> None:
    """Read every weight of the folder in the smaller type, and print what it is."""
    params, cfg = hf.load(folder, dtype=jnp.bfloat16)
    bad = [name for name, leaf in _named(params) if not bool(jnp.isfinite(leaf).all())]
    if bad:
        raise ValueError(f"{folder}: weights that are not finite: {', '.join(bad)}")
    print(f"{folder}: every tensor is there, of the right shape and finite")
    _describe(cfg)


def export(checkpoint: Path, out: Path, dtype: str) -> None:
    """Write the parameters of a run as a Hugging Face folder."""
    # Imported here: reading a Hugging Face folder needs no checkpoint library.
    from klear_jax.train import checkpoint as checkpoint_lib

    hf.check_free(out)  # before the weights are read
    params, cfg = checkpoint_lib.load_params(checkpoint, mesh=None)
    hf.export(jax.tree.map(lambda leaf: leaf.astype(dtype), params), cfg, out)
    print(f"{checkpoint} -> {out} ({dtype})")
    _describe(cfg)


def _named(params: Params) -> list[tuple[str, jax.Array]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def _describe(cfg: ModelConfig) -> None:
    for field in dataclasses.fields(cfg):
        print(f"  {field.name} = {getattr(cfg, field.name)}")
    count = cfg.parameter_count
    print(f"  {count:,} parameters: {count * 2 / 2**30:.2f} GiB in bfloat16, ", end="")
    print(f"{count * 4 / 2**30:.2f} GiB in float32")


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        options = tyro.cli(Options, description=__doc__)
        if options.hf_dir is not None:
            check(options.hf_dir)
        elif options.checkpoint is not None and options.out is not None:
            export(options.checkpoint, options.out, options.dtype)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
