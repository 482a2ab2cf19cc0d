# SPDX-License-Identifier: Apache-2.0
"""The parts of the evaluation on pages, as data."""

from __future__ import annotations

from collections.abc import Iterable

from evaluation import replacements
from evaluation.text_arms import (
    DEFAULT,
    OWN_PARTS,
    REPLACED_TEXT,
    WAIT,
    Cells,
    Part,
    TextArm,
    crossed,
    paired,
)
from reader.tasks import TASKS

BUDGETS = (0.2, 0.1, 0.05)
METHODS = (
    "tgv",
    "vlcache",
    "aircache",
    "snapkv",
    "adakv",
    "pyramidkv",
    "prefixkv",
    "elastic",
    "mixkv",
    "streaming",
)
"""All but `h2o`, which computes the attention of the whole prompt again for each answer,
`sparsemm`, which needs a file, `rkv`, which is made for long answers, and `random`."""

ASKED = TASKS[:3]
"""A number on a page of prose, on one of noise, and on two pages of noise."""

_ANSWERED = (*ASKED, TASKS[5], TASKS[7])
"""Tasks that arms are asked: with one of four numbers, and a passage, on a page."""

_FULL = Part(
    "The full cache",
    "What the model answers before anything is evicted. Tasks that it answers too rarely are asked "
    "of no arm.",
    (Cells(_ANSWERED, (), 8), Cells(tuple(t for t in TASKS if t not in _ANSWERED), (), 4)),
)

_AT_ONCE = (
    "snapkv_max_forward16",
    "snapkv_max_forward40",
    "snapkv_max_grid16",
    "snapkv_max_grid40",
)
_LISTENING = ("snapkv_answer_forward16", "snapkv_answer_grid16")

_METHODS = Part(
    "What the methods keep",
    f"Each method as published, `{DEFAULT}`, mixes of `snapkv` that pool forward, and mixes that "
    "wait for 4 or 8 tokens of the answer, which alone vote. `forward16` pools the text around the "
    "pages as well, `grid16` the pages alone. A number has eight tokens with the space before it: "
    "after 8 nothing is left to be read, and the cell shows only that the wait works.",
    (
        Cells(ASKED, crossed((*METHODS, DEFAULT), BUDGETS), 20),
        Cells(ASKED, crossed((DEFAULT,), BUDGETS, (WAIT,)), 20),
        Cells(ASKED, crossed(_AT_ONCE, BUDGETS), 20),
        Cells(ASKED, crossed(_LISTENING, BUDGETS[1:], (4, 8)), 20),
    ),
    (
        *paired(crossed((DEFAULT,), BUDGETS), crossed(("snapkv",), BUDGETS)),
        *paired(crossed((DEFAULT,), BUDGETS, (WAIT,)), crossed((DEFAULT,), BUDGETS)),
        *paired(crossed(_AT_ONCE[:1], BUDGETS), crossed(("snapkv",), BUDGETS)),
        *paired(crossed(_AT_ONCE[:1], BUDGETS), crossed(("tgv",), BUDGETS)),
        *paired(crossed(_AT_ONCE[:1], BUDGETS), crossed(("snapkv_max_grid16",), BUDGETS)),
    ),
    together=True,
)

_CHOICE = Part(
    "Choosing a default",
    "Mixes of the same parts on training questions.",
    (
        Cells(
            (ASKED[0], ASKED[2], TASKS[5], TASKS[7]),
            crossed(
                [
                    "tgv",
                    *OWN_PARTS,
                    "snapkv",
                    "snapkv_max_forward16",
                    "snapkv_max_forward40",
                    "snapkv_max_grid40",
                    "adakv_max_forward40",
                    "reach_layer",
                    "reach_by_score",
                    "reach_text",
                    "reach_prefixkv",
                ],
                (0.2,),
            ),
            6,
        ),
    ),
    chooses=True,
)

_OTHERS = crossed((DEFAULT, "snapkv", "tgv"), (0.2,))
_DEFAULT = Part(
    "The recommended method",
    f"`{DEFAULT}` with a wait of {WAIT} tokens, which was chosen on training questions, at 20 % of "
    "the prompt, and without a wait, on test questions, against `snapkv` and `tgv`.",
    (
        Cells(_ANSWERED, crossed((DEFAULT,), (0.2,), (WAIT,)), 40),
        Cells(_ANSWERED, crossed((DEFAULT,), (0.2,)), 8),
        Cells(_ANSWERED, crossed(("snapkv", "tgv"), (0.2,)), 6),
    ),
    tuple((TextArm(DEFAULT, 0.2, (("defer", WAIT),)), other) for other in _OTHERS),
    together=True,
)


def _replacing(title: str, text: str, base: str, names: Iterable[str], budget: float) -> Part:
    """Return the part that compares a method with those in which one part is replaced."""
    (own,), others = crossed((base,), (budget,)), crossed(names, (budget,))
    return Part(
        title,
        text,
        (Cells(ASKED[:2], (own, *others), 20),),
        tuple((own, other) for other in others),
        together=True,
        pooled=True,
    )


_ABLATIONS = _replacing(
    "One part of TGV-KV replaced",
    "As on the demonstration model, here with 30 layers: the layer budget by the attention of text "
    "to images (`tgv`), of images to images (`vv`), of text to text (`tt`), uniform or by entropy; "
    "the score; what is kept first; `head` instead of layer; and pooling, which `tgv` has none of.",
    "tgv",
    replacements.TGV,
    0.5,
)

_UNIFORM = _replacing(
    "TGV-KV with equal layer budgets, one part replaced",
    "As before, where the layer budget is out of the way: all layers have the same.",
    "tgv_budget_uniform",
    replacements.UNIFORM,
    0.5,
)

_REPLACED = _replacing(
    "One part of reach replaced",
    REPLACED_TEXT,
    DEFAULT,
    (*replacements.REACH, *replacements.REACH_WITH_IMAGES),
    0.1,
)

_GRANULARITY = Part(
    "Head or layer, and merging",
    "Published methods with a token set for each head (`head`) or one for all heads of a layer "
    "(`layer`), whichever is not their own, and Elastic Cache, which drops what it would merge "
    "(`elastic_dropped`).",
    (
        Cells(
            ASKED[:2],
            crossed(
                dict.fromkeys(
                    [
                        *(str(mix["base"]) for mix in replacements.OTHERS.values()),
                        *replacements.OTHERS,
                    ]
                ),
                (0.2,),
            ),
            20,
        ),
    ),
    tuple(
        (TextArm(str(mix["base"]), 0.2), TextArm(name, 0.2))
        for name, mix in replacements.OTHERS.items()
    ),
    together=True,
    pooled=True,
)

PARTS = {
    "full": _FULL,
    "methods": _METHODS,
    "default": _DEFAULT,
    "ablations": _ABLATIONS,
    "uniform": _UNIFORM,
    "replaced": _REPLACED,
    "granularity": _GRANULARITY,
    "choice": _CHOICE,
}
"""By the name on the command line, in the order of the report."""
