# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of docs/inspector.md: the inspector of the demonstration's server, in Chromium.

First it does what a reader does at the end of `make demo`: opens the inspector, asks the sample
question, looks at what was kept, and compares two methods. Then it draws all methods, dark mode and
a phone. A second server recalls what it evicted: of its answer, which repeats two passages in
another order than they stand, a moving picture shows every choice. Writes docs/inspector/*, last a
digest of the page's files, by which a test sees that the pictures are of this page.

Usage: python -m docs.draw_inspector
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from demo import inspector
from demo.asking import PLUGINS, question_record
from demo.reading import RECOMMENDED
from measure.serving import serving
from reader.assemble import load_vocabulary, page_model_folder
from reader.tasks import PageQuestion, PageTask

Drawing = tuple[Callable[[Any], None], int, int, dict[str, Any]]
"""What draws, the size of its window, and its looks."""

FOLDER = Path(__file__).with_name("inspector")
DIGEST = FOLDER / "page.sha256"
PAGE = Path(__file__).parents[1] / "server" / "inspector"
PATIENCE_MS = 180_000
MAX_BYTES = 400_000
FRAME_MS = 350
LONGEST = 64
"""Tokens of the answer in a moving picture."""
_CAPTION = 104
"""Height of the words above the map of a moving picture."""
_SET_STEP = """step => {
  const slider = document.getElementById("cut");
  slider.value = step;
  slider.dispatchEvent(new Event("input"));
}"""
PASSAGES = PageQuestion(PageTask("passages", "prose", keys=2), 0)
"""The model repeats the first of them rightly; the second one it begins."""
RECALL = ("--kv-eviction-config", '{"recall": {"gib": 1}}')


def draw_desktop(page: Any) -> None:
    """Draw the whole page after an answer, and then two methods side by side."""
    page.click("#pin-a")
    page.click("#zoom-place")
    page.evaluate("scrollTo(0, 0)")
    write("desktop", picture_of(page))
    while page.is_enabled("#zoom-out"):
        page.click("#zoom-out")
    after_asking(page, lambda: page.select_option("#method", "snapkv"))
    page.click("#pin-b")
    write("two_methods", picture_of(page, "#answers"), picture_of(page, "#pins"), across=False)


def draw_comparison(page: Any) -> None:
    """Draw the small maps of all methods."""
    page.click("#compare")
    page.wait_for_selector("#compare-stop", state="hidden")
    write("compare", picture_of(page, "#comparison"))


def draw_dark(page: Any) -> None:
    """Draw why a pooling method keeps patches in one head, and how another head differs."""
    move_budget(page, 5)
    after_asking(page, lambda: page.select_option("#method", "snapkv"))
    page.select_option("#view", "reasons")
    for side, layer in (("a", 1), ("b", 2)):
        page.click(f"#pages [data-layer='{layer}'][data-head='1']")
        page.wait_for_selector(f"#map-title:has-text('Why kept: layer {layer}, head 1')")
        page.click(f"#pin-{side}")
    page.click("#thumbnails-open summary")
    page.wait_for_selector("#thumbnails button")
    write("dark", picture_of(page, "#trace"))


def draw_phone(page: Any) -> None:
    """Draw the first two screens after an answer."""
    page.click("#edit")  # the form is a line by now
    move_budget(page, 2)
    screens = []
    for screen in range(2):
        page.evaluate(f"scrollTo(0, {screen} * innerHeight)")
        screens.append(picture_of(page))
    write("phone", *screens)


def draw_recall(page: Any) -> None:
    """Draw which patches are kept at each step of an answer, with the answer so far."""
    frames = []
    for step in range(int(page.get_attribute("#cut", "max")) + 1):
        with page.expect_response(f"**/requests/*cut={step}"):
            page.evaluate(_SET_STEP, step)
        page.wait_for_function(f"document.getElementById('cut').value === '{step}'")
        parts = [picture_of(page, part) for part in ("#cut-said", "#cut-answer", "#map")]
        width, height = parts[-1].size
        frame = Image.new("RGB", (width, height + _CAPTION), "white")
        for part, top in zip(parts, (0, _CAPTION // 3, _CAPTION), strict=True):
            frame.paste(part.crop((0, 0, width, part.height)), (0, top))
        frames.append(frame)
    path = FOLDER / "recall.webp"
    more: dict[str, Any] = {"append_images": frames[1:], "duration": FRAME_MS, "loop": 0}
    frames[0].save(path, save_all=True, quality=40, method=6, **more)
    print(f"{path.name}: {len(frames)} frames, {path.stat().st_size / 1000:.0f} kB")


def move_budget(page: Any, steps: int) -> None:
    page.focus("#budget")
    after_asking(page, lambda: [page.keyboard.press("ArrowRight") for _ in range(steps)])


def after_asking(page: Any, act: Callable[[], Any]) -> None:
    """Do what makes the page ask the server, and wait for the drawing."""
    with page.expect_response("**/ask"):
        act()
    page.wait_for_selector("body:not(.running)")


def picture_of(page: Any, part: str | None = None) -> Image.Image:
    """Return a picture of a part of the page, or of what the screen shows."""
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(500)
    return Image.open(io.BytesIO((page.locator(part) if part else page).screenshot()))


def write(name: str, *pictures: Image.Image, across: bool = True) -> None:
    """Write pictures in a row or a column, with a palette only if the file is too large without."""
    path, (axis, gap) = FOLDER / f"{name}.png", (0, 40) if across else (1, 16)
    sizes = np.array([picture.size for picture in pictures])
    ends = np.cumsum(sizes[:, axis] + gap)
    size = sizes.max(0)
    size[axis] = ends[-1] - gap
    sheet = Image.new("RGB", tuple(size), "white")
    for picture, start in zip(pictures, [0, *ends], strict=False):
        sheet.paste(picture, (start, 0) if across else (0, start))
    sheet.save(path, optimize=True)
    if path.stat().st_size > MAX_BYTES:  # a palette shows bands
        sheet.quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)
    print(f"{path.name}: {sheet.width} x {sheet.height}, {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Serve, and draw each picture in a page of its own that has asked a question."""
    os.environ["VLLM_PLUGINS"] = "tgvkv"
    digest = digest_of_page()
    phone = {"is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    drawings: tuple[Drawing, ...] = (
        (draw_desktop, 1320, 1180, {}),
        (draw_comparison, 1320, 900, {}),
        (draw_dark, 1320, 900, {"color_scheme": "dark"}),
        (draw_phone, 375, 812, phone),
    )
    arguments = inspector.prepare()
    draw(arguments, drawings)
    passages = question_record(PASSAGES.example(load_vocabulary(page_model_folder())), RECOMMENDED)
    sharp = {"device_scale_factor": 1.5}
    drawing = (draw_recall, 900, 1180, sharp)
    draw([*arguments, *RECALL], (drawing,), {**passages, "tokens": LONGEST})
    DIGEST.write_text(f"{digest}\n")


def digest_of_page() -> str:
    """Return the SHA-256 of the names and contents of the page's files."""
    digest = hashlib.sha256()
    for path in sorted(PAGE.iterdir()):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def draw(
    arguments: list[str], drawings: Sequence[Drawing], question: dict[str, Any] | None = None
) -> None:
    """Draw pictures of a server's inspector after its sample question, or another saved one."""
    options = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
    serving_it = serving(arguments, inspector.LOG, environment=PLUGINS)
    with serving_it as server, sync_playwright() as driver:
        browser = driver.chromium.launch(**options)
        for draw_one, width, height, look in drawings:
            size = {"width": width, "height": height}
            page = browser.new_context(viewport=size, **look).new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.goto(f"{server.url}/kv-eviction/")
            if question is None:
                page.click("#sample")
            else:
                file = {"name": "question.json", "mimeType": "application/json"}
                buffer = json.dumps(question).encode()
                page.set_input_files("#saved-file", {**file, "buffer": buffer})
            page.wait_for_selector("#pictures li")
            after_asking(page, lambda page=page: page.click("#ask"))
            draw_one(page)
            page.context.close()


if __name__ == "__main__":
    main()
