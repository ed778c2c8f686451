# SPDX-License-Identifier: Apache-2.0
"""Answers that need no algebra: equal text, words, choices, whole numbers and fractions.

Owns the cheap half of math grading and the guards in front of the costly half. Numbers are compared
exactly; nothing is ever evaluated.
"""

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER = 2_000
"""Longest answer, in characters, that is compared; a longer one is wrong."""
MAX_DEPTH = 60
"""Deepest nest of brackets that is parsed."""
MAX_EXPONENT = 1_000_000
"""Largest exponent of a numeric power that is evaluated."""
MAX_FACTORIAL = 100_000
"""Largest number whose factorial is evaluated."""

_VULGAR = {
    char: f" {unicodedata.normalize('NFKC', char).replace(chr(0x2044), '/')}"
    for char in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_SAME_VALUE = (
    (re.compile("\u2212"), "-"),
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\{,\}|,\\!\s*"), ","),
    (re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~)(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\\\$"), ""),
    (re.compile(r"\\[!,;: ]"), " "),
    (re.compile(r"\\(?:mathrm|operatorname)\s*\{([ei])\}"), r"\1"),
)
"""Ways of writing that do not change a value, each with its plain form."""
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textrm)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_NUMBER = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_FRACTION = re.compile(
    rf"(-?)(?:\\frac\{{(-?(?:{_NUMBER}))\}}\{{({_NUMBER})\}}|({_NUMBER})/({_NUMBER}))"
)
_MIXED = re.compile(r"(-?)([0-9]+)\s*(?:(?<=\s)([0-9]+)/([0-9]+)|\\frac\{([0-9]+)\}\{([0-9]+)\})")
_PLAIN = re.compile(rf"([+-]?)({_NUMBER})")
_SHORT_WORDS = ("yes", "no", "odd")
_CHOICE = re.compile(r"\(?([A-J])\)?\.?")
_CHOICE_WITH_TEXT = re.compile(r"\(?([A-J])\)?\s*[:.)]\s*\S.*", re.DOTALL)
_TEXT_NUMBER = re.compile(r"\\text\s*\{\s*(-?[0-9.,/]*[0-9])\s*\}")
_LEAD_IN = re.compile(r"\\text\s*\{[^{}]*\b(?:is|are|equals)\s*:?\s*\}\s*(?=\S)")


def clean(text: str) -> str:
    """`text` without marks that do not change its value: dollars, sizes, thin spaces."""
    text = text.strip().strip("$").strip().rstrip(".").rstrip()
    for pattern, written in _SAME_VALUE:
        text = pattern.sub(written, text)
    for char, fraction in _VULGAR.items():
        text = text.replace(char, fraction)
    text = _LEAD_IN.sub("", text)
    text = unwrap_numbers(text)
    text = re.sub(r"\s+", " ", text).strip()
    return _without_outer_brackets(text)


def unwrap_numbers(text: str) -> str:
    r"""`text` with every `\text{13}` as 13."""
    return _TEXT_NUMBER.sub(r"\1", text)


def _without_outer_brackets(text: str) -> str:
    """Drop outer pairs of `((...))` down to one: redundant brackets can be hundreds deep."""
    while text.startswith("((") and text.endswith("))"):
        depth, first_return = 0, len(text)
        for i, char in enumerate(text):
            depth += (char == "(") - (char == ")")
            # The second bracket must be closed by the last but one character.
            if depth == 1 and i > 0:
                first_return = i
                break
        if first_return != len(text) - 2:
            return text
        text = text[1:-1]
    return text


def squeezed(text: str) -> str:
    """`text` without spaces that separate nothing; "1 1/2" must not become "11/2"."""
    return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)


@dataclass(frozen=True)
class Number:
    """A rational number as written."""

    value: Fraction
    decimal: bool
    """Written with a decimal point, so it may be a rounded value."""


def number(text: str) -> Number | None:
    r"""Read `text` (cleaned) as a number, or None.

    Forms: 7, -1,234, 0.5, .5, 3/4, \frac{3}{4}, 11 5/6. Commas count as thousands only in groups
    of three: "0,1" is a list. A mixed number needs a proper fraction.
    """
    text = text.strip()
    unsigned = text.lstrip("+-")
    if _THOUSANDS.match(unsigned):
        text = text.replace(",", "")
    if match := _PLAIN.fullmatch(text):
        return Number(Fraction(f"{match[1]}{match[2]}"), "." in text)
    if match := _FRACTION.fullmatch(text):
        top, bottom = Fraction(match[2] or match[4]), Fraction(match[3] or match[5])
        return None if bottom == 0 else _signed(match[1], top / bottom, text)
    if match := _MIXED.fullmatch(text):
        top, bottom = int(match[3] or match[5]), int(match[4] or match[6])
        if 0 < top < bottom:
            return _signed(match[1], int(match[2]) + Fraction(top, bottom), text)
    return None


def _signed(sign: str, value: Fraction, text: str) -> Number:
    return Number(-value if sign == "-" else value, "." in text)


def plain(text: str) -> str:
    r"""`text` without `\text{}` and its kin, and without a final full stop."""
    return re.sub(r"\s+", " ", _WRAPPER.sub(r"\1", text)).strip().strip(".")


def words(text: str) -> str | None:
    r"""The words of an answer that is text and no formula, lower case; None for a formula.

    Text is what stands wholly in `\text{}`, or letters and spaces with a word of four letters or
    more, or a well-known short word. Without this rule algebra would call "stop" and "post" the
    same product.
    """
    wrapped = _WRAPPER.fullmatch(text.strip())
    bare = plain(text).casefold()
    if len(bare) < 2 or not re.fullmatch(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*", bare):
        return None
    known = wrapped or bare in _SHORT_WORDS or re.search(r"[^\W\d_]{4}", bare)
    return bare if known else None


def choice(text: str, *, with_text: bool = False) -> str | None:
    """The letter A to J of a choice such as "(C)"; `with_text` also reads "C: none of these"."""
    bare = plain(text)
    match = _CHOICE.fullmatch(bare) or (_CHOICE_WITH_TEXT.fullmatch(bare) if with_text else None)
    return match[1] if match else None


def decide(gold: str, answer: str) -> bool | None:
    """Whether two cleaned answers are equal; None when only algebra can tell."""
    if squeezed(gold) == squeezed(answer) or squeezed(plain(gold)) == squeezed(plain(answer)):
        return True
    gold_words = words(gold)
    if gold_words is not None:
        return gold_words == plain(answer).casefold()
    letter = choice(gold)
    if letter is not None and choice(answer, with_text=True) is not None:
        return letter == choice(answer, with_text=True)
    left, right = number(gold), number(answer)
    if left is None or right is None:
        return None
    if left.value == right.value:
        return True
    far = abs(left.value - right.value) > Fraction(1, 10_000) * max(1, abs(left.value))
    return False if far or not (left.decimal or right.decimal) else None


def hostile(text: str) -> str | None:
    """Why `text` (cleaned) would cost seconds or gigabytes to evaluate, or None. A cheap scan."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"brackets nested {deepest} deep"
    flat = re.sub(r"\^[\s({\[]+", "^", text.replace("**", "^").replace(" ", ""))
    for chain in re.findall(r"[0-9]+(?:\^[0-9]+)+", flat):
        base, *exponents = map(int, chain.split("^"))
        if base > 1 and _tower(exponents) > MAX_EXPONENT:
            return f"power tower {chain[:40]}"
    for base, power in re.findall(r"([0-9]+)(?:\^([0-9]+))?[)}\]]*!", flat):
        if _tower([int(base), int(power or 1)]) > MAX_FACTORIAL:
            return "factorial of a large number"
    return None


def _tower(numbers: list[int]) -> float:
    """a^(b^(c...)), or infinity when it is far beyond every limit."""
    value: float = numbers[-1] if numbers[-1] < 10**12 else math.inf
    for base in reversed(numbers[:-1]):
        if base > 1 and value * math.log10(base) > 12:
            return math.inf
        value = base**value
    return value
