# SPDX-License-Identifier: Apache-2.0
"""Options of a request over the settings of any server; refusals are in `test_refusals.py`."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.test_config import JSON, WORDS, refusal
from vllm_tgvkv.config.request import REQUEST_KEYS, RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.shared.budget import MAX_STEPS, Budget, parse_schedule
from vllm_tgvkv.shared.cuts import Ceiling

SERVER = EvictionConfig(policy="tgv", budget=Budget(fraction=0.1))


def test_options_of_a_request() -> None:
    for extra_args, changes in (
        (None, {}),
        ({}, {}),
        ({"someone_elses": 1}, {}),
        ({"kv_eviction": "none"}, {"policy": "none"}),
        ({"kv_eviction_budget": 0.5}, {"budget": Budget(fraction=0.5)}),
        ({"kv_eviction_budget": "64"}, {"budget": Budget(tokens=64)}),
        ({"kv_eviction_report": 1}, {"report": True}),
        ({"kv_eviction_report": 0}, {}),
        ({"kv_eviction_trace": 1}, {"trace": True}),
        ({"kv_eviction_trace": 0}, {}),
        ({"kv_eviction_protect": "system"}, {}),
        ({"kv_eviction_protect": "system", "kv_eviction_protected_tokens": 9}, {"protected": 9}),
        ({"kv_eviction_protect": "none", "kv_eviction_protected_tokens": 9}, {}),
        ({"kv_eviction_protected_tokens": 9}, {"protected": 9}),
    ):
        wanted = replace(RequestOptions("tgv", SERVER.budget), **changes)  # type: ignore[arg-type]
        assert RequestOptions.resolve(SERVER, extra_args) == wanted


# -- schedules --------------------------------------------------------------------------

_TOKENS, _PROMILLE = st.integers(0, 10**6), st.integers(1, 1000)
STEPS = st.integers(1, MAX_STEPS).flatmap(
    lambda number: st.builds(
        lambda tokens, promille: list(
            zip(sorted(tokens), (n / 1000 for n in sorted(promille, reverse=True)), strict=True)
        ),
        *(st.sets(x, min_size=number, max_size=number) for x in (_TOKENS, _PROMILLE)),
    )
)


@given(STEPS)
def test_a_schedule_has_two_spellings(steps: list[tuple[int, float]]) -> None:
    """Text, which HTTP can carry, and nested pairs."""
    wanted = tuple((tokens, Budget(fraction=fraction)) for tokens, fraction in steps)
    text = ",".join(f"{tokens}:{fraction}" for tokens, fraction in steps)
    spaced = " , ".join(f" {tokens} : {fraction} " for tokens, fraction in steps)
    for value in (text, spaced, steps, [list(step) for step in steps]):
        assert parse_schedule(value, "it") == wanted


@given(STEPS, st.data())
def test_any_two_pairs_in_the_wrong_order_are_refused(
    steps: list[tuple[int, float]], data: st.DataObject
) -> None:
    """So are equal ones."""
    first = data.draw(st.integers(0, len(steps) - 1))
    second = data.draw(st.integers(first, len(steps) - 1))
    wrong = list(steps)
    if first == second:
        wrong.insert(first, steps[first])
    else:
        wrong[first], wrong[second] = wrong[second], wrong[first]
    for value in (wrong, ",".join(f"{tokens}:{fraction}" for tokens, fraction in wrong)):
        said = refusal(lambda value=value: parse_schedule(value, "it"))
        assert said is not None
        assert said.startswith("it is ")
        assert "ever more tokens, and ever smaller fractions" in said


# -- precedence -------------------------------------------------------------------------

SERVERS: tuple[dict[str, Any], ...] = (
    {},
    {"budget": 0.2, "defer": 5},
    {"budget": "auto:0.9"},
    {"decode": {"on_request": True}, "defer": 2},
    {"decode": {"on_request": True}, "budget": "auto:0.9"},
    {"decode": {"schedule": [[8, 0.3]]}},
    {"decode": {"schedule": [[8, 0.3], [32, 0.1]]}},
    {"decode": {"max_tokens": 512}, "budget": 0.4, "defer": 3},
    {"when": "pressure", "budget": 0.3},
)
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "kv_eviction": st.sampled_from(("none", "snapkv", "elastic", "aircache", "streaming")),
        "kv_eviction_budget": st.sampled_from((0.5, 0.05, 96, "auto:0.8")),
        "kv_eviction_when": st.sampled_from(("always", "pressure")),
        "kv_eviction_defer": st.sampled_from((0, 4, 32)),
        "kv_eviction_schedule": st.sampled_from(("none", "0:0.6", "4:0.5,12:0.25,40:0.125")),
        "kv_eviction_max_tokens": st.sampled_from(("none", 16, 256)),
    },
)
BLOCK = 32


def wanted(server: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a request gets, as plain values; None if it is refused. Written from the docs."""
    decode = server.get("decode", {})
    method = asked.get("kv_eviction", "tgv")
    schedule = asked.get("kv_eviction_schedule", "none")
    most = asked.get("kv_eviction_max_tokens", "none")
    names_again = {"kv_eviction_schedule", "kv_eviction_max_tokens"} & asked.keys()
    steps = decode.get("schedule", [[server.get("defer", 0), server.get("budget", 0.1)]])
    if names_again or "max_tokens" in decode:
        steps = steps[:1]
    if not names_again:
        most = decode.get("max_tokens", "none")
    if schedule != "none":
        if most != "none" or {"kv_eviction_budget", "kv_eviction_defer"} & asked.keys():
            return None
        steps = [[int(n), float(b)] for n, b in (s.split(":") for s in schedule.split(","))]
    first = [
        asked.get("kv_eviction_defer", steps[0][0]),
        asked.get("kv_eviction_budget", steps[0][1]),
    ]
    fraction = 1 if isinstance(first[1], str | int) else first[1]
    steps = [first, *(s for s in steps[1:] if s[0] > first[0] and s[1] < fraction)]
    again = most != "none" or len(steps) > 1
    has_room = bool(decode) or "when" in server
    when = asked.get("kv_eviction_when", "always" if again else server.get("when", "always"))
    if when == "pressure" and not has_room:
        return None
    is_auto = str(first[1]).startswith("auto")
    if method != "none":
        if when == "pressure" and (again or is_auto or method in ("elastic", "aircache")):
            return None
        if again and (not has_room or is_auto or method in ("elastic", "aircache")):
            return None
        if (most != "none" and most < BLOCK) or (is_auto and method == "streaming"):
            return None
    else:
        steps, most, when = steps[:1], "none", "always"
    return {
        "method": method,
        "when": when,
        "steps": steps,
        "ceiling": None if most == "none" else (most, most // 4),
    }


def found(options: RequestOptions) -> dict[str, Any]:
    budget: Any = options.budget.value
    if options.budget.is_auto:
        budget = f"auto:{options.budget.share}"
    ceiling = options.ceiling and (options.ceiling.max_tokens, options.ceiling.buffer)
    later = [[tokens, budget.value] for tokens, budget in options.later]
    steps = [[options.defer, budget], *later]
    return {"method": options.policy, "when": options.when, "steps": steps, "ceiling": ceiling}


@pytest.mark.parametrize("server", SERVERS, ids=str)
@given(asked=ASKED)
@example({"kv_eviction": "snapkv", "kv_eviction_defer": 32})  # as long as a server's last step
def test_what_a_request_names_goes_before_the_server(
    server: dict[str, Any], asked: dict[str, Any]
) -> None:
    """For any combination, against the rules of docs/requests.md written once more."""
    config = EvictionConfig.from_mapping({"policy": "tgv", **server})
    said = refusal(lambda: RequestOptions.resolve(config, asked, BLOCK))
    should = wanted(server, asked)
    assert (said is None) == (should is not None), said
    if should is None:
        assert said is not None
        assert "kv_eviction" in said
        assert "vllm_xargs" in said or "the server's decode" in said
        assert len(said) < 600
        return
    options = RequestOptions.resolve(config, asked, BLOCK)
    assert found(options) == should
    assert options.cuts_again == (options.decode is not None)
    assert pickle.loads(pickle.dumps(options)) == options
    if options.decode is not None and options.budget.tokens is None:  # as the setting has it
        json.dumps(options.decode)
        again = EvictionConfig.from_mapping({"policy": "snapkv", "decode": options.decode})
        assert again.decode is not None
        num_later = 0 if options.ceiling else len(options.later)
        assert (again.decode.ceiling, len(again.decode.later)) == (options.ceiling, num_later)


def test_every_kind_of_server_and_request_is_drawn() -> None:
    """The test above meets requests that pass and requests that are refused on each server."""
    methods = ("none", "snapkv", "elastic")
    for server in SERVERS:
        seen = {
            wanted(server, {"kv_eviction": method, "kv_eviction_schedule": schedule}) is None
            for method, schedule in itertools.product(methods, ("none", "4:0.5,12:0.25"))
        }
        assert seen == {True, False}, server


ROOM = {"policy": "tgv", "decode": {"on_request": True}}
SCHEDULE = {"kv_eviction_schedule": "8:0.3,32:0.1"}


def test_a_request_takes_its_way_out() -> None:
    """What the messages above suggest works."""
    config = EvictionConfig.from_mapping({"policy": "tgv", "decode": {"max_tokens": 512}})
    for key in ("kv_eviction_schedule", "kv_eviction_max_tokens"):
        options = RequestOptions.resolve(config, {"kv_eviction": "aircache", key: "none"})
        assert not options.cuts_again
    config = EvictionConfig(policy="elastic")
    once = RequestOptions.resolve(config, {"kv_eviction_schedule": "8:.3"})
    assert (once.defer, once.budget) == (8, Budget(fraction=0.3))
    # A server that only sets memory aside may have a method that evicts once, and a guard.
    server = {"policy": "elastic", "budget": "auto:0.9", "decode": {"on_request": True}}
    config = EvictionConfig.from_mapping(server)
    assert not RequestOptions.resolve(config, None).cuts_again
    options = RequestOptions.resolve(config, {**SCHEDULE, "kv_eviction": "snapkv"}, BLOCK)
    assert options.cuts_again

    config = EvictionConfig.from_mapping({**ROOM, "floor_pages": 0})
    asked = {"kv_eviction_max_tokens": 16}  # one block without a floor
    assert RequestOptions.resolve(config, asked, 16).ceiling == Ceiling(16, 4)
    assert refusal(lambda: RequestOptions.resolve(config, asked, 17)) is not None


def test_options_in_words() -> None:
    config = EvictionConfig.from_mapping(ROOM)
    for asked, text in (
        ({}, "10 % of the prompt"),
        (SCHEDULE, "30 % of the prompt, 10 % of the prompt after 32 tokens of the answer"),
        ({"kv_eviction_max_tokens": 512}, "10 % of the prompt, then 512 to 640 tokens per head"),
    ):
        options = RequestOptions.resolve(config, asked)
        assert str(options) == options.understood == text
    for asked, text in (
        ({"kv_eviction_budget": 10}, "10 tokens per head; for 10 % of the prompt give 0.1"),
        ({"kv_eviction_budget": 101}, "101 tokens per head"),
        ({"kv_eviction": "none"}, "everything is kept"),
    ):
        assert RequestOptions.resolve(config, asked).understood == text


@given(st.dictionaries(st.sampled_from(REQUEST_KEYS) | st.text() | WORDS, JSON, max_size=4))
def test_any_options_are_applied_or_refused(extra_args: dict[str, Any]) -> None:
    server = EvictionConfig.from_mapping(ROOM)
    said = refusal(lambda: RequestOptions.resolve(server, extra_args, BLOCK))
    if said is not None:
        assert "vllm_xargs" in said
        assert len(said) < 2000
        return
    options = RequestOptions.resolve(server, extra_args, BLOCK)
    assert options.policy in server.method_names
    assert 0 < options.budget.retained_blocks(10**6, 16) <= 10**6 // 16
    assert Budget.parse(options.budget.value, "it") == options.budget
