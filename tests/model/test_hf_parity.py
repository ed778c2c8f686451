# SPDX-License-Identifier: Apache-2.0
"""Our forward pass against transformers' Qwen3, and folders in and out."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.model import hf, qwen3
from klear_jax.model import params as params_lib

ROPE = {"rope_type": "default", "rope_theta": 1e6}
COLUMNS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SHAPES = {  # heads * head_dim differs from the width in all three
    "tied-gqa": ((32, 4, 2, 12), {"tie_word_embeddings": True, "rope_parameters": ROPE}),
    "untied-gqa": ((48, 6, 2, 16), {"tie_word_embeddings": False}),
    "untied-mha": ((40, 4, 4, 8), {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
}
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24))


def make(name: str) -> Qwen3ForCausalLM:
    """A random model whose norms and attention matter: norms far from one, scores far from flat."""
    torch.manual_seed(0)
    sizes, more = SHAPES[name]
    config = Qwen3Config(
        vocab_size=96, intermediate_size=72, num_hidden_layers=3, max_position_embeddings=128,
        attn_implementation="eager", **dict(zip(COLUMNS, sizes, strict=True)), **more,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.uniform_(0.5, 1.5)
            elif "embed" in key or "lm_head" in key:
                weight.normal_(0, 0.6 / weight.shape[1] ** 0.5)
            else:
                weight.normal_(0, 1.0 / weight.shape[1] ** 0.5)
    return model


@pytest.fixture(scope="module", params=sorted(SHAPES))
def pair(request, tmp_path_factory):
    """(transformers' model, folder that it saved, our parameters, our config)."""
    model = make(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder, *hf.load(folder)


@torch.no_grad()
def torch_logits(model, tokens) -> np.ndarray:
    return model(torch.as_tensor(np.asarray(tokens))).logits.float().numpy()


def rows(tokens):
    """Positions and segments of whole unpacked rows."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return positions, np.ones_like(tokens)


def our_logits(params, cfg, tokens, positions=None, segments=None) -> np.ndarray:
    if positions is None:
        positions, segments = rows(tokens)

    @jax.jit
    def run(params, *batch):
        hidden = qwen3.forward(params, *batch, cfg=cfg)
        head = qwen3.unembed(params).astype(hidden.dtype)
        return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)

    return np.asarray(run(params, tokens, positions, segments))


def largest(a, b) -> float:
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def test_logits(pair):
    model, _, params, cfg = pair
    ours = our_logits(params, cfg, TOKENS)
    theirs = torch_logits(model, TOKENS)
    exact = torch_logits(make_double(model), TOKENS)
    assert 1 < np.abs(theirs).max() < 6
    assert largest(ours, theirs) < 2e-5
    assert largest(ours, exact) < 2e-5


def make_double(model):
    wide = Qwen3ForCausalLM(model.config).eval().double()
    wide.load_state_dict(model.state_dict())
    return wide


def test_attention_matters(pair):
    """Without this the parity test would pass with broken attention."""
    model = pair[0]
    other = TOKENS.copy()
    other[:, 0] = (other[:, 0] + 1) % 96
    assert np.abs(torch_logits(model, other) - torch_logits(model, TOKENS))[:, 6:].max() > 0.05


def test_hidden_states_of_each_layer(pair):
    _, _, params, cfg = pair
    model = make_double(pair[0])
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *args: seen.append(args[-1]))
    torch_logits(model, TOKENS)
    run = jax.jit(
        lambda *batch: qwen3.run_blocks(*batch, cfg=cfg, keep=lambda hidden, k, v: hidden)
    )
    last, kept = run(params, TOKENS, *rows(TOKENS))
    assert len(kept) == len(seen) == 3
    for ours, theirs in zip(kept, seen, strict=True):
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        assert largest(ours, theirs.numpy()) < 2e-5
    np.testing.assert_array_equal(last, kept[-1])


def test_bfloat16_compute(pair):
    model, _, params, cfg = pair
    exact = torch_logits(model, TOKENS)
    half = Qwen3ForCausalLM(model.config).eval()
    half.load_state_dict(model.state_dict())
    ours = our_logits(params, dataclasses.replace(cfg, dtype="bfloat16"), TOKENS)
    assert 0 < largest(ours, exact) < 6e-2 * np.abs(exact).max()
    # torch's own bfloat16 error: we lose no more than the type does.
    assert largest(ours, exact) < 1.5 * largest(torch_logits(half.bfloat16(), TOKENS), exact)


def test_packed_rows_are_the_sequences_run_apart(pair):
    model, _, params, cfg = pair
    first, second = TOKENS[0, :11], TOKENS[1, :8]
    padding = 5
    tokens = np.concatenate([first, second, np.zeros(padding, int)])[None]
    positions = np.concatenate([np.arange(11), np.arange(8), np.arange(padding)])[None]
    segments = np.repeat([1, 2, 0], [11, 8, padding])[None]
    packed = our_logits(params, cfg, tokens, positions, segments)[0]
    assert largest(packed[:11], torch_logits(model, first[None])[0]) < 2e-5
    assert largest(packed[11:19], torch_logits(model, second[None])[0]) < 2e-5

    tokens[:, 19:] = 77  # what stands in the padding is of no account
    again = our_logits(params, cfg, tokens, positions, segments)[0]
    np.testing.assert_array_equal(again[:19], packed[:19])


def test_export_is_read_by_transformers(pair, tmp_path):
    model, _, params, cfg = pair
    hf.export(params, cfg, tmp_path / "out")
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert again.dtype == torch.float32
    for key in Qwen3Config.__annotations__:
        if key in ("rms_norm_eps", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
            assert getattr(again.config, key) == getattr(model.config, key)
    assert largest(torch_logits(again, TOKENS), torch_logits(model, TOKENS)) <= 1e-6


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 20_000])
def test_round_trip_is_exact(pair, tmp_path, shard_bytes):
    _, _, params, cfg = pair
    cfg = dataclasses.replace(cfg, live_vocab=93)
    hf.export(params, cfg, tmp_path / "out", shard_bytes=shard_bytes)
    files = sorted(tmp_path.joinpath("out").glob("*.safetensors"))
    assert len(files) == 1 if shard_bytes > 10**6 else len(files) > 3
    assert all(sum(x.nbytes for x in load_file(f).values()) <= shard_bytes for f in files)
    again, cfg_again = hf.load(tmp_path / "out")
    assert cfg_again == cfg
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_sharded_files_of_transformers(pair, tmp_path):
    model, _, params, _ = pair
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[0], params)


def test_bfloat16_files(pair, tmp_path):
    _, _, params, cfg = pair
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    hf.export(half, cfg, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(tmp_path / "out/model.safetensors")
    assert {x.dtype for x in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    same = hf.load(tmp_path / "out", dtype=jnp.bfloat16)[0]
    assert {x.dtype for x in jax.tree.leaves(same)} == {np.dtype(ml_dtypes.bfloat16)}
    jax.tree.map(np.testing.assert_array_equal, same, half)
    wide = hf.load(tmp_path / "out")[0]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.float32)), wide, half)


def test_load_on_a_mesh(pair, tmp_path):
    _, folder, params, cfg = pair
    mesh = make_mesh(MeshSpec.parse("fsdp:2,tensor:2"), jax.devices()[:4])
    placed, cfg_placed = hf.load(folder, mesh=mesh)
    assert cfg_placed == cfg

    def check(info, ours, alone, sharding):
        np.testing.assert_array_equal(ours, alone)
        assert ours.sharding.is_equivalent_to(sharding, ours.ndim)
        pieces = 1 if info.init == "ones" else 4
        assert {s.data.nbytes for s in ours.addressable_shards} == {ours.nbytes // pieces}

    targets = params_lib.shardings(cfg, mesh)
    jax.tree.map(check, params_lib.describe(cfg), placed, params, targets)

    hf.export(placed, cfg, tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "out")[0], params)


def test_reads_no_more_than_its_slices(pair, monkeypatch):
    """Replicas share one read, and no piece is larger than what a device holds."""
    _, folder, _, cfg = pair
    read, sizes = hf._read, []
    monkeypatch.setattr(hf, "_read", lambda *a: sizes.append(read(*a).size) or read(*a))
    hf.load(folder, mesh=make_mesh(MeshSpec.parse("data:2,tensor:2"), jax.devices()[:4]))
    assert sum(sizes) == cfg.parameter_count


def test_tied_folder_may_hold_the_table_twice(pair, tmp_path):
    """The released Qwen3-0.6B is tied and stores a head all the same."""
    _, _, params, cfg = pair
    twice = params.replace(unembed=params.embed.T)
    hf.export(twice, dataclasses.replace(cfg, tied=False), tmp_path / "out")
    config = tmp_path / "out/config.json"
    config.write_text(config.read_text().replace('embeddings": false', 'embeddings": true'))
    loaded, cfg_loaded = hf.load(tmp_path / "out")
    assert cfg_loaded == dataclasses.replace(cfg, tied=True)
    jax.tree.map(np.testing.assert_array_equal, loaded, params.replace(unembed=None))


def test_both_layouts_of_rope(pair, tmp_path):
    """transformers 4 keeps rope_theta at the top level, 5 inside rope_parameters."""
    model, _, _, cfg = pair
    raw = model.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    inside = raw.pop("rope_parameters")
    assert inside["rope_theta"] == cfg.rope_theta
    for entries in (
        {"rope_theta": cfg.rope_theta, "rope_scaling": None},
        {"rope_scaling": {"type": "default"}, "rope_theta": cfg.rope_theta},
        {"rope_parameters": inside},
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | entries))
        assert hf.load_config(tmp_path) == cfg
