# SPDX-License-Identifier: Apache-2.0
"""The soak with checked answers: its traffic, and that it detects errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import xml.etree.ElementTree
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tqdm import tqdm
from vllm.utils.argparse_utils import FlexibleArgumentParser

from loadtests import soak as command
from loadtests.mix import MIXES, make_cases, make_pressed_cases
from loadtests.soak import EVICTING_ARM, STOCK_ARM, errors_in, parse, plans
from loadtests.soak_report import write_report
from loadtests.verdict import (
    ANSWERED,
    FAILED,
    LEFT,
    Comparison,
    Moment,
    Soak,
    SoakedArm,
    Token,
    Visit,
    compare,
    failures,
    slope,
    undecided,
)
from tests.tools.test_configs import engine_args, serve_parser
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.policies import POLICY_NAMES

pytestmark = pytest.mark.apparatus

__all__ = ["serve_parser"]  # a fixture

SECONDS = 1800.0


# -- traffic --------------------------------------------------------------------------------


def test_the_mix_has_everything_in_it() -> None:
    cases = make_cases()
    assert len({json.dumps([case.messages, dict(case.xargs)]) for case in cases}) == len(cases)
    methods = {case.xargs.get("kv_eviction", "reach") for case in cases}
    assert methods == {*POLICY_NAMES, *MIXES, "none"}
    assert {mix["granularity"] for mix in MIXES.values()} == {"head", "layer"}
    budgets = [str(case.xargs.get("kv_eviction_budget", "")) for case in cases]
    assert any(budget.startswith("auto:") for budget in budgets)
    assert len(set(budgets)) > 6
    assert sum(isinstance(case.messages[0]["content"], str) for case in cases) == 5
    assert len({len(case.messages) for case in cases}) > 1  # chats of one and of two turns
    pages = Counter(json.dumps(case.messages[0]["content"][0]) for case in cases)
    assert max(pages.values()) == 4  # shared prefixes
    assert "vllm_xargs" not in cases[0].body(evicting=False)["extra_body"]
    for kind in {case.kind for case in cases}:
        assert {case.is_long for case in cases if case.kind == kind} == {True, False}


def test_every_round_of_traffic_has_every_request_once() -> None:
    drawn = list(itertools.islice(plans(40, seed=0), 4000))
    for first in range(0, len(drawn), 40):
        assert len({plan.case for plan in drawn[first : first + 40]}) == 40
    assert drawn == list(itertools.islice(plans(40, seed=0), 4000))
    assert 0.4 < sum(plan.is_streamed for plan in drawn) / 4000 < 0.6
    leaving = [plan for plan in drawn if plan.leaves_after is not None]
    assert 0.05 < len(leaving) / 4000 < 0.15
    assert {plan.is_streamed for plan in leaving} == {True, False}


class Failing(command.Client):
    """A client whose every request fails in one way."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__("http://127.0.0.1", make_cases()[:2], EVICTING_ARM)
        self.error, self.num_asked = error, 0

    async def ask(self, plan: command.Plan, heard: list[Token], report: dict[str, Any]) -> bool:
        self.num_asked += 1
        if self.error is None:
            await asyncio.Event().wait()
        raise self.error or AssertionError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (openai.OpenAIError("nobody is there"), "OpenAIError: nobody is there"),
        (httpx.ReadError("a stream broke off"), "ReadError: a stream broke off"),
        (None, "no answer in 0.2 s"),
    ],
)
def test_traffic_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str
) -> None:
    """A few of 1000 requests fail, then no more are sent."""
    monkeypatch.setattr(command, "plans", lambda *args: itertools.islice(plans(*args), 1000))
    monkeypatch.setattr(command, "ANSWER_SECONDS", 0.2)
    client = Failing(error)
    traffic = command.Traffic(client, [[], []], lambda: client.num_asked < 3, 1000, changes=True)
    asyncio.run(traffic.run(1800, tqdm(disable=True)))
    assert {(visit.ended, visit.error) for visit in traffic.visits} == {(FAILED, said)}
    assert 3 <= len(traffic.visits) < 50


def test_under_pressure_each_third_of_the_time_has_the_same_rates() -> None:
    """Or latencies of the first and the last could not be compared."""
    traffic = command.Traffic(Failing(None), [], lambda: True, 2.0, changes=True)
    rates = [traffic.rate_at(share) for share in np.linspace(0, 1, 300, endpoint=False)]
    assert rates[:100] == rates[100:200] == rates[200:]
    assert {min(rates), max(rates)} == {0.4, 6.0}
    assert all(case.max_tokens == 160 and case.is_long for case in make_pressed_cases())


@pytest.mark.parametrize("flags", [command.EVICTING, command.PRESSED])
def test_flags_of_its_servers_are_understood(
    serve_parser: FlexibleArgumentParser, flags: list[str]
) -> None:
    made = engine_args(serve_parser, "model", *command.SERVE, *flags)
    config = EvictionConfig.from_mapping(made.additional_config[CONFIG_KEY])
    assert (config.when == "pressure") == config.debug.check_integrity == (flags == command.PRESSED)


# -- answers --------------------------------------------------------------------------------


def answer(text: str, rival: str = "z", gap: float = 5.0) -> list[Token]:
    """Return tokens, each with one rival that is less likely by `gap`."""
    return [Token(token, -0.5, {token: -0.5, rival: -0.5 - gap}) for token in text]


def token(logprob: float) -> Token:
    return Token("c", logprob, {"c": logprob})


@pytest.mark.parametrize(
    ("heard", "whole", "differs_at", "drift"),
    [
        (answer("abc"), True, None, 0.0),
        (answer("a"), False, None, 0.0),
        (answer("axc"), True, 1, 0.0),
        (answer("axc"), False, 1, 0.0),
        (answer("ab"), True, 2, 0.0),
        (answer(""), True, 0, 0.0),
        (answer("abcd"), True, 3, 0.0),
        (answer("abcd"), False, 3, 0.0),
        ([*answer("ab"), token(-0.5 + 1e-5)], True, None, 1e-5),
        # A wrong page changes log-probabilities long before a greedy token.
        ([*answer("ab"), token(-0.49)], True, None, 0.01),
    ],
)
def test_answers_are_compared_token_by_token(
    heard: list[Token], whole: bool, differs_at: int | None, drift: float
) -> None:
    found = compare(answer("abc"), heard, whole)
    assert (found.differs_at, found.drift) == (differs_at, pytest.approx(drift))
    assert found.is_wrong() == (differs_at is not None or drift > 1e-3)
    assert not found.is_tie()


def test_a_probability_that_is_no_number_is_wrong() -> None:
    assert compare(answer("abc"), [*answer("ab"), token(math.nan)], True).is_wrong()


@pytest.mark.parametrize(
    ("expected_gap", "heard_gap", "is_tie"),
    [(1e-4, 1e-4, True), (1e-4, 0.1, False), (0.1, 1e-4, False)],
)
def test_a_near_tie_is_near_in_both_answers(
    expected_gap: float, heard_gap: float, is_tie: bool
) -> None:
    expected = [*answer("a"), *answer("b", rival="x", gap=expected_gap)]
    heard = [*answer("a"), *answer("x", rival="b", gap=heard_gap)]
    found = compare(expected, heard, whole=True)
    assert found.gap == pytest.approx(max(expected_gap, heard_gap))
    assert (found.is_tie(), found.is_wrong()) == (is_tie, not is_tie)


# -- verdict --------------------------------------------------------------------------------


def visits(slower: float = 1.0, seconds: float = SECONDS) -> list[Visit]:
    """Return requests of two cases, one ten times as slow as the other and mostly early."""
    rng, found = random.Random(0), []
    for begin in range(int(seconds)):
        is_late = begin > seconds * 2 / 3
        case = int(rng.random() < (0.2 if is_late else 0.6))
        taken = (1 + 9 * case) * rng.uniform(0.8, 1.2) * (slower if is_late else 1)
        found.append(Visit(case, begin, taken, ANSWERED, False, 8, Comparison(1e-6)))
    return found


def moments(growth: float = 0.0, seconds: float = SECONDS) -> list[Moment]:
    """Return memory that fills in the first third, fluctuates, and grows in MiB per hour."""
    rng, found = random.Random(1), []
    for time in range(int(seconds)):
        filled = 1000 + 200 * min(1, 3 * time / seconds)
        memory = filled + growth * time / 3600 + rng.uniform(-2, 2)
        found.append(Moment(time, memory, 0.5, 6.0, 0.0))
    return found


@pytest.fixture
def soak() -> Soak:
    """Return a soak without errors."""
    arm = SoakedArm("vllm serve", (80, 32), SECONDS, visits(), [Comparison(0.0)] * 2, moments())
    arm.left = {"running": 0.0, "waiting": 0.0, "kv_usage": 0.0, "blocks_held": 0.0}
    facts = {
        "command": "python -m loadtests.soak",
        "date": "2026-11-22",
        "versions": {"vllm": "0.32.0"},
        "cores": 2,
        "machine": "x86_64",
        "note": "",
        "machine_load_before": 0.1,
        "rate": 3.0,
        "in_flight": 12,
    }
    return Soak(facts, ["methods", "text"], {EVICTING_ARM: arm})


WRONG = Comparison(0.0, 3)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("visits", Visit(0, 5.0, 1.0, ANSWERED, True, 8, WRONG), "1 answers are not those"),
        ("visits", Visit(0, 5.0, 1.0, LEFT, True, 8, WRONG), "1 answers are not those"),
        ("visits", Visit(0, 5.0, 1.0, FAILED, True, 0, None, "lost"), "1 requests failed: lost"),
        ("afterwards", WRONG, "1 answers are not those"),
        ("log_errors", "ERROR Traceback", "1 errors in its log, first: ERROR"),
        ("kv_usage", 0.01, "not empty in the end: kv_usage 0.01"),
        ("blocks_held", 3.0, "not empty in the end: blocks_held 3"),
        ("running", 1.0, "not empty in the end: running 1"),
    ],
)
def test_what_went_wrong_is_said(
    soak: Soak, tmp_path: Path, name: str, value: object, said: str
) -> None:
    arm = soak.arms[EVICTING_ARM]
    if name in arm.left:
        arm.left[name] = value  # type: ignore[assignment]
    else:
        setattr(arm, name, [*getattr(arm, name)[1:], value])
    (found,) = failures(soak)
    assert found.startswith(f"{EVICTING_ARM}: {said}")
    write_report(soak, tmp_path)
    assert f"**Failed:** {EVICTING_ARM}: {said}" in (tmp_path / "README.md").read_text()


def test_a_soak_that_ended_early_fails(soak: Soak, tmp_path: Path) -> None:
    """Its record is still reported."""
    arm = soak.arms[EVICTING_ARM]
    arm.left, arm.afterwards, arm.visits = {}, [], arm.visits[:5]
    assert failures(soak) == [f"{EVICTING_ARM}: it ended before all was asked"]
    write_report(soak, tmp_path)


def test_under_pressure_requests_are_told_apart(soak: Soak, tmp_path: Path) -> None:
    arm = soak.arms[EVICTING_ARM]
    arm.command += " --kv-eviction-when pressure"
    changes = {0: "pressure", 1: "restored", 2: "pressure", 3: "preempted"}
    for number, state in changes.items():
        arm.visits[number] = arm.visits[number]._replace(state=state, comparison=None)
    assert failures(soak) == []
    write_report(soak, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert f"| {len(arm.visits) - 4} | 2 | 1 | 1 | 0 |" in text
    assert "**Passed:** every request that stayed whole was answered" in text
    arm.visits[1] = arm.visits[1]._replace(state="pressure")
    assert failures(soak) == [f"{EVICTING_ARM}: no request ended restored: the soak was too short"]


def test_memory_and_latency_have_to_be_flat(soak: Soak) -> None:
    """At an equal mix. A soak without errors passes, and one without answers does not."""
    arm = soak.arms[EVICTING_ARM]
    assert (failures(soak), undecided(soak)) == ([], [])
    found = arm.slowdown()
    assert found is not None
    assert found.low < 1 < found.high < found.low + 0.1
    soak.arms[EVICTING_ARM] = replace(arm, moments=moments(growth=200))
    (failure,) = failures(soak)
    assert "memory grows (MiB an hour): 199 [" in failure
    # Growth that stock shows as well is not counted.
    soak.control, soak.arms[STOCK_ARM] = STOCK_ARM, replace(arm, moments=moments(growth=210))
    assert failures(soak) == []
    soak.control = None
    soak.arms = {EVICTING_ARM: replace(arm, visits=visits(slower=1.3))}
    (failure,) = failures(soak)
    assert "latency rises (ratio): 1.2" in failure
    short = replace(arm, seconds=60.0, moments=moments(200, 60), visits=visits(2, 60))
    soak.arms = {EVICTING_ARM: short}
    assert failures(soak) == []
    assert ["too short" in line for line in undecided(soak)] == [True, True]
    short.visits.clear()
    assert failures(soak) == [f"{EVICTING_ARM}: no request was answered"]


def test_autocorrelation_widens_the_interval_of_a_slope() -> None:
    """A random walk has no slope, no matter how long it is."""
    times = [step / 3600 for step in range(500)]
    rng, covered, widths = random.Random(3), 0, ([], [])  # type: ignore[var-annotated]
    for _ in range(200):
        noise = [rng.gauss(0, 1) for _ in times]
        found = slope(times, [10 * t + n for t, n in zip(times, noise, strict=True)])
        covered += found.low < 10 < found.high
        walk = slope(times, list(itertools.accumulate(noise)))
        for width, of in zip(widths, (found, walk), strict=True):
            width.append(of.high - of.low)
    assert 0.9 < covered / 200 < 0.99
    assert sorted(widths[1])[100] > 20 * sorted(widths[0])[100]


def test_record_survives_its_file_and_the_report_is_whole(soak: Soak, tmp_path: Path) -> None:
    lost = Visit(1, 2.0, 3.0, FAILED, False, 0, None, "APIError: lost")
    soak.arms[EVICTING_ARM].visits += [lost, lost._replace(ended=LEFT, comparison=WRONG)]
    soak.write(tmp_path)
    assert asdict(Soak.read(tmp_path)) == asdict(soak)
    assert command.main(["--report-only", str(tmp_path)]) == 1
    xml.etree.ElementTree.parse(tmp_path / "watched.svg")
    text = (tmp_path / "README.md").read_text()
    assert "`text` 1, 2 s: wrong at token 3, no near rival" in text
    assert (tmp_path / "report.html").exists()


def test_errors_of_a_log_are_found(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    lines = ["INFO 11-22 all is well", "(EngineCore) ERROR 11-22 it is not", "Traceback (most"]
    log.write_text("\n".join(lines))
    assert errors_in(log) == lines[1:]


# -- a real run -----------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.slow
def test_a_short_soak_of_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seventh kind of request, more at a time than the pool holds."""
    # With one thread, rounding does not differ between batches (see below).
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(command, "OUTPUT", tmp_path)
    monkeypatch.setattr(command, "plans", lambda *args: itertools.islice(plans(*args), 60))
    cases = make_cases()[::7]
    arguments = ["--rate", "10", "--output", str(tmp_path)]
    soak = Soak({}, [case.kind for case in cases])
    command.run(parse(arguments), soak, cases)
    assert failures(soak) == []
    (arm,) = soak.arms.values()
    assert asdict(Soak.read(tmp_path)) == asdict(soak)
    assert arm.pool == (80, 32)
    assert arm.eviction["requests"] > 0
    assert len(arm.afterwards) == len(cases)
    assert len(arm.visits) == 60
    assert len(arm.ended(ANSWERED)) > 30
    assert max(visit.num_tokens for visit in arm.visits) == 64
    assert max(moment.running for moment in arm.moments) > 1
    assert min(moment.memory_mib for moment in arm.moments) > 100
    # Rounding differs between batches, so a drift of 0 would mean copied answers.
    assert 0 < arm.drift < 1e-3
