# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of docs/inspector.md: the inspector of the demonstration's server, in Chromium.

First it does what a reader does at the end of `make demo`: opens the inspector, asks the saved
question, looks at what was kept, and compares two methods. It says how many seconds each step took.
Then it draws all methods, dark mode and a phone. Writes docs/inspector/*.png.

Usage: python -m docs.draw_inspector [URL]
With the URL that `make demo` or `make inspector` prints, it takes the first part alone, from there.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from demo import inspector
from demo.asking import PLUGINS
from demo.asking import QUESTION as QUESTION_FILE
from measure.serving import serving

FOLDER = Path(__file__).with_name("inspector")
PATIENCE_MS = 180_000
MAX_BYTES = 400_000
DESKTOP = {"width": 1320, "height": 900}
OTHER_METHOD = "snapkv"


def main() -> None:
    """Write the pictures and print their sizes."""
    os.environ["VLLM_PLUGINS"] = "tgvkv"
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        if sys.argv[1:]:
            walk(browser, sys.argv[1])
        else:
            arguments = inspector.prepare()
            with serving(arguments, inspector.LOG, environment=PLUGINS) as server:
                address = f"{server.url}/kv-eviction/"
                walk(browser, address)
                draw_comparison(browser, address)
                draw_dark(browser, address)
                draw_phone(browser, address)
        browser.close()


def walk(browser: Any, address: str) -> None:
    """Use the inspector as its first reader does."""
    began = time.monotonic()

    def said(step: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {step}", flush=True)

    page = browser.new_context(viewport={"width": 1320, "height": 1180}).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(address)
    page.set_input_files("#saved-file", QUESTION_FILE)
    page.wait_for_selector("#pictures li")
    said("the inspector has the saved question")
    with page.expect_response("**/ask"):
        page.click("#ask")
    settle(page)
    said(f"answers: {page.inner_text('#full-text')} and {page.inner_text('#evicted-text')}")
    page.click("#pin-a")
    for _ in range(3):
        page.click("#zoom-in")
    page.evaluate("document.getElementById('map-frame').scrollTo(0, 0)")
    page.evaluate("scrollTo(0, 0); document.activeElement.blur()")
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    write(Image.open(io.BytesIO(page.screenshot())), "desktop")
    for _ in range(3):
        page.click("#zoom-out")
    with page.expect_response("**/ask"):
        page.select_option("#method", OTHER_METHOD)
    settle(page)
    page.click("#pin-b")
    said(f"the answer of {OTHER_METHOD}: {page.inner_text('#evicted-text')!r}")
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(0, 0)
    answers, pins = (
        Image.open(io.BytesIO(page.locator(part).screenshot())) for part in ("#answers", "#pins")
    )
    both = Image.new("RGB", (answers.width, answers.height + pins.height + 16), "white")
    both.paste(answers, (0, 0))
    both.paste(pins, (20, answers.height + 16))
    write(both, "two_methods")
    page.context.close()


def draw_comparison(browser: Any, address: str) -> None:
    """Draw the small maps of all methods."""
    page = asked(browser, address, viewport=DESKTOP)
    page.click("#compare")
    page.wait_for_selector("#compare-stop", state="hidden")
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    write(Image.open(io.BytesIO(page.locator("#comparison").screenshot())), "compare")
    page.context.close()


def draw_dark(browser: Any, address: str) -> None:
    """Draw why a pooling method keeps patches in one head, and how another head differs."""
    page = asked(browser, address, viewport=DESKTOP, color_scheme="dark", steps=5)
    with page.expect_response("**/ask"):
        page.select_option("#method", "snapkv")
    settle(page)
    page.select_option("#view", "reasons")
    for side, layer in (("a", 1), ("b", 2)):
        page.click(f"#pages [data-layer='{layer}'][data-head='1']")
        page.wait_for_selector(f"#map-title:has-text('Why kept: layer {layer}, head 1')")
        page.click(f"#pin-{side}")
    page.click("#thumbnails-open summary")
    page.wait_for_selector("#thumbnails button")
    page.wait_for_timeout(500)
    shot = page.locator("#trace").screenshot()
    page.context.close()
    write(Image.open(io.BytesIO(shot)), "dark")


def draw_phone(browser: Any, address: str) -> None:
    """Draw the first two screens after an answer."""
    page = asked(
        browser,
        address,
        viewport={"width": 375, "height": 812},
        device_scale_factor=2,
        is_mobile=True,
        has_touch=True,
        steps=2,
    )
    pictures = []
    page.evaluate("document.activeElement.blur()")
    for screen in range(2):
        page.evaluate(f"scrollTo(0, {screen} * innerHeight)")
        page.wait_for_timeout(300)
        pictures.append(Image.open(io.BytesIO(page.screenshot())))
    page.context.close()
    width, height = pictures[0].size
    both = Image.new("RGB", (2 * width + 40, height), "white")
    for index, picture in enumerate(pictures):
        both.paste(picture, (index * (width + 40), 0))
    write(both, "phone")


def asked(browser: Any, address: str, steps: int = 0, **options: Any) -> Any:
    """Return a page with answers at the default budget, moved by `steps` of the slider."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(address)
    page.set_input_files("#saved-file", QUESTION_FILE)
    page.wait_for_selector("#pictures li")
    with page.expect_response("**/ask"):
        page.click("#ask")
    settle(page)
    if steps:
        if page.is_visible("#edit"):  # on a phone the form is a line by now
            page.click("#edit")
        page.focus("#budget")
        with page.expect_response("**/ask"):
            for _ in range(abs(steps)):
                page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")
        settle(page)
    return page


def settle(page: Any) -> None:
    page.wait_for_selector("body:not(.running)")
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)


def write(picture: Image.Image, name: str) -> None:
    """Write a PNG, with a palette only if it is too large otherwise: a palette shows bands."""
    path = FOLDER / f"{name}.png"
    picture = picture.convert("RGB")
    picture.save(path, optimize=True)
    if path.stat().st_size > MAX_BYTES:
        picture.quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)
    print(f"{path.name}: {picture.width} x {picture.height}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
