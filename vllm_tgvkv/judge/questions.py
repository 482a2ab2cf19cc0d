# SPDX-License-Identifier: Apache-2.0
"""Questions of a JSONL file, and whether an answer is right.

A line is an object with `prompt` and, if there are any, `images` (paths or URLs), or with
`messages` as the chat API has them. `answer`, a text or a list of texts that are all right, is what
is expected, and `match` how it is compared; `max_tokens` is the most tokens of the answer.
"""

from __future__ import annotations

import base64
import json
import math
import mimetypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tgvkv.shared.errors import choose, quoted

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class JudgeError(ValueError):
    """A question, an option or the server is wrong; the message says which, and the way out."""


@dataclass(frozen=True)
class Question:
    """One question."""

    line: int
    """Number of its line, from 1."""
    messages: list[dict[str, Any]]
    answers: tuple[str, ...]
    """Texts that are right; none where nothing is expected."""
    match: str
    max_tokens: int

    def is_right(self, text: str) -> bool | None:
        """Return whether an answer is right; None where nothing is expected."""
        if not self.answers:
            return None
        return any(MATCHES[self.match](expected, text) for expected in self.answers)


def read_questions(path: Path, max_tokens: int) -> list[Question]:
    """Return the questions of a file, with images as data URLs.

    Args:
        max_tokens: most tokens of an answer where a line does not say it.

    Raises:
        JudgeError: naming file, line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [
            _question(json.loads(line), number, path.parent, max_tokens)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    except json.JSONDecodeError as error:
        raise JudgeError(f"{path} is not JSON in each line: {error}") from error
    except (OSError, JudgeError) as error:
        raise JudgeError(f"{path}: {error}") from error
    if not found:
        raise JudgeError(f"{path} has no questions")
    return found


def _question(given: Any, line: int, folder: Path, max_tokens: int) -> Question:
    known = ("prompt", "images", "messages", "answer", "match", "max_tokens")
    if not isinstance(given, Mapping) or ("prompt" in given) == ("messages" in given):
        raise JudgeError(f"line {line} is {quoted(given)}: give an object with prompt or messages")
    if unknown := sorted(set(given) - {*known}):
        raise JudgeError(f"line {line} has {unknown[0]}: {choose(unknown[0], known)}")
    match = given.get("match", "contains")
    if match not in MATCHES:
        raise JudgeError(f"match of line {line} is {quoted(match)}: {choose(match, (*MATCHES,))}")
    messages = given.get("messages")
    if messages is None:
        images = [_url(image, folder) for image in given.get("images", ())]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        text = {"type": "text", "text": given["prompt"]}
        messages = [{"role": "user", "content": [*content, text]}]
    answer = given.get("answer", ())
    answers = [str(one) for one in (answer if isinstance(answer, list | tuple) else [answer])]
    try:
        for expected in answers:
            MATCHES[match](expected, "0")
    except (ValueError, re.error) as error:
        raise JudgeError(
            f"answer of line {line} is {quoted(answer)}: no {match} ({error})"
        ) from error
    most = given.get("max_tokens", max_tokens)
    return Question(line, messages, tuple(answers), match, most)


def _url(image: str, folder: Path) -> str:
    """Return a URL as it is, and a file as a data URL; paths begin at the questions' folder."""
    if re.match(r"(https?|data):", image):
        return image
    kind = mimetypes.guess_type(image)[0] or "image/png"
    data = base64.b64encode((folder / image).read_bytes()).decode()
    return f"data:{kind};base64,{data}"


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _same_number(expected: str, text: str) -> bool:
    found = [float(number.replace(",", "")) for number in _NUMBER.findall(text)]
    return bool(found) and math.isclose(found[-1], float(expected.replace(",", "")), rel_tol=1e-9)


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "contains": lambda expected, text: _plain(expected) in _plain(text),
    "exact": lambda expected, text: _plain(expected) == _plain(text),
    "number": _same_number,
    "regex": lambda expected, text: re.search(expected, text) is not None,
}
"""Rules from the expected text and an answer; the first two ignore case and spaces, and `number`
compares the answer's last number."""
