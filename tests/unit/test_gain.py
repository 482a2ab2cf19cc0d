# SPDX-License-Identifier: Apache-2.0
"""The gain of eviction from a model's configuration: by hand, and as vLLM's caches have it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.conftest import ROOT
from tests.unit.test_compatibility import SIZES, VISION
from vllm_tgvkv.gain import DRAFTS, FULL_ATTENTION, LayerKind, gain, main
from vllm_tgvkv.shared.budget import Budget

FULL = LayerKind(FULL_ATTENTION, 10, bytes_per_token=1000)
WINDOW = LayerKind("window of 64 tokens", 20, bytes_per_token=2000, window=64)
STATE = LayerKind("state", 30, state_bytes=500_000)
DRAFT = LayerKind(DRAFTS, 1, bytes_per_token=334, times=3)


@pytest.mark.parametrize(
    ("kinds", "before", "after", "peak"),
    [
        # 1003 + 20 tokens in blocks of 16 are 62 full ones of the prompt and two more; a budget
        # of 10 % is 100 tokens: 5 blocks, and the tail of 11 tokens. A window of 64 tokens lies in
        # four blocks of 1023 tokens, in five of 1003.
        ([FULL], 64 * 16_000, (5 + 2) * 16_000, (63 + 5) * 16_000),
        ([FULL, WINDOW], 1_024_000 + 128_000, 112_000 + 128_000, 1_088_000 + 160_000),
        ([STATE, FULL], 1_024_000 + 500_000, 112_000 + 500_000, 1_088_000 + 500_000),
        ([STATE, WINDOW], 628_000, 628_000, 660_000),
        # In blocks of 48 tokens, 1023 are 22 and 1003 are 21; they are as large as the model's.
        ([FULL, DRAFT], 1_024_000 + 352_704, 112_000 + 352_704, 1_088_000 + 336_672),
    ],
)
def test_a_request_by_hand(kinds: list[LayerKind], before: int, after: int, peak: int) -> None:
    found = gain(kinds, 1003, 20, Budget(fraction=0.1), 16)
    assert (found.before, found.after, found.peak) == (before, after, peak)
    assert found.ratio == before / after


def test_windows_and_verdicts() -> None:
    """A window is counted as the blocks that hold its last tokens."""
    for length in range(1, 300):
        held = {position // 16 for position in range(max(length - 63, 0), length)}
        assert WINDOW.num_bytes(length, 16) == len(held) * 16 * 2000
    # A ratio of three, of a little more than one, and of one.
    for fraction, verdict in ((0.3, "gains up to 3.3 times"), (0.8, "gains up to 1.3 times")):
        assert verdict in gain([FULL], 8192, 16, Budget(fraction=fraction), 16).verdict
    assert "gains little" in gain([FULL], 8192, 16, Budget(fraction=1.0), 16).verdict
    below_one_block = gain([FULL], 15, 20, Budget(fraction=0.1), 16)
    assert below_one_block.before == below_one_block.after == 3 * 16_000
    assert "gains little" in below_one_block.verdict


def llava() -> Any:
    text = transformers.LlamaConfig(**{**SIZES, "max_position_embeddings": 16_384})
    return transformers.LlavaConfig(text_config=text, vision_config=VISION)


def gemma4() -> Any:
    """A full layer after every five with a window; the last six read the caches of others."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 3
    text = {
        **SIZES,
        "num_hidden_layers": 18,
        "layer_types": kinds,
        "num_kv_shared_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 128,
        "max_position_embeddings": 16_384,
        "hidden_size_per_layer_input": 0,
    }
    return transformers.Gemma4Config(
        text_config=text, vision_config={**VISION, "head_dim": 16}, audio_config=None
    )


def qwen3_5() -> Any:
    text = {
        **SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 16_384,
    }
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64}
    return transformers.Qwen3_5Config(text_config=text, vision_config=vision)


# Two KV heads of 16 values, keys and values, two bytes each.
_HEADS = 2 * 2 * 2
_STATE_BYTES = 4 if torch.cpu._is_avx512_bf16_supported() else 2
"""Of a number of a state, which vLLM's CPU kernels want in float32 where they have instructions
for bfloat16."""
_STATE = 4 * 32 * 32 * _STATE_BYTES + 3 * (2 * 2 * 32 + 4 * 32) * 2
"""Bytes of a delta-net layer: 4 heads of 32 x 32, and 3 columns of its convolution."""


WINDOWS = ("window of 128 tokens", 10, 10 * 16 * _HEADS, 0)
# With prefix caching, which is on by default: two states.
STATES = ("state", 3, 0, 2 * 3 * _STATE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "rows"),
    [
        pytest.param(llava, [(FULL_ATTENTION, 2, 2 * 16 * _HEADS, 0)], marks=pytest.mark.nightly),
        (gemma4, [WINDOWS, (FULL_ATTENTION, 2, 2 * 32 * _HEADS, 0)]),
        (qwen3_5, [STATES, (FULL_ATTENTION, 1, 16 * _HEADS, 0)]),
    ],
)
def test_kinds_of_layers_are_those_that_vllm_builds(
    tmp_path: Path, config: Any, rows: list[Any]
) -> None:
    made = config()
    architecture = type(made).__name__.replace("Config", "ForConditionalGeneration")
    made.architectures, made.dtype = [architecture], "bfloat16"
    made.save_pretrained(tmp_path)
    draft = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    draft.architectures, draft.dtype = ["LlamaForCausalLM"], "bfloat16"
    draft.save_pretrained(tmp_path / "draft")
    rows = [*rows, (DRAFTS, 1, 16 * _HEADS, 0)]
    options = ["--block-size", "16", "--pool", "1", "--draft", tmp_path / "draft"]
    run = subprocess.run(
        [sys.executable, "-m", "vllm_tgvkv.gain", tmp_path, *options],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = "Not served by --kv-eviction yet: drafts of a model" if config != llava else "Served by"
    assert run.stdout.splitlines()[1].startswith(said)
    assert "Eviction" in run.stdout
    assert "gains" in run.stdout
    found = re.findall(r"^(\S.*?) +(\d+) +([\d,]+) +([\d.]+)  (yes|no)$", run.stdout, re.MULTILINE)
    assert [(name, int(count), int(size.replace(",", ""))) for name, count, size, *_ in found] == [
        row[:3] for row in rows
    ]
    for (*_, fixed, evicted), (name, _, _, state) in zip(found, rows, strict=True):
        assert float(fixed) == round(state / 2**20, 3)
        assert (evicted == "yes") is (name == FULL_ATTENTION)


def test_wrong_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # `main` sets it otherwise, for good
    assert main([str(tmp_path), "--budget", "0"]) == 2
    assert "--budget is '0': give a fraction" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--prompt", "0"])
    assert "0 is not a positive number" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"vLLM cannot build {tmp_path} here: " in said
    assert "hub" not in said
    assert main(["nobody/nothing"]) == 1
    assert "give the folder in place of nobody/nothing" in capsys.readouterr().err
    made = llava()
    made.architectures = ["LlavaForConditionalGeneration"]
    made.save_pretrained(tmp_path)
    assert main([str(tmp_path), "--prompt", "16384"]) == 2
    assert "--prompt 16384 and --answer 256 do not fit the model's context of 16384 tokens" in (
        capsys.readouterr().err
    )
