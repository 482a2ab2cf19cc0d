# SPDX-License-Identifier: Apache-2.0
"""The evaluation of methods with trained gates: its arms, and the gates that belong to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.learned import BUDGETS, PARTS, UNTRAINED
from evaluation.text_arms import FULL, Part, TextArm, check, eviction_settings
from tests.inputs import write_gates
from vllm_tgvkv.errors import EvictionConfigError

FORMS = {"kvzap": "mlp", "trimkv": "rg10"}


def arms_of(part: Part, folder: Path, form: str) -> list[TextArm]:
    """Return a part's arms with random gates in a folder."""
    write_gates(folder, form, 2, 16, 2)
    found = dict.fromkeys(arm for _, _, arms in part.work for arm in arms)
    return [replace(arm, gates=str(folder)) if arm.gates else arm for arm in found]


@pytest.mark.parametrize("name", PARTS)
def test_the_plugin_knows_every_arm(name: str, tmp_path: Path) -> None:
    """With gates of the part's kind, and with no others."""
    arms = arms_of(PARTS[name], tmp_path / "own", FORMS[name])
    check(arms, eviction_settings(arms))
    assert any(arm.gates for arm in arms)
    assert len({arm.identity for arm in arms}) == len(arms)
    for pair in PARTS[name].pairs:
        assert any(set(pair) <= set(arms) for _, _, arms in PARTS[name].work), pair
    (other,) = set(PARTS) - {name}
    wrong = arms_of(PARTS[name], tmp_path / "other", FORMS[other])
    with pytest.raises(EvictionConfigError, match="reads gates of"):
        check(wrong, eviction_settings(wrong))
    mixed = [arm for arm in (*arms, *wrong) if arm.gates]
    with pytest.raises(EvictionConfigError, match=r"one folder of gates.*\(--only\)"):
        eviction_settings(mixed)


def test_other_gates_are_another_arm(tmp_path: Path) -> None:
    """Answers that are kept belong to the weights; those of methods without gates to none."""
    plain = TextArm("kvzap", 0.2)
    identities = []
    for name in ("first", "second"):
        write_gates(tmp_path / name, "mlp", 2, 16, 2)
        identities.append(replace(plain, gates=str(tmp_path / name)).identity)
    assert len({plain.identity, *identities}) == 3
    assert replace(plain, gates=str(tmp_path / "first")).key == plain.key
    with pytest.raises(EvictionConfigError, match=r"config.json cannot be read"):
        assert replace(plain, gates=str(tmp_path / "none")).identity


def test_methods_without_gates_are_asked_once() -> None:
    """The second part asks only questions that the first one asked too."""
    kvzap, trimkv = (
        {
            (task.name, arm)
            for task, _, arms in part.work
            for arm in arms
            if not arm.gates and arm != FULL
        }
        for part in PARTS.values()
    )
    assert trimkv < kvzap
    assert {arm.method for _, arm in kvzap} == {arm.method for _, arm in trimkv} == set(UNTRAINED)
    assert {arm.budget for _, arm in trimkv} == set(BUDGETS)
    for task, most, arms in PARTS["trimkv"].work:
        for arm in arms:
            if not arm.gates:
                assert PARTS["kvzap"].asked(task, arm) >= most
