# SPDX-License-Identifier: Apache-2.0
"""The papers' own experiments at our size, as data: what is asked or measured, and what they claim.

Sources: TGV-KV (arXiv 2606.03075), AirCache (2503.23956), VL-Cache (2410.23317), "Make Each Token
Count" (2605.09649, DBTrimKV) and RetentiveKV (2605.04075).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation import attention, pages, texts
from evaluation.arms import (
    AIRCACHE,
    FULL,
    RANDOM,
    STATES,
    Arm,
    Pair,
    arm,
    crossed,
    gates_digest,
    paired,
)
from evaluation.attention import (
    STATISTICS,
    AttentionReader,
    Measured,
    Prompted,
    read_measured,
    summarise,
)
from evaluation.field import Field
from evaluation.parts import Cells, Part, Task
from evaluation.results import PartResult, read_part
from evaluation.texts import number
from measure.document import percent
from measure.text_tasks import TextQuestion, TextTask
from reader.tasks import PageQuestion
from vllm_tgvkv.judge.log import whole_lines

NUMBERS = pages.NUMBERS[:2]
"""A number on a page of prose, and on one of noise."""
GATES = texts.FOLDERS["dbtrimkv"]
LENGTHS = tuple(number("prose", tokens, keys=4) for tokens in (512, 1024, 2048))


@dataclass(frozen=True)
class Claim:
    """A paper's claim, and the difference here that is above 0 if it holds."""

    text: str
    printed: str = ""
    """The paper's figures."""
    pair: Pair | None = None
    """Two arms: the first is to keep more answers."""
    number: str = ""
    """Name of a number of each prompt in `attention`."""
    near: float | None = None
    """The number is to be this near to 0, in place of above it."""
    judged: bool = True
    """False for a figure that only stands beside the paper's."""
    percent: bool = True
    """Whether the number is a share."""


@dataclass(frozen=True)
class Experiment:
    """Tables or figures of a paper: questions to arms, or a statistic of attention."""

    title: str
    text: str
    claims: Sequence[Claim]
    field: Field | None = None
    """Where questions are asked; None for a statistic."""
    cells: Sequence[Cells] = ()
    counts_all: bool = False
    tasks: Sequence[Task] = ()
    """Prompts of a statistic."""
    prompts: int = 8
    """Of each of these tasks."""
    grows: str = ""
    """Number of a prompt whose growth from the first task to the last is the number `grows`."""

    @property
    def part(self) -> Part:
        """Return what is asked."""
        pairs = [claim.pair for claim in self.claims if claim.pair]
        return Part(self.title, self.text, self.cells, pairs, self.counts_all, has_picture=True)

    def limited(self, prompts: int | None) -> int:
        """Return the prompts of each task, at most a given number."""
        return min(self.prompts, prompts or self.prompts)


_BUDGETS = (0.95, 0.9, 0.5, 0.05)
_VISION, _TEXT = (crossed((name,), _BUDGETS) for name in RANDOM)
_AIRCACHE = arm("aircache", 0.2)
_SHARES = {name: f"aircache_budget_{name}" for name in ("uniform", "pyramid")}
_SHARES |= {n: f"aircache_budget_aircache_{n}" for n in ("strength", "skewness")}


def _loses(text: str, printed: str, mix: str) -> Claim:
    return Claim(text, printed, (_AIRCACHE, arm(mix, 0.2)))


def _gated(name: str, budget: float) -> Arm:
    return arm(name, budget, texts.FOLDERS[name.partition("_")[0]])


_HALF_AND_FIFTH = (0.5, 0.2)
_GATED, _BELOW = (
    tuple(_gated(name, budget) for budget in _HALF_AND_FIFTH) for name in ("dbtrimkv", "trimkv")
)


def _state(**options: Any) -> Arm:
    return arm(STATES, 0.2, **options)


_STATE = _state(mix=1, fade=0, gate=0)
_ALWAYS_READ = _state(mix=1, fade=0)
_UNIFIED = _state(mix=1, fade=0, gate=0, dual=False)
_NO_STATE = _state(mix=1, weight=0)
_ENTROPY = _state(mix=0.9, fade=0, gate=0)
_ONE, _TWO, _FIVE = "dbtrimkv_next", "dbtrimkv", "dbtrimkv_five"

EXPERIMENTS = {
    "modalities": Experiment(
        "TGV-KV: random eviction by modality",
        "Random tokens go, text first (`random_text`), vision first (`random_vision`) or of both "
        "alike. At 90 % kept, text first leaves of the text only the first four tokens and the "
        "last block. The paper: losing vision first keeps more than losing text first.",
        [
            Claim(
                f"{percent(budget)} kept",
                "10 : 0.2 of 18 (ChartQA), 31 : 4.4 of 48 (TextVQA)" if budget < 0.1 else "",
                pair,
            )
            for budget, pair in zip(_BUDGETS, paired(_VISION, _TEXT), strict=True)
        ],
        pages.FIELD,
        (Cells(NUMBERS, (*crossed(("random",), _BUDGETS), *_VISION, *_TEXT), 14),),
    ),
    "sparsity": Experiment(
        "VL-Cache: sparsity by layer",
        "Share of attention below 1 % of its row's maximum: rows of the prompt, of the question "
        "after the page, and of decoding (figure 2).",
        [
            Claim("the first two layers are denser than the others", number="first"),
            Claim("decoding follows prefill", "r = 0.695", number="follows", percent=False),
            Claim("in decoding the second layer is sparser", number="second"),
            Claim("the question's rows follow it more closely", number="question", percent=False),
            Claim("sparsity of the densest layer in prefill", "70 %", number="least", judged=False),
            Claim("of the sparsest", "99 %", number="most", judged=False),
        ],
        tasks=NUMBERS,
    ),
    "hits": Experiment(
        "VL-Cache: cache hit rate",
        "Of the tenth of the keys that the first decoding row sees most, the share that is among "
        "the tenth chosen by other rows' sums, for each query head (figure 3). Our questions have "
        "about 39 tokens, so the window has nearly the same rows.",
        [
            Claim("rows after vision hit more than all rows", number="question-all"),
            Claim("and more than a window (32 rows)", number="question-window", judged=False),
            Claim("the window hits more than all rows", number="window-all"),
        ],
        tasks=NUMBERS,
    ),
    "coverage": Experiment(
        "VL-Cache: contribution and coverage",
        "Vision's share of decoding's attention to the prompt, above 1 % of the maximum "
        "(contribution), and among the best tenth of the keys (coverage; figures 8 and 9).",
        [
            Claim("in the first layer vision has more than half", number="first"),
            Claim("from the third layer on language has more than half", number="later"),
            Claim("in the middle third coverage exceeds contribution", number="middle"),
        ],
        tasks=NUMBERS,
    ),
    "aircache": Experiment(
        "AirCache: tables 5, 6, 11 and 12",
        "One part replaced at 20 % of the prompt, which is a tenth of the vision tokens beside "
        "the text. `vision_rows` has all vision rows in place of the last 32; `merged` merges all "
        "that is dropped. The paper's figures are means of four benchmarks at 1 % of vision "
        "(TextVQA alone in table 12); its table 6 is not in our text.",
        [
            _loses("elite above the last 16 rows", "69.8 : 61.1", "aircache_window_16"),
            _loses("above the last 32", "69.8 : 63.3", "aircache_window_32"),
            _loses("above all text", "69.8 : 63.3", "aircache_all_text"),
            _loses("above vision rows", "69.8 : 59.2", "aircache_vision_rows"),
            _loses("its layer budget above equal ones", "69.8 : 65.5", _SHARES["uniform"]),
            _loses("above a pyramid", "69.8 : 58.2", _SHARES["pyramid"]),
            _loses("above strength alone", "69.8 : 67.5", _SHARES["strength"]),
            _loses("above skewness alone", "69.8 : 67.9", _SHARES["skewness"]),
            _loses("vision only above both modalities", "", "aircache_unified"),
            _loses("dropping above merging", "69.8 : 63.8", "aircache_merged"),
            *(
                _loses(f"a threshold of 0.9 above 0.{n}", f"67.1 : {theirs}", f"aircache_elite_{n}")
                for n, theirs in ((99, "65.5"), (80, "65.2"), (60, "61.2"))
            ),
        ],
        pages.FIELD,
        (Cells(NUMBERS, crossed(("aircache", *AIRCACHE, *_SHARES.values()), (0.2,)), 14),),
    ),
    "budgets": Experiment(
        "AirCache: table 13, budgets against equal ones",
        "Jensen-Shannon divergence, between 0 and 1, of layer budgets. The table's figures are not "
        "in our text; it calls those to equal budgets small.",
        [
            Claim("strength to equal budgets", number="strength", near=0.1, percent=False),
            Claim("skewness to equal budgets", number="skewness", near=0.1, percent=False),
            Claim("both to equal budgets", number="both", near=0.1, percent=False),
            Claim("strength to skewness", number="between", judged=False, percent=False),
        ],
        tasks=NUMBERS,
    ),
    "dilution": Experiment(
        "DBTrimKV: dilution",
        "Share of the answer's attention that does not go to the sentence with the answer, one of "
        "four in prose, with the full cache and when gates trained here keep 20 % (section 3.1). "
        "Other tokens include the first, which most heads see most and every method keeps.",
        [
            Claim("dilution at 2,048 tokens less that at 512", number="grows"),
            Claim("gates keep more of the attention to useful tokens", number="rates"),
            Claim("dilution falls with them", number="falls"),
        ],
        tasks=LENGTHS,
        grows="dilution",
    ),
    "lengths": Experiment(
        "DBTrimKV: figure 1, answers by length",
        "One of four numbers; all questions count. Each with gates of its own training.",
        [
            Claim(f"{percent(budget)} above {name}", "", (each, other))
            for budget, each, below in zip(_HALF_AND_FIFTH, _GATED, _BELOW, strict=True)
            for name, other in (("the full cache", FULL), ("TrimKV", below))
        ],
        texts.FIELD,
        (Cells(LENGTHS, (*_GATED, *_BELOW), 16),),
        counts_all=True,
    ),
    "survival": Experiment(
        "DBTrimKV: figures 2 and 9, survival",
        "Share of tokens that some row still selects this many tokens later. Prompts have 1,024 to "
        "1,124 tokens, a sixteenth of the paper's; K and horizons are as much smaller.",
        [
            Claim("a minority survives a quarter of the prompt, by the best 16", number="dies"),
            Claim("that share", "13.8 % (one head)", number="survives", judged=False),
            Claim("99 % of the mass select more", number="mass"),
            Claim("that share", "40 % (one head)", number="of mass", judged=False),
            Claim("vision fades like text to 10 points, after 32 tokens", number="kinds", near=0.1),
            Claim("heads differ: 90th less 10th percentile", number="heads", judged=False),
        ],
        tasks=(*NUMBERS, TextTask("number", "prose", 1024)),
        prompts=4,
    ),
    "lookahead": Experiment(
        "DBTrimKV: table 8, tokens to come",
        "The retention over the next two tokens, one (`dbtrimkv_next`) or five, with gates trained "
        "here. The paper's figures are at 256 and 1,024 tokens a head, the last ones at 64.",
        [
            Claim(text, printed, (_gated(first, budget), _gated(second, budget)))
            for text, printed, first, second, budget in (
                ("two above one at 20 %", "52.6 : 50.7", _TWO, _ONE, 0.2),
                ("two above one at 10 %", "51.6 : 49.3", _TWO, _ONE, 0.1),
                ("two above five at 20 %", "52.6 : 46.1", _TWO, _FIVE, 0.2),
                ("five above two at 5 %", "38.5 : 33.9", _FIVE, _TWO, 0.05),
            )
        ],
        texts.FIELD,
        (
            Cells(
                (number("prose", 1024),),
                crossed((_TWO, _ONE, _FIVE), texts.BUDGETS, gates=GATES),
                28,
            ),
        ),
    ),
    "retentive": Experiment(
        "RetentiveKV: ablations",
        "Emulated as [in pages](../pages/README.md#retentivekvs-states), at 20 %: states of vision "
        "and text that a query reads if its cosine is above 0 (`gate=0`), and lambda 1 "
        "(`mix=1`), where entropy has no part.",
        [
            Claim("retrieval by the query helps", "4.6 to 5.4 %", (_STATE, _ALWAYS_READ)),
            Claim("two states above one", "3.1 %", (_STATE, _UNIFIED)),
            Claim("entropy helps (lambda 0.9 above 1)", "2.9 to 4.6 %", (_ENTROPY, _STATE)),
            Claim("states above nothing in their place", "", (_STATE, _NO_STATE)),
        ],
        pages.FIELD,
        (Cells(NUMBERS, (_STATE, _ALWAYS_READ, _UNIFIED, _NO_STATE, _ENTROPY), 14),),
    ),
}
"""By the name on the command line, in the order of the page."""


def measure(
    names: Sequence[str], facts: dict[str, Any], prompts: int | None, first: int, folder: Path
) -> dict[str, Measured]:
    """Return the results of statistics. Each prompt is read once for all that ask for it.

    Args:
        prompts: at most this many of each task.
        first: number of the first question.
        folder: of a log with what was said of each prompt, from which an interrupted run continues.

    Raises:
        EvictionConfigError: if a statistic needs gates and there are none.
    """
    chosen = {name: EXPERIMENTS[name] for name in names}
    digests = {n: gates_digest(GATES) if STATISTICS[n].needs_gates else "" for n in names}
    work = dict.fromkeys(
        (task, first + number)
        for each in chosen.values()
        for task in each.tasks
        for number in range(each.limited(prompts))
    )
    source = hashlib.sha256(Path(attention.__file__).read_bytes()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"prompts-{facts['fingerprint']}-{source}.jsonl"
    known = _logged(log)
    found: dict[str, dict[tuple[Task, int], Prompted]] = {name: {} for name in names}
    reader: AttentionReader | None = None
    for task, place in tqdm(work, unit="prompt", leave=False):
        keys = {
            name: (name, digests[name], task.name, place)
            for name, each in chosen.items()
            if task in each.tasks and place - first < each.limited(prompts)
        }
        asking = {name: STATISTICS[name] for name, key in keys.items() if key not in known}
        if asking:
            reader = reader or AttentionReader(GATES if any(digests.values()) else "")
            question = (TextQuestion if isinstance(task, TextTask) else PageQuestion)(task, place)
            said = reader.measure(question, asking)
            known |= {keys[name]: each for name, each in said.items()}
            with log.open("a", encoding="utf-8") as file:
                for name, (curves, values) in said.items():
                    points = [[*point, y] for point, y in curves.items()]
                    file.write(json.dumps([keys[name], points, values]) + "\n")
        for name, key in keys.items():
            found[name][task, place] = known[key]
    for name, each in chosen.items():
        if each.grows:
            shortest, *_, longest = each.tasks
            for (task, place), (_, values) in found[name].items():
                if task == longest:
                    before = found[name][shortest, place][1]
                    values["grows"] = values[each.grows] - before[each.grows]
    return {name: summarise(facts, list(each.values())) for name, each in found.items()}


def _logged(log: Path) -> dict[tuple[Any, ...], Prompted]:
    """Return what a log says of each statistic and prompt."""
    return {
        tuple(key): ({(panel, curve, x): y for panel, curve, x, y in points}, values)
        for key, points, values in map(json.loads, whole_lines(log))
    }


Result = PartResult | Measured


def read_result(part: dict[str, Any]) -> Result:
    """Return an experiment's results as the file has them."""
    return read_part(part) if "cells" in part else read_measured(part)
