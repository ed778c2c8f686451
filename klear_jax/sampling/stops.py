# SPDX-License-Identifier: Apache-2.0
"""Stop strings: which token completes one."""

from collections.abc import Callable

import numpy as np


class StopStrings:
    """Watches the text of one completion as it grows."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[np.ndarray], str] | None):
        self._strings = strings
        self._decode = decode
        # A string that ends in new tokens begins at most this many bytes before them, and
        # so rarely more tokens; what is older need not be decoded again.
        self._reach = max((len(s.encode()) for s in strings), default=1) - 1
        self._tail = np.zeros(0, np.int32)

    def find(self, tokens: np.ndarray) -> int | None:
        """How many of the new tokens make the first stop string complete; None where none is."""
        if not self._strings or not len(tokens):
            return None
        old = len(self._tail)
        window = np.concatenate([self._tail, tokens])
        self._tail = self._end_of(window)
        if not self._holds(window):
            return None
        # Growing text keeps what it has, so the first token that completes one can be bisected.
        low, high = old + 1, len(window)
        while low < high:
            middle = (low + high) // 2
            if self._holds(window[:middle]):
                high = middle
            else:
                low = middle + 1
        # What is complete is not found again.
        self._tail = self._end_of(window[low:])
        return low - old

    def _end_of(self, tokens: np.ndarray) -> np.ndarray:
        """The last tokens, as many as a string that is not complete yet can begin in."""
        assert self._decode is not None
        count = self._reach
        # Special tokens may show no text at all. A letter that is cut at the front may show as
        # three replacement characters.
        while 0 < count < len(tokens) and len(self._decode(tokens[-count:])) < self._reach + 3:
            count *= 2
        return tokens[len(tokens) - min(count, len(tokens)) :]

    def _holds(self, tokens: np.ndarray) -> bool:
        assert self._decode is not None
        text = self._decode(tokens)
        return any(string in text for string in self._strings)
