# SPDX-License-Identifier: Apache-2.0
"""Merging and summarising metrics, and the lines a run writes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.train.metrics import Metrics, RunLog, zeros_like


def piece(tokens, loss_sum, largest):
    return Metrics(
        sums={"tokens": jnp.asarray(tokens), "histogram": jnp.asarray([tokens, 1.0])},
        means={"loss": (jnp.asarray(loss_sum), jnp.asarray(tokens))},
        maxima={"largest": jnp.asarray(largest)},
    )


def test_merge_then_divide():
    """A mean of 2 tokens and one of 6 weigh 2 and 6."""
    merged = piece(2, 2.0, -3.0).merge(piece(6, 18.0, -5.0)).summarise()
    assert {k: np.asarray(v).tolist() for k, v in merged.items()} == {
        "tokens": 8,
        "histogram": [8.0, 2.0],
        "loss": 2.5,
        "largest": -3.0,
    }


def test_mean_over_nothing_is_nan():
    assert np.isnan(piece(0, 0.0, 0.0).summarise()["loss"])


def test_zeros_are_neutral():
    """Also for a maximum below 0."""
    metrics = piece(3, 7.5, -2.0)
    zeros = zeros_like(jax.eval_shape(lambda: metrics))
    for merged in (metrics.merge(zeros), zeros.merge(metrics)):
        for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(metrics), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


@pytest.fixture
def log(tmp_path):
    with RunLog(tmp_path / "run") as log:
        yield log


def strict_lines(folder):
    """Parsed lines; NaN and Infinity are no JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not valid JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_run_log_writes_strict_json(tmp_path, log):
    values = {
        "loss": jnp.asarray(0.5),
        "nan": jnp.asarray(jnp.nan),
        "inf": np.float32(-np.inf),
        "count": jnp.asarray(3),
        "flag": True,
        "text": "a\nb",
        "none": None,
        "histogram": np.array([1.0, np.nan, np.inf]),
        "nested": {"x": [1, float("nan")], "y": np.float64("nan")},
    }
    returned = log.write("train", 7, values)
    log.write("train", 8, {"loss": 1.0})
    first, second = strict_lines(tmp_path / "run")  # flushed while the log is open
    assert first == json.loads(json.dumps(returned))
    assert first.pop("time") >= 0
    assert first == {
        "phase": "train",
        "step": 7,
        "loss": 0.5,
        "nan": None,
        "inf": None,
        "count": 3,
        "flag": True,
        "text": "a\nb",
        "none": None,
        "histogram": [1.0, None, None],
        "nested": {"x": [1, None], "y": None},
    }
    assert (second["step"], second["loss"]) == (8, 1.0)


def test_run_log_appends(tmp_path):
    for step in (1, 2):
        with RunLog(tmp_path) as log:
            log.write("sft", step, {"loss": step})
    assert [line["step"] for line in strict_lines(tmp_path)] == [1, 2]
    assert list((tmp_path / "tensorboard").glob("events*"))
