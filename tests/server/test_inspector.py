# SPDX-License-Identifier: Apache-2.0
"""The page at `/kv-eviction/`, of a real server with the demonstration model, in a real browser."""

from __future__ import annotations

import io
import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from demo.pages import make_page
from demo.run import MODEL
from measure.messages import png_url
from tests.server.serving import ChatServer, serve
from vllm_tgvkv.counters import SKIP_REASONS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]

KEY = "a-key"
PATIENCE_MS = 120_000
GRID = 24
PAGE = make_page("test", 1)
QUESTION = PAGE.questions[0]
ATTACK = """<img src=x onerror="window.attacked = true"><script>window.attacked = true</script>"""
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--no-first-run", "--disable-quic"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    log = tmp_path_factory.mktemp("inspector") / "server.log"
    flags = ["--block-size", "16", "--served-model-name", "demo"]
    config = {"granularity": "head"}
    with serve(MODEL, log, config, key=KEY, flags=flags, start_seconds=600) as running:
        yield running


@pytest.fixture
def cutting(tmp_path: Path) -> Iterator[ChatServer]:
    """Start a server that cuts each cache three times."""
    flags = ["--block-size", "16", "--served-model-name", "demo"]
    config = {"decode": {"schedule": [[0, 0.4], [2, 0.2], [3, 0.1]]}}
    options: dict[str, Any] = {"key": KEY, "flags": flags, "start_seconds": 600}
    with serve(MODEL, tmp_path / "server.log", config, budget=None, **options) as running:
        yield running


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


def get(server: ChatServer, path: str, key: str | None = KEY) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/kv-eviction/{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def png(image: Image.Image) -> dict[str, Any]:
    data = io.BytesIO()
    image.save(data, "PNG")
    return {"name": "page.png", "mimeType": "image/png", "buffer": data.getvalue()}


def fill(page: Any, question: str = QUESTION.text) -> None:
    page.set_input_files("#file", png(PAGE.image))
    playwright.expect(page.locator("#preview")).to_be_visible()
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


def answering(status: int | None, message: str) -> Callable[[Any], None]:
    """Return a route that answers with an error, or not at all."""

    def answer(route: Any) -> None:
        if status is None:
            route.abort()
        else:
            route.fulfill(status=status, json={"error": {"message": message}})

    return answer


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


def undimmed() -> np.ndarray:
    """Measure the same in the picture itself."""
    size = GRID * 40
    pixels = np.asarray(PAGE.image.convert("RGB").resize((size, size)), dtype=float).mean(-1)
    patches = pixels.reshape(GRID, 40, GRID, 40)[:, 10:30, :, 10:30]
    return patches.mean((1, 3)).ravel()


def test_the_page_cannot_be_opened_without_the_key(server: ChatServer, browser: Any) -> None:
    for path in ("", "inspector.js", "inspector.css", "status"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server, path, key=None)
        assert refused.value.code == 401
        assert refused.value.headers["WWW-Authenticate"].startswith("Basic")
    page = browser.new_page()
    with pytest.raises(playwright.Error, match="AUTH"):  # there is no user to ask for it
        page.goto(f"{server.url}/kv-eviction/")
    assert page.locator("#form").count() == 0
    page.close()


def test_answers_and_numbers_are_those_of_the_server(server: ChatServer, opened: Opener) -> None:
    page = opened()
    answers = ask(page)
    evicted = answers["evicted"]
    assert page.inner_text("#full-text") == answers["full"]["text"] == QUESTION.answer
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


def test_differing_characters_are_marked(opened: Opener) -> None:
    page = opened()
    answer = {"evicted": {"text": "58917 x"}, "full": {"text": "58217"}}

    def change(route: Any) -> None:
        real = route.fetch().json()
        real["full"]["text"], real["evicted"]["text"] = answer["full"], answer["evicted"]
        route.fulfill(json=real)

    page.route("**/ask", change)
    for full, evicted, marks in (
        ("58217", "58917", [["2"], ["9"]]),
        ("58217", "58217", [[], []]),
        ("a red bus", "a blue bus", [["red"], ["blue"]]),
        ("12", "123", [[], ["3"]]),
    ):
        answer = {"full": full, "evicted": evicted}  # type: ignore[dict-item]
        ask(page)
        assert page.inner_text("#full-text") == full
        assert page.inner_text("#evicted-text") == evicted
        found = [page.locator(f"#{of}-text mark").all_inner_texts() for of in ("full", "evicted")]
        assert found == marks
        assert ("the same" in page.inner_text("#verdict")) == (full == evicted)


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

    page.check("#scores")
    playwright.expect(page.locator("#map-title")).to_contain_text("Scores")
    assert np.abs(brightness(page) / undimmed() - relative).max() > 0.1


def test_everything_is_reached_by_keyboard(server: ChatServer, opened: Opener) -> None:
    page = opened()
    name = ask(page)["evicted"]["trace"]
    trace = get(server, f"requests/{name}")
    page.focus("#file")
    order = ["file"]
    while order[-1] != "end" and len(order) < 60:
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
    wanted = ["file", "sample", "question", "method", "max-tokens", "budget", "ask"]
    wanted += ["layer", "head", "span", "scores", "map", "0"]
    assert [stop for stop in order if stop in wanted] == wanted

    page.focus("#pages [tabindex='0']")
    title = page.locator("#map-title")
    for key, layer, head in (
        ("Enter", 0, 0),
        ("ArrowDown", 1, 0),
        ("ArrowRight", 1, 1),
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
    script = Path(__file__).parents[2] / "server" / "inspector" / "inspector.js"
    table = script.read_text().partition("SKIP_REASONS = {")[2].partition("};")[0]
    assert re.findall(r"^  (\w+):", table, re.MULTILINE) == list(SKIP_REASONS)


def test_mistakes_are_reported_and_the_page_keeps_working(opened: Opener) -> None:
    page = opened()
    alert = page.locator("#alert")
    expect = playwright.expect
    page.click("#ask")
    expect(alert).to_contain_text("Choose an image first")
    text = {"name": "notes.png", "mimeType": "image/png", "buffer": b"no image"}
    page.set_input_files("#file", text)
    expect(alert).to_contain_text("notes.png is not an image that can be read")
    page.set_input_files("#file", {**text, "buffer": bytes(25 << 20)})
    expect(alert).to_contain_text("larger than 24 MiB")
    page.set_input_files("#file", png(Image.new("1", (10_000, 6_500))))
    expect(alert).to_contain_text("65 megapixels")

    fill(page)
    expect(alert).to_be_empty()
    page.fill("#max-tokens", "5000")
    page.click("#ask")
    expect(alert).to_contain_text("from 1 to 1024")
    page.fill("#max-tokens", "64")
    page.route(
        "**/ask",
        lambda route: route.continue_(post_data={**route.request.post_data_json, "budget": 7.5}),
    )
    with asking(page):
        page.click("#ask")
    expect(alert).to_contain_text("give a fraction of the prompt")
    page.unroute("**/ask")
    page.fill("#defer", "5000")
    page.click("#ask")
    expect(alert).to_contain_text("give a number up to 1024")
    page.fill("#defer", "")
    page.select_option("#later", "schedule")
    with asking(page):  # this server sets no memory aside for later evictions
        page.click("#ask")
    expect(alert).to_contain_text('{"decode": {"on_request": true}}')
    page.select_option("#later", "ceiling")
    page.fill("#ceiling", "0")
    page.click("#ask")
    expect(alert).to_contain_text("whole numbers, at least 1")
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
        page.route("**/ask", answering(status, said))
        page.click("#ask")
        expect(alert).to_contain_text(said)
        page.unroute("**/ask")
        assert page.locator("#answers").is_hidden()
    ask(page)
    expect(alert).to_be_empty()
    assert page.inner_text("#full-text") == QUESTION.answer


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
    fill(page, f"{ATTACK} {QUESTION.text}")
    with asking(page):
        page.click("#ask")
    assert page.inner_text("#full-text") == ATTACK
    assert page.inner_text("#evicted-text") == ATTACK
    playwright.expect(page.locator("#recent-list strong").first).to_contain_text(ATTACK)
    assert ATTACK in page.inner_text("#trace-about")
    assert page.locator("img").count() == 1  # the preview
    assert page.evaluate("window.attacked") is None


def test_requests_of_others_are_listed_and_can_be_linked_to(
    server: ChatServer, opened: Opener
) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": png_url(PAGE.image)}},
        {"type": "text", "text": QUESTION.text},
    ]
    page = opened()
    server.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        max_tokens=4,
        extra_body={"vllm_xargs": {"kv_eviction_trace": 1, "kv_eviction_budget": 0.3}},
    )
    newest = get(server, "requests")["requests"][0]
    page.click("#refresh")
    entry = page.locator(f"#recent-list a[data-id='{newest['id']}']")
    playwright.expect(entry).to_contain_text(newest["budget"])
    entry.click()
    playwright.expect(page.locator("#trace")).to_be_visible()
    playwright.expect(entry).to_have_attribute("aria-current", "true")
    assert page.locator("#answers").is_hidden()
    assert page.url.endswith(f"#{newest['id']}")
    trace = get(server, f"requests/{newest['id']}")
    choose(page, 1, 1)
    start = trace["vision"][0]["start"]
    (positions,) = [
        s["positions"]
        for s in get(server, f"requests/{newest['id']}/layers/1")["token_sets"]
        if s["heads"] == [1]
    ]
    kept = np.isin(np.arange(start, start + GRID * GRID), positions)
    drawn = brightness(page)  # of the grid only: the server does not keep the image
    assert drawn[kept].min() > drawn[~kept].max() + 50

    linked = opened(f"#{newest['id']}")
    playwright.expect(linked.locator("#trace-about")).to_contain_text(newest["budget"])
    unknown = opened("#nobody")
    playwright.expect(unknown.locator("#alert")).to_contain_text("not there")


def test_cuts_are_listed_and_stepped_through(cutting: ChatServer, browser: Any) -> None:
    with opener(cutting, browser) as open_page:
        page = open_page()
        evicted = ask(page)["evicted"]
        cuts = evicted["cuts"]
        assert [cut["answer_tokens"] for cut in cuts] == [0, 2, 3]
        lines = [f"{cut['blocks_before']} → {cut['blocks_after']} blocks" for cut in cuts]
        times = [
            "Before the answer",
            "After 2 tokens of the answer",
            "After 3 tokens of the answer",
        ]
        said = [f"{when}: {line}" for when, line in zip(times, lines, strict=True)]
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


def test_the_form_sets_a_wait_a_schedule_or_a_ceiling(cutting: ChatServer, browser: Any) -> None:
    """In place of the server's schedule; a change asks the evicted cache again."""
    with opener(cutting, browser) as open_page:
        page = open_page()
        ask(page)
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
        assert not {"budget", "defer", "ceiling", "buffer"} & found[0].keys()
        evicted = found[1]["evicted"]
        assert evicted["decode"] == {"schedule": [[1, 0.5], [3, 0.2]]}
        assert page.locator("#cuts li").count() == len(evicted["cuts"]) == 2
        assert "then in steps to 20\N{NO-BREAK SPACE}%" in page.inner_text(".verdict")

        with asking(page) as found:
            page.select_option("#later", "ceiling")
        assert (found[0]["ceiling"], found[0]["buffer"], found[0]["defer"]) == (256, 64, 2)
        assert page.is_enabled("#defer")
        assert found[1]["evicted"]["decode"] == {"max_tokens": 256, "buffer": 64}
        assert "then 256 tokens" in page.inner_text(".verdict")


def test_several_images_and_images_without_a_grid(opened: Opener) -> None:
    page = opened()

    def split(route: Any) -> None:
        real = route.fetch().json()
        start = real["vision"][0]["start"]
        real["vision"] = [
            {"start": start, "length": 300, "grid": [15, 20]},
            {"start": start + 300, "length": 276, "grid": None},
        ]
        route.fulfill(json=real)

    page.route(re.compile("/requests/[^/]+$"), split)
    tokens = ask(page)["evicted"]["prompt_tokens"]
    options = page.locator("#span option").all_inner_texts()
    assert options == [
        "Image 1, 15 × 20 patches",
        "Image 2, 276 tokens",
        f"Whole prompt, {tokens} tokens",
    ]
    size = "(() => { const m = document.getElementById('map'); return m.width / m.height; })()"
    assert page.evaluate(size) == pytest.approx(20 / 15, rel=0.01)
    for index, number in ((1, 276), (2, tokens)):
        page.select_option("#span", str(index))
        assert f"of {number} tokens" in page.inner_text("#map-said")
        assert page.evaluate(size) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_have_names_and_text_has_contrast(opened: Opener, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    ask(page)
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


def test_a_phone_needs_no_sideways_scrolling(opened: Opener) -> None:
    page = opened(viewport={"width": 375, "height": 812}, is_mobile=True, has_touch=True)
    wider = """() => [...document.querySelectorAll("body *")]
        .filter((e) => e.getBoundingClientRect().right > 375.5 && e.checkVisibility())
        .map((e) => e.id || e.className || e.tagName)"""
    for step in (lambda: None, lambda: ask(page), lambda: choose(page, 1, 1)):
        step()
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        assert page.evaluate(wider) == []
