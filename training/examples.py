# SPDX-License-Identifier: Apache-2.0
"""Examples to train on: JSON lines, and a ready set of our own texts and pages.

A line is `{"text": TEXT}` or `{"messages": [...]}` as for chat completions, with `content` a string
or parts `{"type": "text", "text": TEXT}` and `{"type": "image", "path": FILE}`; paths are relative
to the folder of the lines. `"repeat": TEXT` says what the images show, which KVzap needs to know.
The last tenth of the lines is held out.

    python -m training.examples FILE --model FOLDER [--pages]

writes the ready set: sentences of the docstrings in Python's library, and training questions of
the evaluation on texts or, for the model that reads pages, on drawn pages. The evaluation hides its
test questions in other prose, the documentation of Python's language.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from measure.text_tasks import TRAINING, TextQuestion, TextTask, python_prose

Message = dict[str, Any]

HELD_OUT = 10
"""One line in this many is held out, from the end."""

NUMBER = 200
"""Lines of the ready set."""

FIRST_QUESTION = TRAINING + 100_000
"""Number of its first question: a training question that the evaluation does not ask."""

FRAME = 64
"""Tokens that a conversation has besides its message, at most, for the ready set."""


@dataclass(frozen=True)
class Example:
    """One line."""

    name: str
    """File and line, for messages."""
    text: str | None = None
    messages: tuple[Message, ...] = ()
    images: tuple[Path, ...] = ()
    repeat: str | None = None

    @classmethod
    def read(cls, line: str, name: str, folder: Path) -> Example:
        """Read a line of a file in a folder.

        Raises:
            ValueError: if it is not of the form above.
        """
        try:
            found = json.loads(line)
            text, messages = found.get("text"), tuple(found.get("messages", ()))
            if isinstance(text, str) != (not messages):
                raise ValueError("it has either `text` or `messages`")
            images = tuple(
                folder / part["path"]
                for message in messages
                if message["role"] and not isinstance(message["content"], str)
                for part in message["content"]
                if part["type"] == "image"
            )
            return cls(name, text, messages, images, found.get("repeat"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{name} is no example ({reason}); see docs/gates.md") from error

    def context(self) -> tuple[list[dict[str, str]], str]:
        """Return the parts of the text or of the first user's message, and what it says.

        Raises:
            ValueError: if there is none, or if it has images and no `repeat`.
        """
        if self.text is not None:
            return [{"type": "text", "text": self.text}], self.text
        content = next((m["content"] for m in self.messages if m["role"] == "user"), "")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        plain = "".join(part["text"] for part in parts if part["type"] == "text")
        if self.images and self.repeat is None:
            raise ValueError(f"{self.name} has images; say in `repeat` what they show")
        return parts, plain if self.repeat is None else self.repeat


def read_examples(file: Path) -> tuple[list[Example], list[Example]]:
    """Return the examples of a file for training, and those that are held out.

    Raises:
        ValueError: if a line is wrong, or there are fewer than two.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    examples = [
        Example.read(line, f"{file}:{number}", file.parent)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    held_out = max(len(examples) // HELD_OUT, 1)
    if len(examples) <= held_out:
        raise ValueError(f"{file} has {len(examples)} examples; at least two are needed")
    return examples[:-held_out], examples[-held_out:]


@cache
def library_prose() -> tuple[str, ...]:
    """Return sentences of the docstrings in Python's library, none of which the evaluation has."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found: dict[str, None] = {}
    others = set(python_prose())
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            for paragraph in re.split(r"\n\s*\n", text or ""):
                plain = re.sub(r"\s+", " ", paragraph).strip()
                for sentence in re.split(r"(?<=[.?!]) (?=[A-Z])", plain):
                    if re.fullmatch(r"[A-Z][^=|{}<>]{20,300}[.?!]", sentence):
                        found[sentence] = None
    return tuple(sentence for sentence in found if sentence not in others)


def passages(
    sentences: Sequence[str], tokens: int, count: Callable[[str], int], joint: str = " "
) -> Iterator[str]:
    """Yield texts of up to `tokens` tokens without end, going round the sentences."""
    texts = cycle(sentences)
    sentence = next(texts)
    while True:
        text = ""
        while count(text + sentence) <= tokens:
            text += sentence + joint
            sentence = next(texts)
        yield text.strip()


def text_lines(tokens: int, count: Callable[[str], int], number: int) -> Iterator[dict[str, Any]]:
    """Yield lines of the ready set: passages of prose and questions in turn.

    The passages that are held out have other sentences than the others. Questions hide a number or
    a fact in noise or among its like.
    """
    prose = library_prose()
    split = len(prose) * (HELD_OUT - 1) // HELD_OUT
    training = number - number // HELD_OUT
    halves = prose[:split], prose[split:]
    first, second = (passages(half, tokens, count) for half in halves)
    tasks = cycle(
        (
            TextTask("number", "noise", tokens),
            TextTask("number", "needles", tokens),
            TextTask("fact", "noise", tokens, keys=4),
        )
    )
    for index in range(number):
        if index % 2 == 0:
            yield {"text": next(first if index < training else second)}
            continue
        asked = TextQuestion(next(tasks), FIRST_QUESTION + index).example(FRAME, count)
        answer = {"role": "assistant", "content": f"{asked.start} {asked.answer}."}
        yield {"messages": [{"role": "user", "content": asked.message}, answer]}


def page_lines(folder: Path, model: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield questions on one drawn page each, which are written to a folder `pages`."""
    from reader.assemble import load_vocabulary
    from reader.tasks import PageQuestion, PageTask

    vocabulary = load_vocabulary(Path(model))
    tasks = cycle((PageTask("number", "noise"), PageTask("passage", "noise")))
    (folder / "pages").mkdir(parents=True, exist_ok=True)
    for index, task in enumerate(islice(tasks, number)):
        example = PageQuestion(task, FIRST_QUESTION + index).example(vocabulary)
        path = f"pages/{index}.png"
        example.pages[0].save(folder / path)
        user, *_ = example.messages()
        content = [
            {**part, "path": path} if part["type"] == "image" else part for part in user["content"]
        ]
        asked = example.asked
        end = '."' if asked.kind == "passage" else "."
        joint = "" if asked.start.endswith('"') else " "
        answer = f"{asked.start}{joint}{asked.answer.removesuffix('.')}{end}"
        yield {
            "messages": [
                {"role": "user", "content": content},
                {"role": "assistant", "content": answer},
            ],
            "repeat": asked.message,
        }


def write_lines(file: Path, lines: Iterator[dict[str, Any]]) -> int:
    """Write lines, complete or not at all; return their number."""
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    scratch = file.with_name(f"{file.name}.new")
    scratch.write_text("\n".join(texts) + "\n", encoding="utf-8")
    scratch.replace(file)
    return len(texts)


def main(arguments: Sequence[str] | None = None) -> None:
    from training.prompts import Prompter

    parser = argparse.ArgumentParser(prog="python -m training.examples", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--pages", action="store_true", help="pages, for `make page-model`'s model")
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of a text")
    parser.add_argument("--number", type=int, default=NUMBER, help="lines")
    options = parser.parse_args(arguments)
    if options.pages:
        lines = page_lines(options.file.parent, options.model, options.number)
    else:
        count = Prompter(options.model, options.tokens).count
        lines = text_lines(options.tokens - FRAME, count, options.number)
    try:
        print(f"{options.file}: {write_lines(options.file, lines)} lines")
    except (OSError, ValueError) as error:
        sys.exit(f"examples: {error}")


if __name__ == "__main__":
    main()
