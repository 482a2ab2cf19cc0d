# SPDX-License-Identifier: Apache-2.0
"""Files of head scores: how much each attention head of a model looks at what the model reads.

A file is JSON:

    {"model": "llava-1.5-7b", "kv_heads": 32, "scores": [[0.01, ...], ...], "made": {...}}

`scores` has a list for each layer with a number for each query head. `made` holds facts of how the
file was made; nothing reads them. `python -m vllm_tgvkv.visual_heads` writes such files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tgvkv.shared.errors import EvictionConfigError, quoted

COMMAND = "python -m vllm_tgvkv.visual_heads MODEL --output FILE"
"""Makes a file."""


@dataclass(frozen=True)
class HeadScores:
    """The head scores of one model."""

    path: str
    model: str
    kv_heads: int
    scores: tuple[tuple[float, ...], ...]
    """By layer, a number for each query head."""

    @classmethod
    def read(cls, path: str, source: str) -> HeadScores:
        """Read a file and check it; `source` names its setting in error messages.

        Raises:
            EvictionConfigError: if it cannot be read, has another form, or scores that are no
                numbers, negative, infinite or all zero.
        """
        where = f"{source} is {quoted(path)}"
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise EvictionConfigError(
                f"{where}: cannot be read ({error.strerror}); make it with {COMMAND}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise EvictionConfigError(
                f"{where}: not valid JSON ({error}); make it with {COMMAND}"
            ) from error
        problem = _problem(values)
        if problem is not None:
            raise EvictionConfigError(f"{where}: {problem}; make it again with {COMMAND}")
        scores = tuple(tuple(float(score) for score in layer) for layer in values["scores"])
        return cls(path, values["model"], values["kv_heads"], scores)

    @property
    def of_kv_heads(self) -> list[list[float]]:
        """By layer, a number for each KV head: the sum over its query heads."""
        group = len(self.scores[0]) // self.kv_heads
        return [
            [math.fsum(layer[start : start + group]) for start in range(0, len(layer), group)]
            for layer in self.scores
        ]

    def check_model(self, layers: int, kv_heads: int) -> None:
        """Check that the scores belong to a model of this shape.

        Raises:
            EvictionConfigError: if they are not.
        """
        if (len(self.scores), self.kv_heads) != (layers, kv_heads):
            raise EvictionConfigError(
                f"kv_eviction.head_scores is {quoted(self.path)}, made for {quoted(self.model)} "
                f"with {len(self.scores)} layers of {self.kv_heads} KV heads, and this model has "
                f"{layers} layers of {kv_heads}: make a file for it with {COMMAND}"
            )


def write(
    path: Path,
    model: str,
    kv_heads: int,
    scores: Sequence[Sequence[float]],
    made: Mapping[str, Any],
) -> None:
    """Write a file; arguments are its fields.

    Raises:
        ValueError: for fields that could not be read again.
    """
    values = {"model": model, "kv_heads": kv_heads, "scores": scores, "made": made}
    if (problem := _problem(values)) is not None:
        raise ValueError(problem)
    rows = ",\n  ".join(json.dumps(list(layer)) for layer in scores)
    others = json.dumps({"model": model, "kv_heads": kv_heads, "made": made}, indent=1)
    text = f'{others[:-2]},\n "scores": [\n  {rows}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def _problem(values: Any) -> str | None:
    """Return what is wrong with the content of a file; None if nothing is."""
    if not isinstance(values, Mapping) or not {"model", "kv_heads", "scores"} <= values.keys():
        return "it is no mapping with model, kv_heads and scores"
    kv_heads, scores = values["kv_heads"], values["scores"]
    if not isinstance(values["model"], str) or not _is_count(kv_heads):
        return "model is no text, or kv_heads no whole number of at least 1"
    if not _is_list(scores) or not scores or not all(map(_is_list, scores)):
        return "scores is no list of layers, each a list of numbers"
    return _problem_of_layers(scores, kv_heads)


def _problem_of_layers(scores: Sequence[Any], kv_heads: int) -> str | None:
    for number, layer in enumerate(scores):
        if len(layer) != len(scores[0]) or not layer or len(layer) % kv_heads:
            return (
                f"layer {number} has {len(layer)} scores; each layer needs the same multiple of "
                f"kv_heads ({kv_heads})"
            )
        if wrong := [head for head, score in enumerate(layer) if not _is_score(score)]:
            return (
                f"the score of layer {number}, head {wrong[0]} is {quoted(layer[wrong[0]])}, no "
                "finite number of at least 0"
            )
    if not any(score > 0 for layer in scores for score in layer):
        return "all scores are 0, so no head was seen to look at what the model reads"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_score(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= 1e100
