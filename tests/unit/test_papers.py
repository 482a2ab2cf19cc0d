# SPDX-License-Identifier: Apache-2.0
"""Methods against the formulas of their papers, over whole attention matrices, in float64.

The definitions here are written from the papers alone, page size and sinks aside: pages hold one
token, there are no sinks and no floor, so that what is kept is the paper's set of tokens.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from oracle import states
from oracle.methods import Image, Layout, Settings
from tests.configs import AdjustedConfig
from tests.inputs import gates
from tests.unit import test_later_cuts as later
from tests.unit.test_methods import GROUP, HEADS, LAYERS, Inputs, draw, kept, look, scored
from vllm_tgvkv.policies import Mix, Prompt, build_policy
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.worker.decision import Decision, ScoredPrompt

TOKENS = {"block_size": 1, "sinks": 0, "floor": 0, "observation_window": 1000}


def keep(method: str | Mix, scores: Tensor, budget: int) -> Decision:
    """Return what a method keeps of a text by pooled scores ``[L, H, P]``, `budget` per head."""
    num_tokens = scores.shape[-1]
    prompt = Prompt(num_tokens, num_tokens, torch.zeros(num_tokens, dtype=torch.bool), 0)
    parts = (scores, scores.new_empty(*scores.shape[:2], 0), scores.shape[1], 1, 0)
    return ScoredPrompt(build_policy(method), prompt, *parts).decide(budget)


# -- PyramidKV and Ada-Pyramid-KV -------------------------------------------------------------


def pyramid(num_layers: int, window: int, budget: float, num_tokens: int) -> list[float]:
    """Return the tokens of each layer: the window, and what falls from layer to layer.

    The budget beside the windows is a trapezium over the layers, whose last side is a twentieth of
    the mean. A first layer that would exceed the prompt keeps all of it, and the last one gains.
    """
    mean = budget - window
    last = mean / 20
    first = 2 * mean - last
    if first > num_tokens - window:
        first = num_tokens - window
        last = 2 * mean - first
    step = (first - last) / (num_layers - 1)
    return [window + first - step * layer for layer in range(num_layers)]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.6, 0.95])
def test_pyramidkv(share: float) -> None:
    """Each of 30 layers keeps the last 32 tokens, and the best others that its budget holds."""
    num_tokens = random.randint(900, 1200)
    scores = torch.rand(30, 2, num_tokens)
    budget = int(share * num_tokens)
    wanted = torch.tensor(pyramid(30, 32, budget, num_tokens), dtype=torch.float64)
    decision = keep("pyramidkv", scores, budget)
    assert decision.counts.sum() == budget * 60
    assert ((decision.counts - wanted[:, None]).abs() < 1).all()
    ends = decision.offsets.tolist()
    for pair, of_head in enumerate(scores.flatten(0, 1)):
        found = set(decision.positions[ends[pair] : ends[pair + 1]].flatten().tolist())
        best = of_head[:-32].topk(len(found) - 32).indices.tolist()
        assert found == {*range(num_tokens - 32, num_tokens), *best}


def test_ada_pyramid_kv() -> None:
    """The heads of a layer compete for the pyramid's budget; each is sure of a fifth of it."""
    num_tokens, budget = 700, 212  # 180 beside the window: every layer's budget is a whole number
    # The last head has fewer of the best tokens than are guaranteed to it.
    scores = torch.rand(20, 4, num_tokens) ** torch.tensor([0.5, 1, 1.5, 50])[:, None]
    found = keep(Mix("adakv", allocation="ada_pyramid"), scores, budget).counts
    for layer, whole in enumerate(pyramid(20, 32, budget, num_tokens)):
        own = round(whole)
        value = scores[layer].double()
        value[:, -32:] += 10
        guaranteed = value.topk(own // 5).indices
        value.scatter_add_(1, guaranteed, torch.full_like(value, 100))
        best = value.flatten().topk(own * 4).indices
        assert found[layer].tolist() == torch.bincount(best // num_tokens, minlength=4).tolist()
    assert found[0, -1] == 383 // 5


# -- H2O and Elastic Cache while decoding ------------------------------------------------------


@pytest.fixture
def single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later cuts of pages of one token: a ceiling of 50 evicts two tokens after every second."""
    decode = {"ceiling": {"max_tokens": 50}}
    for name, value in {"SIZE": 1, "NUM_BLOCKS": 2000, "ANSWER": 40, "LATER": decode}.items():
        monkeypatch.setattr(later, name, value)
    monkeypatch.setattr(later, "BUFFER", 0)
    monkeypatch.setitem(later.DEFER, "ceiling", 0)


def heavy_hitters(model: later.Model, cuts: list[Cut]) -> list[Tensor] | None:
    """Return what H2O leaves at each cut, bool ``[L, H, n]``; None if rounding might decide.

    Half are the newest tokens, the others those with the largest sums over all rows so far. A row
    is the softmax over the keys that were left when it was computed.
    """
    queries = model.queries.permute(0, 2, 3, 1, 4).double()
    logits = queries @ model.keys[:, :, None].double().transpose(-1, -2) * later.SCALE
    alive = torch.ones(*model.keys.shape[:3], dtype=torch.bool)
    sums, num_rows, found = torch.zeros_like(alive, dtype=torch.float64), 0, []
    for cut in cuts:
        for i in range(num_rows, cut.at):
            row = logits[..., i, :].masked_fill(~alive[:, :, None], -math.inf)
            sums[..., : i + 1] += row[..., : i + 1].softmax(-1).mean(2)
        num_rows = cut.at
        num_newest = cut.num_retained // 2
        older = slice(cut.at - num_newest)
        hits = sums[..., older].masked_fill(~alive[..., older], -1)
        best = hits.topk(cut.num_retained - num_newest + 1)
        if (best.values[..., -2] - best.values[..., -1] < 1e-5).any():
            return None
        alive[..., older] = torch.zeros_like(hits, dtype=torch.bool).scatter_(
            -1, best.indices[..., :-1], True
        )
        found.append(alive[..., : cut.at].clone())
    return found


def ceiling(score: str, retain: str) -> later.Request:
    """Return a request whose method has these parts."""
    mix = {"base": "h2o", "score": score, "retain": retain}
    settings = {"policy": "tgv", "methods": {"mine": mix}, "sinks": 0, "floor_pages": 0}
    settings |= {"decode": later.LATER["ceiling"], "debug": {"record_kept": True, "poison": True}}
    return later.Request(AdjustedConfig.from_mapping(settings), "ceiling", "mine")


def left_by(request: later.Request, model: later.Model) -> list[Tensor]:
    """Return what the plugin leaves at each cut, bool ``[L, H, n]``."""
    (worker,), _ = later.serve(later.SPLITS["alone"], model, request)
    return [worker.kept(number, cut.at) for number, cut in enumerate(request.cuts())]


def test_h2o_while_decoding(single_tokens: None) -> None:
    """Sums go on over all cuts, and what is evicted has no part in later rows."""
    request = ceiling("h2o_accumulated", "recent_half")
    wanted = None
    while wanted is None:
        model = later.Model.random(random.randrange(1 << 30))
        wanted = heavy_hitters(model, request.cuts())
    assert len(wanted) > 15
    for found, left in zip(left_by(request, model), wanted, strict=True):
        assert torch.equal(found, left)


def test_elastic_cache_while_decoding(single_tokens: None) -> None:
    """Each new token pushes out the one that is 25 tokens before the end of what was kept."""
    model = later.Model.random(random.randrange(1 << 30))
    first, *others = left_by(ceiling("fixed_place", "by_score"), model)
    assert len(others) > 15
    caches = [head.nonzero().flatten().tolist() for head in first.flatten(0, 1)]
    num_tokens = first.shape[-1]
    for left in others:
        for cache, head in zip(caches, left.flatten(0, 1), strict=True):
            for token in range(num_tokens, len(head)):
                cache.append(token)
                del cache[50 - 25]
            assert head.nonzero().flatten().tolist() == cache
        num_tokens = len(head)


# -- TGV-KV -----------------------------------------------------------------------------------


def images_and_text() -> tuple[Layout, list[int], list[int]]:
    """Return a prompt with text around two images, its text and its vision positions."""
    before, between, after = (random.randint(5, 12) for _ in range(3))
    second = before + 12 + between
    layout = Layout(second + 6 + after, (Image(before, 12, (3, 4)), Image(second, 6, (2, 3))))
    vision = [j for j, is_vision in enumerate(layout.vision) if is_vision]
    return layout, [j for j, is_vision in enumerate(layout.vision) if not is_vision], vision


@pytest.mark.parametrize("budget", [6, 14, 30])
def test_tgv_kv(budget: int) -> None:
    """TVB, TWR and TPR as printed: N_t counts all text, and its rows are all that vote."""
    layout, text, vision = images_and_text()
    settings = Settings(budget, **TOKENS)  # type: ignore[arg-type]
    inputs = draw(layout)
    policy = build_policy(Mix("tgv", rows="all_text"))
    seen = look(policy, inputs, layout, settings)
    attention = inputs.attention.mean(1)
    num_text = len(text)
    intensities, every_score = [], []
    for layer in range(LAYERS):
        to_text = attention[layer][text][:, text]
        to_vision = attention[layer][text][:, vision]
        intensities.append(float(to_vision.sum()))
        weights = torch.tensor(
            [float(to_text[j:, j].sum()) / (num_text - j) for j in range(num_text)],
            dtype=torch.float64,
        )
        scores = torch.zeros(layout.length, dtype=torch.float64)
        scores[vision] = weights / weights.sum() @ to_vision
        scores[text] = torch.stack([to_text[j:, j].sum() for j in range(num_text)])
        torch.testing.assert_close(seen.raw[layer, 0].double(), scores, rtol=1e-4, atol=1e-6)
        every_score.append(scores)
    decision = scored(policy, seen, layout, settings).decide(budget)
    found = kept(decision, layout, settings)[:, 0]
    shares = torch.tensor(intensities, dtype=torch.float64) * LAYERS * budget / sum(intensities)
    if shares.max() <= layout.length:  # otherwise the excess goes to other layers
        assert ((decision.counts[:, 0] - shares).abs() < 1).all()
    for layer, scores in enumerate(every_score):
        number = int(decision.counts[layer, 0])
        first = best_of(scores, text, min(number, num_text))
        chosen = first | best_of(scores, vision, number - len(first))
        assert set(found[layer].nonzero().flatten().tolist()) == chosen


def best_of(scores: Tensor, positions: list[int], number: int) -> set[int]:
    """Return the `number` best of the positions."""
    best = scores[positions].topk(number).indices.tolist()
    return {positions[i] for i in best}


def test_rows_before_the_image_count_only_for_text_before_it() -> None:
    """So leaving them out changes nothing where a budget holds all text."""
    layout, _, vision = images_and_text()
    settings = Settings(1, **TOKENS)  # type: ignore[arg-type]
    inputs = draw(layout)
    ours = look(build_policy("tgv"), inputs, layout, settings).raw[:, 0]
    printed = look(build_policy(Mix("tgv", rows="all_text")), inputs, layout, settings).raw[:, 0]
    first = vision[0]
    of_images = ours[:, vision] / ours[:, vision].sum(1, keepdim=True)
    of_all = printed[:, vision] / printed[:, vision].sum(1, keepdim=True)
    torch.testing.assert_close(of_images, of_all, rtol=1e-4, atol=1e-6)
    later = [j for j in range(first, layout.length) if j not in vision]
    torch.testing.assert_close(ours[:, later], printed[:, later], rtol=1e-5, atol=1e-6)
    added = (printed - ours)[:, :first].sum(1)  # each of these rows sums to 1
    torch.testing.assert_close(added, torch.full_like(added, first), rtol=1e-5, atol=1e-5)


# -- AirCache ---------------------------------------------------------------------------------


def aircache_scores(
    inputs: Inputs, instruction: list[int], vision: list[int], by_query_head: bool = False
) -> list[Tensor]:
    """Return each layer's importance of the vision tokens, by equations 4 to 8.

    The elite is one for all query heads, or each of them has its own.
    """
    scores = []
    for layer in range(LAYERS):
        logits = [
            inputs.queries[layer][:, head].double().transpose(0, 1)
            @ inputs.keys[layer][:, head].double().T
            / math.sqrt(inputs.keys[layer].shape[-1])
            for head in range(HEADS)
        ]
        heads = torch.cat(logits)  # [Q, P, P]
        assert len(heads) == HEADS * GROUP
        parts = heads.split(1 if by_query_head else len(heads))
        importance = torch.zeros(len(vision), dtype=torch.float64)
        for part in parts:
            last = part[:, instruction[-1]][:, instruction].softmax(-1).mean(0)
            elite = [j for j, a in zip(instruction, last, strict=True) if a >= 0.9 * last.max()]
            for i in elite:
                keys = vision + [j for j in elite if j <= i]
                of_row = part[:, i][:, keys].softmax(-1).mean(0)[: len(vision)]
                importance += of_row / len(elite) / len(parts)
        scores.append(importance)
    return scores


def skewness(values: Tensor) -> Tensor:
    """Return equation 10."""
    return (((values - values.mean()) / values.std(correction=0)) ** 3).mean()


@pytest.mark.parametrize("by_query_head", [False, True], ids=["layer", "query heads"])
@pytest.mark.parametrize(
    ("allocation", "by_strength", "by_skewness"),
    [
        ("uniform", 0.0, 0.0),
        ("aircache", 0.5, 0.5),
        ("aircache_strength", 1.0, 0.0),
        ("aircache_skewness", 0.0, 1.0),
    ],
)
def test_aircache(
    allocation: str, by_strength: float, by_skewness: float, by_query_head: bool
) -> None:
    """The paper's method and the three of its ablation of layer budgets; all text is kept."""
    layout, text, vision = images_and_text()
    instruction = [j for j in text if j > vision[-1]]
    budget = len(text) + 6
    settings = Settings(budget, **TOKENS)  # type: ignore[arg-type]

    def is_clear(inputs: Inputs) -> bool:
        """Return whether no token is at the threshold of the elite: noise leaves scores alike."""
        noisy = [x * (1 + 1e-5 * torch.randn_like(x)) for x in inputs.keys]
        changed = Inputs(inputs.queries, noisy, inputs.values, inputs.attention, inputs.gates)
        pairs = zip(
            aircache_scores(inputs, instruction, vision, by_query_head),
            aircache_scores(changed, instruction, vision, by_query_head),
            strict=True,
        )
        return all(torch.allclose(*pair, rtol=1e-3) for pair in pairs)

    inputs = draw(layout, is_clear)
    score = "aircache_query_heads" if by_query_head else "aircache"
    policy = build_policy(Mix("aircache", score=score, allocation=allocation))
    seen = look(policy, inputs, layout, settings)
    scores = torch.stack(aircache_scores(inputs, instruction, vision, by_query_head))
    torch.testing.assert_close(seen.raw[:, 0][:, vision].double(), scores, rtol=1e-4, atol=1e-6)
    strength = scores.sum(1) / scores.sum()
    skewed = torch.stack([skewness(of_layer).clamp(min=0) for of_layer in scores])
    part = torch.full((LAYERS,), 1 / LAYERS, dtype=torch.float64)
    if by_strength or by_skewness:
        of_skewness = skewed / skewed.sum() if skewed.sum() > 0 else strength
        part = by_strength * strength + by_skewness * of_skewness
    decision = scored(policy, seen, layout, settings).decide(budget)
    found = kept(decision, layout, settings)[:, 0]
    assert found[:, text].all()
    wanted = 6 * LAYERS * part
    assert ((found[:, vision].sum(1) - wanted).abs() < 1).all() or wanted.max() > len(vision)


# -- VL-Cache ---------------------------------------------------------------------------------


def test_vl_cache() -> None:
    """Algorithm 1's budgets of layers, and accumulated post-vision attention."""
    layout, _, vision = images_and_text()
    budget = layout.length // 3
    settings = Settings(budget, **TOKENS)  # type: ignore[arg-type]
    inputs = draw(layout)
    policy = build_policy("vlcache")
    seen = look(policy, inputs, layout, settings)
    rows = range(vision[-1] + 1, layout.length)
    density = []
    for heads in inputs.attention:
        sparsities = []
        for head in heads:
            seen_by_rows = [head[i, : i + 1] for i in rows]
            small = sum(int((row < 0.01 * row.max()).sum()) for row in seen_by_rows)
            sparsities.append(small / sum(map(len, seen_by_rows)))
        density.append(1 - sum(sparsities) / len(sparsities))
    # The whole budget is alpha P L; a layer keeps 1 % to 100 %.
    alpha = budget / layout.length
    wanted = torch.tensor(
        [min(max(d / sum(density) * alpha * LAYERS, 0.01), 1) * layout.length for d in density]
    )
    decision = scored(policy, seen, layout, settings).decide(budget)
    assert ((decision.counts[:, 0] - wanted).abs() < 1.05).all()
    found = kept(decision, layout, settings)[:, 0]
    for layer, heads in enumerate(inputs.attention):
        number = int(decision.counts[layer, 0])
        recent = layout.length - number // 10
        scores = heads.mean(0)[list(rows)].sum(0)
        best = best_of(scores, list(range(recent)), number - number // 10)
        chosen = set(found[layer].nonzero().flatten().tolist())
        assert chosen == best | set(range(recent, layout.length))


# -- PrefixKV ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.2, 0.6])
def test_prefixkv(share: float) -> None:
    """Every layer keeps the shortest prefix of its ranking that has the same part of the whole."""
    num_layers, num_tokens = 6, 400
    budget = round(share * num_tokens)
    spread = torch.linspace(0.2, 3, num_layers)[:, None, None]
    scores = (torch.randn(num_layers, 1, num_tokens) * spread).exp()
    decision = keep("prefixkv", scores, budget)
    ranked = scores[:, 0].double().sort(dim=1, descending=True)
    parts = ranked.values.cumsum(1) / ranked.values.sum(1, keepdim=True)

    def lengths(part: float) -> Tensor:
        return (parts < part).sum(1) + 1

    # The lengths change only at these values of the part, so it is enough to try each of them.
    enough = (p for p in parts.flatten().sort().values if lengths(p).sum() >= num_layers * budget)
    wanted = lengths(next(enough))
    counts = decision.counts[:, 0]
    assert counts.sum() == num_layers * budget
    assert ((counts - wanted).abs() <= 1).all()  # what the last part is too much comes off
    assert wanted.max() > 2 * wanted.min()


# -- TrimKV and DBTrimKV ----------------------------------------------------------------------


@pytest.mark.parametrize(("score", "horizon"), [("trimkv", 2), ("trimkv_next", 1)])
def test_retention_over_the_horizon(score: str, horizon: int) -> None:
    """Equation 9: the sum of beta^(s - i) over the steps s to come, of token i at time t."""
    layout = Layout(60)
    settings = Settings(9, **TOKENS)  # type: ignore[arg-type]
    inputs = draw(layout)
    policy = build_policy(Mix("dbtrimkv", score=score), gates=gates("trimkv"))
    seen = look(policy, inputs, layout, settings)
    betas, time = inputs.gates.double().exp(), layout.length
    positions = torch.arange(1, time + 1)
    retained = sum(betas ** (step - positions) for step in range(time + 1, time + horizon + 1))
    assert isinstance(retained, Tensor)
    torch.testing.assert_close(seen.raw.double().exp() * horizon, retained, rtol=1e-4, atol=1e-12)
    decision = scored(policy, seen, layout, settings).decide(9)
    best = retained.flatten().topk(9 * LAYERS * HEADS).indices
    wanted = torch.zeros(retained.numel(), dtype=torch.bool).index_fill(0, best, True)
    assert torch.equal(kept(decision, layout, settings).flatten(), wanted)


# -- RetentiveKV, whose states are emulated --------------------------------------------------------


def test_retentivekvs_state_and_entropy() -> None:
    """`S' = H S + A k v` read by a query, and the entropy of text rows over vision."""
    keys, values = torch.randn(2, 6, 8, dtype=torch.float64)
    query = torch.randn(8, dtype=torch.float64)
    fading, absorbed = torch.rand(2, 6, dtype=torch.float64)
    read = query @ states.state(keys, values, fading.tolist(), absorbed.tolist())
    left = torch.stack([absorbed[t] * fading[t + 1 :].prod() for t in range(6)])
    torch.testing.assert_close(read, (left * (keys @ query)) @ values)

    vision = [2 <= j < 9 for j in range(12)]
    heads = torch.randn(3, 12, 12, dtype=torch.float64).softmax(-1)
    of_rows = []
    for i in (9, 10, 11):
        to_vision = heads[:, i, 2:9] / heads[:, i, 2:9].sum(-1, keepdim=True)
        of_rows.append(-(to_vision * to_vision.log()).sum(-1).mean() / math.log(7))
    mean = heads[:, 9:].mean(0)
    expected = torch.stack(of_rows) @ mean / mean.sum(0)
    found = states.cross_entropies(heads, (9, 10, 11), vision)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected)
    # What a row gives to text does not change how undecided it is between vision tokens.
    heads[:, 9, 2:9] = 0.01
    heads[:, 10, 2:9] = 0.0
    heads[:, 10, 4] = 0.3
    assert states.cross_entropies(heads, (9,), vision) == pytest.approx([1.0] * 12)
    assert states.cross_entropies(heads, (10,), vision) == pytest.approx([0.0] * 12)
