"""A browser for all tests of the console, and the gateway with a made-up city that its pages are served from."""

import pytest
from browsing import PATIENCE_MS, Wall
from console_bench import browser as open_browser
from console_city import City
from console_gateway import ConsoleGateway
from playwright.sync_api import expect


@pytest.fixture(scope="module")
def chromium():
    # Not for the session: while Playwright runs, its loop counts as this thread's, and no other test may run one.
    expect.set_options(timeout=PATIENCE_MS)
    with open_browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def gateway(tmp_path_factory, request):
    """As many cameras as the module says; seconds pass only when a test says so."""
    folder = tmp_path_factory.mktemp("city")
    with ConsoleGateway(City(request.module.CAMERAS), folder, live=False, poll_s=0.1) as gateway:
        gateway.remember(20)
        gateway.step(8)
        yield gateway


@pytest.fixture
def open_page(chromium):
    """``open_page(url, **options)``: a page of its own context; what it complains about fails the test."""
    contexts, complaints = [], []

    def open_one(url, *, ready=".tile", **options):
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"{error}\n{error.stack}"))
        page.on("console", lambda said: "Content Security Policy" in said.text and complaints.append(said.text))
        page.goto(url)
        if ready:
            page.wait_for_selector(ready)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def wall(open_page, gateway):
    """The wall of cameras, and what one does with it."""
    return Wall(open_page(f"{gateway.url}/"), gateway)
