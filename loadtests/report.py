# SPDX-License-Identifier: Apache-2.0
"""The report of a load test, written from its record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests import plots
from loadtests.drift import Drift, drifts
from loadtests.record import FILE, Record, Run
from measure.document import Block, Code, Heading, Items, Plot, Table, Text, write


def write_report(record: Record, folder: Path) -> None:
    """Write `README.md`, `report.html` and the plots to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = _introduction(record)
    blocks += _soak(record, folder) if record.is_soak else _sweep(record, folder)
    blocks += _circumstances(record)
    write(blocks, folder)


def failures(record: Record) -> list[str]:
    """Return the reasons to fail: failed requests, requests or blocks left over, growing memory."""
    found = []
    for run in record.runs:
        where = f"{run.arm}, {run.workload} at {run.rate:g}/s"
        if run.bench["failed"]:
            reasons = dict.fromkeys(error for error in run.bench["errors"] if error)
            found.append(f"{where}: {run.bench['failed']} requests failed: {'; '.join(reasons)}")
        if not run.idle:
            left = ", ".join(f"{name} {value:g}" for name, value in run.left.items())
            found.append(f"{where}: not empty {run.drain_seconds:g} s after the load: {left}")
    if record.is_soak:
        limit = record.profile["soak"]["max_growth_mib"]
        for arm in record.arms:
            growth = memory_growth(record.of(arm))
            if growth is not None and growth > limit:
                found.append(f"{arm}: memory grew by {growth:.0f} MiB; the limit is {limit:g}")
    return found


def memory_growth(runs: Sequence[Run]) -> float | None:
    """Return the growth of median memory from the middle to the last third of a soak, in MiB.

    The first third is left out, in which caches fill. None without figures, or with few.
    """
    parts = _memory_thirds(runs)
    return None if parts is None else parts[2] - parts[1]


def _memory_thirds(runs: Sequence[Run]) -> list[float] | None:
    """Return the median memory of three parts of equal time, in MiB."""
    samples = [
        (time, memory)
        for run in runs
        for time, memory in zip(run.times, run.memory_mib, strict=True)
        if memory is not None
    ]
    if not samples:
        return None
    begin, end = samples[0][0], samples[-1][0]
    parts: list[list[float]] = [[], [], []]
    for time, memory in samples:
        parts[min(2, int(3 * (time - begin) / max(end - begin, 1e-9)))].append(memory)
    return [statistics.median(part) for part in parts] if all(parts) else None


# -- parts ----------------------------------------------------------------------------------


def _introduction(record: Record) -> list[Block]:
    profile = record.profile
    what = "Soak" if record.is_soak else "Load test"
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
        Heading(f"{what}: {profile['name']}", 1),
        Text(
            f"`vllm bench serve` against {profile['model']}, served by {arms}; pool of each: "
            f"{pool}. Requests arrive as a Poisson process, each with images no other request of "
            "the arm has, but for those that share one on purpose. All arms get the same requests "
            f"at the same times. All figures are in [{FILE}]({FILE})."
        ),
        Code(record.facts["command"]),
        Text(verdict),
        _workloads(record),
    ]


def _workloads(record: Record) -> Table:
    rows = []
    for name, workload in record.profile["workloads"].items():
        rates = ", ".join(f"{rate:g}" for rate in workload["rates"])
        rows.append(
            [f"`{name}`", rates, f"{workload['seconds']:g} s", _prompt(workload), _ends(workload)]
        )
    return Table(["workload", "requests/s", "for", "prompts", "answers"], rows, words=True)


def _prompt(workload: dict[str, Any]) -> str:
    if "tasks" not in workload:
        spread, prefix = workload["spread"], workload["prefix_tokens"]
        low, high = ((1 + sign * spread) * workload["input_tokens"] for sign in (-1, 1))
        images = (
            "1 noise image" if workload["images"] == 1 else f"{workload['images']} noise images"
        )
        text = f"{images}, text of {low:.0f} to {high:.0f} tokens"
        return text + (f" after {prefix} that all share" if prefix else "")
    shared = workload["questions_per_image"]
    sizes = ", ".join(f"x{scale}" for scale in workload["scales"])
    text = f"pages ({', '.join(workload['tasks'])})" + (f", size {sizes}" if sizes != "x1" else "")
    return text + (f", {shared} questions each" if shared > 1 else "")


def _ends(workload: dict[str, Any]) -> str:
    tokens = workload["output_tokens"]
    if "tasks" not in workload:
        low, high = ((1 + sign * workload["spread"]) * tokens for sign in (-1, 1))
        return f"{low:.0f} to {high:.0f} tokens"
    return f"natural, at most {tokens} tokens" if workload["natural_end"] else f"{tokens} tokens"


def _sweep(record: Record, folder: Path) -> list[Block]:
    swept = [name for name, w in record.profile["workloads"].items() if len(w["rates"]) > 1]
    blocks: list[Block] = [Heading("Figures"), _figures(record), Text(_how_to_read(record))]
    if len(record.arms) > 1:
        blocks += _ratios(record)
    if swept:
        plots.draw_throughput(record, swept, folder / "throughput.svg")
        plots.draw_percentiles(record, swept, folder / "percentiles.svg")
        blocks += [
            Heading("Throughput against latency"),
            Plot("throughput.svg", "End-to-end latency against tokens generated a second"),
            Heading("Time to first token and inter-token latency"),
            Plot("percentiles.svg", "Percentiles of both against the request rate"),
        ]
    plots.draw_running(record, folder / "running.svg")
    plots.draw_usage(record, folder / "usage.svg")
    blocks += [
        Heading("Running requests and blocks in use"),
        Plot("running.svg", "Most requests that ran at a time, and most that waited"),
        Plot("usage.svg", "KV blocks in use over time"),
        Text(
            "Blocks of the prefix cache that no request uses are free. Sampled every "
            f"{record.profile['scrape_seconds']:g} s; peaks between two samples are missed."
        ),
    ]
    return blocks + _drift(record, folder)


def _figures(record: Record) -> Table:
    has_goodput = bool(record.profile["goodput"])
    header = ["load", "arm", "requests", "done/s"]
    header += ["good/s"] if has_goodput else []
    header += ["tokens/s", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "E2E p50", "p99"]
    header += ["peak running", "waiting", "KV use", "preempted", "prefix hits"]
    runs = record.runs
    if not record.is_soak:  # the arms of a load next to each other
        loads = list(dict.fromkeys((run.workload, run.rate) for run in runs))
        runs = sorted(runs, key=lambda run: loads.index((run.workload, run.rate)))
    rows = [_row(run, has_goodput) for run in runs]
    return Table(header, rows)


def _ratios(record: Record) -> list[Block]:
    """Return the figures of the other arms as multiples of the first arm's."""
    measures = {
        "tokens/s": "output_throughput",
        "TTFT p50": "p50_ttft_ms",
        "p99": "p99_ttft_ms",
        "ITL p50": "p50_itl_ms",
        "E2E p50": "p50_e2el_ms",
    }
    first, *others = record.arms
    rows = []
    for reference in record.of(first):
        for run in record.runs:
            if run.arm in others and (run.workload, run.rate) == (
                reference.workload,
                reference.rate,
            ):
                pairs = [(run.bench[name], reference.bench[name]) for name in measures.values()]
                pairs.append((max(run.running), max(reference.running)))
                rows.append(
                    [
                        f"`{run.workload}` {run.rate:g}/s",
                        run.arm,
                        *(f"{its / other:.2f}" if other else "" for its, other in pairs),
                    ]
                )
    return [
        Text(f"The same as multiples of **{first}**:"),
        Table(["load", "arm", *measures, "peak running"], rows),
    ]


def _row(run: Run, has_goodput: bool) -> list[str]:
    bench = run.bench
    row = [f"`{run.workload}` {run.rate:g}/s", run.arm]
    row += [str(bench["completed"]), f"{bench['request_throughput']:.2f}"]
    row += [f"{bench['request_goodput']:.2f}"] if has_goodput else []
    row.append(f"{bench['output_throughput']:.0f}")
    row += [_milliseconds(bench[f"p{p}_ttft_ms"]) for p in (50, 90, 99)]
    row += [_milliseconds(bench[f"p{p}_itl_ms"]) for p in (50, 90, 99)]
    row += [_milliseconds(bench[f"p{p}_e2el_ms"]) for p in (50, 99)]
    row += [f"{max(run.running):.0f}", f"{max(run.waiting):.0f}", f"{max(run.kv_usage):.0%}"]
    return [*row, f"{run.counts['preemptions']:.0f}", f"{run.prefix_hit_share:.0%}"]


def _milliseconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


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
        "*Peak running* is vLLM's own count of scheduled requests."
    )


def _drift(record: Record, folder: Path) -> list[Block]:
    found = drifts(record)
    if not found:
        return []
    drawable = [drift for drift in found if drift.lengths]
    blocks: list[Block] = [
        Heading("Output-length drift"),
        Text(
            "The same prompts, greedy, answers that end where the model ends them. Eviction that "
            "loses what an answer needs may change its length, and with it throughput: compare "
            "tokens a second only where lengths agree. Two stock servers differ a little as well, "
            "because a request's neighbours in the batch change rounding."
        ),
        _drift_table(found),
    ]
    if drawable:
        plots.draw_drift(drawable, folder / "drift.svg")
        blocks.append(Plot("drift.svg", "Tokens of the same answer in both arms; area is count"))
    return blocks


def _drift_table(found: Sequence[Drift]) -> Table:
    rows = []
    for drift in found:
        mean_reference, mean = drift.means
        difference = drift.difference
        cut_reference, cut = drift.cut
        rows.append(
            [
                f"`{drift.workload}` {drift.rate:g}/s",
                drift.arm,
                str(len(drift.lengths)),
                f"{mean_reference:.2f}",
                f"{mean:.2f}",
                f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]",
                str(drift.same_length),
                str(drift.same_text),
                f"{cut_reference} : {cut}",
            ]
        )
    reference = found[0].reference
    header = ["load", "arm", "answers", f"tokens, {reference}", "tokens, arm", "longer by"]
    return Table([*header, "same length", "same text", f"at the limit, {reference} : arm"], rows)


def _soak(record: Record, folder: Path) -> list[Block]:
    plots.draw_soak(record, folder / "soak.svg")
    header = ["arm", "runs", "minutes", "requests", "failed", "preempted", "peak running"]
    header += ["slowest drain", "memory, first", "middle", "last", "growth"]
    rows = []
    for arm in record.arms:
        runs = record.of(arm)
        if not runs:
            continue
        parts = _memory_thirds(runs)
        rows.append(
            [
                arm,
                str(len(runs)),
                f"{runs[-1].times[-1] / 60:.1f}",
                str(sum(run.bench["completed"] for run in runs)),
                str(sum(run.bench["failed"] for run in runs)),
                f"{sum(run.counts['preemptions'] for run in runs):.0f}",
                f"{max(max(run.running) for run in runs):.0f}",
                f"{max(run.drain_seconds for run in runs):.1f} s",
                *([f"{part:.0f} MiB" for part in parts] if parts else ["not known"] * 3),
                f"{parts[2] - parts[1]:+.0f} MiB" if parts else "not known",
            ]
        )
    limit = record.profile["soak"]["max_growth_mib"]
    return [
        Heading("Memory and blocks over time"),
        Table(header, rows),
        Plot("soak.svg", "KV blocks in use, running requests and memory over time"),
        Text(
            "Memory is that of all processes of the server, medians of three thirds of the time. "
            "The first third does not count: caches fill and the allocator finds its size. Growth "
            f"from the middle to the last third is at most {limit:g} MiB, or the soak has failed. "
            "Black marks: after each run, when nothing runs, no block may be in use."
        ),
        Heading("Runs"),
        _figures(record),
    ]


def _circumstances(record: Record) -> list[Block]:
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
    if facts["note"]:
        items.append(facts["note"])
    return [Heading("How it was made"), Items(items)]


def _eviction(runs: Sequence[Run]) -> str:
    totals: dict[str, float] = {}
    for run in runs:
        for name, value in run.eviction.items():
            totals[name] = totals.get(name, 0.0) + value
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in totals.items())
