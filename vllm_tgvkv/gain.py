# SPDX-License-Identifier: Apache-2.0
"""The gain of eviction with a model, computed from its configuration before any server starts.

Usage: python -m vllm_tgvkv.gain MODEL --prompt 8192 --budget 0.1

MODEL is a folder with a `config.json`, or a name as in `vllm serve`. vLLM builds the model without
weights and says what cache each of its layers has. So the figures also hold for models that
eviction does not serve yet: what it would reach, and what it would not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import EvictionConfigError

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

FULL_ATTENTION = "full attention"
DRAFTS = "draft model"

_LITTLE = 1.1
"""Times the requests below which eviction gains nothing to speak of."""

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model with the same kind of cache, taken together."""

    name: str
    num_layers: int
    bytes_per_token: int = 0
    """Of all layers; 0 for states."""
    window: int | None = None
    """Most tokens that a layer holds."""
    state_bytes: int = 0
    """Of all layers, for a request of any length."""
    times: int = 1
    """How many times as many tokens a block has as a block of other layers."""

    @property
    def is_evicted(self) -> bool:
        """Whether eviction can make it smaller."""
        return self.name == FULL_ATTENTION

    def num_bytes(self, num_tokens: int, block_size: int) -> int:
        """Return the memory of a request with `num_tokens` cached tokens, in whole blocks."""
        block_size *= self.times
        num_blocks = -(-num_tokens // block_size)
        if self.window is not None:  # the next token sees the last `window - 1` of these
            num_blocks -= max(num_tokens - self.window + 1, 0) // block_size
        return num_blocks * block_size * self.bytes_per_token + self.state_bytes


@dataclass(frozen=True)
class Gain:
    """Memory of one request that decodes, in bytes, with and without eviction.

    Windows and states are counted without the padding that vLLM may add to their pages.
    """

    before: int
    after: int
    peak: int
    """While its prompt is evicted: the whole prompt, and the blocks that are retained."""

    @property
    def ratio(self) -> float:
        """Requests that a pool holds with eviction for each one without."""
        return self.before / self.after

    @property
    def verdict(self) -> str:
        """The gain by memory alone, in words."""
        if self.ratio < _LITTLE:
            return "gains little here: requests keep nine tenths of their memory, or all."
        return (
            f"gains up to {self.ratio:.1f} times the requests at once, where memory is what limits "
            "them and not --max-num-seqs or computing; python -m vllm_tgvkv.fleet tells for a GPU."
        )


def gain(
    kinds: Sequence[LayerKind], num_prompt: int, num_answer: int, budget: Budget, block_size: int
) -> Gain:
    """Return the gain at the end of an answer.

    Args:
        num_prompt: tokens of the prompt, P.
        num_answer: tokens of the answer. They are kept, as is the prompt's partial last block.
        block_size: N, in tokens.
    """
    length, num_full = num_prompt + num_answer, num_prompt // block_size
    num_retained = budget.retained_blocks(num_prompt, block_size) if num_full else 0

    def total(num_tokens: int, more_blocks: int = 0) -> int:
        """Return the memory of these tokens, and of more blocks in the layers that are evicted."""
        evicted = (-(-num_tokens // block_size) + more_blocks) * block_size
        return sum(
            kind.num_bytes(evicted if kind.is_evicted else num_tokens, block_size) for kind in kinds
        )

    return Gain(
        before=total(length),
        after=total(length, num_retained - num_full),
        peak=total(num_prompt, num_retained),
    )


def layer_kinds(specs: Sequence[KVCacheSpec], vllm_config: VllmConfig) -> list[LayerKind]:
    """Return the kinds of layers that have these caches, those with most layers first."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from vllm_tgvkv.blocks.manager import EvictingSpec

    names: dict[type, str] = {
        MLAAttentionSpec: "latent attention",
        CrossAttentionSpec: "cross attention",
        FullAttentionSpec: FULL_ATTENTION,
        EvictingSpec: FULL_ATTENTION,
    }

    def kind_of(spec: KVCacheSpec, count: int) -> LayerKind:
        if isinstance(spec, MambaSpec):
            # With prefix caching a request holds two: the last one that is cached, and its own.
            state_bytes = count * spec.max_memory_usage_bytes(vllm_config)
            return LayerKind("state", count, state_bytes=state_bytes)
        name, window = names.get(type(spec), type(spec).__name__), None
        if isinstance(spec, SlidingWindowSpec):
            window = spec.sliding_window
            name = f"window of {window} tokens"
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            window = spec.attention_chunk_size
            name = f"chunks of {window} tokens"
        return LayerKind(name, count, count * spec.page_size_bytes // spec.block_size, window)

    return [kind_of(spec, count) for spec, count in Counter(specs).most_common()]


def draft_kind(model: ModelConfig, kinds: Sequence[LayerKind]) -> LayerKind:
    """Return the layers of a draft model, whose cache stays whole, next to a model's layers.

    They have blocks as large as the model's, so their bytes of a token are what these hold.

    Raises:
        EvictionConfigError: if they do not fit in blocks of the model's.
    """
    from vllm_tgvkv.blocks.states import draft_block_factor

    num_layers = model.get_total_num_hidden_layers()
    per_layer = 2 * model.get_total_num_kv_heads() * model.get_head_size() * model.dtype.itemsize
    evicted = [
        kind.bytes_per_token // kind.num_layers
        for kind in kinds
        if kind.is_evicted
        for _ in range(kind.num_layers)
    ]
    times = draft_block_factor([per_layer] * num_layers, evicted)
    return LayerKind(DRAFTS, num_layers, -(-sum(evicted) // times), times=times)


def cache_specs(vllm_config: VllmConfig) -> list[KVCacheSpec]:
    """Return the cache of every layer that has one; the model is built without weights."""
    build(vllm_config)
    return specs_of_layers(vllm_config)


def build(vllm_config: VllmConfig) -> nn.Module:
    """Return the model without weights, on torch's device `meta`."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with (
        _one_rank(vllm_config),
        set_default_torch_dtype(vllm_config.model_config.dtype),
        torch.device("meta"),
    ):
        return initialize_model(vllm_config)


def specs_of_layers(vllm_config: VllmConfig) -> list[KVCacheSpec]:
    """Return the cache of every layer that has one, of a model that was built."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    specs = []
    for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue  # it reads the cache of another layer
        spec = layer.get_kv_cache_spec(vllm_config)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(layer.get_attn_backend(), spec)
        if spec is not None:
            specs.append(spec)
    return specs


def block_size_with(
    vllm_config: VllmConfig, specs: Sequence[KVCacheSpec], least: int | None = None
) -> int:
    """Return the tokens of a block of a model that was built, N.

    Args:
        specs: the caches of its layers. Where some are states, vLLM makes blocks longer.
        least: `--block-size`, if it was given.
    """
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from vllm_tgvkv.blocks.states import packed_block_size

    if not any(isinstance(spec, MambaSpec) for spec in specs):
        return int(vllm_config.cache_config.block_size)
    current_platform.update_block_size_for_backend(vllm_config)
    size = int(vllm_config.cache_config.block_size)
    if least is None:
        return size
    named: dict[str, KVCacheSpec] = {
        str(n): replace(spec, block_size=size) if isinstance(spec, FullAttentionSpec) else spec
        for n, spec in enumerate(specs)
    }
    return packed_block_size(named, least) or size


@contextmanager
def _one_rank(vllm_config: VllmConfig) -> Iterator[None]:
    """Make the process groups of a single worker, which vLLM's layers ask for."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, Path(folder, "rendezvous").as_uri(), 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def report(
    kinds: Sequence[LayerKind], result: Gain, refusals: Sequence[str], options: argparse.Namespace
) -> Iterator[str]:
    """Yield the lines that tell a model's gain; `refusals` are why eviction does not serve it."""
    yield ""
    yield f"{'kind of layer':24}{'layers':>7}{'bytes per token':>18}{'fixed MiB':>12}  evicted"
    for kind in kinds:
        yield (
            f"{kind.name:24}{kind.num_layers:>7}{kind.bytes_per_token:>18,}"
            f"{kind.state_bytes / _MIB:>12.3f}  {'yes' if kind.is_evicted else 'no'}"
        )
    yield ""
    yield (
        f"A request of {options.prompt} + {options.answer} tokens: {result.before / _MIB:.1f} MiB "
        f"before, {result.after / _MIB:.1f} MiB after, {result.peak / _MIB:.1f} MiB while it is "
        "evicted."
    )
    pool = int(options.pool * _GIB)
    yield (
        f"Requests in a pool of {options.pool:g} GiB: {pool // result.before} before, "
        f"{pool // result.after} after, {result.ratio:.1f} times as many."
    )
    yield f"Eviction{', if it were served,' if refusals else ''} {result.verdict}"


def served(kinds: Sequence[LayerKind], refusals: Sequence[str], is_prefix_lm: bool) -> str:
    """Return whether `--kv-eviction` serves a model, and where or why not."""
    num_evicted = sum(kind.num_layers for kind in kinds if kind.is_evicted)
    if refusals:
        return (
            f"Not served by --kv-eviction yet: {'; '.join(refusals)}.\n"
            f"What eviction could reach: full attention, in {num_evicted} of its layers."
        )
    # Image tokens of a prefix LM should see those that follow them.
    on_cpu = is_prefix_lm or num_evicted < sum(kind.num_layers for kind in kinds)
    return f"Served by --kv-eviction{' on CPU' if on_cpu else ''}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what eviction gains with a model; returns the exit status."""
    options = _parser().parse_args(arguments)
    # Before vLLM is imported: its log would stand between the lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        budget = Budget.parse(options.budget, "--budget")
        built = options.model
        vllm_config = _configure(options)
        specs = cache_specs(vllm_config)
        kinds = layer_kinds(specs, vllm_config)
        built = options.draft or built
        draft = _draft_config(options) if options.draft else None
        if draft is not None:
            kinds.append(draft_kind(draft, kinds))
        block_size = block_size_with(vllm_config, specs, options.block_size)
    except EvictionConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:  # whatever vLLM raises for a model that it cannot build here
        print(cannot_build(built, error), file=sys.stderr)
        return 1
    from vllm.platforms import current_platform

    from vllm_tgvkv.engine.compatibility import refused_drafts, refused_properties

    model = vllm_config.model_config
    refusals = refused_properties(model)
    if draft is not None:
        refusals += refused_drafts(draft)
        if any(not kind.is_evicted and kind.name != DRAFTS for kind in kinds):
            refusals.append("drafts of a model whose layers have windows or states")
    result = gain(kinds, options.prompt, options.answer, budget, block_size)
    if options.json:
        layers = [asdict(kind) | {"is_evicted": kind.is_evicted} for kind in kinds]
        found = {"block_size": block_size, "refusals": refusals, "layers": layers}
        print(json.dumps(found | asdict(result) | {"ratio": result.ratio}))
        return 0
    here = ""
    if options.block_size is None and current_platform.is_cpu():
        here = " (as on this CPU; for a GPU give --block-size 16)"
    print(f"{model.architecture}, blocks of {block_size} tokens{here}, budget: {budget}.")
    print(served(kinds, refusals, model.is_mm_prefix_lm))
    print(*report(kinds, result, refusals, options), sep="\n")
    return 0


def cannot_build(model: str, error: Exception) -> str:
    """Return what to say when vLLM cannot build a model; a name needs the hub."""
    hint = ""
    if not os.path.exists(model):
        hint = (
            f"\nIf the hub cannot be reached from here, save the model's config.json (and "
            f"preprocessor_config.json) in a folder, and give the folder in place of {model}."
        )
    return f"vLLM cannot build {model} here: {error}{hint}"


def configure(model: str, **given: Any) -> VllmConfig:
    """Return the configuration of an engine of this model.

    Args:
        given: fields of vLLM's `EngineArgs`; None is vLLM's default.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from vllm_tgvkv.engine.compatibility import clear_nominal_window
    from vllm_tgvkv.shared.vllm_versions import block_size_before_loading

    given = {name: value for name, value in given.items() if value is not None}
    engine_args = EngineArgs(model=model, skip_tokenizer_init=True, **given)
    vllm_config = engine_args.create_engine_config()
    clear_nominal_window(vllm_config)
    cache = vllm_config.cache_config
    cache.block_size = block_size_before_loading(cache, current_platform.is_cpu())
    return vllm_config


def _configure(options: argparse.Namespace) -> VllmConfig:
    names = ("block_size", "max_model_len", "dtype", "enable_prefix_caching", "trust_remote_code")
    vllm_config = configure(options.model, **{name: getattr(options, name) for name in names})
    context = vllm_config.model_config.max_model_len
    if options.prompt + options.answer > context:
        raise EvictionConfigError(
            f"--prompt {options.prompt} and --answer {options.answer} do not fit the model's "
            f"context of {context} tokens: make them shorter or set --max-model-len"
        )
    return vllm_config


def _draft_config(options: argparse.Namespace) -> ModelConfig:
    from vllm.engine.arg_utils import EngineArgs

    given = {"trust_remote_code": options.trust_remote_code, "dtype": options.dtype or "auto"}
    arguments = EngineArgs(model=options.draft, runner="draft", skip_tokenizer_init=True, **given)
    return arguments.create_model_config()


def count(text: str) -> int:
    """Read a positive whole number of a command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_tgvkv.gain",
        description="What eviction gains with a model, computed from its configuration.",
    )
    add, as_in_serve = parser.add_argument, "as in vllm serve"
    add("model", help="a folder with a config.json, or a name as in vllm serve")
    add("--prompt", type=count, default=8192, help="tokens of a prompt")
    add("--answer", type=count, default=256, help="tokens of its answer")
    add("--budget", default="0.1", help="as --kv-eviction-budget")
    add("--pool", type=float, default=16.0, help="GiB of memory for caches")
    add("--draft", help="its draft model or EAGLE head, whose cache stays whole")
    add("--block-size", type=count, help=as_in_serve)
    add("--max-model-len", type=count, help=as_in_serve)
    add("--dtype", help=as_in_serve)
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help=f"{as_in_serve}; without it a request holds each state once",
    )
    add("--trust-remote-code", action="store_true", help=as_in_serve)
    add("--json", action="store_true", help="print numbers for other programs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
