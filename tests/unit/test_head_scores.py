# SPDX-License-Identifier: Apache-2.0
"""Files of head scores: what is refused and how, and what a server does with them."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.inputs import assert_says, head_scores
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies.head_scores import COMMAND, HeadScores, write
from vllm_tgvkv.shared.errors import EvictionConfigError

SCORES = [[0.5, 0.25, 0, 1], [0, 0, 2, 0.125], [1, 1, 0, 0]]
VALUES: dict[str, Any] = {"model": "a model", "kv_heads": 2, "scores": SCORES, "made": {"pages": 3}}


def saved(path: Path, **changes: Any) -> str:
    file = path / "scores.json"
    file.write_text(json.dumps({**VALUES, **changes}), encoding="utf-8")
    return str(file)


def test_query_heads_of_a_kv_head_are_added(tmp_path: Path) -> None:
    found = HeadScores.read(saved(tmp_path), "here")
    assert (found.model, found.kv_heads, len(found.scores)) == ("a model", 2, 3)
    assert found.of_kv_heads == [[0.75, 1], [0, 2.125], [2, 0]]
    found.check_model(3, 2)
    assert pickle.loads(pickle.dumps(found)) == found


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    wanted = head_scores(4, 3, 2)
    file = tmp_path / "scores.json"
    write(file, wanted.model, 3, wanted.scores, {"pages": 7, "versions": {"torch": "2"}})
    assert HeadScores.read(str(file), "here").scores == wanted.scores
    assert json.loads(file.read_text(encoding="utf-8"))["made"]["pages"] == 7
    with pytest.raises(ValueError, match="all scores are 0"):
        write(file, "a model", 1, [[0.0]], {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"scores": value}, "scores is no list") for value in (None, [], [SCORES[0], 3])),
        ({"scores": [SCORES[0], [1, 2]]}, "layer 1 has 2 scores; each layer needs the same mult"),
        ({"kv_heads": 3}, "layer 0 has 4 scores; ... multiple of kv_heads (3)"),
        *(({"kv_heads": value}, "kv_heads no whole number") for value in (0, True)),
        ({"model": 3}, "model is no text"),
        ({"scores": [[1, math.nan]]}, "score of layer 0, head 1 is nan, no finite number"),
        ({"scores": [[1, 1], [math.inf, 1]]}, "score of layer 1, head 0 is inf"),
        ({"scores": [[1, -0.5]]}, "score of layer 0, head 1 is -0.5"),
        ({"scores": [[1, "2"]]}, "score of layer 0, head 1 is '2'"),
        ({"scores": [[0, 0.0]]}, "all scores are 0"),
        (b"[1, 2]", "no mapping"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid"),
    ],
)
def test_wrong_content_is_refused(tmp_path: Path, changes: Any, said: str) -> None:
    path = str(tmp_path / "scores.json")
    if isinstance(changes, bytes):
        Path(path).write_bytes(changes)
    else:
        path = saved(tmp_path, **changes)
    with pytest.raises(EvictionConfigError) as caught:
        EvictionConfig.from_mapping({"policy": "sparsemm", "head_scores": path})
    again = "" if isinstance(changes, bytes) else f"; make it again with {COMMAND}"
    assert_says(str(caught.value), f"kv_eviction.head_scores is {path!r}: ... {said} ... {again}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    for value, said in (
        (path, "cannot be read ...; make it with python -m vllm"),
        (str(tmp_path), "cannot be read"),
        *((wrong, "give the absolute path of a file") for wrong in ("a.json", 3, f"{path}\0")),
    ):
        with pytest.raises(EvictionConfigError) as caught:
            EvictionConfig.from_mapping({"head_scores": value})
        assert_says(str(caught.value), said)


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (3, 4), (3, 1)])
def test_scores_of_another_model_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    found = HeadScores.read(saved(tmp_path), "here")
    with pytest.raises(EvictionConfigError) as caught:
        found.check_model(*shape)
    assert_says(
        str(caught.value),
        "made for 'a model' with 3 layers of 2 KV heads ... this model has "
        f"{shape[0]} layers of {shape[1]}: make a file for it",
    )


def test_sparsemm_needs_a_file(tmp_path: Path) -> None:
    """At start and in a mix; with the file it is a method like all others."""
    mix = {"mine": {"base": "tgv", "allocation": "sparsemm"}}
    for values in ({"policy": "sparsemm"}, {"methods": mix}):
        with pytest.raises(EvictionConfigError, match="goes by a file of head scores: make one"):
            EvictionConfig.from_mapping(values)
    plain = EvictionConfig.from_mapping({"policy": "tgv"})
    values = {"policy": "tgv", "head_scores": saved(tmp_path), "methods": mix}
    config = EvictionConfig.from_mapping(values)
    assert EvictionConfig.from_mapping(values) == config
    assert set(config.method_names) - set(plain.method_names) == {"sparsemm", "mine"}
    for name in ("sparsemm", "mine"):
        assert RequestOptions.resolve(config, {"kv_eviction": name}).policy == name
