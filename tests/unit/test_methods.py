# SPDX-License-Identifier: Apache-2.0
"""Every method, and free mixes of their parts, against `oracle.methods`.

A new method needs a row in `METHODS` there; all tests here then cover it. Inputs are random. They
are redrawn if two compared numbers are so close that rounding might decide.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import kernels as reference
from oracle import methods
from oracle.attention import causal_attention
from oracle.methods import HEAD, LAYER, METHODS, Image, Layout, Pool, Settings
from tests.inputs import gates, head_scores, paged, product
from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.statistics import observe
from vllm_tgvkv.policies import (
    METHOD_NAMES,
    NO_ATTENTION,
    POLICY_NAMES,
    AllLayers,
    Depth,
    LayerView,
    Mix,
    Policy,
    Pooling,
    Prompt,
    build_policy,
)
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, RETENTIONS, SCORES
from vllm_tgvkv.shared.budget import Guard
from vllm_tgvkv.shared.prompt import PromptMap, RowSet, VisionSpan, voters
from vllm_tgvkv.worker.decision import Decision, ScoredPrompt

LAYERS, HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 3, 2, 3, 8, 4
SCALE = HEAD_SIZE**-0.5

# Start and (rows, columns) of the images, and the prompt's length: one image, several with text
# between, two without, an image at the start or the end, an image that ends one token before the
# prompt, prompts longer than every window.
LAYOUTS = {
    "one": ([(6, (3, 4))], 29),
    "several": ([(5, (2, 3)), (13, (2, 2)), (20, (3, 3))], 34),
    "side by side": ([(4, (2, 3)), (10, (3, 2))], 23),
    "at the start": ([(0, (3, 3))], 16),
    "at the end": ([(7, (2, 2)), (15, (3, 4))], 27),
    "short question": ([(2, (5, 6))], 33),
    "long": ([(8, (6, 5)), (44, (2, 3))], 78),
    "long question": ([(2, (3, 4))], 72),
}
SOME = ["several", "at the end", "long"]
TEXT_ONLY = "text only"
EVERY_LAYOUT = {**LAYOUTS, TEXT_ONLY: ([], 50)}

HEAD_ONLY = (
    "adakv",
    "ada_pyramid",
    "rkv",
    "mixkv",
    "trimkv",
    "dbtrimkv",
    "kvzap",
    "h2o_accumulated",
    "trimkv_next",
    "trimkv_votes",
)
"""Methods and parts that are undefined at granularity layer."""
OWN = [
    (name, granularity)
    for name in METHODS
    for granularity in (LAYER, HEAD)
    if name != "random" and (name not in HEAD_ONLY or granularity == HEAD)
]
GUARDED = [case for case in OWN if METHODS[case[0]].score in methods.ROWS_OF_SCORE]
NEEDS_VISION = {"tgv", "vv", "aircache", "aircache_strength", "aircache_skewness"}
"""Allocations that are undefined for prompts without vision."""


def layout_of(name: str) -> Layout:
    images, length = EVERY_LAYOUT[name]
    return Layout(length, tuple(Image(start, r * c, (r, c)) for start, (r, c) in images))


def prompt_of(layout: Layout, settings: Settings) -> Prompt:
    return Prompt(
        num_tokens=layout.length,
        num_candidates=layout.prompt // settings.block_size * settings.block_size,
        is_vision=torch.tensor(layout.vision),
        sinks=settings.sinks,
        images=tuple(VisionSpan(image.start, image.length, image.grid) for image in layout.images),
    )


@dataclass(frozen=True)
class Inputs:
    """By layer: queries ``[P, H, G, D]``, keys and values ``[P, H, D]``, A ``[L, H * G, P, P]``."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    attention: Tensor
    gates: Tensor
    """Log betas, or KVzap's scores, float32 ``[L, H, P]``."""

    @property
    def states(self) -> methods.States:
        queries = torch.stack(self.queries).flatten(2, 3).transpose(1, 2)
        keys, values = (torch.stack(x).transpose(1, 2) for x in (self.keys, self.values))
        return methods.States(queries, keys, SCALE, values, self.gates.double())


def draw(layout: Layout, is_good: Callable[[Inputs], bool] = lambda inputs: True) -> Inputs:
    """Return random inputs, redrawn until they are good."""
    for _ in range(50):
        queries = [torch.randn(layout.length, HEADS, GROUP, HEAD_SIZE) * 2 for _ in range(LAYERS)]
        # Keys of a head have something in common, in some heads more than in others.
        common = [torch.randn(HEADS, HEAD_SIZE) * random.random() * 2 for _ in range(LAYERS)]
        shape = (layout.length, HEADS, HEAD_SIZE)
        keys = [torch.randn(shape) + of_layer for of_layer in common]
        values = [torch.randn(shape) for _ in range(LAYERS)]
        attention = torch.stack(
            [causal_attention(q, k, SCALE) for q, k in zip(queries, keys, strict=True)]
        )
        betas = torch.rand(LAYERS, HEADS, layout.length) ** 0.3
        inputs = Inputs(queries, keys, values, attention, betas.log())
        if is_good(inputs):
            return inputs
    raise AssertionError("no random inputs are good: the condition is wrong")


def stable(mix: methods.Mix, layout: Layout, settings: list[Settings]) -> Callable[[Inputs], bool]:
    """Return whether the kept tokens are independent of rounding; settings differ in budget."""
    budgets = [each.budget for each in settings]
    return lambda inputs: methods.is_stable(
        mix, inputs.attention, layout, HEADS, settings[0], budgets, trials=4, states=inputs.states
    )


@dataclass(frozen=True)
class Seen:
    """Scores, strengths and masses of all layers."""

    raw: Tensor
    """Scores before pooling, ``[L, S, P]``."""
    scores: Tensor
    strengths: Tensor
    masses: Tensor | None


def look(policy: Policy, inputs: Inputs, layout: Layout, settings: Settings) -> Seen:
    """Observe all layers as the evictor does, with the rows in random chunks."""
    prompt = prompt_of(layout, settings)
    runs = tuple(VisionSpan(i.start, i.length, i.grid) for i in layout.images)
    where = PromptMap(layout.prompt, runs)
    rows = voters(where, policy.row_sets, settings.observation_window, layout.answer)
    per_head = policy.granularity == HEAD
    raw, strengths, masses = [], [], []

    def viewer(layer: int) -> Callable[[RowSet], LayerView]:
        queries = inputs.queries[layer]
        pages, ids = paged(inputs.keys[layer], settings.block_size, transposed=True)
        value_pages = torch.full_like(pages, float("nan"))
        for j, of_token in enumerate(inputs.values[layer]):
            block, slot = divmod(j, settings.block_size)
            value_pages[ids[block], :, slot] = of_token

        def view(kind: RowSet) -> LayerView:
            attention = NO_ATTENTION
            if kind == "all":
                num_sets, declared = HEADS if per_head else 1, policy.statistics(kind)
                sums = RowSums(num_sets, layout.length, ids.device, "modality_sums" in declared)
                attention = sums
                cuts = sorted(random.sample(range(1, layout.length), 2))
                for start, end in itertools.pairwise([0, *cuts, layout.length]):
                    positions = torch.arange(start, end)
                    blocks = ids[: -(-end // settings.block_size)]
                    chunk = (queries[positions], pages, blocks, positions, end, SCALE, per_head)
                    sums.add(observe(*chunk), prompt.is_vision[positions])
            elif kind != "none":
                positions = torch.as_tensor(rows.sets[kind])
                voting = (queries[positions], pages, ids, positions, layout.length, SCALE, per_head)
                attention = observe(*voting, policy.statistics(kind), value_pages=value_pages)
            said = inputs.gates[layer] if per_head else None
            return LayerView(layer, HEADS if per_head else 1, prompt, attention, gate_outputs=said)

        return view

    for view in map(viewer, range(LAYERS)):
        seen = view(policy.score.rows)
        raw.append(policy.scores(seen))
        if policy.score.rows != "none":
            masses.append(seen.attention.column_sums)
        strengths.append(policy.allocation.strength(view(policy.allocation.rows), raw[-1]))
    return Seen(
        torch.stack(raw),
        pooled(policy, torch.stack(raw), layout, settings),
        torch.stack(strengths),
        torch.stack(masses) if masses else None,
    )


def pooled(policy: Policy, raw: Tensor, layout: Layout, settings: Settings) -> Tensor:
    """Return the scores ``[L, S, C]`` that the settings' budget is dealt by."""
    prompt = prompt_of(layout, settings)
    of_layers = [policy.pooled(scores, prompt) for scores in raw]
    return torch.stack(of_layers)[..., : prompt.num_candidates].contiguous()


HEAD_SCORES = head_scores(LAYERS, HEADS, GROUP)
SCORES_OF_HEADS = torch.tensor(HEAD_SCORES.scores, dtype=torch.float64)


def build(mix: Mix | str) -> Policy:
    """Build a policy of a server that has head scores, and gates if the score reads some."""
    score = mix.score if isinstance(mix, Mix) and mix.score else POLICIES[base_of(mix)].score
    kind = SCORES[score]().gates
    return build_policy(mix, head_scores=HEAD_SCORES, gates=kind and gates(kind))


def base_of(mix: Mix | str) -> str:
    return mix if isinstance(mix, str) else mix.base


def policy_of(mix: methods.Mix) -> Policy:
    kernel = None if mix.pooling.has_direction else mix.pooling.kernel
    pooling = Pooling(**{**vars(mix.pooling), "kernel": kernel})
    names = ("score", "allocation", "retain", "granularity", "merge", "rows", "reduce")
    return build(Mix(pooling=pooling, **{name: getattr(mix, name) for name in names}))


def scored(policy: Policy, seen: Seen, layout: Layout, settings: Settings) -> ScoredPrompt:
    sizes = (HEADS, settings.block_size, settings.floor)
    prompt = prompt_of(layout, settings)
    return ScoredPrompt(policy, prompt, seen.scores, seen.strengths, *sizes, seen.masses)


def kept(decision: Decision, layout: Layout, settings: Settings) -> Tensor:
    """Return the kept positions with the tail, bool ``[L, H, P]``."""
    mask = torch.zeros(LAYERS * HEADS, layout.length, dtype=torch.bool)
    offsets = page_offsets(decision.counts).tolist()
    for pair, (start, end) in enumerate(itertools.pairwise(offsets)):
        mask[pair, decision.positions[start:end].flatten().long()] = True
    mask[:, layout.prompt // settings.block_size * settings.block_size :] = True
    return mask.view(LAYERS, HEADS, layout.length)


def budgets(layout: Layout, **fields: Any) -> list[Settings]:
    """Return settings with one retained block, all but one, and some in between."""
    full, tail = divmod(layout.prompt, BLOCK_SIZE)
    blocks = sorted({1, 2, full // 3, full // 2, full - 1} & set(range(1, full)))
    fields["head_scores"] = SCORES_OF_HEADS
    return [Settings(k * BLOCK_SIZE + tail, BLOCK_SIZE, **fields) for k in blocks]


def some_settings() -> dict[str, Any]:
    return {
        "sinks": random.choice([0, 2, 4]),
        "observation_window": random.choice([3, 10, 1000]),
        "floor": random.choice([0, 1]),
    }


def assert_keeps_the_same(
    mix: methods.Mix, layout: Layout, settings: list[Settings], policy: Policy | None = None
) -> None:
    """Assert that the policy keeps what its definition keeps, under each of the settings."""
    policy = policy or policy_of(mix)
    inputs = draw(layout, stable(mix, layout, settings))
    seen = look(policy, inputs, layout, settings[0])
    for each in settings:
        wanted = methods.select(mix, inputs.attention, layout, HEADS, each, states=inputs.states)
        of_budget = replace(seen, scores=pooled(policy, seen.raw, layout, each))
        decision = scored(policy, of_budget, layout, each).decide(wanted.blocks)
        message = f"{mix}, {each}, {layout}"
        assert decision.counts.sum() == wanted.blocks * LAYERS * HEADS, message
        assert torch.equal(decision.counts, wanted.pages), message
        assert torch.equal(kept(decision, layout, each), wanted.kept), message


# -- methods ----------------------------------------------------------------------------------


def test_every_method_is_here() -> None:
    assert set(METHOD_NAMES) == set(METHODS)
    assert set(METHOD_NAMES) - set(POLICY_NAMES) == {
        "sparsemm",
        "trimkv",
        "dbtrimkv",
        "kvzap",
        "retentivekv",
    }


@pytest.mark.parametrize("name", METHODS)
def test_parts_of_a_method(name: str) -> None:
    """A method's name stands for the parts, granularity and pooling of its definition."""
    policy, mix = build(name), METHODS[name]
    for part, registered in (
        (policy.score, SCORES[mix.score]()),
        (policy.allocation, ALLOCATIONS[mix.allocation]()),
    ):
        assert type(part) is type(registered)
    wanted = RETENTIONS[mix.retain]()
    assert (type(policy.retention), vars(policy.retention)) == (type(wanted), vars(wanted))
    fields = (policy.granularity, policy.merge, policy.reduction)
    assert fields == (mix.granularity, mix.merge, mix.reduce)
    assert policy.score.rows == (mix.rows or methods.ROWS_OF_SCORE.get(mix.score, "none"))
    pooling = vars(policy.pooling)
    if mix.pooling.kind == "none":
        assert pooling["kind"] == "none"
    else:
        assert Pool(**{**pooling, "kernel": pooling["kernel"] or 3}) == mix.pooling


@pytest.mark.parametrize(("name", "granularity", "layout"), product(OWN, LAYOUTS, strength=1))
def test_methods_keep_what_their_definitions_keep(name: str, granularity: str, layout: str) -> None:
    mix = replace(METHODS[name], granularity=granularity)
    policy = build(Mix(name, granularity=granularity))  # type: ignore[arg-type]
    where = layout_of(layout)
    assert_keeps_the_same(mix, where, budgets(where, **some_settings()), policy)


@pytest.mark.parametrize("name", [n for n, g in OWN if METHODS[n].granularity == g])
def test_prompts_without_vision(name: str) -> None:
    mix, layout = METHODS[name], layout_of(TEXT_ONLY)
    assert build(name).allocation.needs_vision == (mix.allocation in NEEDS_VISION)
    if mix.allocation not in NEEDS_VISION:
        assert_keeps_the_same(mix, layout, budgets(layout, **some_settings()))


# -- parts ------------------------------------------------------------------------------------


def with_granularities(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(x, g) for x in names for g in (LAYER, HEAD) if x not in HEAD_ONLY or g == HEAD]


OTHER_ROWS = ["text", "all_text", "after_vision", "window", "answer", None]


@pytest.mark.parametrize(
    ("score", "granularity", "rows"),
    [
        *product(with_granularities(methods.SCORES), [None]),
        *product(
            with_granularities(["snapkv", "text_rows", "vlcache", "h2o", "tgv", "aircache"]),
            OTHER_ROWS,
            strength=1,
        ),
    ],
)
def test_scores(score: str, granularity: str, rows: str | None) -> None:
    """With and without tokens of the answer, and with maxima where the score has them."""
    settings = Settings(2, BLOCK_SIZE, **some_settings())
    for layout, reduce in itertools.product((random.choice(SOME), TEXT_ONLY), ("mean", "max")):
        where = layout_of(layout)
        if rows == "answer" or (rows and random.random() < 0.5):
            where = answered(where, random.choice([1, 2, 5]))
        mix = methods.Mix(score, "uniform", "by_score", granularity, rows=rows, reduce=reduce)
        takes_maxima = "max" in SCORES[score].reductions and (score, rows) != ("h2o", None)
        if reduce == "max" and not takes_maxima:
            with pytest.raises(ValueError, match="reduce 'max' has no meaning with the score"):
                policy_of(mix)
            continue

        def wanted(
            attention: Tensor, states: methods.States, mix: Any = mix, where: Layout = where
        ) -> Tensor:
            found = methods.observe(mix, attention, where, HEADS, settings, states=states)
            return torch.stack([torch.stack(layer) for layer in found.raw])

        def is_clear(inputs: Inputs, wanted: Callable[..., Tensor] = wanted) -> bool:
            """Return whether noise leaves AirCache's elite and MixKV's ranges about unchanged."""
            scores = wanted(inputs.attention, inputs.states)

            def changed() -> Tensor:
                noise = 1 + 1e-5 * torch.randn(inputs.attention.shape)
                return wanted(inputs.attention * noise, inputs.states.noisy(1e-5))

            # Five times what is allowed below: R-KV's scores are differences, some near 0.
            return all(torch.allclose(changed(), scores, 5e-4, 5e-6) for _ in range(4))

        inputs = draw(where, is_clear)
        seen = look(policy_of(mix), inputs, where, settings)
        expected = wanted(inputs.attention, inputs.states)
        torch.testing.assert_close(seen.raw.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mixkv", "sparsemm"])
@pytest.mark.parametrize(
    ("rows", "answer"), [(None, 1), (None, 9), (None, 40), ("answer", 1), ("answer", 4)]
)
def test_windows_that_hold_tokens_of_the_answer(name: str, rows: str | None, answer: int) -> None:
    """Where rows of the answer alone vote, the whole prompt is the past."""
    where, mix = answered(layout_of("long"), answer), METHODS[name]
    mix = replace(mix, rows=rows or mix.rows)
    assert_keeps_the_same(mix, where, budgets(where, **some_settings()))


@pytest.mark.parametrize("equal", ["keys", "values"])
def test_mixkv_of_heads_whose_keys_or_values_are_alike(equal: str) -> None:
    """A head of copies has no diversity and nothing but it counts; equal norms count nothing."""
    inputs, where = draw(layout_of("long")), layout_of("long")
    copied = getattr(inputs, equal)
    copied[0][:, 0] = copied[0][0, 0]
    attention = [causal_attention(*of, SCALE) for of in zip(inputs.queries, inputs.keys)]  # noqa: B905
    inputs = replace(inputs, attention=torch.stack(attention))
    mix, settings = METHODS["mixkv"], Settings(8, BLOCK_SIZE)
    seen = look(policy_of(mix), inputs, where, settings)
    found = methods.observe(mix, inputs.attention, where, HEADS, settings, states=inputs.states)
    wanted = torch.stack([torch.stack(layer) for layer in found.raw])
    if equal == "keys":  # rounding decides which copy is most unlike the others
        assert seen.raw.isfinite().all()
        wanted[0, 0], seen.raw[0, 0] = 0, 0
    torch.testing.assert_close(seen.raw.double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stages", [[1, 2], [2, 1]])
@pytest.mark.parametrize(
    ("allocation", "granularity"),
    with_granularities(["sparsemm", "pyramid", "ada_pyramid"]),
)
def test_allocations_by_depth_in_pipeline_stages(
    allocation: str, granularity: str, stages: list[int]
) -> None:
    """Each stage goes by the scores, or the place in the model, of its own layers."""
    mix = replace(METHODS["snapkv"], allocation=allocation, granularity=granularity)
    where, settings = layout_of("long"), Settings(56, BLOCK_SIZE, sinks=2)
    settings = replace(settings, head_scores=SCORES_OF_HEADS)
    inputs = draw(where, stable(mix, where, [settings]))
    wanted = methods.select(mix, inputs.attention, where, HEADS, settings, stages=stages)
    seen = look(policy := policy_of(mix), inputs, where, settings)
    whole = scored(policy, seen, where, settings)
    for part in (slice(stages[0]), slice(stages[0], LAYERS)):
        own = {"scores": seen.scores[part], "strengths": seen.strengths[part]}
        decision = replace(whole, **own, depth=Depth(part.start or 0, LAYERS)).decide(wanted.blocks)
        assert torch.equal(decision.counts, wanted.pages[part])


def answered(layout: Layout, answer: int) -> Layout:
    """Return the layout with the first tokens of an answer behind the prompt."""
    return replace(layout, length=layout.length + answer, answer=answer)


@pytest.mark.parametrize(
    ("allocation", "granularity", "layout"),
    product(with_granularities(methods.ALLOCATIONS), SOME, strength=1),
)
def test_shares(allocation: str, granularity: str, layout: str) -> None:
    """Real-valued shares are compared, since pages show them only roughly."""
    score = random.choice(["tgv", "text_rows", "h2o", "snapkv", "aircache"])
    retain = random.choice(["text_first", "by_score", "window", "recent_half"])
    mix = methods.Mix(score, allocation, retain, granularity)
    where = layout_of(layout)
    (settings,) = random.sample(budgets(where, **some_settings()), 1)
    policy = policy_of(mix)
    case = methods.Case(
        where,
        settings.sinks,
        settings.observation_window,
        BLOCK_SIZE,
        head_scores=settings.head_scores,
    )
    blocks = methods.retained_blocks(where.length, BLOCK_SIZE, settings.budget)  # type: ignore[arg-type]
    kinds = methods.tiers(retain, case, blocks * BLOCK_SIZE)

    def shares(attention: Tensor) -> Tensor:
        found = methods.token_sets_of(attention, HEADS, granularity)
        raw = [[methods.SCORES[score](token_set, case) for token_set in layer] for layer in found]
        evidence = methods.Evidence(found, raw, raw, kinds, case, blocks)
        numbers = torch.tensor(methods.ALLOCATIONS[allocation](evidence), dtype=torch.float64)
        return numbers / numbers.sum()

    def close(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=2e-4, atol=1e-9)

    def is_clear(inputs: Inputs) -> bool:
        """Return whether noise leaves counts of tokens unchanged."""
        attention = inputs.attention
        noises = [1 + 1e-5 * torch.randn(attention[..., :1, :].shape) for _ in range(4)]
        return all(close(shares(attention), shares(attention * noise)) for noise in noises)

    inputs = draw(where, is_clear)
    seen = look(policy, inputs, where, settings)
    layers = AllLayers(
        prompt=prompt_of(where, settings),
        scores=seen.scores,
        strengths=seen.strengths,
        tiers=torch.tensor(kinds[: case.candidates]).int(),
        num_kept=torch.tensor(blocks * BLOCK_SIZE),
    )
    ours = policy.allocation.shares(layers).double()
    assert ours.shape == (LAYERS, HEADS if granularity == HEAD else 1)
    wanted = shares(inputs.attention)
    assert close((ours / ours.sum()).flatten(), wanted), (mix, settings, ours, wanted)


@pytest.mark.parametrize("num_layers", [1, 2, 4, 28])
def test_pyramids_of_many_layers(num_layers: int) -> None:
    """Shares are symmetric, so remainders are often equal; then the first layer wins."""
    for blocks in range(1, 41):
        prompt = Prompt(1000, 1000, torch.zeros(1000, dtype=torch.bool), sinks=4)
        scores = torch.zeros(num_layers, 2, 1000)
        kept = torch.tensor(blocks * BLOCK_SIZE)
        layers = AllLayers(prompt, scores, scores[..., :0], torch.zeros(1000).int(), kept)
        shares = ALLOCATIONS["pyramid"]().shares(layers).flatten()
        ours = apportion(shares, blocks * len(shares), 1, 3 * blocks)
        token_sets = [[methods.TokenSet(scores, scores)] * 2] * num_layers
        case = methods.Case(Layout(1000), 4, 9, 4)
        wanted = methods.ALLOCATIONS["pyramid"](
            methods.Evidence(token_sets, [], [], [], case, blocks)
        )
        assert ours.tolist() == reference.apportion(wanted, blocks * len(shares), 1, 3 * blocks)


@pytest.mark.parametrize(
    ("allocation", "retain"), product(methods.ALLOCATIONS, sorted(RETENTIONS.names), strength=1)
)
def test_free_mixes_of_parts(allocation: str, retain: str) -> None:
    """Any score, allocation, retention, granularity and pooling can be combined."""
    for _ in range(2):
        kind, reduce = random.choice(["none", "sequence", "grid"]), random.choice(["max", "mean"])
        kernel, where = random.choice([1, 3, 5]), random.choice(list(LAYOUTS))
        if reduce == "mean" and kind != "none":
            # Tokens with the same neighbours tie except for the order of summation. So take only
            # layouts whose runs, rows and columns are at least as long as the kernel.
            kernel, where = 3, random.choice(["one", "at the start"])
        score = random.choice(list(methods.SCORES))
        if score == "mixkv":
            reduce = "max"  # It pools itself, and means of equal values tie except for rounding.
        if ALLOCATIONS[allocation].adds_scores and SCORES[score]().is_signed:
            score = "tgv"
        mix = methods.Mix(
            score=score,
            allocation=allocation,
            retain=retain,
            granularity=HEAD
            if {allocation, score} & {*HEAD_ONLY}
            else random.choice([LAYER, HEAD]),
            pooling=Pool(kind, kernel, reduce),
        )
        layout = layout_of(where)
        chosen = random.sample(budgets(layout, **some_settings()), 2)
        assert_keeps_the_same(mix, layout, chosen)


@pytest.mark.parametrize(
    ("kind", "rows", "reduce"),
    product(
        ["none", "sequence", "grid"], ["text", "window", "answer", "latest", None], ["mean", "max"]
    ),
)
def test_other_rows_with_maxima_and_pooling_with_a_direction(
    kind: str, rows: str | None, reduce: str
) -> None:
    """Whole decisions: while eviction waits, the answer's tokens vote and are kept."""
    pooling = Pool()
    if kind != "none":
        halve = random.choice([None, 2, 8])
        reaches = (random.choice([3, 16]), 1, halve)
        pooling = Pool(kind, 3, "max", *reaches)
    mix = methods.Mix(
        score=random.choice(["snapkv", "text_rows", "vlcache"]),
        allocation=random.choice(["uniform", "tgv", "adakv", "prefixkv", "aircache"]),
        retain=random.choice(["text_first", "by_score", "window", "recent_half"]),
        granularity=HEAD,
        pooling=pooling,
        rows=rows,
        reduce=reduce,
    )
    layout = layout_of(random.choice(SOME))
    if rows == "answer" or random.random() < 0.5:
        layout = answered(layout, random.choice([1, 4, 9]))
    assert_keeps_the_same(mix, layout, random.sample(budgets(layout, **some_settings()), 2))


def test_statistics_and_rows_that_a_policy_declares() -> None:
    policy = build_policy(Mix("vlcache", rows="text", reduce="max"))
    assert policy.row_sets == ("text", "after_vision")
    assert policy.statistics("text") == {"column_maxima"}
    assert policy.statistics("after_vision") == {"share_below"}
    assert not policy.needs_answer
    assert build_policy("vlcache").statistics("after_vision") == {"share_below"}
    # A mix replaces the rows of its own score only.
    assert build_policy("vlcache").score.rows == "after_vision"
    waiting = build_policy(Mix("tgv", rows="answer"))
    assert waiting.row_sets == ("answer", "text")
    assert waiting.needs_answer


# -- random -----------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", [LAYER, HEAD])
def test_random_is_evenly_spread_and_repeats_itself(granularity: str) -> None:
    layout, settings = Layout(4000), Settings(0.1, BLOCK_SIZE)
    sets = HEADS if granularity == HEAD else 1
    score = policy_of(methods.Mix("random", "uniform", "by_score", granularity)).score
    prompt = prompt_of(layout, settings)
    views = [LayerView(layer, sets, prompt, NO_ATTENTION) for layer in range(LAYERS)]
    scores = torch.stack([score(view) for view in views])
    assert torch.equal(scores, torch.stack([score(view) for view in views]))
    flat = scores.flatten(0, 1).double()
    assert flat.shape == (LAYERS * sets, layout.length)
    assert ((flat >= 0) & (flat < 1)).all()
    # Six standard deviations of uniform numbers.
    counts = (flat[..., None] * 10).floor().eq(torch.arange(10)).sum(1) / layout.length
    assert ((counts - 0.1).abs() < 6 * (0.09 / layout.length) ** 0.5).all()
    both = torch.corrcoef(torch.cat((flat, flat.roll(1, dims=1))))
    both.fill_diagonal_(0)
    assert both.abs().max() < 6 / layout.length**0.5


@pytest.mark.parametrize("layout", SOME)
def test_random_keeps_its_own_scores_best(layout: str) -> None:
    mix, where = METHODS["random"], layout_of(layout)
    policy, inputs = build_policy("random"), draw(where)
    for settings in budgets(where):
        seen = look(policy, inputs, where, settings)
        wanted = methods.select(mix, inputs.attention, where, HEADS, settings, seen.raw)
        decision = scored(policy, seen, where, settings).decide(wanted.blocks)
        assert torch.equal(kept(decision, where, settings), wanted.kept)


# -- guarded budgets --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "granularity", "layout"), product(GUARDED, ["at the start", *SOME], strength=1)
)
def test_fewest_blocks_that_hold_the_share(name: str, granularity: str, layout: str) -> None:
    mix, where = replace(METHODS[name], granularity=granularity), layout_of(layout)
    auto = methods.Auto(random.choice([0.3, 0.8, 0.9, 0.97, 1.0]), 0.02, random.choice([0.5, 0.9]))
    options = {**some_settings(), "floor": 1, "head_scores": SCORES_OF_HEADS}
    settings = Settings(auto, BLOCK_SIZE, **options)
    inputs = draw(
        where,
        lambda inputs: (
            stable(mix, where, [settings])(inputs) and is_monotone(mix, inputs, where, settings)
        ),
    )
    policy = policy_of(mix)
    seen = look(policy, inputs, where, settings)
    assert seen.masses is not None
    wanted = methods.select(mix, inputs.attention, where, HEADS, settings, states=inputs.states)
    most = methods.retained_blocks(where.length, BLOCK_SIZE, auto.most)
    guard = Guard(auto.share, least_blocks(where, settings, auto))
    decision = scored(policy, seen, where, settings).decide(most, guard)
    assert decision.num_token_blocks is not None
    assert int(decision.num_token_blocks) == wanted.blocks, (mix, settings)
    assert torch.equal(decision.counts, wanted.pages)
    assert torch.equal(kept(decision, where, settings), wanted.kept)


def test_a_guard_counts_the_tail_which_is_always_kept() -> None:
    """Half of the attention is on it: a share of 0.7 needs one of two blocks, 0.8 needs both."""
    prompt = Prompt(10, 8, torch.ones(10, dtype=torch.bool), sinks=0)
    masses = torch.tensor([1.0] * 8 + [4, 4]).expand(LAYERS, HEADS, 10)
    parts = (torch.rand(LAYERS, HEADS, 8), torch.ones(LAYERS, HEADS, 1), HEADS, BLOCK_SIZE, 0)
    found = ScoredPrompt(build(Mix("snapkv")), prompt, *parts, masses)
    numbers = [found.decide(2, Guard(share, 1)).num_token_blocks for share in (0.7, 0.8)]
    assert [int(number) for number in numbers if number is not None] == [1, 2]


def least_blocks(layout: Layout, settings: Settings, auto: methods.Auto) -> int:
    least = methods.retained_blocks(layout.length, BLOCK_SIZE, auto.least)
    candidates = layout.length // BLOCK_SIZE * BLOCK_SIZE
    text = sum(j < settings.sinks or not layout.vision[j] for j in range(candidates))
    return max(least, -(-text // BLOCK_SIZE))


def is_monotone(mix: methods.Mix, inputs: Inputs, layout: Layout, settings: Settings) -> bool:
    """Return whether more blocks always hold more, as bisection requires."""
    evidence = methods.observe(mix, inputs.attention, layout, HEADS, settings, states=inputs.states)
    mass = methods.masses(mix, evidence)
    held = [
        float((mass * methods.fill(mix, evidence, settings, k, text_above=True).kept).sum())
        for k in range(1, layout.length // BLOCK_SIZE)
    ]
    return held == sorted(held)


# -- merging ----------------------------------------------------------------------------------


def test_merge_targets_by_hand() -> None:
    kept = [False, True, False, False, False, True, False, False, True]
    assert reference.merge_targets(kept, 8) == [1, 1, 1, 1, 5, 5, 5, 5]
    states = torch.arange(9.0)[:, None]
    assert reference.merged(states, kept, 8).flatten().tolist() == [0, 1.5, 2, 3, 4, 5.5, 6, 7, 8]


# -- refusals ---------------------------------------------------------------------------------


def test_every_part_is_here() -> None:
    # Of the evaluation's ablations, these differ from a score by one of its constants.
    constants = {"window_16", "elite_60", "elite_80", "elite_99", "trimkv_five"}
    assert set(SCORES.names) == {*methods.SCORES, *constants, "random"}
    assert set(ALLOCATIONS.names) == set(methods.ALLOCATIONS)
    retentions = {"text_first", "vision_first", "by_score", "window", "recent_half", "recent_tenth"}
    assert set(RETENTIONS.names) == {*retentions, "recent_8"}
