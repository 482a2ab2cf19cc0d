# SPDX-License-Identifier: Apache-2.0
"""Features and models that eviction does not run with, refused before a model loads.

Each refusal names the flag or the property of the model, and the way out.
`docs/compatibility.md` gives the reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tgvkv.config.server import EvictionConfig, config_of
from vllm_tgvkv.engine.flash_versions import flash_version, reads_cache
from vllm_tgvkv.engine.platforms import CPU, Platform, eviction_platform
from vllm_tgvkv.shared.connector import CONNECTORS
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError
from vllm_tgvkv.shared.layer_types import (
    evicted_head_size,
    evicted_kv_heads,
    has_delta_nets,
    has_windows,
    other_layers,
    sliding_layers,
    text_ranges,
)
from vllm_tgvkv.shared.prompt import prunes_videos
from vllm_tgvkv.shared.vllm_versions import block_size_before_loading, ray_skips_worker

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_WAY_OUT = "or leave out --kv-eviction"

_PLAIN_CACHES = ("auto", "float16", "bfloat16")
"""Values of `--kv-cache-dtype` that quantise nothing."""


Refusal = tuple[object, str, str]
"""A condition to refuse, its name for the user, and the way out."""


def check_engine_args(engine_args: EngineArgs) -> Platform:
    """Refuse what must be known before vLLM builds its configuration.

    Returns:
        The platform that vLLM runs on.

    Raises:
        UnsupportedByEvictionError: with the first reason found.
    """
    platform = eviction_platform()
    if platform is None:
        from vllm.platforms import current_platform

        raise UnsupportedByEvictionError(
            f"--kv-eviction runs on vLLM's CPU and CUDA platforms, and this is "
            f"{current_platform.device_name or current_platform.device_type}: "
            f"use a CPU or CUDA build of vLLM {_WAY_OUT}"
        )
    for kind, given, allowed in (
        ("scheduler", engine_args.scheduler_cls, (None,)),
        ("worker", engine_args.worker_cls, ("auto", platform.worker_cls)),
    ):
        if given not in allowed:
            raise UnsupportedByEvictionError(
                f"--kv-eviction brings its own {kind} class: remove --{kind}-cls {given} {_WAY_OUT}"
            )
    return platform


def check_vllm_config(vllm_config: VllmConfig, platform: Platform) -> None:
    """Refuse every feature and kind of model that eviction does not support.

    Raises:
        UnsupportedByEvictionError: with the first reason found.
        EvictionConfigError: for head scores or gates of a model of another shape.
    """
    config, model = config_of(vllm_config), vllm_config.model_config
    for is_refused, what, way_out in (
        *_model_refusals(model),
        *_attention_refusals(vllm_config, config, platform),
        *_mixed_refusals(vllm_config, config, platform),
        *_cache_refusals(vllm_config, platform),
        *_summary_refusals(vllm_config, config),
        *_recall_refusals(vllm_config, config, platform),
        *_draft_refusals(vllm_config, platform),
        *_connector_refusals(vllm_config, config, platform),
        *_rank_refusals(vllm_config, config, platform),
        *_replica_refusals(vllm_config, platform),
        *_expert_refusals(vllm_config, platform),
        *_worker_refusals(vllm_config, config, platform),
    ):
        if is_refused:
            raise UnsupportedByEvictionError(
                f"--kv-eviction does not work with {what} yet: {way_out} {_WAY_OUT}"
            )
    layers, kv_heads = model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()
    if config.head_scores is not None:
        config.head_scores.check_model(layers, kv_heads)
    if config.gates is not None:
        config.gates.check_model(layers, model.get_hidden_size(), kv_heads)


def refused_properties(model: ModelConfig) -> list[str]:
    """Return everything for which a model is refused, as messages name it."""
    return [what for is_refused, what, _ in _model_refusals(model, "generate") if is_refused]


def refused_drafts(model: ModelConfig) -> list[str]:
    """Return the same for a draft model."""
    found = [
        f"with {what}" for is_refused, what, _ in _model_refusals(model, "draft") if is_refused
    ]
    if has_windows(model.hf_text_config) or has_delta_nets(model):
        found.append("whose layers have windows or states")
    return [f"a draft model {what}" for what in found]


def clear_nominal_window(vllm_config: VllmConfig) -> None:
    """Remove a sliding window that the context is not longer than: it hides no token.

    `--disable-sliding-window` does the same. vLLM would give its layers another kind of cache.
    """
    model = vllm_config.model_config
    window, text = model.get_sliding_window(), model.hf_text_config
    if getattr(text, "layer_types", None) is None and (window or 0) >= model.max_model_len:
        text.sliding_window = None
        vllm_config.cache_config.sliding_window = None


def _model_refusals(model: ModelConfig, runner: str = "generate") -> tuple[Refusal, ...]:
    """List what the model may not be or have; `runner` is vLLM's name for what it is used as."""
    other = "serve another model"
    text = model.hf_text_config
    states = (model.is_hybrid or model.has_inner_state) and not has_delta_nets(model)
    window, sliding = _window(model), sliding_layers(text)
    indexed = any(
        getattr(text, name, None) for name in ("sparse_attention_config", "index_n_heads")
    )
    others = ", ".join(other_layers(text))
    # Where heads have a part without positions, vLLM pads values to the size of keys.
    padded = getattr(text, "qk_nope_head_dim", None) is not None
    value_size = 0 if padded else getattr(text, "v_head_dim", None)
    return (
        (
            model.runner_type != runner,
            f"--runner {model.runner_type}",
            other,
        ),
        (model.use_mla, "multi-head latent attention (MLA)", other),
        (
            value_size and value_size != model.get_head_size(),
            f"values of another size than keys (v_head_dim {value_size})",
            other,
        ),
        (model.is_diffusion, "a model that writes by diffusion", other),
        (model.is_encoder_decoder, "cross attention (an encoder-decoder model)", other),
        (
            model.is_attention_free or states,
            "state-space models, and hybrids of other kinds than Qwen3-Next and Qwen3.5",
            other,
        ),
        (
            window is not None,
            f"sliding-window attention ({model.model}: {window} of at most "
            f"{model.max_model_len} tokens)",
            f"use --disable-sliding-window, which limits the context to the window, {other}",
        ),
        (
            sliding and "full_attention" not in text.layer_types,
            f"sliding-window attention in all layers ({model.model}: {text_ranges(sliding)})",
            other,
        ),
        (
            getattr(text, "attention_chunk_size", None) is not None,
            "chunked local attention",
            other,
        ),
        (
            model.rswa_window,
            f"attention of answers over a window behind the prompt (R-SWA of {model.rswa_window} "
            "tokens)",
            other,
        ),
        (indexed, "sparse attention (an indexer selects the keys)", other),
        (others, f"layers of kind {others}", other),
        (getattr(text, "attn_logit_softcapping", None), "soft-capped attention logits", other),
    )


def _attention_refusals(
    vllm_config: VllmConfig, config: EvictionConfig, platform: Platform
) -> tuple[Refusal, ...]:
    """List the kinds of attention that a platform's backend does not compute as needed."""
    model, most = vllm_config.model_config, platform.most_head_size
    head_size = 0 if most is None else evicted_head_size(model)
    is_large = most is not None and head_size > most
    is_flash_4 = is_large and flash_version(vllm_config)[0] == 4
    return (
        (
            # Elsewhere image rows see what follows them, and the statistics are causal.
            model.is_mm_prefix_lm and not platform.ignores_image_prefixes,
            "bidirectional attention over image tokens (prefix LM) on this platform",
            "serve another model",
        ),
        (
            # vLLM takes FlashAttention 4 for them on Hopper GPUs, and elsewhere other backends.
            is_large and not is_flash_4,
            f"heads of {head_size} values in layers with full attention on this GPU, where vLLM "
            "has no FlashAttention 4 for them",
            f"use a Hopper GPU, serve a model with at most {most}",
        ),
        (
            is_flash_4 and config.recall is not None,
            f"recall of heads of {head_size} values",
            f"leave out recall, serve a model with at most {most}",
        ),
    )


def _mixed_refusals(
    vllm_config: VllmConfig, config: EvictionConfig, platform: Platform
) -> tuple[Refusal, ...]:
    """List what an engine may not do if some of the model's layers are not evicted."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    text, stages = model.hf_text_config, vllm_config.parallel_config.pipeline_parallel_size
    is_hybrid = has_delta_nets(model)
    if is_hybrid:
        what = "a hybrid model (gated delta nets and full attention)"
    elif has_windows(text):
        layers = f"layers {text_ranges(sliding_layers(text))} of {len(text.layer_types)}"
        what = f"sliding-window attention in some layers ({model.model}: {layers})"
    else:
        return ()
    # A weight of 0 times NaN is NaN.
    poisoned = config.debug.poison and not is_hybrid and not platform.skips_hidden_keys
    one_kind = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    remove, other_method = "remove the flag", "use another method than sparsemm"
    return (
        (
            # Blocks whose cached state ends inside of them are copied at the next step.
            is_hybrid and cache.prefix_match_unit is not None,
            f"--prefix-match-unit {cache.prefix_match_unit} of {what}",
            remove,
        ),
        (poisoned, f"the debug option poison on this platform and {what}", "remove debug.poison"),
        (
            # On a stage, a block of windows or states may be larger than its full-attention pages.
            stages > 1,
            f"pipeline parallelism (--pipeline-parallel-size {stages}) of {what}",
            "use --pipeline-parallel-size 1",
        ),
        (
            vllm_config.speculative_config is not None and not is_hybrid,
            f"speculative decoding of {what}",
            "remove --speculative-config",
        ),
        (
            _cache_dtype(vllm_config) not in _PLAIN_CACHES,
            f"a quantised cache (--kv-cache-dtype {_cache_dtype(vllm_config)}) of {what}",
            f"use --kv-cache-dtype {_plain_cache(model)}",
        ),
        (
            one_kind,
            f"one kind of blocks for all layers (--disable-hybrid-kv-cache-manager) of {what}",
            remove,
        ),
        # Tokens of a prompt then skip the layers that read the cache of others.
        (cache.kv_sharing_fast_prefill, f"--kv-sharing-fast-prefill of {what}", remove),
        # The files count all layers of a model.
        (config.head_scores, f"head_scores of {what}", f"{other_method} and remove the setting"),
        (config.gates, f"gates (--kv-eviction-gates) of {what}", "remove --kv-eviction-gates"),
    )


def _cache_dtype(vllm_config: VllmConfig) -> str:
    """Return the cache's dtype, which may be a scheme of the checkpoint."""
    dtype: str = vllm_config.cache_config.cache_dtype
    # vLLM reads the scheme only when it builds the layers.
    has_scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    return "fp8" if dtype == "auto" and has_scheme else dtype


def _plain_cache(model: ModelConfig) -> str:
    """Return the value of `--kv-cache-dtype` for a cache in the model's dtype.

    `auto` would choose the quantised cache of a checkpoint again.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    return dtype if dtype in _PLAIN_CACHES else "auto"


def _cache_refusals(vllm_config: VllmConfig, platform: Platform) -> tuple[Refusal, ...]:
    """List what a quantised cache may not be; nothing for other caches."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    dtype, head_size = _cache_dtype(vllm_config), model.get_head_size()
    model_dtype = str(model.dtype).removeprefix("torch.")
    block_size = block_size_before_loading(cache, platform is CPU)
    if dtype in _PLAIN_CACHES:
        return ()
    what, known = f"a quantised cache (--kv-cache-dtype {dtype})", platform.quantised_caches
    skipped = " ".join(cache.kv_cache_dtype_skip_layers)
    plain, least = f"use --kv-cache-dtype {_plain_cache(model)}", platform.fp8_multiple
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None) or {}
    return (
        (dtype not in known, what, f"use --kv-cache-dtype auto or one of {', '.join(known)}"),
        (
            # FlashAttention 4 reads them on Hopper, in pages of 64 tokens and with other queries.
            platform.most_head_size is not None and head_size > platform.most_head_size,
            f"{what} of heads of {head_size} values",
            plain,
        ),
        (
            platform.has_flash_versions and not reads_cache(vllm_config, dtype),
            f"{what} on this GPU, where vLLM's FlashAttention reads none for this model",
            f"{plain}, a Hopper GPU without --attention-config.flash_attn_version",
        ),
        (
            platform.fp8_model_dtype not in (None, model_dtype),
            f"{what} of a model in {model_dtype} on this platform",
            f"{plain}, --dtype {platform.fp8_model_dtype}",
        ),
        (
            scheme.get("strategy") == "attn_head",
            f"{what} with a scale for each head",
            f"{plain}, serve a checkpoint with one scale for all heads of a layer",
        ),
        (
            skipped,
            f"{what} and layers that have another (--kv-cache-dtype-skip-layers {skipped})",
            "remove --kv-cache-dtype-skip-layers",
        ),
        (
            block_size % least,
            f"{what} in blocks of {block_size} tokens",
            f"use a --block-size that is a multiple of {least}",
        ),
        (
            head_size % least,
            f"{what} of heads of {head_size} values",
            f"{plain}, serve a model with a multiple of {least}",
        ),
    )


def _summary_refusals(vllm_config: VllmConfig, config: EvictionConfig) -> tuple[Refusal, ...]:
    """List what methods that keep summaries of evicted tokens do not run with."""
    if not config.summarises:
        return ()
    what, model = "summaries of evicted tokens", vllm_config.model_config
    way_out = "use a method without summaries and no mix with them,"
    of_kernel = "use the setting decode_kernel: auto, a method without summaries,"
    parallel = vllm_config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    is_mixed = has_windows(model.hf_text_config) or has_delta_nets(model)
    cases = (
        (_cache_dtype(vllm_config) not in _PLAIN_CACHES, "in a quantised cache"),
        (ranks > 1, f"with --tensor-parallel-size {ranks}"),
        (stages > 1, f"with --pipeline-parallel-size {stages}"),
        (vllm_config.speculative_config is not None, "with --speculative-config"),
        (is_mixed, "of models whose layers have windows or states"),
    )
    return (
        # This package's kernel does not return its softmax denominators.
        (config.decode_kernel == "triton", f"{what} with decode_kernel: triton", of_kernel),
        *((is_refused, f"{what} {where}", way_out) for is_refused, where in cases),
    )


def _recall_refusals(
    vllm_config: VllmConfig, config: EvictionConfig, platform: Platform
) -> tuple[Refusal, ...]:
    """List what recall does not run with."""
    recall, parallel = config.recall, vllm_config.parallel_config
    if recall is None:
        return ()
    ranks, heads = parallel.tensor_parallel_size, evicted_kv_heads(vllm_config.model_config)
    return (
        (
            recall.tier not in platform.recall_tiers,
            f"recall.tier {recall.tier} on this platform",
            f"use recall.tier: {' or '.join(platform.recall_tiers)}, leave out recall,",
        ),
        (
            _cache_dtype(vllm_config) not in _PLAIN_CACHES,
            f"recall in a quantised cache (--kv-cache-dtype {_cache_dtype(vllm_config)})",
            "use --kv-cache-dtype bfloat16, leave out recall,",
        ),
        (
            ranks > heads,
            f"recall where {ranks} ranks share {heads} KV heads",
            f"use --tensor-parallel-size {heads} or less, leave out recall,",
        ),
    )


def _connector_refusals(
    vllm_config: VllmConfig, config: EvictionConfig, platform: Platform
) -> tuple[Refusal, ...]:
    """List what KV connectors do not run with."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None:
        return ()
    model, name = vllm_config.model_config, transfer.kv_connector
    what = f"the KV connector {name} (--kv-transfer-config)"
    remove, stages = "remove --kv-transfer-config", parallel.pipeline_parallel_size
    is_mixed = has_windows(model.hf_text_config) or has_delta_nets(model)
    cases = (
        (transfer.kv_connector_module_path, f"from {transfer.kv_connector_module_path}"),
        (stages > 1, f"and --pipeline-parallel-size {stages}"),
        (vllm_config.speculative_config is not None, "and --speculative-config"),
        (is_mixed, "and models whose layers have windows or states"),
        (config.summarises, "and summaries of evicted tokens"),
        (config.gates, "and gates (--kv-eviction-gates)"),
        (config.carries_scores, "and methods that add up attention over cuts (h2o_accumulated)"),
    )
    return (
        (
            # Stores copy blocks after their step, and each learns in its own way of reused ones.
            name not in CONNECTORS,
            what,
            f"use one of {', '.join(CONNECTORS)}",
        ),
        (
            # vLLM copies the blocks of a step's tokens there, and none of a region.
            transfer.kv_buffer_device == "cpu" and not platform.cache_is_on_host,
            f"{what} with kv_buffer_device cpu on this platform",
            "leave kv_buffer_device out",
        ),
        (
            # Connectors register the memory that a sleeping engine gives back.
            model.enable_sleep_mode,
            f"{what} and sleep mode (--enable-sleep-mode)",
            "remove one of both flags",
        ),
        *((is_refused, f"{what} {where}", remove) for is_refused, where in cases),
    )


def _draft_refusals(vllm_config: VllmConfig, platform: Platform) -> tuple[Refusal, ...]:
    """List what speculative decoding may not be; nothing without it."""
    speculative = vllm_config.speculative_config
    method = "" if speculative is None else str(speculative.method)
    if speculative is None or not method:
        return ()
    stages = vllm_config.parallel_config.pipeline_parallel_size
    drafts, remove = f"speculative decoding by {method}", "remove --speculative-config"
    is_hybrid = has_delta_nets(vllm_config.model_config)
    kind = speculative.draft_model_config.hf_config.model_type if method == "mtp" else ""
    return (
        (
            method not in platform.drafts,
            drafts,
            f"use one of the methods {', '.join(platform.drafts)} in --speculative-config, remove "
            "the flag",
        ),
        (
            is_hybrid and not platform.hybrid_drafts,
            f"{drafts} of a hybrid model (gated delta nets and full attention) on this platform",
            remove,
        ),
        (
            is_hybrid and method not in platform.hybrid_drafts,
            f"{drafts} of a hybrid model (gated delta nets and full attention)",
            f"use one of the methods {', '.join(platform.hybrid_drafts)} in --speculative-config, "
            "remove the flag",
        ),
        (
            kind not in ("", "qwen3_5_mtp"),
            f"{drafts} of other models than Qwen3.5",
            remove,
        ),
        (
            stages > 1,
            f"{drafts} in pipeline stages (--pipeline-parallel-size {stages})",
            f"{remove} or use --pipeline-parallel-size 1",
        ),
        (
            speculative.uses_dynamic_speculative_decoding(),
            f"{drafts} with another number of drafts for each batch size",
            "leave num_speculative_tokens_per_batch_size out of --speculative-config",
        ),
        *_draft_model_refusals(vllm_config, platform),
    )


def _draft_model_refusals(vllm_config: VllmConfig, platform: Platform) -> tuple[Refusal, ...]:
    """List what a draft model may not be or have; nothing for drafts without a model."""
    from vllm.config import VllmConfig as Config

    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return ()
    model, dtype = speculative.draft_model_config, _cache_dtype(vllm_config)
    backend, kind = speculative.attention_backend, speculative.kv_cache_dtype
    other = f"use another draft model, {(remove := 'remove --speculative-config')}"
    head_size, most = model.get_head_size(), platform.most_head_size
    is_large = (
        most is not None
        and head_size >= most
        and (head_size > most or flash_version(vllm_config)[0] == 4)
    )
    sees_images = vllm_config.model_config.is_multimodal_model and model.is_multimodal_model
    quantisation = Config.get_quantization_config(model, vllm_config.load_config)
    return (
        *((True, what, other) for what in refused_drafts(model)),
        # FlashAttention 4 reads pages of one size in such heads, and a draft model's are larger.
        (is_large, f"a draft model with heads of {head_size} values on this GPU", other),
        (
            # It captures the drafting as graphs of metadata that it updates in place.
            vllm_config.use_v2_model_runner,
            "a draft model on vLLM's model runner V2",
            f"set VLLM_USE_V2_MODEL_RUNNER=0, {remove}",
        ),
        (
            # A cut has to know which drafts were right.
            vllm_config.scheduler_config.async_scheduling,
            "a draft model and steps that are scheduled ahead",
            f"use --no-async-scheduling, {remove}",
        ),
        (
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
            "one kind of blocks for all layers (--disable-hybrid-kv-cache-manager) and a draft "
            "model, whose layers have blocks of their own,",
            f"remove the flag, {remove}",
        ),
        (
            # The first image ends the engine.
            speculative.uses_draft_model() and sees_images,
            "a draft model that sees images, with which vLLM itself does not work,",
            f"use a language model as the draft model, {remove}",
        ),
        (
            speculative.parallel_drafting,
            "drafts that a model makes in parallel",
            "leave parallel_drafting out of --speculative-config",
        ),
        (
            backend is not None and backend.name != platform.attention_backend,
            f"a draft model with another attention backend ({backend and backend.name})",
            "leave attention_backend out of --speculative-config",
        ),
        (
            kind not in (None, vllm_config.cache_config.cache_dtype),
            f"a draft model with another kind of cache ({kind})",
            "leave kv_cache_dtype out of --speculative-config",
        ),
        (
            # vLLM would read it where it builds the draft model, after the model itself.
            dtype == "auto" and getattr(quantisation, "kv_cache_scheme", None),
            "a draft model whose checkpoint asks for a quantised cache",
            f"use --kv-cache-dtype {_plain_cache(vllm_config.model_config)}, {remove}",
        ),
        (
            dtype not in _PLAIN_CACHES,
            f"a draft model with a quantised cache (--kv-cache-dtype {dtype})",
            f"use --kv-cache-dtype {_plain_cache(vllm_config.model_config)}, {remove}",
        ),
    )


def _rank_refusals(
    vllm_config: VllmConfig, config: EvictionConfig, platform: Platform
) -> tuple[Refusal, ...]:
    """List how the workers of one engine may not share a model."""
    parallel = vllm_config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    several = "tensor parallelism" if ranks > 1 else "pipeline parallelism" if stages > 1 else ""
    shared_maxima = ", ".join(_methods_with_shared_maxima(config, vllm_config.model_config, ranks))
    contexts = {
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    return (
        (
            shared_maxima,
            f"reduce: max (or retentive_spread) of the method {shared_maxima} where "
            f"heads of several ranks share a token set (--tensor-parallel-size {ranks})",
            "use reduce: mean (or another score), or granularity: head and at most one rank per "
            "KV head",
        ),
        *_executor_refusals(parallel, several, platform),
        *(
            (number > 1, f"context parallelism ({flag} {number})", f"use {flag} 1")
            for flag, number in contexts.items()
        ),
    )


def _executor_refusals(
    parallel: ParallelConfig, several: str, platform: Platform
) -> tuple[Refusal, ...]:
    """List what may not start the workers; `several` says how they share a model, if they do."""
    executor = parallel.distributed_executor_backend
    is_ray, use_mp = executor == "ray", "use --distributed-executor-backend mp"
    known = (None, "mp", "ray") if several else (None, "mp", "ray", "uni", "external_launcher")
    return (
        (
            is_ray and not platform.supports_ray,
            "--distributed-executor-backend ray, which vLLM itself does not run on CPUs",
            use_mp,
        ),
        (
            # Its workers call the model runner, and not our worker, which reads the plan.
            is_ray and ray_skips_worker(),
            "Ray's compiled graphs (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0)",
            f"leave the variable out, {use_mp}",
        ),
        (
            # Another class may call the model runner as well.
            executor not in known,
            f"{several and f'{several} and '}--distributed-executor-backend {executor}",
            use_mp,
        ),
    )


def _replica_refusals(vllm_config: VllmConfig, platform: Platform) -> tuple[Refusal, ...]:
    """List how several engines may not serve a model; nothing for one engine."""
    parallel = vllm_config.parallel_config
    replicas, backend = parallel.data_parallel_size, parallel.data_parallel_backend
    if replicas == 1:
        return ()
    return (
        (
            backend != "mp" and not platform.supports_ray,
            f"--data-parallel-backend {backend}, which vLLM itself does not run on CPUs",
            "use --data-parallel-backend mp",
        ),
        (
            # Workers of all replicas would meet at one port, with the same ranks.
            not vllm_config.model_config.is_moe and parallel.nnodes_within_dp > 1,
            f"replicas of several nodes each (--nnodes {parallel.nnodes} for --data-parallel-size "
            f"{replicas}), which vLLM itself gives one --master-port",
            "start a server for each replica, with a --master-port of its own,",
        ),
    )


def _expert_refusals(vllm_config: VllmConfig, platform: Platform) -> tuple[Refusal, ...]:
    """List how workers may not share the experts of a mixture; nothing for other models."""
    if not vllm_config.model_config.is_moe:
        return ()
    parallel = vllm_config.parallel_config
    replicas = parallel.data_parallel_size
    num_workers = replicas * parallel.tensor_parallel_size
    whole = num_workers > 1 and parallel.enable_expert_parallel
    return (
        (
            replicas > 1 and not platform.shares_experts,
            f"data parallelism of a mixture of experts (--data-parallel-size {replicas}) on this "
            "platform, where vLLM cannot send tokens to the experts of other engines",
            "use --data-parallel-size 1 and one server per replica",
        ),
        (
            whole and not platform.shares_experts,
            f"expert parallelism (--enable-expert-parallel, {num_workers} workers) on this "
            "platform, where vLLM's kernels need all experts of a layer",
            "remove --enable-expert-parallel",
        ),
        (
            parallel.enable_elastic_ep,
            "numbers of engines that change (--enable-elastic-ep)",
            "remove --enable-elastic-ep",
        ),
    )


def _worker_refusals(
    vllm_config: VllmConfig, config: EvictionConfig, platform: Platform
) -> tuple[Refusal, ...]:
    """List what a worker and its backend may not do."""
    attention = vllm_config.attention_config
    ours = platform.attention_backend
    backend = attention.backend.name if attention.backend else ours
    chosen = {kind: found.name for kind, found in attention.backend_per_kind.items()}
    others = {kind: name for kind, name in chosen.items() if name != ours}
    least = config.missed_ceiling(
        block_size_before_loading(vllm_config.cache_config, platform is CPU)
    )
    return (
        (
            least,
            f"decode.max_tokens: {config.decode and config.decode.max_tokens}, which is less than "
            f"floor_pages ({config.floor_pages}) and one block",
            f"give at least {least} tokens",
        ),
        (backend != ours, f"--attention-backend {backend}", f"use {ours}, which is extended"),
        (
            others,
            f"--attention-config.backend_per_kind {others}",
            f"remove it or use {ours}, which is extended",
        ),
        (
            config.decode_kernel not in platform.decode_kernels,
            f"decode_kernel: {config.decode_kernel} on this platform",
            f"use one of: {', '.join(platform.decode_kernels)}",
        ),
        *_flash_refusals(vllm_config, config, platform),
        (
            vllm_config.parallel_config.use_ubatching,
            "microbatches (--enable-dbo, --ubatch-size)",
            "remove these flags",
        ),
        (
            vllm_config.use_v2_model_runner and not platform.supports_model_runner_v2,
            "vLLM's model runner V2 on CPU",
            "set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            prunes_videos(vllm_config.model_config) and not platform.prunes_videos,
            "pruned videos (--video-pruning-rate) on this platform, where vLLM prunes none",
            "remove the flag",
        ),
    )


def _flash_refusals(
    vllm_config: VllmConfig, config: EvictionConfig, platform: Platform
) -> tuple[Refusal, ...]:
    """List what vLLM's FlashAttention does not run with, where a GPU can be asked."""
    if not platform.has_flash_versions:
        return ()
    from vllm_tgvkv.worker.decode_kernel import refused_with  # `vllm serve --help` needs no worker

    version, page_size = flash_version(vllm_config)
    cache = vllm_config.cache_config
    # Without the flag, vLLM chooses blocks that the kernel reads.
    size = cache.block_size if cache.user_specified_block_size else page_size
    refused = refused_with(config, version, page_size, size or cache.block_size)
    return () if refused is None else ((True, *refused),)


def _methods_with_shared_maxima(
    config: EvictionConfig, model: ModelConfig, ranks: int
) -> list[str]:
    """Return the mixes that take maxima over rows of a mean over heads of several ranks.

    A rank knows the maxima of its own heads' mean, and the mean of maxima is not theirs.
    """
    if ranks == 1:
        return []
    heads_are_shared = ranks > evicted_kv_heads(model)
    policies = (config.build_policy(name) for name in config.methods)
    return [
        policy.name
        for policy in policies
        if "column_maxima" in policy.statistics(policy.score.rows)
        and (heads_are_shared or policy.granularity == "layer")
    ]


def _window(model: ModelConfig) -> int | None:
    """Return the window of all layers, in tokens; None if none is shorter than the context.

    Models that list the kinds of their layers may have a window in some of them only, see
    `sliding_layers`.
    """
    text = model.hf_text_config
    if getattr(text, "layer_types", None) is not None:
        return None
    window = model.get_sliding_window()
    if not window or not getattr(text, "use_sliding_window", True):
        return None
    return window if window < model.max_model_len else None
