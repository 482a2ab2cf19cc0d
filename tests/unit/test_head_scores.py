# SPDX-License-Identifier: Apache-2.0
"""Files of head scores: what is refused and how, and what a server does with them."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.inputs import head_scores
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
    ("changes", "words"),
    [
        ({"scores": None}, "scores is no list"),
        ({"scores": []}, "scores is no list"),
        ({"scores": [SCORES[0], 3]}, "scores is no list"),
        ({"scores": [SCORES[0], [1, 2]]}, "layer 1 has 2 scores; each layer needs the same mult"),
        ({"kv_heads": 3}, r"layer 0 has 4 scores; .* multiple of kv_heads \(3\)"),
        ({"kv_heads": 0}, "kv_heads no whole number"),
        ({"kv_heads": True}, "kv_heads no whole number"),
        ({"model": 3}, "model is no text"),
        ({"scores": [[1, math.nan]]}, "score of layer 0, head 1 is nan, no finite number"),
        ({"scores": [[1, 1], [math.inf, 1]]}, "score of layer 1, head 0 is inf"),
        ({"scores": [[1, -0.5]]}, "score of layer 0, head 1 is -0.5"),
        ({"scores": [[1, "2"]]}, "score of layer 0, head 1 is '2'"),
        ({"scores": [[0, 0.0]]}, "all scores are 0"),
    ],
)
def test_wrong_content_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = saved(tmp_path, **changes)
    with pytest.raises(EvictionConfigError, match=words) as caught:
        EvictionConfig.from_mapping({"policy": "sparsemm", "head_scores": path})
    message = str(caught.value)
    assert message.startswith(f"kv_eviction.head_scores is {path!r}: ")
    assert message.endswith(f"; make it again with {COMMAND}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"), [("[1, 2]", "no mapping"), ("{", "not valid JSON"), ("\xff", "not valid")]
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "scores.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(EvictionConfigError, match=words):
        EvictionConfig.from_mapping({"head_scores": str(file)})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    with pytest.raises(
        EvictionConfigError, match=r"cannot be read .*; make it with python -m vllm"
    ):
        EvictionConfig.from_mapping({"policy": "tgv", "head_scores": path})
    with pytest.raises(EvictionConfigError, match="cannot be read"):
        EvictionConfig.from_mapping({"head_scores": str(tmp_path)})
    for value in ("scores.json", 3, f"{path}\0"):
        with pytest.raises(EvictionConfigError, match="give the absolute path of a file"):
            EvictionConfig.from_mapping({"head_scores": value})


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (3, 4), (3, 1)])
def test_scores_of_another_model_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    found = HeadScores.read(saved(tmp_path), "here")
    with pytest.raises(EvictionConfigError) as caught:
        found.check_model(*shape)
    message = str(caught.value)
    assert "made for 'a model' with 3 layers of 2 KV heads" in message
    assert f"this model has {shape[0]} layers of {shape[1]}: make a file for it" in message


def test_sparsemm_needs_a_file(tmp_path: Path) -> None:
    """At start, in a mix and in a request; with the file it is a method like all others."""
    mix = {"mine": {"base": "tgv", "allocation": "sparsemm"}}
    for values in ({"policy": "sparsemm"}, {"methods": mix}):
        with pytest.raises(EvictionConfigError, match="goes by a file of head scores: make one"):
            EvictionConfig.from_mapping(values)
    plain = EvictionConfig.from_mapping({"policy": "tgv"})
    with pytest.raises(EvictionConfigError, match=r"'sparsemm'.* set head_scores to it"):
        RequestOptions.resolve(plain, {"kv_eviction": "sparsemm"})
    values = {"policy": "tgv", "head_scores": saved(tmp_path), "methods": mix}
    config = EvictionConfig.from_mapping(values)
    assert EvictionConfig.from_mapping(values) == config
    assert set(config.method_names) - set(plain.method_names) == {"sparsemm", "mine"}
    for name in ("sparsemm", "mine"):
        assert RequestOptions.resolve(config, {"kv_eviction": name}).policy == name
