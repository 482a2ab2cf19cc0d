# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU that eviction takes outside the pool, in bytes by name.

vLLM gives all memory that its own trial run leaves to the pool. What eviction takes on top is
computed here and subtracted first. `docs/design.md` has the formulas as a table. Gates are not
here: their weights and buffers are allocated with the model, and vLLM has counted them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.config.recall import RecallOptions
from vllm_tgvkv.config.server import NONE, EvictionConfig
from vllm_tgvkv.kernels.importance import WINDOW
from vllm_tgvkv.kernels.merge import WORKSPACE_BYTES as MERGING_BYTES
from vllm_tgvkv.kernels.redundancy import BYTES_PER_ENTRY as REDUNDANCY_BYTES
from vllm_tgvkv.kernels.select import KEY_BYTES as RANKING_BYTES
from vllm_tgvkv.kernels.sketch import sketch_bytes
from vllm_tgvkv.kernels.statistics import (
    KEY_STATISTICS,
    bytes_of_keys,
    bytes_of_similarities,
)
from vllm_tgvkv.policies import Policy
from vllm_tgvkv.recall.tier import staging_bytes
from vllm_tgvkv.shared.prompt import CHOICE_ROWS
from vllm_tgvkv.summaries.blocks import bytes_of_writing
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.recaller import layers_at_once, logits_bytes
from vllm_tgvkv.worker.region_writer import SLOT_BYTES

_TABLE_BYTES = 64 << 20
"""Page tables of several layers, see `attention/cuda.py`."""

_DECODE_PROGRAMS = 2048
"""More than any GPU runs of the Triton decode kernel at once."""

_PARTIAL_SUMS = 4 << 20
"""Partial sums of the programs of the statistics."""


_BYTES_OF_CHOICE = 64
"""For each token and pair, while the tokens that come and go are found."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a server, as far as memory depends on them."""

    shape: CacheShape
    element_bytes: int
    """Bytes of an element of a query."""
    max_tokens: int
    """Tokens of the longest request, `--max-model-len`."""
    step_tokens: int
    """Most tokens of a step, `--max-num-batched-tokens`."""
    max_rows: int
    """Most decode rows of a step, in a graph or not."""
    table_width: int
    """Entries of a row of the block table."""
    workspace_bytes: int
    """Bound of each buffer of the statistics."""
    pool_tokens: int
    """Most tokens that the pool may have room for."""
    ranks: Ranks = field(default_factory=Ranks)
    """The tensor-parallel ranks."""
    split_sequences: int = 0
    """Most sequences of a launch of FlashAttention 3 that splits them, times the splits of each."""
    row_tokens: int = 1
    """Most tokens of a decode row, with its drafts."""

    @property
    def most_kept(self) -> int:
        """Most tokens that an eviction keeps: the pool holds them and the prompt together."""
        return min(self.max_tokens, self.pool_tokens // 2)


@dataclass(frozen=True)
class Memory:
    """Memory outside the pool."""

    lines: Mapping[str, int]
    """Bytes by name."""
    block_bytes: int
    """Bytes for every block of the pool."""
    method: str
    """The method whose evictions take most, for which the lines are."""

    @property
    def num_bytes(self) -> int:
        """Bytes without those that depend on the pool."""
        return sum(self.lines.values())

    def left_for_pool(self, available: int, pool_block_bytes: int) -> int:
        """Return the bytes of `available` that the pool may have; blocks take `pool_block_bytes`.

        Negative if there is less memory than the lines need.
        """
        left = available - self.num_bytes
        return left * pool_block_bytes // (pool_block_bytes + self.block_bytes)

    def __str__(self) -> str:
        lines = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in self.lines.items())
        return (
            f"{self.num_bytes / 2**20:.0f} MiB outside the pool ({lines}; most for {self.method}), "
            f"and {self.block_bytes} bytes per block"
        )


def memory_outside_pool(config: EvictionConfig, sizes: Sizes) -> Memory:
    """Return the memory that the server's evictions and compressed requests take.

    It is enough for any method that a request may name, and for requests that are evicted in the
    same step with `Sizes.max_tokens` plus `Sizes.step_tokens` tokens together. The scheduler lets
    others wait for the next step, and counts tokens twice where budgets `auto` take more than this.

    To set aside memory for something else, add a line here and to the table of `docs/design.md`.
    """
    shape = sizes.shape
    policies = [config.build_policy(name) for name in config.method_names if name != NONE]
    methods = {policy.name: _of_method(config, policy, sizes) for policy in policies}
    method = max(methods, key=lambda name: sum(methods[name].values()))
    # The state of a region; of each key its position, if regions are cut again, its gate's output,
    # and its score.
    of_keys = config.keeps_positions + (config.gates is not None) + config.carries_scores
    of_block = 4 * (shape.num_pairs + 4 + of_keys * shape.num_pairs * shape.block_size)
    of_block += 4 * config.carries_scores  # how many tokens of a region have scores
    lines = {**_of_server(config, sizes), **_of_recall(config, sizes), **methods[method]}
    return Memory(lines, of_block, method)


def _of_server(config: EvictionConfig, sizes: Sizes) -> dict[str, int]:
    """Return what is kept for all steps: by the decode kernel and the query pool."""
    shape = sizes.shape
    query = shape.num_pairs * shape.group_size * shape.head_size * sizes.element_bytes
    row_tokens = sizes.row_tokens
    destinations = 8 * sizes.max_rows * row_tokens if config.waits else 0
    lines = {"query pool": (config.num_query_rows + 1) * query + destinations}
    sequences = sizes.max_rows * shape.num_heads
    lengths = 4 * shape.num_layers * sequences
    if config.decode_kernel == "triton":
        of_program = 8 * row_tokens * shape.group_size * (shape.head_size + 2)
        of_program += 4 * shape.num_layers
        work = 4 * shape.num_layers * (sequences + 1) + _DECODE_PROGRAMS * of_program
        work += 4 * (sizes.max_rows + 1)
        return {"lengths": lengths, "division of work": work, **lines}
    of_row = 4 * shape.num_heads * sizes.table_width
    tables = max(of_row, min(shape.num_layers * sizes.max_rows * of_row, _TABLE_BYTES))
    # Every split of a sequence has an output in float32 and a logarithm, before they are added.
    partial = 4 * sizes.split_sequences * row_tokens * shape.group_size * (shape.head_size + 1)
    lengths += 4 * (sequences + 1)
    if row_tokens > 1:
        # Starts and places of the queries of this step, and of any as a graph. Then queries and
        # outputs of a layer in that order, and sums, which a layer with sinks puts in order again.
        in_order = shape.group_size * (shape.head_size * (sizes.element_bytes + 2) + 8)
        of_rows = 8 * (sequences + 1) + sequences * row_tokens * (16 + in_order)
        lines["drafts"] = of_rows
    return {"lengths": lengths, "page tables": tables, "partial outputs": partial, **lines}


def _of_recall(config: EvictionConfig, sizes: Sizes) -> dict[str, int]:
    """Return what recall keeps for all steps."""
    recall, shape = config.recall, sizes.shape
    if recall is None:
        return {}
    slot_bytes = 2 * shape.head_size * sizes.element_bytes
    # Votes of every token in the tier, and positions of those of them that are kept.
    numbers = -(-CHOICE_ROWS // recall.every) + 1
    return {
        "votes": 4 * numbers * (int(recall.gib * 2**30) // slot_bytes),
        "way to the tier": staging_bytes(shape.num_pairs * shape.block_size * slot_bytes),
    }


def _of_choice(recall: RecallOptions, policy: Policy, sizes: Sizes) -> int:
    """Return what choosing tokens of one row again takes, with a budget of 1."""
    shape, tokens = sizes.shape, sizes.max_tokens
    rows = min(CHOICE_ROWS, recall.every)
    num_layers = layers_at_once(shape, recall.sketch, rows, tokens, sizes.workspace_bytes)
    # Logits and a buffer as large, and of each head its scores, and the sketch or the newest keys.
    scores = shape.num_heads * tokens * policy.scoring_bytes(rows, shape.group_size)
    sketch = shape.num_heads * sketch_bytes(tokens, shape.head_size, recall.sketch)
    of_layer = 2 * logits_bytes(shape, rows, tokens) + scores + sketch
    newest = 2 * sizes.workspace_bytes
    return num_layers * of_layer + newest + _BYTES_OF_CHOICE * shape.num_pairs * tokens


def _of_method(config: EvictionConfig, policy: Policy, sizes: Sizes) -> dict[str, int]:
    """Return what the prompts that one method evicts take."""
    shape, tokens = sizes.shape, sizes.max_tokens
    num_sets = shape.num_heads if policy.granularity == "head" else 1
    scores = 4 * shape.num_layers * num_sets  # of one token
    together = tokens + sizes.step_tokens
    attends = policy.score.rows != "none"
    guarded = scores if attends and not config.auto_weight(policy) > 1 else 0
    tables = 4 * shape.num_pairs * -(-together // shape.block_size)
    lines = {
        "scores": scores * together,
        "masses": guarded * together,
        # Scores, or masses, take the place of one number of each token.
        "column sums": scores * together if "modality_sums" in policy.statistics("all") else 0,
        "page numbers": tables * (2 if "all" in policy.row_sets else 1),
        "statistics": _of_statistics(config, policy, sizes, num_sets),
    }
    # Of one prompt at a time, one after the other:
    num_parts = sizes.ranks.num_parts if policy.granularity == "head" else 1
    of_part = (scores + guarded) * tokens
    stacked = of_part * num_parts if num_parts > 1 else 0
    # This rank's tensors side by side, all ranks' as they arrive, and all in the order of the
    # heads, where one of them is copied after the other.
    gathered = of_part * (2 + sizes.ranks.size + num_parts) if num_parts > 1 else 0
    # Ranking keys, slice by slice, while the pages of every head are found.
    choice = policy.allocation.bytes_per_score * shape.num_layers * num_sets * num_parts * tokens
    choice += 6 * _key_slice(sizes, num_sets * num_parts)
    work = max(
        _of_scoring(config, policy, sizes, num_sets) + _of_shared(policy, sizes, num_sets),
        gathered,
        stacked + choice,
        stacked + _of_copy(config, policy, sizes, num_sets),
        stacked + (bytes_of_writing(shape, tokens) if policy.summaries is not None else 0),
    )
    if config.recall is not None:
        work = max(work, _of_choice(config.recall, policy, sizes))
    work += 16 * tokens  # which of them are vision, tiers and places, for all heads
    if config.keeps_positions:  # columns of a compressed request, see `RaggedKeys`
        work += 4 * shape.num_pairs * tokens
    return {**lines, "work": work}


def _of_statistics(config: EvictionConfig, policy: Policy, sizes: Sizes, num_sets: int) -> int:
    """Return the scratch buffers of the statistics, which live until the next step."""
    shape, tokens = sizes.shape, sizes.max_tokens
    num_rows = config.num_query_rows
    if "all" in policy.row_sets:
        num_rows = max(num_rows, min(sizes.step_tokens, tokens))
    queried = {name for kind in policy.row_sets for name in policy.statistics(kind)}
    waits = policy.scores_layers_together and policy.row_sets != ("all",)
    num_layers = shape.num_layers if waits else 1
    # Rows of a layer, times the layers at once, whose queries fit a workspace.
    of_batch = min(num_layers * config.num_query_rows, sizes.workspace_bytes // _query_bytes(sizes))
    scratch = _PARTIAL_SUMS + 16 * max(num_rows, of_batch) * shape.num_heads * shape.group_size
    averages = 4 * num_sets * num_rows * (tokens + 128)  # of a layer
    if "row_averages" in queried:
        scratch += min(sizes.workspace_bytes, num_layers * averages)
    if "row_entropies" in queried:
        scratch += _of_layers(averages, policy, sizes) // 64
    return scratch


def _query_bytes(sizes: Sizes) -> int:
    """Return the bytes of the queries of a token in one layer."""
    shape = sizes.shape
    return shape.num_heads * shape.group_size * shape.head_size * sizes.element_bytes


def _of_scoring(config: EvictionConfig, policy: Policy, sizes: Sizes, num_sets: int) -> int:
    """Return what queries and scores take while layers are scored, some numbers for each token.

    Either one layer of the longest prompt is scored at a time, or several of a shorter one, whose
    queries and scores then fit a workspace each.
    """
    shape, workspace = sizes.shape, sizes.workspace_bytes
    queried = {name for kind in policy.row_sets for name in policy.statistics(kind)}
    of_layer = config.num_query_rows * _query_bytes(sizes)
    query_heads = shape.num_heads * shape.group_size // num_sets
    scores = policy.scoring_bytes(0, query_heads) * num_sets * sizes.max_tokens
    # Rows of one of several sets are copied.
    num_copies = 1 + (len(policy.row_sets) > 1)
    keys, several_keys = 0, 0
    if KEY_STATISTICS & queried:
        # What they return, of a compressed row by column and by position.
        num_found = 8 if config.keeps_positions else 4
        found = 4 * num_found * num_sets * sizes.max_tokens
        keys = found + _of_keys(sizes, "key_redundancy" in queried)
        several_keys = min(workspace * found // scores, shape.num_layers * found)
        several_keys += workspace + bytes_of_similarities(0, workspace)
    one = num_copies * of_layer + max(scores, keys)
    if not policy.scores_layers_together:
        return one
    several = min(workspace, shape.num_layers * of_layer) * num_copies
    several += max(min(workspace, shape.num_layers * scores), several_keys)
    waiting = 0
    if policy.row_sets != ("all",):  # the queries of all prompts
        waiting = min(workspace, shape.num_layers * sizes.step_tokens * _query_bytes(sizes))
    return waiting + max(one, several)


def _of_layers(of_layer: int, policy: Policy, sizes: Sizes) -> int:
    """Return the bytes of all layers that are scored together, where one takes `of_layer`."""
    num_layers = sizes.shape.num_layers if policy.scores_layers_together else 1
    return max(of_layer, min(sizes.workspace_bytes, num_layers * of_layer))


def _of_shared(policy: Policy, sizes: Sizes, num_sets: int) -> int:
    """Return what ranks exchange of the statistics of token sets that they share.

    The numbers of this rank, of all ranks, and their means, which stay while layers are scored.
    """
    if not sizes.ranks.shares_sets(policy.granularity == "head") or not policy.row_sets:
        return 0
    of_layer = 8 * num_sets * (sizes.max_tokens + 128)
    return (2 + sizes.ranks.size + len(policy.row_sets)) * _of_layers(of_layer, policy, sizes)


def _of_keys(sizes: Sizes, all_similarities: bool) -> int:
    """Return what the keys of some heads take, with their similarities and the window's logits."""
    shape, tokens = sizes.shape, sizes.max_tokens
    of_head = bytes_of_keys(tokens, shape.head_size, sizes.element_bytes)
    num_heads = min(max(1, sizes.workspace_bytes // of_head), shape.num_pairs)
    if not all_similarities:
        return num_heads * of_head
    row_bytes = REDUNDANCY_BYTES * num_heads * tokens
    rows = max(1, bytes_of_similarities(of_head, sizes.workspace_bytes) // row_bytes)
    similarities = min(rows, tokens) * row_bytes
    logits = 4 * WINDOW * (shape.group_size + 2) * num_heads * tokens
    return num_heads * of_head + max(similarities, logits)


def _of_copy(config: EvictionConfig, policy: Policy, sizes: Sizes, num_sets: int) -> int:
    """Return what kept positions and their copy take."""
    shape, tokens = sizes.shape, sizes.max_tokens
    positions = 4 * shape.num_pairs * sizes.most_kept
    slots = min(SLOT_BYTES, 8 * shape.num_pairs * sizes.most_kept)
    # Bytes of all tokens in all sets: tiers, and where some are gone raised ones, and which.
    by_number = policy.retention.is_by_number
    num_bytes = by_number + 2 * config.keeps_positions
    tiers = num_bytes * shape.num_layers * num_sets * tokens
    if by_number:
        tiers += 3 * _key_slice(sizes, num_sets) // 2
    merging = 0
    if policy.merge:
        most = max(MERGING_BYTES, 4 * tokens)  # one number of each candidate is the least
        merging = 5 * min(most, shape.num_pairs * 4 * shape.head_size * tokens) + 64 * tokens
    return positions + max(tiers, slots, merging)


def _key_slice(sizes: Sizes, num_sets: int) -> int:
    """Return the most bytes of ranking keys that exist at a time, see `key_slices`."""
    of_layer = 8 * num_sets * sizes.max_tokens
    return min(max(RANKING_BYTES, of_layer), sizes.shape.num_layers * of_layer)
