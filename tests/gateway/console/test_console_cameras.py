"""Managing cameras and their questions in a real browser: with the pointer, with the keyboard, on a phone."""

from __future__ import annotations

import json

import av
import pytest
from browsing import change, check_axe, running
from playwright.sync_api import expect
from waiting import until

from cluster.codec import CLIPS

CAMERAS = 12
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


def check_at_both_sizes(page):
    """axe finds nothing on a desk or on a phone, and neither scrolls sideways; leaves the page as small as a phone."""
    for size in ({"width": 1280, "height": 800}, PHONE["viewport"]):
        page.set_viewport_size(size)
        check_axe(page)
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]


def settings_of(gateway, name):
    """Keys that were written for a camera, as the controller has them."""
    [managed] = gateway.city.table.managed([name])
    return managed.entry


def test_a_camera_is_tested_added_paused_and_removed(open_page, gateway):
    name = "new"
    page = open_page(f"{gateway.url}/#/cameras", ready=".camera-row", **PHONE)
    check_at_both_sizes(page)
    page.get_by_role("link", name="Add a camera").click()
    page.get_by_label("Name").fill(name)
    page.get_by_label("Source").fill("demo://gate")
    page.get_by_label("First question").fill("Is anyone climbing the fence?")
    page.get_by_role("button", name="Test the source").click()
    test = page.locator(".source-test")
    with av.open(str(CLIPS["gate"])) as clip:
        stream = clip.streams.video[0]
        told = (
            f"{stream.codec_context.name} {stream.width} × {stream.height}, {float(stream.average_rate):.1f} pictures/s"
        )
    expect(test).to_contain_text(told, timeout=30_000)
    expect(test.locator("canvas")).to_have_count(2)
    until(lambda: test.locator("canvas").first.evaluate("canvas => canvas.width") > 300)
    check_at_both_sizes(page)
    page.evaluate(
        "new MutationObserver(() => (window.denied ||= document.body.innerText.includes('There is no such camera')))"
        ".observe(document.body, { childList: true, subtree: true })"
    )
    page.get_by_role("button", name="Add camera").click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    expect(page.locator(".camera-page")).to_be_visible()
    assert not page.evaluate("window.denied"), "what was added a moment ago is there"
    [question] = settings_of(gateway, name).questions
    assert (question.id, question.text) == ("anyone-climbing-the-fence", "Is anyone climbing the fence?")
    page.goto(f"{gateway.url}/#/cameras")
    page.get_by_role("button", name=f"Pause {name}").click()
    expect(page.get_by_role("button", name=f"Resume {name}")).to_be_visible()
    # By the words that the page itself has for states.
    change(gateway, name, state="error")
    page.get_by_label("Search cameras").fill("not working")
    expect(page.locator(".camera-row")).to_have_count(1)
    page.get_by_label("Search cameras").fill("")
    change(gateway, name, state="paused")
    assert settings_of(gateway, name).paused
    page.get_by_role("button", name=f"Resume {name}").click()
    until(lambda: not settings_of(gateway, name).paused)
    page.get_by_role("button", name=f"Remove {name}").click()
    expect(page.get_by_role("dialog")).to_contain_text("Its memory, incidents and clips are deleted.")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert name in gateway.city.cameras
    page.get_by_role("button", name=f"Remove {name}").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
    until(lambda: name not in gateway.city.cameras)
    expect(page.get_by_role("button", name=f"Remove {name}")).to_have_count(0)


def test_a_wrong_source_is_refused_in_one_sentence_and_nothing_is_lost(open_page, gateway):
    page = open_page(f"{gateway.url}/#/add-camera", ready="form")
    page.get_by_label("Name").fill("wrong")
    page.get_by_label("Source").fill("rstp://10.0.0.1/stream")
    page.get_by_role("button", name="Test the source").click()
    expect(page.locator(".source-test .error")).to_contain_text("has an unknown scheme")
    page.get_by_role("button", name="Add camera").click()
    expect(page.locator("form > .error")).to_contain_text("did you mean")
    assert page.get_by_label("Source").input_value() == "rstp://10.0.0.1/stream"
    assert "wrong" not in gateway.city.cameras


def test_a_password_is_never_sent_back_and_stays_when_the_rest_changes(open_page, gateway):
    page = open_page(f"{gateway.url}/#/add-camera", ready="form")
    page.get_by_label("Name").fill("secret")
    page.get_by_label("Source").fill("rtsp://operator:hunter2horse@10.0.0.9/stream1")
    page.get_by_label("First question").fill("Is the gate open?")
    bodies = [_reply(page, "Add camera")]
    expect(page.get_by_role("heading", name="secret")).to_be_visible()
    page.goto(f"{gateway.url}/#/settings/secret")
    source = page.get_by_role("textbox", name="Source")
    expect(source).to_have_value("rtsp://operator:***@10.0.0.9/stream1")
    page.get_by_label("Priority").select_option("critical")
    bodies.append(_reply(page, "Save source"))
    until(lambda: settings_of(gateway, "secret").priority == "critical")
    assert settings_of(gateway, "secret").source.reveal() == "rtsp://operator:hunter2horse@10.0.0.9/stream1"
    # The password goes to no other host.
    source.fill("rtsp://operator:***@10.6.6.6/stream1")
    bodies.append(_reply(page, "Save source"))
    expect(page.locator("main > div > .error")).to_contain_text("in place of a secret")
    for path in ("", "/secret", "/secret/settings", "/secret/history"):
        bodies.append(page.evaluate("path => fetch(path).then((reply) => reply.text())", f"/v1/cameras{path}"))
    assert sum("operator:***" in body for body in bodies) >= 5
    assert not [body for body in bodies if "hunter2horse" in body]


def _reply(page, button):
    """What the gateway replies to a form; read at once, as a browser forgets it."""
    with page.expect_response(lambda reply: reply.request.method in ("POST", "PUT")) as told:
        page.get_by_role("button", name=button).click()
    return told.value.text()


def test_masks_are_drawn_with_the_pointer_and_with_the_keyboard(open_page, gateway):
    name = running(gateway, 1)
    page = open_page(f"{gateway.url}/#/cameras", ready=".camera-row")
    held = []
    page.route("**/picture.jpg*", lambda route: held.append(route))
    page.goto(f"{gateway.url}/#/settings/{name}")
    save = page.get_by_role("button", name="Save masks")
    before = save.bounding_box()
    until(lambda: page.evaluate("1") and held)
    for route in list(held):
        route.continue_()
    page.unroute_all()
    expect(page.locator(".mask-frame .picture.there").first).to_be_visible()
    # Nothing jumps away from under a pointer when the picture comes.
    assert save.bounding_box()["y"] == pytest.approx(before["y"], abs=20)
    canvas = page.get_by_role("application", name="Draw a privacy mask")
    box = canvas.bounding_box()
    for x, y in ((0.1, 0.1), (0.4, 0.1), (0.4, 0.5), (0.1, 0.1)):
        canvas.click(position={"x": x * box["width"], "y": y * box["height"]})
    expect(page.get_by_text("Mask 1, 3 corners")).to_be_visible()
    # The second one without a pointer: from where the cross is.
    canvas.focus()
    for key in ["Enter", *["Shift+ArrowRight"] * 4, "Enter", *["Shift+ArrowDown"] * 4, "Enter", "c"]:
        page.keyboard.press(key)
    expect(page.get_by_text("Mask 2, 3 corners")).to_be_visible()
    page.get_by_role("button", name="Corner 1 of mask 2").focus()
    page.keyboard.press("ArrowUp")
    check_axe(page)
    page.get_by_role("button", name="Save masks").click()
    until(lambda: len(settings_of(gateway, name).privacy_masks) == 2)
    first, second = settings_of(gateway, name).privacy_masks
    assert [pytest.approx(corner, abs=0.01) for corner in first] == [(0.1, 0.1), (0.4, 0.1), (0.4, 0.5)]
    (x0, y0), (x1, y1), (x2, y2) = second
    assert (x1 - x0, y1 - y0, x2 - x1) == pytest.approx((0.2, 0.01, 0.0), abs=0.002)
    assert y2 - y1 == pytest.approx(0.2, abs=0.002)
    page.get_by_role("button", name="Remove mask 1").click()
    page.get_by_role("button", name="Save masks").click()
    until(lambda: len(settings_of(gateway, name).privacy_masks) == 1)


def test_what_was_changed_elsewhere_is_not_overwritten_by_a_page_from_before(open_page, gateway):
    """A page that has been open since before a privacy mask was drawn would take it away with any other change."""
    name = running(gateway, 1)
    page = open_page(f"{gateway.url}/#/settings/{name}", ready=".mask-frame .picture.there")
    before = page.evaluate("path => fetch(path).then((reply) => reply.json())", f"/v1/cameras/{name}/settings")
    mask = [[0.0, 0.0], [0.5, 0.0], [0.5, 1.0]]
    settings = before["settings"] | {"privacy_masks": [mask]}
    headers = "{'content-type': 'application/json'}"
    send = f"([path, body]) => fetch(path, {{method: 'PUT', headers: {headers}, body}}).then((reply) => reply.status)"
    body = json.dumps({"source": before["source"], "settings": settings})
    assert page.evaluate(send, [f"/v1/cameras/{name}", body]) == 200
    canvas = page.get_by_role("application", name="Draw a privacy mask")
    canvas.focus()
    for key in ["Enter", "Shift+ArrowRight", "Enter", "Shift+ArrowDown", "Enter", "c"]:
        page.keyboard.press(key)
    page.get_by_role("button", name="Save masks").click()
    expect(page.locator("main > div > .error")).to_contain_text("changed elsewhere")
    page.reload()
    for priority in ("critical", "normal"):
        page.get_by_label("Priority").select_option(priority)
        page.get_by_role("button", name="Save source").click()
        until(lambda wanted=priority: settings_of(gateway, name).priority == wanted)
    assert [[list(corner) for corner in each] for each in settings_of(gateway, name).privacy_masks] == [mask]


def test_a_card_saves_nothing_that_is_not_saved_in_another(open_page, gateway):
    name = running(gateway, 1)
    page = open_page(f"{gateway.url}/#/settings/{name}", ready=".mask-frame .picture.there")
    before = settings_of(gateway, name).source
    page.get_by_role("textbox", name="Source").fill("rtsp://10.0.0.77/half-typed")
    canvas = page.get_by_role("application", name="Draw a privacy mask")
    canvas.focus()
    for key in ["Enter", "Shift+ArrowRight", "Enter", "Shift+ArrowDown", "Enter", "c"]:
        page.keyboard.press(key)
    masks = len(settings_of(gateway, name).privacy_masks or [])
    page.get_by_role("button", name="Save masks").click()
    until(lambda: len(settings_of(gateway, name).privacy_masks) == masks + 1)
    assert settings_of(gateway, name).source == before
    # It is still there to be saved by its own button, with the mask.
    page.get_by_role("button", name="Save source").click()
    until(lambda: settings_of(gateway, name).source.reveal() == "rtsp://10.0.0.77/half-typed")
    assert len(settings_of(gateway, name).privacy_masks) == masks + 1


def test_zones_have_the_colours_that_questions_name_them_by(open_page, gateway):
    name = running(gateway, 1)
    page = open_page(f"{gateway.url}/#/settings/{name}", ready=".mask-frame .picture.there")
    masks = settings_of(gateway, name).privacy_masks
    canvas = page.get_by_role("application", name="Draw a zone")
    canvas.focus()
    for _ in range(4):
        for key in ["Enter", "Shift+ArrowRight", "Enter", "Shift+ArrowDown", "Enter", "c"]:
            page.keyboard.press(key)
    for number, colour in enumerate(("red", "yellow", "blue", "green"), 1):
        expect(page.get_by_text(f"Zone {number}, {colour}, 3 corners")).to_be_visible()
    # No fifth one is begun: nothing is left to close.
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Save zones")).to_be_enabled()
    check_axe(page)
    page.get_by_role("button", name="Remove zone 1").click()
    page.get_by_role("button", name="Save zones").click()
    until(lambda: len(settings_of(gateway, name).zones) == 3)
    assert settings_of(gateway, name).privacy_masks == masks


def test_a_question_is_written_replayed_and_its_threshold_makes_incidents(open_page, gateway):
    name = running(gateway, 2)
    page = open_page(f"{gateway.url}/#/settings/{name}", ready=".question-row", **PHONE)
    page.get_by_role("button", name="Write a question").click()
    page.get_by_role("textbox", name="Question").fill("Is a red van parked here?")
    page.get_by_role("button", name="Replay").click()
    # An hour of windows, every eight seconds; at most sixty are asked.
    replay = page.locator(".replay")
    expect(replay).to_contain_text("windows replayed from its memory", timeout=20_000)
    expect(replay.locator(".score-plot")).to_be_visible()
    rehearsal = page.locator(".rehearsal")
    expect(rehearsal).to_contain_text("incidents at this threshold")
    below = rehearsal.inner_text()
    page.get_by_label("Threshold").evaluate(
        "slider => { slider.value = '0.9'; slider.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    expect(rehearsal).to_contain_text("0 incidents at this threshold")
    assert below != rehearsal.inner_text()
    page.get_by_label("Threshold").focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_label("Severity").select_option("critical")
    page.get_by_text("Only at certain times").click()
    page.get_by_role("button", name="Sun").click()
    page.get_by_role("textbox", name="Hours").fill("22:00-06:00")
    page.get_by_label("Time zone").fill("Europe/Berlin")
    check_at_both_sizes(page)
    page.get_by_role("button", name="Save question").click()
    until(lambda: any(each.id == "a-red-van-parked-here" for each in settings_of(gateway, name).questions))
    question = next(each for each in settings_of(gateway, name).questions if each.id == "a-red-van-parked-here")
    assert (question.threshold, question.severity) == (0.89, "critical")
    assert question.when.days == ["mon", "tue", "wed", "thu", "fri", "sat"]
    assert (question.when.hours, question.when.timezone) == (["22:00-06:00"], "Europe/Berlin")
    # It goes to another camera, whose own questions stay.
    other = running(gateway, 3)
    mask = [[0.0, 0.0], [0.5, 0.0], [0.5, 1.0]]

    def masked_meanwhile(route):
        """Somebody draws a mask after the page has read the settings."""
        reply = route.fetch()
        source, settings = reply.json()["source"], reply.json()["settings"] | {"privacy_masks": [mask]}
        page.request.put(f"{gateway.url}/v1/cameras/{other}", data={"source": source, "settings": settings})
        route.fulfill(response=reply)

    def copy():
        page.get_by_role("button", name="Copy a red van parked here").click()
        page.get_by_role("dialog").get_by_label(other).check()
        page.get_by_role("dialog").get_by_role("button", name="Copy", exact=True).click()

    page.route(f"**/v1/cameras/{other}/settings", masked_meanwhile)
    copy()
    expect(page.get_by_role("dialog").locator(".error")).to_contain_text("changed elsewhere")
    page.unroute_all()
    page.keyboard.press("Escape")
    copy()
    expect(page.get_by_role("dialog")).to_contain_text("1 camera of 1 changed")
    assert len(settings_of(gateway, other).privacy_masks) == 1
    until(lambda: len(settings_of(gateway, other).questions) == 3)
    assert len(settings_of(gateway, other).privacy_masks) == 1
    # It is not removed by one wrong click.
    page.keyboard.press("Escape")
    answers = [False, True]
    page.on("dialog", lambda dialog: dialog.accept() if answers.pop(0) else dialog.dismiss())
    remove = page.get_by_role("button", name="Remove a red van parked here")
    remove.click()
    page.wait_for_timeout(500)
    assert len(settings_of(gateway, name).questions) == 3
    remove.click()
    until(lambda: len(settings_of(gateway, name).questions) == 2)
    gateway.city.table.remove(name)
    gateway.city.table.remove(other)


def test_a_replay_can_be_stopped_and_a_wrong_question_is_refused(open_page, gateway):
    name = running(gateway, 4)
    page = open_page(f"{gateway.url}/#/settings/{name}", ready=".question-row")
    page.get_by_role("button", name="Write a question").click()
    page.get_by_role("textbox", name="Question").fill("Describe the scene")
    page.get_by_role("button", name="Save question").click()
    expect(page.locator(".question-form > .error")).to_contain_text("asks for more than yes or no")
    page.get_by_role("button", name="Replay").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".replay .error")).to_have_text("Stopped.")


def test_a_list_is_checked_line_by_line_before_anything_is_added(open_page, gateway):
    page = open_page(f"{gateway.url}/#/import-cameras", ready="textarea", **PHONE)
    names = [f"listed-{number}" for number in range(2)]
    lines = (f"{names[0]},rtsp://u:hunter2horse@10.0.0.1/s,Is the gate open?", f"{names[1]},rstp://x/y,Is it?")
    page.get_by_role("textbox", name="Cameras").fill("\n".join(("name,source,question", *lines)))
    page.get_by_role("button", name="Check the list").click()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    # What is wrong stands first, with its line.
    expect(rows.first).to_contain_text("3")
    expect(rows.first).to_contain_text("unknown scheme")
    expect(page.get_by_role("button", name="Add 2 cameras")).to_be_disabled()
    assert "hunter2horse" not in page.locator("table").inner_text()
    check_at_both_sizes(page)
    text = page.get_by_role("textbox", name="Cameras").input_value().replace("rstp", "rtsp")
    page.get_by_role("textbox", name="Cameras").fill(text)
    page.get_by_role("button", name="Check the list").click()
    page.get_by_role("button", name="Add 2 cameras").click()
    expect(page.get_by_role("status").filter(has_text="2 cameras added")).to_be_visible()
    assert settings_of(gateway, names[0]).source.reveal() == "rtsp://u:hunter2horse@10.0.0.1/s"
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]


def test_a_long_list_says_that_only_its_beginning_is_shown(open_page, gateway):
    page = open_page(f"{gateway.url}/#/import-cameras", ready="textarea")
    lines = [f"long-{number},demo://gate" for number in range(501)]
    page.get_by_role("textbox", name="Cameras").fill("\n".join(("name,source", *lines)))
    page.get_by_role("button", name="Check the list").click()
    expect(page.locator("tbody tr")).to_have_count(500)
    expect(page.get_by_text("The first 500 of 501 cameras")).to_be_visible()


def test_a_network_that_may_not_be_searched_is_said(open_page, gateway):
    page = open_page(f"{gateway.url}/#/import-cameras", ready="textarea")
    page.get_by_text("Search a network for ONVIF cameras").click()
    page.get_by_label("Network").fill("10.0.0.0/24")
    check_axe(page)
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("alert")).to_contain_text("no network may be searched for cameras")


def test_a_camera_that_is_found_is_put_on_the_list(open_page, gateway):
    found = {
        "address": "10.0.0.9:80",
        "name": "Acme Dome",
        "model": "Dome",
        "error": "",
        "streams": [
            {"profile": "main", "codec": "H264", "width": 64, "height": 48, "fps": 5, "source": "rtsp://10.0.0.9/a"}
        ],
    }
    line = {"discovery": {"probed": 2, "total": 2, "answered": 1, "asked": 1, "camera": found}}
    page = open_page(f"{gateway.url}/#/import-cameras", ready="textarea")
    # The page alone: what a search finds is tested with real devices in tests/gateway/test_discovery_flow.py.
    page.route("**/v1/cameras/discover", lambda route: route.fulfill(body=json.dumps(line)))
    page.get_by_text("Search a network for ONVIF cameras").click()
    page.get_by_label("Network").fill("10.0.0.0/30")
    page.get_by_label("User of the cameras").fill("viewer")
    page.get_by_label("Password of the cameras").fill("s:t")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("button", name="Add main").click()
    check_axe(page)
    expect(page.locator("textarea")).to_have_value('name,source\nacme-dome-10-0-0-9,"rtsp://viewer:s%3At@10.0.0.9/a"\n')
