# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.text`: what methods keep of a text that a real language model reads.

Asks SmolLM2-135M questions about long texts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.field import Field, run
from evaluation.text_arms import PARTS
from evaluation.text_engine import TextEngine, TextSettings
from evaluation.text_report import INTRODUCTION
from measure.text_tasks import TextQuestion


def prompt_seconds(tokens: int) -> float:
    """Return about how long the engine takes for a prompt on two cores, as measured once."""
    return tokens * (1.3e-3 + 1.7e-7 * tokens)


FIELD = Field(
    name="text",
    description="What methods keep of a text that a real language model reads.",
    introduction=INTRODUCTION,
    parts=PARTS,
    settings=TextSettings,
    engine=TextEngine,
    question=TextQuestion,
    prompt_seconds=prompt_seconds,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation on texts and return the exit status."""
    return run(FIELD, arguments)


if __name__ == "__main__":
    sys.exit(main())
