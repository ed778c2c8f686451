# SPDX-License-Identifier: Apache-2.0
"""Stop strings: which token completes one."""

from collections.abc import Callable

import numpy as np


class StopStrings:
    """Watches the text of one completion as it grows."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[np.ndarray], str] | None):
        self._strings = strings
        self._decode = decode
        # A token is at least one byte of text, so a string that ends in new tokens begins at most
        # this many tokens before them; what is older need not be decoded again.
        self._reach = max((len(s.encode()) for s in strings), default=1) - 1
        self._tail = np.zeros(0, np.int32)

    def find(self, tokens: np.ndarray) -> int | None:
        """How many of the new tokens make the first stop string complete; None where none is."""
        if not self._strings or not len(tokens):
            return None
        old = len(self._tail)
        window = np.concatenate([self._tail, tokens])
        self._tail = window[max(len(window) - self._reach, 0) :]
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
        return low - old

    def _holds(self, tokens: np.ndarray) -> bool:
        assert self._decode is not None
        text = self._decode(tokens)
        return any(string in text for string in self._strings)
