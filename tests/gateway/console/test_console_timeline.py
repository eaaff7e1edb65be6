"""A day of one camera in a real browser: by pointer, by keyboard, and as a table."""

import re
import time

import pytest
from browsing import change, running, say_yes
from playwright.sync_api import expect
from waiting import until

from cluster.alerts.incident import Incident
from cluster.alerts.timeline_store import StateChange

CAMERAS = 12


@pytest.mark.parametrize("width", [1280, 360])
def test_a_day_is_scrubbed_by_pointer_and_keyboard_and_read_as_a_table(open_page, gateway, width):
    name = running(gateway, 2 if width > 400 else 3)
    now_s = time.time()
    store = gateway.alerts.timelines
    question = "person-in-restricted-area"
    for ago_min, score in ((600, 0.31), (599, 0.87), (30, 0.12)):
        store.add_window(name, question, now_s - 60 * ago_min, score, 0.0, score > 0.5)
    changes = [
        StateChange(now_s - 86_000, "running", "full", 0),
        StateChange(now_s - 36_000, "backoff", "stride", 1),
        StateChange(now_s - 34_000, "running", "full", 1),
    ]
    store._states += [(name, each) for each in changes]
    change(gateway, name, rung="full")
    say_yes(gateway, name)
    page = open_page(f"{gateway.url}/#/camera/{name}", ready=".day-line", viewport={"width": width, "height": 720})
    day = page.locator("section", has=page.locator("#camera-day"))
    day.get_by_label("Question").select_option(question)
    line = page.locator(".day-line")
    # The incident's two windows may lie in two minutes.
    expect(line.locator(".scores").nth(3)).to_be_attached()
    assert line.locator(".scores").count() <= 5
    expect(line.locator(".state")).to_have_count(2)
    expect(line.locator(".lowered")).to_have_count(1)
    expect(line.locator(".incident")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    reading = page.locator(".day-reading")
    # By keyboard: to the newest minutes, where the incident is, and back ten hours.
    line.press("End")
    expect(line).to_have_attribute("aria-valuenow", "1439")
    expect(reading).to_contain_text("incident: person in restricted area")
    expect(reading.get_by_role("link")).to_have_count(1)
    for _ in range(10):
        line.press("PageDown")
    seen = []
    for _ in range(4):
        seen.append(line.get_attribute("aria-valuetext"))
        line.press("ArrowRight")
    assert any("person in restricted area 0.87, 1 of 1 windows yes; backoff, quality stride" in each for each in seen)
    page.get_by_text("as a table").last.click()
    expect(day.locator("tbody tr")).to_have_count(60)
    expect(day.locator("table")).to_contain_text("0.87")
    # Of a clock of twelve hours, the half of the day as well.
    expect(reading).to_contain_text(re.compile(r"^\d\d:\d\d\s[AP]M: "))
    # By pointer: the left edge is a day ago.
    box = line.bounding_box()
    line.hover(position={"x": 2, "y": box["height"] / 2})
    assert int(line.get_attribute("aria-valuenow")) < 15
    expect(reading).to_contain_text("no answer")
    line.press("End")
    line.press("Enter")
    assert "#/incidents/" in page.url


# The page goes by the gateway's clock: hours that pass pass there, too.
GATEWAY_TOO = """
const got = Headers.prototype.get;
Headers.prototype.get = function (name) {
  return name.toLowerCase() === "date" ? new Date().toUTCString() : got.call(this, name);
};
"""


def test_what_has_gone_on_for_days_is_on_the_line(open_page, gateway):
    name, opened_s = running(gateway, 4), time.time() - 3 * 86_400
    long = Incident(
        "", name, "question", "fire", "critical", 0, 1, 0.9, 2, opened_s, opened_s, question="Is there fire?"
    )
    gateway.alerts._open_incidents.open_incident(long, "1")
    page = open_page(f"{gateway.url}/#/camera/{name}", ready=".day-line")
    expect(page.locator(".day-line .incident.critical")).to_have_count(1)
    page.locator(".day-line").press("Home")
    expect(page.locator(".day-reading")).to_contain_text("incident: Is there fire?")


def test_a_page_that_stays_open_shows_the_last_day_and_not_that_of_its_opening(open_page, gateway):
    page = open_page("about:blank", ready=None, new=True)
    page.clock.install()
    page.add_init_script(GATEWAY_TOO)
    name, listed = running(gateway, 5), []
    page.goto(f"{gateway.url}/#/camera/{name}")
    page.wait_for_selector(".day-line")
    asked = []
    page.on("request", lambda request: "/timeline?" in request.url and asked.append(request.url.rpartition("=")[2]))
    page.locator(".day-line").press("Home")
    page.clock.fast_forward(3 * 3_600_000)
    until(lambda: page.evaluate("Date.now() / 1000") - 60 <= max(map(float, asked), default=0.0))
    # What is read stays where it was.
    expect(page.locator(".day-line")).to_have_attribute("aria-valuenow", "0")
    # Incidents that come are told, and not asked for by the minute.
    expect(page.locator(".live")).to_have_text("Live")
    expect(page.locator(".camera-page .empty", has_text="No incidents")).to_be_visible()
    page.wait_for_timeout(500)
    page.on("request", lambda request: "/v1/incidents?" in request.url and listed.append(request.url))
    asked.clear()
    for _ in range(6):
        page.clock.fast_forward(21_000)
        gateway.step(8)
        page.wait_for_timeout(300)
    until(lambda: page.evaluate("1") and asked)
    say_yes(gateway, name)
    expect(page.locator(".day-line .incident")).to_have_count(1)
    assert listed == []
