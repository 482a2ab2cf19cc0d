# SPDX-License-Identifier: Apache-2.0
"""Kept tokens equal those of NVIDIA's kvpress, on the same weights and prompts.

kvpress runs in a separate environment, see `tests/kvpress`, and records its kept tokens, queries
and keys. Pages of one token make the granularities equal. Every difference is intended and has a
test; `docs/kvpress.md` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.inputs import paged
from tests.kvpress.environment import run_script
from tests.kvpress.record import load, states_of
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.select import page_offsets, select_tokens
from vllm_tgvkv.kernels.statistics import observe
from vllm_tgvkv.policies import (
    NO_ATTENTION,
    Attention,
    LayerView,
    Mix,
    Policy,
    Pooling,
    Prompt,
    adakv,
    build_policy,
)
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.prompt import WINDOW, PromptMap, RowSet, voters
from vllm_tgvkv.worker.decision import ScoredPrompt

pytestmark = pytest.mark.slow

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 4, 4, 2, 16, 64
SCALE = HEAD_SIZE**-0.5
PROMPTS = {"short": 97, "round": 100, "middle": 230, "long": 1400}
RATIOS = (0.1, 0.37, 0.6)
"""Compression ratios that leave more than the window of every prompt."""
KERNEL = 5
ROUNDING = 1e-5
"""Relative difference of two scores that float32 may order either way."""

NO_POOLING = Pooling()
MEAN_POOLING = Pooling("sequence", KERNEL, "mean")


@dataclass(frozen=True)
class Case:
    """One run of kvpress, in the format of `tests/kvpress/kept.py`."""

    prompt: str
    press: str
    options: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"


def snap(ratio: float, kernel: int = 1) -> dict[str, Any]:
    return {"compression_ratio": ratio, "window_size": WINDOW, "kernel_size": kernel}


def all_cases() -> dict[str, Case]:
    cases = {
        "snapkv-eager": Case("middle", "SnapKVPress", snap(0.5), "eager"),
        "snapkv-small": Case("middle", "SnapKVPress", snap(0.9)),
        "streaming-round": Case("round", "StreamingLLMPress", {"compression_ratio": 0.9}),
        "streaming-small": Case("short", "StreamingLLMPress", {"compression_ratio": 0.97}),
        "pyramidkv": Case("long", "PyramidKVPress", snap(0.52)),
        "pyramidkv-capped": Case("long", "PyramidKVPress", snap(0.3)),
        "pyramidkv-short": Case("middle", "PyramidKVPress", snap(0.6)),
        "adakv-safeguard": Case("long", "AdaKVPress", {"over": snap(0.52), "alpha_safeguard": 0.5}),
    }
    for prompt in ("short", "middle"):
        for ratio in RATIOS:
            name = f"{prompt}-{ratio}"
            by_ratio = {"compression_ratio": ratio}
            for kernel in (1, KERNEL):
                over = snap(ratio, kernel)
                cases[f"snapkv-{kernel}-{name}"] = Case(prompt, "SnapKVPress", over)
                cases[f"adakv-{kernel}-{name}"] = Case(prompt, "AdaKVPress", {"over": over})
            cases[f"streaming-{name}"] = Case(prompt, "StreamingLLMPress", by_ratio)
            cases[f"h2o-{name}"] = Case(prompt, "ObservedAttentionPress", by_ratio, "eager")
    return cases


over_prompts = pytest.mark.parametrize("prompt", ["short", "middle"])
over_ratios = pytest.mark.parametrize("ratio", RATIOS)


# -- kvpress's side ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """Records of kvpress: kept tokens, scores, queries and keys."""

    folder: Path
    prompts: Mapping[str, Tensor]
    """Tokens, int64 ``[P]``."""
    recorded: Mapping[str, Tensor]

    def kept(self, case: str) -> Tensor:
        """Return the kept tokens, bool ``[L, H, P]``."""
        return self.recorded[f"kept.{case}"]

    def scores(self, case: str) -> Tensor:
        """Return kvpress's scores, float32 ``[L, H, P]``."""
        return self.recorded[f"scores.{case}"]

    def states(self, case: str) -> tuple[Tensor, Tensor]:
        """Return rotated queries ``[L, P, Q, D]`` and keys ``[L, P, H, D]`` of the prompt."""
        name = f"{CASES[case].prompt}.{CASES[case].attention}"
        return self.recorded[f"queries.{name}"], self.recorded[f"keys.{name}"]


CASES = all_cases()


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Records of kvpress on random weights and prompts."""
    folder = tmp_path_factory.mktemp("kvpress")
    write_model(folder / "model")
    prompts = {name: torch.randint(VOCABULARY, (length,)) for name, length in PROMPTS.items()}
    (folder / "prompts.json").write_text(json.dumps({k: v.tolist() for k, v in prompts.items()}))
    (folder / "cases.json").write_text(json.dumps({k: asdict(v) for k, v in CASES.items()}))
    run_script("kept.py", folder)
    return Peer(folder, prompts, load_file(folder / "recorded.safetensors"))


@torch.no_grad()
def write_model(folder: Path) -> None:
    """Write a Llama whose heads attend to some tokens much more than to others.

    The last KV head is the sharpest, so that heads differ in how many tokens they need.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=QUERY_HEADS * HEAD_SIZE,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=QUERY_HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_SIZE,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.15)
        if "k_proj" in name:
            parameter[-HEAD_SIZE:] *= 6
    model.save_pretrained(folder)


# -- our side ---------------------------------------------------------------------------------


def without_pooling(method: str, **parts: Any) -> Policy:
    return build_policy(Mix(method, pooling=NO_POOLING, **parts))


def prompt_of(scores: Tensor, sinks: int = 0) -> Prompt:
    """Return a text-only prompt without a tail."""
    num_tokens = scores.shape[-1]
    return Prompt(num_tokens, num_tokens, torch.zeros(num_tokens, dtype=torch.bool), sinks)


def attention_of(kind: RowSet, queries: Tensor, keys: Tensor) -> Attention:
    """Return statistics of one layer's rows from queries ``[P, Q, D]`` and keys ``[P, H, D]``."""
    if kind == "none":
        return NO_ATTENTION
    num_tokens = keys.shape[0]
    pages, ids = paged(keys, 1, transposed=True)
    queries = queries.unflatten(1, (KV_HEADS, -1))
    if kind != "all":
        rows = torch.from_numpy(voters(PromptMap(num_tokens, ()), [kind], 128).sets[kind])
        return observe(queries[rows], pages, ids, rows, num_tokens, SCALE)
    sums = RowSums(KV_HEADS, num_tokens, keys.device)
    for rows in torch.arange(num_tokens).split(num_tokens // 2):
        seen = int(rows[-1]) + 1
        chunk = observe(queries[rows], pages, ids[:seen], rows, seen, SCALE)
        sums.add(chunk, torch.zeros_like(rows, dtype=torch.bool))
    return sums


def our_scores(policy: Policy, states: tuple[Tensor, Tensor]) -> Tensor:
    """Return unpooled scores, float32 ``[L, S, P]``."""
    prompt = prompt_of(states[0][0, :, 0, 0])
    num_sets = KV_HEADS if policy.granularity == "head" else 1
    return torch.stack(
        [
            policy.score(
                LayerView(layer, num_sets, prompt, attention_of(policy.score.rows, queries, keys))
            )
            for layer, (queries, keys) in enumerate(zip(*states, strict=True))
        ]
    )


def pooled(policy: Policy, scores: Tensor) -> Tensor:
    return torch.stack([policy.pooled(layer, prompt_of(scores)) for layer in scores])


def our_kept(policy: Policy, scores: Tensor, num_kept: int, sinks: int = 0) -> Tensor:
    """Return our kept tokens ``[L, H, P]`` for pooled scores, ``num_kept`` per head on average."""
    nothing = scores.new_empty(*scores.shape[:2], 0)  # strengths, which no allocation here uses
    scored = ScoredPrompt(policy, prompt_of(scores, sinks), scores, nothing, KV_HEADS, 1, 0)
    decision = scored.decide(num_kept)
    return mask_of(decision.positions, decision.counts, scores.shape[-1])


def kept_with(policy: Policy, scores: Tensor, counts: Tensor) -> Tensor:
    """Return our kept tokens if each (layer, head) keeps as many as kvpress, ``[L, H]``."""
    tiers = policy.retention.tiers(prompt_of(scores), counts)
    positions = select_tokens(scores, tiers, counts, int(counts.sum()), 1)
    return mask_of(positions, counts, scores.shape[-1])


def mask_of(positions: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
    """Return kept positions, whose pages are in (layer, head) order, as bool ``[L, H, P]``."""
    kept = torch.zeros(counts.numel(), num_tokens, dtype=torch.bool)
    offsets = page_offsets(counts).tolist()
    for pair in range(counts.numel()):
        kept[pair, positions[offsets[pair] : offsets[pair + 1]].flatten().long()] = True
    return kept.view(*counts.shape, num_tokens)


# -- comparison -------------------------------------------------------------------------------


def kept_number(kept: Tensor) -> int:
    """Return the tokens that a head keeps on average."""
    return int(kept.sum()) // (LAYERS * KV_HEADS)


def best(scores: Tensor, number: int) -> Tensor:
    """Return the ``number`` highest scores of each head, bool ``[L, H, P]``."""
    chosen = scores.topk(number, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def assert_same(ours: Tensor, theirs: Tensor, scores: Tensor) -> None:
    """Assert that the kept tokens are equal, except for ties in kvpress's ``scores``.

    All are ``[..., n]``; the tokens of a row compete with each other.
    """
    assert ours.shape == theirs.shape == scores.shape
    rows = zip(ours.flatten(0, -2), theirs.flatten(0, -2), scores.flatten(0, -2), strict=True)
    for mine, other, score in rows:
        assert mine.sum() == other.sum()
        exchanged = score[mine != other]
        if len(exchanged):
            assert exchanged.max() - exchanged.min() <= ROUNDING * exchanged.max()


# -- the model --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROMPTS)
def test_this_environment_computes_the_same_states(peer: Peer, name: str) -> None:
    """Both versions of transformers agree on weights, rotary positions and head order."""
    model = load(peer.folder / "model", "sdpa")
    queries, keys = states_of(model, peer.prompts[name][None])
    torch.testing.assert_close(queries, peer.recorded[f"queries.{name}.sdpa"], rtol=0, atol=1e-4)
    torch.testing.assert_close(keys, peer.recorded[f"keys.{name}.sdpa"], rtol=0, atol=1e-4)


# -- methods that keep the same -----------------------------------------------------------------


def with_their_borders(scores: Tensor) -> Tensor:
    """Pool scores ``[L, H, P]`` like kvpress.

    The window does not take part, and positions outside count as zeros.
    """
    before = F.avg_pool1d(scores[..., :-WINDOW], KERNEL, stride=1, padding=KERNEL // 2)
    return torch.cat((before, scores[..., -WINDOW:]), dim=-1)


def later_rows(scores: Tensor) -> Tensor:
    """Return how many rows see each position, float32 ``[P]``."""
    return torch.arange(scores.shape[-1], 0, -1).float()


def unchanged(scores: Tensor) -> Tensor:
    return scores


def means(scores: Tensor) -> Tensor:
    """kvpress divides each column sum by the number of rows that see the column."""
    return scores / later_rows(scores)


SAME: dict[str, tuple[Policy, Callable[[Tensor], Tensor]]] = {
    "snapkv-1": (without_pooling("snapkv"), unchanged),
    f"snapkv-{KERNEL}": (build_policy(Mix("snapkv", pooling=MEAN_POOLING)), with_their_borders),
    "adakv-1": (without_pooling("adakv"), unchanged),
    f"adakv-{KERNEL}": (build_policy(Mix("adakv", pooling=MEAN_POOLING)), with_their_borders),
    "streaming": (build_policy("streaming"), unchanged),
    "h2o": (without_pooling("h2o", retain="by_score"), means),
}
"""Our policies, and what makes our scores kvpress's."""


@pytest.mark.parametrize(
    ("method", "case"),
    [
        *((name, f"{name}-{p}-{r}") for name in SAME for p in ("short", "middle") for r in RATIOS),
        ("snapkv-1", "snapkv-eager"),  # kvpress takes the model's probabilities and computes none
    ],
)
def test_kept_tokens_are_the_same(peer: Peer, method: str, case: str) -> None:
    policy, transform = SAME[method]
    theirs, their_scores = peer.kept(case), peer.scores(case)
    scores = transform(our_scores(policy, peer.states(case)))
    ours = our_kept(policy, scores, kept_number(theirs), sinks=4 * (method == "streaming"))
    if method == "streaming":
        assert torch.equal(ours, theirs)
    elif method.startswith("adakv"):  # the heads of a layer compete
        assert_same(ours.flatten(1), theirs.flatten(1), their_scores.flatten(1))
        assert (theirs.sum(dim=-1).diff(dim=-1) != 0).any(), "the heads should differ"
    else:
        assert_same(ours, theirs, their_scores)
    if method == "h2o":
        torch.testing.assert_close(scores, their_scores, rtol=1e-4, atol=1e-8)
    if method == "snapkv-1":
        before = their_scores[..., :-WINDOW]
        torch.testing.assert_close(scores[..., :-WINDOW] / WINDOW, before, rtol=1e-4, atol=1e-8)


# -- SnapKV -----------------------------------------------------------------------------------


@over_prompts
@over_ratios
def test_snapkv_pools_differently_at_two_borders_only(
    peer: Peer, prompt: str, ratio: float
) -> None:
    case = f"snapkv-{KERNEL}-{prompt}-{ratio}"
    policy, theirs = SAME[f"snapkv-{KERNEL}"][0], peer.kept(case)
    unpooled = our_scores(policy, peer.states(case))
    scores, their_scores = pooled(policy, unpooled), peer.scores(case)
    reach, size = KERNEL // 2, unpooled.shape[-1]
    window = size - WINDOW
    inside = slice(reach, window - reach)
    # Two neighbours of the last token before the window are in the window.
    missing = unpooled[..., window : window + reach].sum(dim=-1) / KERNEL
    last = (scores[..., window - 1] - missing) / WINDOW
    for ours, other, rtol, atol in (
        (scores[..., inside] / WINDOW, their_scores[..., inside], 1e-4, 1e-8),
        # Two neighbours of the first token are outside: we divide by 3, kvpress by 5.
        (scores[..., 0] / WINDOW * 3 / 5, their_scores[..., 0], 1e-4, 1e-8),
        (last, their_scores[..., window - 1], 1e-3, 1e-6),
    ):
        torch.testing.assert_close(ours, other, rtol=rtol, atol=atol)
    borders = torch.ones(size, dtype=torch.bool)
    borders[inside] = borders[window:] = False
    ours = our_kept(policy, scores, kept_number(theirs))
    # Every difference involves a token at a border.
    assert ((ours & ~theirs).sum(-1) <= ((ours ^ theirs) & borders).sum(-1)).all()


def test_a_budget_below_the_window_keeps_the_best_of_it(peer: Peer) -> None:
    """kvpress's window has one score, so the part that stays is undefined; ours is ranked."""
    policy, theirs = without_pooling("snapkv"), peer.kept("snapkv-small")
    scores = our_scores(policy, peer.states("snapkv-small"))
    number = kept_number(theirs)
    assert number < WINDOW
    assert not theirs[..., :-WINDOW].any()
    assert len(peer.scores("snapkv-small")[..., -WINDOW:].unique()) == LAYERS
    of_window = torch.full_like(scores, float("-inf"))
    of_window[..., -WINDOW:] = scores[..., -WINDOW:]
    assert torch.equal(our_kept(policy, scores, number), best(of_window, number))


@over_prompts
@over_ratios
def test_our_sinks_come_first(peer: Peer, prompt: str, ratio: float) -> None:
    case, sinks = f"snapkv-1-{prompt}-{ratio}", 4
    policy = without_pooling("snapkv")
    number = kept_number(peer.kept(case))
    theirs = peer.scores(case).clone()
    theirs[..., :sinks] = 2 * theirs.max()
    ours = our_kept(policy, our_scores(policy, peer.states(case)), number, sinks)
    assert_same(ours, best(theirs, number), theirs)


# -- StreamingLLM -----------------------------------------------------------------------------


def test_a_budget_below_the_sinks_keeps_the_last_of_them(peer: Peer) -> None:
    """kvpress's sinks have one score, so the ones that stay are undefined; ours are ranked."""
    policy, theirs, sinks = build_policy("streaming"), peer.kept("streaming-small"), 4
    number = kept_number(theirs)
    assert number == 2
    assert not theirs[..., sinks:].any()
    scores = our_scores(policy, peer.states("streaming-small"))
    ours = our_kept(policy, scores, number, sinks)
    assert ours[..., sinks - number : sinks].all()
    assert ours.sum() == theirs.sum()


def test_a_tenth_of_a_hundred_is_ten(peer: Peer) -> None:
    """kvpress truncates 100 * (1 - 0.9), which is 9.999... in floating point."""
    assert kept_number(peer.kept("streaming-round")) == 9
    assert Budget(fraction=0.1).retained_blocks(PROMPTS["round"], 1) == 10


# -- PyramidKV --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "ratio"), [("pyramidkv", 0.52), ("pyramidkv-capped", 0.3), ("pyramidkv-short", 0.6)]
)
def test_pyramidkv_keeps_the_window_beside_the_pyramid(peer: Peer, case: str, ratio: float) -> None:
    """kvpress has it inside, where the last layers may have no room for it.

    It then treats all layers equally. With as many tokens, the sets are the same.
    """
    policy, theirs = without_pooling("pyramidkv"), peer.kept(case)
    scores = our_scores(policy, peer.states(case))
    counts, size = theirs.sum(dim=-1), scores.shape[-1]

    def falling(mean: float, most: float) -> list[float]:
        first = min(mean * 39 / 20, most)
        return [first - layer * 2 * (first - mean) / (LAYERS - 1) for layer in range(LAYERS)]

    inside = falling(size * (1 - ratio), size - WINDOW)
    if inside[-1] < WINDOW:
        inside = [size * (1 - ratio)] * LAYERS
    for number, wanted in zip(counts[:, 0].tolist(), inside, strict=True):
        assert abs(number - wanted) <= 1
    ours = our_kept(policy, scores, kept_number(theirs))
    assert ours[..., -WINDOW:].all()
    beside = falling(kept_number(theirs) - WINDOW, size - WINDOW)
    for number, wanted in zip(ours.sum(dim=-1)[:, 0].tolist(), beside, strict=True):
        assert abs(number - WINDOW - wanted) < 1
    assert_same(kept_with(policy, scores, counts), theirs, peer.scores(case))


# -- AdaKV ------------------------------------------------------------------------------------


def test_adakv_safeguard(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """First a guarantee of a half, which some heads of this small model need; then a fifth."""
    policy, theirs = without_pooling("adakv"), peer.kept("adakv-safeguard")
    number = kept_number(theirs)
    assert theirs.sum(dim=-1).min() == number // 2, "no head needed the safeguard"
    scores = our_scores(policy, peer.states("adakv-safeguard"))
    monkeypatch.setattr(adakv, "SAFEGUARD", 2)
    ours = our_kept(policy, scores, number)
    assert_same(*(x.flatten(1) for x in (ours, theirs, peer.scores("adakv-safeguard"))))
    monkeypatch.undo()
    # kvpress guarantees at least one token.
    assert [max(1, int(n * 0.2)) for n in range(5, 9999)] == [
        n // adakv.SAFEGUARD for n in range(5, 9999)
    ]


# -- H2O --------------------------------------------------------------------------------------


@over_prompts
@over_ratios
def test_h2o_keeps_heavy_hitters_by_sum(peer: Peer, prompt: str, ratio: float) -> None:
    """Like the paper, we rank by sums and keep half of the budget for recent tokens."""
    case = f"h2o-{prompt}-{ratio}"
    theirs, number = peer.scores(case), kept_number(peer.kept(case))
    sums = theirs * later_rows(theirs)

    by_score = without_pooling("h2o", retain="by_score")
    scores = our_scores(by_score, peer.states(case))
    assert_same(our_kept(by_score, scores, number), best(sums, number), sums)

    recent_half = sums.clone()
    recent_half[..., -(number // 2) :] = 2 * sums.max()
    ours = our_kept(build_policy("h2o"), scores, number)
    assert_same(ours, best(recent_half, number), recent_half)
