# SPDX-License-Identifier: Apache-2.0
"""Workers compare their settings through a real key-value store of torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from tests.inputs import assert_says, write_gates
from vllm_tgvkv.config import digest
from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.policies.head_scores import write
from vllm_tgvkv.shared.errors import EvictionConfigError
from vllm_tgvkv.worker import peers

SAME = {"kv_eviction.budget": "0.1", "vLLM": "0.32.0"}
Connect = Callable[[int], Store]


@pytest.fixture(params=["tcp", "file"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Return a function that connects a rank, as vLLM does over nodes and on one machine."""
    if request.param == "file":
        return lambda rank: PrefixStore("default_pg", FileStore(str(tmp_path / "store"), 3))
    main = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [main] + [
        TCPStore("127.0.0.1", main.port, is_master=False, wait_for_workers=False) for _ in range(2)
    ]
    return lambda rank: PrefixStore("default_pg", stores[rank])


def verdicts(
    connect: Connect, told: Mapping[int, Mapping[str, str]], size: int, seconds: float = 30
) -> list[str]:
    """Return what each rank that tells its settings raises, or an empty text."""

    def check(rank: int) -> str:
        try:
            peers.check_peers(connect(rank), rank, size, told[rank], seconds)
        except EvictionConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(told)) as threads:
        return list(threads.map(check, told))


def test_ranks_with_the_same_settings_start(connect: Connect) -> None:
    assert verdicts(connect, {rank: dict(SAME) for rank in range(3)}, 3) == ["", "", ""]


def test_every_rank_names_what_differs(connect: Connect) -> None:
    """Also a setting that another release does not have."""
    told = {0: SAME, 1: {**SAME, "kv_eviction.budget": "0.2"}, 2: {"vLLM": "0.32.0", "new": "1"}}
    found = verdicts(connect, told, 3)
    assert len(set(found)) == 1
    assert_says(
        found[0],
        "kv_eviction.budget is 0.2 on rank 1 of 3 and 0.1 on rank 0; kv_eviction.budget is unknown "
        "on rank 2 of 3 and 0.1 on rank 0; new is 1 on rank 2 of 3 and unknown on rank 0: start "
        "every node with the same flags",
    )


def test_a_silent_rank_is_named_after_the_timeout(connect: Connect) -> None:
    """A stock worker joins the process group and writes nothing."""
    begin = time.monotonic()
    found = verdicts(connect, {0: SAME, 2: SAME}, 3, seconds=1)
    assert 1 <= time.monotonic() - begin < 1 + peers.LINGER_SECONDS
    assert len(set(found)) == 1
    assert_says(found[0], "rank 1 of 3 did not say within 1 s ... without the flag ... same flags")


def test_the_store_lives_until_others_have_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's process has the store; another rank may be slow to find the difference."""
    main = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", main.port, is_master=False, wait_for_workers=False)
    other.set("kv_eviction/settings/1", '{"vLLM": "0.33.0"}')
    monkeypatch.setattr(peers, "LINGER_SECONDS", 30.0)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(peers.check_peers, main, 0, 2, SAME)
        other.wait(["kv_eviction/settings/0/read"], timedelta(seconds=10))
        time.sleep(0.2)
        assert not first.done()
        other.set("kv_eviction/settings/1/read", "")
        with pytest.raises(EvictionConfigError, match=r"vLLM is 0\.33\.0 on rank 1"):
            first.result(10)


def test_a_single_worker_asks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_get_default_store", None)
    assert not torch.distributed.is_initialized()
    peers.check_world(lambda: pytest.fail("no one reads the settings"))


def config(block_size: int = 32, **eviction: Any) -> Any:
    cache = SimpleNamespace(block_size=block_size, cache_dtype="auto")
    return SimpleNamespace(cache_config=cache, additional_config={CONFIG_KEY: eviction})


def test_settings_are_named_as_users_write_them() -> None:
    decode = {"schedule": [[8, 0.3], [32, 0.1]]}
    found = digest.settings_of_worker(
        config(policy="mine", methods={"mine": {"base": "snapkv"}}, decode=decode, sinks=7)
    )
    wanted = {
        "--block-size": "32",
        "kv_eviction.policy": "mine",
        "kv_eviction.budget": "0.3",
        "kv_eviction.sinks": "7",
        "kv_eviction.when": "always",
        "kv_eviction.methods.mine.base": "snapkv",
        "kv_eviction.decode.on_request": "False",
        "kv_eviction.recall": "None",
    }
    assert wanted.items() <= found.items()
    assert "0.1" in found["kv_eviction.decode.schedule"]
    assert {"vLLM", "vllm-tgvkv"} < found.keys()
    assert digest.digest(found) == digest.digest(dict(reversed(found.items())))
    assert digest.digest(found) != digest.digest({**found, "kv_eviction.sinks": "4"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget", 0.2),
        ("observation_window", 64),
        ("decode", {"max_tokens": 512}),
        ("recall", {"gib": 0.1}),
        ("debug", {"poison": True}),
        ("block_size", 16),
    ],
)
def test_every_setting_counts(name: str, value: Any) -> None:
    same = {"policy": "reach", "when": "always"}
    one = digest.settings_of_worker(config(**same))
    other = digest.settings_of_worker(config(**{**same, name: value}))
    changed = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    assert changed
    assert all(name.replace("_", "-") in key or name in key for key in changed), changed


def test_files_count_by_their_content(tmp_path: Path) -> None:
    """Nodes may have them in other folders."""
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = tmp_path / name
        torch.manual_seed(seed)
        write_gates(folder, "rg", 2, 64, 2)
        scores = folder / "scores.json"
        write(scores, "tiny", 2, torch.rand(2, 4).tolist(), {})
        of_gates = digest.settings_of_worker(config(policy="trimkv", gates=str(folder)))
        of_scores = digest.settings_of_worker(
            config(policy="sparsemm", head_scores=str(scores), defaults_file=f"{folder}/d.json")
        )
        digests.append((digest.digest(of_gates), digest.digest(of_scores)))
    assert digests[0] == digests[1]
    assert all(one != other for one, other in zip(digests[0], digests[2], strict=True))
