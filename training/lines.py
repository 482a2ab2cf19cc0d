# SPDX-License-Identifier: Apache-2.0
"""Examples to train on: JSON lines, `{"text": TEXT}` or `{"messages": [...]}`.

Messages are those of chat completions with strings as `content`. The last tenth of the lines is
held out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

Message = dict[str, str]

HELD_OUT = 10
"""One line in this many is held out, from the end."""


@dataclass(frozen=True)
class Example:
    """One line."""

    name: str
    """File and line, for messages."""
    text: str | None = None
    messages: tuple[Message, ...] = ()

    @classmethod
    def read(cls, line: str, name: str) -> Example:
        """Read a line.

        Raises:
            ValueError: if it is not of the form above.
        """
        try:
            found = json.loads(line)
            text, messages = found.get("text"), tuple(found.get("messages", ()))
            if isinstance(text, str) != (not messages):
                raise ValueError("it has either `text` or `messages`")
            if not all(
                message["role"] and isinstance(message["content"], str) for message in messages
            ):
                raise ValueError("gates are trained on texts: every `content` is a string")
            return cls(name, text, messages)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{name} is no example ({reason}); see docs/gates.md") from error

    @property
    def context(self) -> str:
        """Return the text, or the first user's message."""
        if self.text is not None:
            return self.text
        return next((m["content"] for m in self.messages if m["role"] == "user"), "")


def read_examples(file: Path) -> tuple[list[Example], list[Example]]:
    """Return the examples of a file for training, and the held-out ones.

    Raises:
        ValueError: if a line is wrong, or there are fewer than two.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    examples = [
        Example.read(line, f"{file}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    held_out = max(len(examples) // HELD_OUT, 1)
    if len(examples) <= held_out:
        raise ValueError(f"{file} has {len(examples)} examples; at least two are needed")
    return examples[:-held_out], examples[-held_out:]
