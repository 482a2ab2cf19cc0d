# SPDX-License-Identifier: Apache-2.0
"""The record of a soak, and the verdict on its answers, blocks, memory and latency."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from measure.samples import Sample
from measure.statistics import RESAMPLES, SEED
from vllm_tgvkv.judge.statistics import CONFIDENCE_Z, Estimate

FILE = "results.json"
STRETCHES = 20
"""Stretches per third of the time, the bootstrap's units: close requests are correlated."""

ANSWERED, LEFT, FAILED = "answered", "left", "failed"
"""How a request ended: completely, because its client left, or with an error."""


PRESSED = "--kv-eviction-when pressure"
"""Part of the command of a server that evicts when memory is short."""
TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may be exchanged."""
DRIFT = 1e-3
"""Largest difference of log-probabilities of equal tokens."""
GROWTH = 60.0
"""Largest growth of memory, in MiB per hour."""
SLOWDOWN = 1.1
"""Largest ratio of latency in the last third of the time to the first."""
LEAST_SECONDS = 600
"""Shorter soaks leave growth and slowdown undecided: caches still fill."""


class Token(NamedTuple):
    """One token of an answer."""

    token: str
    logprob: float
    rivals: Mapping[str, float]
    """Log-probabilities of the likeliest tokens."""


class Comparison(NamedTuple):
    """The difference between an answer and the expected one."""

    drift: float
    """Largest difference of log-probabilities before the tokens differ."""
    differs_at: int | None = None
    """Index of the first token that differs, is missing or is surplus."""
    gap: float | None = None
    """Difference of the two tokens' log-probabilities, the larger of both answers; None if
    one of them is not among the rivals."""

    def is_tie(self) -> bool:
        return self.gap is not None and self.gap < TIE

    def is_wrong(self) -> bool:
        differs = self.differs_at is not None and not self.is_tie()
        return differs or not self.drift <= DRIFT


def compare(expected: Sequence[Token], heard: Sequence[Token], whole: bool) -> Comparison:
    """Compare an answer with the expected one; `whole` is false if its client left early."""
    drift = 0.0
    for index, (right, token) in enumerate(zip(expected, heard, strict=False)):
        if right.token != token.token:
            gap = max(_gap(right, token.token), _gap(token, right.token))
            return Comparison(drift, index, gap if math.isfinite(gap) else None)
        drift = max(drift, abs(right.logprob - token.logprob))
        if math.isnan(token.logprob):
            return Comparison(drift, index)
    if len(heard) > len(expected) or (whole and len(heard) < len(expected)):
        return Comparison(drift, min(len(heard), len(expected)))
    return Comparison(drift)


def _gap(token: Token, rival: str) -> float:
    return token.logprob - token.rivals.get(rival, -math.inf)


class Visit(NamedTuple):
    """One request of the mixed traffic."""

    case: int
    begin: float
    """Seconds since the traffic began."""
    seconds: float
    ended: str
    is_streamed: bool
    num_tokens: int
    comparison: Comparison | None
    """None if the request failed."""
    error: str = ""
    state: str = ""
    """`pressure` if it was shrunk to the end, `restored` if its prompt came back last, `preempted`
    if a preemption undid its cuts. Such an answer is not compared."""


class Moment(NamedTuple):
    """The server at one moment of the mixed traffic."""

    time: float
    """Seconds since the traffic began."""
    memory_mib: float
    kv_usage: float
    running: float
    preemptions: float

    @classmethod
    def of(cls, sample: Sample, begin: float) -> Moment:
        """Return a sample's moment; the traffic began at `begin`, on the same clock."""
        memory = round(sample.memory_mib or 0, 1)
        usage = round(sample.kv_usage, 3)
        return cls(round(sample.time - begin, 1), memory, usage, sample.running, sample.preemptions)


@dataclass
class SoakedArm:
    """One server's part of a soak."""

    command: str
    pool: tuple[int, int] | None
    seconds: float
    """Duration of the mixed traffic."""
    visits: list[Visit] = field(default_factory=list)
    afterwards: list[Comparison] = field(default_factory=list)
    """Every case asked alone after the traffic."""
    moments: list[Moment] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    """Running and waiting requests and blocks in use at the end; all must be 0."""
    eviction: dict[str, float] = field(default_factory=dict)
    """Counters of the plugin."""
    log_errors: list[str] = field(default_factory=list)
    """Lines of the server's log that report an error."""

    @property
    def wrong(self) -> list[Comparison]:
        return [c for c in self._comparisons if c.is_wrong()]

    @property
    def ties(self) -> list[Comparison]:
        return [c for c in self._comparisons if c.is_tie() and not c.is_wrong()]

    @property
    def drift(self) -> float:
        return max((c.drift for c in self._comparisons), default=0.0)

    @property
    def _comparisons(self) -> list[Comparison]:
        return [*(v.comparison for v in self.visits if v.comparison), *self.afterwards]

    def ended(self, how: str) -> list[Visit]:
        return [visit for visit in self.visits if visit.ended == how]

    @property
    def states(self) -> Counter[str]:
        """The number of answers by `Visit.state`, where requests are evicted under pressure."""
        return Counter(visit.state or "whole" for visit in self.ended(ANSWERED))

    def growth(self) -> Estimate | None:
        """Return MiB per hour over the last two thirds; None with too few samples."""
        late = [moment for moment in self.moments if moment.time >= self.seconds / 3]
        if len(late) < 10:
            return None
        return slope([moment.time / 3600 for moment in late], [m.memory_mib for m in late])

    def slowdown(self) -> Estimate | None:
        """Return the ratio of latencies, last third to first; None with too few requests."""
        return slowdown(self.ended(ANSWERED), self.seconds)


def slope(times: Sequence[float], values: Sequence[float]) -> Estimate:
    """Return the slope of least squares; its interval allows for autocorrelated residuals."""
    x, y = np.asarray(times, np.float64), np.asarray(values, np.float64)
    x = x - x.mean()
    steepness = float(x @ y / (x @ x))
    rest = y - y.mean() - steepness * x
    power = float(rest @ rest)
    if power == 0:
        return Estimate(steepness, steepness, steepness)
    # First-order autocorrelation r leaves (1 - r) / (1 + r) times as many independent values.
    again = min(max(float(rest[1:] @ rest[:-1]) / power, 0.0), 0.99)
    error = math.sqrt(power / (len(x) - 2) / float(x @ x) * (1 + again) / (1 - again))
    half = CONFIDENCE_Z * error
    return Estimate(steepness, steepness - half, steepness + half)


def slowdown(visits: Sequence[Visit], seconds: float) -> Estimate | None:
    """Return the ratio of median latencies, last third to first, each over its case's median.

    Dividing by the case's median removes differences in the mix. The interval is that of a
    bootstrap over short stretches of time.
    """
    by_case: dict[int, list[float]] = defaultdict(list)
    for visit in visits:
        by_case[visit.case].append(visit.seconds)
    medians = {case: statistics.median(times) for case, times in by_case.items()}
    stretches: dict[int, list[float]] = defaultdict(list)
    for visit in visits:
        stretch = min(int(3 * STRETCHES * visit.begin / seconds), 3 * STRETCHES - 1)
        stretches[stretch].append(visit.seconds / medians[visit.case])
    first = [np.array(x) for number, x in stretches.items() if number < STRETCHES]
    last = [np.array(x) for number, x in stretches.items() if number >= 2 * STRETCHES]
    if min(len(first), len(last)) < STRETCHES // 2:
        return None
    rng = np.random.default_rng(SEED)

    def drawn(parts: list[np.ndarray]) -> float:
        chosen = rng.integers(len(parts), size=len(parts))
        return float(np.median(np.concatenate([parts[i] for i in chosen])))

    ratios = [drawn(last) / drawn(first) for _ in range(RESAMPLES // 10)]
    low, high = np.quantile(ratios, (0.025, 0.975))
    ratio = float(np.median(np.concatenate(last)) / np.median(np.concatenate(first)))
    return Estimate(ratio, float(low), float(high))


@dataclass
class Soak:
    """A soak, complete or interrupted."""

    facts: dict[str, Any]
    kinds: list[str]
    """Kind of each case."""
    arms: dict[str, SoakedArm] = field(default_factory=dict)
    control: str | None = None
    """Name of the stock server's arm, if there is one."""

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Tuples become lists: field names for thousands of rows would be most of the file.
        text = json.dumps(asdict(self), separators=(",", ":"))
        (folder / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Soak:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        for arm in values["arms"].values():
            arm["pool"] = arm["pool"] and tuple(arm["pool"])
            arm["afterwards"] = [Comparison(*row) for row in arm["afterwards"]]
            arm["moments"] = [Moment(*row) for row in arm["moments"]]
            visits = [Visit(*row) for row in arm["visits"]]
            arm["visits"] = [v._replace(comparison=_compared(v.comparison)) for v in visits]
        values["arms"] = {name: SoakedArm(**arm) for name, arm in values["arms"].items()}
        return cls(**values)


def _compared(row: Any) -> Comparison | None:
    return None if row is None else Comparison(*row)


def failures(soak: Soak) -> list[str]:
    """Return the reasons to fail; the control's memory and latency are vLLM's and fail nothing."""
    return [
        f"{name}: {what}"
        for name, arm in soak.arms.items()
        for what in (*_broken(arm), *(() if name == soak.control else _drifted(soak, arm)))
    ]


def undecided(soak: Soak) -> list[str]:
    """Return what the soak was too short, or the machine too noisy, to decide."""
    found = []
    for name, arm in soak.arms.items():
        for what, estimate, limit in _trends(arm):
            if estimate is None:
                found.append(f"{name}: too short to tell whether {what}")
            elif estimate.low <= limit < estimate.high:
                found.append(f"{name}: whether {what} beyond {limit:g}")
    return found


def _broken(arm: SoakedArm) -> list[str]:
    found = []
    if lost := arm.ended(FAILED):
        reasons = "; ".join(dict.fromkeys(visit.error for visit in lost))
        found.append(f"{len(lost)} requests failed: {reasons[:500]}")
    if not arm.ended(ANSWERED):
        found.append("no request was answered")
    if arm.wrong:
        found.append(f"{len(arm.wrong)} answers are not those of the same requests alone")
    if PRESSED in arm.command:
        missing = (state for state in ("whole", "pressure", "restored") if not arm.states[state])
        found.extend(f"no request ended {state}: the soak was too short" for state in missing)
    if not arm.left:
        found.append("it ended before all was asked")
    if any(arm.left.values()):
        left = ", ".join(f"{what} {value:g}" for what, value in arm.left.items() if value)
        found.append(f"not empty in the end: {left}")
    if arm.log_errors:
        found.append(f"{len(arm.log_errors)} errors in its log, first: {arm.log_errors[0][:300]}")
    return found


def _drifted(soak: Soak, arm: SoakedArm) -> list[str]:
    control = soak.arms.get(soak.control or "")
    found = []
    for number, (what, estimate, limit) in enumerate(_trends(arm)):
        # Growth that stock vLLM shows as well is not ours.
        other = _trends(control)[number][1] if control else None
        if estimate is not None and estimate.low > max(limit, other.high if other else limit):
            interval = f"[{estimate.low:.3g}, {estimate.high:.3g}]"
            found.append(f"{what}: {estimate.mean:.3g} {interval}, limit {limit:g}")
    return found


def _trends(arm: SoakedArm) -> list[tuple[str, Estimate | None, float]]:
    is_long = arm.seconds >= LEAST_SECONDS
    return [
        ("memory grows (MiB an hour)", arm.growth() if is_long else None, GROWTH),
        ("latency rises (ratio)", arm.slowdown() if is_long else None, SLOWDOWN),
    ]
