# SPDX-License-Identifier: Apache-2.0
"""The report, written from the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from evaluation import plots
from evaluation.arms import ABLATIONS, OTHER_GRANULARITY
from evaluation.record import FILE, Record, ResultTable
from evaluation.results import ALL, Cell, Comparison
from measure.document import (
    Block,
    Details,
    Heading,
    Items,
    Plot,
    Table,
    Text,
    percent,
    write_markdown,
)
from measure.statistics import LEVEL

BEST_AT = (0.1, 0.05)
"""Budgets at which the best method is named."""

PATCH_METHODS = ("tgv", "aircache", "prefixkv", "snapkv", "h2o", "streaming", "random")
"""Methods whose kept patches are drawn."""

INTRODUCTION = """\
# Which method at which budget

Every method of the plugin answers the same questions through the real vLLM engine. Each question is
one request, which sets its own method and budget (`vllm_xargs`). Made by

    {commands}

from the small model in `demo/model`. **It says how the methods compare on that model and these
tasks; measure yours.** All figures are in [results.json](results.json). It is one of three fields.

{fields}
## How to read it

- **Right** is an answer that is right to the last character. **First token** is computed from the
  full cache before anything is evicted, so methods change it only by rounding. **Later tokens** are
  all others, the end token included: the share that equals the truth at the same place, mean over
  the answers. A token that is wrong because an earlier one was wrong counts as wrong. *After a
  right first* is the same over the answers whose first token is right.
- **Memory** is KV blocks held while decoding, relative to the blocks of the prompt. It includes the
  partly filled last block and is a mean over the questions. Tokens are the mean kept by a layer and
  head. The *nominal* budget is what the request asked for. Only whole blocks are dealt and at least
  one is kept, so the two differ. At one nominal budget all methods hold the same number of blocks
  for the same question. Budgets that give the same number of blocks for a prompt are the same
  request, which is sent once.
- **Intervals** are 95 %: Wilson's for shares of answers, percentiles of {resamples} bootstrap
  resamples (seed {seed}) for later tokens and differences.
- **Comparisons** are paired, on the same questions: McNemar's exact test, corrected by Holm's
  method over the family named with each table. A claim in **bold** has a corrected p below {level}.
- No two questions share a page, so they are independent of each other.
"""

FIELDS = Path(__file__).with_name("fields.md").read_text(encoding="utf-8").partition("\n")[2]
"""Sections on all fields, below the first line of the file."""

BLOCKS = """\
vLLM's CPU attention has blocks of 16 tokens and its multiples; the engine measured 16, 32 and 128.
No engine has pages of one token, so **exact token budgets are emulated** in Hugging Face, also in
bfloat16: the whole cache is kept, and later tokens do not see the prompt keys that the method would
have dropped, by the definition of the methods that also checks the engine. There a slot of budget
is a token, and no other token is kept. The emulation is slow and has {questions} questions a cell.
How far to trust it: emulated at 16, it gave the same text as the engine for {same} of {total}
answers ({share}), without its `random`, which draws other numbers. The rest is rounding, which
decides between nearly equal scores and tokens.

At least one whole block is kept in addition to the partly filled last one. Prompts here have about
600 tokens, or 1200 with two images, so with blocks of 128 several small budgets are the same and
hold far more than they ask for: compare at the memory held.
"""


def write_report(record: Record, folder: Path) -> None:
    """Write `README.md` and its pictures to `folder`, for the tables that the record has."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks: list[Block] = [_introduction(record)]
    for name, section in (
        ("grid", _grid),
        ("granularity", _granularity),
        ("ablations", _ablations),
        ("blocks", _blocks),
    ):
        if name in record.tables:
            blocks += section(record.tables[name], folder)
    blocks += _pictures(record, folder)
    blocks += _circumstances(record)
    write_markdown(blocks, folder)


def _introduction(record: Record) -> Text:
    commands = dict.fromkeys(record.facts["commands"].values())
    text = INTRODUCTION.format(
        fields=FIELDS,
        commands="\n    ".join(commands),
        resamples=record.facts["resamples"],
        seed=record.facts["seeds"]["bootstrap"],
        level=LEVEL,
    )
    return Text(text.rstrip())


# -- the grid -------------------------------------------------------------------------------


def _grid(table: ResultTable, folder: Path) -> list[Block]:
    plots.draw_accuracy(table, folder / "accuracy.png")
    plots.draw_methods(table, folder / "methods.png")
    plots.draw_tokens(table, folder / "tokens.png")
    pooled = _of(table.cells, ALL)
    ranked = _ranked(pooled)
    blocks: list[Block] = [Heading("The best method")]
    for budget in BEST_AT:
        blocks += _best(table, budget)
    blocks += [
        Heading("Accuracy against memory"),
        Plot("accuracy.png", "Accuracy against memory, all methods"),
        Text(
            f"All tasks together, {_questions(pooled)} questions a cell, best at 10 % first. The "
            "bands in the picture are the intervals."
        ),
        _accuracy_table(pooled, ranked),
        Text("One diagram a method, the others behind it in grey:"),
        Plot("methods.png", "Accuracy against memory, method by method"),
    ]
    blocks += _auto(pooled)
    blocks += _tokens(table, ranked)
    tasks = [task for task in dict.fromkeys(c.task for c in table.cells) if task != ALL]
    if len(tasks) > 1:
        blocks.append(Heading("Task by task"))
        for task in tasks:
            cells = _of(table.cells, task)
            blocks += [
                Heading(f"`{task}`", 3),
                Text(f"{_questions(cells)} questions a cell."),
                _accuracy_table(cells, ranked),
            ]
    return blocks


def _best(table: ResultTable, budget: float) -> list[Block]:
    """Return the best method at a budget and its lead over the others."""
    claims = [claim for claim in table.comparisons if claim.budget == budget]
    if not claims:
        return []
    best = claims[0].first
    (cell,) = [c for c in _of(table.cells, ALL) if c.method == best and c.budget == budget]
    against = [claim for claim in claims if claim.first == best]
    close = [f"`{claim.second}`" for claim in against if claim.p_holm >= LEVEL]
    verdict = (
        f"better than every other method at the level {LEVEL:g}"
        if not close
        else f"not told apart from {_listed(close)} at the level {LEVEL:g}"
    )
    return [
        Text(
            f"**At {_percent(budget)}** (held: {_percent(cell.blocks_held)} of the blocks) most "
            f"answers are right with **`{best}`**: {cell.exact}; {verdict}."
        ),
        _comparison_table(against, "best", "other"),
        Text(
            f"Family of the correction: all {len(claims)} pairs of methods at this budget, because "
            "the best was read off the same answers."
        ),
    ]


def _accuracy_table(cells: Sequence[Cell], methods: Sequence[str]) -> Table:
    budgets = _budgets(cells)
    header = ["nominal budget", *(_percent(budget) for budget in budgets)]
    held = [_at(cells, budget)[0] for budget in budgets]
    rows = [
        ["blocks held", *(_percent(cell.blocks_held) for cell in held)],
        ["tokens kept", *(_percent(cell.tokens_held) for cell in held)],
    ]
    for method in methods:
        row = [f"`{method}`"]
        for budget in budgets:
            found = [c for c in _at(cells, budget) if c.method == method or budget == 1.0]
            row.append(str(found[0].exact) if found else "")
        rows.append(row)
    return Table(header, rows)


def _auto(cells: Sequence[Cell]) -> list[Block]:
    auto = [cell for cell in cells if isinstance(cell.budget, str)]
    if not auto:
        return []
    rows = [
        [
            f"`{cell.budget}`",
            _percent(cell.blocks_held),
            _percent(cell.tokens_held),
            str(cell.exact),
            str(cell.later),
        ]
        for cell in auto
    ]
    return [
        Heading("A budget that follows the attention"),
        Text(
            '`tgv` with `kv_eviction_budget: "auto:SHARE"`: each request holds the least memory '
            "that keeps this share of its attention. The line *tgv, auto* in the pictures."
        ),
        Table(["budget", "blocks held", "tokens kept", "right", "later tokens"], rows),
    ]


def _tokens(table: ResultTable, methods: Sequence[str]) -> list[Block]:
    cells = _of(table.cells, ALL)
    budgets = [budget for budget in _budgets(cells) if budget != 1.0]
    rows = [
        [
            _percent(budget),
            f"`{method}`",
            str(cell.first),
            str(cell.later),
            str(cell.later_after_first),
        ]
        for budget in budgets
        for method in methods
        for cell in _at(cells, budget)
        if cell.method == method
    ]
    parts = ["first token", "later tokens", "after a right first"]
    changed, total = table.notes["first_token_changes"]
    return [
        Heading("First token and later tokens"),
        Plot("tokens.png", "First and later tokens"),
        Text(
            f"Of {total} answers with eviction, {changed} begin differently than with the full "
            "cache. Their first token is computed before the eviction; what differs is rounding, "
            "because a request's neighbours in the batch differ."
        ),
        Details("Figures", [Table(["nominal budget", "method", *parts], rows)]),
    ]


# -- other tables ---------------------------------------------------------------------------


def _granularity(table: ResultTable, folder: Path) -> list[Block]:
    cells = _of(table.cells, ALL)
    rows = []
    for claim in table.comparisons:
        own, other = (
            _cell(cells, claim.first, claim.budget),
            _cell(cells, claim.second, claim.budget),
        )
        rows.append(
            [
                _percent(claim.budget),
                f"`{claim.first}`",
                f"`{OTHER_GRANULARITY[claim.second]['granularity']}`",
                str(own.exact),
                str(other.exact),
                *_claim(claim),
            ]
        )
    return [
        Heading("The other granularity"),
        Text(
            "Methods at the granularity that is not their own: `layer` is one token set for all "
            f"heads of a layer, `head` one each. {_questions(cells)} questions a cell. "
            "Family: the whole table."
        ),
        Table(
            [
                "nominal budget",
                "method",
                "other granularity",
                "own: right",
                "other: right",
                *CLAIM,
            ],
            rows,
        ),
    ]


def _ablations(table: ResultTable, folder: Path) -> list[Block]:
    cells = _of(table.cells, ALL)
    budgets = _budgets(cells)
    claims = {(claim.second, claim.budget): claim for claim in table.comparisons}
    blocks: list[Block] = [
        Heading("One part of TGV-KV replaced"),
        Text(
            f"`tgv` with one part replaced by another, all else equal; {_questions(cells)} "
            "questions a cell. Differences are those of `tgv` to the replacement: above zero, "
            f"`tgv`'s own part is better. Family: all {len(table.comparisons)} replacements of the "
            "three tables."
        ),
    ]
    for part in ABLATIONS:
        rows = []
        for budget in budgets:
            own = _cell(cells, "tgv", budget)
            rows.append(
                [_percent(budget), f"`{part.own}` (its own)", str(own.exact), str(own.later)]
                + [""] * len(CLAIM)
            )
            for value in part.others:
                method = part.method(value)
                cell = _cell(cells, method, budget)
                rows.append(
                    [
                        _percent(budget),
                        f"`{value}`",
                        str(cell.exact),
                        str(cell.later),
                        *_claim(claims[method, budget]),
                    ]
                )
        blocks += [
            Heading(part.title, 3),
            Table(["nominal budget", f"`{part.name}`", "right", "later tokens", *CLAIM], rows),
        ]
    return blocks


def _blocks(table: ResultTable, folder: Path) -> list[Block]:
    plots.draw_blocks(table, folder / "blocks.png")
    cells = _of(table.cells, ALL)
    kinds = sorted({(cell.block_size, cell.emulated) for cell in cells})
    rows = [
        [
            _percent(budget),
            f"`{method}`",
            f"{size}, emulated" if emulated else str(size),
            str(cell.questions),
            _percent(cell.blocks_held),
            _percent(cell.tokens_held),
            str(cell.exact),
            str(cell.later),
        ]
        for budget in _budgets(cells)
        for method in dict.fromkeys(cell.method for cell in cells)
        for size, emulated in kinds
        for cell in _at(cells, budget)
        if (cell.method, cell.block_size, cell.emulated) == (method, size, emulated)
    ]
    same, total = table.notes["same_as_engine"]
    text = BLOCKS.format(
        same=same,
        total=total,
        share=_percent(same / max(total, 1)),
        questions=_questions(cell for cell in cells if cell.emulated),
    )
    header = ["nominal budget", "method", "block size", "questions", "blocks held", "tokens kept"]
    return [
        Heading("Whole pages against exact token budgets"),
        Text(text.rstrip()),
        Plot("blocks.png", "Accuracy by block size"),
        Table([*header, "right", "later tokens"], rows),
        Text(
            "Exact token budgets against pages of 16, both emulated, on the same questions. The "
            "exact budget keeps somewhat more, see *tokens kept*: what whole pages leave of a "
            "budget is part of their price. Family: the whole table."
        ),
        Table(
            ["nominal budget", "exact", "pages", *CLAIM],
            [
                [_percent(claim.budget), claim.first, claim.second, *_claim(claim)]
                for claim in table.comparisons
            ],
        ),
    ]


def _pictures(record: Record, folder: Path) -> list[Block]:
    if record.pictures is None:
        return []
    pictures = record.pictures
    plots.draw_pages(pictures, folder / "pages.png")
    plots.draw_patches(pictures, PATCH_METHODS, folder / "patches.png")
    return [
        Heading("Where the pages go"),
        Text(
            f"Pages of each layer and KV head at {_percent(pictures.budget)}, mean over "
            f"{pictures.questions} questions of `{pictures.patches.task}`:"
        ),
        Plot("pages.png", "Pages by layer and head"),
        Heading("What is kept of a page"),
        Text(
            f"One question at {_percent(pictures.budget)}. The lighter a patch, the more of the "
            f"{pictures.patches.pairs} (layer, head) pairs keep it; the box is the entry that is "
            "asked for."
        ),
        Plot("patches.png", "Kept patches"),
    ]


def _circumstances(record: Record) -> list[Block]:
    facts = record.facts
    versions, settings, seeds = (
        ", ".join(f"{name} {value}" for name, value in facts[part].items())
        for part in ("versions", "settings", "seeds")
    )
    items = [
        f"Versions: {versions}.",
        f"Engine: {settings}; bfloat16, eager, prefix caching, greedy decoding.",
        f"Seeds: {seeds}; pages and questions follow from their numbers in the test split.",
        f"Fingerprint of model, sources and settings: `{facts['fingerprint']}`.",
        f"Drawn again from [{FILE}]({FILE}) by `python -m evaluation.run --only report`.",
    ]
    return [Heading("How it was made"), Items(items)]


# -- parts of tables ------------------------------------------------------------------------

CLAIM = ("difference", "only first : only second right", "p", "p, Holm")


def _claim(claim: Comparison) -> list[str]:
    mark = "**" if claim.p_holm < LEVEL else ""
    points = claim.difference
    return [
        f"{mark}{100 * points.mean:+.1f} [{100 * points.low:+.1f}, {100 * points.high:+.1f}]{mark}",
        f"{claim.first_only} : {claim.second_only}",
        _probability(claim.p),
        _probability(claim.p_holm),
    ]


def _comparison_table(claims: Iterable[Comparison], first: str, second: str) -> Table:
    rows = [[f"`{c.first}`", f"`{c.second}`", *_claim(c)] for c in claims]
    return Table([first, second, *CLAIM], rows)


def _of(cells: Iterable[Cell], task: str) -> list[Cell]:
    return [cell for cell in cells if cell.task == task]


def _at(cells: Iterable[Cell], budget: float | str) -> list[Cell]:
    return [cell for cell in cells if cell.budget == budget]


def _cell(cells: Iterable[Cell], method: str, budget: float | str) -> Cell:
    return next(c for c in cells if c.method == method and c.budget == budget)


def _budgets(cells: Iterable[Cell]) -> list[float]:
    found = {cell.budget for cell in cells if isinstance(cell.budget, float)}
    return sorted(found, reverse=True)


def _ranked(cells: Sequence[Cell]) -> list[str]:
    """Return methods, best first, at the budget nearest to the first of `BEST_AT`."""
    evicting = [c for c in cells if isinstance(c.budget, float) and c.budget < 1]
    if not evicting:
        return ["none"]
    budget = min({c.budget for c in evicting}, key=_distance(BEST_AT[0]))
    return [c.method for c in sorted(_at(evicting, budget), key=lambda c: -c.exact.mean)]


def _distance(wanted: float) -> Callable[[float | str], float]:
    return lambda budget: abs(float(budget) - wanted)


def _questions(cells: Iterable[Cell]) -> str:
    counts = sorted({cell.questions for cell in cells})
    return " to ".join(str(count) for count in counts)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _percent(share: float | str) -> str:
    return percent(share) if isinstance(share, float) else f"`{share}`"


def _probability(p: float) -> str:
    return f"{p:.2g}" if p >= 0.0001 else "< 0.0001"
