# SPDX-License-Identifier: Apache-2.0
"""Methods that keep summaries of what they evict, in real engines, against their definition.

One batch holds requests with and without summaries, that wait for tokens of the answer or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import methods, summaries
from oracle.emulation import Answer, Cutter, Eviction, Moment, Oracle, Prompt
from oracle.methods import HEAD, LAYER, Mix
from oracle.summaries import Absorbed, Rules
from tests.engine.running import Ask, SteppedEngine, engine, name_of
from tests.models import LLAVA_IMAGE, random_image, random_text
from vllm_tgvkv.kernels.summaries import num_rows

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Method:
    """A method with summaries: its definition, and the same as a setting."""

    mix: Mix
    rules: Rules | None
    setting: Mapping[str, Any] | None = None


METHODS = {
    "retentivekv": Method(Mix("retentive_rows", "uniform", "window", HEAD), Rules()),
    "of layers": Method(
        Mix("tgv", "tgv", "text_first", LAYER),
        Rules("all", decay=0.8),
        {"base": "tgv", "summaries": {"of": "all", "decay": 0.8}},
    ),
    "by score": Method(
        Mix("retentive_spread", "adakv", "by_score", HEAD),
        Rules("both", "score", gate=0.5),
        {
            "base": "adakv",
            "score": "retentive_spread",
            "retain": "by_score",
            "pooling": {"kind": "none"},
            "summaries": {"weight": "score", "gate": 0.5},
        },
    ),
    "snapkv": Method(methods.METHODS["snapkv"], None),
}
SETTINGS = {
    "policy": "retentivekv",
    "budget": 0.5,
    "text_only": "evict",
    "methods": {name: m.setting for name, m in METHODS.items() if m.setting}
    | {"unread": {"base": "retentivekv", "summaries": {"gate": 0}}},
}


@dataclass(frozen=True)
class Case:
    """A request: method, budget, lengths of the text around its images, tokens to wait for."""

    method: str
    budget: float
    lengths: tuple[int, ...]
    defer: int = 0

    def ask(self, seed: int) -> Ask:
        texts = [random_text(100 * seed + i, n) for i, n in enumerate(self.lengths)]
        images = tuple(random_image(100 * seed + i) for i in range(len(texts) - 1))
        xargs = {
            "kv_eviction": self.method,
            "kv_eviction_budget": self.budget,
            "kv_eviction_defer": self.defer,
            "kv_eviction_report": 1,
        }
        return Ask(LLAVA_IMAGE.join(texts), images, 16, xargs)


CASES = [
    Case("retentivekv", 0.5, (20, 150)),
    Case("retentivekv", 0.3, (40, 30, 140), defer=3),
    Case("retentivekv", 0.2, (10, 120)),  # two blocks: no room for a summary of text
    Case("retentivekv", 0.1, (30, 100)),  # one block: none at all
    Case("retentivekv", 0.4, (260,)),
    Case("of layers", 0.4, (20, 50, 100)),
    Case("by score", 0.5, (60, 130), defer=1),
    Case("snapkv", 0.3, (50, 100)),
]


@dataclass
class Emulation:
    """The cut of one request, with summaries of what it evicts."""

    case: Case
    prompt: Prompt
    oracle: Oracle
    rows: int
    is_stable: bool = True
    num_rows: int = 0
    num_filled: int = field(init=False)
    """Blocks of tokens that are left."""

    def __post_init__(self) -> None:
        method, layout = METHODS[self.case.method], self.prompt.layout
        num_blocks = methods.retained_blocks(layout.length, BLOCK_SIZE, self.case.budget)
        self.mix, self.rules = method.mix, method.rules
        if self.rules is not None:
            self.rules = replace(self.rules, rows=self.rows)
        kinds = [] if self.rules is None else self.rules.kinds(layout)
        self.num_summaries = min(len(kinds), num_blocks - 1)
        self.num_filled = num_blocks - self.num_summaries
        budget = self.num_filled * BLOCK_SIZE + layout.length % BLOCK_SIZE
        self.eviction = Eviction(
            budget,
            BLOCK_SIZE,
            observation_window=128,
            method=method.mix,
            text_only="evict",
            defer=self.case.defer,
        )

    def answer(self, max_tokens: int, absorbs: bool = True) -> Answer:
        """Return the answer, with `absorbs` false that of plain eviction."""
        cutter = Cutter(self.eviction, self.prompt.layout, self.oracle.kv_heads)
        absorb = self._absorb if absorbs and self.num_summaries else None
        answer = self.oracle.decode(self.prompt, max_tokens, cutter, absorb=absorb)
        self.is_stable &= all(cut.is_stable() for cut in cutter.cuts)
        return replace(answer, cuts=cutter.cuts)

    def _absorb(self, moment: Moment, kept: torch.Tensor) -> Absorbed:
        assert self.rules is not None
        layout = replace(self.prompt.layout, length=moment.length, answer=moment.answer)
        evidence = methods.observe(
            self.mix,
            moment.attention(),
            layout,
            self.oracle.kv_heads,
            self.eviction,
            states=moment.states(),
        )
        assert moment.values is not None
        heads = []
        for layer, scores in enumerate(evidence.scores):
            heads.append([])
            for head in range(self.oracle.kv_heads):
                of_head = scores[head * len(scores) // self.oracle.kv_heads].double()
                given = [
                    [
                        moment.keys[layer, head],
                        moment.values[layer, head],
                        kept[layer, head],
                        each.tolist(),
                        layout,
                        self.rules,
                        self.num_summaries,
                    ]
                    for each in (of_head, methods.perturbed(of_head, 3e-5))
                ]
                rows, others = (summaries.summaries(*each) for each in given)
                # Rounding must not choose another root, which would move masses by one and more.
                masses, other_masses = ([row.mass for row in each] for each in (rows, others))
                self.is_stable &= masses == pytest.approx(other_masses, rel=1e-3)
                self.num_rows = max(self.num_rows, len(rows))
                heads[-1].append(rows)
        return Absorbed.of_heads(heads, moment.keys.shape[-1])


@dataclass(frozen=True)
class Expected:
    case: Case
    ask: Ask
    emulation: Emulation
    answer: Answer


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Expected]:
    """Return what is served, from inputs on which rounding decides nothing and summaries matter."""
    oracle, found = Oracle(folder), []
    for number, case in enumerate(CASES):
        for attempt in range(20):
            ask = case.ask(number + 1000 * attempt)
            ask = replace(ask, arrival=number // 3)
            prompt = oracle.prompt(ask.text, ask.images)
            head_size = oracle.states(prompt).keys.shape[-1]
            emulation = Emulation(case, prompt, oracle, num_rows(BLOCK_SIZE, head_size, 4))
            answer = emulation.answer(ask.max_tokens)
            if not emulation.is_stable:
                continue
            matters = not emulation.num_summaries or (
                answer.tokens != emulation.answer(ask.max_tokens, absorbs=False).tokens
            )
            if matters:
                found.append(Expected(case, ask, emulation, answer))
                break
        else:
            raise AssertionError(f"{case}: no inputs are good")
    assert {each.emulation.num_summaries for each in found if each.case.method != "snapkv"} == {
        0,
        1,
        2,
    }
    assert max(each.emulation.num_rows for each in found) > BLOCK_SIZE
    return found


@pytest.fixture(scope="module", params=["poisoned", "prefix cache"])
def running(request: pytest.FixtureRequest, folder: Path) -> Iterator[SteppedEngine]:
    """Engine that prefills in chunks and fills released blocks with NaN, or caches prefixes."""
    caches = request.param == "prefix cache"
    debug = {"poison": not caches, "check_integrity": True, "record_kept": True}
    options = {} if caches else {"max_num_batched_tokens": 64}
    with engine(
        folder, {**SETTINGS, "debug": debug}, enable_prefix_caching=caches, **options
    ) as started:
        yield started


def assert_served(running: SteppedEngine, expected: Expected, output: Any) -> None:
    message = f"{expected.case}"
    shape, prompt = running.evictor.shape, expected.emulation.prompt
    length, filled = len(prompt.token_ids), expected.emulation.num_filled
    full, tail = divmod(length, BLOCK_SIZE)
    found = [k for k in running.evictor.kept if name_of(k.request_id) == output.request_id][-1]
    kept = torch.zeros(shape.num_pairs, length, dtype=torch.bool)
    pair = torch.repeat_interleave(torch.arange(shape.num_pairs), found.counts.flatten())
    assert len(pair) == filled * shape.num_pairs, message
    kept[pair[:, None], found.positions.long()] = True
    kept[:, full * BLOCK_SIZE :] = True
    wanted = expected.answer.kept[0][..., :length]
    assert torch.equal(kept.view_as(wanted), wanted), f"{message} keeps other tokens"
    assert list(output.outputs[0].token_ids) == expected.answer.tokens, message
    report = output.kv_transfer_params["kv_eviction"]
    num_blocks = filled + expected.emulation.num_summaries
    assert report["kept_tokens"] == filled * BLOCK_SIZE + tail, message
    assert report["kept_text_tokens"] + report["kept_vision_tokens"] == report["kept_tokens"]
    answered = -(-(tail + expected.case.defer) // BLOCK_SIZE)
    assert report["blocks_after"] == num_blocks + answered, message


def test_a_batch(running: SteppedEngine, expected: list[Expected]) -> None:
    """The second time, prefixes are cached if they can be, and requests are preempted."""
    for outputs in (running.run([each.ask for each in expected]), preempted(running, expected)):
        for each, output in zip(expected, outputs, strict=True):
            assert_served(running, each, output)
    if not running.evictor.config.debug.poison:
        # Whoever gets a block next multiplies what is left in it with a weight of 0.
        ask = expected[0].ask
        running.run([replace(ask, xargs={**ask.xargs, "kv_eviction": "unread"})])
        assert running.evictor.pool.raw.isfinite().all()


def preempted(running: SteppedEngine, expected: list[Expected]) -> list[Any]:
    """Serve all requests, each preempted after some tokens of its answer."""
    names = [running.add(each.ask) for each in expected]
    waiting, finished = dict(zip(names, (7, 9, 5, 6, 8, 12, 10, 4), strict=True)), {}
    while running.engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in running.step() if output.finished}
        for request in list(running.scheduler.running):
            name = name_of(request.request_id)
            if request.num_output_tokens >= waiting.get(name, 1000):
                del waiting[name]
                running.preempt(request)
    assert not waiting
    running.assert_empty()
    return [finished[name] for name in names]


def test_an_aborted_request_leaves_nothing(
    running: SteppedEngine, expected: list[Expected]
) -> None:
    first, second = (running.add(each.ask) for each in expected[:2])
    for _ in range(8):
        running.step()
    assert running.evictor.regions.num_summaries.count_nonzero() > 0
    running.engine.abort_request([first, second])
    running.drain()
    running.assert_empty()
    (output,) = running.run([expected[0].ask])
    assert_served(running, expected[0], output)
    assert running.evictor.regions.num_summaries.count_nonzero() <= 1
