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


@pytest.fixture(scope="module")
def kept_pages():
    """Pages that stay open for the next tests of a module: to start one takes ten times as long as another address."""
    pages = {}
    yield pages
    for page in pages.values():
        page.context.close()


@pytest.fixture
def open_page(chromium, kept_pages):
    """``open_page(url, **options)``: a page with those options, which no other test has at the same time; what it
    complains about fails the test. ``new``: one of its own context, for a test that leaves it other than it was: with
    another clock, something stored, somebody signed in.
    """
    pages, contexts, complaints = [], [], []

    def complained(error):
        complaints.append(f"{error}\n{error.stack}")

    def said(message):
        if "Content Security Policy" in message.text:
            complaints.append(message.text)

    def make_page(options):
        context = chromium.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        return context.new_page()

    def open_one(url, *, ready=".tile", new=False, viewport=None, **options):
        viewport = viewport or {"width": 1280, "height": 800}
        key = (url.partition("/#")[0].rstrip("/"), *sorted(options.items()))
        if page := None if new else kept_pages.get(key):
            page.set_viewport_size(viewport)
            page.evaluate("sessionStorage.clear()")
            # What the last test left of its address is taken down before the next one's is put up.
            page.goto(f"{key[0]}/#/nowhere")
            page.wait_for_selector(".empty >> text=There is no such page")
        else:
            page = make_page({"viewport": viewport, **options})
            if new:
                contexts.append(page.context)
            else:
                kept_pages[key] = page
        pages.append(page)
        page.on("pageerror", complained)
        page.on("console", said)
        page.goto(url)
        if ready:
            page.wait_for_selector(ready)
        return page

    yield open_one
    for page in pages:
        page.unroute_all()
        page.remove_listener("pageerror", complained)
        page.remove_listener("console", said)
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def wall(open_page, gateway):
    """The wall of cameras, and what one does with it."""
    return Wall(open_page(f"{gateway.url}/"), gateway)
