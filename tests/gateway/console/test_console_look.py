"""How it looks and who can use it: phones, dark and light, axe's rules, no motion, nothing inline."""

import re

import pytest
from browsing import change, check_axe, running, say_yes
from playwright.sync_api import expect
from waiting import until

from cluster.gateway.console import STATIC

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}

CAMERAS = 24


def pages(gateway):
    """Address after ``#/`` -> a selector of what shows that the page is there."""
    return {
        "": ".picture.there",
        f"camera/{running(gateway)}": ".plot svg",
        "incidents": ".incident-row, .empty",
        f"ask/{running(gateway)}": "textarea",
        "cameras": ".camera-row",
        "add-camera": "form",
        "import-cameras": "textarea",
        f"settings/{running(gateway)}": ".mask-frame .picture.there",
        "fleet": "tbody tr",
        "nowhere": ".empty",
    }


def test_a_phone_scrolls_down_only(open_page, gateway):
    page = open_page(f"{gateway.url}/", **PHONE)
    for address, there in pages(gateway).items():
        page.goto(f"{gateway.url}/#/{address}")
        page.wait_for_selector(there)
        assert page.evaluate("document.documentElement.scrollWidth") == 360, address
    # The pages are within reach of a thumb.
    box = page.locator(".top nav").bounding_box()
    assert box["y"] + box["height"] == pytest.approx(740, abs=1)
    assert min(link.bounding_box()["height"] for link in page.locator(".top nav a").all()) >= 44


def test_badges_leave_a_phones_pictures_to_be_seen(open_page, gateway):
    name = running(gateway)
    change(gateway, name, rung="stride", rung_reason="load", last_frame_age_s=90.0)
    page = open_page(f"{gateway.url}/", **PHONE)
    tile = page.locator(f'[data-camera="{name}"]')
    expect(tile.locator(".badge")).to_have_count(2)
    picture, badges = (tile.locator(each).bounding_box() for each in (".tile-picture", ".tile-badges"))
    assert badges["height"] <= picture["height"] / 3


def test_axe_finds_nothing_on_any_page(open_page, gateway):
    page = open_page(f"{gateway.url}/")
    for address, there in pages(gateway).items():
        page.goto(f"{gateway.url}/#/{address}")
        page.wait_for_selector(there)
        if address.startswith("camera/"):
            page.wait_for_selector(".day-line svg")
        if address.startswith("ask/"):
            page.get_by_role("switch", name="All cameras").check()
            page.get_by_label("Question to all cameras").fill("Was there a red van?")
            page.keyboard.press("Enter")
            page.wait_for_selector(".found li")
        # Only colours are others in the dark.
        for scheme, rules in (("light", ()), ("dark", ("color-contrast",))):
            page.emulate_media(color_scheme=scheme)
            expect(page.locator("html")).to_have_attribute("data-theme", scheme)
            check_axe(page, *rules)


def test_dark_and_light_follow_the_system_until_somebody_chooses(open_page, gateway):
    page = open_page(f"{gateway.url}/", new=True, color_scheme="dark")

    def lightness():
        red, green, blue = map(
            int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
        )
        return (red + green + blue) / 3

    assert lightness() < 40
    page.emulate_media(color_scheme="light")
    until(lambda: lightness() > 220)
    page.get_by_role("button", name="Dark colours").click()
    until(lambda: lightness() < 40)
    page.reload()
    page.wait_for_selector(".tile")
    until(lambda: lightness() < 40)


def test_a_browser_that_stores_nothing_shows_everything(open_page, gateway):
    page = open_page("about:blank", ready=None, new=True, color_scheme="light")
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('', 'SecurityError'); } });"
    )
    page.goto(gateway.url)
    page.wait_for_selector(".tile")
    page.get_by_role("button", name="Dark colours").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_nothing_moves_for_those_who_want_no_motion(open_page, gateway):
    page = open_page(f"{gateway.url}/", new=True, reduced_motion="reduce")
    assert page.evaluate("document.getAnimations().length") == 0
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<div class=skeleton></div>')")
    assert page.evaluate("document.getAnimations().length") == 0


def test_pages_have_titles_and_take_the_focus_when_they_change(open_page, gateway):
    page = open_page(f"{gateway.url}/")
    say_yes(gateway, running(gateway))
    expect(page.locator(".nav-count")).to_have_text("1 open")
    expect(page).to_have_title("(1) Wall · Sightline")
    page.get_by_role("link", name="Fleet").click()
    expect(page).to_have_title("(1) Fleet · Sightline")
    assert page.evaluate("document.activeElement.id") == "main"
    expect(page.locator("nav [aria-current=page]")).to_have_text("Fleet")
    page.go_back()
    expect(page.locator(".tile").first).to_be_visible()
    # Nothing is drawn of a page that is hidden; its title is read all the same.
    page.evaluate("window.requestAnimationFrame = () => 0")
    say_yes(gateway, running(gateway, 1))
    expect(page).to_have_title("(2) Wall · Sightline")
    page.reload()


def test_the_page_names_all_its_modules_and_has_nothing_inline():
    text = (STATIC / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="/console/([\w./-]+)"', text))
    there = {str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".svg")}
    assert named == there
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:|https?://", text)
    for path in STATIC.rglob("*.js"):
        source = path.read_text()
        for module in re.findall(r'from\s*"([^"]+)"', source):
            assert module.startswith("./"), f"{path.name} imports {module}"
            assert (path.parent / module).is_file(), f"{path.name} imports {module}"
        if path.parent == STATIC:
            assert not re.search(r"(inner|outer|Adjacent)HTML|dangerouslySet|\beval\(|new Function", source), path


def test_third_party_files_carry_their_licences():
    licences = (STATIC / "vendor" / "LICENSES.txt").read_text()
    for path in (STATIC / "vendor").glob("*.js"):
        assert f"{path.name}" in licences
    assert "MIT License" in licences
    assert "Apache License" in licences
