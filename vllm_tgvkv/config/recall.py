# SPDX-License-Identifier: Apache-2.0
"""The setting `recall`: how evicted tokens come back, and what they leave behind until then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm_tgvkv.config.settings import absolute_path, setting
from vllm_tgvkv.kernels.sketch import BITS, sketch_bytes
from vllm_tgvkv.shared.errors import EvictionConfigError, quoted
from vllm_tgvkv.shared.layer_types import evicted_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec

_LARGEST_GIB = 2**20


def _parse_gib(value: Any, source: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _LARGEST_GIB:
        raise EvictionConfigError(
            f"{source} is {quoted(value)}: give a number above 0, at most {_LARGEST_GIB}"
        )
    return float(value)


def _parse_bits(value: Any, source: str) -> int:
    if isinstance(value, bool) or value not in BITS:
        known = " or ".join(map(str, BITS))
        raise EvictionConfigError(f"{source} is {quoted(value)}: give {known}")
    return int(value)


def _parse_folder(value: Any, source: str) -> str:
    return absolute_path(value, source, "folder")


@dataclass(frozen=True)
class RecallOptions:
    """Recall: while an answer grows, its kept tokens are chosen again out of the whole prompt.

    Raises:
        ValueError: unless `folder` is given with the tier `file`, and with no other.
    """

    every: int = setting(3, at_least=1, help="Tokens of the answer between two choices.")
    sketch: int = setting(
        4,
        parser=_parse_bits,
        accepts="`1`, `2`, `4`, `8`",
        help="Bits of a number in the sketch of the prompt's keys, by which tokens are found. It "
        "is held in the pool, beside the budget.",
    )
    tier: Literal["memory", "file"] = setting(
        "memory",
        help="Where the prompt's keys and values lie until they are recalled. On a CPU the pool is "
        "memory as well, so that only `file` saves some.",
    )
    gib: float = setting(
        4.0,
        parser=_parse_gib,
        accepts="number above 0",
        help="Size of the tier in GiB, of all workers of an engine together.",
    )
    folder: str | None = setting(
        None,
        parser=_parse_folder,
        accepts="absolute path",
        help="Folder of the file, with tier `file`. It has no name, and goes with the server.",
    )

    def __post_init__(self) -> None:
        if (self.tier == "file") != (self.folder is not None):
            raise ValueError("give folder with tier: file, and with no other")

    def num_sketch_blocks(self, num_tokens: int, spec: FullAttentionSpec) -> int:
        """Return the blocks of the pool that hold the sketch of some tokens of a prompt."""
        page = spec.unpadded_page_size_bytes // spec.num_kv_heads
        return -(-sketch_bytes(num_tokens, spec.head_size, self.sketch) // page)

    def num_tier_blocks(self, vllm_config: VllmConfig, spec: FullAttentionSpec) -> int:
        """Return the blocks of the tier, the same number on all workers and in the scheduler.

        A block has the tokens of a block of the pool, in all layers and heads of a worker. With
        several stages, all count as many layers as the largest.
        """
        from vllm.distributed.utils import get_pp_indices  # takes seconds, and settings need none

        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        num_stages, num_layers = parallel.pipeline_parallel_size, evicted_layers(model)
        if num_stages > 1:
            num_hidden = model.get_total_num_hidden_layers()
            stages = (get_pp_indices(num_hidden, stage, num_stages) for stage in range(num_stages))
            num_layers = num_stages * max(end - start for start, end in stages)
        num_bytes = spec.unpadded_page_size_bytes * num_layers * parallel.tensor_parallel_size
        return int(self.gib * 2**30) // num_bytes
