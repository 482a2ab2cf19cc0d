# SPDX-License-Identifier: Apache-2.0
"""Folders of gates: what they compute, what is refused, and the scores that read them."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from dataclasses import replace
from decimal import Decimal, localcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from oracle.gates import log_betas, predicted
from tests.inputs import Launches, assert_says, gate_tensors, gates, replace_kernels, said_by
from tests.unit.test_memory import LiveBytes
from vllm_tgvkv.attention.base import EvictingImpl
from vllm_tgvkv.cache.key_numbers import KeyNumbers
from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.gates import __main__ as command
from vllm_tgvkv.gates import tap
from vllm_tgvkv.gates.folder import Gates, write
from vllm_tgvkv.kernels.gates import GateBuffers, LayerGate
from vllm_tgvkv.policies import Mix, Prompt, build_policy
from vllm_tgvkv.policies.base import LayerView
from vllm_tgvkv.shared.errors import EvictionConfigError, UnsupportedByEvictionError

LAYERS, HIDDEN, HEADS = 3, 16, 4


def saved(folder: Path, form: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Write random gates, with other fields of the configuration; return their tensors."""
    tensors, config = gate_tensors(form, LAYERS, HIDDEN, HEADS)
    write(folder, tensors, {**config, **changes})
    return tensors


@pytest.mark.parametrize("form", ["rg", "rg10", "mlp"])
def test_gates_say_what_their_definition_says(tmp_path: Path, form: str) -> None:
    """On all ranks, and after a conversion to safetensors."""
    tensors = saved(tmp_path, form)
    wanted = predicted(tensors)
    if form != "mlp":
        wanted = log_betas(tensors, "model.layers", 2 if form == "rg10" else 1)
        command.main([str(tmp_path), "--output", str(tmp_path / "safe")])
        (tmp_path / "safe" / "config.json").stat()
    hidden = torch.randn(50, HIDDEN)
    for folder in (tmp_path, tmp_path / "safe")[: 1 if form == "mlp" else 2]:
        found = Gates.read(str(folder), "here")
        assert (found.layers, found.hidden_size, found.kv_heads) == ((0, 1, 2), HIDDEN, HEADS)
        assert pickle.loads(pickle.dumps(found)) == found
        for heads in (slice(0, 4), slice(1, 2), slice(2, 4)):
            loaded = found.load([0, 2], heads, torch.float32, "cpu")
            assert list(loaded) == [0, 2]
            for layer, gate in loaded.items():
                exact = wanted(layer, hidden)[:, heads]
                said = said_by(gate, hidden).double()
                torch.testing.assert_close(said, exact, rtol=2e-5, atol=1e-5)
            linears = [x for gate in loaded.values() for linear in gate.linears for x in linear]
            num_heads = len(range(HEADS)[heads])
            assert sum(x.nbytes for x in linears) == found.num_bytes(2, num_heads, 4)


def test_a_linear_predictor(tmp_path: Path) -> None:
    weight, bias = torch.randn(HEADS, HIDDEN), torch.randn(HEADS)
    write(tmp_path, {"layers.0.weight": weight, "layers.0.bias": bias}, {"model_type": "kvzap"})
    found = Gates.read(str(tmp_path), "here")
    (gate,) = found.load([0], slice(None), torch.bfloat16, "cpu").values()
    hidden = torch.randn(9, HIDDEN).bfloat16()
    torch.testing.assert_close(said_by(gate, hidden), hidden.float() @ weight.T + bias)
    assert found.num_bytes(1, HEADS, 2) == weight.nbytes + bias.nbytes


def test_a_large_bias_hides_nothing_in_bfloat16(tmp_path: Path) -> None:
    """From 16 on, numbers have steps of 1 / 8 in bfloat16; without a bias, gates say small ones."""
    tensors = saved(tmp_path, "rg")
    config = json.loads((tmp_path / "config.json").read_text())
    hidden = (0.02 * torch.randn(64, HIDDEN)).bfloat16()
    found = []
    for bias in (0, 18):
        for layer in range(LAYERS):
            tensors[f"model.layers.{layer}.self_attn.retention_gate.bias"].fill_(bias)
        write(tmp_path, tensors, config)
        read = Gates.read(str(tmp_path), "x")
        (gate,) = read.load([1], slice(None), torch.bfloat16, "cpu").values()
        # The inverse of the logarithm of the sigmoid.
        found.append(-said_by(gate, hidden).double().neg().expm1().log())
    torch.testing.assert_close(found[1], found[0] + 18, rtol=0, atol=1e-4)


KEY = "model.layers.1.self_attn.retention_gate."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({KEY + "linear2.bias": None}, "gate of layer 1 lacks linear2.bias, unlike the form"),
        ({KEY + "linear4.bias": torch.ones(2)}, "gate of layer 1 has linear4.bias"),
        ({KEY + "bias": torch.ones(2)}, "gate of layer 1 has weights of ... do not fit"),
        ({KEY + "linear1.weight": torch.ones(24, 8)}, "do not fit each other or those of layer 0"),
        ({KEY + "linear2.weight": torch.ones(24, 8)}, "do not fit"),
        ({"lm_head.weight": torch.ones(2)}, "'lm_head.weight' is no tensor of a gate of TrimKV"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    tensors, config = gate_tensors("rg10", LAYERS, HIDDEN, HEADS)
    changed = {name: x for name, x in {**tensors, **change}.items() if x is not None}
    write(tmp_path, changed, config)
    assert_says(refusal(str(tmp_path)), f"kv_eviction.gates is {str(tmp_path)!r}: ... {said}")


def refusal(value: Any) -> str:
    with pytest.raises(EvictionConfigError) as caught:
        EvictionConfig.from_mapping({"policy": "tgv", "gates": value})
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Evil:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return sys.exit, ("the pickle was run",)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert "config.json cannot be read (No such file" in refusal(folder)
    for value in ("gates", 3, {"folder": "gates"}, {"folder": folder, "n": 2}):
        assert "give the absolute path of a folder" in refusal(value)
    for text, said in (("{", "cannot be read"), ("[]", "is no mapping")):
        (tmp_path / "config.json").write_text(text)
        assert f"config.json {said}" in refusal(folder)
    for field, value in (("retention_gate", "rg7"), ("hidden_act", "sine")):
        saved(tmp_path, "rg", **{field: value})
        assert f"{field} of its config.json is {value!r}" in refusal(folder)
    saved(tmp_path, "rg")
    file = tmp_path / "trimkv_weights.pth"
    for content, said in (
        ({"x": Evil()}, "trimkv_weights.pth cannot be read"),
        ([1], "trimkv_weights.pth is no mapping"),
        ({}, "its file of weights is empty"),
    ):
        torch.save(content, file)
        assert said in refusal(folder)
    file.unlink()
    assert "it has no trimkv_weights.safetensors or trimkv_weights.pth" in refusal(folder)
    with pytest.raises(SystemExit, match=r"gates: the folder is .*: it has no trimkv_weights"):
        command.main([folder])
    tensors = saved(tmp_path, "rg10")
    tensors[KEY + "linear1.weight"][3, 3] = torch.nan
    write(tmp_path, tensors, json.loads((tmp_path / "config.json").read_text()))
    found = Gates.read(folder, "here")
    with pytest.raises(EvictionConfigError, match=r"linear1.bias of layer 1 has values that"):
        found.load([0, 1, 2], slice(None), torch.float32, "cpu")


def test_gates_of_another_model_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "rg")
    found = Gates.read(str(tmp_path), "here")
    found.check_model(3, HIDDEN, HEADS)
    for model, words in (
        ((4, HIDDEN, HEADS), "has no gate for layer 3 of this model"),
        ((2, HIDDEN, HEADS), "this model has 2 layers, 16 values and 4 KV heads"),
        ((3, 32, HEADS), "made for 3 layers with hidden states of 16 values .* 32 values"),
        ((3, HIDDEN, 2), "this model has 3 layers, 16 values and 2 KV heads"),
    ):
        with pytest.raises(EvictionConfigError, match=words):
            found.check_model(*model)


def test_methods_are_those_of_the_gates(tmp_path: Path) -> None:
    """At start, in a mix and in a request."""
    plain = EvictionConfig.from_mapping({"policy": "tgv"})
    named = (("trimkv", "rg", {"trimkv", "dbtrimkv"}), ("kvzap", "mlp", {"kvzap"}))
    for kind, form, names in named:
        saved(tmp_path / kind, form)
        value = str(tmp_path / kind)
        config = EvictionConfig.from_mapping({"policy": "tgv", "gates": value})
        assert config.gates is not None
        assert (config.gates.kind, config.gates.lookahead, config.gates.age_offset) == (kind, 2, 0)
        assert EvictionConfig.from_mapping({"policy": "tgv", "gates": value}) == config
        assert set(config.method_names) - set(plain.method_names) == names
        for name in names:
            assert RequestOptions.resolve(config, {"kv_eviction": name}).policy == name
            with pytest.raises(EvictionConfigError, match="budget auto"):
                EvictionConfig.from_mapping({"policy": name, "gates": value, "budget": "auto:0.9"})
        other = "kvzap" if kind == "trimkv" else "trimkv"
        mix = {"mine": {"base": "snapkv", "score": other}}
        with pytest.raises(EvictionConfigError, match=r"reads gates of .*, and /.* has those of "):
            EvictionConfig.from_mapping({"policy": "tgv", "gates": value, "methods": mix})


def prompt_of(num_tokens: int) -> Prompt:
    return Prompt(num_tokens, num_tokens, torch.zeros(num_tokens, dtype=torch.bool), sinks=0)


@pytest.mark.parametrize(("lookahead", "age_offset"), [(1, 0), (1, 1), (2, 0), (5, 2)])
def test_retention_in_exact_arithmetic(lookahead: int, age_offset: int) -> None:
    """From tokens that are forgotten at once to those that no float32 tells from eternal ones."""
    num_tokens = 300
    log_betas = -(10 ** (16 * torch.rand(1, num_tokens, dtype=torch.float64) - 14)).float()
    used = gates("trimkv", lookahead=lookahead, age_offset=age_offset)
    policy = build_policy("trimkv", gates=used)
    found = policy.scores(LayerView(0, 1, prompt_of(num_tokens), None, gate_outputs=log_betas))  # type: ignore[arg-type]
    with localcontext() as context:
        context.prec, context.Emin = 60, -(10**8)
        for j, (log_beta, score) in enumerate(
            zip(log_betas[0].tolist(), found[0].tolist(), strict=True)
        ):
            exponents = [num_tokens - j + age_offset + m for m in range(lookahead)]
            kept = [(Decimal(log_beta) * exponent).exp() for exponent in exponents]
            exact = float((sum(kept) / lookahead).ln())
            # Double precision; the mean over the next tokens is near 1 - 1e-14 at the least.
            assert score == pytest.approx(exact, rel=1e-6, abs=1e-15), (j, log_beta)
    extreme = torch.tensor([[0.0, -1e-40, -1e38, -torch.inf]])
    view = LayerView(0, 1, prompt_of(4), None, gate_outputs=extreme)  # type: ignore[arg-type]
    assert policy.scores(view).isfinite().all()


def test_the_mix_of_retention_and_attention_names_its_rows() -> None:
    used = gates("trimkv")
    policy = build_policy(Mix("dbtrimkv", score="trimkv_votes"), gates=used)
    assert policy.row_sets == ("text",)
    assert build_policy("dbtrimkv", gates=used).row_sets == ()
    assert replace(used, lookahead=3) != used


def test_the_projection_of_a_layer_has_to_be_found() -> None:
    with pytest.raises(UnsupportedByEvictionError, match=r"layers.3.* has 0 joint projections"):
        tap._projection(nn.ModuleDict({"q_proj": nn.Linear(2, 2)}), "layers.3.self_attn.attn")


def test_a_rank_reads_the_gates_of_its_own_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = predicted(saved(tmp_path, "mlp"))
    monkeypatch.setattr(tap, "_projection", lambda owner, name: nn.Identity())
    layers = {f"model.layers.{layer}.self_attn.attn": nn.Identity() for layer in range(LAYERS)}
    for attention in layers.values():
        attention.num_kv_heads, attention.impl = HEADS // 2, SimpleNamespace()
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=50),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
    )
    gates = Gates.read(str(tmp_path), "here")
    tap.attach_taps(nn.Linear(1, 1), layers, config, gates, part=1)
    hidden, pages = torch.randn(50, HIDDEN), torch.zeros(1, HEADS // 2, 50)
    for layer, attention in enumerate(layers.values()):
        attention.impl.tap.read(hidden)
        attention.impl.tap.store(torch.arange(50), pages)
        exact = wanted(layer, hidden)[:, HEADS // 2 :].T
        torch.testing.assert_close(pages[0].double(), exact, rtol=2e-5, atol=1e-5)


class Stock:
    """vLLM's attention of a layer, which stores nothing."""

    def do_kv_cache_update(self, *args: object) -> None:
        pass


class Evicting(EvictingImpl[Any], Stock):
    """A layer with a gate, without a model."""

    def __init__(self, gate: LayerGate, buffers: GateBuffers, outputs: KeyNumbers) -> None:
        self.tap = tap.Tap(gate, buffers)
        self._gate_pages = outputs.layers[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 64, 8192])
@pytest.mark.parametrize("form", ["linear", "rg", "mlp", "rg10"])
def test_a_gate_takes_two_launches_and_no_memory(
    form: str, num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, in a decode step and in a prefill: so it may be part of a graph, and vLLM's trial
    run has measured all that it takes, which was there when the model was loaded."""
    kernel = replace_kernels(monkeypatch)
    sizes = {"linear": (4096, 8), "rg10": (4096, 512, 512, 8)}.get(form, (4096, 512, 8))
    linears = tuple(
        (torch.empty(n_out, n_in, dtype=dtype, device="meta"), torch.empty(n_out, device="meta"))
        for n_in, n_out in itertools.pairwise(sizes)
    )
    gate = LayerGate(form.startswith("rg"), "gelu", linears)
    shape = CacheShape(36, num_heads=8, group_size=4, head_size=128, block_size=16)
    outputs = KeyNumbers(9, shape, torch.device("meta"))
    layer = Evicting(gate, GateBuffers.of(gate, 8192), outputs)
    hidden = torch.empty(num_tokens, 4096, dtype=dtype, device="meta")
    slots = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    with torch.inference_mode(), Launches() as counted, LiveBytes() as live:
        layer.tap.read(hidden)
        layer.do_kv_cache_update(None, hidden, hidden, hidden, slots)
    assert len(counted.names) + kernel.num_launches == 2
    assert live.most == 0
    before = kernel.num_launches
    layer.warm_up_gate()
    assert kernel.num_launches == before + 2
