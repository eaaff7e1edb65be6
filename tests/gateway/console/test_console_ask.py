"""The ask box in a real browser, and the pages of one camera and of the fleet."""

from browsing import change, running, say_no
from playwright.sync_api import expect
from waiting import until

from cluster.types import AskResult

CAMERAS = 36


def test_an_answer_streams_in_with_the_moments_it_rests_on_and_goes_on(open_page, gateway):
    name = running(gateway, 2)
    page = open_page(f"{gateway.url}/#/ask", ready="input[list]")
    assert page.input_value("input[list]") == running(gateway)
    cameras = page.get_by_role("group", name="Cameras").get_by_role("button")
    expect(cameras).to_have_count(24)
    page.get_by_role("group", name="Examples").get_by_role("button").first.click()
    assert page.input_value("textarea").endswith("?")
    page.fill("input[list]", name[:-1])
    until(lambda: cameras.count() <= 10)
    page.get_by_role("group", name="Cameras").get_by_role("button", name=name, exact=True).click()
    gateway.city.held.add(name)
    page.fill("textarea", "What happened?")
    page.keyboard.press("Enter")
    answer = page.locator(".turn-answer").first
    expect(answer).to_have_attribute("aria-busy", "true")
    until(lambda: 0 < len(answer.inner_text().split()) < 12)
    # Somebody looks at something else while it comes.
    page.set_viewport_size({"width": 1280, "height": 300})
    page.evaluate("scrollTo(0, 0)")
    gateway.city.held.clear()
    expect(answer).to_contain_text("left to the right.")
    moments = page.locator(".moments li")
    expect(moments).to_have_count(4)
    assert page.evaluate("scrollY") == 0
    expect(moments.first).to_contain_text("46 %")
    until(lambda: moments.first.locator("canvas").evaluate("canvas => canvas.width") == 224)
    expect(page.locator(".grounds")).to_contain_text("98,304 of 2,457,600 remembered tokens read")
    asked = []
    page.on("request", lambda request: request.url.endswith("/v1/ask") and asked.append(request.post_data_json))
    page.fill("textarea", "And then?")
    page.get_by_role("button", name="Ask", exact=True).dblclick()
    expect(page.locator(".moments")).to_have_count(2)
    assert asked[0]["conversation"]


def test_what_fails_says_why_and_an_answer_can_be_stopped(open_page, gateway):
    name = running(gateway, 3)
    change(gateway, name, state="connecting")
    page = open_page(f"{gateway.url}/#/ask/{name}", ready="textarea")
    page.fill("textarea", "Anything?")
    page.keyboard.press("Enter")
    expect(page.locator(".turn .error")).to_have_text(f"camera '{name}' has seen nothing yet")
    change(gateway, name, state="running")
    gateway.city.held.add(name)
    page.fill("textarea", "Anything now?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn .error").last).to_have_text("Stopped.")
    gateway.city.held.clear()


def test_after_a_conversation_that_is_over_the_next_question_begins_another(open_page, gateway):
    name = running(gateway, 4)
    page = open_page(f"{gateway.url}/#/ask/{name}", ready="textarea")
    asked = []
    page.on("request", lambda request: request.url.endswith("/v1/ask") and asked.append(request.post_data_json))

    def ask(text):
        page.fill("textarea", text)
        page.keyboard.press("Enter")

    ask("What happened?")
    expect(page.locator(".grounds")).to_have_count(1)
    # The replica restarted, and conversations are in its memory only.
    gateway.conversations.end_camera(name)
    ask("And then?")
    expect(page.locator(".turn .error")).to_contain_text("begin a new one")
    ask("And then?")
    expect(page.locator(".grounds")).to_have_count(2)
    assert ["conversation" in each for each in asked] == [False, True, False]


def test_a_reply_that_takes_longer_than_the_period_is_waited_for(open_page, gateway):
    page = open_page("about:blank", ready=None, new=True)
    page.clock.install()
    held = []
    page.route("**/v1/replicas", lambda route: held.append(route))
    page.goto(f"{gateway.url}/#/fleet")
    # With the first lists, it is asked for anew.
    page.wait_for_selector(".fleet-figures >> text=of 36")
    page.wait_for_timeout(500)
    asked = len(held)
    for _ in range(3):
        page.clock.run_for(6_000)
    page.wait_for_timeout(500)
    assert len(held) == asked
    held[-1].continue_()
    expect(page.get_by_role("region", name="Table of replicas")).to_be_visible()
    page.clock.run_for(6_000)
    until(lambda: page.evaluate("1") and len(held) == asked + 1)


def test_an_answer_of_one_word_to_more_than_that_is_said(open_page, gateway, monkeypatch):
    async def one_word(self, ask):
        yield AskResult(ask.stream, "Yes", (), 0, 8, 64, 64, 0, 0.1, 0.1, yes=0.9)

    monkeypatch.setattr("console_city.CityMemory.ask", one_word)
    page = open_page(f"{gateway.url}/#/ask/{running(gateway, 2)}", ready="textarea")
    for number, question in enumerate(("Did anybody come in?", "What happened?")):
        page.fill("textarea", question)
        page.keyboard.press("Enter")
        expect(page.locator(".grounds")).to_have_count(number + 1)
        expect(page.locator(".grounds .notice")).to_have_count(number)
    expect(page.locator(".notice")).to_contain_text("answered no more than that")


def test_a_camera_has_scores_over_time_savings_quality_and_memory(open_page, gateway):
    name = running(gateway, 4)
    change(gateway, name, rung="refresh", rung_reason="load is 0.97 of the replica's capacity")
    page = open_page(f"{gateway.url}/#/camera/{name}", ready=".plot svg")
    expect(page.locator(".series")).to_have_count(len(gateway.city.answers(name)))
    points = page.locator(".series path").first.get_attribute("d").count("L")
    figures = page.locator(".camera-page .figures")
    expect(figures).to_contain_text("95 %")
    expect(figures).to_contain_text("load is 0.97 of the replica's capacity")
    # The cap is of each tier: copies in several are not added up.
    memory = page.locator("section", has=page.locator("#camera-memory"))
    expect(memory).to_contain_text("of 64.0 MiB")
    expect(memory).not_to_contain_text("Held")
    # One more answer, one more point; a question that is switched off is not drawn.
    say_no(gateway, name, windows=1)
    until(lambda: page.locator(".series path").first.get_attribute("d").count("L") == points + 1)
    page.locator(".legend-item").first.click()
    expect(page.locator(".series")).to_have_count(len(gateway.city.answers(name)) - 1)
    page.get_by_text("The newest scores as a table").click()
    assert page.locator(".plot tbody tr").count() == 20


def test_the_fleet_page_says_how_full_it_is_and_drains_a_replica(open_page, gateway):
    page = open_page(f"{gateway.url}/#/fleet", ready="tbody tr")
    row = page.locator("tr", has_text="replica-2")
    expect(row).to_contain_text("97 %")
    expect(row).to_contain_text("1.4 s")
    full = sum(status.rung == "full" for status in gateway.city.cameras.values())
    ladder = page.locator("section", has=page.locator("#fleet-ladder")).locator("li", has_text="full")
    expect(ladder).to_contain_text(str(full))
    page.on("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Drain").click()
    expect(row).to_contain_text("draining")
    row.get_by_role("button", name="Take back").click()
    expect(row).not_to_contain_text("draining")
    expect(page.locator("section", has=page.locator("#fleet-sinks"))).to_contain_text("No sink is configured")


def test_all_cameras_are_asked_at_once_and_the_best_moments_come_first(open_page, gateway):
    page = open_page(f"{gateway.url}/#/ask", ready="input[list]")
    hot, dark = sorted(gateway.city.hot)[0], running(gateway, 9)
    change(gateway, dark, state="connecting")
    page.get_by_role("switch", name="All cameras").press("Space")
    page.get_by_label("Question to all cameras").fill("Was there a red van?")
    gateway.city.held.add(hot)
    page.keyboard.press("Enter")
    found = page.locator(".found li")
    # While it goes on there are answers already, and how far it is.
    expect(found.first).to_be_visible()
    expect(page.get_by_role("progressbar")).to_be_visible()
    gateway.city.held.clear()
    running_now = sum(status.state == "running" for status in gateway.city.cameras.values())
    status = page.locator(".ask-progress")
    expect(status).to_contain_text(
        f"{running_now} of {CAMERAS} cameras answered; 1 with no memory of that time.", timeout=60_000
    )
    ranks = [float(text.split("rank ")[1].split()[0]) for text in found.all_inner_texts()]
    assert ranks == sorted(ranks, reverse=True)
    until(lambda: found.first.locator("canvas").evaluate("canvas => canvas.width") == 224)
    page.get_by_text("did not answer").click()
    expect(page.locator(".asked details li").first).to_contain_text("has seen nothing yet")
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 720})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    # On the narrow page from here on.
    change(gateway, dark, state="running")
    # Only some; and stopped by a key.
    page.get_by_label("Only cameras named").fill(f"{hot}, nowhere-*")
    page.get_by_label("Question to all cameras").press("Enter")
    expect(status).to_contain_text("of 1 camera answered.")
    page.get_by_label("Only cameras named").fill("")
    gateway.city.held.add(hot)
    page.get_by_label("Question to all cameras").press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".asked .error")).to_have_text("Stopped.")
    gateway.city.held.clear()
