"""The fleet page tries a sink, and says what came of it."""

from gateway_parts import served_in_thread
from playwright.sync_api import expect

from cluster.lab.bench.processes import free_port


def test_a_sink_is_tried_from_the_fleet_page(tmp_path, open_page):
    dead = {"name": "desk", "kind": "webhook", "options": {"url": f"http://127.0.0.1:{free_port()}/", "timeout_s": 2}}
    alerts = {"sinks": [{"name": "log", "kind": "log"}, dead]}
    with served_in_thread(tmp_path, cameras=2, alerts=alerts) as served:
        page = open_page(f"{served.url}/#/fleet", ready="#fleet-sinks", new=True)
        rows = page.locator("section", has=page.locator("#fleet-sinks")).locator("tbody tr")
        rows.filter(has_text="log").get_by_role("button", name="Test log").press("Enter")
        expect(rows.filter(has_text="log").get_by_role("status")).to_have_text("Accepted.")
        rows.filter(has_text="desk").get_by_role("button", name="Test desk").click()
        expect(rows.filter(has_text="desk").get_by_role("status")).to_contain_text("sink 'desk': http://127.0.0.1")
