# SPDX-License-Identifier: Apache-2.0
"""The arms and parts of the evaluation on texts, as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from evaluation import replacements
from evaluation.fingerprint import ROOT
from evaluation.parts import UNREAD, WEIGHTED, reaching
from measure.text_tasks import TextTask
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import NONE, EvictionConfig
from vllm_tgvkv.gates.folder import Gates
from vllm_tgvkv.shared.errors import EvictionConfigError

METHODS = ("snapkv", "adakv", "pyramidkv", "streaming")
"""Methods without images. `tgv` and others deal by the attention to images, which texts lack."""
VOTING = METHODS[:3]
"""Those whose scores are attention; all three take the rows of a window."""

VOTES: dict[str, dict[str, Any]] = {
    "max": {"reduce": "max"},
    "answer": {"rows": "answer", "reduce": "max"},
}
"""Who votes, and how. A method sums over the last rows of the prompt and those of the answer that
it waited for; `max` takes the largest of them instead, `answer` the largest of the answer's alone.
"""


def reach(forward: int, back: int) -> dict[str, Any]:
    """Return the pooling in which a score counts for the tokens after and before its own."""
    return {"pooling": reaching(forward, back)}


POOLINGS: dict[str, dict[str, Any]] = {
    "forward16": reach(16, 1),
    "symmetric16": reach(8, 9),
    "backward16": reach(1, 16),
    "forward40": reach(40, 1),
    "symmetric40": reach(20, 21),
}
"""Windows of 18 positions in three directions, and of 42 in two. The methods' own has 7."""

GRIDS: dict[str, dict[str, Any]] = {
    f"snapkv_{vote}_grid{forward}": {
        "base": "snapkv",
        **VOTES[vote],
        "pooling": reaching(forward, 1, "grid"),
    }
    for vote in VOTES
    for forward in (16, 40)
}
"""Pooling forward on pages alone: their rows of patches, and not the text around them."""

OWN_PARTS: dict[str, dict[str, Any]] = {
    name: {"base": "tgv", **change}
    for name, change in {
        "tgv_forward40": reach(40, 1),
        "tgv_rows_max_forward40": {"score": "text_rows", "reduce": "max", **reach(40, 1)},
        "tgv_head_max_forward40": {
            "score": "text_rows",
            "reduce": "max",
            "granularity": "head",
            **reach(40, 1),
        },
        "tgv_uniform_max_forward40": {
            "score": "text_rows",
            "reduce": "max",
            "allocation": "uniform",
            "granularity": "head",
            **reach(40, 1),
        },
    }.items()
}
"""TGV-KV's parts with pooling forward."""

CANDIDATES: dict[str, dict[str, Any]] = {
    f"reach_{name}": {"base": "snapkv", "reduce": "max", **reach(40, 1), **change}
    for name, change in {
        "layer": {"granularity": "layer"},
        "by_score": {"retain": "by_score"},
        "recent_8": {"retain": "recent_8"},
        "entropy": {"allocation": "entropy"},
        "prefixkv": {"allocation": "prefixkv"},
        "tt": {"allocation": "tt"},
        "text": {"score": "text_rows"},
    }.items()
}
"""Maxima over the rows of the window, pooled over 40 tokens, with one more part replaced."""

REACHES: dict[str, dict[str, Any]] = {
    f"snapkv_max_forward{forward}": {"base": "snapkv", "reduce": "max", **reach(forward, 1)}
    for forward in (24, 64)
}

GATED: dict[str, dict[str, Any]] = {
    f"{method}_votes": {"base": method, "score": "trimkv_votes", "rows": "window", "reduce": "max"}
    for method in ("trimkv", "dbtrimkv")
}
"""Scores of gates plus the logarithm of the largest attention of the last rows. The evaluation of
gates alone has them; see `learned`."""

_SUMMARY_CHANGES: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {
    ("tgv", "snapkv", "reach"): {"summaries": {"summaries": "both"}},
    ("snapkv", "reach", "retentivekv"): {
        "unread": {"summaries": UNREAD},
        "vision": {"summaries": "vision"},
    },
    ("retentivekv",): {
        "tokens": {"summaries": "none"},
        "all": {"summaries": "all"},
        "weighted": {"summaries": WEIGHTED},
        "spread": {"score": "retentive_spread"},
        "attention": {"score": "text_rows"},
        "attention_tokens": {"score": "text_rows", "summaries": {"of": "none"}},
    },
}
SUMMARIES: dict[str, dict[str, Any]] = {
    f"{base}_{name}": {"base": base, **change}
    for bases, changes in _SUMMARY_CHANGES.items()
    for base in bases
    for name, change in changes.items()
}
"""Summaries of what is evicted, and RetentiveKV with one part replaced. `unread` takes the blocks
of the summaries and reads nothing of them; `tokens` spends them on tokens. The evaluation of
summaries alone has them; see `retentive`."""

MIXES: dict[str, dict[str, Any]] = (
    {
        "_".join([method, *names]): {"base": method, **vote, **pooling}
        for method in VOTING
        for names, vote, pooling in (
            *(((name,), vote, {}) for name, vote in VOTES.items()),
            *(((name,), {}, pooling) for name, pooling in POOLINGS.items()),
            *(
                ((name, place), vote, pooling)
                for name, vote in VOTES.items()
                for place, pooling in POOLINGS.items()
            ),
        )
    }
    | CANDIDATES
    | SUMMARIES
    | REACHES
    | GRIDS
    | OWN_PARTS
    | GATED
    | replacements.REPLACED
)
"""The server's `methods`, of which a run uses those that its arms name."""


SCHEDULE = "schedule"
"""Name of the option with the steps of an eviction: tokens of the answer, and what is kept."""
CEILING = "max_tokens"
"""Name of the option with the tokens to which prompt and answer are cut again and again."""


@dataclass(frozen=True)
class TextArm:
    """A method or mix at a budget, with further options of its requests."""

    method: str
    budget: float
    """Of a schedule, that of its last step."""
    options: tuple[tuple[str, Any], ...] = ()
    """Names after `kv_eviction_`, and their values."""
    gates: str = ""
    """Folder of the gates that the method reads, relative to the repository."""

    @property
    def key(self) -> str:
        """Return the name of the arm in logs and results."""
        return NONE if self == FULL else f"{self.method}@{self.budget:g}{self.suffix}"

    @property
    def identity(self) -> str:
        """Return the key with the mix spelled out and a hash of the gates, if it has any.

        So a changed mix is another arm, and so is a method with other gates.
        """
        mix = MIXES.get(self.method)
        parts = [self.key, *([json.dumps(mix, sort_keys=True)] if mix else [])]
        return " ".join([*parts, *([gates_digest(self.gates)] if self.gates else [])])

    @property
    def label(self) -> str:
        """Return the name of the arm without its budget, or without the ceiling in its place."""
        options = tuple(option for option in self.options if option[0] != CEILING)
        return f"{self.method}{replace(self, options=options).suffix}"

    @property
    def has_ceiling(self) -> bool:
        """Return whether prompt and answer are evicted whenever they exceed a number of tokens."""
        return CEILING in dict(self.options)

    @property
    def has_schedule(self) -> bool:
        """Return whether the prompt is evicted in steps, which say when and how much."""
        return SCHEDULE in dict(self.options)

    @property
    def steps(self) -> tuple[tuple[int, float], ...]:
        """Return its evictions: tokens of the answer, and the share of the prompt that is kept."""
        options = dict(self.options)
        if SCHEDULE not in options:
            return ((options.get("defer", 0), self.budget),)
        pairs = (step.split(":") for step in options[SCHEDULE].split(","))
        return tuple((int(after), float(budget)) for after, budget in pairs)

    @property
    def suffix(self) -> str:
        """Return the options, and the folder of the gates unless it is named like the method."""
        name = Path(self.gates).name
        gates = () if name in ("", self.method) else (("gates", name),)
        return "".join(f",{name}={value}" for name, value in (*self.options, *gates))

    @property
    def xargs(self) -> dict[str, Any]:
        """Return the `vllm_xargs` of its requests."""
        first: dict[str, Any] = {}
        if self != FULL and not self.has_schedule:
            # Without a wait, an arm has none, also if its method recommends one.
            first = {"kv_eviction_budget": self.budget, "kv_eviction_defer": 0}
        options = {f"kv_eviction_{name}": value for name, value in self.options}
        return {"kv_eviction": self.method, **first, **options, "kv_eviction_report": 1}


@cache
def gates_digest(folder: str) -> str:
    """Return a hash of the configuration and the weights of a folder of gates.

    Raises:
        EvictionConfigError: if there are no gates.
    """
    gates = Gates.read(str(ROOT / folder), "the folder of an arm's gates")
    files = [Path(gates.folder, "config.json"), Path(gates.folder, gates.file)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


FULL = TextArm(NONE, 1.0)
"""The full cache. What it answers wrong says nothing about a method."""

Pair = tuple[TextArm, TextArm]


class Task(Protocol):
    """A kind of question about a text, written or drawn."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def tokens(self) -> int:
        """Tokens of a prompt, about."""


@dataclass(frozen=True)
class Cells:
    """Arms that answer the same questions of some tasks."""

    tasks: tuple[Task, ...]
    arms: tuple[TextArm, ...]
    questions: int
    """Of each task."""


@dataclass(frozen=True)
class Part:
    """Cells that are reported together, and the comparisons that were chosen before."""

    title: str
    text: str
    cells: tuple[Cells, ...]
    pairs: tuple[Pair, ...] = ()
    """Compared on every task whose cells have both arms."""
    by_memory: bool = False
    """Whether arms are shown by the memory of a request over its life, not by their budget."""
    together: bool = False
    """Whether there is a table of all tasks together."""
    pooled: bool = False
    """Whether the comparisons are made on all tasks together, and not on each."""
    chooses: bool = False
    """Whether a choice is made on it, so that it may be asked training questions alone."""
    counts_all: bool = False
    """Whether questions count that the full cache answers wrong, too."""

    @property
    def work(self) -> Iterator[tuple[Task, int, tuple[TextArm, ...]]]:
        """Yield each task once, with the largest number of questions and all its arms."""
        tasks = dict.fromkeys(task for cells in self.cells for task in cells.tasks)
        for task in tasks:
            mine = [cells for cells in self.cells if task in cells.tasks]
            arms = dict.fromkeys([FULL, *(arm for cells in mine for arm in cells.arms)])
            yield task, max(cells.questions for cells in mine), tuple(arms)

    def asked(self, task: Task, arm: TextArm) -> int:
        """Return the number of questions of a task for an arm; 0 if it has none."""
        mine = [cells for cells in self.cells if task in cells.tasks]
        return max((c.questions for c in mine if arm == FULL or arm in c.arms), default=0)


def crossed(
    methods: Iterable[str], budgets: Sequence[float], waits: Sequence[int] = (0,)
) -> tuple[TextArm, ...]:
    """Return every method at every budget, with every wait in tokens of the answer."""
    return tuple(
        TextArm(method, budget, (("defer", wait),) if wait else ())
        for method in methods
        for budget in budgets
        for wait in waits
    )


def scheduled(methods: Iterable[str], schedules: Iterable[str]) -> tuple[TextArm, ...]:
    """Return every method with every schedule, such as `8:0.3,24:0.1`."""
    return tuple(
        TextArm(method, float(schedule.rpartition(":")[2]), ((SCHEDULE, schedule),))
        for method in methods
        for schedule in schedules
    )


def mixed(methods: Iterable[str], *names: str) -> list[str]:
    """Return the names of the methods' mixes."""
    return ["_".join([method, *names]) for method in methods]


def paired(first: Sequence[TextArm], second: Sequence[TextArm]) -> tuple[Pair, ...]:
    return tuple(zip(first, second, strict=True))


def number(haystack: Any, tokens: int, keys: int = 1) -> TextTask:
    return TextTask("number", haystack, tokens, keys)


PASSAGES = (TextTask("passage", "noise", 1024), TextTask("passage", "prose", 1024))

_METHODS = Part(
    "What the methods keep",
    "Each method as published, at four budgets. The prompt is evicted before the answer's second "
    "token, so that only the last words of the prompt have voted. Methods whose layer budget is "
    "the attention to images, such as `tgv`, evict no texts.",
    (
        Cells(
            (number("prose", 1024), number("noise", 2048), number("prose", 1024, keys=4)),
            crossed(METHODS, (0.5, 0.2, 0.1, 0.05)),
            20,
        ),
    ),
)

_WAIT = Part(
    "Wait for the answer",
    "The prompt is evicted once the answer has 4 or 8 tokens (`defer`), whose rows vote as well. "
    "`max` and `answer` say which rows vote and how, see the mixes. A number has eight tokens with "
    "the space before it: after 8 nothing is left to be read, and the cell shows only that the "
    "wait works.",
    (
        Cells(
            (number("prose", 1024),),
            (
                *crossed(METHODS, (0.1, 0.05)),
                *crossed(VOTING, (0.1, 0.05), (4,)),
                *crossed(mixed(VOTING, "max"), (0.1, 0.05), (4,)),
                *crossed(mixed(VOTING, "answer"), (0.1, 0.05), (4, 8)),
            ),
            100,
        ),
        Cells(
            (number("prose", 1024, keys=4),),
            (
                *crossed(METHODS, (0.1,)),
                *crossed(VOTING, (0.1,), (4,)),
                *crossed(mixed(VOTING, "max"), (0.1,), (4,)),
                *crossed(mixed(VOTING, "answer"), (0.1,), (4, 8)),
            ),
            60,
        ),
        Cells(
            (number("noise", 2048), number("noise", 4096)),
            (
                *crossed(METHODS, (0.1, 0.05)),
                *crossed(mixed(VOTING, "answer"), (0.1, 0.05), (4,)),
            ),
            50,
        ),
    ),
    (
        *paired(crossed(mixed(VOTING, "answer"), (0.1, 0.05), (4,)), crossed(VOTING, (0.1, 0.05))),
        *paired(
            crossed(mixed(VOTING, "answer"), (0.1, 0.05), (4,)),
            crossed(VOTING, (0.1, 0.05), (4,)),
        ),
    ),
)

_CONTROLS = ("symmetric16", "backward16")
_REACH = Part(
    "Pool forward",
    "Nothing waits. A score counts for the 16 tokens after its own and the one before it, for as "
    "many on both sides, or for those before it: windows of the same 18 positions.",
    (
        Cells(
            (number("prose", 1024),),
            (
                *crossed(VOTING, (0.2,)),
                *(
                    arm
                    for name in ("forward16", *_CONTROLS)
                    for arm in crossed(mixed(VOTING, name), (0.2,))
                ),
            ),
            100,
        ),
        Cells(
            (number("prose", 1024),),
            (
                *crossed(VOTING[:1], (0.1,)),
                *crossed(mixed(VOTING[:1], "forward16"), (0.1,)),
                *crossed(mixed(VOTING[:1], "max"), (0.2, 0.1)),
                *crossed(mixed(VOTING[:1], "max", "forward16"), (0.2, 0.1)),
                *(arm for name in _CONTROLS for arm in crossed(mixed(VOTING[:1], name), (0.1,))),
            ),
            100,
        ),
        Cells(
            (number("noise", 2048),),
            (*crossed(VOTING, (0.1,)), *crossed(mixed(VOTING, "forward16"), (0.1,))),
            30,
        ),
    ),
    (
        *paired(
            crossed(mixed(VOTING, "forward16"), (0.2, 0.1)),
            crossed(VOTING, (0.2, 0.1)),
        ),
        *(
            pair
            for name in _CONTROLS
            for methods, budget in ((VOTING, 0.2), (VOTING[:1], 0.1))
            for pair in paired(
                crossed(mixed(methods, "forward16"), (budget,)),
                crossed(mixed(methods, name), (budget,)),
            )
        ),
    ),
)

_SNAP = ("snapkv",)
_PASSAGES = Part(
    "Passages: wait and reach",
    "A passage of 30 to 45 tokens is to be repeated word for word. Most of it is read after the "
    "eviction, so here a wait of 8 tokens does not contain the answer.",
    (
        Cells(
            PASSAGES,
            (
                *crossed(("snapkv", "streaming"), (0.2, 0.1)),
                *crossed(mixed(_SNAP, "forward16"), (0.2, 0.1)),
                *crossed(mixed(_SNAP, "forward40"), (0.2, 0.1)),
                *crossed(mixed(_SNAP, "symmetric40"), (0.2, 0.1)),
                *crossed(_SNAP, (0.2, 0.1), (8,)),
                *crossed(mixed(_SNAP, "max"), (0.2, 0.1), (8,)),
                *crossed(mixed(_SNAP, "max", "forward16"), (0.2, 0.1), (8,)),
                *crossed(mixed(_SNAP, "max", "forward40"), (0.2, 0.1), (8,)),
                *crossed(mixed(_SNAP, "max", "symmetric40"), (0.2, 0.1), (8,)),
                *crossed(mixed(_SNAP, "answer", "forward40"), (0.2, 0.1), (8,)),
            ),
            40,
        ),
    ),
    (
        *paired(
            crossed(mixed(_SNAP, "max", "forward40"), (0.2, 0.1), (8,)),
            crossed(mixed(_SNAP, "max", "symmetric40"), (0.2, 0.1), (8,)),
        ),
        *paired(
            crossed(mixed(_SNAP, "max", "forward40"), (0.2, 0.1), (8,)),
            crossed(mixed(_SNAP, "max"), (0.2, 0.1), (8,)),
        ),
        *paired(
            crossed(mixed(_SNAP, "max"), (0.2, 0.1), (8,)),
            crossed(_SNAP, (0.2, 0.1)),
        ),
        *paired(
            crossed(mixed(_SNAP, "forward40"), (0.2, 0.1)),
            crossed(mixed(_SNAP, "symmetric40"), (0.2, 0.1)),
        ),
    ),
)

_AT_ONCE = ("snapkv", "snapkv_max_forward40")
_LISTENING = ("snapkv_max", "snapkv_max_forward40", "snapkv_answer_forward40")
_STEPS = ("4:0.3,12:0.1", "4:0.5,12:0.2,24:0.05", "4:0.5,12:0.3,24:0.1", "8:0.3,24:0.1")
_EARLY = "0:0.5,4:0.3,12:0.1"
"""Its first step comes before the answer, so that rows of the answer alone cannot vote."""


def _at_equal_memory(method: str) -> Iterator[Pair]:
    """Yield a schedule, a wait and the prompt's end against each other at three levels of memory.

    The mean over the steps of an answer of 40 tokens is about 21, 30 and 36 % of the full cache.
    """
    for schedule, wait, budget, at_once in (
        (_EARLY, 4, 0.1, 0.2),
        (_STEPS[1], 8, 0.1, 0.3),
        (_STEPS[2], 8, 0.2, 0.35),
    ):
        (steps,), (waiting,), (early,) = (
            scheduled([method], [schedule]),
            crossed([method], [budget], [wait]),
            crossed([method], [at_once]),
        )
        yield from ((steps, waiting), (steps, early), (waiting, early))


_LIFE = Part(
    "Equal memory over the request's life",
    "A request that waits holds its whole prompt for a while, and one that is evicted in steps "
    "holds some of it for longer. So arms are compared by the blocks that they hold on average "
    "while decoding. The prompt is evicted at its end, once the answer has 4 or 8 tokens "
    "(`defer`), or in steps (`schedule`): `8:0.3,24:0.1` keeps 30 % of it after 8 tokens of the "
    "answer and 10 % after 24. The answers are passages of 30 to 45 tokens.",
    (
        Cells(
            PASSAGES,
            (
                *crossed(_AT_ONCE, (0.35, 0.3, 0.2, 0.1)),
                *crossed(_LISTENING, (0.1,), (4,)),
                *crossed(_LISTENING, (0.2, 0.1, 0.05), (8,)),
                *scheduled(_LISTENING, _STEPS),
                *scheduled(_LISTENING[:2], [_EARLY]),
            ),
            40,
        ),
    ),
    tuple(_at_equal_memory("snapkv_max_forward40")),
    by_memory=True,
)

_SHORT, _LONG = 512, 1024
_SOLVED = (
    number("prose", _SHORT, keys=4),
    number("noise", _LONG, keys=4),
    TextTask("numbers", "noise", _SHORT, keys=2),
    TextTask("numbers", "prose", _SHORT, keys=2),
    TextTask("names", "noise", _SHORT, keys=2),
    TextTask("names", "prose", _SHORT, keys=2),
    TextTask("words", "list", _SHORT),
    TextTask("fact", "prose", _SHORT, keys=2),
    TextTask("fact", "prose", _LONG, keys=2),
)
"""Tasks of which the full cache answered more than one half, of 6 to 8 questions for training."""
_UNSOLVED = (
    number("noise", 2 * _LONG, keys=4),
    number("needles", _SHORT),
    TextTask("numbers", "noise", _LONG, keys=2),
    TextTask("numbers", "prose", _SHORT, keys=4),
    TextTask("names", "noise", _LONG, keys=2),
    TextTask("names", "prose", _SHORT, keys=4),
    TextTask("chain", "noise", _SHORT, keys=2),
    TextTask("words", "list", _SHORT, keys=3),
)
"""Those of which it answered one half or fewer."""

_BUDGETS = (0.2, 0.1, 0.05)
_FORWARD = ("snapkv_max_forward16",)
_LISTEN = ("snapkv_answer_forward16",)
_TASKS = Part(
    "RULER's tasks",
    "The tasks of RULER as far as the model can do them with the full cache: one of several "
    "numbers, all numbers of a name, the numbers of several names, the most common word of a list, "
    "and a fact of one of several documents. A list is right if the answer names all of it, in any "
    "order, and *before the first mistake* is the share that it names. The published methods stand "
    "against mixes that pool forward, without a wait and with one of 4 or 8 tokens. A number and a "
    "word end within 8, and many facts, so there the cells show only that the wait works, or hold "
    "all; lists begin with some tokens of layout. The last tasks of the table are those of which "
    "the model answered too few questions for training with the full cache: a number among others, "
    "longer texts, four numbers in one answer, variables that are assigned from each other, and "
    "several common words. No arm is asked those.",
    (
        Cells(
            _SOLVED,
            (
                *crossed(METHODS, _BUDGETS),
                *crossed(_FORWARD, _BUDGETS),
                *crossed(_LISTEN, _BUDGETS, (4, 8)),
            ),
            20,
        ),
        Cells(_UNSOLVED, (), 10),
    ),
    (
        *paired(crossed(_LISTEN, _BUDGETS[1:2], (8,)), crossed(_SNAP, _BUDGETS[1:2])),
        *paired(crossed(_FORWARD, _BUDGETS[1:2]), crossed(_SNAP, _BUDGETS[1:2])),
    ),
    together=True,
)

_KEYS = (number("prose", _SHORT, keys=4), number("noise", _LONG, keys=4))
_CHOICE = Part(
    "Choosing a default",
    "Mixes of the same parts on training questions.",
    (
        Cells(
            (number("prose", 1024), _KEYS[0], *PASSAGES),
            (
                *crossed(
                    [
                        "snapkv_max_forward16",
                        "snapkv_max_forward24",
                        "snapkv_max_forward40",
                        "snapkv_max_forward64",
                        "snapkv_forward40",
                        "adakv_max_forward16",
                        "adakv_max_forward40",
                        *CANDIDATES,
                    ],
                    (0.2,),
                ),
                *crossed(["snapkv_max_forward16", "snapkv_max_forward40"], (0.1,)),
                *crossed(["snapkv_answer_forward40"], (0.2, 0.1), (8,)),
            ),
            16,
        ),
    ),
    chooses=True,
)

DEFAULT = "reach"
"""The method that is recommended."""

WAIT = 4
"""Tokens of the answer that it waits for where it is recommended."""

_DEFAULT = Part(
    "The recommended method",
    f"`{DEFAULT}` with a wait of {WAIT} tokens, which was chosen on training questions, at 20 and "
    "10 % of the prompt, and without a wait at 20 %, against `snapkv`. A number has eight tokens "
    "with the space before it, so half of it is read after the eviction.",
    (
        Cells(
            (number("prose", 1024), number("noise", _LONG), *_KEYS, *PASSAGES),
            crossed((DEFAULT,), (0.2,), (WAIT,)),
            40,
        ),
        Cells(
            (number("prose", 1024), number("noise", _LONG), *_KEYS, *PASSAGES),
            (*crossed((DEFAULT,), (0.1,), (WAIT,)), *crossed((DEFAULT,), (0.2,))),
            20,
        ),
        Cells(
            (number("prose", 1024), number("noise", _LONG), *_KEYS, *PASSAGES),
            crossed(_SNAP, (0.2,)),
            10,
        ),
    ),
    (
        *paired(crossed((DEFAULT,), (0.2,), (WAIT,)), crossed((DEFAULT,), (0.2,))),
        *paired(crossed((DEFAULT,), (0.2,), (WAIT,)), crossed(_SNAP, (0.2,))),
    ),
    together=True,
)

REPLACED_TEXT = (
    f"`{DEFAULT}` without a wait, with another layer budget, sums in place of maxima over the "
    "rows, other rows, retention, granularity or pooling."
)
_REPLACED = Part(
    "One part of reach replaced",
    REPLACED_TEXT,
    (
        Cells(
            (number("prose", 1024), number("prose", _SHORT, keys=4), PASSAGES[0]),
            crossed((DEFAULT, *replacements.REACH), (0.1,)),
            20,
        ),
    ),
    tuple((TextArm(DEFAULT, 0.1), other) for other in crossed(replacements.REACH, (0.1,))),
    together=True,
    pooled=True,
)

PARTS = {
    "methods": _METHODS,
    "wait": _WAIT,
    "reach": _REACH,
    "passages": _PASSAGES,
    "life": _LIFE,
    "tasks": _TASKS,
    "default": _DEFAULT,
    "replaced": _REPLACED,
    "choice": _CHOICE,
}
"""By the name on the command line, in the order of the report."""


def used_mixes(arms: Iterable[TextArm]) -> dict[str, Any]:
    """Return `methods` of the eviction configuration for some arms."""
    names = {arm.method for arm in arms}
    return {name: dict(mix) for name, mix in MIXES.items() if name in names}


def eviction_settings(arms: Iterable[TextArm]) -> dict[str, Any]:
    """Return the eviction configuration of an engine that answers for these arms.

    Raises:
        EvictionConfigError: for arms with different gates, of which an engine has one folder.
    """
    arms = tuple(arms)
    folders = sorted({arm.gates for arm in arms} - {""})
    if len(folders) > 1:
        raise EvictionConfigError(
            f"an engine reads one folder of gates, and the arms name {', '.join(folders)}: start "
            "an engine for each"
        )
    gates = {"gates": str(ROOT / folders[0])} if folders else {}
    # Schedules need positions of kept tokens, which other engines do not store.
    has_later = any(arm.has_schedule or arm.has_ceiling for arm in arms)
    decode = {"decode": {"on_request": True}} if has_later else {}
    mixes = used_mixes(arms)
    return {"policy": METHODS[0], "text_only": "evict", "methods": mixes, **decode, **gates}


def by_gates(arms: Iterable[TextArm]) -> dict[str, tuple[TextArm, ...]]:
    """Return for each folder of gates the arms that an engine with it answers for.

    Arms without gates are in all; if no arm has gates, there is one engine without, "".
    """
    arms = tuple(dict.fromkeys(arms))
    folders = dict.fromkeys(arm.gates for arm in arms if arm.gates) or {"": None}
    return {folder: tuple(arm for arm in arms if arm.gates in ("", folder)) for folder in folders}


def check(arms: Iterable[TextArm], settings: Mapping[str, Any], has_images: bool = False) -> None:
    """Check that this version of the plugin knows all that the arms ask for.

    Args:
        has_images: whether prompts have images, without which some layer budgets are undefined.

    Raises:
        EvictionConfigError: naming the arm or mix, and what is not known.
    """
    config = EvictionConfig.from_mapping(settings)
    for arm in arms:
        try:
            options = RequestOptions.resolve(config, arm.xargs)
            if has_images or options.policy == NONE:
                continue
            if config.build_policy(arm.method).allocation.needs_vision:
                raise EvictionConfigError("its layer budget is the attention to images")
        except EvictionConfigError as error:
            raise EvictionConfigError(f"arm {arm.key}: {error}") from error
