# SPDX-License-Identifier: Apache-2.0
"""Tests of the oracle itself, by examples worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oracle.emulation import Eviction, Oracle, Prompt
from oracle.kernels import apportion, ranking, water_fill
from oracle.methods import (
    HEAD,
    LAYER,
    Case,
    Image,
    Layout,
    retained_blocks,
    rows,
    tgv_scores,
    tiers,
)
from tests.models import LLAVA_IMAGE, QWEN_IMAGE, random_image, random_text

TOKENS = 60
SIZES = [(112, 196), (140, 84)]


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def oracle(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Oracle:
    return Oracle(tiny_model(request.param, image_size=112))


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> Prompt:
    return oracle.prompt(*two_images(oracle.model.config.model_type))


def two_images(arch: str) -> tuple[str, list]:
    """Return a prompt text with two separate images, and the images."""
    image = LLAVA_IMAGE if arch == "llava" else QWEN_IMAGE
    text = random_text(1, 40) + image + random_text(2, 60) + image + random_text(3, 70)
    return text, [random_image(i, *size) for i, size in enumerate(SIZES)]


def everything(oracle: Oracle, prompt: Prompt) -> torch.Tensor:
    return torch.ones(oracle.layers, oracle.kv_heads, len(prompt.token_ids), dtype=torch.bool)


def generate_from_smaller_cache(
    oracle: Oracle, prompt: Prompt, max_tokens: int, kept: torch.Tensor
) -> list[int]:
    """Generate after removing keys and values from the cache, to compare with masking.

    Args:
        kept: bool [L, H, P], the same number of positions for every layer and head.
    """
    output = oracle.model(**prompt.inputs, use_cache=True)
    cache = output.past_key_values
    for layer, masks in zip(cache.layers, kept, strict=True):
        layer.keys = masked(layer.keys[0], masks)[None]
        layer.values = masked(layer.values[0], masks)[None]
    mrope_shift = getattr(oracle.model.model, "rope_deltas", None)
    position = len(prompt.token_ids) + (0 if mrope_shift is None else int(mrope_shift))
    shape = (1, 1) if mrope_shift is None else (3, 1, 1)

    tokens = [int(output.logits[0, -1].argmax())]
    while len(tokens) < max_tokens:
        output = oracle.model(
            input_ids=torch.tensor([tokens[-1:]]),
            position_ids=torch.full(shape, position + len(tokens) - 1),
            past_key_values=cache,
        )
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens


def masked(states: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return each head's kept states, from states [H, P, D] and masks bool [H, P]."""
    return torch.stack([head[mask] for head, mask in zip(states, masks, strict=True)])


def test_keeping_everything_is_plain_generation(oracle: Oracle, prompt: Prompt) -> None:
    plain = oracle.model.generate(**prompt.inputs, max_new_tokens=TOKENS, do_sample=False)
    plain = plain[0, len(prompt.token_ids) :].tolist()
    assert oracle.generate(prompt, TOKENS) == plain
    assert oracle.generate(prompt, TOKENS, everything(oracle, prompt)) == plain


def test_text_varies(oracle: Oracle, prompt: Prompt) -> None:
    """A comparison of texts is meaningful only if they do not repeat themselves."""
    assert len(set(oracle.generate(prompt, TOKENS)[TOKENS // 2 :])) > TOKENS // 6


def test_vision_matters_after_the_first_token(oracle: Oracle, prompt: Prompt) -> None:
    kept = everything(oracle, prompt)
    kept[:, :, prompt.vision] = False
    full, blind = oracle.generate(prompt, TOKENS), oracle.generate(prompt, TOKENS, kept)
    assert blind[0] == full[0]
    assert blind[1:] != full[1:]


def test_every_head_has_its_own_mask(oracle: Oracle, prompt: Prompt) -> None:
    """Hiding the same keys from different (layer, head) pairs gives different texts."""
    texts = set()
    for pair in range(oracle.layers * oracle.kv_heads):
        kept = everything(oracle, prompt)
        kept.view(-1, kept.shape[-1])[pair, :-1] = False
        texts.add(tuple(oracle.generate(prompt, TOKENS, kept)))
    assert len(texts) == oracle.layers * oracle.kv_heads


@torch.no_grad()
def test_masking_is_removal(oracle: Oracle, prompt: Prompt) -> None:
    generator = torch.Generator().manual_seed(0)
    kept = everything(oracle, prompt)
    order = torch.rand(kept.shape, generator=generator).argsort(-1)
    kept.scatter_(-1, order[..., : kept.shape[-1] // 2], False)
    removed = generate_from_smaller_cache(oracle, prompt, TOKENS, kept)
    assert oracle.generate(prompt, TOKENS, kept) == removed


@pytest.mark.parametrize("granularity", [LAYER, HEAD])
@pytest.mark.parametrize("budget", [0.5, 0.2, 0.05, 96])
@pytest.mark.parametrize("block_size", [16, 32])
def test_pages_are_conserved(
    oracle: Oracle, prompt: Prompt, budget: float | int, granularity: str, block_size: int
) -> None:
    selection = oracle.select(prompt, Eviction(budget, block_size, granularity))
    candidates = len(prompt.token_ids) // block_size * block_size
    assert selection.evicts
    assert selection.pages.sum() == selection.blocks * oracle.layers * oracle.kv_heads
    assert selection.pages.min() >= 1
    assert selection.kept[:, :, candidates:].all()
    kept_candidates = selection.kept[:, :, :candidates].sum(-1)
    assert torch.equal(kept_candidates, selection.pages * block_size)
    assert selection.kept[:, :, :4].all()
    if granularity == LAYER:
        assert (selection.kept == selection.kept[:, :1]).all()


def test_ample_budget_evicts_nothing(oracle: Oracle, prompt: Prompt) -> None:
    assert not oracle.select(prompt, Eviction(1.0)).evicts


@pytest.mark.parametrize(
    ("prompt_tokens", "block_size", "budget", "blocks"),
    [
        (320, 32, 0.1, 1),
        (320, 32, 0.5, 5),
        (330, 32, 0.5, 4),  # 165 tokens less the tail of 10
        (320, 32, 1.0, 10),
        (330, 32, 64, 1),  # 64 tokens less the tail of 10
        (330, 32, 74, 2),
        (330, 32, 10_000, 10),
        (330, 32, 0.001, 1),
        (31, 32, 0.5, 0),
    ],
)
def test_retained_blocks(prompt_tokens: int, block_size: int, budget: float, blocks: int) -> None:
    assert retained_blocks(prompt_tokens, block_size, budget) == blocks


def test_water_filling() -> None:
    assert water_fill([1, 1, 2], 8, floor=0, cap=9) == [2, 2, 4]
    # The third one's excess goes to the others in proportion; the first is lifted to the floor.
    assert water_fill([0.01, 1, 10], 10, floor=1, cap=6) == [1, 3, 6]
    # A zero share stays at the floor until the others are full.
    assert water_fill([0, 1, 1], 9, floor=1, cap=5) == [1, 4, 4]
    assert water_fill([0, 0, 1], 11, floor=1, cap=5) == [3, 3, 5]
    assert water_fill([0, 0, 0], 6, floor=1, cap=5) == [2, 2, 2]


def test_apportionment_breaks_ties_by_index() -> None:
    assert apportion([1, 1, 1], 5, floor=0, cap=9) == [2, 2, 1]
    assert apportion([1, 1, 1], 9, floor=0, cap=3) == [3, 3, 3]
    assert apportion([0, 0, 0], 4, floor=1, cap=5) == [2, 1, 1]
    assert apportion([1, 2.6, 1.4], 5, floor=0, cap=9) == [1, 3, 1]


def test_observation_rows() -> None:
    layout = Layout(7, (Image(1, 2), Image(5, 1)))
    assert rows("text", layout, 512) == [3, 4, 6]
    assert rows("text", layout, 2) == [4, 6]


def test_scores_of_a_small_example() -> None:
    """Two text rows (2, 3) attend to one vision token (1); worked out by hand."""
    attention = torch.tensor(
        [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.5, 0.25, 0], [0.1, 0.2, 0.3, 0.4]],
        dtype=torch.float64,
    )
    layout = Layout(4, (Image(1, 1),))
    weights = [0.55 / 2, 0.4 / 1]
    expected = (weights[0] * 0.5 + weights[1] * 0.2) / sum(weights)
    scores = tgv_scores(attention, rows("text", layout, 512), layout.vision)
    torch.testing.assert_close(scores, torch.tensor([0.35, expected, 0.55, 0.4]).double())


def test_retention_order() -> None:
    case = Case(Layout(8, (Image(1, 2), Image(5, 1))), 1, 512, block_size=7)
    scores = torch.tensor([0.0, 9, 5, 1, 2, 9, 2, 99], dtype=torch.float64)
    # One sink, then text 4 and 6 (tied) and 3, then vision 1 and 5 (tied) and 2; 7 is no candidate.
    order = ranking(scores, tiers("text_first", case, 7), case.candidates)
    assert order == [0, 4, 6, 3, 1, 5, 2]


@pytest.mark.engine
@pytest.mark.slow
def test_stock_vllm_gives_the_same_tokens(
    oracle: Oracle, prompt: Prompt, tiny_model: Callable[..., Path]
) -> None:
    """Without eviction, engine and oracle agree, so eviction explains any difference elsewhere."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    arch = oracle.model.config.model_type
    text, images = two_images(arch)
    single = text.rpartition(LLAVA_IMAGE if arch == "llava" else QWEN_IMAGE)[0]
    engine = LLM(
        str(tiny_model(arch, image_size=112)),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        limit_mm_per_prompt={"image": 2},
    )
    try:
        outputs = engine.generate(
            [
                {"prompt": text, "multi_modal_data": {"image": images}},
                {"prompt": single, "multi_modal_data": {"image": images[:1]}},
            ],
            SamplingParams(temperature=0, max_tokens=2 * TOKENS),
            use_tqdm=False,
        )
    finally:
        engine.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()  # other tests made engines run in this process
    for output, expected in zip(outputs, [prompt, oracle.prompt(single, images[:1])], strict=True):
        assert list(output.prompt_token_ids) == expected.token_ids
        assert list(output.outputs[0].token_ids) == oracle.generate(expected, 2 * TOKENS)
