"""What keeps a page current: a gateway that restarts, a connection that dies, a browser that slept."""

import asyncio
import re

import pytest
from browsing import PATIENCE_MS, Wall, change, running, say_yes, yes_of
from console_city import City
from console_gateway import ConsoleGateway
from playwright.sync_api import expect
from waiting import until

from cluster.gateway.http.live import Event
from cluster.types import CameraStatus

CAMERAS = 30


@pytest.fixture
def own(tmp_path):
    """A gateway that a test may stop."""
    with ConsoleGateway(City(CAMERAS), tmp_path, live=False, poll_s=0.1) as gateway:
        gateway.step(8)
        yield gateway


def test_a_gateway_that_restarts_is_not_live_and_then_live_with_what_was_missed(own, open_page):
    page = open_page(f"{own.url}/", new=True)
    wall = Wall(page, own)
    expect(page.locator(".live")).to_have_text("Live")
    own.stop()
    expect(page.locator(".live")).to_have_text("Not live")
    banner = page.locator(".not-live")
    expect(banner).to_contain_text("What you see may be out of date")
    # What was known stays on the page, and what happens meanwhile is not made up.
    assert len(wall.shown()) > 5
    name, gone = running(own), running(own, 1)
    own.city.change(name, state="error", reason="it was cut off")
    del own.city.cameras[gone]
    own.city.put(CameraStatus("annex-1"))
    own.restart()
    expect(page.locator(".live")).to_have_text("Live")
    expect(banner).to_have_count(0)
    expect(wall.tile(name)).to_contain_text("Not working")
    wall.search("annex")
    expect(wall.tile("annex-1")).to_be_visible()
    until(lambda: wall.counts()["All"] == 30)


@pytest.fixture
def eager_page(open_page):
    """An empty page, in which the console waits a second before it fetches all again, and not five."""
    page = open_page("about:blank", ready=None, new=True)

    def hasten(route):
        reply = route.fetch()
        script = reply.text()
        assert "RESYNC_MS = 5_000" in script
        route.fulfill(response=reply, body=script.replace("RESYNC_MS = 5_000", "RESYNC_MS = 1_000"))

    page.route("**/console/app.js*", hasten)
    return page


def test_a_page_that_opens_while_the_gateway_is_away_says_so_and_recovers(own, eager_page):
    page = eager_page
    page.route("**/v1/**", lambda route: route.fulfill(status=503, json={"error": "the controller does not answer"}))
    page.goto(f"{own.url}/")
    expect(page.locator(".failure")).to_contain_text("the controller does not answer")
    # While it is away: once it is back, the page recovers by itself and the button may be gone before it is pressed.
    page.get_by_role("button", name="Try now").click()
    expect(page.locator(".failure")).to_contain_text("the controller does not answer")
    page.unroute("**/v1/**")
    expect(page.locator(".tile").first).to_be_visible(timeout=PATIENCE_MS)


def test_a_browser_that_slept_catches_up(own, open_page):
    page = open_page("about:blank", ready=None, new=True)
    page.clock.install()
    page.goto(own.url)
    page.wait_for_selector(".live.live")
    opened = []
    page.on("request", lambda request: request.url.endswith("/v1/events") and opened.append(request.url))
    # The machine sleeps for an hour: timers do not run, the clock goes on.
    page.clock.fast_forward(3_600_000)
    until(lambda: page.evaluate("1") and len(opened) == 1)
    page.clock.resume()
    expect(page.locator(".live")).to_have_text("Live")


def test_a_clock_that_is_set_back_stops_neither_pictures_nor_the_look_for_silence(own, open_page):
    page = open_page("about:blank", ready=None, new=True)

    def hasten(route):
        reply = route.fetch()
        script = reply.text()
        hastened = script.replace("SILENCE_MS = 40_000", "SILENCE_MS = 4_000").replace("= 5_000", "= 1_000")
        assert hastened != script
        route.fulfill(response=reply, body=hastened)

    page.route(re.compile("/console/(live|pictures).js"), hasten)
    fetched, opened = [], []
    page.on("request", lambda request: "/picture.jpg" in request.url and fetched.append(request.url))
    page.goto(own.url)
    page.wait_for_selector(".picture.there")
    page.evaluate("const now = Date.now; Date.now = () => now() - 3_600_000")
    before = set(fetched)
    # What was due by the former clock.
    page.wait_for_timeout(1_500)
    fetched.clear()
    page.on("request", lambda request: request.url.endswith("/v1/events") and opened.append(request.url))
    until(lambda: page.evaluate("1") and before <= set(fetched), timeout_s=15.0)
    # The connection has died silently: nothing comes until the gateway's next ping.
    until(lambda: page.evaluate("1") and opened, timeout_s=10.0)


def test_lists_that_come_late_do_not_undo_those_asked_for_after_them(own, open_page):
    page = open_page(f"{own.url}/")
    wall = Wall(page, own)
    late = []
    page.route("**/v1/cameras", lambda route: late.append((route, route.fetch())) if not late else route.continue_())
    # It connects twice; the first lists are still on their way when the second ones are there.
    own.stop()
    own.restart()
    until(lambda: page.evaluate("1") and late)
    own.stop()
    gone = running(own)
    del own.city.cameras[gone]
    own.restart()
    expect(page.locator(".live")).to_have_text("Live")
    until(lambda: wall.counts()["All"] == CAMERAS - 1)
    [(route, reply)] = late
    route.fulfill(response=reply)
    page.wait_for_timeout(1_000)
    assert wall.counts()["All"] == CAMERAS - 1


def test_a_gateway_that_cannot_see_the_cameras_says_so(own, open_page):
    page = open_page(f"{own.url}/", ready=".live.live", new=True)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    banner = page.locator(".not-live")
    said = "Not current. The gateway cannot see the cameras: the controller does not answer"
    own.city.trouble = "the controller does not answer"
    own.publish([])
    expect(banner).to_have_text(said)
    expect(page.locator(".live")).to_have_text("Not current")
    say_yes(own, running(own))
    page.reload()
    expect(banner).to_have_text(said)
    # What goes on is known all the same.
    expect(page.locator(".failure")).to_contain_text("retrying automatically: the controller does not answer")
    expect(page.locator(".nav-count")).to_be_visible()
    own.city.trouble = ""
    own.publish([])
    expect(banner).to_have_count(0)
    assert not [url for url in asked if "/v1/fleet" in url], "it is told, to thousands of pages"


def test_a_browser_that_missed_events_fetches_what_they_said(own, eager_page):
    """However often it is told that it missed some, and however much it is told at once."""
    own._live.feed._limit = 1
    page = eager_page
    page.goto(f"{own.url}/#/incidents")
    expect(page.locator(".live")).to_have_text("Live")
    fetched = []
    page.on("request", lambda request: "incidents?open=1" in request.url and fetched.append(request.url))
    other = Event.of("removed", "nobody", {"name": "nobody"})
    throttle = page.context.new_cdp_session(page)

    async def push_out_whatever_comes():
        while True:
            own._live.feed.put(other)
            own._live.feed.put(other)
            await asyncio.sleep(0.002)

    async def raise_incident(answers):
        for answer in answers:
            own.alerts.accept_answer(answer)

    for number, slowdown in enumerate((1, 20)):
        fetched.clear()
        name = running(own, number)
        answers = [yes_of(own, name) for _ in range(2)]
        throttle.send("Emulation.setCPUThrottlingRate", {"rate": slowdown})
        storm = asyncio.run_coroutine_threadsafe(push_out_whatever_comes(), own._thread.loop)
        until(lambda: page.evaluate("1") and fetched)
        own._thread.run(raise_incident(answers), 60.0)
        until(lambda: page.evaluate("1") and len(fetched) >= 2)
        storm.cancel()
        expect(page.locator(".incident-row", has_text=name)).to_be_visible(timeout=PATIENCE_MS)


STORE = """async (script) => {
  const { Store } = await import('/console/store.js');
  const store = new Store();
  const camera = (name, state) => ({ name, state });
  const incident = (id, updated_s, ended_s = null) =>
    ({ id, camera: 'gate', severity: 'warning', opened_s: 1, updated_s, ended_s });
"""


def test_lists_that_were_asked_for_before_an_event_do_not_undo_it(gateway, open_page):
    page = open_page(f"{gateway.url}/")
    found = page.evaluate(
        STORE
        + """
  store.camera(camera('gate', 'running')); store.camera(camera('old', 'running'));
  const touched = store.track();
  store.camera(camera('gate', 'error')); store.camera(camera('new', 'waiting')); store.removed('yard');
  store.incident(incident('a', 5, 6));
  const listed = [camera('gate', 'running'), camera('yard', 'running')];
  store.takeAll(listed, [incident('a', 4), incident('b', 4)], touched);
  store.untrack(touched);
  const states = [...store.cameras.values()].map((each) => each.name + ':' + each.state);
  return [states, [...store.openIncidents('gate')].map((each) => each.id)];
}"""
    )
    assert found == [["gate:error", "new:waiting"], ["b"]]


def test_what_the_page_keeps_is_bounded(gateway, open_page):
    page = open_page(f"{gateway.url}/")
    found = page.evaluate(
        STORE
        + """
  for (let i = 0; i < 3000; i++) store.incident(incident('i' + i, i, i < 10 ? null : i));
  for (let i = 0; i < 500; i++) store.history('c' + i, { scores: { q: [[1, 0.5, false, false]] }, rungs: [] });
  for (let i = 0; i < 900; i++) store.answer('c499', 'q', [2 + i, 0.5, false, false]);
  store.answer('c499', 'q', [3, 0.9, false, false]);
  const points = store.histories.get('c499').scores.get('q');
  const open = [...store.openIncidents('gate')].length;
  return [store.incidents.size, open, store.histories.size, points.length, points[119][0], store.changed.size];
}"""
    )
    # Those that are open are kept when there are too many, and an answer that is there already does not come twice.
    assert found == [1000, 10, 120, 120, 901, 0]


def test_the_stream_is_read_however_it_is_cut(gateway, open_page):
    page = open_page(f"{gateway.url}/")
    found = page.evaluate("""async () => {
      const { pieces, lines } = await import('/console/api.js');
      const text = 'event: a\\r\\ndata: {"x":"é"}\\r\\n\\r\\n: ping\\n\\nevent: b\\ndata: 1\\n\\nrest';
      const bytes = new TextEncoder().encode(text);
      const read = async (size, how) => {
        let at = 0;
        const body = new ReadableStream({ pull(controller) {
          if (at >= bytes.length) controller.close(); else controller.enqueue(bytes.slice(at, (at += size)));
        } });
        const out = [];
        for await (const piece of pieces({ body }, how)) out.push(piece);
        return out;
      };
      const cut = [];
      for (const size of [1000, 1, 2, 3, 5, 7, 11]) cut.push(await read(size, /\\r?\\n\\r?\\n/));
      return cut;
    }""")
    assert found == [['event: a\r\ndata: {"x":"é"}', ": ping", "event: b\ndata: 1", "rest"]] * 7


def test_changing_scores_do_not_move_tiles_under_the_pointer(gateway, open_page):
    page = open_page("about:blank", ready=None, new=True)
    page.clock.install()
    page.goto(gateway.url)
    page.wait_for_selector(".tile")
    wall = Wall(page, gateway)
    page.locator(".tile").nth(3).hover()
    before = wall.shown()
    name = before[-1]
    change(gateway, name, state="error", reason="gone")
    expect(wall.tile(name)).to_contain_text("Not working")
    assert wall.shown() == before
    # Once it has been read. The pointer may lie there all night.
    page.clock.fast_forward(11_000)
    until(lambda: wall.shown() != before)
