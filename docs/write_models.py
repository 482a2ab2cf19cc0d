# SPDX-License-Identifier: Apache-2.0
"""Write `docs/models.md`: every multimodal architecture of the installed vLLM, served or refused.

And the table of gains in `docs/tuning.md`.

Usage: python -m docs.write_models

Each architecture is judged by the plugin's own checks, on the default configuration that
transformers or vLLM has for it; nothing is downloaded. Its layers are built without weights, to ask
them, too.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from typing import Any

# Before vLLM and huggingface_hub are imported.
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

from pydantic import ValidationError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto
from vllm import __version__
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS, ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from measure.folders import byte_tokenizer
from tests.models import FAMILIES
from vllm_tgvkv.blocks.manager import EvictingSpec, WindowSpec
from vllm_tgvkv.engine.compatibility import clear_nominal_window, refused_properties
from vllm_tgvkv.gain import FULL_ATTENTION, LayerKind, cache_specs, gain, layer_kinds
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError
from vllm_tgvkv.worker.base import evicting_backend
from vllm_tgvkv.worker.cpu import EvictionCPUWorker

PAGE = Path(__file__).with_name("models.md")

TUNING = Path(__file__).with_name("tuning.md")

PROMPTS, ANSWER, BLOCK_SIZE = (8192, 32_768), 256, 16
"""Lengths for which the gain is computed."""

DOWNLOADS = {
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.6-35B-A3B 14 M",
    "Qwen3_5ForConditionalGeneration": "Qwen3.8-27B 11 M, Qwen3.6-27B 11 M, Qwen3.5-9B 9 M",
    "Gemma4ForConditionalGeneration": (
        "Gemma-4-31B 9.6 M, 26B-A4B 8.5 M; E4B, E2B and 12B together 11 M"
    ),
    "Qwen3VLForConditionalGeneration": "Qwen3-VL-8B 5 to 9 M",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL 7 M",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL-2B 3.3 M",
    "DeepseekOCRForCausalLM": "DeepSeek-OCR 2.1 M",
    "KimiK25ForConditionalGeneration": "Kimi-K2.x 1 M",
}
"""Downloads a month in 2026, from snapshots of the models' pages."""

GAINS = {
    "Qwen3VLForConditionalGeneration": "Qwen3-VL, and all with full attention only",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5",
    "Gemma4ForConditionalGeneration": "Gemma 4",
    "Cohere2VisionForConditionalGeneration": "Command A Vision",
    "Gemma3ForConditionalGeneration": "Gemma 3",
}
"""Architectures whose gain is shown, by kinds of layers."""

BEGIN, END = "<!-- python -m docs.write_models -->\n", "<!-- end -->\n"
GAINS_TEXT = """\
| default configuration of | layers | 20 %, 8k | 20 %, 32k | 10 %, 8k | 10 %, 32k |
|---|---|---|---|---|---|
"""

_DEEPSEEK_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "vocab_size": 256,
}
_PLAIN_HEADS = {
    "kv_lora_rank": None,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
}
"""DeepSeek's language models with keys and values per head, in place of latent attention."""

_DEEPSEEK_OCR = {
    "model_type": "deepseek_vl_v2",
    "language_config": {**_DEEPSEEK_TEXT, **_PLAIN_HEADS},
    "projector_config": {"projector_type": "linear", "input_dim": 2048, "n_embed": 64},
    "tile_tag": "2D",
}

GIVEN: dict[str, dict[str, Any]] = {
    "DeepseekOCRForCausalLM": _DEEPSEEK_OCR,
    "DeepseekOCR2ForCausalLM": _DEEPSEEK_OCR,
    "UnlimitedOCRForCausalLM": {
        "model_type": "unlimited-ocr",
        "language_config": {**_DEEPSEEK_TEXT, **_PLAIN_HEADS},
    },
    "DeepseekVLV2ForCausalLM": {
        "model_type": "deepseek_vl_v2",
        "language_config": {**_DEEPSEEK_TEXT, "kv_lora_rank": 32, "q_lora_rank": None},
    },
}
"""Small configurations of the kind that published models have, where vLLM cannot read the default
one."""

TEXT = """\
# Models

`python -m docs.write_models` writes this page from the model registry of vLLM {version}, built for
CPU. It has {total} multimodal architectures:

| | architectures |
|---|---|
| [served](#served) | {served} |
| of these, with windows, states or image prefixes | {limited} |
| [served, by the configuration alone](#served-by-the-configuration-alone) | {unproven} |
| [refused](#refused) | {refused} |
| [unknown](#unknown) | {unknown} |

The plugin's own checks decide: on the architecture's default configuration (or a small one like
published models', `GIVEN` in the script), and then on its layers, which are built without weights.
A checkpoint may differ: [this command](tuning.md#what-a-model-gains) tells for any model. On CUDA,
where none has run yet, heads of more than 256 values in full attention and image tokens that see
each other are refused as well ([limits](compatibility.md#models-with-windows)).

[compatibility.md](compatibility.md#refused) gives the reason for each refusal. A *tiny model* has
random weights and runs in a real engine against an oracle and against stock vLLM; the others run
the same code and were not run. Downloads are per month, in 2026, for the most popular models only.

## Served

*Requests*: how many a pool holds with eviction for each one without, while they decode: prompts of
8,192 and of 32,768 tokens, answers of 256, a budget of 10 %, blocks of 16 tokens.

| architecture | inputs | layers | requests | tiny model | downloads a month |
|---|---|---|---|---|---|
{served_rows}

## Served, by the configuration alone

The checks find nothing in the default configuration, but vLLM cannot build the model from it here,
so its layers are checked at a server's start only.

| architecture | inputs |
|---|---|
{unproven_rows}

## Refused

| architecture | inputs | layers | why | downloads a month |
|---|---|---|---|---|
{refused_rows}

## Unknown

Neither transformers nor vLLM has a complete default configuration for these, so only a checkpoint
can tell.

| architecture |
|---|
{unknown_rows}
"""

_WINDOWS = "[limits](compatibility.md#models-with-windows)"
_NO_CONFIGURATION = "no configuration offline"
_MODEL_TYPES = {
    name: model_type
    for mapping in dir(modeling_auto)
    if mapping.endswith("_MAPPING_NAMES")
    for model_type, names in getattr(modeling_auto, mapping).items()
    for name in ([names] if isinstance(names, str) else names)
}
"""Types of configurations by the names of transformers' models."""


@dataclass
class Decision:
    """Whether eviction serves an architecture, and what is known about it."""

    architecture: str
    refusals: list[str] = field(default_factory=list)
    unknown: str = ""
    """Why it is not known whether it is served; empty if it is."""
    inputs: str = ""
    layers: str = ""
    """How many of each kind; empty if vLLM cannot build them here."""
    kinds: list[LayerKind] = field(default_factory=list)
    """The same, for their gain."""
    not_built: str = ""
    """Why it cannot."""

    @property
    def outcome(self) -> str:
        if self.unknown:
            return "unknown"
        if self.refusals:
            return "refused"
        return "unproven" if self.not_built else "served"


class _ConfigAsked(Exception):
    """Ends vLLM's processing information at the point where it asks for the configuration."""


class _Asking:
    """A processing context that only tells which class of configuration is asked for."""

    asked: type[PretrainedConfig] = PretrainedConfig

    def get_hf_config(self, kind: type[PretrainedConfig] = PretrainedConfig) -> Any:
        self.asked = kind
        raise _ConfigAsked


def default_config(architecture: str, model: Any) -> PretrainedConfig | None:
    """Return the default configuration of an architecture; None if there is none offline.

    It is transformers' for a model of that name, or of the class that vLLM's processor for the
    architecture demands, or of vLLM's own class that has the name of the model's module.
    """
    if architecture in _MODEL_TYPES:
        return CONFIG_MAPPING[_MODEL_TYPES[architecture]]()
    asking = _Asking()
    try:
        model._processor_factory.info(asking).get_hf_config()
    except (_ConfigAsked, AttributeError):
        if asking.asked.model_type:
            return asking.asked()
    module = _MULTIMODAL_MODELS[architecture][0].rpartition(".")[2]
    return _CONFIG_REGISTRY[module]() if module in _CONFIG_REGISTRY else None


def decide(architecture: str) -> Decision:
    """Return the decision on one architecture of vLLM's registry."""
    decision = Decision(architecture)
    try:
        model = ModelRegistry.models[architecture].load_model_cls()
    except ImportError:
        decision.unknown = "its module needs a package or a device that is not here"
        return decision
    ModelRegistry.register_model(architecture, model)  # else vLLM imports it in another process
    with tempfile.TemporaryDirectory() as folder:
        if not _write_config(architecture, model, Path(folder)):
            decision.unknown = _NO_CONFIGURATION
            return decision
        # Without prefix caching a request holds each state once; hybrids are served like that.
        engine_args = EngineArgs(
            model=folder,
            skip_tokenizer_init=architecture not in GIVEN,
            enable_prefix_caching=False,
        )
        try:
            model_config = engine_args.create_model_config()
        except Exception as error:  # whatever a model's own code raises
            decision.unknown = f"vLLM refuses its default configuration: {_first_line(error)}"
            return decision
        if not model_config.get_hidden_size():
            decision.unknown = "its default configuration has no sizes"
            return decision
        # Without the folder and the layers, which are those of a default configuration.
        refusals = refused_properties(model_config)
        decision.refusals = [re.sub(r" \([^()]*: [^()]*\)", "", what) for what in refusals]
        decision.inputs = _inputs(model_config)
        try:
            _ask_layers(decision, engine_args)
        except Exception as error:
            decision.not_built = _first_line(error)
    return decision


def _write_config(architecture: str, model: Any, folder: Path) -> bool:
    """Write an architecture's configuration into a folder; return whether there is one offline."""
    if architecture in GIVEN:
        fields = {**GIVEN[architecture], "architectures": [architecture], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(fields))
        # The model asks it for the number of its image token.
        special = ("<image>", "<eos>", "<pad>")
        tokenizer, _ = byte_tokenizer(special, eos="<eos>", pad="<pad>", max_length=2048)
        tokenizer.save_pretrained(folder)
        return True
    config = default_config(architecture, model)
    if config is None:
        return False
    config.architectures, config.dtype = [architecture], "bfloat16"
    vision = getattr(config, "sub_configs", {}).get("vision_config")
    if vision not in (None, AutoConfig) and getattr(config, "vision_config", 0) is None:
        config.vision_config = vision()  # without one it reads text only
    config.save_pretrained(folder)
    return True


def _first_line(error: Exception) -> str:
    """Return what an error says, without what pydantic writes around it."""
    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"].removeprefix("Value error, ").partition(". ")[0]
    text = str(error).strip() or f"{type(error).__name__} in {_place(error)}"
    return text.splitlines()[0].partition(". ")[0].replace("|", "or")


def _place(error: Exception) -> str:
    """Return the function that raised."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name


def _inputs(model: ModelConfig) -> str:
    """Return what the model takes; nothing if only its tokenizer knows."""
    try:
        limits = MULTIMODAL_REGISTRY.get_processing_info(model).get_supported_mm_limits()
    except ValueError:
        return ""
    order = ("image", "video", "audio", *sorted(limits))
    return ", ".join(sorted(limits, key=order.index))


def _ask_layers(decision: Decision, engine_args: EngineArgs) -> None:
    """Build the layers, with the evicting attention unless the model is already refused."""
    vllm_config = engine_args.create_engine_config()
    clear_nominal_window(vllm_config)
    if decision.refusals:
        kinds = layer_kinds(cache_specs(vllm_config), vllm_config)
        decision.layers = ", ".join(f"{kind.num_layers} {kind.name}" for kind in kinds)
        return
    try:
        with evicting_backend(
            EvictionCPUWorker.replaced_backend, EvictionCPUWorker.evicting_backend
        ):
            specs = cache_specs(vllm_config)
        decision.kinds = layer_kinds(specs, vllm_config)
    except UnsupportedByEvictionError as error:
        decision.refusals = [str(error)]
        return
    served = {spec.__name__ for spec in (EvictingSpec, MambaSpec, WindowSpec)}
    if others := {type(spec).__name__ for spec in specs} - served:
        decision.refusals = [f"layers with {', '.join(sorted(others))}"]
    num_states = sum(isinstance(spec, MambaSpec) for spec in specs)
    windows = [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)]
    decision.layers = f"{len(specs) - num_states - len(windows)} {FULL_ATTENTION}"
    if num_states:
        decision.layers += f", {num_states} state ([limits](compatibility.md#hybrid-models))"
    if windows:
        lengths = " or ".join(map(str, sorted(set(windows))))
        decision.layers += f", {len(windows)} window of {lengths} tokens ({_WINDOWS})"
    elif engine_args.create_model_config().is_mm_prefix_lm:
        decision.layers += f" ({_WINDOWS})"


def _gain(decision: Decision, budget: float, prompt: int) -> str:
    """Return how many requests a pool holds with eviction for each one without."""
    found = gain(decision.kinds, prompt, ANSWER, Budget(fraction=budget), BLOCK_SIZE)
    return f"{found.ratio:.1f}"


def decisions() -> list[Decision]:
    """Return a decision on each multimodal architecture of vLLM's registry, by name."""
    return [decide(architecture) for architecture in sorted(_MULTIMODAL_MODELS, key=str.lower)]


def with_gains(text: str, found: Sequence[Decision]) -> str:
    """Return the text of `docs/tuning.md` with a new table of gains."""
    by_name = {one.architecture: one for one in found}
    rows = []
    for name, known in GAINS.items():
        one = by_name[name]
        layers = ", ".join(f"{kind.num_layers} {kind.name}" for kind in one.kinds[::-1])
        cells = [_gain(one, budget, prompt) for budget in (0.2, 0.1) for prompt in PROMPTS]
        rows.append(f"| {known} | {layers} | {' | '.join(cells)} |")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{GAINS_TEXT}{chr(10).join(rows)}\n{END}{after}"


def page(found: Sequence[Decision]) -> str:
    """Return the text of `docs/models.md`."""
    rows: dict[str, list[str]] = {"served": [], "unproven": [], "refused": [], "unknown": []}
    for one in found:
        tiny = _MODEL_TYPES.get(one.architecture, "")
        known = {
            "served": [
                one.inputs,
                one.layers,
                " / ".join(_gain(one, 0.1, prompt) for prompt in PROMPTS) if one.kinds else "",
                f"`{tiny}`" if tiny in FAMILIES else "",
            ],
            "unproven": [one.inputs],
            "refused": [one.inputs, one.layers or "not built", "; ".join(one.refusals)],
            "unknown": [],
        }[one.outcome]
        cells = [f"`{one.architecture}`", *known]
        if one.outcome in ("served", "refused"):
            cells.append(DOWNLOADS.get(one.architecture, ""))
        rows[one.outcome].append(f"| {' | '.join(cells)} |")
    return TEXT.format(
        version=__version__.split("+")[0],
        total=len(found),
        limited=sum("(compatibility.md#" in one.layers for one in found if one.outcome == "served"),
        **{outcome: len(lines) for outcome, lines in rows.items()},
        **{f"{outcome}_rows": "\n".join(lines) for outcome, lines in rows.items()},
    )


if __name__ == "__main__":
    known = decisions()
    for one in known:
        if reason := one.unknown or one.not_built:
            print(f"{one.architecture}: {reason}")
    PAGE.write_text(page(known))
    TUNING.write_text(with_gains(TUNING.read_text(), known))
