# SPDX-License-Identifier: Apache-2.0
"""Parts of chat messages with images, as the OpenAI API takes them."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image


def png_url(image: Image.Image) -> str:
    """Return an image as the data URL of a PNG."""
    return _data_url(image, "png")


def jpeg_url(image: Image.Image, quality: int = 90) -> str:
    """Return an image as the data URL of a JPEG."""
    return _data_url(image, "jpeg", quality=quality)


def image_part(url: str) -> dict[str, Any]:
    """Return the part of a message that shows the image at a URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    """Return the part of a message that holds text."""
    return {"type": "text", "text": text}


def _data_url(image: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64," + base64.b64encode(file.getvalue()).decode()
