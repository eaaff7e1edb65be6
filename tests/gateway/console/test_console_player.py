"""The live view in a real browser: it plays at the camera's own rate, keeps to the newest end, and says why not."""

from __future__ import annotations

from browsing import running
from live_camera import FPS, READ, LiveCamera
from playwright.sync_api import expect
from waiting import until

from cluster.decoder.footage.camera import CameraFootage
from cluster.gateway.console import STATIC

CAMERAS = 12
VIDEO = ".live-view video"
LISTENERS = """() => {
  window.listeners = 0;
  const { addEventListener, removeEventListener } = SourceBuffer.prototype;
  SourceBuffer.prototype.addEventListener = function (kind, ...rest) {
    if (kind === "error") window.listeners += 1;
    return addEventListener.call(this, kind, ...rest);
  };
  SourceBuffer.prototype.removeEventListener = function (kind, ...rest) {
    if (kind === "error") window.listeners -= 1;
    return removeEventListener.call(this, kind, ...rest);
  };
}"""


def test_it_shows_what_the_camera_sends_as_it_comes(open_page, gateway):
    name = running(gateway)
    ring = gateway.footage_of(name).ring
    with LiveCamera(ring):
        until(lambda: ring.seconds > 1)
        page = open_page(f"{gateway.url}/#/camera/{name}", ready=".plot svg")
        page.evaluate(LISTENERS)
        page.get_by_role("button", name="Live view").press("Enter")
        until(lambda: page.locator(VIDEO).evaluate("video => video.currentTime") > 1)
        ages_s = page.evaluate(READ, [VIDEO, 2 * FPS])
        # Each frame carries when it was taken: they are its own, one after the other, and not those of long ago.
        assert all(0 <= each < 10 for each in ages_s)
        assert page.locator(VIDEO).evaluate("video => [video.videoWidth, video.videoHeight]") == [512, 96]
        # A view that stays open for days: no fragment leaves anything behind.
        assert page.evaluate("window.listeners") <= 1
        for width in (1280, 360):
            page.set_viewport_size({"width": width, "height": 720})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        # The camera connects again: the view begins anew by itself.
        before = page.locator(VIDEO).evaluate("video => video.src")
        ring.pause("the connection to the camera was lost")
        until(lambda: page.locator(VIDEO).evaluate("video => video.src") != before)
        until(lambda: page.locator(VIDEO).evaluate("video => video.currentTime") > 0.5)
        page.get_by_role("button", name="Stop live view").click()
        expect(page.locator(VIDEO)).to_have_count(0)
        until(lambda: gateway._pictures.recorder._watching._held == [])


def test_one_that_falls_silent_says_so_and_plays_again_once_the_camera_is_back(open_page, gateway):
    name = running(gateway, 3)
    ring = gateway.footage_of(name).ring
    page = open_page("about:blank", ready=None, new=True)
    script = (STATIC / "player.js").read_text().replace("SILENCE_MS = 15_000", "SILENCE_MS = 2_000")
    page.route("**/player.js", lambda route: route.fulfill(body=script, content_type="text/javascript"))
    page.goto(f"{gateway.url}/#/camera/{name}")
    with LiveCamera(ring):
        until(lambda: ring.seconds > 1)
        page.get_by_role("button", name="Live view").click()
        until(lambda: page.locator(VIDEO).evaluate("video => video.currentTime") > 0.5)
    said = page.locator(".live-view [role=status]")
    expect(said).to_have_text("The live view was interrupted and restarts.")
    ring.pause("the connection to the camera was lost")
    expect(said).to_have_text("the camera sends no video at the moment")
    with LiveCamera(ring):
        expect(said).to_have_count(0)
        until(lambda: page.locator(VIDEO).evaluate("video => video.currentTime") > 0.5)


def test_a_masked_camera_has_none_and_says_why(open_page, gateway):
    name = running(gateway, 1)
    gateway.footage[name] = CameraFootage(None, [((0.0, 0.0), (0.5, 0.0), (0.5, 0.5))])
    page = open_page(f"{gateway.url}/#/camera/{name}", ready=".plot svg")
    page.get_by_role("button", name="Live view").click()
    expect(page.locator(".live-view [role=status]")).to_contain_text("the camera has privacy masks")


def test_hevc_plays_where_the_browser_can_and_else_it_says_so(open_page, gateway):
    name = running(gateway, 2)
    ring = gateway.footage_of(name).ring
    with LiveCamera(ring, codec="hevc"):
        until(lambda: ring.seconds > 1)
        page = open_page(f"{gateway.url}/#/camera/{name}", ready=".plot svg")
        page.get_by_role("button", name="Live view").click()
        plays = "MediaSource.isTypeSupported('video/mp4; codecs=\"hvc1.1.6.L93.B0\"')"
        if page.evaluate(plays):
            until(lambda: page.locator(VIDEO).evaluate("video => video.currentTime") > 1)
        else:
            said = "This browser cannot play hevc, so there is no live view."
            expect(page.locator(".live-view [role=status]")).to_have_text(said)
            # It does not try again, and lets the gateway go.
            until(lambda: gateway._pictures.recorder._watching._held == [])


def test_a_codec_is_named_as_the_standard_names_it(open_page, gateway):
    """RFC 6381 for AVC, ISO/IEC 14496-15, E.3 for HEVC: its example, and a name written by its rules."""
    page = open_page(f"{gateway.url}/#/camera/{running(gateway)}", ready=".plot svg")
    avc = [*b"avc1avcC", 1, 0x4D, 0x40, 0x1E, *[0] * 24]
    # Main profile, compatible with profiles 1 and 2, main tier, level 3.1, frames only and progressive (0xB0).
    main = [*b"hvc1....hvcC", 1, 0x01, 0x60, 0, 0, 0, 0xB0, 0, 0, 0, 0, 0, 93, *[0] * 24]
    # Profile space A, profile 4, compatible with profile 28 alone, high tier, level 4, no constraints.
    high = [*b"hev1....hvcC", 1, 0x64, 0x00, 0x00, 0x00, 0x08, 0, 0, 0, 0, 0, 0, 120, *[0] * 24]
    read = "async (data) => (await import('/console/player.js')).codecOf(new Uint8Array(data))"
    names = [page.evaluate(read, data) for data in (avc, main, high, [0] * 40)]
    assert names == ["avc1.4d401e", "hvc1.1.6.L93.B0", "hev1.A4.10000000.H120", ""]
