# SPDX-License-Identifier: Apache-2.0
"""A recorded set of requests: tokens, kept positions and page counts must stay bit for bit.

`tests/data/recorded.json` holds what the code did at the commit it names. A change that is meant
to alter nothing must pass this test. A change that is meant to alter something records again, and
its commit says which requests changed and why:

    python -m tests.engine.test_recorded

Recording chooses inputs that rounding does not decide: noise thirty times that of float32 changes
no kept position, and no generated token is within 0.001 of the logit of another. If another CPU
still disagrees, compare with the oracle tests of `test_methods.py` there. If those pass, record
the differing request with another seed (raise `SEED`) on both machines' common ancestor, and check
that both agree.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle import methods
from oracle.emulation import Oracle
from tests.configs import pooling_name
from tests.engine.running import Ask, SteppedEngine, engine
from tests.models import (
    FAMILIES,
    TinyModel,
    model_folder,
    random_image,
    random_text,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RECORDING = Path(__file__).parents[1] / "data/recorded.json"
SEED = 0
LEAST_MARGIN = 1e-3
"""Of the log-probability of a recorded token above that of any other."""

Budget = float | int | str

# No mix names an allocation, whose key was once another.
MIXES: dict[str, dict[str, Any]] = {
    "tgv-head": {"base": "tgv", "granularity": "head"},
    "snapkv-layer": {"base": "snapkv", "granularity": "layer"},
    "grid": {"base": "tgv", "pooling": pooling_name("grid", 3, "mean")},
    "competing": {"base": "adakv", "score": "tgv", "retain": "text_first", "merge": True},
    "sequence": {
        "base": "prefixkv",
        "score": "h2o",
        "granularity": "head",
        "pooling": pooling_name("sequence", 5, "max"),
    },
}
POOLS = {"grid": methods.Pool("grid", 3, "mean"), "sequence": methods.Pool("sequence", 5, "max")}


@dataclass(frozen=True)
class Case:
    """A request: lengths of the texts around its images, and how it is evicted."""

    method: str | None
    """None: the server's."""
    budget: Budget | None
    lengths: tuple[int, ...]
    arrival: int = 0
    max_tokens: int = 12
    sizes: tuple[int, ...] = ()
    """Widths of the images in pixels; () is 112 for each."""
    prompt: int | None = None
    """Number of the case whose prompt this one repeats."""

    def ask(self, arch: str, seed: int) -> Ask:
        """Return the request for a model, with inputs made from `seed`."""
        texts = [random_text(100 * seed + i, length) for i, length in enumerate(self.lengths)]
        widths = self.sizes or (112,) * (len(texts) - 1)
        images = tuple(random_image(100 * seed + i, width, 112) for i, width in enumerate(widths))
        given = {"kv_eviction": self.method, "kv_eviction_budget": self.budget}
        xargs = {"kv_eviction_report": 1} | {k: v for k, v in given.items() if v is not None}
        text = FAMILIES[arch].image_text.join(texts)
        return Ask(text, images, self.max_tokens, xargs, self.arrival, logprobs=2)


@dataclass(frozen=True)
class Scene:
    """An engine and the requests it serves."""

    arch: str
    block_size: int
    cases: tuple[Case, ...]
    config: dict[str, Any]
    options: dict[str, Any]

    @property
    def model(self) -> TinyModel:
        return TinyModel(self.arch, image_size=112)

    @property
    def settings(self) -> dict[str, Any]:
        debug = {"record_kept": True, "check_integrity": True}
        return {"methods": MIXES, "debug": debug, **self.config}


def _cached_cases() -> tuple[Case, ...]:
    """Return cases for a small pool with a prefix cache, where some requests are preempted."""
    names = [
        *("tgv", "snapkv", "adakv", "h2o", "aircache", "prefixkv", "pyramidkv", "streaming"),
        *("vlcache", "elastic", "random", *MIXES),
    ]
    budgets: list[Budget] = [0.3, 0.5, 96, 0.2, 0.4]
    first = [
        Case(name, budgets[i % 5], (30 + 5 * i, 90 + 7 * (i % 4)), 4 * i)
        for i, name in enumerate(names)
    ]
    # The same prompts again, each by another method: hits end where the method's rows begin.
    again = [
        dataclasses.replace(first[i], method=names[i - 3], arrival=first[i].arrival + 3, prompt=i)
        for i in range(0, len(first), 2)
    ]
    # These decode for long and keep all or most of their prompts: the pool runs out.
    keeping: list[tuple[str | None, Budget | None]] = [
        ("none", None),
        (None, 1.0),
        ("tgv", 0.9),
        ("none", None),
        ("snapkv", 0.8),
        ("h2o", 0.9),
    ]
    long = [
        Case(method, budget, (40 + 10 * i, 150), 70, max_tokens=140)
        for i, (method, budget) in enumerate(keeping)
    ]
    return (*first, *again, *long)


def _whole_cases() -> tuple[Case, ...]:
    """Return cases for whole prompts, larger blocks, and images of several sizes."""
    names = ("tgv", "snapkv", "adakv", "h2o", "aircache", "prefixkv", "pyramidkv", *MIXES)
    budgets = (0.5, 0.25, 0.4, 0.3, 128, 0.2, 0.35, 0.3, 0.45, 0.25, 0.4, 0.3)
    lengths = [(20 + 3 * i, 40, 90 + 5 * i) for i in range(len(names))]
    methods_of_text = ("snapkv", "h2o", "streaming", "prefixkv", "adakv", "pyramidkv")
    return (
        *(
            Case(name, budget, lengths[i], i // 3, sizes=(168, 112 + 28 * (i % 4)))
            for i, (name, budget) in enumerate(zip(names, budgets, strict=True))
        ),
        *(Case(name, 0.3, (180 + 9 * i,), 4 + i) for i, name in enumerate(methods_of_text)),
        Case("tgv", "auto:0.9,min=0.02,max=0.9", (20, 120), 8, sizes=(224,)),
        Case("snapkv", "auto:0.85,max=0.8", (50, 110), 8),
        Case("h2o", "auto:0.97,max=0.9", (10, 50, 60), 9, sizes=(112, 224)),
        Case("tgv-head", "auto:0.7,min=0.1", (30, 30, 70, 80), 9),
        Case(None, None, (60, 100), 10),  # the server's method and budget
        Case(None, 64, (60, 110), 10),
        Case("vlcache", None, (60, 70, 60), 10),
        Case(None, None, (200,), 11),  # text only is evicted here
        Case("tgv", 0.3, (210,), 11),  # tgv needs vision
        Case(None, None, (90,), 12),  # too short
        Case("none", None, (20, 150), 12),
        Case("aircache", 0.4, (100, 30, 0), 13),  # the prompt ends with an image
        Case("elastic", 1.0, (30, 140), 13),  # the budget covers the prompt
    )


SCENES = {
    "cached": Scene(
        "llava",
        16,
        _cached_cases(),
        {"policy": "tgv", "budget": 0.3},
        {
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 96,
            "num_gpu_blocks_override": 74,
        },
    ),
    "whole": Scene(
        "qwen2_5_vl",
        32,
        _whole_cases(),
        {"policy": "snapkv", "budget": 0.4, "text_only": "evict", "floor_pages": 0},
        {"max_num_batched_tokens": 4096, "num_gpu_blocks_override": 96},
    ),
}


def packed(kept: torch.Tensor) -> str:
    """Return a mask as text: its bits, compressed."""
    bits = np.packbits(kept.flatten().numpy())
    return base64.b85encode(zlib.compress(bits.tobytes(), 9)).decode()


def unpacked(text: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the mask of this shape that `packed` wrote."""
    bits = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
    return torch.from_numpy(np.unpackbits(bits)[: int(np.prod(shape))].reshape(shape)).bool()


def served(running: SteppedEngine, scene: Scene, seeds: Sequence[int]) -> dict[str, Any]:
    """Serve a scene's requests; return what is recorded of them, as JSON has it."""
    asks = [case.ask(scene.arch, seed) for case, seed in zip(scene.cases, seeds, strict=True)]
    names: dict[str, int] = {}
    finished: dict[int, dict[str, Any]] = {}
    preempted: set[int] = set()
    free_blocks: list[int] = []
    pool = running.scheduler.kv_cache_manager.block_pool
    while len(finished) < len(asks):
        arriving = [i for i, ask in enumerate(asks) if ask.arrival == len(free_blocks)]
        names |= {running.add(asks[i]): i for i in arriving}
        for output in running.step():
            if output.finished:
                index = names[output.request_id]
                finished[index] = _record(running, output, scene.block_size)
        preempted |= {
            names[r.request_id.rsplit("-", 1)[0]]
            for r in running.scheduler.requests.values()
            if r.num_preemptions
        }
        free_blocks.append(pool.get_num_free_blocks())
    running.assert_empty()
    return {
        "preempted": sorted(preempted),
        "free_blocks": free_blocks,
        "requests": [finished[i] for i in range(len(asks))],
    }


def _record(running: SteppedEngine, output: Any, block_size: int) -> dict[str, Any]:
    length = len(output.prompt_token_ids)
    kept = running.kept(output.request_id, length)
    (completion,) = output.outputs
    margins = []
    for token, choices in zip(completion.token_ids, completion.logprobs, strict=True):
        second = max(choice.logprob for other, choice in choices.items() if other != token)
        margins.append(choices[token].logprob - second)
    found: dict[str, Any] = {
        "prompt_tokens": length,
        "cached_tokens": output.num_cached_tokens,
        "tokens": list(completion.token_ids),
        "margin": round(min(margins), 6),
        "report": (output.kv_transfer_params or {}).get("kv_eviction"),
        "pages": None,
        "kept": None,
    }
    if kept is not None:
        candidates = length // block_size * block_size
        found["pages"] = (kept[..., :candidates].sum(-1) // block_size).tolist()
        found["kept"] = packed(kept)
    return found


def differences(index: int, case: Case, now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Return in words what differs between two records of a request."""
    name = f"request {index} ({case.method}, budget {case.budget})"
    if then["report"]:  # the report may have more fields by now
        now = {**now, "report": {key: now["report"][key] for key in then["report"]}}
    said = [
        f"{name}: {key} is {now[key]}, was {then[key]}"
        for key in then
        if key not in ("kept", "margin") and now[key] != then[key]
    ]
    if now["kept"] != then["kept"] and now["kept"] and then["kept"]:
        pages = torch.tensor(then["pages"])
        shape = (*pages.shape, then["prompt_tokens"])
        ours, theirs = unpacked(now["kept"], shape), unpacked(then["kept"], shape)
        said += [
            f"{name}: layer {layer}, head {head} keeps {_positions(ours & ~theirs, layer, head)} "
            f"and not {_positions(theirs & ~ours, layer, head)}"
            for layer, head in (ours != theirs).any(-1).nonzero().tolist()
        ]
    elif now["kept"] != then["kept"]:
        said.append(f"{name}: evicted {now['kept'] is not None}, was {then['kept'] is not None}")
    return said


def _positions(mask: torch.Tensor, layer: int, head: int) -> list[int]:
    positions: list[int] = mask[layer, head].nonzero().flatten().tolist()
    return positions


@pytest.fixture(scope="module", params=list(SCENES))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def running(name: str, tiny_model: Callable[..., Path]) -> Iterator[SteppedEngine]:
    scene = SCENES[name]
    folder = tiny_model(scene.arch, image_size=scene.model.image_size)
    with started(scene, folder) as shared:
        yield shared


def started(scene: Scene, folder: Path) -> Any:
    """Return the engine of a scene, as a context manager."""
    return engine(folder, scene.settings, block_size=scene.block_size, **scene.options)


def test_recorded_requests_are_served_as_recorded(running: SteppedEngine, name: str) -> None:
    scene, recorded = SCENES[name], json.loads(RECORDING.read_text())["scenes"][name]
    found = served(running, scene, recorded["seeds"])
    pairs = zip(scene.cases, found["requests"], recorded["requests"], strict=True)
    said = [d for i, (case, now, then) in enumerate(pairs) for d in differences(i, case, now, then)]
    assert not said, "\n".join(said)
    assert found["preempted"] == recorded["preempted"]
    assert found["free_blocks"] == recorded["free_blocks"]


def test_the_recording_covers_what_it_is_for() -> None:
    scenes = json.loads(RECORDING.read_text())["scenes"]
    requests = [request for scene in scenes.values() for request in scene["requests"]]
    reports = [request["report"] for request in requests if request["report"]]
    preempted = [scenes["cached"]["requests"][i] for i in scenes["cached"]["preempted"]]
    assert {bool(request["kept"]) for request in preempted} == {True, False}
    assert sum(request["cached_tokens"] > 0 for request in requests) > 5
    assert {"method_needs_vision", "prompt_too_short"} <= {r["skip_reason"] for r in reports}
    assert all(request["margin"] > LEAST_MARGIN for request in requests)
    evicted = [request for request in requests if request["kept"]]
    assert len(evicted) > 40
    for request in evicted:
        pages = torch.tensor(request["pages"])
        kept = unpacked(request["kept"], (*pages.shape, request["prompt_tokens"]))
        block_size = 16 if request in scenes["cached"]["requests"] else 32
        candidates = request["prompt_tokens"] // block_size * block_size
        assert torch.equal(kept[..., :candidates].sum(-1), pages * block_size)
    assert any(torch.tensor(request["pages"]).unique().numel() > 1 for request in evicted)


# -- recording ------------------------------------------------------------------------------


class Seeds:
    """Chooses a seed for every request of a scene, so that rounding does not decide anything."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        self.oracle = Oracle(folder)
        self.chosen = [SEED + i for i in range(len(scene.cases))]
        for index, case in enumerate(scene.cases):
            if case.prompt is None:
                self._settle(index)

    def advance(self, index: int) -> None:
        """Take the next good seed for a request, and for those that repeat its prompt."""
        repeated = self.scene.cases[index].prompt
        index = index if repeated is None else repeated
        self.chosen[index] += 1000
        self._settle(index)

    def _settle(self, index: int) -> None:
        sharing = [index, *(i for i, c in enumerate(self.scene.cases) if c.prompt == index)]
        while not all(self._is_stable(i, self.chosen[index]) for i in sharing):
            self.chosen[index] += 1000
        for other in sharing:
            self.chosen[other] = self.chosen[index]

    def _is_stable(self, index: int, seed: int) -> bool:
        case, scene = self.scene.cases[index], self.scene
        method = case.method or scene.config["policy"]
        if method in ("none", "random", "streaming"):
            return True
        ask = case.ask(scene.arch, seed)
        prompt = self.oracle.prompt(ask.text, ask.images)
        if len(prompt.token_ids) < 128 or (method == "tgv" and not ask.images):
            return True
        budget = scene.config["budget"] if case.budget is None else case.budget
        settings = methods.Settings(
            0.5, scene.block_size, observation_window=128, floor=scene.config.get("floor_pages", 1)
        )
        torch.manual_seed(seed)  # of the noise
        return methods.is_stable(
            mix_of(method),
            self.oracle.attention(prompt),
            prompt.layout,
            self.oracle.kv_heads,
            settings,
            [auto(budget) if isinstance(budget, str) else budget],
            noise=3e-5,
            trials=3,
        )


def mix_of(method: str) -> methods.Mix:
    """Return the oracle's description of a method or of one of `MIXES`."""
    if method not in MIXES:
        return methods.METHODS[method]
    entry = dict(MIXES[method])
    base = methods.METHODS[entry.pop("base")]
    if "pooling" in entry:
        entry["pooling"] = POOLS[method]
    return dataclasses.replace(base, **entry)


def auto(budget: str) -> methods.Auto:
    """Return the oracle's description of an `auto:...` budget."""
    share, *bounds = budget.removeprefix("auto:").split(",")
    given = dict(bound.split("=") for bound in bounds)
    return methods.Auto(float(share), float(given.get("min", 0.02)), float(given.get("max", 0.5)))


def record() -> None:
    """Write `RECORDING` with what the code that is imported does."""
    scenes = {}
    for name, scene in SCENES.items():
        with tempfile.TemporaryDirectory() as root:
            folder = model_folder(root, scene.model)
            seeds = Seeds(scene, folder)
            close: list[int] | None = None
            while close is None or close:
                for index in close or ():
                    seeds.advance(index)
                with started(scene, folder) as running:
                    found = served(running, scene, seeds.chosen)
                margins = [request["margin"] for request in found["requests"]]
                close = [i for i, margin in enumerate(margins) if margin <= LEAST_MARGIN]
                print(f"{name}: tokens within {LEAST_MARGIN} in requests {close}", flush=True)
        scenes[name] = {"seeds": seeds.chosen, **found}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    ).stdout.strip()
    text = json.dumps({"commit": commit, "scenes": scenes}, indent=1)
    # A list of numbers is one line.
    text = re.sub(r"\[[\s\d,]*\]", lambda found: " ".join(found[0].split()), text)
    RECORDING.write_text(text + "\n")
    print(f"written to {RECORDING}")


if __name__ == "__main__":
    record()
