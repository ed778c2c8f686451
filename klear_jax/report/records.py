# SPDX-License-Identifier: Apache-2.0
"""What a report page is made of: plain records that the template turns into HTML.

Every `str` in these records is text and is escaped by the template. Only `markupsafe.Markup` passes
as HTML.
"""

import base64
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import Markup

Text: TypeAlias = str | Markup


@dataclass(frozen=True)
class Card:
    """One headline number: `value` large, `label` above it, `detail` small below it."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure as PNG bytes. `alt` says in words what it shows, `caption` how to read it."""

    name: str
    png: bytes
    alt: str
    caption: Text = ""
    wide: bool = False
    """As wide as the page, not half of it."""

    @property
    def data_uri(self) -> str:
        """The image as a `data:` address, so that the page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header. `kind` is a CSS class: "numbers", "facts" or "texts"."""

    header: tuple[str, ...]
    rows: tuple[tuple[Text, ...], ...]
    kind: str = "numbers"


@dataclass(frozen=True)
class Section:
    """One titled part of the page. Empty parts are not drawn.

    `fold` is a (summary, preformatted text) pair that the reader opens by a click.
    """

    title: str
    intro: Text = ""
    cards: tuple[Card, ...] = ()
    figures: tuple[Picture, ...] = ()
    table: Table | None = None
    fold: tuple[str, str] | None = None

    @property
    def anchor(self) -> str:
        """The fragment that the contents line links to."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())
