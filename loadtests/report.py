# SPDX-License-Identifier: Apache-2.0
"""The report of a load test, written from its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from loadtests import plots
from loadtests.record import FILE, Record, Run
from measure.document import Block, Code, Heading, Items, Plot, Table, Text, write

RATIOS = {
    "tokens/s": "output_throughput",
    "TTFT p50": "p50_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "ITL p50": "p50_itl_ms",
    "E2E p50": "p50_e2el_ms",
}
"""Figures of `vllm bench serve` that are also shown as multiples of the first arm's."""


def write_report(record: Record, folder: Path) -> None:
    """Write `README.md`, `report.html` and the plots to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [*_introduction(record), Heading("Figures"), _figures(record)]
    blocks.append(Text(_how_to_read(record)))
    if len(record.arms) > 1:
        first = next(iter(record.arms))
        blocks += [Text(f"The same as multiples of **{first}**:"), _ratios(record)]
    workloads = record.profile["workloads"]
    swept = [name for name, each in workloads.items() if len(each["rates"]) > 1]
    if swept:
        plots.draw_throughput(record, swept, folder / "throughput.svg")
        caption = "End-to-end latency against tokens generated a second"
        blocks += [Heading("Throughput against latency"), Plot("throughput.svg", caption)]
    plots.draw_usage(record, folder / "usage.svg")
    blocks += [
        Heading("Requests and blocks over time"),
        Plot("usage.svg", "KV blocks in use, and requests that run and wait"),
        Text(
            "Blocks of the prefix cache that no request uses are free. Sampled every "
            f"{record.profile['scrape_seconds']:g} s; peaks between two samples are missed."
        ),
        Heading("How it was made"),
        Items(_circumstances(record)),
    ]
    write(blocks, folder)


def failures(record: Record) -> list[str]:
    """Return the reasons to fail: failed requests, and requests or blocks left over."""
    found = []
    for run in record.runs:
        where = f"{run.arm}, {run.workload} at {run.rate:g}/s"
        if run.bench["failed"]:
            reasons = dict.fromkeys(error for error in run.bench["errors"] if error)
            found.append(f"{where}: {run.bench['failed']} requests failed: {'; '.join(reasons)}")
        if not run.idle:
            left = ", ".join(f"{name} {value:g}" for name, value in run.left.items())
            found.append(f"{where}: not empty {run.drain_seconds:g} s after the load: {left}")
    return found


def _introduction(record: Record) -> list[Block]:
    profile = record.profile
    pools = [facts["pool"] for facts in record.arms.values() if facts["pool"]]
    pool = f"{pools[0][0]} blocks of {pools[0][1]} tokens" if pools else "of unknown size"
    arms = ", ".join(f"**{arm}**" for arm in record.arms)
    found = failures(record)
    verdict = (
        "**Failed:** " + "; ".join(found) + "."
        if found
        else "No request failed. After every load, no request ran or waited and no KV block was "
        "in use."
    )
    return [
        Heading(f"Load test: {profile['name']}", 1),
        Text(
            f"`vllm bench serve` against {profile['model']}, served by {arms}; pool of each: "
            f"{pool}. Requests arrive as a Poisson process. Each has images that no other request "
            "of the arm has, except where questions share one. All arms get the same requests "
            f"at the same times. All figures are in [{FILE}]({FILE})."
        ),
        Code(record.facts["command"]),
        Text(verdict),
        Text("Workloads, with the fields of a profile:"),
        Code(yaml.safe_dump(profile["workloads"], sort_keys=False, default_flow_style=None)),
    ]


def _figures(record: Record) -> Table:
    has_goodput = bool(record.profile["goodput"])
    header = ["load", "arm", "requests", "done/s", *(["good/s"] if has_goodput else [])]
    header += ["tokens/s", "an answer", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99"]
    header += ["E2E p50", "p99", "peak running", "waiting", "KV use", "preempted", "prefix hits"]
    loads = list(dict.fromkeys((run.workload, run.rate) for run in record.runs))
    runs = sorted(record.runs, key=lambda run: loads.index((run.workload, run.rate)))
    return Table(header, [_row(run, has_goodput) for run in runs])


def _row(run: Run, has_goodput: bool) -> list[str]:
    bench = run.bench
    good = [f"{bench['request_goodput']:.2f}"] if has_goodput else []
    lengths = [n for n, lost in zip(bench["output_lens"], bench["errors"], strict=True) if not lost]
    measured = (("ttft", (50, 90, 99)), ("itl", (50, 90, 99)), ("e2el", (50, 99)))
    return [
        f"`{run.workload}` {run.rate:g}/s",
        run.arm,
        str(bench["completed"]),
        f"{bench['request_throughput']:.2f}",
        *good,
        f"{bench['output_throughput']:.0f}",
        f"{sum(lengths) / max(1, len(lengths)):.1f}",
        *(f"{bench[f'p{p}_{name}_ms']:.0f}" for name, percents in measured for p in percents),
        f"{max(run.running):.0f}",
        f"{max(run.waiting):.0f}",
        f"{max(run.kv_usage):.0%}",
        f"{run.counts['preemptions']:.0f}",
        f"{run.prefix_hit_share:.0%}",
    ]


def _ratios(record: Record) -> Table:
    """Return the figures of the other arms as multiples of the first arm's."""
    first, *others = record.arms
    rows = []
    for base in record.of(first):
        for run in record.runs:
            if run.arm in others and (run.workload, run.rate) == (base.workload, base.rate):
                pairs = [(run.bench[name], base.bench[name]) for name in RATIOS.values()]
                pairs.append((max(run.running), max(base.running)))
                values = (f"{its / other:.2f}" if other else "" for its, other in pairs)
                rows.append([f"`{run.workload}` {run.rate:g}/s", run.arm, *values])
    return Table(["load", "arm", *RATIOS, "peak running"], rows)


def _how_to_read(record: Record) -> str:
    text = (
        "Latencies are milliseconds, measured by the client: to the first token (TTFT), from one "
        "token to the next (ITL), to the last (E2E)."
    )
    if goodput := record.profile["goodput"]:
        limits = ", ".join(f"{name} {value:g} ms" for name, value in goodput.items())
        text += f" *Good* requests stay within {limits}."
    return text + (
        " *Done/s* counts until the last answer, so with few requests it stays below the rate. "
        "*An answer* is its mean length in tokens. Eviction that loses what an answer needs may "
        "change where the model ends it, and with it tokens a second: compare these only where "
        "lengths agree. *Peak running* is vLLM's own count of scheduled requests."
    )


def _circumstances(record: Record) -> list[str]:
    facts = record.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    items = [
        f"{facts['date']}, {facts['seconds']} s in all; {versions}; "
        f"{facts['cores']} cores ({facts['machine']}) for client and servers started here."
    ]
    for arm, its in record.arms.items():
        how = f"`{its['command']}`" if its.get("command") else "found at its URL"
        body = f", requests with `{its['extra_body']}`" if its.get("extra_body") else ""
        start = its.get("start_seconds")
        ready = f", ready after {start:g} s" if start else ""
        items.append(
            f"**{arm}**: {how}{body}{ready}; load average of the client's machine before: "
            f"{its['machine_load_before']:g}."
        )
        if counted := _eviction(record.of(arm)):
            items.append(f"**{arm}**, counted by the plugin: {counted}.")
    return [*items, facts["note"]] if facts["note"] else items


def _eviction(runs: Sequence[Run]) -> str:
    totals: Counter[str] = Counter()
    for run in runs:
        totals.update(run.eviction)
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in totals.items())
