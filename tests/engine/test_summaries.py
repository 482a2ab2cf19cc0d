# SPDX-License-Identifier: Apache-2.0
"""Methods that keep summaries of what they evict, in real engines, against their definition.

One batch holds requests with and without summaries, that wait for tokens of the answer or not, and
that are evicted once or several times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import methods, summaries
from oracle.emulation import Answer, Cutter, Eviction, Moment, Oracle, Prompt
from oracle.methods import HEAD, LAYER, Mix
from oracle.summaries import Absorbed, Row, Rules
from tests.configs import summaries_name
from tests.engine import flash_on_cpu
from tests.engine.running import Ask, SteppedEngine, assert_cuts_agree, engine, name_of
from tests.models import LLAVA_IMAGE, random_image, random_text
from vllm_tgvkv.attention import cuda as attention_cuda
from vllm_tgvkv.kernels.summaries import num_rows
from vllm_tgvkv.shared.prompt import ANSWER_ROWS
from vllm_tgvkv.worker.warm_up import warm_up

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE = 32
"""Also of `tests/gpu/test_engine.py`, which serves these cases in bfloat16."""


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
        {"base": "tgv", "summaries": summaries_name("all", decay=0.8)},
    ),
    "by score": Method(
        Mix("retentive_spread", "adakv", "by_score", HEAD),
        Rules("both", "score", gate=0.5),
        {
            "base": "adakv",
            "score": "retentive_spread",
            "retain": "by_score",
            "pooling": "none",
            "summaries": summaries_name(weight="score", gate=0.5),
        },
    ),
    "snapkv": Method(methods.METHODS["snapkv"], None),
    "by position": Method(
        Mix("recency", "uniform", "by_score", HEAD),
        Rules(),
        {"base": "streaming", "granularity": "head", "summaries": "both"},
    ),
}
SETTINGS = {
    "policy": "retentivekv",
    "budget": 0.5,
    "text_only": "evict",
    "decode": {"on_request": True},
    "methods": {name: m.setting for name, m in METHODS.items() if m.setting}
    | {"unread": {"base": "retentivekv", "summaries": summaries_name(gate=0)}},
}


@dataclass(frozen=True)
class Case:
    """A request: method, budget, lengths of the text around its images, tokens to wait for.

    A schedule or a ceiling, in tokens, evicts it again.
    """

    method: str
    budget: float
    lengths: tuple[int, ...]
    defer: int = 0
    max_tokens: int = 16
    schedule: tuple[tuple[int, float], ...] = ()
    ceiling: int | None = None

    def ask(self, seed: int) -> Ask:
        texts = [random_text(100 * seed + i, n) for i, n in enumerate(self.lengths)]
        images = tuple(random_image(100 * seed + i) for i in range(len(texts) - 1))
        first = {"kv_eviction_budget": self.budget, "kv_eviction_defer": self.defer}
        xargs = {"kv_eviction": self.method, "kv_eviction_report": 1, **first}
        if self.schedule:
            steps = [(self.defer, self.budget), *self.schedule]
            written = ",".join(f"{after}:{budget}" for after, budget in steps)
            xargs = {k: v for k, v in xargs.items() if k not in first}
            xargs["kv_eviction_schedule"] = written
        if self.ceiling is not None:
            xargs["kv_eviction_max_tokens"] = self.ceiling
        return Ask(LLAVA_IMAGE.join(texts), images, self.max_tokens, xargs)


CASES = [
    Case("retentivekv", 0.5, (20, 150)),
    Case("retentivekv", 0.3, (40, 30, 140), defer=3),
    Case("retentivekv", 0.2, (10, 120)),  # two blocks: no room for a summary of text
    Case("retentivekv", 0.1, (30, 100)),  # one block: none at all
    Case("retentivekv", 0.4, (260,)),
    Case("of layers", 0.4, (20, 50, 100)),
    Case("by score", 0.5, (60, 130), defer=1),
    Case("snapkv", 0.3, (50, 100)),
    Case("retentivekv", 0.7, (20, 160), 2, 30, ((9, 0.55), (18, 0.42))),
    Case("retentivekv", 0.9, (30, 110), 0, 120, ceiling=128),
    # Text of the prompt and of the answer; the first cut keeps all.
    Case("by score", 1.0, (90,), 1, 120, ceiling=64),
]


ROUNDED = [
    Case("by position", 0.5, (20, 150)),
    Case("by position", 0.3, (40, 30, 140), defer=3),
    Case("by position", 0.4, (260,), max_tokens=40),
    Case("by position", 0.7, (20, 160), 2, 30, ((9, 0.55), (18, 0.42))),
    Case("by position", 0.9, (30, 110), 0, 120, ceiling=128),
]
"""Cases for a GPU in bfloat16: which tokens are kept and absorbed does not depend on rounding."""


@dataclass
class Emulation:
    """The cuts of one request, with summaries of what they evict."""

    case: Case
    prompt: Prompt
    oracle: Oracle
    rows: int
    is_stable: bool = True
    num_rows: int = 0
    taken: list[int] = field(default_factory=list)
    """Blocks of summaries after each cut."""

    def __post_init__(self) -> None:
        case, method = self.case, METHODS[self.case.method]
        self.mix, self.rules = method.mix, method.rules
        kinds = []
        if self.rules is not None:
            self.rules = replace(self.rules, rows=self.rows)
            kinds = self.rules.kinds(self.prompt.layout)
        self.eviction = Eviction(
            case.budget,
            BLOCK_SIZE,
            observation_window=128,
            method=method.mix,
            text_only="evict",
            defer=case.defer,
            schedule=case.schedule,
            answer_rows=ANSWER_ROWS,
            ceiling=case.ceiling,
            buffer=(case.ceiling or 0) // 4,
            summaries=len(kinds),
        )

    def answer(
        self, max_tokens: int, absorbs: bool = True, tokens: Sequence[int] | None = None
    ) -> Answer:
        """Return the answer, with `absorbs` false that of plain eviction.

        It follows `tokens` if they are given.
        """
        cutter = Cutter(self.eviction, self.prompt.layout, self.oracle.kv_heads)
        self.cutter, self.taken = cutter, cutter.taken  # the same with and without summaries
        self.summaries: dict[tuple[int, int], list[list[Row]]] = {}
        absorb = self._absorb if absorbs and self.rules is not None else None
        answer = self.oracle.decode(self.prompt, max_tokens, cutter, tokens, absorb=absorb)
        if absorbs:
            self.is_stable = self.is_stable and all(cut.is_stable() for cut in cutter.cuts)
        return replace(answer, cuts=cutter.cuts)

    def _absorb(self, moment: Moment, kept: torch.Tensor) -> Absorbed:
        assert self.rules is not None
        cut = self.cutter.cuts[-1]
        given = (self.mix, cut.attention, cut.layout, self.oracle.kv_heads, cut.settings)
        evidence = methods.observe(*given, earlier=cut.earlier, states=cut.states)
        assert moment.values is not None
        heads = []
        for layer, scores in enumerate(evidence.scores):
            heads.append([])
            for head in range(self.oracle.kv_heads):
                of_head = scores[head * len(scores) // self.oracle.kv_heads].double()
                found, other = (
                    summaries.summaries(
                        moment.keys[layer, head],
                        moment.values[layer, head],
                        moment.kept[layer, head] & ~kept[layer, head],
                        each.tolist(),
                        cut.layout,
                        self.rules,
                        self.taken[-1],
                        self.summaries.get((layer, head), ()),
                    )
                    for each in (of_head, methods.perturbed(of_head, 3e-5))
                )
                self.summaries[layer, head] = found
                rows, others = ([row for kind in each for row in kind] for each in (found, other))
                # Rounding must not choose another root, which would move masses by one and more.
                masses, other_masses = ([row.mass for row in each] for each in (rows, others))
                self.is_stable &= masses == pytest.approx(other_masses, rel=1e-3)
                self.is_stable &= [row.root for row in rows] == [row.root for row in others]
                self.num_rows = max(self.num_rows, len(rows))
                heads[-1].append(rows)
        return Absorbed.of_heads(heads, moment.keys.shape[-1])


def assert_close(running: SteppedEngine, oracle: Oracle) -> None:
    """Serve requests in bfloat16 and assert nearly the log-probabilities that the oracle gives.

    It follows our tokens. The bound is that of plain evictions, see `running.assert_close`.
    """
    asks = [replace(case.ask(number), logprobs=1) for number, case in enumerate(ROUNDED)]
    of_summaries, of_none = [], []
    for case, ask, output in zip(ROUNDED, asks, running.run(asks), strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        ours = [
            step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)
        ]
        prompt = oracle.prompt(ask.text, ask.images)
        rows = num_rows(BLOCK_SIZE, oracle.states(prompt).keys.shape[-1])
        emulation = Emulation(case, prompt, oracle, rows)
        for absorbs, found in ((True, of_summaries), (False, of_none)):
            answer = emulation.answer(len(tokens), absorbs, tokens)
            theirs = answer.logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
            found.append(float((theirs - torch.tensor(ours)).abs().max()))
    assert max(of_summaries) < 0.5, of_summaries
    # The same keys, without summaries.
    assert min(of_none) > 0.5, of_none


@dataclass(frozen=True)
class Expected:
    case: Case
    ask: Ask
    emulation: Emulation
    answer: Answer


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
            emulation = Emulation(case, prompt, oracle, num_rows(BLOCK_SIZE, head_size))
            answer = emulation.answer(ask.max_tokens)
            if not emulation.is_stable:
                continue
            matters = not any(emulation.taken) or (
                answer.tokens != emulation.answer(ask.max_tokens, absorbs=False).tokens
            )
            if matters:
                found.append(Expected(case, ask, emulation, answer))
                break
        else:
            raise AssertionError(f"{case}: no inputs are good")
    taken = [each.emulation.taken for each in found if each.case.method != "snapkv"]
    assert {of_cuts[0] for of_cuts in taken} == {0, 1, 2}
    assert [of_cuts[:3] for of_cuts in taken[-3:]] == [[2, 2, 1], [2, 2, 2], [0, 1, 1]]
    assert max(each.emulation.num_rows for each in found) > BLOCK_SIZE
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param("poisoned", marks=pytest.mark.nightly), "prefix cache", "CUDA"],
)
def running(request: pytest.FixtureRequest, folder: Path) -> Iterator[SteppedEngine]:
    """Engine that prefills in chunks and fills released blocks with NaN, or caches prefixes.

    The first also with the CUDA backend over emulated FlashAttention, in which every decode step
    has the metadata of the first one of its size, and more than two rows take several launches.
    """
    caches = request.param == "prefix cache"
    debug = {"poison": not caches, "check_integrity": True, "record_kept": True}
    options = {} if caches else {"max_num_batched_tokens": 64}
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "CUDA":
            flash_on_cpu.pretend(monkeypatch, flash_on_cpu.ReplayOnCPUWorker)
            monkeypatch.setattr(attention_cuda, "_MAX_SPLIT_SEQUENCES", 5)
            monkeypatch.setattr(attention_cuda, "_KEYS_PER_LAUNCH", 16)
        with engine(
            folder, {**SETTINGS, "debug": debug}, enable_prefix_caching=caches, **options
        ) as started:
            if request.param == "CUDA":
                warm_up(started.evictor)  # as the GPU's worker does when it starts
            yield started


def assert_served(running: SteppedEngine, expected: Expected, output: Any) -> None:
    case, prompt = expected.case, len(expected.emulation.prompt.token_ids)
    kept, answer = running.kept_after_cuts(output.request_id), expected.answer
    whole = case.ceiling is not None
    assert_cuts_agree(kept, answer, output, BLOCK_SIZE, whole=whole, case=case)
    report = output.kv_transfer_params["kv_eviction"]
    for told, cut, taken in zip(report["cuts"], answer.cuts, expected.emulation.taken, strict=True):
        theirs = cut.selection.kept
        is_later = whole and cut is not answer.cuts[0]
        full, filled = (
            (theirs.shape[-1] if is_later else prompt) // BLOCK_SIZE,
            cut.selection.blocks,
        )
        num_kept = filled * BLOCK_SIZE + max(prompt - full * BLOCK_SIZE, 0)
        behind = -(-(prompt + cut.after) // BLOCK_SIZE) - full
        assert told["kept_tokens"] == num_kept, f"{case}: cut after {cut.after}"
        assert told["blocks_after"] == filled + taken + behind, f"{case}: cut after {cut.after}"
    assert report["kept_tokens"] == num_kept, case
    kept_of_prompt = report["kept_text_tokens"] + report["kept_vision_tokens"]
    assert kept_of_prompt == num_kept, case


def test_a_batch(running: SteppedEngine, expected: list[Expected]) -> None:
    """The second time, prefixes are cached if they can be, and requests are preempted."""
    before = flash_on_cpu.ReplayingBuilder.num_replays
    for outputs in (running.run([each.ask for each in expected]), preempted(running, expected)):
        for each, output in zip(expected, outputs, strict=True):
            assert_served(running, each, output)
    num_replays = flash_on_cpu.ReplayingBuilder.num_replays - before
    assert num_replays > 100 or not isinstance(running.worker, flash_on_cpu.ReplayOnCPUWorker)
    if not running.evictor.config.debug.poison:
        # Whoever gets a block next multiplies what is left in it with a weight of 0.
        ask = expected[0].ask
        running.run([replace(ask, xargs={**ask.xargs, "kv_eviction": "unread"})])
        assert running.evictor.pool.raw.isfinite().all()


def preempted(running: SteppedEngine, expected: list[Expected]) -> list[Any]:
    """Serve all requests, each preempted after some tokens of its answer."""
    names = [running.add(each.ask) for each in expected]
    waiting, finished = dict(zip(names, (7, 9, 5, 6, 8, 12, 10, 4, 20, 70, 90), strict=True)), {}
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
    assert running.evictor.summaries.counts.count_nonzero() > 0
    running.engine.abort_request([first, second])
    running.drain()
    running.assert_empty()
    (output,) = running.run([expected[0].ask])
    assert_served(running, expected[0], output)
    assert running.evictor.summaries.counts.count_nonzero() <= 1
