# SPDX-License-Identifier: Apache-2.0
"""Record what the authors' trimkv does: `python record.py PACKAGES FOLDER`.

PACKAGES is the folder of trimkv and what it needs besides torch. Reads from FOLDER:
    cases.json      {name: {"gates": folder, "shared": bool, "memory_size": M, "buffer_size": B,
                    "lookahead_steps": n, "prompt": [token, ...], "answer": [token, ...]}}
    inputs.safetensors    query [1, Q, S, D], key, value [1, H, S, D], log_betas [1, H, S];
                          sums [1, L, H, S], retained sums of a capacity of 4 tokens

Writes `recorded.safetensors`, T being all tokens and n the compactions:
    hidden.CASE                 float32 [L, T, d], what the gates read
    log_betas.CASE              float32 [L, H, T]
    seen.CASE                   int64 [n], tokens at each compaction
    kept.CASE                   bool [n, L, H, T], what it left
    scores.CASE                 float32 [n, L, H, T], NaN where there was no token
    low.CASE                    float32 [T, H], what the gate of layer 1 says in bfloat16
    eager, flex                 float32 [1, S, Q, D], the attention in training
    shared, local               float32 scalars, the capacity loss of DBTrimKV and of TrimKV
and `facts.json`: defaults of its classes.

Two kernels of theirs need a GPU and are replaced here by what they compute: FlashAttention, and
the Triton kernel that appends keys to lists of different lengths.
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGES, FOLDER = map(Path, sys.argv[1:])
sys.path.insert(0, str(PACKAGES))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402


def flash_attn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    causal: bool,
    **_: Any,
) -> Tensor:
    """Attend inside sequences, whose last query sees all keys: ``[n, heads, D]``."""
    assert causal
    found = torch.empty_like(query)
    for q, k in zip(bounds(starts_q), bounds(starts_k), strict=True):
        rows, keys = query[q].transpose(0, 1), key[k, 0]
        mask = torch.ones(rows.shape[1], len(keys), dtype=torch.bool)
        mask = mask.tril(len(keys) - rows.shape[1])
        logits = (rows @ keys.T * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        found[q] = (logits.softmax(-1) @ value[k, 0]).transpose(0, 1)
    return found


def bounds(starts: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]


def append(cache: Tensor, state: Tensor, _: Tensor, starts: Tensor) -> Tensor:
    """Append ``[1, H, n, D]`` to the lists of H heads, ``[sum of lengths, D]``."""
    parts = [torch.cat((cache[k], new)) for k, new in zip(bounds(starts), state[0], strict=True)]
    return torch.cat(parts)


def replacement(name: str, **functions: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(functions)
    sys.modules[name] = module


replacement("flash_attn")
replacement(
    "flash_attn.flash_attn_interface",
    flash_attn_varlen_func=flash_attn_varlen_func,
    flash_attn_with_kvcache=None,
)
replacement(
    "trimkv.triton",
    update_flatten_view_triton=append,
    retention_sum_triton=None,
    retention_sum_packed_triton=None,
)

from safetensors.torch import load_file, save_file  # noqa: E402
from trimkv.attn import eager_attn, flex_attn  # noqa: E402
from trimkv.cache_utils import DynamicBudgetTrimKVCache, TrimKVCache  # noqa: E402
from trimkv.models.qwen3 import TrimKVQwen3ForCausalLM  # noqa: E402


def run_case(case: dict[str, Any]) -> dict[str, Tensor]:
    """Read a prompt, then an answer token by token."""
    model = TrimKVQwen3ForCausalLM.from_pretrained(case["gates"]).eval()
    layers = model.model.layers
    kind = DynamicBudgetTrimKVCache if case["shared"] else TrimKVCache
    options = {k: case[k] for k in ("memory_size", "buffer_size", "lookahead_steps")}
    cache = kind(device="cpu", **options)
    if case["shared"]:
        model.config._attn_implementation = "flash_attention_2"
    hidden: list[list[Tensor]] = [[] for _ in layers]
    log_betas: list[list[Tensor]] = [[] for _ in layers]
    for index, layer in enumerate(layers):

        def read(_: Any, inputs: Any, output: Tensor, index: int = index) -> None:
            hidden[index].append(inputs[0][0].clone())
            log_betas[index].append(output[0].clone())

        layer.self_attn.retention_gate.register_forward_hook(read)
    seen, kept, scores = [], [], []
    num_tokens = len(case["prompt"]) + len(case["answer"])
    heads = model.config.num_key_value_heads
    top = torch.topk
    ranked: list[Tensor] = []

    def topk(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        ranked.append(values.float().flatten().clone())
        return top(values, *args, **kwargs)

    compress = cache.compress

    def compress_and_record() -> None:
        before = positions_of(cache, heads)
        ranked.clear()
        torch.topk = topk
        try:
            compress()
        finally:
            torch.topk = top
        after = positions_of(cache, heads)
        if sum(map(len, after)) < sum(map(len, before)):
            seen.append(cache.get_seq_length())
            of_cut = torch.full((len(after), num_tokens), torch.nan)
            lengths = [len(x) for x in before]
            for row, found, value in zip(
                of_cut, before, torch.cat(ranked).split(lengths), strict=True
            ):
                row[found] = value
            left = torch.zeros(len(after), num_tokens, dtype=torch.bool)
            for row, found in zip(left, after, strict=True):
                row[found] = True
            kept.append(left.view(-1, heads, num_tokens))
            scores.append(of_cut.view(-1, heads, num_tokens))

    cache.compress = compress_and_record
    for ids in (case["prompt"], *([token] for token in case["answer"])):
        model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
    states = torch.stack([torch.cat(parts) for parts in hidden])
    gate = layers[1].self_attn.retention_gate
    said = torch.stack([torch.cat(parts) for parts in log_betas])
    gate.bfloat16()
    return {
        "hidden": states,
        "log_betas": said.transpose(1, 2),
        "seen": torch.tensor(seen),
        "kept": torch.stack(kept),
        "scores": torch.stack(scores),
        "low": gate(states[1][None].bfloat16())[0].float(),
    }


def positions_of(cache: Any, heads: int) -> list[Tensor]:
    """Return the cached positions of every (layer, head)."""
    found: list[Tensor] = []
    for layer, positions in enumerate(cache.kv_positions):
        if isinstance(cache, DynamicBudgetTrimKVCache):
            found += [positions[head, 0] for head in bounds(cache.cu_seqlens_k[layer])]
        else:
            found += positions[0].expand(heads, -1).unbind()
    return found


def training() -> dict[str, Tensor]:
    """Return the attention with decay, by their two implementations, and the capacity losses."""
    inputs = load_file(FOLDER / "inputs.safetensors")
    parts = [inputs[name] for name in ("query", "key", "value")]
    query, key, _ = parts
    module = torch.nn.Module().eval()
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    size = query.shape[2]
    more = {"retention_weights": inputs["log_betas"], "scaling": query.shape[-1] ** -0.5}
    mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
    eager = eager_attn.retention_gated_attention_forward(module, *parts, mask, **more)[0]
    blocks = flex_attn.create_block_mask(
        lambda b, h, q, k: q >= k, B=None, H=None, Q_LEN=size, KV_LEN=size, device="cpu"
    )
    flex_attn.flex_attention_compiled = flex_attn.flex_attention
    flex = flex_attn.retention_gated_attention_forward(module, *parts, blocks, **more)[0]
    sums = inputs["sums"]
    _, layers, heads, _ = sums.shape
    found = {"eager": eager, "flex": flex}
    for name, shared in (("shared", True), ("local", False)):
        config = SimpleNamespace(
            memory_size=4,
            global_capacity=shared,
            num_hidden_layers=layers,
            num_key_value_heads=heads,
        )
        loss = TrimKVQwen3ForCausalLM.compute_retention_loss
        found[name] = loss(SimpleNamespace(config=config), sums, sums.flatten(1, 2))
    return found


@torch.no_grad()
def main() -> None:
    found = {}
    for name, case in json.loads((FOLDER / "cases.json").read_text()).items():
        found |= {f"{key}.{name}": value for key, value in run_case(case).items()}
    found |= training()
    save_file({k: x.contiguous() for k, x in found.items()}, FOLDER / "recorded.safetensors")
    defaults = inspect.signature(TrimKVCache.__init__).parameters
    facts = {name: defaults[name].default for name in ("lookahead_steps", "sliding_window_size")}
    (FOLDER / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
