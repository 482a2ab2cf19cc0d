# SPDX-License-Identifier: Apache-2.0
"""Eviction from a quantised cache, `--kv-cache-dtype fp8`, with the checkpoint's scales.

Two references share no code with the plugin. Kept positions follow from float64 arithmetic on the
bytes that vLLM's kernel stored. Tokens follow from a Hugging Face model whose keys and values are
rounded like that kernel rounds them. The CUDA backend runs over the emulated FlashAttention of
`flash_on_cpu.py`, which gets queries in fp8 as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama import modeling_llama
from vllm import _custom_ops as ops

from oracle.emulation import Eviction, Oracle, Prompt, select
from tests.engine import flash_on_cpu
from tests.engine.questions import DEBUG, album, budget
from tests.engine.running import Ask, SteppedEngine, deviation, engine
from tests.gpu.conftest import multiply_bfloat16
from vllm_tgvkv.attention import cpu as attention_cpu
from vllm_tgvkv.attention.cpu import check_page_format
from vllm_tgvkv.cache.pages import FP8, PageLayoutError
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.worker.warm_up import warm_up

pytestmark = [
    pytest.mark.compatibility,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 caches on CPU need AVX-512"
    ),
]

LAYERS, BLOCK_SIZE = 4, 32
KEY_SCALES = [0.013, 0.031, 0.047, 0.022]
VALUE_SCALES = [0.011, 0.019, 0.007, 0.029]
QUERY_SCALES = [0.024, 0.033, 0.014, 0.041]
"""The CPU's kernel takes queries as they are."""
HALF = budget(0.5)


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def folder(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_scales(plain, tmp_path_factory.mktemp("fp8") / "model")


def with_scales(plain: Path, folder: Path) -> Path:
    """Write a model as a checkpoint that requests an fp8 cache and contains scales for it."""
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {**scheme, "dynamic": False},
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for kind, scales in (("q", QUERY_SCALES), ("k", KEY_SCALES), ("v", VALUE_SCALES)):
        for layer, scale in enumerate(scales):
            name = f"language_model.model.layers.{layer}.self_attn.{kind}_scale"
            weights[name] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return float32 values as vLLM's CPU kernel stores them, rounded towards zero."""
    most = torch.finfo(dtype).max
    scaled = (values / scale).clamp(-most, most)
    nearest = scaled.to(dtype)
    codes = nearest.view(torch.uint8).clone()
    codes -= (nearest.float().abs() > scaled.abs()).to(torch.uint8)  # the next one towards zero
    return codes.view(dtype)


@pytest.fixture
def oracle(plain: Path, is_flash: bool) -> Iterator[Oracle]:
    with stored_oracle(plain, is_flash) as oracle:
        yield oracle


@contextmanager
def stored_oracle(plain: Path, is_flash: bool) -> Iterator[Oracle]:
    """The model with a cache of fp8_e4m3 on CPU, or as FlashAttention and its writer have it."""
    attend = modeling_llama.eager_attention_forward

    def attend_to_stored(module: Any, *tensors: Any, **kwargs: Any) -> Any:
        def as_stored(tensor: Tensor, scales: list[float]) -> Tensor:
            scale, most = scales[module.layer_idx], torch.finfo(torch.float8_e4m3fn).max
            if is_flash:  # rounded to the nearest
                codes = (tensor / scale).clamp(-most, most).to(torch.float8_e4m3fn)
            else:
                codes = stored(tensor, scale, torch.float8_e4m3fn)
            return codes.float() * scale

        query, key, value, *others = tensors
        if is_flash:
            query = as_stored(query, QUERY_SCALES)
        key, value = as_stored(key, KEY_SCALES), as_stored(value, VALUE_SCALES)
        return attend(module, query, key, value, *others, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", attend_to_stored)
        yield Oracle(plain)


class Recorder:
    """Records the queries and prompt keys that the layers see of one request, which runs alone."""

    def __init__(self, running: SteppedEngine, patch: pytest.MonkeyPatch) -> None:
        self.is_flash = running.evictor.query_dtype == torch.float8_e4m3fn
        self.queries: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        """Of every layer, a tensor for each chunk, float64 and as it was given."""
        self.keys: list[Tensor] = [torch.empty(0)] * LAYERS
        """Bytes [P, H, D] of every layer, in the step that ends the prompt."""
        layers = running.engine.vllm_config.compilation_config.static_forward_context
        for index in range(LAYERS):
            layer = layers[f"language_model.model.layers.{index}.self_attn.attn"]
            patch.setattr(layer.impl, "forward", self._watching(index, layer.impl.forward))

    def _watching(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watch(
            layer: Any,
            query: Tensor,
            key: Any,
            value: Any,
            cache: Tensor,
            metadata: Any,
            **out: Any,
        ) -> Any:
            if metadata is not None and not metadata.ragged:
                self.queries[index].append(query.double())
                (length,) = metadata.stock.seq_lens.tolist()
                pages = cache[metadata.stock.block_table[0, : -(-length // BLOCK_SIZE)]]
                if self.is_flash:
                    keys = pages.chunk(2, dim=3)[0].transpose(1, 2)
                else:
                    keys = pages.flatten(2).chunk(2, dim=2)[0]  # [D, N] and then the values
                    keys = keys.unflatten(2, (-1, BLOCK_SIZE)).permute(0, 3, 1, 2)
                self.keys[index] = keys.flatten(0, 1)[:length].clone()
            return forward(layer, query, key, value, cache, metadata, **out)

        return watch

    def attention(self, length: int) -> Tensor:
        """Return the prompt's attention [L, Q, P, P] in float64, from the bytes in the cache."""
        found = []
        of_queries = QUERY_SCALES if self.is_flash else [1.0] * LAYERS
        for queries, codes, scale, of_query in zip(
            self.queries, self.keys, KEY_SCALES, of_queries, strict=True
        ):
            rows = torch.cat(queries)[:length] * float(torch.tensor(of_query))  # [P, Q, D]
            assert rows.shape[0] == codes.shape[0] == length
            keys = codes.view(torch.float8_e4m3fn).double() * float(torch.tensor(scale))
            keys = keys.repeat_interleave(rows.shape[1] // keys.shape[1], dim=1)
            logits = torch.einsum("iqd,jqd->qij", rows, keys) * rows.shape[2] ** -0.5
            future = torch.ones(length, length).triu(1).bool()
            found.append(logits.masked_fill(future, float("-inf")).softmax(-1))
        return torch.stack(found)


def assert_close(running: SteppedEngine, oracle: Oracle, asks: list[Ask]) -> None:
    """Serve requests in bfloat16, whose rounding may decide between two neighbours in fp8.

    The bounds are twice the deviations measured for these tiny models (1.2, 1.2 and 10 %).
    """
    found = deviation(running, oracle, asks, 0.1)
    assert found.logprob < 2.5, found
    assert found.regret < 2.5, found
    assert found.kept > 0.8, found
    assert found.without_eviction > 4, found


def assert_keeps_what_the_cache_says(running: SteppedEngine, oracle: Oracle, ask: Ask) -> Tensor:
    """Serve a request alone, and check its kept positions against the bytes in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(running, patch)
        (output,) = running.run([ask])
    prompt: Prompt = oracle.prompt(ask.text, ask.images)
    method, _, granularity = str(ask.xargs["kv_eviction"]).partition("_by_")
    wanted = Eviction(
        ask.xargs.get("kv_eviction_budget", 0.1),
        BLOCK_SIZE,
        granularity,
        observation_window=128,
        method=method,
    )
    attention = recorder.attention(len(prompt.token_ids))
    kept = running.kept(output.request_id, len(prompt.token_ids))
    assert kept is not None
    assert torch.equal(kept, select(attention, prompt, oracle.kv_heads, wanted).kept)
    return kept


def test_the_oracle_rounds_as_the_kernel_does() -> None:
    """Pages have the format that the plugin reads, and bytes of another fp8 format are found."""
    tokens = torch.randn(BLOCK_SIZE, 1, 32, generator=torch.Generator().manual_seed(0)) * 20
    tokens[0, 0, :4] = torch.tensor([1e4, -1e4, 1e-3, 0.0])
    slots = torch.arange(BLOCK_SIZE)
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        page = torch.zeros(1, 1, 2 * BLOCK_SIZE, 32, dtype=torch.uint8)
        pools = page.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(tokens, tokens, *pools, slots, "vec", 0.02, 0.5, name)
        keys, values = page.flatten().chunk(2)
        for codes, scale in ((keys.view(32, -1).t(), 0.02), (values.view(-1, 32), 0.5)):
            wanted = stored(tokens[:, 0], scale, dtype).view(torch.uint8)
            # A product with 1 / scale may round differently from a quotient.
            assert (codes == wanted).float().mean() > 0.999
        for model_dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_page_format(BLOCK_SIZE, 32, model_dtype, "vec", name)
            other = "fp8_e5m2" if name == "fp8_e4m3" else "fp8_e4m3"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(attention_cpu, "FP8", {name: FP8[other]})
                with pytest.raises(PageLayoutError, match=f"--kv-cache-dtype {name}"):
                    check_page_format(BLOCK_SIZE, 32, model_dtype, "vec", name)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["auto", "fp8_e5m2"])
def test_with_everything_kept_tokens_are_those_of_stock(
    plain: Path, folder: Path, dtype: str
) -> None:
    """Every page is dealt again, with the checkpoint's scales and in a format without scales."""
    options = {"kv_cache_dtype": dtype, "max_num_batched_tokens": 64}
    model = folder if dtype == "auto" else plain
    with engine(model, **options) as stock:
        wanted = stock.tokens(WHOLE)
    with engine(model, settings("head"), **options) as running:
        assert running.tokens(WHOLE) == wanted
        assert running.counters["requests_evicted"] == len(WHOLE)


WHOLE = [
    album(70 + i, 20, 150 + 67 * i, arrival=2 * i, max_tokens=60, xargs=budget(1.0))
    for i in range(4)
]


def settings(granularity: str) -> dict[str, Any]:
    names = ("tgv", "snapkv", "h2o", "vlcache", "elastic")
    return {
        "policy": f"tgv_by_{granularity}",
        "methods": {
            f"{name}_by_{granularity}": {"base": name, "granularity": granularity} for name in names
        },
        "debug": {**DEBUG, "poison": granularity == "head", "evict_at_full_budget": True},
    }


@pytest.mark.parametrize(
    ("granularity", "is_flash"),
    [pytest.param("layer", False, marks=pytest.mark.nightly), ("head", False), ("head", True)],
)
def test_what_is_kept_follows_from_the_bytes_in_the_cache(
    folder: Path, oracle: Oracle, granularity: str, is_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, rows of every kind, merging; then a cached prefix, or preemptions in a small pool.

    A rounding error of float32 may decide between two neighbours in fp8. So the answers of requests
    that run together are not compared by token, but by the probability that the oracle gives each.
    """
    if is_flash:
        flash_on_cpu.pretend(monkeypatch, flash_on_cpu.ReplayOnCPUWorker)
    shared, given = granularity == "layer", settings(granularity)
    options = {"enable_prefix_caching": True} if shared else {"num_gpu_blocks_override": 34}
    with engine(folder, given, max_num_batched_tokens=64, **options) as running:
        assert running.engine.vllm_config.cache_config.cache_dtype == "fp8"
        assert running.evictor.pool.raw.dtype == torch.uint8
        assert (running.evictor.query_dtype == torch.float8_e4m3fn) == is_flash
        for i, method in enumerate(given["methods"]):
            xargs = budget(0.2, kv_eviction=method)
            ask = album(700 + i, 20, 30, 170 + 37 * i, max_tokens=5, xargs=xargs)
            kept = assert_keeps_what_the_cache_says(running, oracle, ask)
        if shared:
            (output,) = running.run([ask])
            assert output.num_cached_tokens > 0
            again = running.kept(output.request_id, kept.shape[-1])
            assert again is not None
            assert torch.equal(again, kept)
            return
        asks = [
            album(90 + i, 20, 100 + 10 * i, max_tokens=110, logprobs=1, xargs=HALF, arrival=i)
            for i in range(6)
        ]
        before = running.counters["requests_evicted"]
        found = deviation(running, oracle, asks, 0.1)
        assert running.counters["requests_evicted"] - before > len(asks)  # some more than once
        # Ten times the measured deviation, and that of attention to everything.
        assert found.logprob < 0.13, found
        assert found.regret < 0.02, found
        assert found.kept > 0.97, found
        assert found.without_eviction > 2, found
        # Every page is dealt again: the tokens equal an unevicted request's.
        none = [replace(ask, xargs={"kv_eviction": "none"}) for ask in WHOLE]
        assert running.tokens(WHOLE) == running.tokens(none)


@pytest.mark.parametrize("is_flash", [True])
def test_triton_kernels_read_fp8(
    folder: Path, oracle: Oracle, is_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted, over chunks of a prompt, whose queries wait as bytes."""
    flash_on_cpu.pretend(monkeypatch, flash_on_cpu.ReplayOnCPUWorker)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu, "on_cpu", True)
    multiply_bfloat16(monkeypatch)
    given = {**settings("head"), "decode_kernel": "triton"}
    with engine(folder, given, max_num_batched_tokens=128) as running:
        warm_up(running.evictor)
        ask = album(81, 20, 100, max_tokens=12, logprobs=1, xargs=HALF)
        found = deviation(running, oracle, [ask], 0.1)
        assert found.logprob < 0.13, found
        assert found.kept > 0.97, found
        assert found.without_eviction > 2, found
