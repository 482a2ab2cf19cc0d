# SPDX-License-Identifier: Apache-2.0
"""Settings, budgets, keys of requests and config files; refusals are in `test_refusals.py`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.inputs import assert_says
from vllm_tgvkv.config.defaults import Defaults
from vllm_tgvkv.config.removed import REMOVED
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import (
    Again,
    DebugOptions,
    DecodeOptions,
    EvictionConfig,
    check_method,
    read_config_file,
)
from vllm_tgvkv.policies import Mix, Pooling, Summaries
from vllm_tgvkv.shared.budget import Budget, Guard
from vllm_tgvkv.shared.errors import EvictionConfigError


def test_budget_is_a_fraction_up_to_one_and_tokens_above() -> None:
    for budget, spellings in (
        (Budget(fraction=0.1), (0.1, "0.1")),
        (Budget(fraction=0.05), ("5e-2",)),
        (Budget(fraction=1.0), (1, "1.0")),
        (Budget(tokens=2), (2,)),
        (Budget(tokens=512), (512.0, "512")),
    ):
        assert {Budget.parse(value, "--flag") for value in spellings} == {budget}
    for value in (0.1, 1.0, 512, "auto:0.9", "auto:0.5,min=0.1,max=0.2"):
        budget = Budget.parse(value, "it")
        assert Budget.parse(budget.value, "it") == budget


@given(
    num_tokens=st.integers(1, 5000),
    block_size=st.sampled_from([1, 16, 32, 128]),
    value=st.one_of(st.integers(1, 100).map(lambda n: n / 100), st.integers(2, 6000)),
)
def test_retained_blocks_are_the_plain_formula(
    num_tokens: int, block_size: int, value: float
) -> None:
    """Region and tail within the budget, at least one block, never more than the prompt has."""
    num_full, tail = num_tokens // block_size, num_tokens % block_size
    retained = Budget.parse(value, "x").retained_blocks(num_tokens, block_size)
    exact = Fraction(value) * num_tokens if value <= 1 else Fraction(value)
    fits = [k for k in range(1, num_full + 1) if k * block_size + tail <= exact]
    wanted = min(max(fits, default=1), num_full)
    # Off by one block if rounding moves the product over the border of a block.
    blocks = float((exact - tail) / block_size)
    assert retained == wanted or abs(blocks - round(blocks)) < 1e-9
    assert abs(retained - wanted) <= 1
    assert 0 <= retained <= num_full


@given(
    num_blocks=st.integers(1, 4),
    block_size=st.sampled_from([1, 16, 32]),
    value=st.one_of(st.integers(1, 100).map(lambda n: n / 100), st.integers(2, 200)),
)
def test_the_shortest_prompt_that_keeps_some_blocks(
    num_blocks: int, block_size: int, value: float
) -> None:
    budget = Budget.parse(value, "x")
    prompts = range(1, 401 * block_size)
    enough = (p for p in prompts if budget.retained_blocks(p, block_size) >= num_blocks)
    # One block is always kept, also of a budget that is smaller.
    assert budget.shortest_prompt(num_blocks, block_size) == next(enough, None)


def test_a_guard_holds_the_text_and_the_lower_bound() -> None:
    budget = Budget.parse("auto:0.9,min=0.25,max=0.5", "x")
    assert budget.retained_blocks(330, 16) == 9  # 165 tokens, 10 of them in the tail
    assert budget.guard(330, 20, 16) == Guard(0.9, 4)
    assert budget.guard(330, 81, 16) == Guard(0.9, 6)
    assert Budget(fraction=0.5).guard(330, 20, 16) is None


def test_a_mixs_own_settings_come_before_those_of_its_base() -> None:
    parts = {"score": "snapkv", "allocation": "aircache", "retain": "by_score"}
    mixes = {"a": {**parts, "granularity": "head"}, "b": {"base": "snapkv", "granularity": "layer"}}
    config = EvictionConfig.from_mapping({"methods": mixes})
    a, b = config.build_policy("a"), config.build_policy("b")
    assert (a.name, a.score.rows, a.granularity, a.pooling) == ("a", "window", "head", Pooling())
    assert (b.granularity, b.pooling) == ("layer", Pooling("sequence", 7, "max"))


def test_every_field_is_read() -> None:
    plain = {
        "policy": "snapkv",
        "observation_window": 64,
        "when": "pressure",
        "sinks": 0,
        "floor_pages": 2,
        "min_prompt_tokens": 1000,
        "text_only": "evict",
    }
    parts = {"base": "snapkv", "granularity": "layer", "rows": "text", "reduce": "max"}
    mixes = {
        "mine": {"base": "h2o", "pooling": "sequence", "merge": True},
        "ahead": {**parts, "pooling": "reach", "summaries": "vision"},
    }
    debug = {"poison": True, "check_integrity": True}
    config = EvictionConfig.from_mapping(
        {**plain, "budget": "256", "methods": mixes, "debug": debug}
    )
    reach = Pooling("sequence", forward=256, back=1, halve=64)
    methods = {
        "mine": Mix("h2o", pooling=Pooling("sequence"), merge=True),
        "ahead": Mix(**parts, pooling=reach, summaries=Summaries("vision")),  # type: ignore[arg-type]
    }
    assert config == EvictionConfig(
        **plain,  # type: ignore[arg-type]
        budget=Budget(tokens=256),
        methods=methods,
        debug=DebugOptions(**debug),
    )
    assert config.active


VALUES = {"sinks": 8, "decode": {"max_tokens": 512}}


def test_config_files(tmp_path: Path) -> None:
    """Unreadable ones name flag, path and way out."""
    for name, text in (
        ("a.yaml", "sinks: 8\ndecode:\n  max_tokens: 512\n"),
        ("a.json", json.dumps(VALUES)),
        ("no_suffix", "{sinks: 8, decode: {max_tokens: 512}}"),
    ):
        (tmp_path / name).write_text(text)
        assert read_config_file(str(tmp_path / name)) == VALUES
    path = tmp_path / "eviction.yaml"
    for content, part in (
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"granularity: [head", "not valid YAML or JSON"),
        (b"- granularity", "give a mapping"),
        (b"", "holds None; give a mapping"),
        (b"head", "holds 'head'; give a mapping"),
    ):
        if content is not None:
            path.write_bytes(content)
        said = refusal(lambda: read_config_file(str(path)))
        assert_says(str(said), f"--kv-eviction-config {path}: ... {part}")


REMOVED_VALUES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"granularity": "head"}, "methods: {mine: {base: tgv, granularity: head}}"),
    ({"pooling": {"kind": "grid"}}, "methods: {mine: {base: tgv, pooling: grid}}"),
    ({"prefix_reuse": "full"}, "always ends before the first token that votes"),
    ({"query_rows": 100}, "remove it"),
    ({"max_trace_mib": 1}, "at most 64 MiB"),
    ({"metrics": False}, "--disable-log-stats"),
    ({"decode": {"max_tokens": 512, "buffer": 64}}, "a quarter of max_tokens"),
    ({"decode": {"on_request": True, "rows": 8}}, "the last 32 tokens"),
    ({"gates": {"folder": "/gates", "lookahead": 5}}, "give the folder alone"),
    ({"gates": {"folder": "/gates", "age_offset": 1}}, "give the folder alone"),
    ({"methods": {"mine": {"base": "snapkv", "budget": "aircache"}}}, "name it allocation"),
)


@pytest.mark.parametrize(("values", "way_out"), REMOVED_VALUES, ids=lambda value: str(value)[:40])
def test_a_removed_setting_says_what_to_do_instead(values: dict[str, Any], way_out: str) -> None:
    with pytest.raises(EvictionConfigError, match="which was removed: ") as caught:
        EvictionConfig.from_mapping({"policy": "tgv", **values})
    assert way_out in str(caught.value)


def test_every_removed_name_is_tried() -> None:
    tried = set()
    for values, _ in REMOVED_VALUES:
        ((name, value),) = values.items()
        inner = value.get("mine", value) if isinstance(value, dict) else ()
        tried |= {name, *(f"{name}.{key}" for key in inner)}
    assert set(REMOVED) - tried == {"vllm_xargs.kv_eviction_buffer"}


# -- any input --------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *("tgv", "none", "snapkv", "adakv", "random", "prefixkv", "by_score", "layer", "head"),
        *("grid", "max", "keep", "evict", "auto:0.9", "auto:", "0.1", "512", "9" * 5000, "m"),
        *("/tmp/x", "/tmp/\0", "/tmp/\ud800", "/nowhere/x", "2024-13-45", "kernel", "kind", "\0"),
    ]
)
NUMBERS = st.one_of(
    st.integers(-2, 600),
    st.integers(),
    st.sampled_from([2**31 - 1, 2**31, 10**400]),
    st.floats(),
    st.just(5000).map(lambda digits: -(10**digits)),  # a number that Python does not print
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=8),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=6,
)
"""Values that JSON and YAML can hold, most of them wrong for a field."""


@pytest.mark.parametrize(
    ("server", "request_has", "found"),
    [
        ({"policy": "snapkv"}, {}, (0.1, 0)),
        ({"policy": "reach"}, {}, (0.2, 4)),
        ({"policy": "reach", "budget": None, "defer": None}, {}, (0.2, 4)),
        ({"policy": "reach", "budget": 0.3}, {}, (0.3, 4)),
        ({"policy": "reach", "defer": 0}, {}, (0.2, 0)),
        ({"policy": "reach"}, {"kv_eviction_budget": 0.5}, (0.5, 4)),
        ({"policy": "reach"}, {"kv_eviction_defer": 0}, (0.2, 0)),
        ({"policy": "reach"}, {"kv_eviction": "snapkv"}, (0.1, 0)),
        ({"policy": "tgv"}, {"kv_eviction": "reach"}, (0.2, 4)),
        ({"policy": "tgv", "budget": 0.3, "defer": 2}, {"kv_eviction": "reach"}, (0.3, 2)),
        ({"policy": "mine", "methods": {"mine": {"base": "reach"}}}, {}, (0.2, 4)),
        ({"policy": "reach", "decode": {"schedule": [[8, 0.5], [9, 0.2]]}}, {}, (0.5, 8)),
    ],
)
def test_a_method_has_its_own_budget_and_wait(
    server: dict[str, Any], request_has: dict[str, Any], found: tuple[float, int], tmp_path: Path
) -> None:
    """Where neither server nor request has one; also if the method is a changed default."""
    request_has = dict(request_has)
    config = EvictionConfig.from_mapping(server)
    options = RequestOptions.resolve(config, request_has)
    assert (options.budget.fraction, options.defer) == found
    assert config.waits == (config.first_eviction(config.policy)[1] > 0 or config.keeps_positions)
    if "decode" not in server:
        method = request_has.pop("kv_eviction", server["policy"])
        file = tmp_path / "defaults.json"
        file.write_text(json.dumps({"policy": method}))
        others = {"policy": "streaming", "defaults_file": str(file)}
        started = Defaults(EvictionConfig.from_mapping({**server, **others})).current()
        options = RequestOptions.resolve(started, request_has)
        assert (options.policy, options.budget.fraction, options.defer) == (method, *found)


def with_fields(cls: type) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings of some of the fields of a dataclass to anything."""
    names = st.sampled_from([field.name for field in dataclasses.fields(cls)])
    return st.dictionaries(names, JSON, max_size=3)


FIELD_VALUES = {
    "decode": JSON | with_fields(DecodeOptions),
    "debug": JSON | with_fields(DebugOptions),
    "methods": JSON | st.dictionaries(WORDS, JSON | with_fields(Mix), max_size=2),
}
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        field.name: FIELD_VALUES.get(field.name, JSON)
        for field in dataclasses.fields(EvictionConfig)
    },
)


@given(SETTINGS)
def test_any_settings_are_valid_or_refused(values: dict[str, Any]) -> None:
    """Valid settings can also be used, logged and sent to another process."""
    try:
        config = EvictionConfig.from_mapping(values)
    except EvictionConfigError:
        return
    assert pickle.loads(pickle.dumps(config)) == config
    assert str(config.first_eviction(config.policy)[0])
    once = Again(happens=False, source="", way_out="")
    for name in config.method_names:
        checked = check_method(config, name, Budget(fraction=0.5), 1, "it", once, recalls=False)
        assert checked == name
    assert Defaults(config).current().policy == config.policy
    assert RequestOptions.resolve(config, None).policy == config.policy


def refusal(call: Callable[[], Any]) -> str | None:
    """Return the message of an `EvictionConfigError`; any other error fails the test."""
    try:
        call()
    except EvictionConfigError as error:
        return str(error)
    return None


@given(st.data(), st.sampled_from([field.name for field in dataclasses.fields(EvictionConfig)]))
def test_a_refusal_names_the_field(data: st.DataObject, name: str) -> None:
    value = data.draw(FIELD_VALUES.get(name, JSON))
    said = refusal(lambda: EvictionConfig.from_mapping({name: value}))
    # Parts of a mix that do not fit together are reported for the method.
    known = ("kv_eviction.methods", "kv_eviction method ") if name == "methods" else ()
    assert said is None or said.startswith((f"kv_eviction.{name}", *known))


BUDGETS = st.from_regex(r"(auto:)?[0-9.e+-]+(,(min|max)=[0-9.e-]+)*", fullmatch=True)


@given(st.text() | WORDS | BUDGETS)
def test_any_text_is_a_budget_or_refused(text: str) -> None:
    said = refusal(lambda: Budget.parse(text, "--flag"))
    if said is not None:
        assert said.startswith("--flag is ")
        return
    budget = Budget.parse(text, "--flag")
    assert 1 <= budget.retained_blocks(1000, 16) <= 62
    assert Budget.parse(budget.value, "--flag") == budget


def fits_json(values: Any) -> bool:
    try:
        json.dumps(values)
    except ValueError:
        return False
    return True


def assert_read_or_refused(path: Path, text: str) -> None:
    """Read a file as settings and as defaults; reading defaults never raises."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for flag in (text, str(path)):
        refusal(lambda flag=flag: EvictionConfig.from_mapping(read_config_file(flag)))
    server = EvictionConfig.from_mapping({"policy": "tgv", "defaults_file": str(path)})
    found = Defaults(server).current()
    assert dataclasses.replace(found, policy="tgv", budget=server.budget) == server
    assert found.policy in server.method_names


@given(st.text() | WORDS | SETTINGS.filter(fits_json).map(json.dumps))
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_file_is_read_or_refused(tmp_path: Path, text: str) -> None:
    assert_read_or_refused(tmp_path / "file.yaml", text)


@pytest.mark.parametrize(
    "text",
    [
        *("budget: 2024-13-45", "policy: " + "9" * 5000, "&a [*a]", "&a {policy: *a}", "\0"),
        *("[" * 400, '{"a":' * 1500, "? {a: b}\n: c", "{<<: 1}", "!!python/none x"),
    ],
    ids=lambda text: text[:20],
)
def test_texts_that_break_parsers(tmp_path: Path, text: str) -> None:
    """Invalid dates, open brackets, recursion, long numbers: not every error is YAML's."""
    assert_read_or_refused(tmp_path / "file.yaml", text)


AGAIN = {"schedule": [[4, 0.5], [9, 0.2]]}


@pytest.mark.parametrize(
    "mix",
    [
        *({"base": name} for name in ("elastic", "aircache", "vlcache")),
        *({"base": "snapkv", "allocation": name} for name in ("vlcache", "aircache")),
        {"base": "tgv", "score": "vv_tt"},
        {"base": "tgv", "allocation": "vv"},
    ],
    ids=str,
)
def test_methods_that_evict_only_once_are_refused_with_decode(mix: dict[str, Any]) -> None:
    """At start if the server names one, and otherwise in the request."""
    part = "merges tokens" if mix["base"] == "elastic" else "is not defined on what is left"
    values = {"policy": "mine", "methods": {"mine": mix}, "decode": AGAIN}
    said = refusal(lambda: EvictionConfig.from_mapping(values))
    assert_says(str(said), f"kv_eviction.policy is 'mine', which {part}")
    server = EvictionConfig.from_mapping({**values, "policy": "snapkv"})
    said = refusal(lambda: RequestOptions.resolve(server, {"kv_eviction": "mine"}))
    assert_says(str(said), f"vllm_xargs.kv_eviction is 'mine', which {part}")
    once = {**values, "decode": {"schedule": [[4, 0.5]]}}
    assert EvictionConfig.from_mapping(once).policy == "mine"
    ceiling = {"policy": "tgv", "budget": "auto:0.9", "decode": {"max_tokens": 512}}
    said = refusal(lambda: EvictionConfig.from_mapping(ceiling))
    assert_says(str(said), "budget auto with kv_eviction.policy 'tgv'")


@pytest.mark.parametrize(
    ("base", "score"), [("h2o", "h2o_accumulated"), ("elastic", "fixed_place")]
)
def test_recall_is_refused_where_later_cuts_go_by_earlier_ones(base: str, score: str) -> None:
    """Which tokens come back is not known to them. Without recall a ceiling takes both."""
    values = {"policy": "mine", "methods": {"mine": {"base": base, "score": score}}}
    assert EvictionConfig.from_mapping({**values, "decode": {"max_tokens": 512}})
    said = refusal(lambda: EvictionConfig.from_mapping({**values, "recall": {"gib": 1}}))
    assert_says(str(said), "is 'mine' with recall, and it goes by what earlier cuts left")


def test_misspelt_keys_of_a_request_are_refused_with_a_suggestion() -> None:
    """A key that was ignored would leave a request evicted otherwise than its author thinks."""
    meant = {
        "kv_eviction": ("kv_eviktion", "kv_evict", "vk_eviction", "kv-eviction", "KV_EVICTION"),
        "kv_eviction_budget": ("kv_eviction_budget ", "kv_eviciton_bugdet", "kvEvictionBudget"),
        "kv_eviction_report": ("kv_evicton_report",),
    }
    meant["kv_eviction"] += ("kveviction", "kv_evictions")
    meant["kv_eviction_budget"] += ("kv_evict_budget",)
    word = "eviction"
    for place in range(len(word)):  # a letter is missing, doubled, or swapped with its neighbour
        head, letter, tail = word[:place], word[place], word[place + 1 :]
        swapped = head + tail[:1] + letter + tail[1:]
        for slip in {head + tail, head + 2 * letter + tail, swapped} - {word}:
            meant["kv_eviction"] += (f"kv_{slip}",)
            meant["kv_eviction_budget"] += (f"kv_{slip}_budget",)
    for right, keys in meant.items():
        for key, value in itertools.product(keys, (1, "tgv", None)):
            call = partial(RequestOptions.resolve, EvictionConfig(), {key: value})
            assert_says(refusal(call) or "", f"has {key}: did you mean {right}? Known are ")


@pytest.mark.parametrize(
    "key",
    [
        *("kv_transfer_params", "kv_cache_dtype", "kv_connector", "kv_role", "kv_events", "kv_"),
        *("kv_event_id", "kv_election", "kv_section", "kv_action", "kv_selection", "kv_execution"),
        *("kv_evaluation", "kv_evacuation", "kv_prediction", "kv_retention_budget", "kv", ""),
        *("kvcache_eviction", "key_eviction", "eviction", "eviction_budget", "cache_eviction"),
        *("my_kv_eviction", "ignore_eos", "temperature"),
    ],
)
def test_keys_of_others_pass(key: str) -> None:
    options = RequestOptions.resolve(EvictionConfig(), {key: "theirs"})
    assert options == RequestOptions.resolve(EvictionConfig(), None)
