# SPDX-License-Identifier: Apache-2.0
"""Write the tables of `docs/models.md`: every multimodal architecture of the installed vLLM.

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
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

# Before vLLM and huggingface_hub are imported.
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto
from vllm import __version__
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS, ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from docs.architectures import ADDED, PUBLISHED, register
from docs.write_settings import filled
from measure.folders import byte_tokenizer
from tests.models import FAMILIES
from vllm_tgvkv.blocks.manager import EvictingSpec, WindowSpec
from vllm_tgvkv.engine.compatibility import clear_nominal_window, refused_properties
from vllm_tgvkv.gain import FULL_ATTENTION, LayerKind, cache_specs, gain, layer_kinds
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError
from vllm_tgvkv.worker.base import evicting_backend
from vllm_tgvkv.worker.cpu import EvictionCPUWorker

PAGES = tuple(Path(__file__).with_name(name) for name in ("models.md", "tuning.md"))
PROMPTS, ANSWER, BLOCK_SIZE = (8192, 32_768), 256, 16
"""Lengths for which the gain is computed."""
GAINS = {
    "Qwen3VLForConditionalGeneration": "Qwen3-VL, and all with full attention only",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5",
    "Gemma4ForConditionalGeneration": "Gemma 4",
    "Cohere2VisionForConditionalGeneration": "Command A Vision",
    "Gemma3ForConditionalGeneration": "Gemma 3",
}
"""Architectures whose gain is shown, by kinds of layers."""

_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor"}
"""Some models make their processor to count tokens."""

OUTCOMES = ("served", UNPROVEN := "served, by the configuration alone", "refused", "unknown")
"""And the headings of their tables. The second: vLLM cannot build the layers here."""

_WINDOWS = "[limits](compatibility.md#models-with-windows)"
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

    outcome: str
    """One of `OUTCOMES`."""
    reason: str = ""
    """Why it is refused, or not known."""
    inputs: str = ""
    layers: str = "not built"
    """How many of each kind."""
    kinds: tuple[LayerKind, ...] = ()
    """The same, for their gain."""

    def gain(self, budget: float, prompt: int) -> str:
        """Return how many requests a pool holds with eviction for each one without."""
        found = gain(self.kinds, prompt, ANSWER, Budget(fraction=budget), BLOCK_SIZE)
        return f"{found.ratio:.1f}"

    def cells(self, architecture: str) -> list[str]:
        """Return its cells in the table of its outcome, without the architecture's name."""
        if self.outcome == "refused":
            return [self.inputs, self.layers, self.reason]
        if self.outcome == "served":
            tiny = _MODEL_TYPES.get(architecture, "")
            gains = " / ".join(self.gain(0.1, prompt) for prompt in PROMPTS)
            return [self.inputs, self.layers, gains, f"`{tiny}`" if tiny in FAMILIES else ""]
        return [self.inputs if self.outcome == UNPROVEN else self.reason]


def default_config(architecture: str, model: Any) -> PretrainedConfig | None:
    """Return the default configuration of an architecture; None if there is none offline.

    It is transformers' for a model of that name, or of the class that vLLM's processor for the
    architecture demands, or of vLLM's own class that has the name of the model's module.
    """
    if architecture in _MODEL_TYPES:
        return CONFIG_MAPPING[_MODEL_TYPES[architecture]]()
    context = Mock(spec_set=["get_hf_config"])  # only tells which class is asked for
    context.get_hf_config.side_effect = AttributeError
    try:
        model._processor_factory.info(context).get_hf_config()
    except AttributeError:
        asked = context.get_hf_config.call_args
        if asked and asked.args and asked.args[0].model_type:
            return asked.args[0]()
    module = _MULTIMODAL_MODELS[architecture][0].rpartition(".")[2]
    return _CONFIG_REGISTRY[module]() if module in _CONFIG_REGISTRY else None


def write_config(architecture: str, model: Any, folder: Path) -> bool:
    """Write an architecture's configuration into a folder; return whether there is one offline."""
    if architecture in PUBLISHED:
        fields = {**register(architecture), "architectures": [architecture], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(fields))
        # The model asks it for the number of its image token.
        special = ("<image>", "<eos>", "<pad>")
        tokenizer, _ = byte_tokenizer(special, eos="<eos>", pad="<pad>", max_length=2048)
        tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGES))
        return True
    config = default_config(architecture, model)
    if config is None:
        return False
    config.architectures, config.dtype = [architecture], "bfloat16"
    vision = getattr(config, "sub_configs", {}).get("vision_config")
    if vision not in (None, AutoConfig) and getattr(config, "vision_config", 0) is None:
        config.vision_config = vision()  # without one it reads text only
    for part, fields in ADDED.get(architecture, {}).items():
        for name, value in fields.items():
            setattr(getattr(config, part), name, value)
    config.save_pretrained(folder)
    return True


def decide(architecture: str, folder: Path) -> Decision:
    """Return the decision on one architecture of vLLM's registry, with an empty folder for it."""
    try:
        model = ModelRegistry.models[architecture].load_model_cls()
    except ImportError as error:
        said = str(error).split(" (")[0]  # without a path
        return Decision("unknown", f"its code cannot be imported here: {said}")
    ModelRegistry.register_model(architecture, model)  # else vLLM imports it in another process
    if not write_config(architecture, model, folder):
        return Decision("unknown", "no configuration offline")
    # Without prefix caching a request holds each state once; hybrids are served like that.
    has_tokenizer = set(PUBLISHED) - {"MoonshotKimiaForCausalLM"}  # which has a kind of its own
    options = {
        "skip_tokenizer_init": architecture not in has_tokenizer,
        "enable_prefix_caching": False,
    }
    engine_args = EngineArgs(str(folder), **options)
    try:
        model_config = engine_args.create_model_config()
    except Exception as error:  # whatever a model's own code raises
        if "does not support `--runner generate`" in str(error):
            return Decision("unknown", "vLLM's build for CPU has no code of it")
        return Decision("unknown", f"vLLM refuses its configuration: {error}")
    if not model_config.get_hidden_size():
        return Decision("unknown", "its default configuration has no sizes")
    # Without the folder and the layers, which belong to a default configuration.
    why = re.sub(r" \([^()]*: [^()]*\)", "", "; ".join(refused_properties(model_config)))
    decision = Decision("refused" if why else UNPROVEN, why, inputs_of(model_config))
    try:
        return asked_layers(decision, engine_args)
    except Exception as error:
        return replace(decision, reason=decision.reason or repr(error))


def inputs_of(model: ModelConfig) -> str:
    """Return what the model takes; nothing if only its tokenizer knows."""
    try:
        limits = MULTIMODAL_REGISTRY.get_processing_info(model).get_supported_mm_limits()
    except ValueError:
        return ""
    order = ("image", "video", "audio", *sorted(limits))
    return ", ".join(sorted(limits, key=order.index))


def asked_layers(decision: Decision, engine_args: EngineArgs) -> Decision:
    """Build the layers, with the evicting attention unless the model is already refused."""
    vllm_config = engine_args.create_engine_config()
    clear_nominal_window(vllm_config)
    if decision.reason:
        kinds = layer_kinds(cache_specs(vllm_config), vllm_config)
        layers = ", ".join(f"{kind.num_layers} {kind.name}" for kind in kinds)
        return replace(decision, layers=layers)
    worker = EvictionCPUWorker
    try:
        with evicting_backend(worker.replaced_backend, worker.evicting_backend):
            specs = cache_specs(vllm_config)
    except UnsupportedByEvictionError as error:
        return replace(decision, outcome="refused", reason=str(error))
    num_states = sum(isinstance(spec, MambaSpec) for spec in specs)
    windows = [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)]
    layers = f"{len(specs) - num_states - len(windows)} {FULL_ATTENTION}"
    if num_states:
        layers += f", {num_states} state ([limits](compatibility.md#hybrid-models))"
    if windows:
        lengths = " or ".join(map(str, sorted(set(windows))))
        layers += f", {len(windows)} window of {lengths} tokens ({_WINDOWS})"
    elif engine_args.create_model_config().is_mm_prefix_lm:
        layers += f" ({_WINDOWS})"
    kinds = tuple(layer_kinds(specs, vllm_config))
    others = {type(spec) for spec in specs} - {EvictingSpec, MambaSpec, WindowSpec}
    reason = f"layers with {', '.join(sorted(o.__name__ for o in others))}" if others else ""
    outcome = "refused" if others else "served"
    return replace(decision, outcome=outcome, reason=reason, layers=layers, kinds=kinds)


def grouped(rows: dict[str, list[list[str]]]) -> dict[str, list[list[str]]]:
    """Return the rows of served architectures, where those that differ in inputs alone share one.

    These have full attention only and no tiny model, or their layers are not known.
    """
    alike = [
        row for row in rows["served"] if re.fullmatch(rf"\d+ {FULL_ATTENTION}", row[2] + row[4])
    ]
    found = {"served": [row for row in rows["served"] if row not in alike]}
    for name, of in (("full attention", alike), (UNPROVEN, rows[UNPROVEN])):
        by_inputs: dict[str, list[str]] = {}
        for architecture, inputs, *_ in of:
            by_inputs.setdefault(inputs, []).append(architecture)
        found[name] = [[inputs, ", ".join(names)] for inputs, names in sorted(by_inputs.items())]
    return found


def tables() -> dict[str, str]:
    """Judge every multimodal architecture of vLLM's registry; return the tables by their marks."""
    found, rows = {}, {name: [] for name in OUTCOMES}
    for name in sorted(_MULTIMODAL_MODELS, key=str.lower):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = one = decide(name, Path(folder))
        rows[one.outcome].append([f"`{name}`", *one.cells(name)])
        if one.outcome in (UNPROVEN, "unknown"):
            print(f"{name}: {one.reason.strip().splitlines()[0]}")
    numbers = {f"all, in vLLM {__version__.split('+')[0]}": len(found)}
    for name in OUTCOMES:
        numbers[f"[{name}](#{name.replace(',', '').replace(' ', '-')})"] = len(rows[name])
    limited = sum("(compatibility.md#" in cells[2] for cells in rows["served"])
    numbers["of the served ones, with windows, states or image prefixes"] = limited
    rows["numbers"] = list(map(list, numbers.items()))
    rows |= grouped(rows)
    rows["gains"] = [
        [
            known,
            ", ".join(f"{kind.num_layers} {kind.name}" for kind in found[name].kinds[::-1]),
            *(found[name].gain(budget, prompt) for budget in (0.2, 0.1) for prompt in PROMPTS),
        ]
        for name, known in GAINS.items()
    ]
    return {
        name: "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in of)
        for name, of in rows.items()
    }


if __name__ == "__main__":
    written = tables()
    for page in PAGES:
        page.write_text(filled(page.read_text(), written))
