# SPDX-License-Identifier: Apache-2.0
"""The judge's questions, rules and figures; `server/test_server.py` runs it on a real server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_tgvkv.judge.asking import FULL, Answer, Arm, Server, ask_all, digest
from vllm_tgvkv.judge.questions import JudgeError, read_questions
from vllm_tgvkv.judge.report import figures, picture, table


@pytest.mark.parametrize(
    ("match", "expected", "text", "right"),
    [
        ("contains", "New  York", "in new\nyork.", True),
        ("contains", "York", "in New-Yrk", False),
        ("exact", "Yes", " yes ", True),
        ("exact", "Yes", "yes.", False),
        ("number", "1234.5", "of 7, it is 1,234.50", True),
        ("number", "-3", "-3", True),
        ("number", "3", "3 of 4", False),
        ("number", "3", "three", False),
        ("regex", "^a+$", "aaa", True),
        ("regex", "^a+$", "aab", False),
    ],
)
def test_rules(tmp_path: Path, match: str, expected: str, text: str, right: bool) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": "?", "answer": expected, "match": match}))
    (question,) = read_questions(path, 9)
    assert question.is_right(text) is right
    assert question.max_tokens == 9


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ["is not JSON"]),
        ("", ["has no questions"]),
        ({"answer": "4"}, ["line 1", "give an object with prompt or messages"]),
        ({"prompt": "?", "anwser": "4"}, ["line 1 has anwser: did you mean answer?"]),
        ({"prompt": "?", "match": "number?"}, ["match of line 1 is 'number?'", "number"]),
        ({"prompt": "?", "images": ["none.png"]}, ["No such file", "none.png"]),
        ({"prompt": "?", "answer": "four", "match": "number"}, ["line 1", "'four'", "number"]),
        ({"prompt": "?", "answer": "(", "match": "regex"}, ["line 1", "'('"]),
    ],
    ids=str,
)
def test_wrong_lines(tmp_path: Path, line: Any, parts: list[str]) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(JudgeError) as caught:
        read_questions(path, 9)
    assert all(part in str(caught.value) for part in [str(path), *parts]), caught.value


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(JudgeError, match="does not answer"):
        Server("http://127.0.0.1:9", None)


def test_an_interruption_keeps_what_was_answered_and_asks_no_more(tmp_path: Path) -> None:
    path, log, asked = tmp_path / "questions.jsonl", tmp_path / "log", []
    path.write_text("\n".join(json.dumps({"prompt": str(n)}) for n in range(200)))

    class Interrupted(Server):
        def __init__(self) -> None:
            self.model, self.pause = "tiny", 0.05

        def ask(self, body: dict[str, Any]) -> Answer:
            asked.append(body)
            if len(asked) == 3:
                raise KeyboardInterrupt
            time.sleep(self.pause)
            return Answer(digest(body), "a", True, 1, 1.0)

    server, questions = Interrupted(), read_questions(path, 9)
    with pytest.raises(KeyboardInterrupt):
        ask_all(server, questions, [Arm(FULL, {})], log, 1, lambda text: None)
    assert len(asked) < 150
    kept = len(log.read_text().splitlines())
    assert kept >= 2
    asked.extend([{}] * 3)  # no more interruptions
    server.pause = 0.0
    before = len(asked)
    answers = ask_all(server, questions, [Arm(FULL, {})], log, 1, lambda text: None)
    assert len(answers[FULL]) == 200
    assert len(asked) - before == 200 - kept


def test_figures(tmp_path: Path) -> None:
    """Ten questions, six with an answer; another arm loses two of these and gains none."""
    path = tmp_path / "questions.jsonl"
    lines = [{"prompt": str(n), **({"answer": "a"} if n < 6 else {})} for n in range(10)]
    path.write_text("\n".join(map(json.dumps, lines)))
    questions = read_questions(path, 9)
    full = [Answer("", "a" if n != 5 else "b", True, 3, 1.0) for n in range(10)]
    other = [Answer("", "b" if n in (0, 1, 5) else "a", n < 3, 4, 0.2) for n in range(10)]
    first, second = figures(questions, {FULL: full, "reach 20 %": other})
    assert first.right is not None
    assert first.right.mean == pytest.approx(5 / 6)
    assert (first.difference, first.p, first.same.mean) == (None, None, 1)
    assert second.right is not None
    assert second.right.mean == 0.5
    assert second.difference is not None
    assert second.difference.mean == pytest.approx(-2 / 6)
    assert second.difference.low < second.difference.mean < second.difference.high <= 0
    assert second.p == 0.5  # two questions that differ, both lost
    assert (second.same.mean, second.stopped, second.tokens) == (0.8, 0.3, 4)
    assert second.kept == pytest.approx(0.2)
    shown = "\n".join(table([first, second], 6, 10))
    assert "10 questions, 6 with an expected answer." in shown
    assert "50 % [19, 81]" in shown
    assert "McNemar" in shown
    assert "right answers" in picture([first, second], 10)
    without = figures(questions[6:], {FULL: full[6:], "reach 20 %": other[6:]})
    assert [each.right for each in without] == [None, None]
    assert "same answers as the full cache" in picture(without, 4)
