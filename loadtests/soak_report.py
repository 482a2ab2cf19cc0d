# SPDX-License-Identifier: Apache-2.0
"""The report of a soak, written from its record."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from loadtests.plots import draw_watched
from loadtests.verdict import (
    ANSWERED,
    DRIFT,
    FAILED,
    FILE,
    GROWTH,
    LEFT,
    PRESSED,
    SLOWDOWN,
    TIE,
    Comparison,
    Soak,
    SoakedArm,
    failures,
    undecided,
)
from measure.document import Block, Code, Heading, Items, Plot, Table, Text, write
from vllm_tgvkv.judge.statistics import Estimate

PLOT = "watched.svg"
TRAFFIC = (
    "methods, budgets and granularities of their own, guarded budgets, uncompressed ones, chats "
    "that share pages, text. Half of them are streams; clients of a tenth go away before the end. "
    "Each answer is compared with the one that the same request got alone."
)
PRESSED_TRAFFIC = (
    "one image, two, chats that share pages, text. Every request may be evicted when memory is "
    "short, and the rate rises and falls between a fifth of this and three times as much. A "
    "request that stayed whole has to be answered as it is alone; an answer over a shrunk cache, "
    "or over one that was restored or computed again, is not compared. All blocks are recounted in "
    "every step."
)


def write_report(soak: Soak, folder: Path) -> None:
    """Write `README.md`, `report.html` and the plot to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_watched(soak, folder / PLOT)
    facts = soak.facts
    blocks: list[Block] = [
        Heading("Soak with answers checked", 1),
        Text(
            f"{len(soak.kinds)} greedy requests to a small model with random weights, asked alone "
            f"and then at random for {_minutes(soak)} minutes, {facts['rate']:g} a second, at most "
            f"{facts['in_flight']} at a time: {PRESSED_TRAFFIC if _pressed(soak) else TRAFFIC} "
            f"All figures are in [{FILE}]({FILE})."
        ),
        Code(facts["command"]),
        Text(_verdict(soak)),
        Heading("Answers"),
        _answers(soak),
        *_states(soak),
        *_differences(soak),
        Heading("Memory, blocks and latency"),
        _watched(soak),
        Plot(PLOT, "Memory, blocks in use and latency over time"),
        Text(
            "Memory is that of all processes of the server. Its growth is the slope of a line "
            "fitted to the last two thirds of the time, because caches fill in the first third. "
            "oneDNN's, which otherwise fills for hours, is bounded (`loadtests/soak.py`). Latency "
            "is from the request to the last token, over the median of the same request in the "
            "whole run, so that the mix does not matter: the median of the last third of the time "
            "to that of the first, with a bootstrap interval over stretches of time. In brackets: "
            "95 %. A limit is broken if the whole interval is beyond it"
            + (
                f" and beyond that of {soak.control}, whose pool has room for all that is in "
                "flight: in this traffic stock vLLM 0.32 ends where a request is preempted that "
                "began with a prefix-cache hit over an image (`docs/compatibility.md`). How long "
                "the two take is not to be compared: the larger pool remembers most of these "
                "prompts as cached prefixes."
                if soak.control
                else "."
            )
        ),
        Heading("How it was made"),
        Items(_circumstances(soak)),
    ]
    write(blocks, folder)


def _minutes(soak: Soak) -> str:
    return " and ".join(dict.fromkeys(f"{arm.seconds / 60:g}" for arm in soak.arms.values()))


def _verdict(soak: Soak) -> str:
    broken, open_ = failures(soak), undecided(soak)
    text = (
        f"**Failed:** {'; '.join(broken)}."
        if broken
        else f"**Passed:** every request{' that stayed whole' if _pressed(soak) else ''} was "
        "answered as it is alone, and in the end no request ran or waited, no KV block was in use "
        "or held, and no log had an error."
    )
    return f"{text} **Undecided:** {'; '.join(open_)}." if open_ else text


def _answers(soak: Soak) -> Table:
    header = ["arm", "requests", "answered", "left early", "failed", "tokens", "wrong"]
    header += ["near ties", "largest drift", "preemptions", "most at a time", "evictions"]
    rows = []
    for name, arm in soak.arms.items():
        preemptions = [moment.preemptions for moment in arm.moments] or [0]
        ended = Counter(visit.ended for visit in arm.visits)
        counts = [len(arm.visits), ended[ANSWERED], ended[LEFT], ended[FAILED]]
        counts += [sum(visit.num_tokens for visit in arm.visits), len(arm.wrong), len(arm.ties)]
        more = [preemptions[-1] - preemptions[0], max((m.running for m in arm.moments), default=0)]
        more.append(arm.eviction.get("requests", 0))
        numbers = [*map(str, counts), f"{arm.drift:.1e}", *(f"{value:.0f}" for value in more)]
        rows.append([name, *numbers])
    return Table(header, rows)


def _pressed(soak: Soak) -> list[SoakedArm]:
    """Return the servers that evict when memory is short."""
    return [arm for arm in soak.arms.values() if PRESSED in arm.command]


def _states(soak: Soak) -> list[Block]:
    """Return the answers of servers under pressure by what happened to their caches last."""
    header = ["whole", "shrunk", "restored", "preempted after a cut", "wrong, of the whole ones"]
    names = ("whole", "pressure", "restored", "preempted")
    rows = [
        [*(str(arm.states[name]) for name in names), str(len(arm.wrong))] for arm in _pressed(soak)
    ]
    return [Table(header, rows)] if rows else []


def _differences(soak: Soak) -> list[Block]:
    text = (
        "*Drift* is the largest difference of log-probabilities at equal tokens, at most "
        f"{DRIFT:g}. A batch's shape changes rounding: two tokens that are nearly as likely "
        f"may change places. Where they are less than {TIE:g} apart in both answers it is a "
        "*near tie*; any other difference is *wrong*."
    )
    found = [
        f"{name}, `{soak.kinds[visit.case]}` {visit.case}, {visit.begin:.0f} s: {_where(its)}"
        for name, arm in soak.arms.items()
        for visit in arm.visits
        if (its := visit.comparison) is not None and (its.differs_at is not None or its.is_wrong())
    ]
    found += [
        f"{name}, afterwards `{soak.kinds[case]}` {case}: {_where(its)}"
        for name, arm in soak.arms.items()
        for case, its in enumerate(arm.afterwards)
        if its.differs_at is not None or its.is_wrong()
    ]
    if len(found) > 20:
        found[20:] = [f"and {len(found) - 20} more"]
    return [Text(text), Items(found)] if found else [Text(text)]


def _where(its: Comparison) -> str:
    if its.differs_at is None:
        return f"drift {its.drift:.1e}"
    gap = "no near rival" if its.gap is None else f"{its.gap:.1e} apart"
    kind = "wrong" if its.is_wrong() else "near tie"
    return f"{kind} at token {its.differs_at}, {gap}, drift {its.drift:.1e}"


def _watched(soak: Soak) -> Table:
    header = ["arm", "memory, first", "last", "MiB an hour", "limit", "median latency"]
    header += ["last third to first", "limit", "KV use, mean", "most", "in the end"]
    rows = []
    for name, arm in soak.arms.items():
        memory = [f"{moment.memory_mib:.0f} MiB" for moment in arm.moments] or [""]
        seconds = [visit.seconds for visit in arm.ended(ANSWERED)]
        latency = f"{statistics.median(seconds):.2f} s" if seconds else ""
        usage = [moment.kv_usage for moment in arm.moments] or [0]
        used = (statistics.fmean(usage), max(usage), arm.left.get("kv_usage", math.nan))
        grown, slower = _interval(arm.growth(), "+.0f"), _interval(arm.slowdown(), ".3f")
        cells = [memory[0], memory[-1], grown, f"{GROWTH:g}", latency, slower, f"{SLOWDOWN:g}"]
        rows.append([name, *cells, *(f"{share:.0%}" for share in used)])
    return Table(header, rows)


def _interval(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return "not known"
    mean, low, high = (format(v, form) for v in (estimate.mean, estimate.low, estimate.high))
    return f"{mean} [{low}, {high}]"


def _circumstances(soak: Soak) -> Sequence[str]:
    facts = soak.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    items = [
        f"{facts['date']}; {versions}; {facts['cores']} cores ({facts['machine']}) for client and "
        f"server; load average before: {facts['machine_load_before']:g}."
    ]
    for name, arm in soak.arms.items():
        pool = f", pool of {arm.pool[0]} blocks of {arm.pool[1]} tokens" if arm.pool else ""
        items.append(f"**{name}**: `{arm.command}`{pool}.")
    return [*items, facts["note"]] if facts["note"] else items
