# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.learned`: what methods with trained gates keep of a text.

Asks SmolLM2-135M the questions of `evaluation.text`, with gates that `python -m training.gates`
has trained. An engine reads one folder of gates, so there is one after the other for each folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.field import Field, run
from evaluation.text import prompt_seconds
from evaluation.text_arms import CEILING, FULL, Cells, Part, TextArm, crossed, number, paired
from evaluation.text_engine import TextEngine, TextSettings
from evaluation.text_report import READING
from measure.smollm import INSTALL
from measure.text_tasks import TextQuestion, TextTask

KVZAP, RETENTION = "build/gates/kvzap", "build/gates/dbtrimkv"
OWN, UNTIED = "build/gates/trimkv", "build/gates/untied"
"""Folders of the gates: KVzap's, DBTrimKV's, TrimKV's, and DBTrimKV's with a last projection for
each layer."""

BUDGETS, WAIT, QUESTIONS = (0.2, 0.1), 8, 24
UNTRAINED = ("snapkv", "reach", "rkv")
"""Methods that need no training. `tgv` divides the budget by the attention to images, which texts
lack."""

NUMBERS = (number("prose", 1024), number("prose", 1024, keys=4))
PASSAGE = TextTask("passage", "noise", 1024)
AMONG_OTHERS = number("needles", 1024)
"""A task that the full cache often fails."""

COPY, CEILINGS, COPIES = TextTask("copy", "prose", 1024, 20), (384, 256), 12
"""A long answer, the tokens to which prompt and answer are cut, those between two cuts, and the
number of questions."""


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


def ceilings(methods: Sequence[str], folder: str = "") -> tuple[TextArm, ...]:
    """Return methods that hold prompt and answer within a ceiling, with the gates of a folder.

    The ceiling bounds the prompt's cut, so an arm's budget is its share of the prompt, about.
    """
    return tuple(
        TextArm(method, tokens / COPY.tokens, ((CEILING, tokens),), folder)
        for method in methods
        for tokens in CEILINGS
    )


LONG = {
    method: ceilings((method,), folder)
    for method, folder in (("kvzap", KVZAP), ("dbtrimkv", RETENTION), ("trimkv", OWN))
}
"""Arms of methods with gates that are evicted again and again."""

GATED = {
    "dbtrimkv": gated(("dbtrimkv",), RETENTION),
    "trimkv": gated(("trimkv",), OWN),
    "untied": gated(("dbtrimkv",), UNTIED),
}
"""Arms of methods with gates that were trained for them."""

WRONG = (*gated(("kvzap",), KVZAP)[:1], *GATED["dbtrimkv"][:1], TextArm("reach", BUDGETS[0]))

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
        "Fewer passages than above, for want of time.",
        ("dbtrimkv", "trimkv", "dbtrimkv_votes"),
        RETENTION,
        NUMBERS[:1],
        13,
    ),
    "own": Part(
        "Each with its own gates",
        "`dbtrimkv` with gates of DBTrimKV's training, which is told the memory of all heads "
        "together, and `trimkv` with those of TrimKV's, which is told that of each head and has "
        "gates with one hidden layer. `dbtrimkv,gates=untied` is DBTrimKV's training with a last "
        "projection for each layer in place of one for all. Data, steps, seed and everything else "
        "are equal. One training each, so how much another seed would change is not known.",
        (Cells((*NUMBERS, PASSAGE), sum(GATED.values(), ()), QUESTIONS),),
        (
            *paired(GATED["dbtrimkv"], GATED["trimkv"]),
            *paired(GATED["dbtrimkv"], GATED["untied"]),
        ),
        together=True,
        pooled=True,
    ),
    "wrong": Part(
        "Also what the full cache answers wrong",
        "All questions count here, also those that the full cache answers wrong. Each method is "
        "compared with the full cache (`none`): *only first right* are the answers that an "
        "eviction corrects, *only second right* those that it loses.",
        (Cells((NUMBERS[1], AMONG_OTHERS, PASSAGE), WRONG, QUESTIONS),),
        tuple((arm, FULL) for arm in WRONG),
        together=True,
        pooled=True,
        counts_all=True,
    ),
    "long": Part(
        "A long answer",
        f"A list of {COPY.keys} numbers of seven digits, about 230 tokens, is hidden in prose and "
        "is to be repeated, so that until the last line there is something left to be read. While "
        f"the answer grows, prompt and answer together are cut to {CEILINGS[0]} or {CEILINGS[1]} "
        f"tokens whenever they hold a quarter more (64 more in the recorded run). The list "
        "alone has 230. Each method with its own gates. *Blocks held* are those after the last "
        "cut, as a share of the prompt's. The full cache repeats all of the list in 3 of 12 "
        "answers, so all questions count, and *before the first mistake* is the share of the "
        "numbers that an answer has, in any place, as for all lists: compare that. This was "
        "decided when the answers of the full cache and the others to three questions were known. "
        "No arm waits, so at the first cut only the prompt's last rows have voted.",
        (
            Cells(
                (COPY,),
                (*ceilings(UNTRAINED), *(arm for arms in LONG.values() for arm in arms)),
                COPIES,
            ),
        ),
        tuple(
            pair
            for arms in LONG.values()
            for other in UNTRAINED
            for pair in paired(arms, ceilings((other,)))
        ),
        counts_all=True,
    ),
}
"""By the name on the command line. The methods that need no training are asked once for all."""

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
of 512, and the gates' weights. `gates=` names gates that were trained for another method, or
differently: `dbtrimkv` those of DBTrimKV, `untied` the same without the shared last projection.
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
