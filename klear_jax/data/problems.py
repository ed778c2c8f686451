# SPDX-License-Identifier: Apache-2.0
"""Problems: the record that everything else starts from, and the reader of problem files.

Owns the layouts of a JSONL problem file (benchmark files, the released RL data, a plain one) and
every complaint about them. Knows nothing of tokens, models or graders. Read `load_problems`
first.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")

ROLES = ("system", "user", "assistant")

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class ProblemError(ValueError):
    """A problem file that cannot be used. The text names the file, the line and the field."""


@dataclass(frozen=True)
class Message:
    """One chat turn."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """One question with what is needed to grade an answer to it."""

    id: str
    """Unique within a run; random keys of samples are made from it."""
    messages: tuple[Message, ...]
    """The prompt; the last message is from the user."""
    answer: str | None = None
    """Gold answer of a math problem, without a box around it."""
    kind: Literal["math", "code"] = "math"
    tests: tuple[dict[str, Any], ...] = ()
    """Tests of a code problem: `input`, `output`, and `fn_name` when a function is called."""
    source: str = ""
    """Where it came from, for metrics by data set."""

    @property
    def question(self) -> str:
        """Content of the last user message."""
        for message in reversed(self.messages):
            if message.role == "user":
                return message.content
        raise ValueError(f"problem {self.id!r} has no user message; a prompt needs one")


def load_problems(path: str | Path, *, limit: int | None = None) -> list[Problem]:
    """Read a JSONL file of problems, one object a line; blank lines are skipped.

    Layouts, recognised by their fields: AIME files (`messages`, `meta.solution`,
    `meta.unique_id`), HMMT (`id`, `messages`, `answer`), the released RL data (`prompt` list,
    `reward_model.ground_truth`, `ability`, `data_source`), and plain (`question`, `problem` or
    `prompt` text, with `answer` or `tests`). An id that is a number gets the file's name in
    front; without an id it is `<file>-<line>`.

    Args:
        path: the file.
        limit: keep only the first so many problems.
    Raises:
        ProblemError: at the first fault, with file, line and field.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} asks for no problems; give 1 or more, or None for all")
    stem = path.name.split(".")[0]
    problems: list[Problem] = []
    lines: dict[str, int] = {}
    for number, problem in _parsed(path, lambda r, line: _problem(r, stem=stem, line=line)):
        if problem.id in lines:
            raise ProblemError(
                f"{path}:{number}: id: {problem.id!r} is also on line"
                f" {lines[problem.id]}; make ids unique"
            )
        lines[problem.id] = number
        problems.append(problem)
        if len(problems) == limit:
            break
    return problems


def load_conversations(path: str | Path) -> list[tuple[Message, ...]]:
    """Read a JSONL file of demonstrations: `messages` that end with an assistant turn.

    Raises:
        ProblemError: at the first fault, with file, line and field.
    """
    return [messages for _, messages in _parsed(Path(path), lambda r, line: _conversation(r))]


def _parsed(path: Path, parse: Callable[[dict[str, Any], int], T]) -> Iterator[tuple[int, T]]:
    """(line number, parsed record) of each line of a JSONL file that is not blank."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ProblemError(f"{path}: cannot read ({error.strerror}); give a JSONL file") from error
    found = False
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        found = True
        try:
            yield number, parse(_decode(line), number)
        except _FieldError as error:
            raise ProblemError(f"{path}:{number}: {error}") from error
    if not found:
        raise ProblemError(
            f"{path}: no problems; the file is empty, expected one JSON object a line"
        )


def fingerprint(problems: Iterable[Problem]) -> str:
    """SHA-256 (hex) of the problems' content in order; a resumed run must find the same."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(msgspec.json.encode(problem, order="deterministic"))
        digest.update(b"\n")
    return digest.hexdigest()


def brace_pairs(text: str) -> dict[int, int]:
    r"""Index of each closed `{`, with that of its `}`; `\{` and `\}` do not count. Linear."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


def strip_box(text: str) -> str:
    r"""What is in `text` when it is exactly one `\boxed{...}` (dollars allowed), else `text`."""
    text = text.strip()
    inner = text.strip("$").strip() if text.startswith("$") and text.endswith("$") else text
    if inner.startswith("\\boxed{") and brace_pairs(inner).get(6) == len(inner) - 1:
        return inner[7:-1].strip()
    return text


class _FieldError(ValueError):
    """What is wrong with one line; `load_problems` adds file and line."""


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        raise _FieldError(f"not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except msgspec.DecodeError as error:
        raise _FieldError(f"not JSON ({error}); expected one JSON object a line") from error
    if not isinstance(record, dict):
        raise _FieldError(
            f"a {type(record).__name__}, not an object; expected one JSON object a line"
        )
    return record


def _problem(record: dict[str, Any], *, stem: str, line: int) -> Problem:
    kind = _kind(record)
    answer, tests = (None, _tests(record)) if kind == "code" else (_answer(record), ())
    source = record.get("data_source", record.get("source", stem))
    if not isinstance(source, str):
        raise _FieldError(f"data_source: {source!r}; expected text")
    return Problem(
        id=_id(record, stem=stem, line=line),
        messages=_messages(record),
        answer=answer,
        kind=kind,
        tests=tests,
        source=source,
    )


def _id(record: dict[str, Any], *, stem: str, line: int) -> str:
    field, given = "id", record.get("id")
    if given is None and isinstance(record.get("meta"), dict):
        field, given = "meta.unique_id", record["meta"].get("unique_id")
    if given is None:
        return f"{stem}-{line}"
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise _FieldError(f"{field}: {given!r}; expected text or a whole number")
    return given if isinstance(given, str) else f"{stem}-{given}"


def _messages(record: dict[str, Any]) -> tuple[Message, ...]:
    field = next((f for f in ("messages", "prompt", "question", "problem") if f in record), None)
    if field is None:
        raise _FieldError(
            "messages: missing; give messages, or a question as question, problem or prompt"
        )
    given = record[field]
    if isinstance(given, str) and field != "messages":
        given = [{"role": "user", "content": given}]
    messages = _turns(given, field=field)
    if messages[-1].role != "user":
        raise _FieldError(
            f"{field}: the last message is from {messages[-1].role!r};"
            " a prompt must end with a user message"
        )
    return messages


def _conversation(record: dict[str, Any]) -> tuple[Message, ...]:
    if "messages" not in record:
        raise _FieldError("messages: missing; give a list of messages with role and content")
    messages = _turns(record["messages"], field="messages")
    if messages[-1].role != "assistant" or len(messages) < 2 or messages[-2].role != "user":
        raise _FieldError(
            "messages: a demonstration must end with a user message and the assistant's answer"
        )
    return messages


def _turns(given: object, *, field: str) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise _FieldError(f"{field}: {given!r}; expected a list of messages with role and content")
    return tuple(_message(item, field=f"{field}[{i}]") for i, item in enumerate(given))


def _message(item: object, *, field: str) -> Message:
    if not isinstance(item, dict):
        raise _FieldError(f"{field}: {item!r}; expected an object with role and content")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise _FieldError(f"{field}.role: {role!r}; expected one of {', '.join(ROLES)}")
    if not isinstance(content, str) or (role == "user" and not content.strip()):
        raise _FieldError(f"{field}.content: {content!r}; expected text")
    return Message(role, content)


def _kind(record: dict[str, Any]) -> Literal["math", "code"]:
    named = record.get("kind", record.get("ability"))
    if named == "code" or "coder1" in str(record.get("data_source")):
        return "code"
    return "code" if named is None and "tests" in record else "math"


def _answer(record: dict[str, Any]) -> str:
    """The gold answer, from the first of the known places that is present."""
    places = ("answer", "meta.solution", "meta.answer", "reward_model.ground_truth", "solution")
    found = ((place, _at(record, place)) for place in places)
    place, given = next(((p, value) for p, value in found if value is not None), ("answer", None))
    if given is None:
        raise _FieldError(f"answer: missing; give it as one of {', '.join(places)}")
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise _FieldError(f"{place}: {given!r}; expected text or a number")
    answer = strip_box(str(given))
    if not answer:
        raise _FieldError(f"{place}: empty; a math problem needs a gold answer")
    return answer


def _at(record: Mapping[str, Any], place: str) -> Any:
    """The value at a dotted place, or None."""
    value: Any = record
    for name in place.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _tests(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Tests given as a list, or as the released data's JSON text with `inputs` and `outputs`."""
    field = "tests" if "tests" in record else "reward_model.ground_truth"
    given = _at(record, field)
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise _FieldError(f"{field}: not JSON ({error})") from error
    if isinstance(given, dict):
        given = _paired(given, field=field)
    if not isinstance(given, list) or not given:
        raise _FieldError(f"{field}: {given!r}; a code problem needs a list of tests")
    for i, test in enumerate(given):
        if not isinstance(test, dict) or not {"input", "output"} <= test.keys():
            raise _FieldError(f"{field}[{i}]: {test!r}; expected an object with input and output")
    return tuple(given)


def _paired(given: dict[str, Any], *, field: str) -> list[dict[str, Any]]:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise _FieldError(
            f"{field}: fields {sorted(given)}; expected lists inputs and outputs of one length"
            " (convert functional, pytest and file tests first)"
        )
    extra = {"fn_name": given["fn_name"]} if given.get("fn_name") else {}
    return [{"input": i, "output": o, **extra} for i, o in zip(inputs, outputs, strict=True)]
