# SPDX-License-Identifier: Apache-2.0
"""The evaluation: its statistics, its log, and a quick grid through the real engine."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluation import plots, run
from evaluation.answers import Answer, AnswerLog, compare
from evaluation.arms import FULL, METHODS, MIXES, EvaluatedArm, crossed
from evaluation.engine import Kept
from evaluation.pictures import count_patches
from evaluation.questions import questions
from evaluation.record import Record
from evaluation.results import ALL, Side, cell, compare_methods, compare_pairs
from measure.statistics import bootstrap, holm, mcnemar, wilson
from vllm_tgvkv.config.server import EvictionConfig

pytestmark = pytest.mark.apparatus

ANSWER = Answer("value", 0, "tgv@0.1", "123", "1111", 600, 60.0, 38, 4)


# -- statistics -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson(successes: int, total: int, low: float, high: float) -> None:
    estimate = wilson(successes, total)
    assert estimate.mean == successes / total
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (0, 5, 2 / 32),
        (1, 9, 2 * 11 / 1024),
        (9, 1, 2 * 11 / 1024),
        (86, 150, 3.716e-05),  # the example of R's mcnemar.test, exact
    ],
)
def test_mcnemar(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p, rel=1e-3)


def test_mcnemar_of_many_questions() -> None:
    assert 0 < mcnemar(2000, 2500) < 1e-12


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_bootstrap_agrees_with_the_normal_interval() -> None:
    values = [1.0] * 300 + [0.0] * 500 + [-1.0] * 200
    estimate = bootstrap(values)
    half = 1.96 * np.std(values) / np.sqrt(len(values))
    assert estimate.mean == pytest.approx(0.1)
    assert estimate.low == pytest.approx(0.1 - half, abs=0.004)
    assert estimate.high == pytest.approx(0.1 + half, abs=0.004)


def test_bootstrap_is_deterministic() -> None:
    assert bootstrap([0.0, 0.25, 1.0] * 20) == bootstrap([0.0, 0.25, 1.0] * 20)


# -- answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "hits"),
    [
        ([5, 6, 2], "111"),
        ([5, 7, 2], "101"),
        ([5, 2], "100"),
        ([5, 6, 6, 2], "110"),
        ([], "000"),
    ],
)
def test_tokens_are_compared_by_place(given: list[int], hits: str) -> None:
    assert compare(given, [5, 6, 2]) == hits


def test_first_and_later_tokens() -> None:
    answer = replace(ANSWER, hits="1010")
    assert answer.first
    assert answer.later == pytest.approx(1 / 3)
    assert not answer.is_exact
    assert ANSWER.is_exact


def test_log_continues_after_an_interruption(tmp_path: Path) -> None:
    other = replace(ANSWER, number=1)
    with AnswerLog(tmp_path, "abc") as log:
        log.add(ANSWER)
        log.add(other)
    with log.path.open("a") as file:
        file.write(json.dumps({"task": "value"})[:9])  # killed while writing
    with AnswerLog(tmp_path, "abc") as log:
        assert len(log) == 2
        assert log[other.key] == other
        log.add(replace(ANSWER, number=2))
    with AnswerLog(tmp_path, "abc") as log:
        assert len(log) == 3
    with AnswerLog(tmp_path, "other") as log:
        assert ANSWER.key not in log
    with AnswerLog(tmp_path, "abc", fresh=True) as log:
        assert len(log) == 0


# -- arms and results -----------------------------------------------------------------------


def test_every_mix_is_valid() -> None:
    config = EvictionConfig.from_mapping({"policy": "tgv", "methods": MIXES})
    assert set(MIXES) <= set(config.methods)


def test_full_cache_comes_once() -> None:
    arms = crossed(["tgv", "random"], [1.0, 0.1])
    assert [arm.key for arm in arms] == ["none", "tgv@0.1", "random@0.1"]
    assert FULL.xargs == {"kv_eviction": "none", "kv_eviction_report": 1}


def test_no_two_questions_share_a_page() -> None:
    asked = questions(["value", "row", "chat"], 50)
    assert len({question.index for question in asked}) == len(asked)


def side(name: str, right: str) -> Side:
    return Side(name, [replace(ANSWER, number=n, hits=f"1{hit}") for n, hit in enumerate(right)])


def test_comparison_counts_where_only_one_is_right() -> None:
    (claim,) = compare_pairs([(0.1, side("a", "1111100000"), side("b", "1000010000"))])
    assert (claim.first_only, claim.second_only) == (4, 1)
    assert claim.difference.mean == pytest.approx(0.3)
    assert claim.p == claim.p_holm == pytest.approx(mcnemar(4, 1))


def test_methods_are_compared_best_first(tmp_path: Path) -> None:
    right = {"a": "0001", "b": "0111", "c": "0011"}
    arms = [EvaluatedArm(name, 0.1) for name in right]
    with AnswerLog(tmp_path, "abc") as log:
        for arm in arms:
            for answer in side(arm.method, right[arm.method]).answers:
                log.add(replace(answer, arm=arm.key))
        claims = compare_methods(log, arms, questions(["value"], 4))
    assert [(claim.first, claim.second) for claim in claims] == [("b", "c"), ("b", "a"), ("c", "a")]


def test_memory_of_a_cell_is_what_was_held() -> None:
    answers = [ANSWER, replace(ANSWER, blocks_after=19, kept_tokens=300.0)]
    found = cell(EvaluatedArm("tgv", 0.1), ALL, answers, 16)
    assert found.blocks_held == pytest.approx((4 + 19) / 2 / 38)
    assert found.tokens_held == pytest.approx((60 + 300) / 2 / 600)


def test_patches_are_counted_over_layers_and_heads() -> None:
    positions = np.array([[0, 1, 2, 3], [2, 3, 9, 10]])
    kept = Kept(ANSWER.key, np.array([[1, 1]]), positions, ((2, 9),))
    assert count_patches(kept).tolist() == [[2, 2, 0], [0, 0, 0], [0, 1, 1]]


@pytest.mark.parametrize("values", [[0.5, 0.5, 0.5], [0.0, 0.0, 0.01], [0.1, 0.4, 0.41, 0.9]])
def test_labels_are_spread_apart(values: list[float]) -> None:
    places = plots.spread(values, 0.05)
    assert all(np.diff(places) >= 0.05 - 1e-9)
    assert min(places) >= 0


# -- command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "tgv", "nonsense"], ["--methods nonsense", "tgv", "random"]),
        (["--tasks", "poem"], ["--tasks poem", "value"]),
        (["--budgets", "0.1", "7"], ["--budgets 7", "at most 1"]),
        (["--questions", "0"], ["--questions 0", "at least 1"]),
        (["--only", "grid", "report"], ["--only grid report", "alone"]),
        (["--only", "ablations", "--budgets", "0.5"], ["--budgets 0.5", "0.05"]),
        (["--only", "blocks", "--methods", "h2o"], ["--methods h2o", "snapkv"]),
        (["--only", "report", "--output", "/nonexistent"], ["--output /nonexistent", "--only"]),
    ],
)
def test_wrong_flags_are_named(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main(arguments)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


# -- through the engine ---------------------------------------------------------------------


def evaluate(folder: Path, *arguments: str) -> str:
    """Run the command in a new process and return what it printed."""
    command = [sys.executable, "-m", "evaluation.run", "--quick", *arguments]
    command += ["--output", str(folder / "report"), "--log", str(folder / "log")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.engine
@pytest.mark.slow
def test_quick_evaluation(tmp_path: Path) -> None:
    gc.collect()
    evaluate(tmp_path, "--questions", "4")
    report = tmp_path / "report"
    for name in ("accuracy", "methods", "tokens", "pages", "patches"):
        assert (report / f"{name}.png").stat().st_size > 10_000, name
    text = (report / "README.md").read_text()
    assert "--quick --questions 4" in text
    record = Record.read(report)
    table = record.tables["grid"]
    pooled = {(c.method, c.budget): c for c in table.cells if c.task == ALL}
    assert {method for method, _ in pooled} == {"none", *METHODS}
    full, random = pooled["none", 1.0], pooled["random", 0.1]
    assert full.exact.mean > random.exact.mean
    assert full.later.mean > random.later.mean
    assert full.blocks_held == 1.0
    # At one budget all methods hold the same memory.
    assert len({pooled[method, 0.1].blocks_held for method in METHODS}) == 1
    # Finished answers are not asked again: no engine starts, and the results are the same.
    evaluate(tmp_path, "--questions", "4", "--only", "grid")
    assert Record.read(report).tables == record.tables
