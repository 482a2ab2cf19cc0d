# SPDX-License-Identifier: Apache-2.0
"""A ready set of texts to train on: `python -m training.examples FILE --model FOLDER`.

Sentences of the docstrings in Python's library, and training questions of the evaluation. The
evaluation hides its test questions in other prose, the documentation of Python's language.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

from measure.text_tasks import TRAINING, TextQuestion, TextTask
from measure.text_words import python_prose
from training.data import HELD_OUT, Prompter

NUMBER = 200
"""Lines of the ready set."""

FIRST_QUESTION = TRAINING + 100_000
"""Number of its first question: a training question that the evaluation does not ask."""

FRAME = 64
"""Most tokens that a chat template adds to a message of the ready set."""


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


def passages(sentences: Sequence[str], tokens: int, count: Callable[[str], int]) -> Iterator[str]:
    """Yield texts of up to `tokens` tokens without end, going round the sentences."""
    texts = cycle(sentences)
    sentence = next(texts)
    while True:
        text = ""
        while count(text + sentence) <= tokens:
            text += f"{sentence} "
            sentence = next(texts)
        yield text.strip()


def text_lines(tokens: int, count: Callable[[str], int], number: int) -> Iterator[dict[str, Any]]:
    """Yield lines of the ready set: passages of prose and questions in turn.

    Held-out passages have other sentences than the others. Questions hide a number or a fact in
    noise or among its like.
    """
    prose = library_prose()
    split = len(prose) * (HELD_OUT - 1) // HELD_OUT
    training = number - number // HELD_OUT
    first, second = (passages(half, tokens, count) for half in (prose[:split], prose[split:]))
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


def write_ready_set(file: Path, prompter: Prompter, number: int = NUMBER) -> int:
    """Write the ready set for texts of the prompter's length, complete or not at all.

    Returns:
        The number of lines.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    found = text_lines(prompter.tokens - FRAME, prompter.count, number)
    lines = [json.dumps(line, ensure_ascii=False) for line in found]
    scratch = file.with_name(f"{file.name}.new")
    scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
    scratch.replace(file)
    return len(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.examples", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of a text")
    parser.add_argument("--number", type=int, default=NUMBER, help="lines")
    options = parser.parse_args(arguments)
    try:
        number = write_ready_set(
            options.file, Prompter(options.model, options.tokens), options.number
        )
    except (OSError, ValueError) as error:
        sys.exit(f"examples: {error}")
    print(f"{options.file}: {number} lines")


if __name__ == "__main__":
    main()
