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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from vllm_tgvkv.config.settings import check_count
from vllm_tgvkv.shared.errors import EvictionConfigError, choose, quoted

# After a letter or a digit "-" is a hyphen ("A-7", "12-15"), but not after a Chinese one.
_NUMBER = re.compile(r"(?:(?<![0-9A-Za-z\u00c0-\u024f])-)?\d+(?:,\d{3})*(?:\.\d+)?")


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
        lines = path.read_bytes().split(b"\n")
        found = [
            _question(line, number, path.parent, max_tokens)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    except (OSError, JudgeError, EvictionConfigError) as error:
        raise JudgeError(f"{path}: {error}") from error
    if not found:
        raise JudgeError(f"{path} has no questions")
    return found


def _question(text: bytes, line: int, folder: Path, max_tokens: int) -> Question:
    known = ("prompt", "images", "messages", "answer", "match", "max_tokens")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JudgeError(f"line {line} is not JSON: {error}") from error
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise JudgeError(f"line {line} is {quoted(given)}: give an object with prompt or messages")
    if unknown := sorted(set(given) - {*known}):
        raise JudgeError(f"line {line} has {unknown[0]}: {choose(unknown[0], known)}")

    def wrong(field: str, hint: str) -> JudgeError:
        return JudgeError(f"{field} of line {line} is {quoted(given[field])}: {hint}")

    match = given.get("match", "contains")
    if match not in (*MATCHES,):
        raise wrong("match", choose(match, (*MATCHES,)))
    if "messages" in given:
        messages = given["messages"]
        if not _is_list_of(messages, dict) or not messages:
            raise wrong("messages", "give a list of objects with role and content")
        if "images" in given:
            raise wrong("images", "put them into messages")
    else:
        prompt, images = given["prompt"], given.get("images", [])
        if not isinstance(prompt, str):
            raise wrong("prompt", "give a text")
        if not _is_list_of(images, str):
            raise wrong("images", "give a list of paths or URLs")
        try:
            urls = [_url(image, folder) for image in images]
        except (OSError, ValueError) as error:
            raise wrong("images", str(error)) from error
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
    answer = given.get("answer")
    answers = answer if isinstance(answer, list) else [] if answer is None else [answer]
    if not _is_list_of(answers, str | int | float) or not all(str(one).strip() for one in answers):
        raise wrong("answer", "give a text or a number, or a list of these; none may be empty")
    expected = tuple(map(str, answers))
    try:
        for one in expected:
            MATCHES[match](one, "0")
    except (ValueError, re.error) as error:
        raise wrong("answer", f"no {match} ({error})") from error
    most = check_count(given.get("max_tokens", max_tokens), 1, f"max_tokens of line {line}")
    return Question(line, messages, expected, match, most)


def _is_list_of(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


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
