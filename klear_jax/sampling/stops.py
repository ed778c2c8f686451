# SPDX-License-Identifier: Apache-2.0
"""Stop strings: which token completes one."""

from collections.abc import Callable

import numpy as np

REPLACEMENT = "\ufffd"


class StopStrings:
    """Watches the text of one completion as it grows."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[np.ndarray], str] | None):
        self._strings = strings
        self._decode = decode
        # A string that ends in new tokens begins at most this many bytes before them, and so at
        # most as many tokens that show any text; what is older need not be decoded again.
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

    def pass_over(self, tokens: np.ndarray) -> None:
        """Tokens of an earlier call, before any new one: a string may begin in them, and one that
        is complete does not count."""
        if self._strings:
            self._tail = self._end_of(tokens)
            while self._holds(self._tail):
                self._tail = self._tail[1:]

    def _end_of(self, tokens: np.ndarray) -> np.ndarray:
        """The last tokens, as many as a string that is not complete yet can begin in."""
        assert self._decode is not None
        if not self._reach:
            return tokens[:0]
        # The bytes of a letter that is cut show as a replacement character each.
        text = self._decode(tokens[-self._reach :]).replace(REPLACEMENT, "?")
        if len(text.encode()) < self._reach < len(tokens):
            # Tokens that show no text at all, such as special ones: they are not in the way.
            tokens = np.array([t for t in tokens if self._decode(np.array([t]))], np.int32)
        return tokens[-self._reach :]

    def _holds(self, tokens: np.ndarray) -> bool:
        assert self._decode is not None
        text = self._decode(tokens)
        return any(string in text for string in self._strings)
