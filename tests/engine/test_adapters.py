# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in one engine: each has its own prefix cache and evictions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from oracle.emulation import Oracle
from tests.engine.adapters import write_adapters
from tests.engine.gated import gated_oracle
from tests.engine.questions import BLOCK_SIZE, JSON_SCHEMA, SETTINGS, budget, question
from tests.engine.running import Ask, assert_outputs_agree, engine
from tests.engine.test_speculation import speculative_config

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("drafts", ["", pytest.param("draft_model", marks=pytest.mark.nightly)])
def test_adapters_have_caches_of_their_own(folder: Path, tmp_path: Path, drafts: str) -> None:
    """Two LoRA adapters and none in one batch: each keeps tokens by its own attention.

    Or by what the gates say, which read the hidden states of the adapted model.
    """
    torch.manual_seed(5)
    oracle = gated_oracle(folder, tmp_path / "gates", "rg10")
    adapters = write_adapters(folder, tmp_path, oracle.gates)
    models: dict[str, tuple[LoRARequest | None, Oracle]] = {"": (None, oracle)}
    for number, (name, (path, adapted)) in enumerate(adapters.items(), 1):
        models[name] = (LoRARequest(name, number, str(path)), adapted)
    ask = question(130, 60, 160, max_tokens=30, xargs=budget(0.4))
    others = {name: question(131 + i, 20, 180, max_tokens=40) for i, name in enumerate(models)}
    retention = {**budget(0.4), "kv_eviction": "dbtrimkv"}
    gated = {
        name: question(141 + i, 20, 180, max_tokens=30, xargs=retention)
        for i, name in enumerate(models)
    }
    with engine(
        folder,
        {**SETTINGS, "gates": str(tmp_path / "gates")},
        enable_lora=True,
        max_loras=3,  # on CPU vLLM gives requests without adapter the last one, here an empty one
        enable_prefix_caching=True,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=160,
        **({"speculative_config": speculative_config(folder, drafts)} if drafts else {}),
    ) as running:
        names: list[tuple[str, str, Ask]] = []
        for asked in (dict.fromkeys(models, ask), others, gated):
            for name, (lora, _) in models.items():
                names.append((running.add(asked[name], lora=lora), name, asked[name]))
                running.step()
        finished = running.drain()
        for request_id, name, asked_ in names:
            output, its_oracle = finished[request_id], models[name][1]
            assert output.num_cached_tokens == 0
            assert_outputs_agree(running, its_oracle, [asked_], [output])
        first = [running.kept(request_id, 284) for request_id, *_ in names[:3]]
        assert len({str(kept.nonzero().tolist()) for kept in first if kept is not None}) == 3
        for name, (lora, its_oracle) in models.items():  # the second time hits its own blocks
            again = running.add(ask, lora=lora)
            output = running.drain()[again]
            # All but the 128 rows that vote.
            assert output.num_cached_tokens == (284 - 128) // BLOCK_SIZE * BLOCK_SIZE, name
            assert_outputs_agree(running, its_oracle, [ask], [output])
        guided = StructuredOutputsParams(json=JSON_SCHEMA)
        lora = models["first"][0]
        name = running.add(ask, lora=lora, structured_outputs=guided, ignore_eos=False)
        text = running.drain()[name].outputs[0].text
        assert running.kept(name, 284) is not None
        assert text.lstrip().startswith("{")
        assert set(text) <= set('{}" ab:0123456789-,yesno\n\t\r')
