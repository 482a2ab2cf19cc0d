# SPDX-License-Identifier: Apache-2.0
"""Settings of the server.

Every source fills the same mapping, `additional_config["kv_eviction"]`: the `--kv-eviction*`
flags, or `LLM(additional_config=...)`. vLLM carries it to every process.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from vllm_tgvkv.config.recall import RecallOptions
from vllm_tgvkv.config.removed import refuse_removed
from vllm_tgvkv.config.settings import absolute_path, read, setting
from vllm_tgvkv.gates.folder import Gates
from vllm_tgvkv.kernels.statistics import KEY_STATISTICS
from vllm_tgvkv.policies import Mix, Policy, build_policy, gates_of, has_summaries, method_names
from vllm_tgvkv.policies.head_scores import HeadScores
from vllm_tgvkv.policies.registry import (
    POLICIES,
    SCORES,
    Recipe,
    broken_methods,
    needs_head_scores,
    recipe_of,
)
from vllm_tgvkv.shared.budget import Budget, Schedule, parse_schedule
from vllm_tgvkv.shared.cuts import Ceiling, When
from vllm_tgvkv.shared.errors import EvictionConfigError, choose, quoted
from vllm_tgvkv.shared.prompt import ANSWER_ROWS, WINDOW

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

CONFIG_KEY = "kv_eviction"
"""Key of the mapping in vLLM's `additional_config`."""

_MOST_QUERY_ROWS = 16384
"""Rows of the query pool at most: each takes a query of every layer and head."""

NONE = "none"
"""The policy name that keeps everything."""

PARSE_ERRORS = (ValueError, RecursionError, yaml.YAMLError)
"""Errors that the parsers of JSON and YAML raise: also for a date without such a day, a number of
too many digits, and brackets without an end."""


def _parse_later(value: Any, source: str) -> Any:
    """Return a value that `check_methods` checks, once the mixes are known."""
    return value


def _parse_path(value: Any, source: str) -> str:
    path = absolute_path(value, source, "file")
    if not Path(path).parent.is_dir():
        raise EvictionConfigError(
            f"{source} is {quoted(path)}: its folder does not exist; create it"
        )
    return path


def _parse_head_scores(value: Any, source: str) -> HeadScores:
    return HeadScores.read(_parse_path(value, source), source)


def _parse_gates(value: Any, source: str) -> Gates:
    if isinstance(value, Mapping):
        refuse_removed(value, source)
    return Gates.read(absolute_path(value, source, "folder"), source)


def _parse_methods(values: Any, source: str) -> dict[str, Mix]:
    if not isinstance(values, Mapping):
        raise EvictionConfigError(f"{source} is {quoted(values)}: give a mapping of names to mixes")
    methods = {}
    for name, entry in values.items():
        where = f"{source}.{quoted(name, str)}"
        if not isinstance(name, str) or name in (NONE, *method_names()):
            raise EvictionConfigError(f"{where}: the name is taken or no text; choose another one")
        methods[name] = read(Mix, entry, where)
    return methods


@dataclass(frozen=True)
class DebugOptions:
    """Switches for tests. Each costs time; none changes what is kept."""

    poison: bool = setting(
        False, help="Fill every freed block with NaN, and clear it when it is allocated again."
    )
    check_integrity: bool = setting(
        False, help="Recount every block after each scheduler step, and raise on a mismatch."
    )
    evict_at_full_budget: bool = setting(
        False, help="Evict even if the budget covers the prompt: every page is dealt again."
    )
    record_kept: bool = setting(
        False, help="Remember the kept positions of the last evictions, for `collective_rpc`."
    )


@dataclass(frozen=True)
class DecodeOptions:
    """Evictions after the first one, while the answer grows.

    The last ``ANSWER_ROWS`` tokens of the answer vote at each of them.

    Raises:
        ValueError: unless one of `schedule`, `max_tokens` and `on_request` is given.
    """

    schedule: Schedule = setting(
        (),
        parser=parse_schedule,
        accepts='`[[8, 0.3], [32, 0.1]]` or `"8:0.3,32:0.1"`',
        help="Evict the prompt in steps: pairs of a number of answer tokens and the fraction of "
        "the prompt that is kept from then on. Replaces `defer` and the budget.",
    )
    max_tokens: int | None = setting(
        None,
        at_least=1,
        help="Ceiling: prompt and answer together keep at most this many tokens per KV head, in "
        "whole blocks, and a quarter more, one block at least, until they are cut again.",
    )
    on_request: bool = setting(
        False,
        help="In place of both: only requests that ask for it are evicted again. It takes the same "
        "memory.",
    )

    def __post_init__(self) -> None:
        given = (bool(self.schedule), self.max_tokens is not None, self.on_request)
        if sum(given) != 1:
            raise ValueError("give one of schedule, max_tokens and on_request: true")

    @property
    def cuts_again(self) -> bool:
        """Whether requests are evicted more than once if they do not say otherwise."""
        return bool(self.later) or self.ceiling is not None

    @property
    def later(self) -> Schedule:
        """The schedule without its first step, which is the first eviction."""
        return self.schedule[1:]

    @property
    def ceiling(self) -> Ceiling | None:
        return None if self.max_tokens is None else Ceiling.of(self.max_tokens)


@dataclass(frozen=True)
class Again:
    """Evictions after the first one, for the messages about what they do not go with."""

    happens: bool
    """Whether there are any."""
    source: str
    """The field that asks for them."""
    way_out: str
    """How to have none, for a user."""


@dataclass(frozen=True)
class EvictionConfig:
    """The server's settings. Field names are the keys of `--kv-eviction-config`."""

    policy: str = setting(
        NONE,
        parser=_parse_later,
        accepts="a method, or a name in `methods`",
        help="Method that decides which cache entries of a prompt are kept for decoding. With "
        "`none` vLLM runs as stock.",
        in_status=True,
    )
    budget: Budget | None = setting(
        None,
        parser=Budget.parse,
        accepts="fraction, tokens, or `auto:SHARE`",
        help="Share of the prompt that is kept: a fraction, 0 < budget <= 1; a whole number of "
        "tokens per KV head; or `auto:SHARE`, such as `auto:0.98,min=0.02,max=0.5`: the smallest "
        "fraction that keeps SHARE of the question's attention.",
        unset="the method's own: 0.1, 0.2 with `reach`",
        in_status=True,
    )
    when: When | None = setting(
        None,
        help="`always`: every prompt is evicted, at the end of its prefill or after `defer`. "
        "`pressure`: a prompt is evicted only once requests wait for memory, in stages down to its "
        "budget, and gets everything back when there is room.",
        unset="the method's own: `always`, `pressure` with `reach`; `always` with `decode`",
        in_status=True,
    )
    observation_window: int = setting(
        128,
        at_least=1,
        help="At most this many of the last text tokens after the first image vote on what is "
        "kept.",
        in_status=True,
    )
    defer: int | None = setting(
        None,
        at_least=0,
        help="Number of answer tokens to wait for: the prompt is evicted once they are computed, "
        "and they vote with the method's own rows. Answers that are not longer are never evicted "
        "for. Under pressure: the number of tokens that vote, which are the next ones.",
        unset="the method's own: 0, 4 with `reach`; 4 under pressure",
        in_status=True,
    )
    decode: DecodeOptions | None = setting(
        None,
        accepts="`{schedule: [[8, 0.3], [32, 0.1]]}`, `{max_tokens: 512}` or `{on_request: true}`",
        help="Evictions while the answer grows: of the prompt, in steps, or of prompt and answer, "
        "to stay below a ceiling. On a server that has them, a request may have its own.",
    )
    handover: Literal["whole", "cut"] = setting(
        "whole",
        help="How a prompt travels that another server decodes (`--kv-transfer-config`), under "
        "pressure: `whole`, and it is cut there once memory is short; or `cut` before it travels, "
        "even if there is room. With `when: always` it is always cut before.",
    )
    recall: RecallOptions | None = setting(
        None,
        accepts="`{every: 3, tier: file, folder: /var/tmp, gib: 32, sketch: 4}`",
        help="Let what was evicted come back: while an answer grows, its kept tokens are chosen "
        "again out of the whole prompt.",
    )
    sinks: int = setting(
        4, at_least=0, help="Number of first tokens that are always kept.", in_status=True
    )
    protect: Literal["system", "none"] = setting(
        "none",
        help="`system`: what stands before the first user's message, such as the system prompt and "
        "the descriptions of tools, is kept in every layer and head, within the budget.",
        in_status=True,
    )
    floor_pages: int = setting(
        1,
        at_least=0,
        help="Pages that every (layer, head) gets before the policy's shares count.",
        in_status=True,
    )
    min_prompt_tokens: int = setting(
        128,
        at_least=0,
        help="Shorter prompts pass untouched, unless the answer reaches a ceiling (`decode`).",
        in_status=True,
    )
    text_only: Literal["keep", "evict"] = setting(
        "keep", help="Treatment of prompts without an image or video.", in_status=True
    )
    methods: Mapping[str, Mix] = setting(
        {},
        parser=_parse_methods,
        accepts="`{mine: {base: tgv, score: snapkv, allocation: aircache, retain: by_score}}`",
        help="Mixes of the parts of methods, by name.",
    )
    head_scores: HeadScores | None = setting(
        None,
        parser=_parse_head_scores,
        accepts="absolute path",
        help="File of the model's head scores, for `sparsemm` and its allocation; "
        "`python -m vllm_tgvkv.visual_heads` makes it.",
    )
    gates: Gates | None = setting(
        None,
        parser=_parse_gates,
        accepts="absolute path",
        help="Folder of the model's gates, for `trimkv` and `dbtrimkv` or for `kvzap`, as their "
        "authors publish them.",
    )
    decode_kernel: Literal["auto", "stock", "triton"] = setting(
        "auto",
        help="`stock`: vLLM's attention kernel, with a page table for every head; `triton`: the "
        "plugin's own kernel, which needs no tables (CUDA only; experimental until it has been "
        "measured on a GPU); `auto`: `triton` where vLLM chooses FlashAttention 4 (Blackwell), "
        "which the log says, and else `stock`.",
    )
    max_traces: int = setting(
        32,
        at_least=0,
        help="Number of traces kept for requests that ask for one, of at most 64 MiB together; "
        "with 0 none may ask.",
    )
    defaults_file: str | None = setting(
        None,
        parser=_parse_path,
        accepts="absolute path",
        help="File with `policy` and `budget` of new requests, which may change while the server "
        "runs.",
    )
    debug: DebugOptions = setting(
        DebugOptions(), help="Switches for tests.", accepts="see below", for_tests=True
    )

    @property
    def active(self) -> bool:
        """Whether the server evicts."""
        return self.policy != NONE

    @classmethod
    def from_mapping(
        cls, values: object, policy_source: str = "kv_eviction.policy"
    ) -> EvictionConfig:
        """Build the settings from a mapping, checking every value.

        Args:
            policy_source: the flag or field of the policy, for messages.

        Raises:
            EvictionConfigError: naming the field, its value and what it may be.
        """
        if not isinstance(values, Mapping):
            raise EvictionConfigError(
                f"additional_config[{CONFIG_KEY!r}] is {quoted(values)}: give a mapping such as "
                "{'policy': 'tgv', 'budget': 0.1}"
            )
        config = read(cls, values, "kv_eviction")
        if config.decode is not None and config.decode.schedule:
            if given := sorted({"defer", "budget"} & values.keys()):
                raise EvictionConfigError(
                    f"kv_eviction.{given[0]} is {quoted(values[given[0]])} beside decode.schedule, "
                    "whose first step says when and how much is evicted first: leave it out"
                )
            defer, budget = config.decode.schedule[0]
            config = dataclasses.replace(config, defer=defer, budget=budget)
        if config.when is None:
            again = config.decode is not None and config.decode.cuts_again
            own = "always" if again else config.recipe_of(config.policy).when
            config = dataclasses.replace(config, when=own)
        check_methods(config, policy_source)
        if config.most_deferred < 0:
            raise EvictionConfigError(
                f"kv_eviction.observation_window is {config.observation_window}: give at most "
                f"{_MOST_QUERY_ROWS - WINDOW}"
            )
        config.check_defer(config.first_eviction(config.policy)[1], "kv_eviction.defer")
        return config

    @property
    def waits(self) -> bool:
        """Whether tokens of answers vote, unless a request says otherwise."""
        return self.first_eviction(self.policy)[1] > 0 or self.keeps_positions

    def first_eviction(self, method: Any) -> tuple[Budget, int]:
        """Return the budget and the wait of a method's first eviction, if a request has none.

        They are the server's where it has some, and else those that the method recommends. An
        unknown method, which is refused elsewhere, gets what most methods have.
        """
        own = self.recipe_of(method)
        budget = Budget(fraction=own.budget) if self.budget is None else self.budget
        return budget, own.defer if self.defer is None else self.defer

    def recipe_of(self, method: Any) -> Recipe | type[Recipe]:
        """Return the recipe of a method or of a mix's base; of an unknown one, what most have."""
        mix = self.methods.get(method) if isinstance(method, str) else None
        name = mix.base if mix else method
        return POLICIES[name] if name in method_names() else Recipe

    @property
    def keeps_positions(self) -> bool:
        """Whether there may be evictions after the first one, so that positions are stored."""
        return self.decode is not None or self.when == "pressure" or self.recall is not None

    def least_ceiling(self, block_size: int) -> int:
        """Return the lowest ceiling that leaves every head its floor, in tokens."""
        return max(self.floor_pages, 1) * block_size

    def missed_ceiling(self, block_size: int) -> int | None:
        """Return the lowest ceiling, in tokens, if `decode` has one that is below it; or None."""
        ceiling = self.decode.ceiling if self.decode else None
        least = self.least_ceiling(block_size)
        return least if ceiling is not None and ceiling.max_tokens < least else None

    @property
    def num_answer_rows(self) -> int:
        """Rows of the answer that vote at each eviction after the first, at most."""
        return ANSWER_ROWS if self.keeps_positions else 0

    @property
    def num_query_rows(self) -> int:
        """Rows of the query pool: all of 5 requests that wait, within a bound of memory.

        A request takes one with each token that votes, so that many more wait at a time.
        """
        waits = max(self.defer or 0, ANSWER_ROWS)
        return min(5 * (self.observation_window + WINDOW + waits), _MOST_QUERY_ROWS)

    @property
    def most_deferred(self) -> int:
        """The longest wait whose rows fit the query pool, with all others that a prompt has."""
        return self.num_query_rows - self.observation_window - WINDOW

    def check_defer(self, value: Any, source: str) -> int:
        """Return a wait after checking it; `source` names its flag or field in the message.

        Raises:
            EvictionConfigError: unless it is a whole number whose rows fit the query pool.
        """
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if not is_count or not 0 <= value <= self.most_deferred:
            raise EvictionConfigError(
                f"{source} is {quoted(value)}: give a whole number of answer tokens, at most "
                f"{self.most_deferred}, whose queries the server has room for"
            )
        return int(value)

    def auto_weight(self, policy: Policy) -> int:
        """Return how often a token counts for the memory of a step's evictions, with `auto`.

        Masses take as much as scores. There is memory for the masses of every head only if the
        server's own budget is `auto`.
        """
        is_auto = self.budget is not None and self.budget.is_auto
        return 1 if is_auto or policy.granularity == "layer" else 2

    @property
    def method_names(self) -> tuple[str, ...]:
        """Values of `policy`, and of a request's `kv_eviction`, that this server has."""
        kinds = (None, self.gates.kind if self.gates else None)
        names = (
            name
            for name in method_names()
            if gates_of(name) in kinds
            and (self.head_scores or not needs_head_scores(name))
            and (self.summarises or not has_summaries(name))
        )
        return (NONE, *names, *self.methods)

    @property
    def summarises(self) -> bool:
        """Whether requests may keep summaries: the server's method does, or one of `methods`."""
        return any(recipe.summaries for recipe in self._recipes)

    @property
    def carries_scores(self) -> bool:
        """Whether later cuts may add to the scores of the cut before, which are stored then."""
        accumulate = any(SCORES[recipe.score].accumulates for recipe in self._recipes)
        return self.keeps_positions and accumulate

    @property
    def _recipes(self) -> list[Recipe]:
        """Recipes of the server's method and of `methods`; others neither summarise nor carry."""
        # It is asked for messages about wrong policies, too, which may be of any type.
        named = isinstance(self.policy, str) and self.methods.get(self.policy)
        mixes = (named or Mix(self.policy), *self.methods.values())
        return [recipe_of(mix) for mix in mixes if mix.base in method_names()]

    def build_policy(self, name: str) -> Policy:
        """Build a method's policy.

        Raises:
            EvictionConfigError: for parts that have no meaning together.
        """
        mix = self.methods.get(name) or Mix(name)
        try:
            return build_policy(mix, name, self.head_scores, self.gates)
        except ValueError as error:
            raise EvictionConfigError(f"kv_eviction method {quoted(name)}: {error}") from error


def check_method(
    config: EvictionConfig,
    name: Any,
    budget: Budget,
    defer: int,
    source: str,
    again: Again | None = None,
    when: When | None = None,
    ceiling: bool | None = None,
    recalls: bool | None = None,
) -> str:
    """Return a method's name after checking it against a budget, a wait and later evictions.

    Args:
        source: the flag or field of the method, for messages.
        again: the later evictions; by default, the server's.
        when: by default, the server's.
        ceiling: whether `again` is a ceiling; by default, the server's.
        recalls: whether evicted tokens may come back; by default, as the server says.

    Raises:
        EvictionConfigError: for an unknown method, or one that cannot run with them.
    """
    # A method whose file is missing is refused by `build_policy`, with the way to make it.
    if name not in (*config.method_names, *method_names()):
        why = broken_methods().get(name) if isinstance(name, str) else None
        raise EvictionConfigError(
            f"{source} is {quoted(name)}"
            f"{f', which {why}' if why else ''}: {choose(name, config.method_names)}"
        )
    if name == NONE:
        return NONE
    policy = config.build_policy(name)
    if again is None:
        cuts_again = config.decode is not None and config.decode.cuts_again
        again = Again(cuts_again, "decode", "start the server without decode")
    if recalls is None:
        recalls = config.recall is not None
    if ceiling is None:
        ceiling = config.decode is not None and config.decode.ceiling is not None
    named = f"{source} is {quoted(name)}"
    under_pressure = (when or config.when) == "pressure"
    for problem in itertools.chain(
        _problems_of_summaries(config, policy, named),
        _problems_of_pressure(policy, budget, named, again) if under_pressure else (),
        _problems_of_auto(policy, f"budget auto with {source} {name!r}", again)
        if budget.is_auto
        else (),
        () if under_pressure else _problems_of_cuts(policy, named, defer, again),
        _problems_of_recall(policy, budget, named, ceiling) if recalls else (),
    ):
        raise EvictionConfigError(problem)
    return str(name)


def _problems_of_summaries(config: EvictionConfig, policy: Policy, named: str) -> Iterator[str]:
    if policy.summaries is not None and not config.summarises:
        yield (
            f"{named}, which keeps summaries of what it evicts, and this server has none: start it "
            "with such a method as kv_eviction.policy, or with a mix with summaries in "
            "kv_eviction.methods"
        )


def _problems_of_pressure(
    policy: Policy, budget: Budget, named: str, again: Again
) -> Iterator[str]:
    always = "or evict every prompt: when: always, in a request kv_eviction_when"
    if not policy.cuts_again:
        yield (
            f"{named}, which {_why_once(policy)}, and under pressure (`when`) a prompt is evicted "
            f"in stages: choose another method, such as reach, {always}"
        )
    if budget.is_auto:
        yield (
            f"budget auto with {named}: under pressure (`when`) the scheduler has to know how many "
            f"blocks an eviction frees; give a fraction, {always}"
        )
    if again.happens:
        yield (
            f"when is 'pressure' beside {again.source}, which says itself when the cache is cut: "
            f"{again.way_out}, {always}"
        )


def _why_once(policy: Policy) -> str:
    """Return why a method evicts only once."""
    why = "merges tokens" if policy.merge else "is not defined on what is left"
    return f"{why} after the first eviction"


def _problems_of_auto(policy: Policy, auto: str, again: Again) -> Iterator[str]:
    if policy.summaries is not None:
        yield (
            f"{auto}: blocks that auto gives back are those that hold summaries; give a fraction, "
            "or summaries: none"
        )
    if policy.score.rows == "none":
        yield (
            f"{auto}: its scores ignore attention, whose share auto guards; give a fraction, or "
            "another method"
        )
    if again.happens:
        yield (
            f"{auto}: the later evictions of {again.source} have budgets of their own and no "
            f"guard; give a fraction, or {again.way_out}"
        )


def _problems_of_cuts(policy: Policy, named: str, defer: int, again: Again) -> Iterator[str]:
    if again.happens and not policy.cuts_again:
        yield (
            f"{named}, which {_why_once(policy)}, and {again.source} evicts again: "
            f"choose another method, such as snapkv, or {again.way_out}"
        )
    if policy.needs_answer and not defer:
        yield (
            f"{named}, whose rows are those of the answer, and the eviction waits for none of its "
            "tokens: set defer, or kv_eviction_defer in the request, to at least 1, or choose "
            "other rows"
        )


def _problems_of_recall(policy: Policy, budget: Budget, named: str, ceiling: bool) -> Iterator[str]:
    without = "or recall nothing: leave out recall, in a request kv_eviction_recall: 0"
    why = ""
    if not policy.cuts_again or policy.summaries is not None:
        why = "keeps summaries" if policy.summaries is not None else _why_once(policy)
    elif policy.score.rows == "none" or policy.score.gates is not None:
        why = "judges a token once, whatever the answer looks at"
    elif policy.score.accumulates or policy.score.cuts_by_place:
        why = "goes by what earlier cuts left"
    elif policy.granularity != "head":
        why = "chooses for a layer as a whole, and recall for every head: use granularity: head"
    elif KEY_STATISTICS & policy.statistics(policy.score.rows):
        why = "compares keys, and recall has only a sketch of them"
    if why:
        yield f"{named} with recall, and it {why}: choose another method, such as reach, {without}"
    if budget.is_auto:
        yield f"budget auto with {named} and recall: give a fraction, {without}"
    if ceiling:
        yield (
            f"{named} with recall and a ceiling (max_tokens), which evicts tokens of the answer "
            f"as well: give a schedule or none, {without}"
        )


def check_methods(config: EvictionConfig, policy_source: str = "kv_eviction.policy") -> None:
    """Check methods, policy, budget and `text_only` against each other.

    Raises:
        EvictionConfigError: naming the field, its value and what it may be.
    """
    for name in config.methods:
        config.build_policy(name)
    check_method(config, config.policy, *config.first_eviction(config.policy), policy_source)
    if config.policy == NONE or config.text_only == "keep":
        return
    if config.build_policy(config.policy).allocation.needs_vision:
        raise EvictionConfigError(
            f"kv_eviction.text_only is 'evict' with policy {config.policy!r}, whose layer budget "
            "is the attention to images, which such prompts lack: choose a method without "
            "one, such as snapkv, or text_only: keep"
        )


def read_config_file(value: str) -> dict[str, Any]:
    """Read `--kv-eviction-config`: inline JSON, which starts with `{`, or a YAML or JSON file.

    Raises:
        EvictionConfigError: if the file cannot be read, or holds no mapping.
    """
    flag = "--kv-eviction-config"
    inline = value.lstrip().startswith("{")
    try:
        text = value if inline else Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no UTF-8, or a path with a NUL
        raise EvictionConfigError(
            f"{flag} {value}: cannot be read ({error}); give a YAML or JSON file, or inline JSON"
        ) from error
    try:
        parsed = json.loads(text) if inline else yaml.safe_load(text)
    except PARSE_ERRORS as error:
        raise EvictionConfigError(f"{flag} {value}: not valid YAML or JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise EvictionConfigError(
            f"{flag} {value}: holds {quoted(parsed)}; give a mapping such as {{budget: 0.2}}"
        )
    return parsed


def config_of(carrier: VllmConfig | EngineArgs) -> EvictionConfig:
    """Return the settings in `additional_config`; inactive ones if it carries none."""
    additional = carrier.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return EvictionConfig()
    global _last_read
    values, known = additional[CONFIG_KEY], _last_read
    if values is not known[0]:
        known = _last_read = values, EvictionConfig.from_mapping(values)
    return known[1]


def carry(values: Mapping[str, Any], config: EvictionConfig) -> dict[str, Any]:
    """Return a copy of a mapping for `additional_config`, which `config_of` need not read again."""
    global _last_read
    _last_read = dict(values), config
    return _last_read[0]


_last_read: tuple[Any, EvictionConfig] = (None, EvictionConfig())
"""A mapping and the settings in it. It is read once in a process: files of scores may be large."""
