# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a Hugging Face Qwen3 and `ModelConfig`, in both directions."""

import json
from pathlib import Path
from typing import Any

from klear_jax.model.config import QWEN3_LIVE_VOCAB, QWEN3_VOCAB, ModelConfig


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json`.

    `live_vocab` is the entry of that name (`export` writes it); without one it is the number of
    tokens of the Qwen3 tokenizer where the model has Qwen3's rows, and else every row.

    Raises:
        FileNotFoundError: the folder or its `config.json` is absent.
        ValueError: an entry is missing, or asks for something that is not implemented.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no folder {folder}; give a local folder with config.json and safetensors files, such "
            "as one made by `hf download Qwen/Qwen3-8B --local-dir DIR`"
        )
    file = folder / "config.json"
    raw = read_json(file)
    _refuse(raw, file)

    def entry(name: str, kind: type = int) -> Any:
        value: Any = raw.get(name)
        # A bool is an int in Python and no size.
        good = isinstance(value, bool) == (kind is bool)
        good = good and isinstance(value, int | float if kind is float else kind)
        if not good or (kind is not bool and value <= 0):
            given = f"is {value!r}" if name in raw else "is missing"
            wanted = {bool: "true or false", int: "a positive integer", float: "a positive number"}
            raise ValueError(f"{file}: entry {name!r} {given}; it must be {wanted[kind]}")
        return kind(value)

    vocab = entry("vocab_size")
    default_live = QWEN3_LIVE_VOCAB if vocab == QWEN3_VOCAB else vocab
    return ModelConfig(
        layers=entry("num_hidden_layers"),
        d_model=entry("hidden_size"),
        q_heads=entry("num_attention_heads"),
        kv_heads=entry("num_key_value_heads"),
        head_dim=entry("head_dim"),
        d_ff=entry("intermediate_size"),
        vocab=vocab,
        live_vocab=entry("live_vocab") if "live_vocab" in raw else default_live,
        # transformers takes these two as given here where a config leaves them out.
        tied=entry("tie_word_embeddings", bool) if "tie_word_embeddings" in raw else False,
        init_range=entry("initializer_range", float) if "initializer_range" in raw else 0.02,
        rope_theta=_rope_theta(raw, file),
        norm_eps=entry("rms_norm_eps", float),
        max_positions=entry("max_position_embeddings"),
    )


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is absent; a model folder needs {file.name}")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}; it must be a JSON object")
    return raw


def _refuse(raw: dict[str, Any], file: Path) -> None:
    """Refuse what `qwen3.forward` does not compute, instead of a model that is subtly wrong."""
    layer_types = set(raw.get("layer_types") or []) - {"full_attention"}
    sliding = raw.get("use_sliding_window") and raw.get("sliding_window") is not None
    problems = {
        f"model_type is {raw.get('model_type')!r}; only 'qwen3' (dense) is implemented": (
            raw.get("model_type") != "qwen3"
        ),
        "attention_bias is on; Qwen3 here has no biases": bool(raw.get("attention_bias")),
        f"sliding-window attention is in use (sliding_window {raw.get('sliding_window')}, layer "
        f"types {sorted(layer_types)}); only full attention is implemented": (
            bool(sliding) or bool(layer_types)
        ),
        f"hidden_act is {raw.get('hidden_act')!r}; only 'silu' is implemented": (
            raw.get("hidden_act", "silu") != "silu"
        ),
        "the weights are quantized (quantization_config); give the bfloat16 or float32 model": (
            raw.get("quantization_config") is not None
        ),
    }
    for text, found in problems.items():
        if found:
            raise ValueError(f"{file}: {text}")


def _rope_theta(raw: dict[str, Any], file: Path) -> float:
    """Base of the rotary frequencies; transformers 4 keeps it beside `rope_scaling`, 5 inside."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{file}: rope type is {kind!r}; only 'default' is implemented, so remove rope_scaling "
            "and train or sample within the original context"
        )
    found = {x for x in (rope.get("rope_theta"), raw.get("rope_theta")) if x is not None}
    if len(found) != 1 or not isinstance(value := found.pop(), int | float):
        raise ValueError(
            f"{file}: rope_theta must be one number, at the top level or in rope_parameters, and "
            f"is {rope.get('rope_theta')!r} there and {raw.get('rope_theta')!r} at the top level"
        )
    return float(value)


def config_json(cfg: ModelConfig, dtype: str) -> dict[str, Any]:
    """What transformers 4 and 5 need to build the same model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.q_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.d_ff,
        "vocab_size": cfg.vocab,
        "live_vocab": cfg.live_vocab,
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.max_positions,
        "initializer_range": cfg.init_range,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": cfg.layers,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
