# SPDX-License-Identifier: Apache-2.0
"""Packing by hand-computed rows, and its invariants on random lengths."""

import numpy as np
import pytest

from klear_jax.data.packing import TokenSequence, first_fit, pack


def sequence(*tokens: int, prompt: int) -> TokenSequence:
    return TokenSequence(np.array(tokens, np.int32), prompt)


def test_first_fit_is_longest_first_into_the_first_row_with_room() -> None:
    assert first_fit([2, 5, 3, 4, 1], row=6) == [[1, 4], [3, 0], [2]]
    assert first_fit([3, 3, 3], row=6) == [[0, 1], [2]]
    assert first_fit([], row=6) == []


@pytest.mark.parametrize("length", [0, 7])
def test_lengths_out_of_range_name_the_index(length: int) -> None:
    with pytest.raises(ValueError, match=rf"sequence 1 needs {length} cells; a row holds 1 to 6"):
        first_fit([3, length], row=6)


@pytest.mark.parametrize("seed", range(20))
def test_every_index_once_and_no_row_overfull(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = int(rng.integers(5, 60))
    lengths = rng.integers(1, row + 1, size=int(rng.integers(1, 200))).tolist()
    rows = first_fit(lengths, row=row)
    assert sorted(i for members in rows for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= row for members in rows)
    # First fit leaves at most one row half empty.
    assert sum(sum(lengths[i] for i in members) * 2 <= row for members in rows) <= 1


def test_two_sequences_in_one_row() -> None:
    packed = pack([sequence(5, 6, 7, 9, prompt=2), sequence(8, 9, 1, prompt=1)], row=6)
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 9, 0]]
    assert packed.targets.tolist() == [[6, 7, 9, 9, 1, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert packed.segments.tolist() == [[1, 1, 1, 2, 2, 0]]
    assert packed.mask.tolist() == [[False, True, True, True, True, False]]
    assert packed.index.tolist() == [[0, 0, 0, 1, 1, -1]]
    assert {a.dtype for a in (packed.tokens, packed.segments, packed.index)} == {np.dtype("int32")}


def test_the_end_token_is_trained_though_it_is_the_pad_id() -> None:
    packed = pack([sequence(3, 5, 6, 0, prompt=1)], row=6)
    assert packed.targets.tolist() == [[5, 6, 0, 0, 0, 0]]
    assert packed.mask.tolist() == [[True, True, True, False, False, False]]


def test_extra_values_stand_where_their_token_is_predicted() -> None:
    sequences = [sequence(5, 6, 7, 9, prompt=2), sequence(8, 9, 1, prompt=1)]
    values = {"old": [np.array([-1.5, -2.5], np.float32), np.array([-3.0, -4.0], np.float32)]}
    packed = pack(sequences, row=4, per_token=values)
    assert packed.per_token["old"].tolist() == [[0, -1.5, -2.5, 0], [-3.0, -4.0, 0, 0]]
    assert packed.per_token["old"].dtype == np.float32
    assert (packed.per_token["old"] != 0).tolist() == packed.mask.tolist()


def test_a_prompt_without_completion_trains_nothing() -> None:
    packed = pack([sequence(5, 6, 7, prompt=3)], row=4, per_token={"w": [np.zeros(0)]})
    assert not packed.mask.any()
    assert packed.segments.tolist() == [[1, 1, 0, 0]]


def test_rows_are_padded_up_to_the_given_number() -> None:
    packed = pack([sequence(5, 6, prompt=1)], row=2, rows=3)
    assert packed.tokens.tolist() == [[5, 0], [0, 0], [0, 0]]
    assert packed.index.tolist() == [[0, -1], [-1, -1], [-1, -1]]
    assert pack([], row=4, rows=1).tokens.shape == (1, 4)
    with pytest.raises(ValueError, match="2 sequences need 2 rows of 2 cells, rows=1"):
        pack([sequence(1, 2, 3, prompt=1)] * 2, row=2, rows=1)


def test_wrong_extras_and_sequences_are_refused() -> None:
    one = [sequence(5, 6, 7, prompt=2)]
    with pytest.raises(
        ValueError, match=r"per_token\['w'\]\[0\] has shape \(2,\), expected \(1,\)"
    ):
        pack(one, row=4, per_token={"w": [np.zeros(2)]})
    with pytest.raises(ValueError, match="has 0 arrays for 1 sequences"):
        pack(one, row=4, per_token={"w": []})
    with pytest.raises(ValueError, match="prompt_length=0 of 2 tokens"):
        sequence(5, 6, prompt=0)
    with pytest.raises(ValueError, match=r"tokens of shape \(1,\)"):
        sequence(5, prompt=1)


@pytest.mark.parametrize("seed", range(5))
def test_unpacking_gives_the_sequences_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(50):
        n = int(rng.integers(2, 30))
        tokens = rng.integers(0, 9, size=n).astype(np.int32)
        sequences.append(TokenSequence(tokens, int(rng.integers(1, n + 1))))
    packed = pack(sequences, row=40)
    for i, original in enumerate(sequences):
        cells = packed.index == i
        assert packed.tokens[cells].tolist() == original.tokens[:-1].tolist()
        assert packed.targets[cells].tolist() == original.tokens[1:].tolist()
        assert packed.positions[cells].tolist() == list(range(original.cells))
        assert len(set(packed.segments[cells].tolist())) == 1
        completion = original.tokens[original.prompt_length :]
        assert packed.targets[cells & packed.mask].tolist() == completion.tolist()
