# SPDX-License-Identifier: Apache-2.0
"""Features and models that eviction refuses, tested on configurations without weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import transformers
from vllm.config import VllmConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only

from tests.engine import flash_on_cpu
from tests.inputs import head_scores, write_gates
from vllm_tgvkv.attention.base import check_layer
from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.engine import platforms
from vllm_tgvkv.engine.compatibility import check_vllm_config
from vllm_tgvkv.engine.patches import ASYNC_SCHEDULER_CLS, SCHEDULER_CLS
from vllm_tgvkv.engine.platforms import Platform
from vllm_tgvkv.policies.head_scores import write
from vllm_tgvkv.shared.errors import EvictionConfigError, UnsupportedByEvictionError
from vllm_tgvkv.worker.ranks import tensor_ranks

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
TGV = {CONFIG_KEY: {"policy": "tgv", "budget": 0.1}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


def llama(**fields: Any) -> Any:
    return transformers.LlamaConfig(**SIZES, **fields)


def deepseek_v2() -> Any:
    return transformers.DeepseekV2Config(
        **{**SIZES, "num_key_value_heads": 4},
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
    )


def mistral(sliding_window: int = 64, **fields: Any) -> Any:
    return transformers.MistralConfig(**SIZES, sliding_window=sliding_window, **fields)


def qwen2(use_sliding_window: bool = True, first_window: int = 1) -> Any:
    return transformers.Qwen2Config(
        **SIZES,
        use_sliding_window=use_sliding_window,
        sliding_window=64,
        max_window_layers=first_window,
    )


def gemma2_without_windows() -> Any:
    layers = ["full_attention"] * 2
    return transformers.Gemma2Config(**SIZES, head_dim=16, layer_types=layers)


def gemma3() -> Any:
    layers = ["full_attention"] * 2
    text = {**SIZES, "head_dim": 16, "sliding_window": None, "layer_types": layers}
    return transformers.Gemma3Config(text_config=text, vision_config=VISION)


def gemma4(global_head_dim: int = 32) -> Any:
    """Return a model with one KV head in layers with full attention, and two in others."""
    text = {
        **SIZES,
        "head_dim": 16,
        "global_head_dim": global_head_dim,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return transformers.Gemma4Config(
        text_config=text, vision_config=VISION, audio_config=None, image_token_id=5
    )


def qwen3_5() -> Any:
    text = {**SIZES, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    return transformers.Qwen3_5Config(text_config=text)


def cosmos3_edge() -> Any:
    text = {**SIZES, "head_dim": 128}
    return transformers.Cosmos3EdgeConfig(text_config=text, vision_config=VISION)


def jamba() -> Any:
    return transformers.JambaConfig(
        **SIZES, num_experts=1, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    )


def whisper() -> Any:
    return transformers.WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=300,
    )


def llama4() -> Any:
    text = {**SIZES, "head_dim": 16, "attention_chunk_size": 64, "num_local_experts": 2}
    sizes = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    return transformers.Llama4Config(
        text_config={**text, "intermediate_size_mlp": 64}, vision_config={**VISION, **sizes}
    )


Folder = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a function that writes a model's `config.json`, without weights."""

    def write(config: Callable[..., Any], architecture: str, **fields: Any) -> str:
        path = tmp_path_factory.mktemp(config.__name__)
        values = config(**fields)
        values.architectures = [architecture]
        values.save_pretrained(path)
        return str(path)

    return write


@pytest.fixture(scope="module")
def plain(folder: Folder) -> str:
    return folder(llama, "LlamaForCausalLM")


def configure(model: str, eviction: Any = TGV, **options: Any) -> VllmConfig:
    return EngineArgs(model=model, additional_config=eviction, **options).create_engine_config()


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(UnsupportedByEvictionError) as caught:
        configure(model, **options)
    message = str(caught.value)
    assert message.startswith("--kv-eviction ")
    assert message.endswith(" or leave out --kv-eviction")
    assert "\n" not in message
    return message


def refusal_of(config: VllmConfig, platform: Platform = platforms.CPU) -> str:
    """Return the plugin's refusal of a configuration that vLLM has built."""
    with pytest.raises(UnsupportedByEvictionError) as caught:
        check_vllm_config(config, platform)
    return str(caught.value)


def check_on_cuda(config: VllmConfig) -> None:
    """Check a configuration that vLLM has built on a CPU as if it were for CUDA."""
    config.attention_config.backend = None
    check_vllm_config(config, platforms.CUDA)


@pytest.mark.parametrize(
    ("config", "architecture", "what"),
    [
        (
            qwen3_5,
            "Qwen3_5ForConditionalGeneration",
            "a hybrid model (gated delta nets and full attention)",
        ),
        (
            qwen2,
            "Qwen2ForCausalLM",
            "sliding-window attention in some layers ({model}: layers 1 of 2)",
        ),
    ],
)
def test_what_models_of_several_kinds_of_layers_do_not_do_yet(
    folder: Folder, tmp_path: Path, config: Callable[..., Any], architecture: str, what: str
) -> None:
    model = folder(config, architecture)
    what = what.format(model=model)
    without = {"enable_prefix_caching": False}
    found = head_scores(2, 2)
    write(tmp_path / "heads.json", "a model", found.kv_heads, found.scores, {})
    with_scores = {**TGV[CONFIG_KEY], "head_scores": str(tmp_path / "heads.json")}
    write_gates(tmp_path, "rg", 2, 64, 2)
    with_gates = {**TGV[CONFIG_KEY], "gates": str(tmp_path)}
    cache = configure(model).cache_config
    assert cache.enable_prefix_caching
    if config is qwen3_5:
        assert cache.mamba_cache_mode == "align"
        with_units = refusal(model, prefix_match_unit=16)
        assert f"--prefix-match-unit 16 of {what} yet: remove the flag" in with_units
    check_on_cuda(configure(model))
    poisoned = configure(model, {CONFIG_KEY: {**TGV[CONFIG_KEY], "debug": {"poison": True}}})
    if config is qwen3_5:
        check_on_cuda(poisoned)
    else:
        word = "the debug option poison on this platform"
        assert f"with {word} and {what} yet: remove" in refusal_of(poisoned, platforms.CUDA)
    configure(model, tensor_parallel_size=2)
    for options, word in (
        ({"pipeline_parallel_size": 2}, "pipeline parallelism (--pipeline-parallel-size 2)"),
        ({"kv_cache_dtype": "fp8", "block_size": 32}, "a quantised cache (--kv-cache-dtype fp8)"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding",
        ),
        ({"eviction": {CONFIG_KEY: with_scores}}, "head_scores"),
        ({"eviction": {CONFIG_KEY: with_gates}}, "gates (--kv-eviction-gates)"),
        (
            {"disable_hybrid_kv_cache_manager": True},
            "one kind of blocks for all layers (--disable-hybrid-kv-cache-manager)",
        ),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    ):
        assert f"does not work with {word} of {what} yet" in refusal(model, **without, **options)


@pytest.mark.parametrize("size", [256, 512])
def test_large_heads_are_refused_where_flash_attention_does_not_take_them(
    folder: Folder, size: int
) -> None:
    """Those of layers with full attention count; Gemma 4 has smaller ones with a window."""
    config = configure(folder(gemma4, "Gemma4ForConditionalGeneration", global_head_dim=size))
    config.model_config.model_arch_config.is_mm_prefix_lm = False
    if size == 256:
        check_on_cuda(config)
    else:
        message = refusal_of(config, platforms.CUDA)
        assert "heads of 512 values in layers with full attention on this platform" in message
        assert "serve a model with at most 256 or leave out --kv-eviction" in message


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 4)])
def test_head_scores_of_another_shape_are_refused(
    plain: str, tmp_path: Path, shape: tuple[int, int]
) -> None:
    found = head_scores(*shape)
    write(tmp_path / "heads.json", "a model", found.kv_heads, found.scores, {})
    file = str(tmp_path / "heads.json")
    settings = {CONFIG_KEY: {"policy": "sparsemm", "budget": 0.1, "head_scores": file}}
    if shape == (2, 2):
        configure(plain, settings)
        return
    with pytest.raises(EvictionConfigError, match="and this model has 2 layers of 2: make a file"):
        configure(plain, settings)


@pytest.mark.parametrize("shape", [(2, 64, 2), (3, 64, 2), (2, 32, 2), (2, 64, 4)])
def test_gates_of_another_shape_are_refused(
    plain: str, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    write_gates(tmp_path, "rg10", *shape)
    settings = {CONFIG_KEY: {"policy": "dbtrimkv", "budget": 0.1, "gates": str(tmp_path)}}
    if shape == (2, 64, 2):
        configure(plain, settings)
        return
    with pytest.raises(EvictionConfigError, match="and this model has 2 layers, 64 values and 2"):
        configure(plain, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "architecture", "feature"),
    [
        (deepseek_v2, "DeepseekV2ForCausalLM", "multi-head latent attention (MLA)"),
        (
            mistral,
            "MistralForCausalLM",
            "sliding-window attention ({model}: 64 of at most 512 tokens)",
        ),
        (gemma2_without_windows, "Gemma2ForCausalLM", "soft-capped attention logits"),
        (jamba, "JambaForCausalLM", "state-space models, and hybrids of other kinds"),
        (whisper, "WhisperForConditionalGeneration", "cross attention"),
        (llama4, "Llama4ForConditionalGeneration", "chunked local attention"),
    ],
)
def test_models_that_are_refused(
    folder: Folder, config: Callable[..., Any], architecture: str, feature: str
) -> None:
    """The message arrives before any weight is read."""
    model = folder(config, architecture)
    message = refusal(model)
    assert f"does not work with {feature.format(model=model)}" in message
    assert "serve another model" in message


def test_a_window_that_hides_no_token_is_none(folder: Folder) -> None:
    """Nor does one that `--disable-sliding-window` removes, which bounds the context by it."""
    message = refusal(folder(mistral, "MistralForCausalLM"))
    assert "yet: use --disable-sliding-window, which limits the context to the window, " in message
    as_long = folder(mistral, "MistralForCausalLM", sliding_window=512)
    shorter = folder(mistral, "MistralForCausalLM")
    for model, context, options in (
        (as_long, 512, {}),
        (shorter, 64, {"max_model_len": 64}),
        (shorter, 64, {"disable_sliding_window": True}),
    ):
        vllm_config = configure(model, **options)
        assert vllm_config.model_config.max_model_len == context
        assert vllm_config.model_config.get_sliding_window() is None
        assert vllm_config.cache_config.sliding_window is None
        stock = configure(model, {}, **options)
        is_kept = "disable_sliding_window" not in options
        assert (stock.cache_config.sliding_window is not None) is is_kept, "stock is stock"
    assert ": 511 of at most 512 tokens)" in refusal(
        folder(mistral, "MistralForCausalLM", sliding_window=511)
    )


def wide_llama(**fields: Any) -> Any:
    return transformers.LlamaConfig(**SIZES, head_dim=32, **fields)


TWO_RANKS = {"tensor_parallel_size": 2}
TWO_STAGES = {"pipeline_parallel_size": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def flash(**attention: Any) -> dict[str, Any]:
    return {"attention_config": {"backend": "FLASH_ATTN", **attention}}


@pytest.mark.parametrize(
    ("options", "feature", "way_out"),
    [
        (
            {"speculative_config": NGRAM, **TWO_STAGES},
            "speculative decoding by ngram in pipeline stages (--pipeline-parallel-size 2)",
            "remove --speculative-config or use --pipeline-parallel-size 1",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 1},
            "data parallelism over several nodes (--data-parallel-size-local 1 of 2)",
            "one server per node",
        ),
        ({"kv_transfer_config": CONNECTOR}, "KV connectors", "remove --kv-transfer-config"),
        ({"kv_offloading_size": 1.0}, "KV connectors", "remove"),
        ({"runner": "pooling"}, "--runner pooling", "serve another model"),
        (
            {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
            "its own scheduler class",
            "remove --scheduler-cls vllm.v1.core.sched.scheduler.Scheduler",
        ),
        (
            {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
            "its own worker class",
            "remove --worker-cls vllm.v1.worker.cpu_worker.CPUWorker",
        ),
        ({"attention_backend": "TRITON_ATTN"}, "--attention-backend TRITON_ATTN", "use CPU_ATTN"),
        (
            {"eviction": {CONFIG_KEY: {"policy": "tgv", "decode_kernel": "triton"}}},
            "decode_kernel: triton on this platform",
            "",
        ),
        (
            {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
            "speculative decoding by draft_model",
            "use the method ngram",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flags_that_are_refused(
    plain: str, options: dict[str, Any], feature: str, way_out: str
) -> None:
    if "draft_model" in feature:
        options["speculative_config"]["model"] = plain
    message = refusal(plain, **options)
    assert feature in message
    assert way_out in message


@pytest.mark.parametrize(
    ("options", "changes", "feature", "way_out"),
    [
        ({}, {"model_config.hf_config.canvas_length": 64}, "a model that writes by diffusion", ""),
        ({}, {"parallel_config.enable_dbo": True}, "microbatches", ""),
        ({}, {"model_config.enable_sleep_mode": True}, "sleep mode", ""),
        (
            {"data_parallel_size": 2},
            {"parallel_config.data_parallel_backend": "ray"},
            "",
            "use --data-parallel-backend mp",
        ),
        *(
            (
                options,
                {f"parallel_config.{field}": value},
                f"does not work with {kind} parallelism {feature}",
                way_out,
            )
            for kind, options in (("tensor", TWO_RANKS), ("pipeline", TWO_STAGES))
            for field, value, feature, way_out in (
                (
                    "distributed_executor_backend",
                    "ray",
                    "and --distributed-executor-backend ray",
                    "mp",
                ),
                ("nnodes", 2, "over several nodes (--nnodes 2)", "--nnodes 1"),
            )
        ),
    ],
)
def test_what_vllm_itself_refuses_elsewhere(
    plain: str, options: dict[str, Any], changes: dict[str, Any], feature: str, way_out: str
) -> None:
    """Fields are set after vLLM's own checks, which refuse some of them here."""
    config = configure(plain, **options)
    for path, value in changes.items():
        *parts, field = path.split(".")
        owner: Any = config
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, field, value)
    vars(config.model_config).pop("is_diffusion", None)  # known already
    message = refusal_of(config)
    assert feature in message
    assert way_out in message


@pytest.mark.parametrize(
    ("options", "feature", "way_out"),
    [
        (TWO_RANKS, "tensor parallelism (--tensor-parallel-size 2) on this platform", ""),
        (TWO_STAGES, "pipeline parallelism (--pipeline-parallel-size 2) on this platform", ""),
        ({"speculative_config": NGRAM}, "by ngram on this platform yet", "remove"),
        (
            flash(backend_per_kind={"full_attention": "FLASHINFER"}),
            "--attention-config.backend_per_kind {'full_attention': 'FLASHINFER'} yet",
            "remove it or use FLASH_ATTN, which is extended or leave out",
        ),
        (
            flash(flash_attn_version=4),
            "--attention-config.flash_attn_version 4 yet",
            "use 3 on Hopper GPUs and 2 on others or leave out",
        ),
        (flash(backend_per_kind={"full_attention": "FLASH_ATTN"}, flash_attn_version=3), "", ""),
    ],
    ids=str,
)
def test_what_is_refused_on_a_gpu(
    plain: str, options: dict[str, Any], feature: str, way_out: str
) -> None:
    """vLLM itself takes these. The last ones are allowed."""
    config = configure(plain, {} if "attention_config" in options else TGV, **options)
    if not feature:
        check_vllm_config(config, platforms.CUDA)
        return
    message = refusal_of(config, platforms.CUDA)
    assert feature in message
    assert way_out in message


def test_another_platform_is_refused(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert "use a CPU or CUDA build of vLLM" in refusal(plain)


@pytest.mark.parametrize(
    ("config", "architecture", "fields", "feature"),
    [
        (llama, "LlamaForCausalLM", {"index_n_heads": 4}, "sparse attention (an indexer selects"),
        (
            llama,
            "LlamaForCausalLM",
            {"sparse_attention_config": {"sparse_block_size": 128}},
            "sparse attention (an indexer selects",
        ),
        (qwen2, "Qwen2ForCausalLM", {"first_window": 0}, "sliding-window attention in all layers"),
    ],
)
def test_attention_that_is_refused(
    folder: Folder, config: Any, architecture: str, fields: dict[str, Any], feature: str
) -> None:
    assert feature in refusal(folder(config, architecture, **fields))


def test_attention_of_prefixes_and_windows_after_the_prompt_is_refused(
    plain: str, folder: Folder
) -> None:
    """Answers of Unlimited-OCR see the prompt and their own last tokens."""
    config = configure(folder(gemma3, "Gemma3ForConditionalGeneration"))
    assert config.model_config.is_mm_prefix_lm  # vLLM's CPU kernels are causal
    assert "bidirectional attention over image tokens" in refusal_of(config, platforms.CUDA)
    config = configure(plain)
    sizes = config.model_config.model_arch_config
    config.model_config.model_arch_config = replace(sizes, rswa_window=128)
    assert "(R-SWA of 128 tokens)" in refusal_of(config)


@pytest.mark.parametrize(
    ("options", "feature", "way_out"),
    [
        *(
            (
                {"kv_cache_dtype": dtype},
                f"(--kv-cache-dtype {dtype})",
                "use --kv-cache-dtype auto or one of fp8, fp8_e4m3, fp8_e5m2",
            )
            for dtype in ("int8_per_token_head", "fp8_per_token_head", "nvfp4")
        ),
        (
            {"kv_cache_dtype": "fp8", "block_size": 16},
            "(--kv-cache-dtype fp8) in blocks of 16 tokens",
            "use a --block-size that is a multiple of 32",
        ),
        (
            {"kv_cache_dtype": "fp8_e5m2", "kv_cache_dtype_skip_layers": ["0", "1"]},
            "(--kv-cache-dtype fp8_e5m2) and layers that have another",
            "remove --kv-cache-dtype-skip-layers",
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_quantised_caches_that_are_refused(
    folder: Folder, options: dict[str, Any], feature: str, way_out: str
) -> None:
    message = refusal(folder(wide_llama, "LlamaForCausalLM"), **options)
    assert f"a quantised cache {feature}" in message
    assert way_out in message


FP8_OF_A_CHECKPOINT = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
}


def test_fp8_caches_are_for_cpus_and_heads_of_32_values(plain: str, folder: Folder) -> None:
    """Also if the checkpoint asks for one; then `auto` is no way out."""
    wide = folder(wide_llama, "LlamaForCausalLM", dtype="bfloat16")
    asking = folder(
        wide_llama,
        "LlamaForCausalLM",
        dtype="bfloat16",
        quantization_config=FP8_OF_A_CHECKPOINT,
    )
    for model, asked in ((wide, "fp8"), (wide, "fp8_e5m2"), (asking, "auto")):
        config = configure(model, kv_cache_dtype=asked)
        assert config.scheduler_config.scheduler_cls == SCHEDULER_CLS
        message = refusal_of(config, platforms.CUDA)
        assert "a quantised cache (--kv-cache-dtype fp8" in message
        assert ") on this platform yet: use --kv-cache-dtype bfloat16 or " in message
    message = refusal(plain, kv_cache_dtype="fp8")
    assert "a quantised cache (--kv-cache-dtype fp8) of heads of 16 values" in message


def test_vllm_loses_the_sampling_parameters_of_drafts_on_cpu() -> None:
    """A known fault of stock vLLM 0.32: once this fails, correct docs/compatibility.md."""
    current_platform.import_kernels()
    sizes = torch.tensor([2, 2, 5])
    for values, is_right in (([3.0, 5.0, 7.0], False), ([3, 5, 7], True)):
        found = torch.full((5,), -9, dtype=torch.tensor(values).dtype)
        cpu_triton_utils._expand_kernel_impl(found, torch.tensor(values), sizes, 0, 1)
        assert found.tolist() == ([3, 3, 7, 7, 7] if is_right else [-9] * 5)
    with pytest.raises(RuntimeError, match="Expected reduction dim"):
        apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))


def test_drafts_by_ngrams_are_planned_step_by_step(plain: str) -> None:
    """vLLM never schedules these ahead, not even on request."""
    vllm_config = configure(plain, speculative_config=NGRAM)
    assert vllm_config.scheduler_config.scheduler_cls == SCHEDULER_CLS
    with pytest.raises(ValueError, match=r"[Aa]sync scheduling is (only|not) supported"):
        configure(plain, speculative_config=NGRAM, async_scheduling=True)


def test_other_drafts_are_refused_by_name(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set after vLLM's own checks, which need a draft model or a package for most of them."""
    vllm_config = configure(plain, speculative_config=NGRAM)
    others = {*get_args(SpeculativeMethod)} - {"ngram"}
    assert {"draft_model", "eagle", "eagle3", "mtp", "ngram_gpu", "suffix"} < others
    for method in others:
        monkeypatch.setattr(vllm_config.speculative_config, "method", method)
        assert refusal_of(vllm_config) == (
            f"--kv-eviction does not work with speculative decoding by {method} yet: use the "
            "method ngram in --speculative-config, remove the flag or leave out --kv-eviction"
        )


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)


def test_replicas_are_refused_where_their_steps_depend_on_each_other(folder: Folder) -> None:
    """Only for a mixture of experts with several replicas."""
    mixture = folder(qwen3_moe, "Qwen3MoeForCausalLM")
    message = refusal(mixture, data_parallel_size=2)
    assert "data parallelism of a mixture of experts (--data-parallel-size 2)" in message
    assert "one server per replica" in message
    assert configure(mixture).scheduler_config.scheduler_cls == SCHEDULER_CLS


def test_a_ceiling_leaves_every_head_its_floor(plain: str) -> None:
    for tokens, floor, is_refused in ((31, 1, True), (32, 1, False), (63, 2, True), (31, 0, True)):
        settings = {"policy": "tgv", "decode": {"max_tokens": tokens}, "floor_pages": floor}
        if not is_refused:
            configure(plain, {CONFIG_KEY: settings}, block_size=32)
            continue
        message = refusal(plain, eviction={CONFIG_KEY: settings}, block_size=32)
        assert f"decode.max_tokens: {tokens}, which is less than floor_pages ({floor})" in message
        assert f"give at least {max(floor, 1) * 32} tokens" in message


@pytest.mark.parametrize("settings", [{"policy": "retentivekv"}, {"methods": {"x": {}}}])
def test_what_methods_with_summaries_do_not_run_with(
    plain: str, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    if "methods" in settings:
        settings = {"policy": "tgv", "methods": {"x": {"base": "tgv", "summaries": {}}}}
    vllm_config = configure(plain, {CONFIG_KEY: settings})
    check_vllm_config(vllm_config, platforms.CPU)
    on_gpu = configure(plain, {}, attention_config={"backend": "FLASH_ATTN"})
    on_gpu.additional_config = {CONFIG_KEY: settings}
    check_vllm_config(on_gpu, platforms.CUDA)
    on_gpu.additional_config = {CONFIG_KEY: {**settings, "decode_kernel": "triton"}}
    message = refusal_of(on_gpu, platforms.CUDA)
    assert "summaries of evicted tokens with decode_kernel: triton yet: use the setting" in message
    for name, number in (("tensor", 2), ("pipeline", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(vllm_config.parallel_config, f"{name}_parallel_size", number)
            message = refusal_of(vllm_config)
            assert f"summaries of evicted tokens with --{name}-parallel-size {number}" in message
    quantised = configure(plain, {CONFIG_KEY: settings}, block_size=32)
    monkeypatch.setattr(quantised.cache_config, "cache_dtype", "fp8")
    monkeypatch.setattr(quantised.model_config, "get_head_size", lambda: 32)
    assert "summaries of evicted tokens in a quantised cache" in refusal_of(quantised)
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    message = refusal(plain, eviction={CONFIG_KEY: settings}, speculative_config=drafts)
    assert "summaries of evicted tokens with --speculative-config" in message


@pytest.mark.parametrize(
    ("ranks", "granularity", "is_refused"),
    [(1, "layer", False), (2, "head", False), (2, "layer", True), (4, "head", True)],
)
@pytest.mark.parametrize("by", [{"reduce": "max"}, {"score": "retentive_spread"}])
def test_maxima_over_rows_need_all_heads_of_a_token_set_on_one_rank(
    plain: str,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    granularity: str,
    is_refused: bool,
    by: dict[str, str],
) -> None:
    """The model has two KV heads, so four ranks hold each of them twice."""
    mix = {"base": "snapkv", "granularity": granularity, **by}
    eviction = {CONFIG_KEY: {"policy": "tgv", "methods": {"mine": mix, "other": {}}}}
    vllm_config = configure(plain, eviction)
    monkeypatch.setattr(vllm_config.parallel_config, "tensor_parallel_size", ranks)
    monkeypatch.setattr(vllm_config.parallel_config, "distributed_executor_backend", "mp")
    if not is_refused:
        check_vllm_config(vllm_config, platforms.CPU)
        return
    message = refusal_of(vllm_config)
    assert (
        "reduce: max (or retentive_spread) of the method mine where heads of several ranks share a"
        in message
    )
    assert f"(--tensor-parallel-size {ranks}) yet: use reduce: mean (or another" in message


def test_ranks_share_heads_by_the_layers_that_are_evicted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 has fewer KV heads there than in layers with a window."""
    model = folder(gemma4, "Gemma4ForConditionalGeneration")
    mix = {"base": "snapkv", "granularity": "head", "reduce": "max"}
    eviction = {CONFIG_KEY: {"policy": "tgv", "methods": {"mine": mix}}}
    assert "heads of several ranks share" in refusal(
        model, eviction=eviction, tensor_parallel_size=2
    )
    vllm_config = configure(model, tensor_parallel_size=2)
    assert vllm_config.model_config.get_total_num_kv_heads() == 2
    for rank in range(2):
        group = SimpleNamespace(world_size=2, rank_in_group=rank)
        monkeypatch.setattr("vllm.distributed.get_tp_group", lambda group=group: group)
        ranks = tensor_ranks(vllm_config)
        assert (ranks.num_parts, ranks.part, ranks.rank) == (1, 0, rank)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "--decode-context-parallel-size 1",
        ),
        ({"prefill_context_parallel_size": 2}, "prefill context parallel"),
    ],
    ids=["decode", "prefill"],
)
def test_context_parallelism_is_refused_by_vllm_itself(
    plain: str, options: dict[str, Any], part: str
) -> None:
    """Fails once vLLM allows it; then the plugin's refusal must be tested here."""
    with pytest.raises(ValueError, match=part):
        configure(plain, **options)


def test_model_runner_v2_is_refused(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses it without Triton, the plugin with Triton."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"[Mm]odel [Rr]unner V2"):
        configure(plain)
    # The plugin's own refusal, as in a build with Triton.
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    vllm_config = configure(plain)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: True))
    assert "set VLLM_USE_V2_MODEL_RUNNER=0" in refusal_of(vllm_config)


def test_steps_that_are_scheduled_ahead_have_a_scheduler_for_that(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_on_cpu.schedule_ahead(monkeypatch)
    assert configure(plain).scheduler_config.scheduler_cls == ASYNC_SCHEDULER_CLS


@pytest.mark.parametrize("may_slide", [False, True])
def test_windows_and_shared_caches_are_for_models_that_list_windows(may_slide: bool) -> None:
    """A layer with a window runs vLLM's own attention, whatever else it has."""
    plain = {"alibi_slopes": None, "sinks": None, "logits_soft_cap": 0, "sliding_window": -1}
    plain["kv_sharing_target_layer_name"] = None
    for served in (
        {"kv_sharing_target_layer_name": "layers.0"},
        {"sliding_window": 64},
        {"sliding_window": 64, "logits_soft_cap": 30.0},
    ):
        impl = SimpleNamespace(**plain | served)
        if may_slide:
            check_layer(impl, may_slide)
            continue
        with pytest.raises(UnsupportedByEvictionError):
            check_layer(impl, may_slide)
    with pytest.raises(UnsupportedByEvictionError, match="soft-capped"):
        check_layer(SimpleNamespace(**plain | {"logits_soft_cap": 30.0}), may_slide)


def test_flash_attention_4_is_refused_where_vllm_chooses_it() -> None:
    """On Blackwell it is the default, which only a layer that is built shows."""
    properties = ("alibi_slopes", "logits_soft_cap", "sinks", "kv_sharing_target_layer_name")
    impl = SimpleNamespace(**dict.fromkeys(properties), sliding_window=(-1, -1))
    for version in (2, 3):
        check_layer(SimpleNamespace(**vars(impl), vllm_flash_attn_version=version))
    with pytest.raises(UnsupportedByEvictionError, match=r"FlashAttention 4 .*version 2 or leave"):
        check_layer(SimpleNamespace(**vars(impl), vllm_flash_attn_version=4))


def test_supported_models_get_the_plugins_classes(plain: str, folder: Folder) -> None:
    """Also a model whose configuration has a window that it does not use."""
    cosmos = folder(cosmos3_edge, "Cosmos3EdgeForConditionalGeneration")  # `mlp` is a layer, too
    unused = folder(qwen2, "Qwen2ForCausalLM", use_sliding_window=False)
    for model in (plain, unused, cosmos):
        config = configure(model)
        assert config.scheduler_config.scheduler_cls == SCHEDULER_CLS
        assert config.parallel_config.worker_cls == platforms.CPU.worker_cls
        assert config.attention_config.backend.name == platforms.CPU.attention_backend
        assert not config.scheduler_config.async_scheduling  # vLLM's choice on CPU


@pytest.mark.parametrize("eviction", [{}, {CONFIG_KEY: {"policy": "none"}}])
def test_nothing_is_refused_without_eviction(folder: Folder, eviction: dict[str, Any]) -> None:
    for model in (folder(mistral, "MistralForCausalLM"), folder(llama, "LlamaForCausalLM")):
        config = configure(model, eviction, kv_cache_dtype="fp8")
        assert config.scheduler_config.scheduler_cls is None
        assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


@pytest.mark.slow
def test_serve_exits_with_the_message_as_its_last_line(plain: str) -> None:
    command = [str(Path(sys.executable).with_name("vllm")), "serve", plain, "--skip-tokenizer-init"]
    command += ["--kv-eviction", "tgv", "--port", "0"]
    command += ["--speculative-config", json.dumps(NGRAM), "--pipeline-parallel-size", "2"]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert run.returncode not in (0, None)
    last = f"{run.stdout}{run.stderr}".strip().splitlines()[-1]
    assert last.endswith(
        "--kv-eviction does not work with speculative decoding by ngram in pipeline stages "
        "(--pipeline-parallel-size 2) yet: remove --speculative-config or use "
        "--pipeline-parallel-size 1 or leave out --kv-eviction"
    )
