# SPDX-License-Identifier: Apache-2.0
"""The evaluation on pages, what it shares with texts, and the program that runs all fields."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evaluation import __main__ as program
from evaluation import (
    cost,
    pages,
    peers,
    peers_kvpress,
    reaches,
    replacements,
    text,
    text_results,
    waits,
)
from evaluation.answers import Answer, AnswerLog, read_answers, write_answers
from evaluation.field import Field, Run, run
from evaluation.pages_arms import PARTS
from evaluation.pages_engine import PageSettings
from evaluation.text_arms import (
    FULL,
    WAIT,
    Cells,
    Part,
    TextArm,
    check,
    crossed,
    eviction_settings,
)
from evaluation.text_report import write_report
from measure import smollm
from measure.document import Table
from measure.text_tasks import TextExample, TextQuestion, TextTask
from reader.tasks import TASKS
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies import build_policy
from vllm_tgvkv.policies.base import Policy
from vllm_tgvkv.policies.pooling import Pooler, Pooling
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import EvictionConfigError

pytestmark = pytest.mark.apparatus


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_the_plugin_knows_every_arm(part: Part) -> None:
    arms = [arm for _, _, arms in part.work for arm in arms]
    check(arms, eviction_settings(arms), has_images=True)
    for pair in part.pairs:
        assert any(set(pair) <= set(arms) for _, _, arms in part.work), pair


def test_layer_budgets_by_images_are_for_pages_alone() -> None:
    arm = TextArm("tgv", 0.2)
    check([arm], eviction_settings([arm]), has_images=True)
    with pytest.raises(EvictionConfigError, match="attention to images"):
        check([arm], eviction_settings([arm]))


@pytest.mark.parametrize("name", replacements.REPLACED)
def test_what_is_replaced_is_not_the_methods_own(name: str) -> None:
    mix = replacements.REPLACED[name]
    config = EvictionConfig.from_mapping({"methods": {name: mix}})
    own, changed = config.build_policy(mix["base"]), config.build_policy(name)

    def parts(policy: Policy) -> dict[str, object]:
        score, layers, kept = policy.score, policy.allocation, policy.retention
        return {
            "score": type(score),
            "rows": score.rows,
            "allocation": type(layers),
            "retain": (type(kept), vars(kept)),
            "granularity": policy.granularity,
            "pooling": policy.pooling,
            "reduce": policy.reduction,
            "merge": policy.merge,
        }

    before, after = parts(own), parts(changed)
    different = {field for field in before if before[field] != after[field]}
    # Another score may bring its own rows.
    assert different - ({"rows"} if "score" in mix else set()) == mix.keys() - {"base"}


def test_pages_and_texts_have_logs_of_their_own() -> None:
    assert pages.FIELD.logs != text.FIELD.logs
    assert PageSettings().fingerprint != text.FIELD.settings().fingerprint


# -- answers that are kept, and counted again --------------------------------------------------

SHORT = TextTask("number", "noise", 512)
ONE, OTHER = crossed(("snapkv", "adakv"), (0.1,))
PART = Part("Tiny", "A part.", (Cells((SHORT,), (ONE, OTHER), 3),), ((ONE, OTHER),))
HITS = {FULL: ["11", "11", "01"], ONE: ["11", "10"], OTHER: ["00", "11"]}


def answers() -> list[Answer]:
    return [
        Answer(SHORT.name, number, arm.identity, "said", hits, 500, 50.0, 32, 4, 2, ((0, 32, 4),))
        for arm, found in HITS.items()
        for number, hits in enumerate(found)
    ]


def test_kept_answers_are_those_of_the_part(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl.gz"
    stranger = Answer("other", 0, ONE.identity, "", "11", 500, 50.0, 32, 4)
    with AnswerLog(tmp_path, "abc") as log:
        for answer in [*answers(), stranger]:
            log.add(answer)
        write_answers(text_results.answers_of(PART, log), path)
    assert list(read_answers(path).values()) == answers()
    before = path.read_bytes()
    write_answers(answers(), path)
    assert path.read_bytes() == before


FACTS = {
    "command": "python -m evaluation.text --only default",
    "day": "2026-01-02",
    "revision": "abc1234",
    "fingerprint": "0123456789ab",
    "settings": {"block_size": 16},
    "versions": {"vllm": "0.32.0"},
    "machine": {"cpu": "some"},
    "limit": None,
    "first": 0,
    "tasks": None,
}


def test_tables_are_counted_again_from_the_answers(tmp_path: Path) -> None:
    field = Field(**{**vars(text.FIELD), "parts": {"tiny": PART}})
    result = text_results.part_result(PART, {a.key: a for a in answers()}, FACTS)
    text_results.write({"tiny": result}, tmp_path)
    write_answers(answers(), tmp_path / "answers-tiny.jsonl.gz")
    file = tmp_path / text_results.FILE
    wanted = file.read_text()
    assert '"num_right": 1' in wanted
    file.write_text(wanted.replace('"num_right": 1', '"num_right": 0'))
    assert run(field, ["--only", "recount", "--output", str(tmp_path)]) == 0
    assert file.read_text() == wanted
    assert "| `snapkv` | 1 of 2" in (tmp_path / "README.md").read_text()


def test_comparisons_on_all_tasks_together() -> None:
    other = TextTask("number", "prose", 512)
    log = {a.key: a for a in answers()}
    log |= {a.key: a for a in (replace(answer, task=other.name) for answer in answers())}
    both = replace(PART, cells=(Cells((SHORT, other), (ONE, OTHER), 3),))
    each = text_results.part_result(both, log, FACTS).comparisons
    assert [(c.task, c.questions) for c in each] == [(SHORT.name, 2), (other.name, 2)]
    (claim,) = text_results.part_result(replace(both, pooled=True), log, FACTS).comparisons
    assert (claim.task, claim.questions) == (text_results.ALL_TASKS, 4)
    assert (claim.first_only, claim.second_only) == (2, 2)


def test_a_part_without_arms_has_a_page(tmp_path: Path) -> None:
    part = Part("Full", "No arms.", (Cells((SHORT,), (), 3),))
    result = text_results.part_result(part, {a.key: a for a in answers()}, FACTS)
    write_report({"full": result}, tmp_path, {"full": part})
    assert "| 3 | 67 %" in (tmp_path / "README.md").read_text()
    assert not (tmp_path / "full.png").exists()


# -- rules that are emulated --------------------------------------------------------------------


@pytest.mark.parametrize("reach", [1, 16, 40])
def test_emulated_rules_pool_as_the_plugin_does(reach: int) -> None:
    scores = torch.rand(2, 3, 90)
    pooling = Pooling("sequence", forward=reach, back=1)
    with_sinks = Pooler(pooling, 90, (), torch.device("cpu"))(scores.flatten(0, 1))
    flat = reaches.reaching(reaches.flat(reach))
    assert torch.equal(flat(scores, 50).flatten(0, 1), with_sinks)
    without = Pooler(pooling, 90, (), torch.device("cpu"), reaches.SINKS)(scores.flatten(0, 1))
    apart = reaches.apart(flat)(scores, 50).flatten(0, 1)
    assert torch.equal(apart[:, reaches.SINKS :], without[:, reaches.SINKS :])
    bounded = replace(pooling, forward_share=0.25).within(50)
    pooled = Pooler(bounded, 90, (), torch.device("cpu"), reaches.SINKS)(scores.flatten(0, 1))
    rule = reaches.apart(reaches.share(0.25, reach))(scores, 50).flatten(0, 1)
    assert torch.equal(rule[:, reaches.SINKS :], pooled[:, reaches.SINKS :])


def test_weights_of_emulated_rules() -> None:
    scores = torch.tensor([[[0.0, 0, 1, 0, 0, 0, 0.4, 0]]])
    pooled = reaches.reaching([1, 0.5, 0.25])(scores, 0).flatten().tolist()
    assert pooled == pytest.approx([0, 1, 1, 0.5, 0.25, 0.4, 0.4, 0.2])
    assert reaches.halved(2)[:5] == pytest.approx([1, 0.5**0.5, 0.5, 0.5**1.5, 0.25])
    assert reaches.falling(3) == pytest.approx([1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("halve", [4, 16])
def test_emulated_weights_are_those_of_the_plugin(halve: int) -> None:
    scores = torch.rand(2, 3, 90)
    pooling = Pooling("sequence", forward=4 * halve, back=1, halve=halve)
    pooled = Pooler(pooling, 90, (), torch.device("cpu"), reaches.SINKS)(scores.flatten(0, 1))
    rule = reaches.apart(reaches.reaching(reaches.halved(halve)))(scores, 50).flatten(0, 1)
    # Weights are powers of 2 in float32 there, and differences of float64 logarithms here.
    torch.testing.assert_close(rule[:, reaches.SINKS :], pooled[:, reaches.SINKS :])
    policy, wanted = build_policy("reach"), waits.CHOICES["wait 4, answer votes, half after 64"]
    assert (policy.pooling.halve, policy.pooling.reach) == (64, (256, 1))
    assert (policy.score.rows, wanted.wait, wanted.answer_alone) == ("latest", WAIT, True)


@pytest.mark.parametrize("name", waits.CHOICES)
def test_emulated_choices_keep_their_budget_and_what_they_wait_for(name: str) -> None:
    choice, length = waits.CHOICES[name], 203
    rows = 32 + reaches.ANSWER_ROWS
    attention = 0.01 * torch.rand(4, 3, 2, rows, length)
    attention[..., 32:, 96:128] = 1  # what the answer looks at
    values = torch.rand(4, 3, length + 9, 5)
    found = reaches.Prefill(values, values, attention, [0] * 10)
    kept = waits.kept(found, choice, 0.5)
    blocks = Budget(fraction=0.5).retained_blocks(length, 16)
    assert kept.shape == (4, 3, length + choice.wait)
    assert kept[..., length - length % 16 :].all()
    assert kept[..., : reaches.SINKS].all()
    if choice.allocation != "adakv":  # whose heads may have a fifth of the budget
        assert kept[..., length - choice.first : length].all()
    assert kept.sum() == 4 * 3 * (16 * blocks + length % 16 + choice.wait)
    if choice.answer_alone:
        assert kept[..., 96:128].all()


@pytest.mark.parametrize("budget", reaches.BUDGETS)
def test_emulated_budgets_are_whole_blocks_and_the_rest(budget: float) -> None:
    length = 1003
    rule = reaches.RULES["25 %, at most 48"]
    kept = reaches.kept(torch.rand(2, 3, length), rule, budget)
    blocks = Budget(fraction=budget).retained_blocks(length, 16)
    assert kept.sum(-1).unique().tolist() == [16 * blocks + length % 16]
    assert kept[..., : reaches.SINKS].all()
    assert kept[..., -32:].all()


# -- all fields --------------------------------------------------------------------------------


def test_fields_without_weights_are_left_out_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "find_weights", lambda: None)
    assert program.main(["--plan"]) == 0
    said = capsys.readouterr().out
    assert "Left out: texts and pages" in said
    assert smollm.INSTALL in said
    assert [line.split()[2] for line in said.splitlines()[1:]] == ["evaluation.run"]


@pytest.mark.parametrize("whole", [False, True])
def test_every_field_has_a_command(whole: bool) -> None:
    names = [p.name for p in program.PROGRAMS]
    found = program.commands(names, whole, has_weights=True)
    assert [command[2] for command in found] == [p.module for p in program.PROGRAMS]
    assert all(("--output" in command) != whole for command in found)
    assert program.commands(["demo"], whole, has_weights=False) == [found[-1]]


@pytest.mark.parametrize("field", ["text", "pages"])
def test_commands_of_fields_are_understood(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = program.commands([field], whole=False, has_weights=True)
    assert {"text": text, "pages": pages}[field].main([*command[3:], "--plan"]) == 0
    assert "default: The recommended method" in capsys.readouterr().out


def test_a_program_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = program.Program("fails", "x", "x", (), needs_weights=False)
    monkeypatch.setattr(program, "PROGRAMS", (failing, program.PROGRAMS[-1]))
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    never = [sys.executable, "-c", "raise SystemExit(4)"]
    monkeypatch.setattr(program, "commands", lambda *_: [command, never])
    assert program.main([]) == 3


# -- through the engine -------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(smollm.find_weights() is None, reason=f"needs {smollm.INSTALL}")
def test_a_page_in_the_real_engine(tmp_path: Path) -> None:
    task = TASKS[1]
    arms = (TextArm("reach", 0.2), TextArm("streaming", 0.2))
    part = Part("Tiny", "A part.", (Cells((task,), arms, 1),))
    with AnswerLog(tmp_path, "abc") as log:
        current = Run(pages.FIELD, {"tiny": part}, None, log)
        try:
            current.answer(part)
        finally:
            current.close()
        result = text_results.part_result(part, log, FACTS)
    assert result.tasks[0].right.mean == 1.0
    assert 1050 < result.tasks[0].prompt_tokens < 1150
    kept = {cell.label: cell for cell in result.cells}
    assert kept["reach"].num_right == 1
    assert all(0.15 < cell.blocks_held <= 0.2 for cell in result.cells)
    assert json.loads(log.path.read_text().splitlines()[0])["cuts"] == []


# -- what an answer takes ------------------------------------------------------------------------


def test_costs_are_per_answer_and_per_request(tmp_path: Path) -> None:
    seconds = [4.0, 2.0, 2.5]
    full = cost.Cost("number-noise-4096", 16, "none", 4, 4, seconds, 1.0, held=1.0, full_mib=64)
    ours = replace(full, arm="reach@0.2,defer=4", held=0.25)
    assert full.per_second == 4 / 2.5
    assert (full.per_gib, ours.per_gib) == (16, 64)
    facts = {"day": "today", "revision": "r", "machine": {"load_average": [3.0, 1.0, 2.0]}}
    costs = [asdict(full), asdict(ours)]
    (tmp_path / "results.json").write_text(json.dumps({**facts, "costs": costs}))
    assert cost.main(["--report", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| 1.60 [1.00, 2.00] | 16.0 |" in text
    assert "load average 1 to 3" in text


# -- kvpress on the same questions ---------------------------------------------------------------


def test_a_missing_environment_names_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--python", "/nonexistent/python"])
    assert "tests/kvpress/test_kvpress.py" in capsys.readouterr().err


def test_missing_gates_name_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--python", sys.executable, "--gates", str(tmp_path)])
    assert "docs/gates.md#what-was-measured" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [0.2, 0.5])
def test_the_threshold_keeps_the_share_and_the_window(kept: float) -> None:
    tokens = 8 * peers_kvpress.WINDOW
    scores = torch.randperm(3 * 2 * tokens).view(3, 1, 2, tokens).float()
    layers = iter(scores)

    class Press:
        press = SimpleNamespace(score=lambda *_: next(layers))

        @contextmanager
        def __call__(self, model: object) -> Iterator[None]:
            yield

    press = Press()
    peers_kvpress.set_threshold(
        lambda *_, **__: [press.press.score() for _ in scores], None, press, [1, 2], kept
    )
    hidden = scores[..., : -peers_kvpress.WINDOW] < press.threshold  # type: ignore[attr-defined]
    assert hidden.sum() == round((1 - kept) * scores.numel())


def test_both_sides_are_counted_on_the_same_questions() -> None:
    task = TextTask("number", "noise", 512)
    example = TextExample("", "", "1234567", "number")
    prompts = [peers.Prompt(TextQuestion(task, n), example, "") for n in (500, 501)]
    held = {"prompt_tokens": 100, "kept_tokens": 20.0, "blocks_before": 10, "blocks_after": 2}
    ours = [
        Answer(task.name, n, "snapkv@0.2", "", hits, **held)  # type: ignore[arg-type]
        for n, hits in ((500, "11"), (501, "10"), (502, "00"))
    ]
    theirs = [
        {"key": p.key, "press": "AdaKVPress over SnapKVPress", "hits": hits, "freed": 0.0}
        for p, hits in zip(prompts, ("11", "11"), strict=True)
    ]
    table = next(block for block in peers.page(prompts, theirs, ours) if isinstance(block, Table))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["ours: `snapkv@0.2`"][0] == "1 of 2"
    assert rows["ours: `snapkv@0.2`"][-1] == "80 %"
    assert rows["kvpress: `AdaKVPress over SnapKVPress`"][0] == "2 of 2"
    assert rows["kvpress: `AdaKVPress over SnapKVPress`"][-1] == "0 %"
