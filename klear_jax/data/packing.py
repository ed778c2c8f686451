# SPDX-License-Identifier: Apache-2.0
"""Packing: token sequences of different lengths laid into rows of one length.

Owns the one shift of the project: in every `[b, t]` array, index t speaks about predicting
`targets[t]` from `tokens[..t]`. A sequence of n tokens therefore takes n - 1 cells. Masks come
from lengths; no id is ever compared with a pad id, so padding and the end token may share one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and its completion as one run of ids; the end token belongs to the completion."""

    tokens: np.ndarray
    """int32 [n]."""
    prompt_length: int
    """How many of the n are prompt: 1 <= prompt_length <= n."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.shape[0] < 2:
            raise ValueError(f"tokens of shape {self.tokens.shape}; expected [n] with n >= 2")
        if not 1 <= self.prompt_length <= self.tokens.shape[0]:
            raise ValueError(
                f"prompt_length={self.prompt_length} of {self.tokens.shape[0]} tokens; it must be"
                " from 1 to the number of tokens, since the first token is predicted from nothing"
            )

    @property
    def cells(self) -> int:
        """Cells it takes in a row."""
        return self.tokens.shape[0] - 1


@dataclass(frozen=True)
class PackedRows:
    """Rows of packed sequences, arrays [b, t] unless stated."""

    tokens: np.ndarray
    """int32 inputs; 0 in padding."""
    targets: np.ndarray
    """int32 ids to predict; 0 in padding."""
    positions: np.ndarray
    """int32, from 0 in each sequence."""
    segments: np.ndarray
    """int32, 1, 2, ... within a row; 0 in padding. Attention stays within equal numbers."""
    mask: np.ndarray
    """bool, True where `targets` is a completion token."""
    index: np.ndarray
    """int32, which of the given sequences a cell belongs to; -1 in padding."""
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Extra values of completion tokens (old log-probs, advantages, ...), 0 elsewhere."""


def first_fit(lengths: Sequence[int], *, row: int) -> list[list[int]]:
    """First-fit decreasing: which sequences go into which row of `row` cells.

    Longest first, equal lengths in their given order, each into the first row with room. Every
    index appears once; the same lengths give the same rows.

    Raises:
        ValueError: when a length is below 1 or above `row`.
    """
    for i, length in enumerate(lengths):
        if not 1 <= length <= row:
            raise ValueError(
                f"sequence {i} needs {length} cells; a row holds 1 to {row}."
                " Drop it and count it, or use longer rows"
            )
    rows: list[list[int]] = []
    room = np.zeros(0, np.int64)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = room >= lengths[i]
        if fits.any():
            place = int(np.argmax(fits))
        else:
            place = len(rows)
            rows.append([])
            room = np.append(room, row)
        rows[place].append(i)
        room[place] -= lengths[i]
    return rows


def pack(
    sequences: Sequence[TokenSequence],
    *,
    row: int,
    rows: int | None = None,
    per_token: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> PackedRows:
    """Lay sequences into rows of `row` cells by `first_fit`.

    Args:
        sequences: what to pack.
        row: cells in a row (t).
        rows: number of rows (b); empty ones are added up to it. None: as many as needed.
        per_token: extra arrays by name, one per sequence of length n - prompt_length: the value
            of each completion token, placed at the cell that predicts it.
    Raises:
        ValueError: a sequence is too long, more rows are needed than given, or an extra array has
            another length.
    """
    extras = dict(per_token or {})
    for name, arrays in extras.items():
        _check_extra(name, arrays, sequences)
    plan = first_fit([s.cells for s in sequences], row=row)
    count = len(plan) if rows is None else rows
    if len(plan) > count:
        raise ValueError(
            f"{len(sequences)} sequences need {len(plan)} rows of {row} cells, rows={rows} were"
            " given; give more rows or longer ones"
        )
    shape = (count, row)
    tokens, targets, positions, segments = (np.zeros(shape, np.int32) for _ in range(4))
    mask, index = np.zeros(shape, bool), np.full(shape, -1, np.int32)
    packed = {
        name: np.zeros(shape, np.result_type(*arrays) if arrays else np.float32)
        for name, arrays in extras.items()
    }
    for b, members in enumerate(plan):
        start = 0
        for number, i in enumerate(members, start=1):
            sequence = sequences[i]
            stop = start + sequence.cells
            tokens[b, start:stop] = sequence.tokens[:-1]
            targets[b, start:stop] = sequence.tokens[1:]
            positions[b, start:stop] = np.arange(sequence.cells)
            segments[b, start:stop] = number
            index[b, start:stop] = i
            # The cell before the first completion token is the one that predicts it.
            first = start + sequence.prompt_length - 1
            mask[b, first:stop] = True
            for name, arrays in extras.items():
                packed[name][b, first:stop] = arrays[i]
            start = stop
    return PackedRows(tokens, targets, positions, segments, mask, index, packed)


def _check_extra(
    name: str, arrays: Sequence[np.ndarray], sequences: Sequence[TokenSequence]
) -> None:
    if len(arrays) != len(sequences):
        raise ValueError(
            f"per_token[{name!r}] has {len(arrays)} arrays for {len(sequences)} sequences"
        )
    for i, (array, sequence) in enumerate(zip(arrays, sequences, strict=True)):
        expected = (sequence.tokens.shape[0] - sequence.prompt_length,)
        if array.shape != expected:
            raise ValueError(
                f"per_token[{name!r}][{i}] has shape {array.shape}, expected {expected}:"
                " one value for each completion token"
            )
