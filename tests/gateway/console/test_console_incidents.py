"""Incidents in a real browser: they appear by themselves, with picture and clip, and are seen to by who may."""

import itertools
import re
import time

import pytest
from browsing import PATIENCE_MS, running, say_no, say_yes
from console_city import City
from console_gateway import ConsoleGateway
from playwright.sync_api import expect
from waiting import until

from cluster.alerts.incident import Incident, IncidentQuery
from cluster.security.roles import Role
from cluster.security.tokens import make_token, write_tokens

CAMERAS = 120
OTHERS = itertools.count(20)


@pytest.fixture
def incident(gateway, open_page):
    """A page of the list, and an incident that begins while it is open."""
    page = open_page(f"{gateway.url}/#/incidents", ready="h1")
    # What was open before is listed: all that comes now is news.
    expect(page.locator(".nav-count")).to_be_visible()
    name = running(gateway, next(OTHERS))
    say_yes(gateway, name)
    row = page.locator(".incident-row", has_text=name)
    expect(row).to_have_count(1)
    return page, name, row


def test_one_that_begins_appears_and_is_announced(incident):
    page, name, row = incident
    expect(row).to_contain_text("person in restricted area")
    expect(row).to_contain_text("warning")
    expect(row).to_contain_text("Somebody stands there.")
    expect(page.locator("p[role=status].unseen").last).to_contain_text(name)
    until(lambda: row.locator("img").evaluate("image => image.naturalWidth") > 0)


def test_a_list_of_the_last_hour_that_stays_open_is_not_one_of_its_opening(gateway, open_page):
    name, began_s = running(gateway, next(OTHERS)), time.time() - 3 * 86_400
    smoke = Incident(
        "", name, "question", "smoke", "critical", 0, 1, 0.9, 2, began_s, began_s, question="Is there smoke?"
    )
    gateway.alerts._open_incidents.open_incident(smoke, "1")
    name = running(gateway, next(OTHERS))
    say_yes(gateway, name)
    say_no(gateway, name)
    page = open_page("about:blank", ready=None, new=True)
    page.clock.install()
    page.goto(f"{gateway.url}/#/incidents")
    page.locator(".toolbar select").first.select_option("3600")
    row = page.locator(".incident-row", has_text=name)
    expect(row).to_have_count(1)
    # What goes on is of now, whenever it began and was last told of.
    expect(page.locator(".incident-row", has_text="Is there smoke?")).to_have_count(1)
    # Else replies would say that no hours have passed.
    page.evaluate("Date.parse = () => NaN")
    page.clock.fast_forward(2 * 3_600_000)
    expect(row).to_have_count(0)


def test_a_browser_whose_clock_is_wrong_lists_the_last_hour_all_the_same(gateway, open_page):
    name = running(gateway, next(OTHERS))
    say_yes(gateway, name)
    say_no(gateway, name)
    page = open_page("about:blank", ready=None, new=True)
    page.clock.install(time=time.time() + 2 * 3600)
    page.goto(f"{gateway.url}/#/incidents")
    page.locator(".toolbar select").first.select_option("3600")
    row = page.locator(".incident-row", has_text=name)
    expect(row).to_have_count(1)
    expect(row.locator(".incident-time")).not_to_contain_text("2 h")


# The named camera's incident ends; where none is open, there are many others that are over.
TELL_MANY = """async ([name, ended_s]) => {
  const { store } = await import('/console/store.js');
  const [one] = store.openIncidents(name);
  if (one) return store.incident({ ...one, ended_s, updated_s: ended_s });
  const [over] = store.incidents.values();
  const elsewhere = { ...over, ended_s, opened_s: 1, camera: 'elsewhere' };
  for (let i = 0; i < 1100; i++) store.incident({ ...elsewhere, id: `i${i}` });
}"""


def test_a_search_that_did_not_look_through_all_says_so_and_goes_further_back(gateway, open_page):
    page = open_page(f"{gateway.url}/#/nowhere", ready=None)
    asked = []

    def multiply(route):
        # As if there were 203.
        before = "&before=" in route.request.url
        asked.append(route.request.url)
        reply = route.fetch(url=route.request.url.partition("&before=")[0])
        [one, *_] = reply.json()["incidents"]
        many = range(200, 203) if before else range(200)
        route.fulfill(response=reply, json={"incidents": [{**one, "id": f"{number:032x}"} for number in many]})

    page.route(re.compile(r"/v1/incidents\?limit=200"), multiply)
    page.goto(f"{gateway.url}/#/incidents")
    newest = page.get_by_text("Only the newest 200 incidents of the last day are searched")
    expect(newest).to_be_visible()
    page.get_by_role("button", name="Older").click()
    expect(page.locator(".incident-row")).to_have_count(3)
    assert asked[-1].endswith(f"&before={199:032x}")
    # What begins meanwhile is none of the older ones.
    say_yes(gateway, running(gateway, next(OTHERS)))
    expect(page.get_by_text("Only 3 older incidents of the last day are searched")).to_be_visible()
    expect(page.get_by_role("button", name="Older")).to_be_disabled()
    expect(page.locator(".incident-row")).to_have_count(3)
    page.get_by_role("button", name="Newest").click()
    expect(newest).to_be_visible()
    page.get_by_label("Search incidents").fill("no such camera")
    expect(page.get_by_text("None of the newest 200 incidents of the last day matches.")).to_be_visible()
    # However many others are known, none that was rejected is left out.
    page.unroute_all()
    page.evaluate(TELL_MANY, ["", time.time()])
    page.get_by_label("Verdict").select_option("rejected")
    expect(page.get_by_text("No incident of the last day matches.")).to_be_visible()


def test_what_has_ended_does_not_go_on_again_when_much_has_happened_since(gateway, open_page):
    page = open_page(f"{gateway.url}/#/incidents", ready=".incident-row")
    name = min(gateway.city.hot)
    row = page.locator(".incident-row", has_text=name).first
    expect(row).to_contain_text("open for")
    page.evaluate(TELL_MANY, [name, time.time()])
    expect(row).to_contain_text("lasted")
    page.evaluate(TELL_MANY, [name, time.time()])
    page.wait_for_timeout(1_000)
    expect(row).to_contain_text("lasted")


def test_a_card_says_what_was_asked(gateway, open_page):
    page = open_page(f"{gateway.url}/#/incidents", ready="h1")
    name = min(gateway.city.hot)
    title = page.locator(".incident-row", has_text=name).first.locator(".incident-title")
    expect(title).to_contain_text(re.compile(rf"^Is there [\w-]+\? at {name}$"))


def test_it_is_acknowledged_and_its_end_shows(incident, gateway):
    page, name, row = incident
    page.set_viewport_size({"width": 1280, "height": 400})
    row.locator("a").evaluate("link => link.scrollIntoView({ block: 'center' })")
    place = page.evaluate("scrollY")
    assert place > 0
    row.locator("a").press("Enter")
    detail = page.locator(".detail")
    # The list stays where it is, and the keys go on in what was opened.
    expect(detail).to_be_focused()
    assert page.evaluate("scrollY") == place
    before = detail.get_by_role("button", name="Confirm").bounding_box()
    detail.get_by_role("button", name="Acknowledge").click()
    expect(detail).to_contain_text("acknowledged by anybody")
    expect(row).to_contain_text("acknowledged by anybody")
    expect(detail.get_by_role("button", name="Acknowledged")).to_be_disabled()
    # Nothing came into its place, to be pressed by a second click.
    assert detail.get_by_role("button", name="Confirm").bounding_box()["x"] >= before["x"]
    say_no(gateway, name)
    expect(row).to_contain_text("lasted")
    detail.focus()
    page.keyboard.press("Escape")
    expect(detail).to_have_count(0)
    expect(row.locator("a")).to_be_focused()
    assert page.url.endswith("#/incidents")


@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_confirmed_or_rejected_with_one_key_and_found_by_that(gateway, open_page, width):
    page = open_page(f"{gateway.url}/#/incidents", ready="h1", viewport={"width": width, "height": 720})
    name = running(gateway, next(OTHERS))
    say_yes(gateway, name)
    page.locator(".incident-row", has_text=name).locator("a").click()
    detail = page.locator(".detail")
    reject = detail.get_by_role("button", name="Reject")
    reject.press("Enter")
    expect(reject).to_have_attribute("aria-pressed", "true")
    expect(detail).to_contain_text("Rejectedby anybody")
    # Another page confirms it; this one is told.
    its_id = page.url.rpartition("/")[2]
    gateway._thread.run(gateway.alerts.review(its_id, "confirmed", "Kim"), 10.0)
    confirm = detail.get_by_role("button", name="Confirm")
    expect(confirm).to_have_attribute("aria-pressed", "true")
    expect(reject).to_have_attribute("aria-pressed", "false")
    if width == 1280:
        page.get_by_label("Verdict").select_option("confirmed")
        expect(page.locator(".incident-row")).to_have_count(1)
        page.get_by_label("Verdict").select_option("rejected")
        expect(page.locator(".incident-row")).to_have_count(0)
        page.reload()
        expect(page.get_by_label("Verdict")).to_have_value("rejected")
    confirm.click()
    expect(confirm).to_have_attribute("aria-pressed", "false")
    assert gateway._thread.run(gateway.alerts.incidents(IncidentQuery(verdict="confirmed")), 10.0) == []


def test_its_clip_plays(incident, gateway):
    page, _, row = incident
    gateway.step(0)
    row.locator("a").click()
    video = page.locator("video.clip")
    expect(video).to_be_visible(timeout=PATIENCE_MS)
    video.evaluate("video => video.play()")
    until(lambda: video.evaluate("video => video.currentTime") > 0.2)
    assert video.evaluate("video => [video.videoWidth, video.videoHeight]") == [448, 256]


def test_who_sees_to_it_and_what_became_of_its_clip_come_without_asking(incident, gateway):
    page, _, row = incident
    row.locator("a").click()
    detail = page.locator(".detail")
    expect(detail).to_contain_text("The clip is being recorded")
    expect(detail.locator("ol.events li")).to_have_count(1)
    # From here on nothing can be fetched of any incident: what shows was told.
    page.route(re.compile(r"/v1/incidents(\?|/[0-9a-f]+$)"), lambda route: route.abort())
    its_id = page.url.rpartition("/")[2]
    gateway._thread.run(gateway.alerts.acknowledge(its_id, "Kim"), 10.0)
    expect(row).to_contain_text("acknowledged by Kim")
    expect(detail.get_by_role("button", name="Acknowledged")).to_be_disabled()
    gateway._thread.run(gateway.alerts.set_clip_state(its_id, "none", "no clip: the disk is full"), 10.0)
    expect(detail.locator(".clip-note")).to_have_text("no clip: the disk is full")


# Effects of the components run a frame after they are drawn, or 35 ms after where no frame comes.
SLOW_EFFECTS = """() => {
  const later = setTimeout;
  window.requestAnimationFrame = (callback) => later(callback, 1000);
  window.setTimeout = (callback, delay, ...rest) => later(callback, delay === 35 ? 1000 : delay, ...rest);
}"""


@pytest.mark.parametrize("slow", [False, True], ids=["page", "slow page"])
def test_its_picture_shows_once_it_is_there(gateway, open_page, slow):
    page = open_page(f"{gateway.url}/#/incidents", ready="h1", new=slow)
    expect(page.locator(".nav-count")).to_be_visible()
    if slow:
        page.evaluate(SLOW_EFFECTS)
    page.route("**/snapshot.jpg", lambda route: route.fulfill(status=404, json={"error": "not made yet"}))
    name = running(gateway, next(OTHERS))
    say_yes(gateway, name)
    row = page.locator(".incident-row", has_text=name)
    expect(row).to_have_count(1)
    # Its picture is asked for a little later, and the refusal is answered by this test's own thread.
    expect(row.locator(".snapshot.none")).to_have_count(1, timeout=PATIENCE_MS)
    page.unroute("**/snapshot.jpg")
    gateway.step(0)
    until(lambda: row.locator("img").evaluate("image => image.naturalWidth") > 0)


def test_muting_is_a_dialog_that_gives_focus_back(incident, gateway):
    page, name, row = incident
    other = running(gateway, next(OTHERS))
    row.locator("a").click()
    button = page.locator(".detail").get_by_role("button", name="Mute")
    button.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Mute {name}")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(button).to_be_focused()
    # Escape closed the dialog and nothing else.
    expect(page.locator(".detail")).to_be_visible()
    button.press("Enter")
    dialog.get_by_label("For").select_option("28800")
    dialog.get_by_role("button", name="Mute").click()
    muted = page.locator(".mutes li", has_text=name)
    expect(muted).to_contain_text("person in restricted area")
    # Whoever looks at the camera has to know.
    page.locator(".detail").get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(muted).to_contain_text("person in restricted area")
    page.goto(f"{page.url.partition('#')[0]}#/camera/{other}")
    expect(page.get_by_role("heading", level=1)).to_have_text(other)
    expect(page.get_by_role("heading", name="Memory")).to_be_visible()
    expect(muted).to_have_count(0)
    page.goto(f"{page.url.partition('#')[0]}#/incidents")
    muted.get_by_role("button", name="End").click()
    expect(page.locator(".mutes li", has_text=name)).to_have_count(0)


def test_what_may_not_be_done_is_not_offered_and_what_fails_says_why(tmp_path, open_page):
    made = {role: make_token(f"{role}-person", [role]) for role in (Role.VIEW, Role.ASK)}
    write_tokens(tmp_path / "tokens.json", [token for _, token in made.values()])
    with ConsoleGateway(City(6, seed=3), tmp_path, tokens=tmp_path / "tokens.json", live=False, poll_s=0.1) as gateway:
        gateway.step(8)
        name = running(gateway)
        say_yes(gateway, name)
        page = open_page(f"{gateway.url}/#/incidents", ready="input[type=password]", new=True)
        page.fill("input[type=password]", "slt_wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#login-error")).to_have_text(re.compile("not known"))
        page.fill("input[type=password]", made[Role.VIEW][0])
        page.keyboard.press("Enter")
        page.locator(".incident-row a").click()
        expect(page.locator(".detail")).to_contain_text(name)
        expect(page.get_by_role("button", name="Acknowledge")).to_have_count(0)
        expect(page.get_by_role("button", name="Mute")).to_have_count(0)
        # The token is kept from pages: only the cookie that no script can read has it.
        assert page.evaluate("document.cookie + JSON.stringify(localStorage)").find(made[Role.VIEW][0]) == -1
        page.get_by_role("button", name="Sign out view-person").click()
        page.route("**/v1/me", lambda route: route.abort())
        page.fill("input[type=password]", made[Role.ASK][0])
        page.keyboard.press("Enter")
        # Until it is known who that is, it is nobody, and not who was here before.
        expect(page.locator(".detail")).to_contain_text(name)
        expect(page.get_by_role("button", name="Sign out")).to_have_count(0)
        page.unroute_all()
        page.reload()
        acknowledge = page.get_by_role("button", name="Acknowledge")
        expect(acknowledge).to_be_visible()
        # Revoked meanwhile: the next thing that is asked for brings the box that wants a token.
        write_tokens(tmp_path / "tokens.json", [made[Role.VIEW][1]])
        page.evaluate("document.querySelector('.detail .primary')?.click()")
        expect(page.locator("input[type=password]")).to_be_visible()
