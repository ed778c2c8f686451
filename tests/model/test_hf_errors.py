# SPDX-License-Identifier: Apache-2.0
"""What `hf` refuses, and that its text names the file, the tensor and a way out."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.model import hf
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.train import checkpoint
from klear_jax.train.state import init_state

CFG = ModelConfig(
    layers=2, d_model=8, q_heads=2, kv_heads=1, head_dim=6, d_ff=12, vocab=16, live_vocab=16
)  # fmt: skip
CONVERT = Path(__file__).resolve().parents[2] / "experiments" / "convert_hf.py"


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda w: jnp.asarray(rng.normal(size=w.shape), jnp.float32), params_lib.describe(CFG)
    )


@pytest.fixture
def folder(params, tmp_path) -> Path:
    hf.export(params, CFG, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def several(params, tmp_path) -> Path:
    """The same in several files with an index."""
    hf.export(params, CFG, tmp_path / "several", shard_bytes=2000)
    return tmp_path / "several"


def edit(folder: Path, **entries) -> None:
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


REFUSED = {
    "other model": ({"model_type": "llama"}, r"model_type is 'llama'; only 'qwen3'"),
    "mixture": ({"model_type": "qwen3_moe"}, r"model_type is 'qwen3_moe'"),
    "bias": ({"attention_bias": True}, r"attention_bias is on"),
    "window": ({"use_sliding_window": True, "sliding_window": 64}, r"sliding-window.* 64"),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, r"sliding"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; only 'silu'"),
    "quantized": ({"quantization_config": {"bits": 4}}, r"quantized"),
    "yarn of transformers 5": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        r"rope type is 'yarn'; only 'default'",
    ),
    "yarn of transformers 4": (
        {"rope_parameters": "absent", "rope_scaling": {"type": "yarn", "factor": 4.0}},
        r"rope type is 'yarn'; only 'default'",
    ),
    "no theta": ({"rope_parameters": "absent", "rope_theta": "absent"}, r"rope_theta must be one"),
    "two thetas": ({"rope_theta": 5e5}, r"rope_theta must be one number.*1000000.*500000"),
    "entry absent": ({"head_dim": "absent"}, r"'head_dim' is missing; .* a positive integer"),
    "wrong type": ({"hidden_size": "8"}, r"'hidden_size' is '8'; .* a positive integer"),
    "no size": ({"num_hidden_layers": 0}, r"'num_hidden_layers' is 0; .* a positive integer"),
    "truth value": ({"vocab_size": True}, r"'vocab_size' is True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_is_refused(folder, case):
    entries, text = REFUSED[case]
    edit(folder, **entries)
    with pytest.raises(ValueError, match=text) as caught:
        hf.load(folder)
    assert str(folder / "config.json") in str(caught.value)


def test_unused_sliding_window_is_fine(folder):
    edit(folder, use_sliding_window=False, sliding_window=4096, layer_types=["full_attention"] * 2)
    assert hf.load(folder)[1] == CFG


def test_live_vocab_without_the_entry(folder):
    edit(folder, live_vocab="absent")
    assert hf.load_config(folder).live_vocab == 16
    edit(folder, vocab_size=151_936)
    assert hf.load_config(folder).live_vocab == 151_669


def test_absent_files(folder, several, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere; .*hf download"):
        hf.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty/config.json is absent"):
        hf.load(tmp_path / "empty")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor model.safetensors"):
        hf.load(folder)
    gone = sorted(several.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{gone.name} is absent and .*index.json names"):
        hf.load(several)


def test_damaged_files(folder, several):
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"model/model.safetensors cannot be read"):
        hf.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"model/config.json is no JSON"):
        hf.load(folder)
    index = several / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.layers.7.mlp.up_proj.weight"] = raw["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"has no tensor 'model.layers.7.mlp.up_proj.weight'"):
        hf.load(several)
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"index.json holds a list"):
        hf.load(several)


def test_truncated_file(several):
    """A download that stopped half way."""
    file = sorted(several.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read"):
        hf.load(several)


def test_tensors_that_do_not_fit(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = load_file(folder / "model.safetensors")
    cases = {
        rf"has no tensor '{name}'": lambda t: t.pop(name),
        rf"model.safetensors: tensor '{name}' has shape \[3, 8\] .* \[6, 8\]": (
            lambda t: t.update({name: t[name][:3].copy()})
        ),
        rf"model.safetensors: unexpected tensor '{name}.extra'": (
            lambda t: t.update({name + ".extra": t[name]})
        ),
        rf"model.safetensors: tensor '{name}' is of type I32": (
            lambda t: t.update({name: t[name].astype("int32")})
        ),
    }
    for text, change in cases.items():
        save_file(whole, folder / "model.safetensors")
        rewrite(folder, change)
        with pytest.raises(ValueError, match=text):
            hf.load(folder)


def test_tied_with_another_head(folder):
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs.*tie_word_embeddings to false"):
        hf.load(folder)


def test_mesh_is_refused_before_reading(folder, monkeypatch):
    """kv_heads is 1 here, so tensor:2 cannot work; no weight file is opened."""
    monkeypatch.setattr(hf, "_open", lambda *_: pytest.fail("opened a weight file"))
    mesh = make_mesh(MeshSpec.parse("tensor:2"), jax.devices()[:2])
    with pytest.raises(ValueError, match=r"kv_heads \(size 1\).*tensor.*\[1\]"):
        hf.load(folder, mesh=mesh)


def test_export_refuses(params, folder, tmp_path):
    with pytest.raises(FileExistsError, match=r"model exists and is not empty"):
        hf.export(params, CFG, folder)
    with pytest.raises(FileExistsError, match=r"config.json exists"):
        hf.export(params, CFG, folder / "config.json")
    other = dataclasses.replace(CFG, d_ff=16)
    with pytest.raises(ValueError, match=r"blocks.mlp.gate has shape \(2, 8, 12\) .* \(2, 8, 16\)"):
        hf.export(params, other, tmp_path / "new")
    with pytest.raises(ValueError, match=r"unembed has shape \(8, 16\) .* None"):
        hf.export(params, dataclasses.replace(CFG, tied=True), tmp_path / "new")
    mixed = params.replace(embed=params.embed.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"\['bfloat16', 'float32'\]; cast them all"):
        hf.export(mixed, CFG, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_export_leaves_nothing_behind(params, tmp_path, monkeypatch):
    """The disk fills up at the second file."""
    saved = []

    def full(tensors, file, **_):
        if saved:
            raise OSError("No space left on device")
        saved.append(file)
        save_file(tensors, file)

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        hf.export(params, CFG, tmp_path / "out", shard_bytes=2000)
    assert saved
    assert list(tmp_path.iterdir()) == []


def test_export_into_an_empty_folder(params, tmp_path):
    hf.export(params, CFG, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def convert(*arguments) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CONVERT, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_command_line(folder):
    """Status and streams: facts on stdout, one line on stderr without a traceback."""
    good = convert(folder)
    assert (good.returncode, good.stderr) == (0, "")
    assert f"{CFG.parameter_count:,} parameters" in good.stdout
    bad = convert(folder / "nowhere")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: no folder ")
    assert bad.stderr.count("\n") == 1


@pytest.mark.slow
def test_command_line_exports_a_checkpoint(params, folder, tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path / "run")
    state = init_state(params, optax.adamw(1e-3))
    checkpoints.save(3, state, {"model": checkpoint.model_record(CFG)})
    checkpoints.close()
    done = convert("--checkpoint", tmp_path / "run", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "out")[0], params)

    half = convert(
        "--checkpoint", tmp_path / "run", "--out", tmp_path / "half", "--dtype", "bfloat16"
    )
    assert half.returncode == 0, half.stderr
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "half")[0], rounded)

    for arguments in (
        ("--checkpoint", tmp_path / "run", "--out", folder),
        ("--checkpoint", tmp_path / "nowhere", "--out", tmp_path / "new"),
    ):
        refused = convert(*arguments)
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
        assert "Traceback" not in refused.stderr
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "new").exists()
