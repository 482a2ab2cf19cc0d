# SPDX-License-Identifier: Apache-2.0
"""Every method in real engines, many of them in one batch, against `oracle.methods`.

Engines without prefix caching fill released blocks with NaN. All blocks are recounted after every
step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import methods
from oracle.emulation import Eviction, Oracle, Prompt, Selection
from oracle.methods import HEAD, LAYER, Auto, Mix, Pool
from tests.configs import pooling_name
from tests.engine.questions import DEBUG, HEAD_SCORES, VISION_TOKENS, album, budget
from tests.engine.running import Ask, SteppedEngine, assert_agrees, stable_ask
from tests.inputs import WITHOUT_GATES
from tests.models import LLAVA_IMAGE, random_image, random_text
from vllm_tgvkv.shared.budget import Budget

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE = 32

# Every method at its other granularity, and combinations that belong to no method.
MIXES = {
    f"{name}-{other}": replace(mix, granularity=other)
    for name, mix in WITHOUT_GATES.items()
    for other in {LAYER, HEAD} - {mix.granularity}
    if name not in ("adakv", "rkv", "mixkv", "random")
} | {
    "own modality": Mix("vv_tt", "vv", "vision_first", HEAD),
    "text": Mix("text_rows", "tt", "text_first", HEAD, Pool("grid", 3, "mean")),
    "entropy": Mix("aircache", "entropy", "recent_half", HEAD, Pool("sequence", 5, "mean")),
    "elite everywhere": Mix("h2o", "aircache", "recent_tenth", LAYER),
    "competing": Mix("tgv", "adakv", "by_score", HEAD, merge=True),
    "prefix and all": Mix("vv_tt", "prefixkv", "window", HEAD),
    "text as printed": Mix("tgv", "tgv", "text_first", rows="all_text"),
    "pyramid of heads": replace(WITHOUT_GATES["adakv"], allocation="ada_pyramid"),
    "skewed": Mix("aircache", "aircache_skewness", "text_first"),
}
EVERYTHING = {**WITHOUT_GATES, **MIXES}


def as_setting(mix: Mix) -> dict[str, Any]:
    """Return a mix as the setting `methods` has it: a direction excludes a kernel."""
    pooling = asdict(mix.pooling)
    if mix.pooling.has_direction:
        pooling["kernel"] = None
    return {**asdict(mix), "pooling": pooling_name(**pooling)}


SERVER = {
    "policy": "snapkv",
    "budget": 0.3,
    "defer": 0,
    "text_only": "evict",
    "methods": {name: as_setting(mix) for name, mix in MIXES.items()},
}


@dataclass(frozen=True)
class Case:
    """A request: method, budget, and lengths of the text around its images."""

    method: str
    budget: float | int | Auto
    lengths: tuple[int, ...]
    max_tokens: int = 20

    @property
    def wanted(self) -> Eviction:
        mix = EVERYTHING[self.method]
        return Eviction(
            self.budget,
            BLOCK_SIZE,
            observation_window=128,
            method=mix,
            text_only="evict",
            head_scores=torch.tensor(HEAD_SCORES.scores),
        )

    def ask(self, seed: int, arrival: int = 0) -> Ask:
        texts = [random_text(100 * seed + i, n) for i, n in enumerate(self.lengths)]
        images = tuple(random_image(100 * seed + i) for i in range(len(texts) - 1))
        budget: Any = self.budget
        if isinstance(budget, Auto):
            budget = f"auto:{budget.share},min={budget.least},max={budget.most}"
        xargs = {"kv_eviction": self.method, "kv_eviction_budget": budget, "kv_eviction_report": 1}
        return Ask(LLAVA_IMAGE.join(texts), images, self.max_tokens, xargs, arrival)


@dataclass(frozen=True)
class Expected:
    """A case, its inputs, on which rounding decides nothing, and the oracle's result."""

    case: Case
    ask: Ask
    prompt: Prompt
    selection: Selection | None
    """None if the definition leaves it open, as with random scores."""
    merging: int = 0
    """First tokens among which those that are evicted are merged."""


class Cases:
    """Results of the oracle, computed once for all engines."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.expected = cache(self._expected)

    def _expected(self, case: Case, seed: int, arrival: int) -> Expected:
        torch.manual_seed(seed)
        wanted, oracle = case.wanted, self.oracle

        def make(attempt: int) -> Ask:
            return case.ask(seed + 1000 * attempt, arrival)

        if WITHOUT_GATES.get(case.method) == WITHOUT_GATES["random"]:
            ask = make(0)
            return Expected(case, ask, oracle.prompt(ask.text, ask.images), None)

        def num_merging(prompt: Prompt) -> int:
            return len(prompt.token_ids) // BLOCK_SIZE * BLOCK_SIZE * wanted.merges

        def tests_merging(ask: Ask, prompt: Prompt) -> bool:
            if not (merging := num_merging(prompt)):
                return True
            kept = oracle.select(prompt, wanted).kept
            merged, plain = (
                oracle.generate(prompt, ask.max_tokens, kept, each) for each in (merging, 0)
            )
            return merged != plain

        ask, prompt = stable_ask(oracle, make, wanted, trials=3, accepts=tests_merging)
        return Expected(case, ask, prompt, oracle.select(prompt, wanted), num_merging(prompt))


@pytest.fixture(scope="module")
def cases(folder: Path) -> Cases:
    return Cases(Oracle(folder))


OPTIONS = {"max_num_seqs": 64, "num_gpu_blocks_override": 768}


@pytest.fixture
def server(heads: str) -> dict[str, Any]:
    """Return settings with a file of head scores."""
    return {**SERVER, "head_scores": heads}


@pytest.fixture(
    scope="module", params=[pytest.param(16384, marks=pytest.mark.nightly, id="whole"), 64]
)
def chunk(request: pytest.FixtureRequest) -> int:
    """Return the tokens of a step."""
    return request.param


@pytest.fixture
def running(
    engines: Callable[..., SteppedEngine], folder: Path, server: dict[str, Any], chunk: int
) -> SteppedEngine:
    """Return an engine that prefills prompts whole, or in chunks of 64 tokens."""
    settings = {**server, "debug": {**DEBUG, "evict_at_full_budget": True}}
    return engines(folder, settings, max_num_batched_tokens=chunk, **OPTIONS)


@pytest.fixture
def caching(
    engines: Callable[..., SteppedEngine], folder: Path, server: dict[str, Any]
) -> SteppedEngine:
    """Return an engine with a prefix cache."""
    settings = {**server, "debug": {**DEBUG, "poison": False}}
    return engines(folder, settings, enable_prefix_caching=True, **OPTIONS)


def assert_report(output: Any, expected: Expected, kept: torch.Tensor, blocks: int) -> None:
    report = dict(output.kv_transfer_params["kv_eviction"])
    seconds = report.pop("seconds")
    assert {"selection", "copy"} <= set(seconds) <= {"statistics", "selection", "copy"}
    assert min(seconds.values()) > 0
    full, tail = divmod(len(expected.prompt.token_ids), BLOCK_SIZE)
    is_vision, in_blocks = expected.prompt.vision, expected.prompt.vision.clone()
    in_blocks[full * BLOCK_SIZE :] = False
    kept_vision = round(kept[..., in_blocks].sum().item() / kept[..., 0].numel())
    kept_vision += int((is_vision & ~in_blocks).sum())
    sizes = {
        "blocks_before": full + (tail > 0),
        "kept_tokens": blocks * BLOCK_SIZE + tail,
        "blocks_after": blocks + (tail > 0),
    }
    memory = report.pop("memory")
    assert memory["before"] * sizes["blocks_after"] == memory["after"] * sizes["blocks_before"]
    assert memory["given_back"] <= memory["before"] - memory["after"]
    budget = Budget.parse(expected.ask.xargs["kv_eviction_budget"], "")
    assert report.pop("understood") == f"{budget}{budget.doubt}"
    assert report == {
        "policy": expected.case.method,
        "prompt_tokens": len(expected.prompt.token_ids),
        "budget": expected.ask.xargs["kv_eviction_budget"],
        "defer": 0,
        "when": "always",
        "decode": None,
        "protected_tokens": 0,
        "sketch_blocks": 0,
        "recalls": [],
        **sizes,
        "vision_tokens": int(is_vision.sum()),
        "kept_text_tokens": sizes["kept_tokens"] - kept_vision,
        "kept_vision_tokens": kept_vision,
        "skip_reason": None,
        "trace": None,
        "cuts": [{"answer_tokens": 0, **sizes, "cause": "first"}],
    }


def assert_served(cases: Cases, expected: Expected, running: SteppedEngine, output: Any) -> None:
    """Assert that tokens and kept positions equal the oracle's, and the report matches."""
    kept = running.kept(output.request_id, len(output.prompt_token_ids))
    message = f"{expected.case}"
    assert kept is not None, message
    candidates = kept.shape[-1] // BLOCK_SIZE * BLOCK_SIZE
    mean = kept[..., :candidates].sum() / kept[..., 0].numel() / BLOCK_SIZE
    assert_report(output, expected, kept, int(mean))
    if expected.selection is not None:
        assert int(mean) == expected.selection.blocks, message
        assert torch.equal(kept, expected.selection.kept), f"{message} keeps other tokens"
    assert (kept[..., :4]).all(), message
    tokens = list(output.outputs[0].token_ids)
    given = expected.prompt, expected.ask.max_tokens, kept, expected.merging
    assert tokens == cases.oracle.generate(*given, guess=tokens), message


def batch() -> list[Case]:
    """Return cases of every method with one and with two images, and of every mix."""
    own = [
        case
        for i, name in enumerate(WITHOUT_GATES)
        for case in (
            Case(name, 0.5, (20 + 7 * i, 130 + 9 * i)),
            Case(name, 0.2, (50 - 3 * i, 20 + i, 100 + 5 * i)),
        )
    ]
    budgets: list[float | int] = [0.3, 0.4, 100]
    mixed = [Case(name, budgets[i % 3], (10 + 5 * i, 120 + i)) for i, name in enumerate(MIXES)]
    # An image ends the prompt, so there is no text after vision to vote.
    ends = [Case(name, 0.4, (60, 50, 0)) for name in ("tgv", "vlcache", "aircache", "snapkv-layer")]
    return own + mixed + ends


def test_all_methods_in_one_batch(running: SteppedEngine, cases: Cases) -> None:
    before = running.counters["requests_evicted"]
    expected = [cases.expected(case, 1 + i, i // 5) for i, case in enumerate(batch())]
    outputs = running.run([each.ask for each in expected])
    assert running.counters["requests_evicted"] - before == len(expected)
    for each, output in zip(expected, outputs, strict=True):
        assert_served(cases, each, running, output)


AUTO = [
    Case("tgv", Auto(0.9, 0.02, 0.9), (20, 100)),
    Case("tgv-head", Auto(0.7, 0.02, 0.5), (50, 60, 60)),
    Case("vlcache", Auto(0.95, 0.1, 0.99), (30, 70, 40)),
    Case("snapkv", Auto(0.85, 0.02, 0.8), (20, 90)),
    Case("h2o", Auto(0.97, 0.02, 0.9), (10, 50, 60)),
    Case("elastic", Auto(0.5, 0.5, 0.8), (20, 60, 10)),
    Case("aircache", Auto(0.99, 0.02, 0.3), (20, 60, 30)),  # limited by the bound
    Case("prefixkv-head", Auto(0.8, 0.02, 0.7), (20, 70, 30)),
    Case("sparsemm", Auto(0.8, 0.02, 0.7), (30, 80)),
    Case("mixkv", Auto(0.8, 0.02, 0.7), (20, 110)),
]


def test_auto_budgets_hold_the_fewest_blocks(running: SteppedEngine, cases: Cases) -> None:
    """Blocks reserved beyond the oracle's k are released while the request still decodes."""
    expected = [cases.expected(case, 200 + i, 0) for i, case in enumerate(AUTO)]
    names = [running.add(each.ask) for each in expected]
    held: dict[str, int] = {}
    finished: dict[str, Any] = {}
    while running.engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in running.step() if output.finished}
        for name, blocks in running.scheduler.manager.req_to_blocks.items():
            request = running.scheduler.requests[name]
            # Exclude the blocks of the tail and of decoded tokens.
            after = -(-request.num_computed_tokens // BLOCK_SIZE)
            after -= request.num_prompt_tokens // BLOCK_SIZE
            held[name.rsplit("-", 1)[0]] = sum(not block.is_null for block in blocks) - after
    running.assert_empty()
    for name, each in zip(names, expected, strict=True):
        assert each.selection is not None
        assert_served(cases, each, running, finished[name])
        assert held[name] == each.selection.blocks, each.case
    numbers = {each.selection.blocks for each in expected if each.selection is not None}
    assert len(numbers) > 2, "all prompts need as many blocks: nothing was tested"


TEXT_ONLY = ["snapkv", "h2o", "streaming", "adakv", "vlcache", "prefixkv", "elastic", "random"]


def test_prompts_without_vision(running: SteppedEngine, cases: Cases) -> None:
    expected = [
        cases.expected(Case(name, 0.25, (170 + 11 * i,)), 300 + i, i)
        for i, name in enumerate(TEXT_ONLY)
    ]
    outputs = running.run([each.ask for each in expected])
    for each, output in zip(expected, outputs, strict=True):
        assert_served(cases, each, running, output)


@pytest.mark.parametrize("method", ["tgv", "aircache", "own modality"])
def test_methods_that_need_vision(running: SteppedEngine, cases: Cases, method: str) -> None:
    ask = Case(method, 0.25, (200,)).ask(400)
    (output,) = running.run([ask])
    report = output.kv_transfer_params["kv_eviction"]
    assert report["skip_reason"] == "method_needs_vision"
    prompt = cases.oracle.prompt(ask.text)
    tokens = list(output.outputs[0].token_ids)
    assert tokens == cases.oracle.generate(prompt, ask.max_tokens, guess=tokens)


def test_everything_kept_is_whole_and_an_abort_between_chunks_leaves_nothing(
    running: SteppedEngine, cases: Cases
) -> None:
    """Every page is copied to a fresh block: all tokens equal the whole cache's."""
    asks = [
        Case(name, 1.0, (20, 150 + 67 * i)).ask(600 + i, 2 * i)
        for i, name in enumerate(("tgv", "tgv-head", "h2o", "adakv"))
    ]
    before = running.counters["requests_evicted"]
    for ask, tokens in zip(asks, running.tokens(asks), strict=True):
        prompt = cases.oracle.prompt(ask.text, ask.images)
        assert tokens == cases.oracle.generate(prompt, ask.max_tokens, guess=tokens)
    assert running.counters["requests_evicted"] - before == len(asks)
    names = [running.add(ask) for ask in asks]
    running.step()  # the first prompt is between two chunks
    running.engine.abort_request(names)
    running.drain()
    assert not running.evictor.observations


def test_prefix_cache_changes_nothing(caching: SteppedEngine, cases: Cases) -> None:
    """A hit ends before the first row that votes, and the same tokens are kept as without it."""
    names = [*WITHOUT_GATES, "own modality", "elite everywhere", "competing", "prefix and all"]
    expected = [
        cases.expected(Case(name, 0.3, (70, 130 + i), max_tokens=8), 500 + i, 0)
        for i, name in enumerate(names)
    ]
    for turn in range(2):
        outputs = caching.run([each.ask for each in expected])
        for each, output in zip(expected, outputs, strict=True):
            assert_served(cases, each, caching, output)
            hit = cached_tokens(each) if turn else 0
            assert output.num_cached_tokens == hit, each.case
    hits = {output.num_cached_tokens for output in outputs}
    assert len(hits) == 4, "hits should range from nothing to the whole prompt"


def test_prefix_cache_serves_the_same_image_again(caching: SteppedEngine, cases: Cases) -> None:
    """Hits on released blocks; the kept tokens do not depend on the hit."""
    oracle = cases.oracle
    first = album(80, 60, 200, max_tokens=40, xargs=budget(0.1, kv_eviction="tgv"))
    text = first.text[: first.text.index(LLAVA_IMAGE)] + LLAVA_IMAGE + random_text(999, 220)
    other_question = replace(first, text=text)
    (cold,) = assert_agrees(caching, oracle, [first])
    (warm,) = assert_agrees(caching, oracle, [first])
    (other,) = assert_agrees(caching, oracle, [other_question])
    assert cold.num_cached_tokens == 0
    # The same prompt hits up to its first observation row, another question to the image.
    window = caching.evictor.config.observation_window
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - window) // 32 * 32
    assert other.num_cached_tokens == (60 + VISION_TOKENS) // 32 * 32
    both = assert_agrees(caching, oracle, [first, other_question, first])
    assert all(output.num_cached_tokens > 0 for output in both)


def cached_tokens(expected: Expected) -> int:
    """Return the tokens of whole blocks before the first row that the method reads."""
    mix = EVERYTHING[expected.case.method]
    rows_of_allocation = {
        "tgv": "text",
        "tt": "text",
        "entropy": "text",
        "vv": "all",
        "vlcache": "after_vision",
    }
    row_sets = {methods.ROWS_OF_SCORE.get(mix.score), rows_of_allocation.get(mix.allocation)}
    layout = expected.prompt.layout
    firsts = [methods.rows(str(kind), layout, 128)[0] for kind in row_sets - {None}]
    # At least the prompt's last token is always computed.
    return min([*firsts, layout.length - 1]) // BLOCK_SIZE * BLOCK_SIZE
