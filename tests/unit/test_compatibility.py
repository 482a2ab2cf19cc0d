# SPDX-License-Identifier: Apache-2.0
"""Features and models that eviction refuses, tested on configurations without weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import transformers
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.executor import ray_utils

from tests.engine import flash_on_cpu
from tests.inputs import assert_says, head_scores, write_gates
from vllm_tgvkv.attention.base import check_layer
from vllm_tgvkv.attention.sinks import sinks_of
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig, config_of
from vllm_tgvkv.engine import compatibility, platforms
from vllm_tgvkv.engine.compatibility import check_vllm_config
from vllm_tgvkv.engine.flash_versions import flash_version
from vllm_tgvkv.engine.patches import ASYNC_SCHEDULER_CLS, SCHEDULER_CLS
from vllm_tgvkv.engine.platforms import Platform
from vllm_tgvkv.policies.head_scores import write
from vllm_tgvkv.shared.errors import EvictionConfigError, UnsupportedByEvictionError
from vllm_tgvkv.worker.base import check_sinks
from vllm_tgvkv.worker.decode_kernel import with_decode_kernel
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
MAXIMA = {"base": "snapkv", "reduce": "max"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
FULL = {"layer_types": ["full_attention"] * 2}
FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
FP8_CHECKPOINT = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
FP8_CHECKPOINT |= {"ignore": [], "kv_cache_scheme": FP8_SCHEME}
FP8_OF_HEADS = {**FP8_CHECKPOINT, "kv_cache_scheme": {**FP8_SCHEME, "strategy": "attn_head"}}
GEMMA_4 = {
    "head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}
"""One KV head in layers with full attention, and two in others."""
PROJECTOR = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}


def text(architecture: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return architecture, {**SIZES, **fields}


def with_vision(architecture: str, vision: Any = VISION, **fields: Any) -> tuple[str, Any]:
    configs = {"text_config": {**SIZES, **fields}, "vision_config": vision}
    return architecture, {name: config for name, config in configs.items() if config}


def sliding(layers: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A model whose layers from this one on have a window."""
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": layers}
    return text("Qwen2ForCausalLM", **{**window, **fields})


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": text("LlamaForCausalLM"),
    "wide": text("LlamaForCausalLM", head_dim=32, dtype="bfloat16"),
    **{
        f"wide: {size}": text("LlamaForCausalLM", head_dim=size, dtype="bfloat16")
        for size in (256, 512)
    },
    "fp8": text(
        "LlamaForCausalLM", head_dim=32, dtype="bfloat16", quantization_config=FP8_CHECKPOINT
    ),
    "fp8 of heads": text(
        "LlamaForCausalLM", head_dim=32, dtype="bfloat16", quantization_config=FP8_OF_HEADS
    ),
    "indexer": text("LlamaForCausalLM", index_n_heads=4),
    "sparse": text("LlamaForCausalLM", sparse_attention_config={"sparse_block_size": 128}),
    "small values": text("LlamaForCausalLM", v_head_dim=8),
    "latent": text("DeepseekV2ForCausalLM", num_key_value_heads=4),
    "window": text("MistralForCausalLM", sliding_window=64),
    "long window": text("MistralForCausalLM", sliding_window=511),
    "nominal window": text("MistralForCausalLM", sliding_window=512),
    "windows": sliding(1),
    "all windows": sliding(0),
    "unused window": sliding(1, use_sliding_window=False),
    "capped": text("Gemma2ForCausalLM", head_dim=16, **FULL),
    "mamba": text("JambaForCausalLM", num_experts=1, attn_layer_period=2, attn_layer_offset=1),
    "mixture": text("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "encoder": ("WhisperForConditionalGeneration", {}),
    "chunked": with_vision(
        "Llama4ForConditionalGeneration",
        {**VISION, **PROJECTOR},
        head_dim=16,
        attention_chunk_size=64,
        num_local_experts=2,
        intermediate_size_mlp=64,
    ),
    "prefix": with_vision(
        "Gemma3ForConditionalGeneration", head_dim=16, sliding_window=None, **FULL
    ),
    "hybrid": with_vision(
        "Qwen3_5ForConditionalGeneration",
        None,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "cosmos": with_vision("Cosmos3EdgeForConditionalGeneration", head_dim=128),
    **{
        f"heads of {size}": with_vision(
            "Gemma4ForConditionalGeneration", **GEMMA_4, global_head_dim=size
        )
        for size in (32, 256, 512)
    },
}
"""Architecture and configuration by the property that counts."""
Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a function that writes a model's `config.json`, without weights."""

    @cache
    def write(name: str) -> str:
        path = tmp_path_factory.mktemp(name.replace(" ", "-"))
        architecture, fields = MODELS[name]
        family = architecture.partition("For")[0]
        others = {"audio_config": None, "image_token_id": 5} if family == "Gemma4" else {}
        values = getattr(transformers, f"{family}Config")(**fields, **others)
        values.architectures = [architecture]
        values.save_pretrained(path)
        return str(path)

    return write


@pytest.fixture(scope="module")
def plain(folder: Folder) -> str:
    return folder("plain")


def settings(**values: Any) -> dict[str, Any]:
    return {CONFIG_KEY: {"policy": "tgv", "budget": 0.1, **values}}


def configure(model: str, eviction: Any = None, **options: Any) -> VllmConfig:
    eviction = settings() if eviction is None else eviction
    return EngineArgs(model=model, additional_config=eviction, **options).create_engine_config()


def refusal_of(config: VllmConfig, platform: Platform = platforms.CPU) -> str:
    """Return the plugin's refusal of a configuration that vLLM has built."""
    with pytest.raises(UnsupportedByEvictionError) as caught:
        check_vllm_config(config, platform)
    return str(caught.value)


def check_on_cuda(config: VllmConfig) -> None:
    """Check a configuration that vLLM has built on a CPU as if it were for CUDA."""
    config.attention_config.backend = None
    check_vllm_config(config, platforms.CUDA)


# -- one table of refusals -------------------------------------------------------------------


def case(said: str, model: str = "plain", *, marks: Any = (), **options: Any) -> Any:
    """Return what a model with these options of vLLM is refused with, before it is loaded."""
    return pytest.param(model, options, said, marks=marks, id=f"{model}: {said[:60]}")


RANKS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
HYBRIDS = {
    "hybrid": "a hybrid model (gated delta nets and full attention)",
    "windows": "sliding-window attention in some layers (...: layers 1 of 2)",
}
OF_HYBRIDS = (
    (STAGES, "pipeline parallelism (--pipeline-parallel-size 2)"),
    ({"kv_cache_dtype": "fp8", "block_size": 32}, "a quantised cache (--kv-cache-dtype fp8)"),
    ({"eviction": "head_scores"}, "head_scores"),
    ({"eviction": "gates"}, "gates (--kv-eviction-gates)"),
    ({"disable_hybrid_kv_cache_manager": True}, "(--disable-hybrid-kv-cache-manager)"),
    ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
)
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 2}
SLOW = pytest.mark.slow
REPLICAS, DRAFTING = {"data_parallel_size": 2}, {"speculative_config": NGRAM}
BLOCKS_OF_16 = {"kv_cache_dtype": "fp8", "block_size": 16}
SKIPPING = {"kv_cache_dtype": "fp8_e5m2", "kv_cache_dtype_skip_layers": ["0", "1"]}
SUMMARIES = settings(policy="retentivekv")
RECALLING = settings(policy="reach", recall={"gib": 0.1})
OF_HEADS = settings(methods={"m": {**MAXIMA, "granularity": "head"}})
STOCK = {"scheduler": "vllm.v1.core.sched.scheduler.Scheduler"}
STOCK["worker"] = "vllm.v1.worker.cpu_worker.CPUWorker"
REFUSED = [
    *(
        case(f"{word} of {what} yet", model, enable_prefix_caching=False, **options)
        for model, what in HYBRIDS.items()
        for options, word in OF_HYBRIDS
    ),
    case(f"speculative decoding of {HYBRIDS['windows']}", "windows", speculative_config=NGRAM),
    case("--prefix-match-unit 16 of a hybrid ... remove", "hybrid", prefix_match_unit=16),
    case("multi-head latent attention (MLA) ... serve another model", "latent", marks=SLOW),
    case("values of another size than keys (v_head_dim 8) ... serve another", "small values"),
    case("...: 64 of at most 512 tokens) yet: use --disable-sliding-window", "window"),
    case("sliding-window attention (...: 511 of at most 512 tokens) ... serve", "long window"),
    case("sliding-window attention in all layers", "all windows"),
    case("soft-capped attention logits ... serve another model", "capped", marks=SLOW),
    case("state-space models, and hybrids of other kinds ... serve", "mamba", marks=SLOW),
    case("cross attention ... serve another model", "encoder", marks=SLOW),
    case("chunked local attention ... serve another model", "chunked", marks=SLOW),
    *(case("sparse attention (an indexer selects", model) for model in ("indexer", "sparse")),
    case(
        "mixture of experts (--data-parallel-size 2) on this platform, where vLLM cannot send ... "
        "use --data-parallel-size 1 and one server per replica",
        "mixture",
        **REPLICAS,
    ),
    case(
        "expert parallelism (--enable-expert-parallel, 2 workers) on this platform, where vLLM's "
        "kernels need all experts of a layer yet: remove --enable-expert-parallel",
        "mixture",
        enable_expert_parallel=True,
        **RANKS,
    ),
    case(
        "by ngram in pipeline stages (--pipeline-parallel-size 2) ... remove --speculative-config "
        "or use --pipeline-parallel-size 1",
        **DRAFTING,
        **STAGES,
    ),
    *(
        case(
            "a draft model whose checkpoint asks for a quantised cache yet: use --kv-cache-dtype "
            "bfloat16, remove --speculative-config",
            "wide",
            speculative_config={**DRAFTS, "model": name},
        )
        for name in ("fp8", "fp8 of heads")
    ),
    case(
        "one kind of blocks for all layers (--disable-hybrid-kv-cache-manager) and a draft ... "
        "remove the flag",
        speculative_config=DRAFTS,
        disable_hybrid_kv_cache_manager=True,
    ),
    case("--runner draft yet: serve another model", runner="draft"),
    case(
        "a draft model that sees images, with which vLLM itself does not work, yet: use a language",
        "prefix",
        speculative_config=DRAFTS,
    ),
    case(
        "replicas of several nodes each (--nnodes 4 for --data-parallel-size 2) ... a server for "
        "each replica, with a --master-port of its own",
        nnodes=4,
        **REPLICAS,
        **RANKS,
    ),
    case(
        "the KV connector LMCacheConnectorV1 (--kv-transfer-config) yet: use one of NixlConnector",
        kv_transfer_config={**CONNECTOR, "kv_connector": "LMCacheConnectorV1"},
    ),
    case(
        "the KV connector ExampleConnector (--kv-transfer-config) and --speculative-config",
        kv_transfer_config=CONNECTOR,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    ),
    case(
        "and methods that add up attention over cuts (h2o_accumulated)",
        kv_transfer_config={**CONNECTOR, "kv_connector": "NixlConnector"},
        eviction=settings(
            methods={"mine": {"base": "h2o", "score": "h2o_accumulated"}},
            decode={"on_request": True},
        ),
    ),
    case("--runner pooling ... serve another model", runner="pooling"),
    *(
        case(f"its own {kind} class: remove --{kind}-cls {name}", **{f"{kind}_cls": name})
        for kind, name in STOCK.items()
    ),
    case("--attention-backend TRITON_ATTN ... use CPU_ATTN", attention_backend="TRITON_ATTN"),
    case("decode_kernel: triton on this platform", eviction=settings(decode_kernel="triton")),
    *(
        case(
            f"dtype {dtype}) yet: use ... auto or one of fp8, fp8_e4m3, fp8_e5m2", "wide", **cached
        )
        for dtype in ("int8_per_token_head", "fp8_per_token_head", "nvfp4")
        for cached in [{"kv_cache_dtype": dtype}]
    ),
    case("a quantised cache (--kv-cache-dtype fp8) of heads of 16 values", kv_cache_dtype="fp8"),
    case(
        "in blocks of 16 tokens ... --block-size that is a multiple of 32", "wide", **BLOCKS_OF_16
    ),
    case(
        "a quantised cache (--kv-cache-dtype fp8) with a scale for each head yet: use "
        "--kv-cache-dtype bfloat16, serve",  # `auto` is no way out
        "fp8 of heads",
    ),
    case("that have another ... remove --kv-cache-dtype-skip-layers", "wide", **SKIPPING),
    *(
        case(
            f"decode.max_tokens: {tokens}, which is less than floor_pages ({floor}) ... give at "
            f"least {max(floor, 1) * 32} tokens",
            eviction=settings(decode={"max_tokens": tokens}, floor_pages=floor),
            block_size=32,
        )
        for tokens, floor in ((31, 1), (63, 2), (31, 0))
    ),
    case("evicted tokens with --speculative-config", eviction=SUMMARIES, **DRAFTING),
    case("heads of several ranks share", "heads of 32", eviction=OF_HEADS, **RANKS),
    case("where 4 ranks share 2 KV heads", eviction=RECALLING, tensor_parallel_size=4),
    *(
        case("recall in a quantised cache ... leave out recall", model, eviction=RECALLING, **more)
        for model, more in (("wide", {"kv_cache_dtype": "fp8"}), ("fp8", {}))
    ),
]


@pytest.mark.parametrize(("model", "options", "said"), REFUSED)
def test_what_is_refused_before_a_model_is_loaded(
    folder: Folder, tmp_path: Path, model: str, options: dict[str, Any], said: str
) -> None:
    path = folder(model)
    drafting = options.get("speculative_config", {})
    if drafting.get("method") == "draft_model":
        draft = folder(drafting.get("model", model))
        options = {**options, "speculative_config": {**drafting, "model": draft}}
    if options.get("eviction") == "gates":
        write_gates(tmp_path, "rg", 2, 64, 2)
        options = {**options, "eviction": settings(gates=str(tmp_path))}
    if options.get("eviction") == "head_scores":
        scores = str(save_scores(tmp_path, 2, 2))
        options = {**options, "eviction": settings(head_scores=scores)}
    with pytest.raises(UnsupportedByEvictionError) as caught:
        configure(path, **options)
    message = str(caught.value)
    assert_says(message, f"--kv-eviction ... {said} ... or leave out --kv-eviction")
    assert message.startswith("--kv-eviction ")
    assert "\n" not in message


def save_scores(folder: Path, layers: int, kv_heads: int) -> Path:
    found = head_scores(layers, kv_heads)
    write(folder / "heads.json", "a model", found.kv_heads, found.scores, {})
    return folder / "heads.json"


def flash(**attention: Any) -> dict[str, Any]:
    return {"attention_config": {"backend": "FLASH_ATTN", **attention}, "eviction": {}}


def changed(
    said: str, fields: dict[str, Any], model: str = "plain", cuda: bool = False, **options: Any
) -> Any:
    """Return what is refused after fields were set, past vLLM's own checks, or for a GPU."""
    platform = platforms.CUDA if cuda else platforms.CPU
    return pytest.param(model, options, fields, platform, said, id=f"{model}: {said[:60]}")


def on_gpu(said: str, fields: Any = None, **options: Any) -> Any:
    return changed(said, fields or {}, cuda=True, **options)


PARALLEL = "parallel_config."
TENSOR, PIPELINE = f"{PARALLEL}tensor_parallel_size", f"{PARALLEL}pipeline_parallel_size"
EXECUTOR = f"{PARALLEL}distributed_executor_backend"
CHANGED = [
    changed("a model that writes by diffusion", {"model_config.hf_config.canvas_length": 64}),
    changed("microbatches", {f"{PARALLEL}enable_dbo": True}),
    changed(
        "ExampleConnector (--kv-transfer-config) and sleep mode (--enable-sleep-mode) yet: remove "
        "one of both flags",
        {"model_config.enable_sleep_mode": True},
        kv_transfer_config=CONNECTOR,
    ),
    changed(
        "--data-parallel-backend ray, which vLLM itself does not run on CPUs yet: use "
        "--data-parallel-backend mp",
        {f"{PARALLEL}data_parallel_backend": "ray"},
        **REPLICAS,
    ),
    changed(
        "--distributed-executor-backend ray, which vLLM itself does not run on CPUs yet: use "
        "--distributed-executor-backend mp",
        {EXECUTOR: "ray"},
    ),
    changed(
        "work with --distributed-executor-backend ours.Executor yet: use ... mp",
        {EXECUTOR: "ours.Executor"},
    ),
    changed("--enable-elastic-ep", {f"{PARALLEL}enable_elastic_ep": True}, "mixture"),
    *(
        changed(
            f"{kind} parallelism and --distributed-executor-backend external_launcher yet: use ... "
            "mp",
            {EXECUTOR: "external_launcher"},
            **options,
        )
        for kind, options in (("tensor", RANKS), ("pipeline", STAGES))
    ),
    *(
        changed(
            f"speculative decoding by {method} yet: use one of the methods ngram, draft_model, "
            "eagle, eagle3, mtp in --speculative-config, remove the flag or leave out",
            {"speculative_config.method": method},
            **DRAFTING,
        )
        for method in get_args(SpeculativeMethod)
        if method not in platforms.CPU.drafts
    ),
    changed(
        "by mtp of other models than Qwen3.5 yet: remove --speculative-config",
        {"speculative_config.method": "mtp"},
        **DRAFTING,
    ),
    changed(
        f"by eagle of {HYBRIDS['hybrid']} yet: use one of the methods ngram, mtp in",
        {"speculative_config.method": "eagle"},
        "hybrid",
        **DRAFTING,
    ),
    *(
        changed(
            f"{said} --speculative-config",
            {f"speculative_config.{field}": value},
            speculative_config=DRAFTS,
        )
        for field, value, said in (
            (
                "num_speculative_tokens_per_batch_size",
                [(1, 2, 1)],
                "for each batch size ... out of",
            ),
            ("parallel_drafting", True, "that a model makes in parallel yet: leave ... out of"),
            (
                "attention_backend",
                AttentionBackendEnum.FLASH_ATTN,
                "a draft model with another attention backend (FLASH_ATTN) ... out of",
            ),
            ("kv_cache_dtype", "fp8", "with another kind of cache (fp8) ... out of"),
            (
                "draft_model_config.runner_type",
                "pooling",
                "a draft model with --runner pooling yet: use another draft model, remove",
            ),
            (
                "draft_model_config.hf_text_config.layer_types",
                ["sliding_attention", "full_attention"],
                "whose layers have windows or states yet: use another draft model, remove",
            ),
        )
    ),
    changed(
        "a draft model with a quantised cache (--kv-cache-dtype fp8) yet: use --kv-cache-dtype",
        {"cache_config.cache_dtype": "fp8"},
        "wide",
        speculative_config=DRAFTS,
        block_size=32,
    ),
    *(
        changed(f"summaries of evicted tokens with {flag}", {field: number}, eviction=eviction)
        for field, number, flag in (
            (TENSOR, 2, "--tensor-parallel-size 2"),
            (PIPELINE, 3, "--pipeline-parallel-size 3"),
        )
        for eviction in (SUMMARIES, settings(methods={"x": {"summaries": "both"}}))
    ),
    changed(
        "summaries of evicted tokens in a quantised cache",
        {"cache_config.cache_dtype": "fp8"},
        "wide",
        eviction=SUMMARIES,
        block_size=32,
    ),
    *(
        changed(
            "reduce: max (or retentive_spread) of the method mine where heads of several ranks "
            f"share a token set (--tensor-parallel-size {ranks}) yet: use reduce: mean (or another",
            {TENSOR: ranks, EXECUTOR: "mp"},
            eviction=settings(methods={"mine": {**mix, "granularity": kind}, "other": {}}),
        )
        for kind, ranks in (("layer", 2), ("head", 4))
        for mix in (MAXIMA, {"base": "snapkv", "score": "retentive_spread"})
    ),
    changed(
        "a draft model and steps that are scheduled ahead yet: use --no-async-scheduling, remove "
        "--speculative-config",
        {"scheduler_config.async_scheduling": True},
        speculative_config=DRAFTS,
    ),
    on_gpu(
        "by ngram of a hybrid model (gated delta nets and full attention) on this platform yet: "
        "remove --speculative-config",
        model="hybrid",
        enable_prefix_caching=False,
        **DRAFTING,
    ),
    on_gpu(
        "by mtp yet: use one of the methods ngram, draft_model, eagle, eagle3 in",
        {"speculative_config.method": "mtp"},
        **DRAFTING,
    ),
    on_gpu(
        "--attention-config.backend_per_kind {'full_attention': 'FLASHINFER'} yet: remove it or "
        "use FLASH_ATTN, which is extended",
        **flash(backend_per_kind={"full_attention": "FLASHINFER"}),
    ),
    on_gpu(
        "decode_kernel: stock on FlashAttention 4 yet: use decode_kernel: auto, "
        "--attention-config.flash_attn_version 3 (on Hopper) or 2 (for models without learned "
        "sinks), or leave",
        {"additional_config": settings(decode_kernel="stock")},
        **flash(flash_attn_version=4),
    ),
    on_gpu(
        "summaries of evicted tokens on FlashAttention 4 yet: use a method without summaries, "
        "--attention-config.flash_attn_version 3 (on Hopper) or 2 (for models without learned "
        "sinks), or leave",
        {"additional_config": SUMMARIES},
        **flash(flash_attn_version=4),
    ),
    on_gpu("bidirectional attention over image tokens", model="prefix"),
    on_gpu(
        "NixlConnector (--kv-transfer-config) with kv_buffer_device cpu on this platform ... leave",
        kv_transfer_config={**CONNECTOR, "kv_connector": "NixlConnector"},
    ),
    on_gpu(
        "heads of 512 values in layers with full attention on this GPU ... use a Hopper GPU, serve "
        "a model with at most 256",
        {"model_config.model_arch_config.is_mm_prefix_lm": False},
        model="heads of 512",
    ),
    on_gpu(
        f"the debug option poison on this platform and {HYBRIDS['windows']} yet: remove",
        model="windows",
        eviction=settings(debug={"poison": True}),
    ),
    on_gpu(
        "a quantised cache (--kv-cache-dtype fp8_e5m2) yet: use ... auto or one of fp8, fp8_e4m3",
        model="wide",
        kv_cache_dtype="fp8_e5m2",
    ),
    on_gpu(
        "a quantised cache (--kv-cache-dtype fp8) of a model in float32 on this platform yet: use "
        "--kv-cache-dtype auto, --dtype bfloat16 or leave",
        {"model_config.dtype": torch.float32},
        model="wide",
        kv_cache_dtype="fp8",
    ),
    on_gpu(
        "summaries of evicted tokens with decode_kernel: triton yet: use the setting",
        {"additional_config": settings(policy="retentivekv", decode_kernel="triton")},
        **flash(),
    ),
]


@pytest.mark.parametrize(("model", "options", "fields", "platform", "said"), CHANGED)
def test_what_vllm_itself_refuses_elsewhere(
    folder: Folder, model: str, options: Any, fields: Any, platform: Platform, said: str
) -> None:
    if options.get("speculative_config") is DRAFTS:
        options = {**options, "speculative_config": {**DRAFTS, "model": folder(model)}}
    config = configure(folder(model), **options)
    for path, value in fields.items():
        *parts, field = path.split(".")
        setattr(reduce(getattr, parts, config), field, value)
    vars(config.model_config).pop("is_diffusion", None)  # known already
    assert_says(refusal_of(config, platform), f"--kv-eviction ... {said}")


def test_answers_over_a_window_behind_the_prompt_are_refused(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlimited-OCR's see the prompt and their own last tokens. Nor is another platform served."""
    config = configure(plain)
    sizes = config.model_config.model_arch_config
    config.model_config.model_arch_config = replace(sizes, rswa_window=128)
    assert "(R-SWA of 128 tokens)" in refusal_of(config)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(UnsupportedByEvictionError, match="use a CPU or CUDA build of vLLM"):
        configure(plain)


# -- what is not refused ---------------------------------------------------------------------


@pytest.mark.parametrize("model", HYBRIDS)
def test_models_of_several_kinds_of_layers_are_served(folder: Folder, model: str) -> None:
    config = configure(folder(model))
    assert config.cache_config.enable_prefix_caching
    if model == "hybrid":
        assert config.cache_config.mamba_cache_mode == "align"
        configure(folder(model), **DRAFTING)
        check_on_cuda(configure(folder(model), settings(debug={"poison": True})))
    check_on_cuda(config)
    configure(folder(model), **RANKS)


def test_what_a_gpu_serves(folder: Folder, plain: str) -> None:
    """Heads of 256 values, and summaries; a backend that is named for layers, and its version.

    Engines that share a mixture's experts.
    """
    mixture = configure(folder("mixture"))
    parallel = mixture.parallel_config
    parallel.data_parallel_size = parallel.data_parallel_size_local = 2
    for parallel.enable_expert_parallel in (False, True):
        check_on_cuda(mixture)
    config = configure(folder("heads of 256"))
    config.model_config.model_arch_config.is_mm_prefix_lm = False
    check_on_cuda(config)
    allowed = flash(backend_per_kind={"full_attention": "FLASH_ATTN"}, flash_attn_version=3)
    config = configure(plain, **allowed)
    config.model_config.enable_sleep_mode = True  # see engine/test_sleep.py
    check_vllm_config(config, platforms.CUDA)
    for eviction in (SUMMARIES, settings(methods={"x": {"summaries": "both"}})):
        check_vllm_config(configure(plain, eviction), platforms.CPU)
        config.additional_config = eviction
        check_vllm_config(config, platforms.CUDA)


@pytest.mark.parametrize("shape", [(2, 64, 2), (3, 64, 2), (2, 32, 2), (2, 64, 4)])
def test_head_scores_and_gates_of_another_shape_are_refused(
    plain: str, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    write_gates(tmp_path, "rg10", *shape)
    scores = save_scores(tmp_path, shape[0], shape[2])
    for eviction, said in (
        (settings(policy="dbtrimkv", gates=str(tmp_path)), "2 layers, 64 values and 2"),
        (settings(policy="sparsemm", head_scores=str(scores)), "2 layers of 2: make a file"),
    ):
        if shape == (2, 64, 2) or (shape[1] == 32 and "make" in said):
            configure(plain, eviction)
            continue
        with pytest.raises(EvictionConfigError, match=f"and this model has {said}"):
            configure(plain, eviction)


def test_a_window_that_hides_no_token_is_none(folder: Folder) -> None:
    """Nor does one that `--disable-sliding-window` removes, which bounds the context by it."""
    for model, context, options in (
        ("nominal window", 512, {}),
        ("window", 64, {"max_model_len": 64}),
        ("window", 64, {"disable_sliding_window": True}),
    ):
        vllm_config = configure(folder(model), **options)
        assert vllm_config.model_config.max_model_len == context
        assert vllm_config.model_config.get_sliding_window() is None
        assert vllm_config.cache_config.sliding_window is None
        stock = configure(folder(model), {}, **options)
        is_kept = "disable_sliding_window" not in options
        assert (stock.cache_config.sliding_window is not None) is is_kept, "stock is stock"


def test_maxima_over_rows_where_a_rank_has_whole_token_sets(
    plain: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has two KV heads. Gemma 4 has fewer in the layers that are evicted."""
    for kind, ranks in (("layer", 1), ("head", 2)):
        mixes = {"mine": {**MAXIMA, "granularity": kind}}
        config = configure(plain, settings(methods=mixes))
        config.parallel_config.tensor_parallel_size = ranks
        config.parallel_config.distributed_executor_backend = "mp"
        check_vllm_config(config, platforms.CPU)
    config = configure(folder("heads of 32"), tensor_parallel_size=2)
    assert config.model_config.get_total_num_kv_heads() == 2
    for rank in range(2):
        group = SimpleNamespace(world_size=2, rank_in_group=rank)
        monkeypatch.setattr("vllm.distributed.get_tp_group", lambda group=group: group)
        found = tensor_ranks(config)
        assert (found.num_parts, found.part, found.rank) == (1, 0, rank)


def test_several_nodes_and_ray_on_gpus_are_accepted(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the executor that is vLLM's default for Ray, whose workers run `WorkerProc`."""
    for options in (
        {"nnodes": 2, **RANKS},
        {"nnodes": 2, "node_rank": 1, **STAGES},
        {"nnodes": 2, **REPLICAS},
        {"nnodes": 2, **REPLICAS, **RANKS},
        {"data_parallel_size_local": 1, **REPLICAS},
    ):
        configure(plain, **options)
    config = configure(plain, **flash())
    config.additional_config = settings()
    config.parallel_config.distributed_executor_backend = "ray"
    check_on_cuda(config)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    said = refusal_of(config, platforms.CUDA)
    assert_says(said, "Ray's compiled graphs (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0) ... leave")
    replicas = configure(plain, **REPLICAS, **flash())
    replicas.additional_config = settings()
    replicas.parallel_config.data_parallel_backend = "ray"
    check_on_cuda(replicas)


def test_why_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs vLLM has no resource to ask Ray for; compiled graphs skip our worker."""
    assert current_platform.ray_device_key == ""
    source = Path(ray_utils.__file__).read_text()
    compiled = source[source.index("def execute_model_ray") :]
    assert "self.worker.model_runner.execute_model(" in compiled
    assert "if not ray_device_key:\n        raise ValueError(" in source
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", raising=False)
    assert envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND
    assert (
        "class RayWorkerProc(WorkerProc)"
        in Path(ray_utils.__file__).with_name("ray_executor_v2.py").read_text()
    )


def test_supported_models_get_the_plugins_classes(
    plain: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a model whose configuration has a window that it does not use, or `mlp` as a layer."""
    for options in (
        *({"model": folder(name)} for name in ("plain", "unused window", "cosmos", "mixture")),
        {"model": plain, "speculative_config": NGRAM},  # which vLLM never schedules ahead
        {"model": plain, "speculative_config": {**DRAFTS, "model": plain}},
        {"model": plain, "eviction": settings(decode={"max_tokens": 32}), "block_size": 32},
    ):
        config = configure(**options)
        assert config.scheduler_config.scheduler_cls == SCHEDULER_CLS
        assert config.parallel_config.worker_cls == platforms.CPU.worker_cls
        assert config.attention_config.backend.name == platforms.CPU.attention_backend
        assert not config.scheduler_config.async_scheduling  # vLLM's choice on CPU
    flash_on_cpu.schedule_ahead(monkeypatch)
    assert configure(plain).scheduler_config.scheduler_cls == ASYNC_SCHEDULER_CLS


def test_drafts_on_a_gpu(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By n-grams with both model runners; by a model with V1, and heads that any kernel reads."""
    by_ngrams = configure(plain, speculative_config=NGRAM)
    drafting = configure(plain, speculative_config={**DRAFTS, "model": plain})
    check_on_cuda(drafting)
    head_size = drafting.speculative_config.draft_model_config.get_head_size()
    for most, version, is_refused in (
        (head_size, 3, False),
        (head_size, 4, True),
        (head_size - 1, None, True),
        (head_size + 1, 4, False),
    ):
        monkeypatch.setattr(compatibility, "flash_version", lambda *_, v=version: (v, None))
        platform = replace(platforms.CUDA, most_head_size=most)
        refusals = compatibility._draft_refusals(drafting, platform)
        said = [what for refused, what, _ in refusals if refused]
        large = f"a draft model with heads of {head_size} values on this GPU"
        assert said == [large] * is_refused
    monkeypatch.undo()
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: True))
    check_on_cuda(by_ngrams)
    assert_says(
        refusal_of(drafting, platforms.CUDA),
        "--kv-eviction ... a draft model on vLLM's model runner V2 yet: set "
        "VLLM_USE_V2_MODEL_RUNNER=0, remove --speculative-config",
    )


@pytest.mark.parametrize("eviction", [{}, {CONFIG_KEY: {"policy": "none"}}])
def test_nothing_is_refused_without_eviction(folder: Folder, eviction: dict[str, Any]) -> None:
    for model in ("window", "plain"):
        config = configure(folder(model), eviction, kv_cache_dtype="fp8")
        assert config.scheduler_config.scheduler_cls is None
        assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


# -- layers, and what vLLM refuses -----------------------------------------------------------


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


FP8 = {"cache_dtype": "fp8"}
READS_NONE = (
    "a quantised cache (--kv-cache-dtype fp8) on this GPU, where ... reads none ... use ..."
)


@pytest.mark.parametrize(
    ("capability", "model", "options", "kernel"),
    [
        ((8, 0), "plain", {}, "stock"),
        ((9, 0), "plain", {}, "stock"),
        ((9, 0), "heads of 512", {}, "triton"),
        ((9, 0), "plain", {"flash_attn_version": 4}, "triton"),
        ((10, 0), "plain", {}, "triton"),
        ((10, 0), "plain", {"flash_attn_version": 2}, "stock"),
        ((10, 0), "heads of 256", {"block_size": 128}, "triton"),
        ((10, 0), "heads of 256", {}, "triton"),
        ((10, 0), "heads of 256", {"block_size": 32}, "blocks of 32 tokens ... --block-size 128,"),
        ((10, 0), "heads of 256", {"block_size": 32, "flash_attn_version": 2}, "stock"),
        ((10, 0), "heads of 512", {}, "heads of 512 values"),
        ((12, 0), "plain", {}, "stock"),
        ((12, 0), "heads of 512", {}, "heads of 512 values"),
        *(
            (where, "wide", FP8, kernel)
            for where, kernel in (((9, 0), "stock"), ((10, 0), "triton"))
        ),
        *((where, "wide", FP8, READS_NONE) for where in ((8, 9), (12, 0))),
        *(
            (where, "wide", {**FP8, "flash_attn_version": other}, READS_NONE)
            for where, other in (((9, 0), 4), ((10, 0), 2))
        ),
        ((9, 0), "wide: 256", FP8, "stock"),
        ((10, 0), "wide: 256", FP8, READS_NONE),
        ((9, 0), "wide: 512", FP8, "a quantised cache ... of heads of 512 values"),
    ],
)
def test_the_decode_kernel_follows_vllms_choice_of_flash_attention(
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    model: str,
    options: dict[str, Any],
    kernel: str,
) -> None:
    """By vLLM's own rules, on a GPU that is pretended: before loading and once a layer is built."""
    blocks = {"block_size": options["block_size"]} if "block_size" in options else {}
    config = configure(folder(model), **blocks)
    if "cache_dtype" in options:
        config.cache_config.cache_dtype = options["cache_dtype"]
        config.model_config.dtype = torch.bfloat16
    config.model_config.model_arch_config.is_mm_prefix_lm = False
    config.attention_config.backend = None
    config.attention_config.flash_attn_version = options.get("flash_attn_version")
    monkeypatch.setattr(
        type(current_platform),
        "get_device_capability",
        lambda *_, **__: DeviceCapability(*capability),
    )
    # As built for every GPU: 3 for Hopper, 4 for Hopper and Blackwell's servers.
    built = {2: range(8, 13), 3: (9,), 4: (9, 10, 11)}
    package, module = "vllm.vllm_flash_attn", ModuleType("flash_attn_interface")
    module.is_fa_version_supported = lambda version: capability[0] in built[version]
    module.fa_version_unsupported_reason = lambda version: "pretended"
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, f"{package}.flash_attn_interface", module)
    if kernel not in ("stock", "triton"):
        assert_says(refusal_of(config, platforms.CUDA), kernel)
        return
    check_vllm_config(config, platforms.CUDA)
    version, page_size = flash_version(config)
    impl = SimpleNamespace(vllm_flash_attn_version=version, fa4_hd256=page_size is not None)
    ours, size = config_of(config), blocks.get("block_size", page_size or 16)
    assert with_decode_kernel(ours, impl, size).decode_kernel == kernel
    # The process that checks settings may see no GPU: then the worker refuses.
    if version == 4:
        with pytest.raises(UnsupportedByEvictionError, match="stock on FlashAttention 4"):
            with_decode_kernel(replace(ours, decode_kernel="stock"), impl, size)
    if page_size is not None:
        with pytest.raises(UnsupportedByEvictionError, match=r"blocks of 256 .* --block-size 128"):
            with_decode_kernel(ours, impl, 2 * page_size)


@pytest.mark.parametrize("policy", ["retentivekv", "snapkv"])
def test_summaries_are_refused_in_layers_with_sinks(policy: str) -> None:
    """Which models without windows show only once they are built."""
    mixes = {"mine": {"base": "snapkv", "summaries": "all"}}
    for settings in ({"policy": policy}, {"policy": policy, "methods": mixes}):
        config = EvictionConfig.from_mapping(settings)
        if not config.summarises:
            check_sinks(config)
            continue
        way_out = rf"--kv-eviction {policy} .*sinks yet: use a method without summaries"
        with pytest.raises(UnsupportedByEvictionError, match=way_out):
            check_sinks(config)


def test_sinks_are_read_from_the_layers() -> None:
    """Layers without any get -inf; loading weights again changes them."""
    values = torch.randn(3, 6).bfloat16()
    impls = [SimpleNamespace(sinks=x, num_kv_heads=2) for x in (values[0], None, values[2])]
    read = sinks_of(impls)
    assert read is not None
    for _ in range(2):
        found = read(slice(0, 2))
        assert found.dtype == torch.float32
        assert found.is_contiguous()
        assert torch.equal(
            found, torch.stack((values[0].float(), torch.full((6,), -torch.inf))).view(2, 2, 3)
        )
        assert torch.equal(read(slice(2, 3)), values[2:].float().view(1, 2, 3))
        values.add_(1)
    assert sinks_of(impls[1:2]) is None


def test_what_vllm_refuses_itself(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once vLLM allows it; then the plugin's refusal must be tested here."""
    for part, options in (
        (r"[Aa]sync scheduling", {"speculative_config": NGRAM, "async_scheduling": True}),
        ("--decode-context-parallel-size 1", {**RANKS, "decode_context_parallel_size": 2}),
        ("prefill context parallel", {"prefill_context_parallel_size": 2}),
    ):
        with pytest.raises(ValueError, match=part):
            configure(plain, **options)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"[Mm]odel [Rr]unner V2"):
        configure(plain)
    # The plugin's own refusal, as in a build with Triton.
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    vllm_config = configure(plain)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: True))
    assert "set VLLM_USE_V2_MODEL_RUNNER=0" in refusal_of(vllm_config)


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
