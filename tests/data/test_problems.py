# SPDX-License-Identifier: Apache-2.0
"""The problem reader: each layout by exact values, each complaint by file, line and field."""

import json
import re
from pathlib import Path

import pytest

from klear_jax.data.problems import (
    Message,
    Problem,
    ProblemError,
    brace_pairs,
    fingerprint,
    load_problems,
    strip_box,
)

ASK = [{"role": "user", "content": "1+1?"}]


def write(folder: Path, *records: object, name: str = "some.qs.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_aime_layout_takes_the_solution_and_prefixes_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"messages": ASK, "meta": {"unique_id": "2024-II-1", "solution": "73", "answer": "no"}},
        {"messages": ASK, "meta": {"unique_id": 0, "solution": "70"}},
    )
    assert load_problems(path) == [
        Problem("2024-II-1", (Message("user", "1+1?"),), "73", source="some"),
        Problem("some-0", (Message("user", "1+1?"),), "70", source="some"),
    ]


def test_hmmt_layout_prefers_answer_and_falls_back_to_the_box(tmp_path: Path) -> None:
    boxed = r"\boxed{\frac{1}{576}}"
    path = write(
        tmp_path,
        {"id": 0, "messages": ASK, "answer": "103", "solution": r"\boxed{104}"},
        {"id": 1, "messages": ASK, "solution": boxed},
    )
    first, second = load_problems(path)
    assert (first.id, first.answer) == ("some-0", "103")
    assert (second.id, second.answer) == ("some-1", r"\frac{1}{576}")


def test_released_layout(tmp_path: Path) -> None:
    tests = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    path = write(
        tmp_path,
        {
            "data_source": "math_longcot_math_verify",
            "prompt": ASK,
            "ability": "math",
            "reward_model": {"ground_truth": r"\boxed{5}", "style": "rule"},
        },
        {
            "data_source": "coder1_longcot",
            "prompt": ASK,
            "ability": "code",
            "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"},
        },
    )
    math, code = load_problems(path)
    assert (math.kind, math.answer, math.source) == ("math", "5", "math_longcot_math_verify")
    assert (math.id, code.id) == ("some-1", "some-2")
    assert (code.kind, code.answer) == ("code", None)
    assert code.tests == ({"input": "1\n", "output": "2\n"}, {"input": "2\n", "output": "4\n"})


@pytest.mark.parametrize("field", ["question", "problem", "prompt"])
def test_plain_layout(tmp_path: Path, field: str) -> None:
    (problem,) = load_problems(write(tmp_path, {field: "2+2?", "answer": 4}))
    assert (problem.question, problem.answer, problem.kind) == ("2+2?", "4", "math")


def test_plain_code_layout(tmp_path: Path) -> None:
    test = {"input": "[1]", "output": "1", "fn_name": "f"}
    (problem,) = load_problems(write(tmp_path, {"question": "f?", "tests": [test]}))
    assert (problem.kind, problem.tests) == ("code", (test,))


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    line = b'{"question": "2+2?", "answer": "4"}'
    path.write_bytes(b"\xef\xbb\xbf\n  \r\n" + line + b"\r\n\n" + line)
    assert [p.id for p in load_problems(path)] == ["p-3", "p-5"]
    assert [p.id for p in load_problems(path, limit=1)] == ["p-3"]
    with pytest.raises(ValueError, match=r"limit=0"):
        load_problems(path, limit=0)


GOOD = {"messages": ASK, "answer": "2"}


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"answer": "2"}, "messages: missing"),
        ({"messages": [], "answer": "2"}, r"messages: \[\]"),
        ({"messages": "hello", "answer": "2"}, "messages: 'hello'"),
        ({"messages": ["hello"], "answer": "2"}, r"messages\[0\]: 'hello'"),
        ({"messages": [{"content": "x"}], "answer": "2"}, r"messages\[0\].role: None"),
        ({"messages": [{"role": "judge", "content": "x"}], "answer": "2"}, "role: 'judge'"),
        ({"messages": [{"role": "user"}], "answer": "2"}, r"messages\[0\].content: None"),
        ({"messages": [{"role": "user", "content": " "}], "answer": "2"}, r"content: ' '"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": "2"}], "answer": "2"},
            "last message is from 'assistant'",
        ),
        ({"messages": ASK}, "answer: missing"),
        ({"messages": ASK, "answer": "  "}, "answer: empty"),
        ({"messages": ASK, "meta": {"solution": r"\boxed{}"}}, "meta.solution: empty"),
        ({"messages": ASK, "answer": True}, "answer: True"),
        ({"messages": ASK, "answer": ["2"]}, r"answer: \['2'\]"),
        ({"messages": ASK, "answer": "2", "id": 1.5}, "id: 1.5"),
        ({"messages": ASK, "tests": []}, r"tests: \[\]"),
        ({"messages": ASK, "tests": [{"input": "1"}]}, r"tests\[0\]"),
        ({"messages": ASK, "ability": "code"}, "reward_model.ground_truth: None"),
        (
            {
                "messages": ASK,
                "ability": "code",
                "reward_model": {"ground_truth": '{"functional": "assert f()"}'},
            },
            r"reward_model.ground_truth: fields \['functional'\]",
        ),
        ([1], "a list, not an object"),
    ],
)
def test_faults_name_file_line_and_field(tmp_path: Path, record: object, complaint: str) -> None:
    path = write(tmp_path, GOOD, record)
    with pytest.raises(ProblemError, match=f"{re.escape(str(path))}:2: .*{complaint}"):
        load_problems(path)


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "id": "a"}, GOOD, {**GOOD, "id": "a"})
    with pytest.raises(ProblemError, match=r":3: id: 'a' is also on line 1"):
        load_problems(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"absent\.jsonl: cannot read"):
        load_problems(tmp_path / "absent.jsonl")
    with pytest.raises(ProblemError, match="no problems"):
        load_problems(write(tmp_path))
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b'{"question": ')
    with pytest.raises(ProblemError, match=r"broken\.jsonl:1: not JSON"):
        load_problems(broken)
    broken.write_bytes(b'\n{"question": "\xff", "answer": "1"}')
    with pytest.raises(ProblemError, match=r"broken\.jsonl:2: not (UTF-8|JSON)"):
        load_problems(broken)


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r" $\boxed{ 5 }$ ", "5"),
        (r"\boxed{1} and \boxed{2}", r"\boxed{1} and \boxed{2}"),
        (r"\boxed{1", r"\boxed{1"),
        ("5", "5"),
    ],
)
def test_strip_box(text: str, inner: str) -> None:
    assert strip_box(text) == inner


def test_brace_pairs_ignore_escaped_and_unclosed_ones() -> None:
    assert brace_pairs(r"{a\}b{c}") == {5: 7}
    assert brace_pairs("{{}}}{") == {0: 3, 1: 2}


def test_fingerprint_depends_on_content_and_order() -> None:
    a, b = (Problem(i, (Message("user", i),), "1") for i in "ab")
    assert fingerprint([a, b]) == fingerprint([a, b])
    assert len({fingerprint(x) for x in ([a, b], [b, a], [a], [])}) == 4
    tests = [Problem("c", (), kind="code", tests=({"input": k, "output": ""},)) for k in "xy"]
    assert fingerprint(tests[:1]) != fingerprint(tests[1:])


@pytest.mark.parametrize(
    ("name", "first", "answer"),
    [
        ("aime24.qs.jsonl", "2024-II-1", "73"),
        ("aime25.qs.jsonl", "aime25-0", "70"),
        ("HMMT-202502.jsonl", "HMMT-202502-0", "103"),
    ],
)
def test_benchmark_files(shared: Path, name: str, first: str, answer: str) -> None:
    problems = load_problems(shared / "questions" / name)
    assert len(problems) == 30
    assert (problems[0].id, problems[0].answer) == (first, answer)
