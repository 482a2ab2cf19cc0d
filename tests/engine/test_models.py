# SPDX-License-Identifier: Apache-2.0
"""Every model family in a real engine, against Hugging Face's model of the same weights.

Each family has one engine, whose chunks split images and frames. Released blocks are filled with
NaN, and all blocks are recounted after every step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from oracle.emulation import Eviction, Oracle, Prompt
from oracle.methods import METHODS, Image, Mix, Pool
from tests.engine.running import Ask, SteppedEngine, engine, stable_ask
from tests.engine.test_methods import as_setting
from tests.inputs import WITHOUT_GATES
from tests.models import FAMILIES, PATCH, TinyModel, random_image, random_text
from tests.models import random_video as video
from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.engine import platforms
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE = 16
IMAGE_SIZE = 56
SIDE = IMAGE_SIZE // PATCH
GRIDDED = replace(METHODS["tgv"], pooling=Pool("grid", 3, "mean"))
MIXES = {"gridded": GRIDDED}
SERVER = {
    "policy": "snapkv",
    "budget": 0.3,
    "text_only": "evict",
    "min_prompt_tokens": 64,
    "methods": {name: as_setting(mix) for name, mix in MIXES.items()},
    "debug": {"poison": True, "record_kept": True, "evict_at_full_budget": True},
}
OPTIONS = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 768,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 160,
    # Profiling uses the largest inputs; thousands of frames take a minute.
    "skip_mm_profiling": True,
}


@dataclass(frozen=True)
class Scene(Ask):
    """A request with images and videos."""

    videos: tuple[tuple[np.ndarray, Any], ...] = ()
    timed: bool = True
    """Whether the model uses the times of its frames."""

    def prompt(self) -> dict[str, Any]:
        videos = list(self.videos) if self.timed else [frames for frames, _ in self.videos]
        data = {"image": list(self.images), "video": videos}
        return {
            "prompt": self.text,
            "multi_modal_data": {modality: items for modality, items in data.items() if items},
        }


class FamilyOracle(Oracle):
    """An oracle that handles videos and the grids of every family."""

    def __init__(self, folder: Path, arch: str) -> None:
        super().__init__(folder)
        self.arch = arch

    @cached_property
    def vision_tokens(self) -> list[int]:
        """Ids of the tokens that stand for embeddings of images and videos."""
        config = self.model.config
        ids = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")]
        return [token for token in ids if token is not None]

    def scene(self, scene: Scene) -> Prompt:
        """Return the prompt as the model sees it."""
        given: dict[str, Any] = {"images": list(scene.images)} if scene.images else {}
        if scene.videos:
            given["videos"] = [frames for frames, _ in scene.videos]
            if scene.timed:
                names = ("fps", "duration", "total_num_frames", "frames_indices", "video_backend")
                given["video_metadata"] = [{n: told[n] for n in names} for _, told in scene.videos]
            given["do_sample_frames"] = False
        inputs = dict(self.processor(text=scene.text, return_tensors="pt", **given))
        ids = inputs["input_ids"][0]
        vision = torch.isin(ids, torch.tensor(self.vision_tokens, dtype=ids.dtype))
        places = vision.nonzero().flatten().tolist()
        images = []
        for grid in self.grids(scene, inputs):
            size = math.prod(grid)
            assert places[size - 1] == places[0] + size - 1, "text inside a grid"
            images.append(Image(places[0], size, grid))
            places = places[size:]
        assert not places, "more vision tokens than grids have"
        return Prompt(inputs, ids.tolist(), vision, tuple(images))

    def grids(self, scene: Scene, inputs: dict[str, Any]) -> list[tuple[int, int]]:
        """Return rows and columns of every run of vision tokens, images before videos."""
        if self.arch.startswith("qwen"):
            sizes = [inputs.get(f"{kind}_grid_thw") for kind in ("image", "video")]
            frames = [thw for size in sizes if size is not None for thw in size.tolist()]
            return [(h // 2, w // 2) for t, h, w in frames for _ in range(t)]
        if self.arch == "llava":
            return [(SIDE, SIDE)] * len(scene.images)
        frames = [frame for frames, _ in scene.videos for frame in frames]
        half = SIDE // 2
        if self.arch == "internvl":
            crops = {"crop_to_patches": True, "max_patches": 6}
            tiles = [
                self.processor.image_processor.get_number_of_image_patches(
                    image.height, image.width, crops
                )
                for image in scene.images
            ]
            return [(half, half)] * (sum(tiles) + len(frames))
        tiled = [grid for rows in self.newlines(scene, inputs) for grid in ((SIDE, SIDE), rows)]
        ends = [(1, 1)] * len(scene.videos)
        return [*tiled, *[(half, half)] * len(frames), *ends]

    @torch.no_grad()
    def newlines(self, scene: Scene, inputs: dict[str, Any]) -> list[tuple[int, int]]:
        """Return rows and columns after each image's square, found by the ends of its rows."""
        if not scene.images:
            return []
        model = self.model.model
        features = model.get_image_features(inputs["pixel_values"], inputs["image_sizes"])
        found = []
        for image in features.pooler_output:
            ends = (image[SIDE * SIDE :] == model.image_newline).all(1)
            columns = int(ends.nonzero()[0]) + 1
            assert ends.view(-1, columns)[:, -1].all(), "rows end elsewhere"
            assert ends.sum() == len(ends) // columns
            found.append((len(ends) // columns, columns))
        return found


@dataclass(frozen=True)
class Family:
    """A family's tiny model, in an engine and as an oracle."""

    model: TinyModel
    running: SteppedEngine
    oracle: FamilyOracle

    @property
    def sees(self) -> bool:
        return bool(self.model.image_text)

    def scene(
        self, seed: int, xargs: dict[str, Any], num_tokens: int = 20, arrival: int = 0
    ) -> Scene:
        """Return a request with text and images, and a video if the family supports it."""
        texts = [random_text(10 * seed + i, 5 + (7 * seed + 5 * i) % 30) for i in range(5)]
        sizes = [(112, 112), (168, 56), (70, 150), (200, 90)]
        first = seed % len(sizes)
        chosen = sizes[first : first + 1 + seed % 3] if self.sees else []
        images = tuple(random_image(10 * seed + i, *size) for i, size in enumerate(chosen))
        text = texts[0]
        for i in range(len(images)):
            text += self.model.image_text + texts[1 + i]
        videos = ()
        if self.model.video_text and seed % 2:
            videos = (video(seed, 3 + seed % 3, 84, 56),)
            text += self.model.video_text
        text += random_text(10 * seed + 9, 60 if self.sees else 190)
        timed = self.model.arch.startswith("qwen")
        return Scene(text, images, num_tokens, xargs, arrival, videos=videos, timed=timed)

    def stable_scene(
        self, seed: int, method: str, budget: float, arrival: int
    ) -> tuple[Scene, Prompt]:
        """Return a scene whose kept tokens do not depend on rounding, and its prompt."""
        xargs = {"kv_eviction": method, "kv_eviction_budget": budget}

        def make(attempt: int) -> Scene:
            return self.scene(seed + 100 * attempt, xargs, arrival=arrival)

        return stable_ask(self.oracle, make, eviction(method, budget), self.oracle.scene)


def eviction(method: str, budget: float) -> Eviction:
    mix: str | Mix = MIXES.get(method, method)
    return Eviction(budget, BLOCK_SIZE, observation_window=128, method=mix, text_only="evict")


_HYBRIDS = {"qwen3_5", "qwen3_5_moe", "qwen3_next", "minicpmv4_6"}
_WITH_WINDOWS = {"gemma3", "gemma4", "cohere2_vision", "exaone4_5"}
ELSEWHERE = _HYBRIDS | _WITH_WINDOWS
"""Not all of their layers are evicted, see `test_hybrids.py` and `test_windows.py`."""


BY_DAY = {"llava_onevision", "qwen3_vl", "phi3"}
"""Tiles and pooled frames, text among frames and deepstack, a language model. LLaVA and Qwen2.5-VL
are served in `test_engine.py`."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(arch, marks=() if arch in BY_DAY else pytest.mark.nightly)
        for arch in FAMILIES
        if arch not in ELSEWHERE
    ],
)
def family(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Family]:
    model = TinyModel(request.param, image_size=IMAGE_SIZE)
    folder = tiny_model(model.arch, image_size=IMAGE_SIZE)
    texts = {"image": model.image_text, "video": model.video_text}
    limits = {modality: 4 for modality, text in texts.items() if text}
    with engine(folder, SERVER, limit_mm_per_prompt=limits, **OPTIONS) as running:
        yield Family(model, running, FamilyOracle(folder, model.arch))


_TIMES = r"(<\d\.\d seconds><\|vision_start\|><\|vision_end\|>)+"
INSIDE = {
    ("qwen3_vl", "video"): _TIMES,
    ("qwen3_vl_moe", "video"): _TIMES,
    ("internvl", "image"): r"<img></img>",
    ("internvl", "video"): r"Frame1: <img></img>(\nFrame\d: <img></img>)+",
}
"""Text inside the placeholder of an image or a video, by family."""


def test_vision_is_where_the_models_tokens_are(family: Family) -> None:
    """Placeholders and token ids give the same positions; text in a placeholder is text."""
    if not family.sees:
        pytest.skip("a language model")
    running, oracle = family.running, family.oracle
    tokenizer = running.llm.get_tokenizer()
    for seed in (1, 2, 5, 5):  # the last from the processor's cache
        scene = family.scene(seed, {})
        wanted = oracle.scene(scene)
        running.add(scene)
        (request,) = running.scheduler.requests.values()
        (candidate,) = running.scheduler.candidates.values()
        ids, is_vision = np.array(request.prompt_token_ids), candidate.prompt.is_vision()
        if family.model.arch == "internvl":  # transformers writes frames with the image's token
            wanted_ids = np.where(is_vision, ids, wanted.token_ids)
        else:
            wanted_ids = np.array(wanted.token_ids)
        assert np.array_equal(ids, wanted_ids)
        video_token = tokenizer.convert_tokens_to_ids("<video>")
        assert np.array_equal(is_vision, np.isin(ids, [*oracle.vision_tokens, video_token]))
        runs = [(run.start, run.length, run.grid) for run in candidate.prompt.vision]
        assert runs == [(image.start, image.length, image.grid) for image in wanted.images]
        for feature in request.mm_features:
            place = feature.mm_position
            inside = slice(place.offset, place.offset + place.length)
            text = tokenizer.decode(ids[inside][~is_vision[inside]])
            assert re.fullmatch(INSIDE.get((family.model.arch, feature.modality), ""), text)
        while running.engine.has_unfinished_requests():
            running.step()
        running.assert_empty()


def test_tokens_and_kept_positions_are_the_oracles_alone_and_in_a_batch(family: Family) -> None:
    """Methods at several budgets; arrivals interleave with chunks and decodes."""
    running, oracle = family.running, family.oracle
    names = ("tgv", "gridded", "snapkv") if family.sees else ("snapkv", "h2o", "adakv")
    cases = [(name, budget) for name in names for budget in (0.5, 0.1)]
    before = running.counters["requests_evicted"]
    made = [family.stable_scene(1 + i, *case, arrival=i) for i, case in enumerate(cases)]
    outputs = running.run([scene for scene, _ in made])
    assert running.counters["requests_evicted"] - before == len(cases)
    for (method, budget), (scene, prompt), output in zip(cases, made, outputs, strict=True):
        message = f"{method} at {budget}"
        selection = oracle.select(prompt, eviction(method, budget))
        length = len(prompt.token_ids)
        kept = running.kept(output.request_id, length)
        assert kept is not None
        assert torch.equal(kept, selection.kept), f"{message} keeps other tokens"
        tokens = list(output.outputs[0].token_ids)
        theirs = oracle.generate(prompt, scene.max_tokens, kept, guess=tokens)
        assert tokens == theirs, message
        (alone,) = running.run([replace(scene, arrival=0)])
        assert list(alone.outputs[0].token_ids) == tokens, message
        assert torch.equal(running.kept(alone.request_id, length), kept), message


def test_everything_kept_is_stock(family: Family) -> None:
    """Copying all pages to fresh blocks gives the tokens of a request without eviction."""
    running, oracle = family.running, family.oracle
    full = {"kv_eviction": "snapkv", "kv_eviction_budget": 1.0}
    none = {"kv_eviction": "none"}
    before = running.counters["requests_evicted"]
    scenes = [family.scene(20 + i, full, 40) for i in range(3)]
    evicted = running.tokens(scenes)
    assert running.counters["requests_evicted"] - before == len(scenes)
    assert evicted == running.tokens([replace(scene, xargs=none) for scene in scenes])
    assert running.counters["requests_evicted"] - before == len(scenes)
    assert evicted == [oracle.generate(oracle.scene(scene), 40) for scene in scenes]


def test_every_method_keeps_whole_pages_of_the_prompt(family: Family) -> None:
    """The pages fit the budget and include the first tokens and the tail."""
    running = family.running
    needs = {"sparsemm", *(() if family.sees else ("tgv", "aircache"))}  # a file, or images
    asks = [
        family.scene(31, {"kv_eviction": name, "kv_eviction_budget": 0.2, "kv_eviction_report": 1})
        for name in WITHOUT_GATES
        if name not in needs
    ]
    for output in running.run(asks):
        report = output.kv_transfer_params["kv_eviction"]
        assert report["skip_reason"] is None
        length = len(output.prompt_token_ids)
        candidates = length // BLOCK_SIZE * BLOCK_SIZE
        kept = running.kept(output.request_id, length)
        assert kept is not None
        assert kept[..., :4].all()
        counts = kept[..., :candidates].sum(-1)
        assert (counts % BLOCK_SIZE == 0).all()
        tail = length - candidates
        assert counts.float().mean() + tail == report["kept_tokens"]
        assert report["kept_tokens"] <= max(0.2 * length, BLOCK_SIZE + tail)


def test_pruned_videos(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pruned video is one run; everything kept is stock, and chunks change no kept token.

    vLLM's CPU model runner could prune, but never sets the attribute that says so.
    """
    folder, options = tiny_model("qwen2_5_vl"), {**OPTIONS, "video_pruning_rate": 0.5}
    with pytest.raises(UnsupportedByEvictionError, match="--video-pruning-rate"):
        EngineArgs(
            str(folder), additional_config={CONFIG_KEY: SERVER}, **options
        ).create_engine_config()
    monkeypatch.setattr(platforms, "CPU", replace(platforms.CPU, prunes_videos=True))
    text = random_text(1, 30) + TinyModel("qwen2_5_vl").video_text + random_text(2, 60)
    frames = video(3, 6, 112, 112)
    whole = 3 * 4 * 4  # two frames of 8 x 8 patches are 4 x 4 tokens
    full = {"kv_eviction": "tgv", "kv_eviction_budget": 1.0}
    ask = Scene(text, (), 24, full, videos=(frames,))
    with engine(folder, SERVER, limit_mm_per_prompt={"video": 1}, **options) as running:
        running.worker.model_runner.is_multimodal_pruning_enabled = True
        running.add(ask)
        (candidate,) = running.scheduler.candidates.values()
        (run,) = candidate.prompt.vision
        assert (run.length, run.grid) == (whole // 2, None)
        while running.engine.has_unfinished_requests():
            running.step()
        plain = replace(ask, xargs={"kv_eviction": "none"})
        assert running.tokens([ask]) == running.tokens([plain])
        for method in ("tgv", "snapkv"):
            asked = replace(ask, xargs={"kv_eviction": method, "kv_eviction_budget": 0.4})
            other = Scene(random_text(7, 125), (), 8, asked.xargs)
            (alone,), (_, beside) = running.run([asked]), running.run([other, asked])
            length = len(alone.prompt_token_ids)
            assert length == whole // 2 + len(running.llm.get_tokenizer().encode(text)) - 1
            kept = [running.kept(output.request_id, length) for output in (alone, beside)]
            assert torch.equal(*kept)
            assert 0 < kept[0].float().mean() < 0.45
            assert alone.outputs[0].token_ids == beside.outputs[0].token_ids
