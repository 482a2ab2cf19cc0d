# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of docs/inspector.md: the demonstration server's own page, in Chromium.

Starts the server, asks about a page of the test split on a wide screen, in dark mode and on a
phone, and writes docs/inspector/*.png.

Usage: python -m docs.draw_inspector
"""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from demo.pages import make_page
from demo.run import demo_server

FOLDER = Path(__file__).with_name("inspector")
PATIENCE_MS = 180_000
MAX_BYTES = 400_000
DESKTOP = {"width": 1320, "height": 900}
PAGE = make_page("test", 6)
QUESTION = PAGE.questions[1]


def main() -> None:
    """Write the pictures and print their sizes."""
    os.environ["VLLM_PLUGINS"] = "tgvkv"
    FOLDER.mkdir(exist_ok=True)
    with demo_server("head") as server, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        address = f"{server.url}/kv-eviction/"
        draw_desktop(browser, address)
        draw_dark(browser, address)
        draw_phone(browser, address)
        browser.close()


def draw_desktop(browser: Any, address: str) -> None:
    page = asked(browser, address, viewport=DESKTOP, steps=2)
    save(page, "desktop")


def draw_dark(browser: Any, address: str) -> None:
    """Draw a smaller budget with the scores of one layer and head."""
    page = asked(browser, address, viewport=DESKTOP, color_scheme="dark", steps=-1)
    page.focus("#pages [tabindex='0']")
    for key in ("PageDown", "ArrowUp", "ArrowRight"):
        page.keyboard.press(key)
    page.check("#scores")
    page.wait_for_selector("#map-title:has-text('Scores')")
    save(page, "dark")


def draw_phone(browser: Any, address: str) -> None:
    """Draw the first two screens of the answer."""
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
    for name in ("answers", "map-title"):
        page.evaluate(f"document.getElementById('{name}').scrollIntoView()")
        page.evaluate("scrollBy(0, -12)")
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
    png = io.BytesIO()
    PAGE.image.save(png, "PNG")
    image = {"name": "page.png", "mimeType": "image/png", "buffer": png.getvalue()}
    page.set_input_files("#file", image)
    page.wait_for_selector("#preview:not([hidden])")
    page.fill("#question", QUESTION.text)
    with page.expect_response("**/ask"):
        page.click("#ask")
    settle(page)
    if steps:
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


def save(page: Any, name: str) -> None:
    page.evaluate("document.activeElement.blur()")
    shot = page.screenshot(full_page=True)
    page.context.close()
    write(Image.open(io.BytesIO(shot)), name)


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
