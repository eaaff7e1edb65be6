"""The wall of cameras in a real browser: states, live changes, finding cameras, and what it costs the browser."""

import re

from browsing import change, running, say_yes
from playwright.sync_api import expect
from waiting import until

from cluster.types import CameraStatus, LastAnswer

CAMERAS = 500


def test_it_counts_all_cameras_and_holds_only_those_on_the_screen(wall):
    statuses = list(wall.gateway.city.cameras.values())
    counts = wall.counts()
    assert counts["All"] == 500
    assert counts["Not working"] == sum(status.state in ("error", "backoff") for status in statuses)
    assert counts["Lower quality"] == sum(status.rung != "full" for status in statuses)
    assert 8 <= len(wall.shown()) <= 60
    assert wall.page.get_attribute(".grid > li", "aria-setsize") == "500"


def test_cameras_with_an_incident_come_first_then_those_that_do_not_work(wall):
    until(lambda: wall.counts()["With an incident"] == len(wall.gateway.city.hot))
    shown = wall.shown()
    hot = wall.gateway.city.hot
    assert set(shown[: len(hot)]) == hot
    assert wall.gateway.city.cameras[shown[len(hot)]].state == "error"


def test_a_tile_says_state_answer_and_quality_and_draws_its_scores(wall):
    name = running(wall.gateway, 5)
    change(wall.gateway, name, rung="stride", rung_reason="load is 0.97 of the replica's capacity")
    wall.search(name)
    tile = wall.tile(name)
    expect(tile.locator(".badge")).to_have_text("Quality: stride")
    expect(tile.locator(".badge")).to_have_attribute("title", "load is 0.97 of the replica's capacity")
    top = max(wall.gateway.city.cameras[name].last_answers, key=lambda answer: answer.score)
    expect(tile.locator(".tile-score")).to_have_text(f"{top.score:.2f}")
    expect(tile.locator(".sparkline .top")).to_have_attribute("d", re.compile(r"^M[\d.]+ [\d.]+(L|$)"))
    # A picture is drawn, with the width and height that the gateway sent.
    until(lambda: tile.locator("canvas").evaluate("canvas => canvas.width") == 320)
    expect(tile.locator(".picture")).to_have_class("picture there")


def test_changes_show_without_a_reload(wall, monkeypatch):
    # How old the newest frame is goes to browsers every second, and not every five.
    monkeypatch.setattr("cluster.gateway.http.live.COUNTERS_S", 1.0)
    name = running(wall.gateway, 6)
    wall.search(name)
    expect(wall.tile(name)).to_be_visible()
    wall.page.evaluate("window.same = true")
    calm = wall.counts()["Not working"]
    change(wall.gateway, name, state="error", reason="the lens is covered")
    expect(wall.tile(name)).to_contain_text("Not working")
    # Why, and not what it answered while it worked.
    expect(wall.tile(name)).to_contain_text("the lens is covered")
    change(wall.gateway, name, state="running", reason="")
    expect(wall.tile(name)).not_to_contain_text("Not working")
    until(lambda: wall.counts()["Not working"] == calm)
    # One that is connected and sends nothing does not work either.
    change(wall.gateway, name, last_frame_age_s=340.0)
    expect(wall.tile(name)).to_have_class("tile tone-trouble")
    expect(wall.tile(name)).to_contain_text("Silent for 6 min")
    until(lambda: wall.counts()["Not working"] == calm + 1)
    change(wall.gateway, name, last_frame_age_s=0.2)
    expect(wall.tile(name)).to_have_class("tile tone-good")
    say_yes(wall.gateway, name)
    expect(wall.tile(name)).to_have_class("tile tone-warning")
    expect(wall.tile(name).locator(".badge")).to_have_text("person in restricted area")
    expect(wall.tile(name)).to_contain_text("yes 0.93")
    assert wall.page.evaluate("window.same")


def test_cameras_come_and_go(wall):
    gateway = wall.gateway
    gateway.city.put(CameraStatus("annex-1", source="push://"))
    gateway.publish([])
    wall.search("annex-1")
    expect(wall.tile("annex-1")).to_contain_text("No answer yet")
    del gateway.city.cameras["annex-1"]
    gateway.publish([])
    expect(wall.page.locator(".empty")).to_contain_text("No matching camera")
    until(lambda: wall.counts()["All"] == 500)


def test_a_push_that_has_ended_is_calm_whatever_it_said_last(wall):
    name = running(wall.gateway, 7)
    last = (LastAnswer("fight", 0.93, True, 1),)
    change(wall.gateway, name, last_answers=last)
    wall.search(name)
    expect(wall.tile(name)).to_have_class("tile tone-warning")
    expect(wall.tile(name).locator(".tile-score")).to_have_class("tile-score yes")
    change(wall.gateway, name, state="ended", last_answers=last)
    expect(wall.tile(name)).to_have_class("tile tone-quiet")
    expect(wall.tile(name).locator(".tile-score")).not_to_have_class("tile-score yes")
    expect(wall.tile(name).locator(".badge")).to_have_class("badge quiet")


def test_pictures_are_plain_until_kept_patches_are_wanted(open_page, gateway):
    page = open_page("about:blank", ready=None, new=True)
    asked = []
    page.on("request", lambda request: "/picture.jpg" in request.url and asked.append("kept=1" in request.url))
    page.goto(gateway.url)
    page.wait_for_selector(".picture.there")
    assert asked
    assert not any(asked)
    page.get_by_role("switch", name="Kept patches").check()
    until(lambda: page.wait_for_timeout(50) or any(asked))


def test_search_filter_and_sort(wall):
    page, cameras = wall.page, wall.gateway.city.cameras
    wall.search("PLATFORM-south")
    until(lambda: (shown := wall.shown()) and all("platform-south" in name for name in shown))
    wall.search("replica-2")
    until(lambda: (shown := wall.shown()) and all(cameras[name].replica == "replica-2" for name in shown))
    page.press("input[type=search]", "Escape")
    assert page.input_value("input[type=search]") == ""
    page.select_option("select >> nth=0", "name")
    until(lambda: wall.shown()[0] == min(cameras))
    page.click("text=Lower quality")
    until(lambda: (shown := wall.shown()) and all(cameras[name].rung != "full" for name in shown))
    assert page.locator(".chip[aria-pressed=true]").count() == 1
    # Whoever comes back, or loads the page anew, finds the wall as it was left.
    page.set_viewport_size({"width": 1280, "height": 400})
    page.evaluate("scrollTo(0, 300)")
    # In one step: what was scrolled to is drawn a frame later, and the last tile is another one then.
    name = page.locator(".tile").last.evaluate("tile => (tile.click(), tile.dataset.camera)")
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    assert page.evaluate("scrollY") == 0
    page.go_back()
    expect(page.locator(".chip.lowered")).to_have_attribute("aria-pressed", "true")
    until(lambda: page.evaluate("scrollY") == 300)
    page.reload()
    page.wait_for_selector(".tile")
    expect(page.locator(".chip.lowered")).to_have_attribute("aria-pressed", "true")
    assert page.input_value("select >> nth=0") == "name"


def test_only_what_is_on_the_screen_is_fetched(open_page, gateway):
    page = open_page("about:blank", ready=None, new=True)
    asked = set()
    page.on("request", lambda request: "/picture.jpg" in request.url and asked.add(request.url.split("/")[5]))
    page.goto(gateway.url)
    until(lambda: page.wait_for_timeout(50) or len(asked) >= 4)
    page.wait_for_timeout(700)
    assert len(asked) <= 40
    before = set(asked)
    page.keyboard.press("End")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    until(lambda: page.wait_for_timeout(50) or len(asked - before) >= 4)
    assert len(asked) < 80


def test_requests_that_hang_hold_up_the_others_for_a_while_only(open_page, gateway):
    page = open_page("about:blank", ready=None, new=True)
    page.add_init_script(
        "const limit = AbortSignal.timeout; AbortSignal.timeout = (ms) => limit.call(AbortSignal, ms / 20)"
    )
    began, hung = [], []
    page.on("request", lambda request: began.append(request.url.split("/")[-1]))

    def hang(route):
        hung.append(route.request.url.split("/")[-1].partition("?")[0])
        # As many as may be under way.
        if hung.count(hung[-1]) > 4:
            route.continue_()

    page.route(re.compile("/(picture.jpg|history)"), hang)
    page.goto(gateway.url)
    expect(page.locator(".picture.there").first).to_be_visible()
    until(lambda: page.wait_for_timeout(50) or began.count("history") > 4)
    # Longer than a request may take: the events are none that ends.
    page.wait_for_timeout(2_500)
    assert began.count("events") == 1


def test_the_document_does_not_grow_while_cameras_change(wall):
    page = wall.page
    page.wait_for_selector(".picture.there")
    nodes = page.evaluate("document.querySelectorAll('*').length")
    for _ in range(3):
        wall.gateway.step(8)
        page.wait_for_timeout(300)
    assert page.evaluate("document.querySelectorAll('*').length") < 1.2 * nodes
    sizes = page.evaluate(
        "async () => { const { store } = await import('/console/store.js');"
        " return [store.cameras.size, store.histories.size, store.changed.size] }"
    )
    assert sizes[0] == 500
    assert sizes[1] <= 120


def test_a_name_is_never_markup(wall, open_page):
    gateway = wall.gateway
    name, source = "<img src=x onerror=document.title='owned'>\"'&", "<script>document.title='owned'</script>"
    gateway.city.put(CameraStatus(name, source=source, state="error", reason="<b>no</b>"))
    gateway.publish([])
    try:
        wall.search("<img")
        tile = wall.page.locator(".tile")
        expect(tile).to_have_count(1)
        expect(tile.locator(".tile-name")).to_have_text(name)
        expect(tile).to_contain_text("<b>no</b>")
        tile.click()
        expect(wall.page.locator("h1")).to_have_text(name)
        expect(wall.page.locator("body")).to_contain_text("<script>")
        assert "owned" not in wall.page.title().replace(name, "")
        assert wall.page.locator("img[src=x]").count() == 0
    finally:
        del gateway.city.cameras[name]
        gateway.publish([])


def test_by_keyboard_alone(wall):
    page = wall.page

    def focused():
        return page.evaluate("document.activeElement.dataset.camera ?? document.activeElement.textContent.trim()")

    page.select_option("select >> nth=0", "name")
    until(lambda: wall.shown()[0] == min(wall.gateway.city.cameras))
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert focused() == "Skip to content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.press("Escape")
    page.locator(".chip").last.focus()
    page.keyboard.press("Tab")
    names = sorted(wall.gateway.city.cameras)
    assert focused() == names[0]
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("ArrowRight")
    until(lambda: focused() == names[1])
    page.keyboard.press("End")
    until(lambda: focused() == names[-1])
    assert page.evaluate("document.activeElement.getBoundingClientRect().bottom <= innerHeight")
    page.keyboard.press("Home")
    until(lambda: focused() == names[0])
    # The grid is one stop: one more Tab leaves it.
    page.keyboard.press("Tab")
    assert focused() not in names
    page.keyboard.press("Shift+Tab")
    assert focused() == names[0]
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(names[0])


def test_a_question_is_copied_to_any_of_many_cameras_and_the_dialog_says_what_that_replaces(open_page, gateway):
    first, *_, last = sorted(gateway.city.cameras)
    page = open_page(f"{gateway.url}/#/settings/{first}", ready=".question-row")
    page.get_by_role("button", name="Copy").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("it takes their place")
    expect(dialog).to_contain_text("The first 200 of 499.")
    dialog.get_by_label("Search cameras").fill(last)
    expect(dialog.get_by_label(last)).to_be_visible()
    expect(dialog).not_to_contain_text("The first 200")
