# SPDX-License-Identifier: Apache-2.0
"""The evaluation of methods with trained gates: its arms, and the gates that belong to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation import text_results
from evaluation.answers import Answer, AnswerLog
from evaluation.field import Run
from evaluation.learned import (
    BUDGETS,
    COPY,
    FIELD,
    GATED,
    KVZAP,
    LONG,
    OWN,
    PARTS,
    RETENTION,
    UNTIED,
    UNTRAINED,
    ceilings,
)
from evaluation.text_arms import FULL, Cells, Part, TextArm, by_gates, check, eviction_settings
from measure.text_tasks import FRESH, TextQuestion
from tests.inputs import write_gates
from vllm_tgvkv.shared.errors import EvictionConfigError

pytestmark = pytest.mark.apparatus

FORMS = {KVZAP: "mlp", RETENTION: "rg10", OWN: "rg", UNTIED: "rg10"}


def arms_of(part: Part, folder: Path, swapped: bool = False) -> dict[TextArm, TextArm]:
    """Return a part's arms, and the same with random gates of their kind or of the other kind."""
    found = dict.fromkeys(arm for _, _, arms in part.work for arm in arms)
    for gates in {arm.gates for arm in found if arm.gates}:
        form = FORMS[gates]
        if swapped:
            form = "rg10" if form == "mlp" else "mlp"
        write_gates(folder / Path(gates).name, form, 2, 16, 2)
    return {
        arm: replace(arm, gates=str(folder / Path(arm.gates).name)) if arm.gates else arm
        for arm in found
    }


@pytest.mark.parametrize("name", PARTS)
def test_the_plugin_knows_every_arm(name: str, tmp_path: Path) -> None:
    """With gates of the methods' kind, and with no others; each folder has its own engine."""
    part = PARTS[name]
    arms = arms_of(part, tmp_path / "own")
    engines = by_gates(arms.values())
    assert len(engines) == len({arm.gates for arm in arms if arm.gates}) > 0
    for mine in engines.values():
        check(mine, eviction_settings(mine))
    assert {arm for mine in engines.values() for arm in mine} == set(arms.values())
    for written in (arms, arms.values()):
        assert len({arm.key for arm in written}) == len(arms)
    for pair in part.pairs:
        assert any(set(pair) <= set(arms) for _, _, arms in part.work), pair
    for mine in by_gates(arms_of(part, tmp_path / "other", swapped=True).values()).values():
        with pytest.raises(EvictionConfigError, match="reads gates of"):
            check(mine, eviction_settings(mine))
    if len(engines) > 1:
        with pytest.raises(EvictionConfigError, match=r"one folder of gates.*an engine for each"):
            eviction_settings(arms.values())


def test_arms_without_gates_are_in_every_engine() -> None:
    plain, first, second = TextArm("snapkv", 0.2), *(arms[0] for arms in (*GATED.values(),)[:2])
    assert by_gates([plain]) == {"": (plain,)}
    assert by_gates([FULL, first, plain, second, first]) == {
        first.gates: (FULL, first, plain),
        second.gates: (FULL, plain, second),
    }


def test_long_answers() -> None:
    """A ceiling of every arm, the same memory in each pair, and a list that is asked for."""
    arms = [arm for arms in (ceilings(UNTRAINED), *LONG.values()) for arm in arms]
    assert all(arm.has_ceiling and arm.budget * COPY.tokens < COPY.tokens / 2 for arm in arms)
    for first, second in PARTS["long"].pairs:
        assert (first.budget, first.options) == (second.budget, second.options)
    (arm,) = ceilings(["rkv"])[:1]
    assert (arm.key, arm.label) == ("rkv@0.375,max_tokens=384", "rkv")
    example = TextQuestion(COPY, FRESH - 1).example(40, lambda text: len(text.split()))
    lines = example.answer.split("\n")
    assert example.message.count(f"{example.start}{example.answer}\n") == 1
    assert [line.partition(". ")[0] for line in lines] == [str(n) for n in range(1, COPY.keys + 1)]
    assert example.hits(f"{example.answer}\n\nIt", ()) == "1" * (COPY.keys + 1)
    wrong = example.answer.replace(lines[7], "8. 12")
    assert example.hits(wrong, ()) == "1" * (COPY.keys - 1) + "00"


class FakeEngine:
    """Answers everything, and notes what it was started for and asked."""

    running = 0

    def __init__(self, settings: Any, arms: Sequence[TextArm]) -> None:
        FakeEngine.running += 1
        assert FakeEngine.running == 1
        eviction_settings(arms)
        self.arms = arms

    def answers(self, work: Sequence[tuple[TextQuestion, TextArm]]) -> Iterator[Answer]:
        for question, arm in work:
            assert arm in self.arms
            task = question.task.name
            yield Answer(task, question.number, arm.identity, "", "11", 900, 90.0, 56, 5)

    def close(self) -> None:
        FakeEngine.running -= 1


def test_an_engine_for_each_folder_of_gates(tmp_path: Path) -> None:
    """One after the other, and each question is asked once."""
    started = []

    def engine(settings: Any, arms: Sequence[TextArm]) -> FakeEngine:
        started.append({arm.gates for arm in arms} - {""})
        return FakeEngine(settings, arms)

    arms = arms_of(PARTS["long"], tmp_path / "gates")
    part = Part("Tiny", "", (Cells((COPY,), tuple(arms.values()), 2),))
    with AnswerLog(tmp_path, "abc") as log:
        current = Run(replace(FIELD, engine=engine), {"one": part, "again": part}, None, log)
        current.answer(part)
        current.answer(part)
        current.close()
        assert len(log) == len(arms) * 2
        text_results.part_result(part, log, {"settings": {"block_size": 16}})
    folders = [{arm.gates} for arm in arms.values() if arm.gates]
    assert started == [gates for n, gates in enumerate(folders) if gates not in folders[:n]]
    assert FakeEngine.running == 0


def test_other_gates_are_another_arm(tmp_path: Path) -> None:
    """Answers that are kept belong to the weights; those of methods without gates to none.

    A folder that is not named like the method is shown.
    """
    plain = TextArm("kvzap", 0.2)
    identities = []
    for name in ("first", "second"):
        write_gates(tmp_path / name, "mlp", 2, 16, 2)
        identities.append(replace(plain, gates=str(tmp_path / name)).identity)
    assert len({plain.identity, *identities}) == 3
    for folder, shown in (("first", ",gates=first"), ("kvzap", "")):
        assert replace(plain, gates=str(tmp_path / folder)).key == f"{plain.key}{shown}"
    with pytest.raises(EvictionConfigError, match=r"config.json cannot be read"):
        assert replace(plain, gates=str(tmp_path / "none")).identity


def test_methods_without_gates_are_asked_once() -> None:
    """The part of retention asks them only questions that the first one asked too."""
    kvzap, trimkv = (
        {
            (task.name, arm)
            for task, _, arms in PARTS[name].work
            for arm in arms
            if not arm.gates and arm != FULL
        }
        for name in ("kvzap", "trimkv")
    )
    assert trimkv < kvzap
    assert {arm.method for _, arm in kvzap} == {arm.method for _, arm in trimkv} == set(UNTRAINED)
    assert {arm.budget for _, arm in trimkv} == set(BUDGETS)
    for task, most, arms in PARTS["trimkv"].work:
        for arm in arms:
            if not arm.gates:
                assert PARTS["kvzap"].asked(task, arm) >= most
