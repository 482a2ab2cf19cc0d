# SPDX-License-Identifier: Apache-2.0
"""A fleet on paper: formulas by hand, what they must do, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.models import TinyModel, model_folder
from vllm_tgvkv.fleet.__main__ import main
from vllm_tgvkv.fleet.capacity import Capacity, Eviction, Server, capacity, pairs
from vllm_tgvkv.fleet.costs import Step, StepCosts, read_costs, roofline
from vllm_tgvkv.fleet.gpus import GPUS, Gpu, parse_gpu
from vllm_tgvkv.fleet.mix import Prompt, mean, parse_mix
from vllm_tgvkv.fleet.model import Model, read_model
from vllm_tgvkv.fleet.report import Plan, lines, verdict
from vllm_tgvkv.gain import FULL_ATTENTION, LayerKind
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import EvictionConfigError

FULL = LayerKind(FULL_ATTENTION, 10, bytes_per_token=10)
COSTS = StepCosts(host=1.0, weights=2.0, token=0.01, pair=1e-6, read=0.0001, row=0.1, visual=0.01)
MIX = (Prompt(1600, 0.5, 101),)
SERVER = Server([FULL], pool=170_000, costs=COSTS, chunk=1600, max_num_seqs=64)
FIFTH = Eviction(Budget(fraction=0.2))
PRESSURE = dataclasses.replace(FIFTH, pressure=True)


def test_seconds_of_a_step_by_hand() -> None:
    # 100 tokens compute for a second, less than the weights are read; 300 for three.
    assert COSTS.seconds(Step(tokens=100)) == 1 + 2
    step = Step(tokens=300, pairs=1e6, read=5000, rows=4, visual=20)
    assert COSTS.parts(step) == pytest.approx(
        {"prompts": 3 + 1, "weights": 0, "cache": 0.5, "images": 0.2, "host": 1.4}
    )
    assert COSTS.seconds(step) == pytest.approx(6.1)


def test_roofline_by_hand() -> None:
    model = Model("M", [FULL], 16, 0, 4 * 10**12, 5e11, 250, 8, 1, 10**11, 4, 1024)
    found = roofline(model, Gpu("g", 80, 2.0, 100), 2, 0.5, 0.5, 0.001)
    # Two GPUs reach 1e14 operations and 2e12 bytes per second together.
    assert (found.weights, found.read) == pytest.approx((2.0, 1 / 2e12))
    assert (found.token, found.pair) == pytest.approx((0.01, 1000 / 1e14))
    assert found.visual == pytest.approx(2 * 1e11 * 4 / 1e14)


def test_pairs_by_hand() -> None:
    window = LayerKind("window of 4 tokens", 3, bytes_per_token=1, window=4)
    state = LayerKind("state", 5, state_bytes=7)
    assert pairs([FULL, window, state], 100) == 10 * 5000 + 3 * 400
    assert pairs([FULL, window, state], 100, 50) == 10 * 3750 + 3 * 200
    assert pairs([window], 6) == 3 * 18  # shorter than the window reaches


def test_a_replica_without_a_queue_of_memory_by_hand() -> None:
    """One request at a time: a step for its prompt, 100 for the rest of its answer."""
    found = capacity(dataclasses.replace(SERVER, max_num_seqs=1), MIX, None)
    # In the mean step 1/101 of a request begins, and a chunk of 1,600 tokens is the prompt, less
    # the tokens that others decode: a request is held for a little more than 101 steps.
    assert found.held == 1
    prompt = 0.01 * 1600 + 1e-6 * 10 * 1600**2 / 2 + 0.01 * 800
    cache = 0.0001 * (1600 + 51 + 13) * 10 * 100  # 1,651 tokens are 104 blocks
    host, weights = 101 * 1.0 + 100 * 0.1, 100 * 2.0
    assert 1 / found.rate == pytest.approx(prompt + cache + host + weights, rel=0.01)
    assert found.limit == "seqs"


def test_memory_by_hand() -> None:
    """A prompt has 100 blocks of 160 bytes x 10 / 10: what a pool holds."""
    found = capacity(SERVER, MIX, None)
    # 104 blocks of 160 bytes in the middle of an answer.
    assert found.held == 170_000 // (104 * 160) == 10
    assert found.limit == "memory"
    evicted = capacity(SERVER, MIX, FIFTH)
    # 20 blocks are kept and 4 of the answer; 100 + 20 are spared for the prompt that is evicted.
    assert evicted.held == (170_000 - 120 * 160) // (24 * 160) == 39
    assert evicted.rate > 2 * found.rate
    waiting = capacity(SERVER, MIX, dataclasses.replace(FIFTH, defer=50))
    assert found.rate < waiting.rate < evicted.rate


@pytest.mark.parametrize("eviction", [None, FIFTH])
def test_more_of_anything_is_no_loss(eviction: Eviction | None) -> None:
    def rates(field: str, *values: Any) -> list[float]:
        changed = [dataclasses.replace(SERVER, **{field: value}) for value in values]
        return [capacity(each, MIX, eviction).rate for each in changed]

    for found in (
        rates("pool", 40_000, 80_000, 160_000, 1e9),
        rates("max_num_seqs", 1, 4, 16, 256),
        rates("max_step", 6.0, 7.0, 8.0, 1e6),
        rates("costs", *(dataclasses.replace(COSTS, read=r) for r in (1e-3, 1e-4, 1e-5))),
        [
            capacity(SERVER, (Prompt(tokens, 0.5, 101),), eviction).rate
            for tokens in (1600, 800, 400, 200)
        ],
    ):
        assert found == sorted(found)
        assert found[0] < found[-1]
    budgets = [capacity(SERVER, MIX, Eviction(Budget(fraction=f))).rate for f in (0.8, 0.4, 0.1)]
    assert budgets == sorted(budgets)
    both = capacity(SERVER, (*MIX, Prompt(400, 0.5, 101)), eviction).rate
    alone = [capacity(SERVER, (each,), eviction).rate for each in (MIX[0], Prompt(400, 0.5, 101))]
    assert min(alone) < both < max(alone)


def plan(server: Server, mix: tuple[Prompt, ...], eviction: Eviction, **fields: Any) -> Plan:
    model = Model("M", [FULL], 16, 10**9, 1, 1.0, 1, 8, 10**5)
    return Plan(
        **{
            "model": model,
            "gpu": GPUS["h100"],
            "num_gpus": 2,
            "server": server,
            "mix": mix,
            "method": "reach",
            "eviction": eviction,
            "stock": capacity(server, mix, None),
            "evicted": capacity(server, mix, eviction),
            "price": 3.0,
            "load": 0.5,
            **fields,
        }
    )


def test_nothing_is_gained_where_memory_is_not_the_limit() -> None:
    ample = dataclasses.replace(SERVER, pool=1e12, max_num_seqs=16)
    short = (Prompt(1600, 0.5, 2),)
    for mix in (short, (Prompt(1600, 0.5, 1),)):
        found = plan(dataclasses.replace(ample, max_num_seqs=10**6), mix, PRESSURE)
        assert found.evicted == found.stock
        assert found.stock.limit == "prompts"
        assert verdict(found).startswith("Eviction saves nothing here: the limit is computing")
    always = plan(ample, short, dataclasses.replace(FIFTH, cost=0.2))
    assert always.evicted.rate < always.stock.rate
    assert "dearer here: the limit is computing prompts" in verdict(always)
    texts = plan(SERVER, (Prompt(1600, 0, 101),), FIFTH)
    assert texts.stock.limit == "memory"
    assert texts.evicted == texts.stock
    assert "nothing here: no prompt of the mix has images" in verdict(texts)
    # A bound on the time between tokens is a limit that eviction does not lift.
    slow = dataclasses.replace(SERVER, max_step=capacity(SERVER, MIX, None).step * 1.01)
    assert "--max-inter-token-ms" in verdict(plan(slow, MIX, PRESSURE))


def test_gpus_and_dollars_by_hand() -> None:
    arm = Capacity(held=10, rate=5.0, step=1.0, limit="memory", parts={}, evicts=True)
    found = plan(SERVER, MIX, FIFTH, stock=arm, evicted=arm)
    # Half of five requests per second on two GPUs for three dollars.
    assert found.dollars(arm) == pytest.approx(6 / 3600 / 2.5 * 1e6)
    found = dataclasses.replace(found, rate=26.0)
    assert found.gpus(arm) == 22  # 11 replicas
    assert found.dollars(arm) == pytest.approx(66 / 3600 / 26 * 1e6)
    found = dataclasses.replace(found, rate=None, most_gpus=7)
    assert found.answered(arm) == 7.5  # three replicas; the seventh GPU is paid
    assert found.dollars(arm) == pytest.approx(21 / 3600 / 7.5 * 1e6)
    assert mean((Prompt(8, 0.5, 1, 3), Prompt(4, 1, 1, 1)), lambda each: each.num_visual) == 4


def test_the_report_says_where_figures_come_from() -> None:
    text = "\n".join(lines(plan(SERVER, MIX, FIFTH, rate=100.0, most_gpus=4)))
    for said in ("Published: ", "Step costs: given", "Assumed: ", "Not known here: "):
        assert said in text
    assert "No replica of several GPUs has run" in text
    assert re.search(r"^limit +memory for caches", text, re.MULTILINE)


def test_values_are_read() -> None:
    assert parse_gpu("H100") is GPUS["h100"]
    assert parse_gpu("mine:96,1.8,500") == Gpu("mine", 96, 1.8, 500)
    assert parse_mix(["8192,0.9,256", "512,0,100,2.5"]) == (
        Prompt(8192, 0.9, 256),
        Prompt(512, 0, 100, 2.5),
    )


def test_measured_costs_are_read(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    fields = {"host": 1e-3, "weights": 2e-3, "token": 1e-5, "pair": 1e-9, "read": 1e-12}
    file.write_text(json.dumps(fields))
    found = read_costs(str(file))
    assert found == StepCosts(**fields, source=f"measured, {file}")
    for wrong in ({"host": -1}, {"host": "1"}, {"hosts": 1}, dict.fromkeys(fields, 0)):
        file.write_text(json.dumps({**fields, **wrong}))
        with pytest.raises(EvictionConfigError, match=r"--step-costs is .*: give a JSON file with"):
            read_costs(str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "--gpu is 'h1000': did you mean h100?"),
        (["--gpu", "mine:96,0,1"], "or describe another as NAME:GB,TB/s,TFLOP/s"),
        (["--gpu", "mine:96,1,1"], "--gpu mine has no price here: give --price"),
        (["--gpu", "h100", "--mix", "8192,9,1"], "--mix is '8192,9,1': give TOKENS,VISUAL,ANSWER"),
        (["--gpu", "h100", "--mix", "8192"], "--mix is '8192': give"),
        (["--gpu", "h100", "--mix", "1,1,1,1,1"], "--mix is '1,1,1,1,1': give"),
        (["--gpu", "h100", "--method", "reech"], "--method is 'reech': did you mean reach?"),
        (["--gpu", "h100", "--budget", "0"], "--budget is '0': give a fraction"),
        (["--gpu", "h100", "--budget", "auto:0.9"], "give a fraction, or --when always"),
        (["--gpu", "h100", "--step-costs", "/no"], "--step-costs is '/no', which cannot be used"),
        (
            ["--gpu", "h100", "--gpus", "2", "--tensor-parallel-size", "4"],
            "--gpus is 2, fewer than one replica has: give at least 4",
        ),
    ],
)
def test_wrong_arguments_are_named_before_vllm_is_imported(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # `main` sets it otherwise, for good
    assert main(["/no/model", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_formulas_import_neither_vllm_nor_torch() -> None:
    code = "import sys, vllm_tgvkv.fleet.__main__; print(*{'vllm', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == ("", "")


@pytest.mark.slow
def test_the_command_reads_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybrid with four experts, one for each token, and a vision tower."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    folder = model_folder(tmp_path, TinyModel("qwen3_5_moe"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts_per_tok"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    model = read_model(str(folder), block_size=16)
    monkeypatch.setattr("vllm_tgvkv.fleet.__main__.read_model", lambda *_, **__: model)
    # Of each layer 4 experts with 3 matrices of 128 x 64; an embedding and a head of 320 tokens.
    experts, embedding = 4 * 4 * 3 * 128 * 64, 320 * 128
    num_values = model.weight_bytes // 2 - model.vision_values
    assert model.active_values == pytest.approx(
        num_values - 2 * embedding - experts * 3 / 4, rel=1e-3
    )
    assert model.read_bytes == pytest.approx(2 * (num_values - embedding), rel=1e-3)
    assert model.query_width == 4 * 32

    arguments = [str(folder), "--gpu", "l4", "--mix"]
    assert main([*arguments, "1000,0.5,20", "--rate", "10"]) == 0
    found = capsys.readouterr().out
    assert found.startswith("Qwen3_5MoeForConditionalGeneration, one GPU (l4) for each replica")
    for wrong, message in (
        (["1000,0.5,20", "--tensor-parallel-size", "3"], "is 3, and the model has 2 KV heads"),
        (["8192,0.5,20"], "--mix has 8192 + 20 tokens, and the model's context is 8192"),
        (["8,0.5,20", "--reserve", "20.11"], "too little for one: choose another --gpu"),
        (["8,0.5,20", "--max-inter-token-ms", "0.1"], "--max-inter-token-ms is 0.1, and a request"),
    ):
        assert main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err
