# SPDX-License-Identifier: Apache-2.0
r"""Where the answer stands in a response: after the think block, in `\boxed{}`."""

import re
from dataclasses import dataclass

from klear_jax.data.problems import brace_pairs

_BOX = re.compile(r"\\boxed\b\s*")
_BOX_OR_FRAME = re.compile(r"\\f?box(?:ed)?\b\s*")
_BARE = re.compile(r"(?:\\[A-Za-z]+|[^\s{}$\\])+")
# What may stand between the boxes of one statement: "$\boxed{2}$ and $\boxed{3}$".
_BETWEEN = re.compile(r"(?:\s|[$,;&]|\\[()\[\],;! ]|\\quad|\\text\{\s*(?:and|or)\s*\}|and|or)*")


@dataclass(frozen=True)
class Boxes:
    """The boxes of a final answer, in order."""

    contents: tuple[str, ...]
    """Content of each balanced box."""
    together: tuple[str, ...]
    """Those that end the text in one statement, joined only by commas or words such as "and"."""
    unclosed: bool
    """True when some box is opened and never closed."""


def final_text(response: str) -> str:
    """The text after the last `</think>`, or all of it when the block is not closed."""
    return response.rpartition("</think>")[2]


def find_boxes(text: str, *, frames: bool = False) -> Boxes:
    r"""Find every balanced `\boxed{...}` and `\boxed 7`; with `frames` also `\fbox{...}`."""
    spans: list[tuple[int, int, str]] = []
    unclosed = False
    position = 0
    # One pass for all: a search from each box would be quadratic in a hostile response.
    pairs = brace_pairs(text) if "box" in text else {}
    pattern = _BOX_OR_FRAME if frames else _BOX
    while match := pattern.search(text, position):
        start = position = match.end()
        if text[start : start + 1] == "{":
            end = pairs.get(start)
            if end is None:
                unclosed = True
                continue
            spans.append((match.start(), end + 1, text[start + 1 : end].strip()))
            position = end + 1
        elif bare := _BARE.match(text, start):
            spans.append((match.start(), bare.end(), bare.group().rstrip(".,;:")))
            position = bare.end()
    together: list[str] = []
    begin = None
    for first, last, content in reversed(spans):
        if begin is not None and not _BETWEEN.fullmatch(text, last, begin):
            break
        together.insert(0, content)
        begin = first
    return Boxes(tuple(content for _, _, content in spans), tuple(together), unclosed)
