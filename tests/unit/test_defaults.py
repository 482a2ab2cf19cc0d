# SPDX-License-Identifier: Apache-2.0
"""Defaults that change while the server runs, with any writer and any content of the file."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_tgvkv.config.defaults import Defaults, _read
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import EvictionConfigError


def server(path: Path | None, **values: Any) -> EvictionConfig:
    file = {} if path is None else {"defaults_file": str(path)}
    return EvictionConfig.from_mapping({"policy": "tgv", "budget": 0.1, **file, **values})


def test_every_process_sees_a_change(tmp_path: Path) -> None:
    assert Defaults(plain := server(None)).current() is plain
    config = server(tmp_path / "defaults.json", sinks=7)
    one, other = Defaults(config), Defaults(config)
    assert one.current() == other.current() == config
    one.write({"policy": "snapkv", "budget": 0.5})
    found = other.current()
    assert (found.policy, found.budget, found.sinks) == ("snapkv", Budget(fraction=0.5), 7)
    other.write({"budget": "auto:0.9"})
    assert (one.current().policy, str(one.current().budget)[:4]) == ("tgv", "auto")
    one.write({})
    assert other.current() == config
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"defaults.json", ".defaults.json.lock"}


def test_no_change_of_a_part_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers at the same time, as of two processes, that read before either of them writes."""
    config = server(tmp_path / "defaults.json")

    def slow(path: Path) -> Any:
        found = _read(path)
        time.sleep(0.2)
        return found

    Defaults(config).write({"policy": "snapkv"})
    monkeypatch.setattr("vllm_tgvkv.config.defaults._read", slow)
    changes = ({"policy": "none"}, {"budget": 0.3})
    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(Defaults(config).write, change, keep=True) for change in changes]
        for writer in writers:
            writer.result(timeout=30)
    assert _read(tmp_path / "defaults.json") == {"policy": "none", "budget": 0.3}


def test_files_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    for text, expected in (
        ("policy: none\n", ("none", "0.1")),
        ("", ("tgv", "0.1")),
        ("{}", ("tgv", "0.1")),
        ("budget: 512", ("tgv", "512")),
    ):
        path.write_text(text)
        defaults = Defaults(server(path))
        found = defaults.current()
        assert (found.policy, str(found.budget.value)) == expected
        path.unlink()
        assert defaults.current() == defaults.config


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("budget: 7.5", ["budget of", "7.5", "0 < budget <= 1"]),
        ("policy: snap", ["policy of", "'snap'", "none, tgv"]),
        ("{policy: random, budget: 'auto:0.9'}", ["auto", "random"]),
        ("sinks: 4", ["unknown sinks", "policy, budget"]),
        ("- tgv", ["holds ['tgv']", "give a mapping"]),
        ("{", ["cannot be read"]),
        ("\x00", ["cannot be read"]),
    ],
)
def test_a_file_with_mistakes_changes_nothing(
    tmp_path: Path, text: str, parts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text("budget: 0.25")
    defaults = Defaults(server(path))
    assert defaults.current().budget == Budget(fraction=0.25)
    path.write_text(text)
    with caplog.at_level("WARNING", "vllm.tgvkv"):
        for _ in range(3):
            assert defaults.current().budget == Budget(fraction=0.25)
    (record,) = caplog.records  # once, not for each request
    for part in [str(path), *parts]:
        assert part in record.getMessage()
    path.write_text("budget: 0.75")
    assert defaults.current().budget == Budget(fraction=0.75)


def test_wrong_values_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "defaults.json"
    defaults = Defaults(server(path))
    with pytest.raises(EvictionConfigError, match="budget of the request is 0"):
        defaults.write({"budget": 0})
    with pytest.raises(EvictionConfigError, match="text_only is 'evict'"):
        Defaults(server(path, policy="snapkv", text_only="evict")).write({"policy": "tgv"})
    assert not path.exists()
    for wrong in ("relative.yaml", 7, "/no/such/folder/defaults.yaml"):
        with pytest.raises(EvictionConfigError, match=r"kv_eviction\.defaults_file is"):
            EvictionConfig.from_mapping({"policy": "tgv", "defaults_file": wrong})


def test_a_file_that_is_swapped_like_a_mounted_configmap(tmp_path: Path) -> None:
    """Same size and time, another file behind the link."""
    link = tmp_path / "defaults.yaml"
    for name, budget in (("a", 0.2), ("b", 0.3)):
        (tmp_path / name).write_text(json.dumps({"budget": budget}))
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    link.symlink_to(tmp_path / "a")
    defaults = Defaults(server(link))
    assert defaults.current().budget == Budget(fraction=0.2)
    (tmp_path / "new").symlink_to(tmp_path / "b")
    os.replace(tmp_path / "new", link)
    assert defaults.current().budget == Budget(fraction=0.3)
