# SPDX-License-Identifier: Apache-2.0
"""What settings, requests and mixes are refused, each with field, value and way out.

A message has the parts of its text, which "..." separates, in this order. What vLLM's flags and
models are refused for is in `test_compatibility.py`, files of other kinds where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.inputs import assert_says
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies import Mix, Pooling, Summaries, build_policy, registry
from vllm_tgvkv.shared.budget import MAX_STEPS, Budget, parse_schedule
from vllm_tgvkv.shared.errors import EvictionConfigError

BLOCK = 32


def mix(**parts: Any) -> dict[str, Any]:
    return {"methods": {"m": parts}}


EXCLUDE = "exclude each other: give kernel ... or forward and back"
SETTINGS = [
    ({"policy": "snap"}, ".policy is 'snap': did you mean snapkv? Choose one of none, tgv"),
    ({"policy": "zzz"}, ".policy is 'zzz': choose one of none, tgv"),
    ({"policy": None}, ".policy is None: did you mean none?"),
    ({"policy": ["tgv"]}, ".policy is ['tgv']: ... Choose one of"),
    ({"budget": 0}, ".budget is 0: ... 0 < budget <= 1"),
    ({"text_only": True}, ".text_only is True: choose one of keep, evict"),
    ({"observation_window": 0}, ".observation_window is 0: give a whole number, at least 1"),
    ({"observation_window": "9"}, ".observation_window is '9': give a whole number"),
    ({"observation_window": 20_000}, ".observation_window is 20000: give at most 16352"),
    ({"sinks": -1}, ".sinks is -1: give a whole number, at least 0"),
    ({"sinks": 1.5}, ".sinks is 1.5: give a whole number"),
    ({"floor_pages": True}, ".floor_pages is True: give a whole number"),
    ({"protect": "user"}, ".protect is 'user': choose one of system, none"),
    ({"min_prompt_tokens": None}, ".min_prompt_tokens is None: ... at least 0"),
    ({"defer": -1}, ".defer is -1: give a whole number"),
    ({"defer": 20_000}, ".defer is 20000: give a whole number of answer tokens, at most 16224"),
    ({"debug": {"posion": True}}, ".debug ... did you mean poison? Known are poison"),
    ({"debug": None}, ".debug is None: give a mapping"),
    ({"buget": 0.1, 7: 1}, "kv_eviction has unknown 7, buget: known are policy, budget"),
    ({"methods": []}, ".methods is []: give a mapping"),
    ({"methods": {"m": 1}}, ".methods.m is 1: give a mapping"),
    ({"methods": {"tgv": {}}}, ".methods.tgv: the name is taken"),
    (mix(granularity="token"), ".m.granularity is 'token': ... head, or leave it out"),
    (mix(pooling="gird"), ".m.pooling is 'gird', ... did you mean grid? Choose one of none"),
    (mix(pooling={"kernel": 9}), ".m.pooling is ... takes a name: ... snapkv, reach"),
    (mix(summaries={"of": "vision"}), ".m.summaries is ... takes a name: ... both, all, vision"),
    *((mix(summaries=value), ".m.summaries is ... takes a name") for value in ("images", {}, 3)),
    (mix(reduce="sum"), ".m.reduce is 'sum': choose one of mean, max"),
    (mix(reduce="max"), "method 'm': reduce 'max' ... 'tgv' ... snapkv"),
    (mix(rows="first"), ".m.rows is 'first': ... window"),
    (mix(rows="all"), "method 'm': rows 'all' ... 'tgv': ... window"),
    (mix(merge="yes"), ".m.merge is 'yes': give true or false"),
    (mix(score="x"), "method 'm': unknown score 'x': choose one of tgv"),
    (mix(skore="tgv"), ".methods.m has unknown skore: did you mean score? Known are base"),
    (mix(base="m"), "method 'm': unknown policy 'm': choose one of tgv"),
    (mix(base="adakv", granularity="layer"), "method 'm': allocation 'adakv' ... choose head"),
    (mix(base="elastic", summaries="both"), "summaries and merge: true exclude each other"),
    (
        {"policy": "m", **mix(rows="answer")},
        ".policy is 'm', whose rows are those of the answer ... set defer, or kv_eviction_defer",
    ),
    ({"policy": "streaming", "budget": "auto:0.9"}, "budget auto ... 'streaming': ... fraction"),
    ({"policy": "retentivekv", "budget": "auto:0.9"}, "budget auto with ... 'retentivekv'"),
    ({"policy": "tgv", "text_only": "evict"}, ".text_only is 'evict' ... 'tgv', ... snapkv"),
    ({"policy": "reach", "when": "later"}, ".when is 'later': choose one of pressure, always"),
    ({"policy": "elastic", "when": "pressure"}, "'elastic', which merges ... when: always"),
    ({"policy": "reach", "budget": "auto:0.9"}, "budget auto with ... fraction, ... when: always"),
    (
        {"policy": "tgv", "when": "pressure", "decode": {"max_tokens": 512}},
        "when is 'pressure' beside decode ... without decode, or ... when: always",
    ),
    ("tgv", "additional_config['kv_eviction'] is 'tgv': ... {'policy': 'tgv'"),
    (None, "additional_config['kv_eviction'] is None: give a mapping"),
]

EVICTING = {"policy": "tgv", "budget": 0.1}
ROOM = {"policy": "tgv", "decode": {"on_request": True}}
CEILING = {"policy": "tgv", "decode": {"max_tokens": 512}}
PAIRS = {"schedule": "8:0.3,32:0.1"}
MOST = {"max_tokens": 512}
NO_ROOM = '... start it with {"decode": {"on_request": true}}'
REQUESTS = [
    (EVICTING, {"": "TGV"}, "vllm_xargs.kv_eviction is 'TGV': ... none, tgv"),
    (EVICTING, {"": 1}, "vllm_xargs.kv_eviction is 1: choose one of none, tgv"),
    (EVICTING, {"budget": "most"}, "_budget is 'most': ... 512"),
    (EVICTING, {"budget": [0.1]}, "_budget is [0.1]: ... 512"),
    (EVICTING, {"report": "yes"}, "_report is 'yes': give 1 for a report"),
    (EVICTING, {"report": [1]}, "_report is [1]: give 1"),
    (EVICTING, {"trace": 2}, "vllm_xargs.kv_eviction_trace is 2: give 1 for a trace"),
    ({**EVICTING, "max_traces": 0}, {"trace": 1}, "_trace is 1, ... max_traces of at least 1"),
    (EVICTING, {"protect": "sytem"}, "_protect is 'sytem': did you mean system? Choose one of"),
    (EVICTING, {"protect": 1}, "vllm_xargs.kv_eviction_protect is 1: choose one of system, none"),
    (EVICTING, {"protected_tokens": -1}, "_protected_tokens is -1: give a whole number, at least"),
    (EVICTING, {"protected_tokens": "8"}, "_protected_tokens is '8': give a whole number"),
    (EVICTING, {"": "random", "budget": "auto:0.9"}, "budget auto with ... 'random'"),
    (EVICTING, {"sinks": 4}, "vllm_xargs has kv_eviction_sinks: ... kv_eviction_budget"),
    ({}, {"buffer": 64}, "vllm_xargs has kv_eviction_buffer, which was removed: remove it"),
    (EVICTING, {"buffer": 64}, "vllm_xargs has kv_eviction_buffer, which was removed: remove it"),
    (EVICTING, PAIRS, f"vllm_xargs.kv_eviction_schedule is '8:0.3,32:0.1', {NO_ROOM}"),
    (EVICTING, MOST, f"vllm_xargs.kv_eviction_max_tokens is 512, {NO_ROOM}"),
    (ROOM, {"schedule": "8:0.1,32:0.3"}, "'8:0.1,32:0.3': ... ever smaller ... or \"none\""),
    (ROOM, {"schedule": "9999:0.3,10000:0.1"}, "wait of ..._schedule is 9999: ... at most 800"),
    (EVICTING, {"schedule": "9999:0.3"}, "wait of ..._schedule is 9999: ... at most 800"),
    (ROOM, {**PAIRS, "budget": 0.2}, "_budget is 0.2 with kv_eviction_schedule ... leave one of"),
    (ROOM, {**PAIRS, "defer": 0}, "_defer is 0 with kv_eviction_schedule ... leave one of them"),
    (ROOM, {**PAIRS, **MOST}, "_max_tokens is 512 with ... either a schedule or a ceiling"),
    (EVICTING, {"when": "late"}, "vllm_xargs.kv_eviction_when is 'late': choose one of"),
    (EVICTING, {"when": "pressure"}, "_when is 'pressure', ... start it with --kv-eviction-when"),
    (ROOM, {"when": "pressure", **MOST}, "beside vllm_xargs.kv_eviction_max_tokens ... when: alw"),
    ({"policy": "reach"}, {"": "aircache"}, "'aircache', ... request kv_eviction_when"),
    (ROOM, {"max_tokens": 31}, "_max_tokens is 31: give at least 32 ... floor_pages 1"),
    ({**ROOM, "floor_pages": 4}, {"max_tokens": 127}, "is 127: give at least 128 ... pages 4"),
    ({**ROOM, "floor_pages": 0}, {"max_tokens": 31}, "_max_tokens is 31: give at least 32"),
    (ROOM, {"max_tokens": 0}, '_max_tokens is 0: ... at least 1 ... or "none"'),
    (ROOM, {"max_tokens": 512.5}, "_max_tokens is 512.5: give a whole number"),
    (ROOM, {**PAIRS, "": "elastic"}, "'elastic', which merges tokens ... _schedule evicts again"),
    (ROOM, {**PAIRS, "": "elastic"}, '... snapkv, or set kv_eviction_schedule: "none"'),
    (ROOM, {**MOST, "": "vlcache"}, "'vlcache', which is not ... set kv_eviction_max_tokens: \"n"),
    (CEILING, {"": "aircache"}, "'aircache', ... the server's decode ... _schedule: \"none\""),
    (ROOM, {**MOST, "budget": "auto:0.9"}, "budget auto ..._max_tokens ... give a fraction"),
    (CEILING, {"budget": "auto:0.9"}, 'budget auto ... kv_eviction_schedule: "none" to evict once'),
    (EVICTING, {"": "retentivekv"}, "start it with such a method as kv_eviction"),
    (EVICTING, {"": "sparsemm"}, "'sparsemm' ... set head_scores to it"),
    (EVICTING, {"": "trimkv"}, "reads gates of ... --kv-eviction-gates"),
]
"""Settings of the server; options without `kv_eviction_`; the message."""

ADDS_UP = "has no meaning with the score"
MIXES = [
    (Mix("tgvv"), "unknown policy 'tgvv': did you mean tgv? Choose one of ... tgv ... adakv"),
    (Mix(score="nothing"), "unknown score 'nothing': choose one of ... tgv ... vv_tt"),
    (Mix(allocation="nothing"), "unknown allocation 'nothing': choose one of ... entropy"),
    (Mix(retain="nothing"), "unknown retention 'nothing': choose one of ... text_first"),
    (Mix(granularity="token"), "granularity 'token'"),  # type: ignore[arg-type]
    (Mix("adakv", granularity="layer"), "'adakv' has no meaning at granularity 'layer'"),
    (Mix("rkv", granularity="layer"), "score 'rkv' has no meaning at granularity 'layer'"),
    (Mix("mixkv", granularity="layer"), "score 'mixkv' has no meaning at granularity 'layer'"),
    (Mix(score="rkv"), "score 'rkv' has no meaning at granularity 'layer': choose head"),
    (Mix("rkv", rows="text"), "rows 'text' have no meaning ... 'rkv': ... choose one of window"),
    (Mix("mixkv", rows="text"), "rows 'text' ... 'mixkv': ... choose one of window, answer"),
    (Mix("random", rows="text"), "rows 'text' have no meaning ... 'random': leave rows out"),
    (Mix(score="vv_tt", rows="text"), "rows 'text' ... 'vv_tt': leave rows out or ... all"),
    (
        Mix("tgv", rows="all"),
        "rows 'all' ... 'tgv': ... text, all_text, after_vision, window, answer",
    ),
    (Mix("snapkv", rows="none"), "rows 'none' have no meaning with the score 'snapkv'"),
    *((Mix(m, reduce="max"), f"reduce 'max' {ADDS_UP} '{m}'") for m in ("rkv", "mixkv")),
    (Mix("streaming", reduce="max"), f"reduce 'max' {ADDS_UP} 'recency'"),
    (
        Mix("tgv", reduce="max"),
        "reduce 'max' has no meaning with the score 'tgv', ... leave reduce out, or choose one of "
        "the scores vlcache, snapkv, trimkv_votes, h2o, text_rows",
    ),
    (
        Mix("h2o", reduce="max"),
        "reduce 'max' has no meaning with the score 'h2o' and rows 'all', ... choose rows text, "
        "all_text, after_vision, window, answer, latest, or leave reduce out",
    ),
    (Mix("snapkv", rows="all", reduce="max"), "the score 'snapkv' and rows 'all'"),
    (
        Mix("rkv", pooling=Pooling("sequence", forward=8, halve=4)),
        "pooling with halve has no meaning with the score 'rkv'",
    ),
    (Mix("rkv", allocation="prefixkv"), "'prefixkv' has no meaning ... 'rkv', ... one of uniform"),
    (Mix("sparsemm"), "'sparsemm' goes by a file of head scores: make one with ... visual_heads"),
    (Mix(allocation="sparsemm"), "'sparsemm' goes by a file ... set head_scores to it in --kv"),
    (Mix("dbtrimkv"), "'trimkv' reads gates of TrimKV or DBTrimKV: give their folder with --kv-ev"),
    (Mix(score="kvzap", granularity="head"), "'kvzap' reads gates of KVzap: give their folder"),
    (Mix(allocation="adakv"), "'adakv' has no meaning at granularity 'layer': choose head"),
    (
        Mix("rkv", summaries=Summaries(weight="score")),
        "summaries.weight 'score' has no meaning ... 'rkv'",
    ),
]

POOLINGS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "cube"}, "kind must be"),
    ({"reduce": "min"}, "reduce must be"),
    ({"kernel": 4}, "kernel must be an odd positive number"),
    ({"kernel": True}, "kernel must be an odd"),
    ({"kind": "sequence", "forward": -1}, "forward must be a whole number ... got -1"),
    ({"kind": "sequence", "forward": True}, "forward must be a whole number ... got True"),
    ({"kind": "grid", "back": 5000}, "back must be a whole number from 0 to 4096, got 5000"),
    ({"kind": "grid", "back": 1.5}, "back must be a whole number"),
    ({"kind": "sequence", "kernel": 7, "forward": 16}, f"kernel 7 and forward 16 {EXCLUDE}"),
    ({"kind": "grid", "kernel": 3, "back": 0}, f"kernel 3 and back 0 {EXCLUDE}"),
    ({"kind": "grid", "back": 1, "halve": 8}, "halve is 8: give forward too"),
    ({"kind": "sequence", "forward": 9, "halve": 0}, "halve must be a whole number from 1"),
    (
        {"kind": "sequence", "forward": 9, "halve": 8, "reduce": "mean"},
        "halve is 8 and reduce mean: give reduce max",
    ),
    ({"forward": 16}, "forward is 16 and kind none: give kind sequence or grid"),
]
SUMMARIES: list[tuple[dict[str, Any], str]] = [
    ({"of": "images"}, "of must be one of both, all, vision, text, none, got 'images'"),
    ({"weight": 3}, "weight must be one of tokens, score, got 3"),
    ({"decay": 0}, "decay must be a number above 0 and at most 1, got 0"),
    ({"decay": True}, "decay must be a number above 0"),
    ({"gate": 1.1}, "gate must be a number from 0 and at most 1, got 1.1"),
]
BUDGETS: tuple[Any, ...] = (
    *(0, -1, -0.1, 1.5, "1.5", "abc", "", "10%", "nan", math.nan, math.inf, "-inf", -(10**90)),
    *(True, False, None, [0.1], {"fraction": 0.1}),
    *("auto", "auto:", "auto:0", "auto:1", "auto:nan", "auto:x", "auto:0.9,", "auto:0.9,low=1"),
    *("auto:0.9,min=0", "auto:0.9,max=2", "auto:0.9,min=0.3,max=0.2", "auto:0.9,max=nan"),
)
SCHEDULES: tuple[Any, ...] = (
    *("", "8", "8:", ":0.3", "8:0.3,", "8:0.3;32:0.1", "8:0.3:1", "8.5:0.3", "x:0.3", "8:x"),
    *("-1:0.3", "8:0", "8:1.5", "8:512", "8:nan", "8:auto:0.9", f"{2**31}:0.3", "8:0.3,9:0.4"),
    *("8:0.3,9:0.3", "8:0.3,8:0.2"),
    *("9" * 5000 + ":0.1", ",".join(f"{n}:{1 - n / 99}" for n in range(MAX_STEPS + 1))),
    *(None, 8, 0.3, True, [], [8, 0.3], [[8]], [[8, 0.3, 1]], [[True, 0.3]], [[8.0, 0.3]]),
    *([[8, True]], [[8, None]], ["8:0.3"], [[8, 512]], {8: 0.3}, b"8:0.3", [b"8:"], [[]]),
)


def ask(server: dict[str, Any], options: dict[str, Any]) -> RequestOptions:
    """Resolve options whose names lack `kv_eviction_`."""
    given = {f"kv_eviction_{name}".removesuffix("_"): value for name, value in options.items()}
    return RequestOptions.resolve(EvictionConfig.from_mapping(server), given, BLOCK)


BUDGET = "0 < budget <= 1 ... tokens per KV head ... auto:0.98,min=0.02,max=0.5"
SCHEDULE = '"8:0.3,32:0.1" or [[8, 0.3], [32, 0.1]]'
FOR_USERS: list[tuple[Callable[[], Any], str]] = [
    *((partial(EvictionConfig.from_mapping, values), text) for values, text in SETTINGS),
    *((partial(ask, server, options), text) for server, options, text in REQUESTS),
    *((partial(Budget.parse, v, "--flag"), f"--flag is {v!r}: ... {BUDGET}") for v in BUDGETS),
    *((partial(parse_schedule, v, "--flag"), f"--flag is ... {SCHEDULE}") for v in SCHEDULES),
]
FOR_AUTHORS: list[tuple[Callable[[], Any], str]] = [
    *((partial(build_policy, parts), text) for parts, text in MIXES),
    *((partial(Pooling, **options), text) for options, text in POOLINGS),
    *((partial(Summaries, **options), text) for options, text in SUMMARIES),
]
REFUSALS = [
    *((EvictionConfigError, *case) for case in FOR_USERS),
    *((ValueError, *case) for case in FOR_AUTHORS),
]


@pytest.mark.parametrize(
    ("error", "call", "text"),
    REFUSALS,
    ids=[f"{number} {text[:50]}" for number, (*_, text) in enumerate(REFUSALS)],
)
def test_a_refusal_names_field_value_and_way_out(
    error: type[ValueError], call: Callable[[], Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in (registry.POOLINGS, registry.SUMMARIES):
        # Without the names that other tests of this process added.
        own = {name: known[name] for name in known.names if name.isidentifier()}
        monkeypatch.setattr(known, "_values", own)
    with pytest.raises(error) as caught:
        call()
    assert_says(str(caught.value), text)
    assert len(str(caught.value)) < 600
