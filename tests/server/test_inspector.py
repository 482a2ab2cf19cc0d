# SPDX-License-Identifier: Apache-2.0
"""The page at `/kv-eviction/`, of a real server with a tiny model, in a real browser."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from measure.messages import png_url
from tests.server.serving import ChatServer, serve
from vllm_tgvkv.shared.counters import SKIP_REASONS
from vllm_tgvkv.visual_heads import PAGE_SIZE, draw_page, font_files

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]

KEY = "a-key"
SCRIPTS = Path(__file__).parents[2] / "server/inspector"
PATIENCE_MS = 120_000
GRID = 24
TOKENS = 64
"""Length of an answer if nothing else is asked for."""
PAGE, OTHER = (draw_page(np.random.default_rng(seed), font_files()).image for seed in (1, 2))
QUESTION = "What is the value of K?"
ATTACK = """<img src=x onerror="window.attacked = true"><script>window.attacked = true</script>"""
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--no-first-run", "--disable-quic"),
)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that answers in letters only, which pages and shells show as they are."""
    folder = tmp_path_factory.mktemp("letters") / "llava"
    shutil.copytree(tiny_model(image_size=PAGE_SIZE, query_key_gain=3.0, seed=1), folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    letters = [vocabulary[letter] for letter in string.ascii_letters]
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("lm_head.weight")]
    # The logit of all other tokens is 0, which is never the largest.
    silent = weights[name].new_zeros(weights[name].shape)
    silent[letters] = weights[name][letters]
    weights[name] = silent
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    log = tmp_path_factory.mktemp("inspector") / "server.log"
    flags = ["--block-size", "16", "--served-model-name", "demo", "--max-model-len", "2048"]
    mixes = {"tgv-head": {"base": "tgv", "granularity": "head"}}
    config = {"policy": "tgv-head", "methods": mixes}
    with serve(model, log, config, key=KEY, flags=flags, start_seconds=600) as running:
        yield running


@pytest.fixture(scope="module")
def cutting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """Start a server that cuts each cache three times."""
    log = tmp_path_factory.mktemp("cutting") / "server.log"
    flags = ["--block-size", "16", "--served-model-name", "demo"]
    config = {"decode": {"schedule": [[0, 0.4], [2, 0.2], [3, 0.1]]}}
    options: dict[str, Any] = {"key": KEY, "flags": flags, "start_seconds": 600}
    with serve(model, log, config, budget=None, **options) as running:
        yield running


def ask_directly(server: ChatServer, max_tokens: int, **xargs: Any) -> Any:
    """Ask about the page by the API of chats."""
    image = {"type": "image_url", "image_url": {"url": png_url(PAGE)}}
    content = [image, {"type": "text", "text": QUESTION}]
    return server.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"vllm_xargs": xargs},
    )


@pytest.fixture(scope="module")
def right(server: ChatServer) -> str:
    """Return the answer of the full cache to the question about the page."""
    text: str = ask_directly(server, TOKENS, kv_eviction="none").choices[0].message.content
    assert len(text) == TOKENS
    return text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield running
        running.close()


Opener = Callable[..., Any]


@pytest.fixture
def opened(server: ChatServer, browser: Any) -> Iterator[Opener]:
    with opener(server, browser) as open_page:
        yield open_page


@contextmanager
def opener(server: ChatServer, browser: Any) -> Iterator[Opener]:
    """Open the page with a key; fail on requests to other servers and on errors in the console."""
    contexts, strangers, errors = [], [], []

    def on_request(request: Any) -> None:
        if not request.url.startswith((server.url, "data:", "blob:")):
            strangers.append(request.url)

    def on_console(message: Any) -> None:
        # The browser itself reports answers of 4xx; the tests check what the page says.
        if message.type == "error" and "Failed to load resource" not in message.text:
            errors.append(message.text)

    def open_page(address: str = "", **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        credentials = {"username": "anybody", "password": KEY}
        context = browser.new_context(http_credentials=credentials, **options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("request", on_request)
        page.on("console", on_console)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{server.url}/kv-eviction/{address}")
        playwright.expect(page.locator("#server-facts")).to_contain_text("demo", timeout=60_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert strangers == []
    assert errors == []


def get(server: ChatServer, path: str) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.get(f"{server.url}/kv-eviction/{path}", headers=headers, timeout=60).json()


def png(image: Image.Image) -> dict[str, Any]:
    data = io.BytesIO()
    image.save(data, "PNG")
    return {"name": "page.png", "mimeType": "image/png", "buffer": data.getvalue()}


def fill(page: Any, question: str = QUESTION) -> None:
    """Put one image and a question in the form."""
    for _ in range(page.locator("#pictures li").count()):
        page.locator("#pictures button").first.click()
    page.set_input_files("#file", png(PAGE))
    playwright.expect(page.locator("#pictures li")).to_have_count(1)
    page.fill("#question", question)


@contextmanager
def asking(page: Any) -> Iterator[list[Any]]:
    """Collect request and answer of the question that the block asks, and wait for the drawing."""
    found: list[Any] = []
    with page.expect_response(lambda response: response.url.endswith("/ask")) as answered:
        yield found
    found += [answered.value.request.post_data_json, answered.value.json()]
    page.wait_for_selector("body:not(.running)")


def ask(page: Any) -> Any:
    fill(page)
    with asking(page) as found:
        page.click("#ask")
    return found[1]


def refuse(page: Any, route: Any, status: int | None, message: str = "") -> None:
    """Let the server answer with an error, or not at all."""

    def answer(found: Any) -> None:
        if status is None:
            found.abort()
        else:
            found.fulfill(status=status, json={"error": {"message": message}})

    page.route(route, answer)


def choose(page: Any, layer: int, head: int) -> None:
    """Move both sliders by keyboard; position 0 means all."""
    for name, value in (("layer", layer), ("head", head)):
        page.focus(f"#{name}")
        page.keyboard.press("Home")
        for _ in range(value + 1):
            page.keyboard.press("ArrowRight")
    title = re.compile(f"layer {layer}, head {head}$")
    playwright.expect(page.locator("#map-title")).to_have_text(title)


def brightness(page: Any) -> np.ndarray:
    """Measure the middle of every patch on the canvas, 0 to 255, [GRID * GRID]."""
    script = f"""() => {{
        const canvas = document.getElementById("map"), pen = canvas.getContext("2d");
        const [w, h] = [canvas.width / {GRID}, canvas.height / {GRID}];
        return Array.from({{length: {GRID * GRID}}}, (_, index) => {{
            const [x, y] = [(index % {GRID} + .25) * w, (Math.floor(index / {GRID}) + .25) * h];
            const {{data}} = pen.getImageData(x, y, w / 2, h / 2);
            return data.reduce((sum, v, i) => sum + (i % 4 < 3 ? v : 0), 0) * 4 / 3 / data.length;
        }});
    }}"""
    return np.array(page.evaluate(script))


def undimmed(image: Image.Image = PAGE) -> np.ndarray:
    """Measure the same in the picture itself."""
    size = GRID * 40
    pixels = np.asarray(image.convert("RGB").resize((size, size)), dtype=float).mean(-1)
    patches = pixels.reshape(GRID, 40, GRID, 40)[:, 10:30, :, 10:30]
    return patches.mean((1, 3)).ravel()


def test_answers_and_numbers_are_those_of_the_server(
    server: ChatServer, opened: Opener, right: str
) -> None:
    page = opened()
    answers = ask(page)
    evicted = answers["evicted"]
    assert page.inner_text("#full-text") == answers["full"]["text"] == right
    assert page.inner_text("#evicted-text") == evicted["text"] != ""
    saved = 1 - evicted["blocks"] / evicted["blocks_before"]
    assert 0.5 < saved < 1
    assert page.inner_text("#saved") == f"{100 * saved:.0f}\N{NO-BREAK SPACE}%"
    assert page.locator("#blocks .held").count() == evicted["blocks"]
    assert page.locator("#skip").is_hidden()

    trace = get(server, f"requests/{evicted['trace']}")
    assert page.url.endswith(f"#{evicted['trace']}")
    names = ("prompt_tokens", "kept_tokens", "blocks_before", "blocks_after")
    tiles = page.locator("#numbers dd").all_inner_texts()
    assert tiles == [str(trace[name]) for name in names]
    cells = page.locator("#pages [role=gridcell]").all_inner_texts()
    assert cells == [str(pages) for row in trace["pages"] for pages in row]
    (span,) = trace["vision"]
    kept = sum(trace["kept_by"][span["start"] :][: span["length"]])
    mean = kept / trace["layers"] / trace["kv_heads"]
    of_image = page.locator("#shares .share").first.inner_text()
    assert f"{round(mean, 1):g} of {GRID * GRID} tokens" in of_image


def test_kept_patches_are_bright_and_the_others_dim(server: ChatServer, opened: Opener) -> None:
    page = opened()
    name = ask(page)["evicted"]["trace"]
    trace = get(server, f"requests/{name}")
    start = trace["vision"][0]["start"]
    relative = brightness(page) / undimmed()
    kept_by = np.array(trace["kept_by"][start : start + GRID * GRID])
    assert len(set(kept_by)) > 2
    levels = [np.median(relative[kept_by == number]) for number in sorted(set(kept_by))]
    assert levels == sorted(levels)

    seen = set()
    for layer, head in ((0, 0), (trace["layers"] - 1, 0), (trace["layers"] - 1, 1)):
        choose(page, layer, head)
        sets = get(server, f"requests/{name}/layers/{layer}")["token_sets"]
        (positions,) = [s["positions"] for s in sets if head in s["heads"]]
        kept = np.isin(np.arange(start, start + GRID * GRID), positions)
        seen.add(tuple(kept))
        relative = brightness(page) / undimmed()
        assert 0 < kept.sum() < kept.size
        assert relative[kept].min() > 0.9
        assert relative[~kept].max() < 0.6
        assert f"{kept.sum()} of {kept.size} patches" in page.inner_text("#map-said")
    assert len(seen) == 3

    page.select_option("#view", "scores")
    playwright.expect(page.locator("#map-title")).to_contain_text("Scores")
    assert np.abs(brightness(page) / undimmed() - relative).max() > 0.1


def test_everything_is_reached_by_keyboard(server: ChatServer, opened: Opener) -> None:
    page = opened()
    name = ask(page)["evicted"]["trace"]
    trace = get(server, f"requests/{name}")
    page.focus("#file")
    order = ["file"]
    while order[-1] != "end" and len(order) < 80:
        page.keyboard.press("Tab")
        of = "document.activeElement"
        order.append(page.evaluate(f"{of}.id || {of}.dataset.layer || {of}.tagName"))
        outline = page.evaluate(
            f"[{of}, {of}.nextElementSibling]"
            ".some((e) => e && getComputedStyle(e).outlineStyle !== 'none')"
        )
        assert order[-1] == "BODY" or outline
        if order[-1] == "BODY":
            break
    wanted = ["file", "sample", "saved-file", "question", "start", "expected"]
    wanted += ["method", "max-tokens", "budget", "ask"]
    wanted += ["labels", "copy-link", "save-file", "copy-curl", "copy-python"]
    wanted += ["layer", "head", "span", "view", "zoom-in", "map", "pin-a", "save-map", "0"]
    wanted += ["SUMMARY", "compare-budgets", "compare"]
    assert [stop for stop in order if stop in wanted] == wanted

    page.focus("#pages [tabindex='0']")
    title = page.locator("#map-title")
    for key, layer, head in (
        ("Enter", 0, 0),
        ("ArrowDown", 1, 0),
        ("ArrowRight", 1, 1),
        ("PageDown", trace["layers"] - 1, 1),
        ("Home", trace["layers"] - 1, 0),
    ):
        page.keyboard.press(key)
        playwright.expect(title).to_have_text(f"Kept patches: layer {layer}, head {head}")
        assert [page.input_value(f"#{n}") for n in ("layer", "head")] == [
            str(layer + 1),
            str(head + 1),
        ]
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        pages = trace["pages"][layer][head]
        assert label == f"Layer {layer}, head {head}: {pages} page{'s' * (pages != 1)}"
        assert f"{pages * 16} tokens" in page.inner_text("#pages-said")
        assert page.locator("#pages [aria-selected=true]").count() == 1
    page.keyboard.press("Escape")
    playwright.expect(title).to_have_text("Kept patches: all layers, all heads")
    page.click("#pages [data-layer='2'][data-head='1']")
    playwright.expect(title).to_have_text("Kept patches: layer 2, head 1")

    page.focus("#map")
    for key, row, column in (("ArrowDown", 0, 0), ("ArrowDown", 1, 0), ("ArrowRight", 1, 1)):
        page.keyboard.press(key)
        position = trace["vision"][0]["start"] + row * GRID + column
        said = f"Token {position} in row {row}, column {column}, kept by "
        assert page.inner_text("#map-said").startswith(said)


def test_another_budget_asks_the_evicted_cache_again(opened: Opener) -> None:
    page = opened()
    ask(page)
    full = page.inner_text("#full-text")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/ask" in request.url else None)
    page.focus("#budget")
    with asking(page) as found:
        for _ in range(3):  # within the page's delay for further changes
            page.keyboard.press("ArrowRight")
    assert len(asked) == 1
    asked_for, answers = found
    assert asked_for["compare"] is False
    assert asked_for["budget"] == 0.2
    assert page.inner_text("#full-text") == full
    assert page.inner_text("#evicted-blocks") == f"{answers['evicted']['blocks']} blocks"

    with asking(page) as found:
        page.keyboard.press("End")
    assert found[1]["evicted"]["skip_reason"] == "budget_covers_prompt"
    assert "the budget holds the whole prompt" in page.inner_text("#skip")
    assert page.inner_text("#saved") == "0\N{NO-BREAK SPACE}%"
    assert page.locator("#trace").is_hidden()

    with asking(page) as found:
        page.check("[value=auto]", force=True)
    assert found[0]["budget"] == "auto:0.98"
    with asking(page) as found:
        page.select_option("#method", "snapkv")
    assert found[1]["evicted"]["policy"] == "snapkv"

    # A running question is cancelled. It never reaches the server, which could answer it in time.
    def hold(route: Any) -> None:
        if route.request.post_data_json["policy"] != "h2o":
            route.continue_()

    page.route("**/ask", hold)
    page.select_option("#method", "h2o")
    playwright.expect(page.locator("#cancel")).to_be_visible()
    with page.expect_event("requestfailed") as cancelled, asking(page) as found:
        page.select_option("#method", "tgv")
    assert cancelled.value.post_data_json["policy"] == "h2o"
    assert found[0]["policy"] == "tgv"
    assert page.inner_text("#alert") == ""


def test_every_reason_for_no_eviction_is_explained() -> None:
    table = (SCRIPTS / "answers.js").read_text().partition("SKIP_REASONS = {")[2].partition("};")[0]
    assert re.findall(r"^  (\w+):", table, re.MULTILINE) == list(SKIP_REASONS)


def test_mistakes_are_reported_and_the_page_keeps_working(
    server: ChatServer, opened: Opener, browser: Any, right: str
) -> None:
    stranger = browser.new_page()
    with pytest.raises(playwright.Error, match="AUTH"):  # there is no user to ask for the key
        stranger.goto(f"{server.url}/kv-eviction/")
    assert stranger.locator("#form").count() == 0
    stranger.close()

    page = opened()
    alert, expect = page.locator("#alert"), playwright.expect
    page.click("#ask")
    expect(alert).to_contain_text("Choose an image first")
    text = {"name": "notes.png", "mimeType": "image/png", "buffer": b"no image"}
    for file, said in (
        (text, "notes.png is not an image that can be read"),
        ({**text, "buffer": bytes(25 << 20)}, "larger than 24 MiB"),
        (png(Image.new("1", (10_000, 6_500))), "65 megapixels"),
    ):
        page.set_input_files("#file", file)
        expect(alert).to_contain_text(said)

    fill(page)
    expect(alert).to_be_empty()
    page.route(
        "**/ask",
        lambda route: route.continue_(post_data={**route.request.post_data_json, "budget": 7.5}),
    )
    with asking(page):
        page.click("#ask")
    expect(alert).to_contain_text("give a fraction of the prompt")
    page.unroute("**/ask")
    for field, wrong, good, said in (
        ("#max-tokens", "5000", str(TOKENS), "from 1 to 1024"),
        ("#defer", "5000", "", "give a number up to 1024"),
    ):
        page.fill(field, wrong)
        page.click("#ask")
        expect(alert).to_contain_text(said)
        page.fill(field, good)
    page.select_option("#later", "schedule")
    with asking(page):  # this server sets no memory aside for later evictions
        page.click("#ask")
    expect(alert).to_contain_text('{"decode": {"on_request": true}}')
    page.select_option("#later", "ceiling")
    page.fill("#ceiling", "0")
    page.click("#ask")
    expect(alert).to_contain_text("whole number, at least 1")
    page.select_option("#later", "")
    for status, said in (
        (400, "is not base64"),
        (422, "did not accept this request"),
        (401, "Reload the page"),
        (409, "this server does not evict"),
        (413, "too large for the server"),
        (500, "status 500"),
        (None, "did not answer"),
    ):
        refuse(page, "**/ask", status, said)
        page.click("#ask")
        expect(alert).to_contain_text(said)
        page.unroute("**/ask")
        assert page.locator("#answers").is_hidden()
    ask(page)
    expect(alert).to_be_empty()
    assert page.inner_text("#full-text") == right


def test_text_is_never_taken_for_html(opened: Opener) -> None:
    page = opened()

    def poison(route: Any) -> None:
        real = route.fetch().json()
        if "evicted" in real:
            real["full"]["text"] = real["evicted"]["text"] = ATTACK
            real["evicted"]["policy"] = real["evicted"]["budget"] = ATTACK
        for entry in [real, *real.get("requests", [])]:
            if "granularity" in entry:
                entry["policy"] = entry["budget"] = ATTACK
        route.fulfill(json=real)

    page.route(re.compile("/(ask|requests.*)$"), poison)
    fill(page, f"{ATTACK} {QUESTION}")
    with asking(page):
        page.click("#ask")
    assert page.inner_text("#full-text") == ATTACK
    assert page.inner_text("#evicted-text") == ATTACK
    playwright.expect(page.locator("#recent-list strong").first).to_contain_text(ATTACK)
    assert ATTACK in page.inner_text("#trace-about")
    assert page.locator("img").count() == 1  # the preview
    assert page.evaluate("window.attacked") is None


def test_cuts_are_listed_stepped_through_and_set_by_the_form(
    cutting: ChatServer, browser: Any
) -> None:
    with opener(cutting, browser) as open_page:
        page = open_page()
        evicted = ask(page)["evicted"]
        cuts = evicted["cuts"]
        assert [cut["answer_tokens"] for cut in cuts] == [0, 2, 3]
        times = ["Before", "After 2 tokens of", "After 3 tokens of"]
        said = [
            f"{when} the answer: {cut['blocks_before']} → {cut['blocks_after']} blocks"
            for when, cut in zip(times, cuts, strict=True)
        ]
        assert page.locator("#cuts li").all_inner_texts() == said
        listed = page.locator("#recent-list a").first
        playwright.expect(listed).to_contain_text("3 cuts")

        dimmed = []
        page.focus("#cut")
        for key, index in ((None, 2), ("ArrowLeft", 1), ("ArrowLeft", 0), ("End", 2), ("Home", 0)):
            if key is not None:
                page.keyboard.press(key)
            playwright.expect(page.locator("#cut-said")).to_have_text(said[index])
            assert page.inner_text("#cut-value") == f"{index + 1} of 3"
            left = f"{TOKENS - cuts[index]['answer_tokens']} tokens of the answer came after"
            assert left in page.inner_text("#prompt-text")
            trace = get(cutting, f"requests/{evicted['trace']}?cut={index}")
            tiles = page.locator("#numbers dd").all_inner_texts()
            sizes = [cuts[index][n] for n in ("kept_tokens", "blocks_before", "blocks_after")]
            assert tiles == [str(trace["prompt_tokens"]), *map(str, sizes)]
            cells = page.locator("#pages [role=gridcell]").all_inner_texts()
            assert cells == [str(pages) for row in trace["pages"] for pages in row]
            assert page.evaluate("document.activeElement.id") == "cut"
            dimmed.append(brightness(page).mean())
        assert dimmed[0] < dimmed[1] < dimmed[2] == dimmed[4]  # each cut keeps fewer patches
        choose(page, 1, 0)
        (found,) = get(cutting, f"requests/{evicted['trace']}/layers/1?cut=0")["token_sets"]
        span = trace["vision"][0]
        kept = sum(0 <= p - span["start"] < span["length"] for p in found["positions"])
        assert f"{kept} of {span['length']} patches" in page.inner_text("#map-said")

        # In place of the server's schedule; a change asks the evicted cache again.
        with asking(page) as found:
            page.select_option("#later", "none")
        assert (found[0]["schedule"], found[0]["compare"]) == ("none", False)
        assert len(found[1]["evicted"]["cuts"]) == 1
        with asking(page) as found:
            page.fill("#defer", "2")
            page.keyboard.press("Tab")
        assert found[0]["defer"] == 2
        (cut,) = found[1]["evicted"]["cuts"]
        assert cut["answer_tokens"] == 2

        with asking(page):
            page.select_option("#later", "schedule")
        assert page.is_disabled("#defer")
        assert page.is_disabled("#budget")
        with asking(page) as found:
            page.fill("#schedule", "1:0.5, 3:0.2")
            page.keyboard.press("Tab")
        assert not {"budget", "defer", "ceiling"} & found[0].keys()
        evicted = found[1]["evicted"]
        assert evicted["decode"] == {"schedule": [[1, 0.5], [3, 0.2]]}
        assert page.locator("#cuts li").count() == len(evicted["cuts"]) == 2
        assert "then in steps to 20\N{NO-BREAK SPACE}%" in page.inner_text(".verdict")

        with asking(page) as found:
            page.select_option("#later", "ceiling")
        assert (found[0]["ceiling"], found[0]["defer"]) == (256, 2)
        assert page.is_enabled("#defer")
        assert found[1]["evicted"]["decode"] == {"max_tokens": 256}
        assert "then 256 tokens" in page.inner_text(".verdict")


def test_steps_of_recall_show_where_the_answer_looks(
    model: Path, tmp_path: Path, browser: Any
) -> None:
    flags = ["--block-size", "16", "--served-model-name", "demo"]
    config = {"policy": "reach", "when": "always", "recall": {"every": 4, "gib": 0.1}}
    started = serve(model, tmp_path / "server.log", config, key=KEY, flags=flags)
    with started as recalling, opener(recalling, browser) as open_page:
        page = open_page()
        evicted = ask(page)["evicted"]
        changes = get(recalling, f"requests/{evicted['trace']}")["cuts"]
        cut, *steps = changes
        assert [step["answer_tokens"] for step in steps] == list(range(8, TOKENS - 1, 4))
        assert cut["recalled_tokens"] is None
        assert all(step["recalled_tokens"] >= 0 for step in steps)
        assert sum(step["recalled_tokens"] for step in steps) > 0
        assert page.inner_text("#cut-kind") == "Step"
        page.focus("#cut")
        for key, index in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("End", len(steps))):
            page.keyboard.press(key)
            length = changes[index]["answer_tokens"]
            said = re.compile(f"After {length} tokens of the answer: ([0-9.]+)?")
            playwright.expect(page.locator("#cut-said")).to_have_text(said)
            if index:
                (number,) = re.findall(
                    r": ([0-9.]+) tokens per KV head", page.inner_text("#cut-said")
                )
                came_back = steps[index - 1]["recalled_tokens"]
                assert float(number) == pytest.approx(came_back, abs=0.051)
            assert page.inner_text("#cut-answer q") == evicted["text"][:length]
            trace = get(recalling, f"requests/{evicted['trace']}?cut={index}")
            kept = [number / trace["layers"] / trace["kv_heads"] for number in trace["kept_by"]]
            shown = page.evaluate("import('./state.js').then(({state}) => Array.from(state.kept))")
            assert shown == pytest.approx(kept)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_have_names_and_text_has_contrast(opened: Opener, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    ask(page)
    page.click("#compare")
    third = page.locator("#multiples .multiple").nth(2)
    playwright.expect(third).not_to_have_text(re.compile("\u2026"), timeout=PATIENCE_MS)
    page.click("#compare-stop")
    page.select_option("#view", "reasons")
    page.click("#thumbnails-open summary")
    playwright.expect(page.locator("#thumbnails button")).not_to_have_count(0)
    for side in ("a", "b"):
        page.click(f"#pin-{side}")
    page.click("#copy-curl")
    playwright.expect(page.locator("#offer-text")).to_be_visible()
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "slider", "combobox", "textbox", "spinbutton", "radio", "checkbox", "link"}
    roles |= {"gridcell", "columnheader", "rowheader", "grid", "application", "region", "form"}
    named = [node for node in tree if node.get("role", {}).get("value") in roles]
    assert len({node["role"]["value"] for node in named}) >= len(roles) - 3
    assert [node for node in named if not node.get("name", {}).get("value")] == []

    low = page.evaluate(
        """() => {
        const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
            .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
        const ground = (element) => {
            const found = numbers(getComputedStyle(element).backgroundColor);
            return found[3] === 0 ? ground(element.parentElement) : found;
        };
        const low = [];
        for (const element of document.querySelectorAll("body *")) {
            const text = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
            if (!text || !element.checkVisibility({visibilityProperty: true})) continue;
            const style = getComputedStyle(element);
            if (parseFloat(style.fontSize) === 0) continue;
            const [a, b] = [light(numbers(style.color)), light(ground(element))];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) low.push([element.textContent.trim().slice(0, 30), ratio]);
        }
        return low;
    }"""
    )
    assert low == []


def pixels(page: Any, canvas: str, columns: int, rows: int) -> list[tuple[int, int, int]]:
    """Return the colour of each patch of a canvas, above its middle, where no stroke is."""
    script = """([selector, columns, rows]) => {
        const canvas = document.querySelector(selector), pen = canvas.getContext("2d");
        return Array.from({length: columns * rows}, (_, index) => {
            const x = ((index % columns) + 0.5) * canvas.width / columns;
            const y = (Math.floor(index / columns) + 0.15) * canvas.height / rows;
            return [...pen.getImageData(x, y, 1, 1).data].slice(0, 3);
        });
    }"""
    return [tuple(found) for found in page.evaluate(script, [canvas, columns, rows])]


def colours(name: str) -> dict[str, tuple[int, int, int]]:
    """Return a palette of the page's script."""
    text = (SCRIPTS / "colours.js").read_text()
    block = text.partition(f"export const {name} = {{")[2].partition("};")[0]
    found = re.findall(r'(\w+): (?:\{ colour: )?"#(\w{6})"', block)
    return {word: tuple(bytes.fromhex(code)) for word, code in found}  # type: ignore[misc]


def sets_of(server: ChatServer, name: str, layer: int, head: int) -> dict[str, Any]:
    """Return the token set of one head."""
    sets = get(server, f"requests/{name}/layers/{layer}")["token_sets"]
    (found,) = [of_set for of_set in sets if head in of_set["heads"]]
    return dict(found)


def test_all_methods_are_compared(server: ChatServer, opened: Opener, right: str) -> None:
    methods = [name for name in get(server, "status")["methods"] if name != "none"]
    page = opened()
    responses: list[Any] = []
    page.on("response", lambda found: responses.append(found) if "/ask" in found.url else None)
    fill(page)
    page.fill("#max-tokens", "2")  # so that some answers equal the full cache's
    page.click("#compare")
    playwright.expect(page.locator("#compare-progress")).to_be_visible()
    said = page.locator("#compare-said")
    all_answers = f"{3 * len(methods)} answers of {3 * len(methods)}"
    playwright.expect(said).to_contain_text(all_answers, timeout=PATIENCE_MS)
    asked = [found.request.post_data_json for found in responses]
    budgets = [0.05, 0.1, 0.25]
    assert [(body["policy"], body["budget"]) for body in asked] == [
        (method, budget) for method in methods for budget in budgets
    ]
    assert [body["compare"] for body in asked] == [True] + [False] * (len(asked) - 1)
    answers = [found.json()["evicted"] for found in responses]
    full = responses[0].json()["full"]["text"]
    assert full == right[:2]
    cells = page.locator("#multiples .multiple")
    texts = [answer["text"] for answer in answers]
    for cell, answer in zip(cells.all(), answers, strict=True):
        assert cell.locator(".multiple-answer").inner_text() == answer["text"]
        memory = 100 * answer["blocks"] / answer["blocks_before"]
        number = re.search(r"([\d.]+)", cell.locator(".note").inner_text())
        assert number is not None
        assert float(number[1]) == pytest.approx(memory, abs=0.51)
    verdicts = ["= same" if text == full else "≠ different" for text in texts]
    assert page.locator("#multiples strong").all_inner_texts() == verdicts
    same = verdicts.count("= same")
    assert 0 < same < len(answers)
    assert said.inner_text().endswith(f". {same} same, {len(answers) - same} different.")
    expected = next(text for text in texts if text.lower() != full.lower())
    page.fill("#expected", expected)
    page.keyboard.press("Tab")
    rights = [text.lower() == expected.lower() for text in texts]
    verdicts = ["✓ right" if is_right else v for v, is_right in zip(verdicts, rights, strict=True)]
    assert page.locator("#multiples strong").all_inner_texts() == verdicts
    assert f". {sum(rights)} right, {same} same, " in said.inner_text()
    assert page.inner_text("#compare-asked").endswith("≠\N{NO-BREAK SPACE}not right")

    page.click("#compare")
    playwright.expect(said).to_contain_text(re.compile("Asked [1-9]"), timeout=PATIENCE_MS)
    page.click("#compare-stop")
    playwright.expect(page.locator("#compare-stop")).to_be_hidden()
    number = len(responses)
    assert int(said.inner_text().split()[0]) < len(answers) // 2
    page.wait_for_timeout(500)
    assert len(responses) == number
    page.fill("#compare-budgets", "0.1, much")
    page.click("#compare")
    playwright.expect(page.locator("#alert")).to_contain_text("fractions or tokens per KV head")


VERDICTS = [
    ("3895980. This is a", "3895980.", "3895980", "right"),
    ("3895980. This is a", "3895980.", "", "same up to here"),
    ("3895980", " 3895980.\n", "", "same up to here"),
    (" 3895980.", "3895980. ", "77", "same"),
    ("38959801", "3895980.", "3895980", "different"),
    ("38", "3895980.", "3895980", "different"),
    ("1.5 or 2.5", "2", "5", "different"),
    ("", "3895980", "", "different"),
    ("The  new\nyork (NY)?", "Rome", "New York (NY)", "right"),
    ("答案是东京。", "京都", "东京", "right"),
]
"""An answer, the full cache's one, what is expected, and what it is."""


def test_the_expected_answer_is_judged_framed_and_saved(
    model: Path, opened: Opener, tmp_path: Path
) -> None:
    """Of a page that is drawn here, and then of the same page as the model's own sample."""
    page, expect = opened(), playwright.expect
    for text, full, expected, verdict in VERDICTS:
        script = "(given) => import('./differences.js').then((d) => d.verdictOf(...given))"
        assert page.evaluate(script, [text, full, expected]) == verdict, text
    page.click("#sample")
    expect(page.locator("#pictures")).to_contain_text("small models may not read it")
    page.fill("#max-tokens", "4")
    with asking(page) as found:
        page.click("#ask")
    answers = [found[1][cache]["text"] for cache in ("full", "evicted")]
    assert "neither is right" in page.inner_text("#verdict")
    value = page.input_value("#expected")
    with page.expect_download() as saved:
        page.click("#save-file")
    saved.value.save_as(tmp_path / "saved.json")
    record = json.loads((tmp_path / "saved.json").read_text())
    assert record["expected"] == value
    ((left, top, width, height),) = record["images"][0]["places"][value]

    colour = """() => {
        const canvas = document.getElementById("map");
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const found = [];
        for (let i = 0; i < data.length; i += 4) {
            if (data[i] === 0xe6 && data[i + 1] === 0 && data[i + 2] === 0x7a)
                found.push([i / 4 % canvas.width, Math.floor(i / 4 / canvas.width)]);
        }
        return [canvas.width, found];
    }"""
    size, framed = page.evaluate(colour)
    ends = np.array([np.min(framed, 0), np.max(framed, 0)]) * PAGE_SIZE / size
    assert np.abs(ends - [[left, top], [left + width, top + height]]).max() < 4
    page.click("#zoom-place")
    seen = page.evaluate(
        """() => {
        const [frame, map] = [document.getElementById("map-frame"), document.getElementById("map")];
        return [frame.scrollLeft, frame.scrollTop, frame.clientWidth, frame.clientHeight]
            .map((length) => length / map.clientWidth);
    }"""
    )
    first, last = np.array(seen[:2]) * PAGE_SIZE, np.add(seen[:2], seen[2:]) * PAGE_SIZE
    assert seen[2] < 0.5
    assert (first <= [left, top]).all()
    assert (last >= [left + width, top + height]).all()

    # Frames in the small maps go with the place that they are around.
    page.click("#thumbnails-open summary")
    page.fill("#compare-budgets", "0.1")
    page.click("#compare")
    page.wait_for_selector(".multiple canvas", timeout=PATIENCE_MS)
    page.click("#compare-stop")
    framed_maps = """(maps) => [...document.querySelectorAll(maps)].filter((canvas) => {
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const isPink = (red, green, blue) => red > green + 80 && blue > green + 30;
        return data.some((red, i) => i % 4 === 0 && isPink(red, data[i + 1], data[i + 2]));
    }).length"""
    small = ("#thumbnails canvas", ".multiple canvas")
    for maps in small:
        expect(page.locator(maps).first).to_be_visible()
        assert page.evaluate(framed_maps, maps) == page.locator(maps).count() > 0

    page.fill("#expected", answers[1])
    page.keyboard.press("Tab")
    for maps in small:
        page.wait_for_function(f"!({framed_maps})({maps!r})")
    same = answers[1].lower() == answers[0].lower()
    said = "Both answers are right" if same else "Only the answer after eviction is right"
    expect(page.locator("#verdict")).to_contain_text(said)
    assert page.is_hidden("#place")
    page.fill("#expected", "")
    page.keyboard.press("Tab")
    assert "right" not in page.inner_text("#verdict")

    sample = model / "inspector_question.json"
    sample.write_text(json.dumps({**record, "full": None}))
    own = opened()
    own.click("#sample")
    expect(own.locator("#expected")).to_have_value(value)
    sample.unlink()
    with asking(own):
        own.click("#ask")
    assert own.is_visible("#place")

    # A deep model's cells have their numbers, too.
    size_of_number = """async (layers) => {
        const {showPages} = await import("./pages.js");
        const pages = Array.from({length: layers}, () => [1, 2, 3]);
        showPages({pages, layers, kv_heads: 3, kept_by: [1], block_size: 16, cut: 0});
        return parseFloat(getComputedStyle(document.querySelector("[role=gridcell]")).fontSize);
    }"""
    assert own.evaluate(size_of_number, 30) > 10
    assert own.evaluate(size_of_number, 80) == 0


def test_the_page_says_why_a_token_is_kept(server: ChatServer, opened: Opener) -> None:
    """Of a request by the API, whose map has no image below: its colours are exact."""
    page = opened()
    xargs = {"kv_eviction": "snapkv", "kv_eviction_trace": 1, "kv_eviction_budget": 0.3}
    answer = ask_directly(server, 2, **xargs)
    (entry,) = [e for e in get(server, "requests")["requests"] if e["id"].startswith(answer.id)]
    name = entry["id"]
    page.click("#refresh")
    page.click(f"#recent-list a[data-id='{name}']")
    playwright.expect(page.locator("#trace")).to_be_visible()
    assert page.is_hidden("#prompt")  # the words are not on the server
    choose(page, 2, 1)
    page.select_option("#view", "reasons")
    playwright.expect(page.locator("#map-title")).to_contain_text("Why kept")
    reasons = sets_of(server, name, 2, 1)["reasons"]
    assert {"score", "neighbour", "recent", "sink", "tail"} == reasons.keys()
    palette = colours("REASONS")
    start = get(server, f"requests/{name}")["vision"][0]["start"]
    drawn = pixels(page, "#map", GRID, GRID)
    of_token = {token: reason for reason, tokens in reasons.items() for token in tokens}
    for index, colour in enumerate(drawn):
        reason = of_token.get(start + index)
        expected = (0x2A, 0x30, 0x3C) if reason is None else palette[reason]
        assert np.abs(np.subtract(colour, expected)).max() <= 2, (index, reason)
    assert page.locator("#map-legend .key").count() == 5
    page.focus("#map")
    index = next(token - start for token in reasons["neighbour"] if token >= start)
    for key, times in (("ArrowRight", 1 + index % GRID), ("ArrowDown", index // GRID)):
        for _ in range(times):
            page.keyboard.press(key)
    assert page.inner_text("#map-said").endswith("neighbour 100 %")

    # All heads: the most frequent reason; and thumbnails of what each of them keeps.
    page.click("#all")
    playwright.expect(page.locator("#map-title")).to_have_text("Why kept: all layers, all heads")
    page.click("#thumbnails-open summary")
    trace = get(server, f"requests/{name}")
    thumbnails = page.locator("#thumbnails button")
    playwright.expect(thumbnails).to_have_count(trace["layers"] * trace["kv_heads"])
    number = 2 * trace["kv_heads"] + 1
    kept = [start <= p < start + GRID * GRID for p in sets_of(server, name, 2, 1)["positions"]]
    label = thumbnails.nth(number).get_attribute("aria-label")
    assert label == f"Layer 2, head 1: {sum(kept)} of {GRID * GRID} tokens"
    thumbnails.nth(number).click()
    playwright.expect(page.locator("#map-title")).to_have_text("Why kept: layer 2, head 1")


def test_links_and_files_bring_everything_back(
    server: ChatServer, opened: Opener, tmp_path: Path
) -> None:
    page = opened()
    page.select_option("#method", "snapkv")
    answers = ask(page)
    page.click("#copy-link")
    playwright.expect(page.locator("#offer-said")).to_contain_text("Link")
    link = page.input_value("#offer-text")
    assert link.startswith(f"{server.url}/kv-eviction/#saved=")
    choose(page, 1, 1)
    with page.expect_download() as saved:
        page.click("#save-file")
    file = tmp_path / "saved.json"
    saved.value.save_as(file)
    assert json.loads(file.read_text())["evicted"]["text"] == answers["evicted"]["text"]
    with page.expect_download() as drawn:
        page.click("#save-map")
    drawn.value.save_as(tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.width == 1120
        assert picture.height > 1120
        assert np.asarray(picture.convert("L"))[-1120:].std() > 10
    title = page.inner_text("#map-title")
    shown = brightness(page)

    sent: list[str] = []
    for source in ("link", "file"):
        again = opened(link.removeprefix(f"{server.url}/kv-eviction/") if source == "link" else "")
        again.on("request", lambda request: sent.append(request.url))
        if source == "file":  # all of its layers are in it, the server is not asked
            refuse(again, re.compile("/requests/"), 404)
            again.set_input_files("#saved-file", file)
        playwright.expect(again.locator("#map-title")).to_contain_text("all layers")
        assert again.inner_text("#full-text") == answers["full"]["text"]
        assert again.inner_text("#evicted-text") == answers["evicted"]["text"]
        assert again.input_value("#question") == QUESTION
        assert again.input_value("#method") == "snapkv"
        assert "page.png" in again.inner_text("#pictures")
        choose(again, 1, 1)
        assert again.inner_text("#map-title") == title
        assert np.abs(brightness(again) - shown).max() < 1
        assert again.inner_text("#alert") == ""
        assert again.is_visible("#prompt") == (source == "file")
    assert not any("saved" in url for url in sent)  # what follows # stays in the browser

    for broken in (link[:-30], f"{link[:-2]}!!"):
        damaged = opened(broken.removeprefix(f"{server.url}/kv-eviction/"))
        playwright.expect(damaged.locator("#alert")).to_contain_text("This link is damaged")
    record = json.loads(file.read_text())
    record["images"][0]["url"] = "data:image/svg+xml;base64,PHN2Zy8+"
    bad = {"name": "bad.json", "mimeType": "application/json"}
    page.set_input_files("#saved-file", {**bad, "buffer": json.dumps(record).encode()})
    playwright.expect(page.locator("#alert")).to_contain_text("bad.json was not saved by this page")


def test_code_asks_the_same(server: ChatServer, opened: Opener, tmp_path: Path) -> None:
    """The copied command and program run, with signs that a shell would read."""
    page = opened()
    signs = "$HOME `id` \\ \"quoted\" 'too' IMAGE-DATA"
    fill(page, f"{QUESTION} {signs}")
    page.set_input_files("#file", png(OTHER))
    playwright.expect(page.locator("#pictures li")).to_have_count(2)
    page.fill("#start", f"{signs} The")
    with asking(page) as found:
        page.click("#ask")
    expected = found[1]["evicted"]
    for number, image in enumerate((PAGE, OTHER), 1):  # of the same name in the page
        (tmp_path / f"image-{number}.png").write_bytes(png(image)["buffer"])
    environment = {"VLLM_API_KEY": KEY, "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for button, command in (
        ("#copy-curl", ["bash", "-s"]),
        ("#copy-python", [sys.executable, "-"]),
    ):
        before = page.input_value("#offer-text")
        page.click(button)
        playwright.expect(page.locator("#offer-text")).not_to_have_value(before)
        program = {"input": page.input_value("#offer-text"), "cwd": tmp_path, "env": environment}
        result = subprocess.run(command, **program, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        if command[0] == "bash":
            answer = json.loads(result.stdout)
            text = answer["choices"][0]["message"]["content"]
            report = answer["kv_transfer_params"]["kv_eviction"]
        else:
            text, _, rest = result.stdout.partition("\n")
            report = ast.literal_eval(rest)
        assert text == expected["text"]
        for field in ("prompt_tokens", "kept_tokens", "blocks_before", "policy", "budget"):
            assert report[field] == expected[field], field
        assert report["trace"] is not None
