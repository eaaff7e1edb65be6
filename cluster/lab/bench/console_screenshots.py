"""The pictures of the console in docs/console: ``python -m cluster.lab.bench.console_screenshots docs/console``."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from cluster.lab.bench.console import PAINT_S, browser
from cluster.lab.bench.console_city import City
from cluster.lab.bench.console_gateway import ConsoleGateway

DESK = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 720}
SETTLE_MS = 7_000


def take_screenshots(folder: Path) -> None:
    """PNGs of every page into ``folder``, which must exist."""
    with (
        tempfile.TemporaryDirectory() as kept,
        ConsoleGateway(City(500), Path(kept)) as gateway,
        browser() as chromium,
    ):
        gateway.remember(100)
        gateway.step(8)
        camera = sorted(gateway.city.hot)[1]
        camera_page = f"camera/{camera}"
        _save(folder / "wall.png", _shoot(chromium, f"{gateway.url}/", "dark", ".picture.there"))
        _save(folder / "camera.png", _shoot(chromium, f"{gateway.url}/#/{camera_page}", "light", ".plot svg"))
        incidents = f"{gateway.url}/#/incidents"
        _save(folder / "incidents.png", _shoot(chromium, incidents, "light", ".incident-row img", ".incident-row a"))
        _save(folder / "fleet.png", _shoot(chromium, f"{gateway.url}/#/fleet", "light", "tbody tr"))
        _save(folder / "ask.png", _shoot(chromium, f"{gateway.url}/#/ask/{camera}", "dark", "textarea", ask=True))
        phones = [
            _shoot(chromium, f"{gateway.url}/#/{page}", "dark", there, phone=True)
            for page, there in (("", ".picture.there"), ("incidents", ".incident-row img"), (camera_page, ".plot svg"))
        ]
        _save(folder / "phone.png", _beside(phones))


def _shoot(
    chromium: Any, url: str, scheme: str, there: str, click: str = "", *, ask: bool = False, phone: bool = False
) -> Image.Image:
    kind = {"device_scale_factor": 2, "is_mobile": True, "has_touch": True} if phone else {}
    context = chromium.new_context(viewport=PHONE if phone else DESK, color_scheme=scheme, **kind)
    try:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector(there, timeout=PAINT_S * 1000)
        if click:
            page.click(click)
        if ask:
            page.fill("textarea", "Did anybody come by in the last half hour?")
            page.keyboard.press("Enter")
            page.wait_for_selector(".grounds", timeout=PAINT_S * 1000)
        page.wait_for_timeout(SETTLE_MS)
        return Image.open(io.BytesIO(page.screenshot()))
    finally:
        context.close()


def _beside(pictures: list[Image.Image], gap: int = 24) -> Image.Image:
    width = sum(each.width for each in pictures) + gap * (len(pictures) - 1)
    whole = Image.new("RGB", (width, pictures[0].height))
    left = 0
    for each in pictures:
        whole.paste(each, (left, 0))
        left += each.width + gap
    return whole.resize((width * 2 // 3, pictures[0].height * 2 // 3))


def _save(path: Path, picture: Image.Image) -> None:
    # A palette: a third of the size.
    picture.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)


if __name__ == "__main__":
    take_screenshots(Path(sys.argv[1]))
