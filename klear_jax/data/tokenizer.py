# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: Qwen3's, a 263-id byte tokenizer with the same control tokens, or one from a folder.

Owns ids and their names. No id is written down anywhere: control tokens are found by name, so
code that works with the byte tokenizer works with Qwen3's. Chat layout lives in `chat`.
"""

import functools
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, final

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
THINK = "<think>"
THINK_END = "</think>"
REPLACEMENT = "\ufffd"

BYTES_ADDED = (
    (END_OF_TEXT, True),
    (IM_START, True),
    (IM_END, True),
    (THINK, False),
    (THINK_END, False),
    ("<tool_call>", False),
    ("</tool_call>", False),
)
"""Added tokens of the byte tokenizer: name, and whether decoding may skip it."""


@final
class Tokenizer:
    """Text to ids and back. Make one with `load_tokenizer`."""

    def __init__(self, name: str, backend: Any, *, extra_stops: Sequence[int] = ()) -> None:
        """Wrap a `tokenizers.Tokenizer`; `extra_stops` are end ids that configs name."""
        self.name = name
        self._backend = backend
        # Names of special tokens inside ordinary text stay text; chat inserts the real ones by id.
        backend.encode_special_tokens = True
        self._ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(self._ids.values()) + 1
        """Live ids are 0 .. vocab_size - 1; a model may have more embedding rows than that."""
        self.pad_id: int = self.token_id(END_OF_TEXT)
        self.end_id: int = self.token_id(IM_END)
        self.stop_ids: tuple[int, ...] = tuple(sorted({self.pad_id, self.end_id, *extra_stops}))
        """Every id that ends a completion: the chat end, end of text, and what the configs name."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. `<think>` and other non-special tokens count, `<|im_end|>` is text."""
        # A lone surrogate is no Unicode text; the library would raise on it.
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._backend.encode(clean, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids. Never raises: an id without a token and broken UTF-8 give U+FFFD."""
        parts: list[str] = []
        run: list[int] = []
        for i in map(int, ids):
            if 0 <= i < self.vocab_size:
                run.append(i)
                continue
            parts += [self._decode(run, skip_special), REPLACEMENT]
            run = []
        return "".join([*parts, self._decode(run, skip_special)])

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special) if ids else ""

    def token_id(self, name: str) -> int:
        """Id of the token written `name`.

        Raises:
            ValueError: no such token.
        """
        if name not in self._ids:
            added = (token.content for token in self._backend.get_added_tokens_decoder().values())
            raise ValueError(
                f"tokenizer {self.name!r} has no token {name!r}; added ones: {', '.join(added)}"
            )
        return self._ids[name]

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size})"


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer of that name, or of that model folder.

    Args:
        name_or_path: "bytes", "qwen3", or a folder with tokenizer.json, or vocab.json and
            merges.txt.
    Raises:
        ValueError: neither; or, for "qwen3", its vocabulary package is missing or has other
            content.
    """
    name = str(name_or_path)
    if name == "bytes":
        return _bytes()
    if name == "qwen3":
        return _qwen3()
    folder = Path(name)
    if (folder / "tokenizer.json").is_file():
        backend = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        auto = import_module("transformers").AutoTokenizer
        backend = auto.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    else:
        raise ValueError(
            f"tokenizer {name!r} is unknown; give 'bytes', 'qwen3', or a folder that holds"
            " tokenizer.json (or vocab.json and merges.txt)"
        )
    ids = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(name, backend, extra_stops=_configured_stops(folder, ids))


def _configured_stops(folder: Path, ids: dict[str, int]) -> list[int]:
    """End ids that a model folder names: a model trained on any of them will emit it."""
    stops: list[int] = []
    for file in ("config.json", "generation_config.json"):
        given = _json(folder / file).get("eos_token_id")
        stops += given if isinstance(given, list) else [] if given is None else [given]
    eos = _json(folder / "tokenizer_config.json").get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    return stops + ([ids[content]] if content in ids else [])


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@functools.lru_cache(maxsize=1)
def _bytes() -> Tokenizer:
    from klear_jax.data.qwen_vocab import byte_level, byte_symbols

    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    return Tokenizer("bytes", byte_level(vocab, merges=[], added=BYTES_ADDED))


@functools.lru_cache(maxsize=1)
def _qwen3() -> Tokenizer:
    from klear_jax.data.qwen_vocab import qwen3_backend

    return Tokenizer("qwen3", qwen3_backend())
