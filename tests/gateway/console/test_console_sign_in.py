"""Signing in at a provider, in a browser: by keyboard, there and back."""

from browsing import check_axe
from gateway_parts import served_in_thread
from oidc_parts import provider
from playwright.sync_api import expect

from cluster.lab.bench.processes import free_port


def test_a_person_signs_in_at_the_provider_and_out_again(tmp_path, open_page):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with provider({"ann": {"groups": ["guards"]}}, f"{url}/v1/sign-in/callback") as issuer:
        groups = [{"group": "guards", "roles": ["view"], "cameras": ["cam-000"]}]
        oidc = {"issuer": issuer.url, "client_id": "sightline", "url": url, "groups": groups}
        with served_in_thread(tmp_path, cameras=2, port=port, security={"oidc": oidc}):
            page = open_page(f"{url}/#/camera/cam-000", ready=".login a", new=True)
            expect(page.locator("input[type=password]")).to_have_count(0)
            check_axe(page)
            page.get_by_role("link", name="Sign in with 127.0.0.1").press("Enter")
            page.get_by_label("Name").fill("ann")
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", name="cam-000")).to_be_visible()
            assert page.url == f"{url}/#/camera/cam-000", "what was asked for before the provider"
            assert page.evaluate("document.cookie + JSON.stringify(localStorage)").find("oidc") == -1
            page.route("**/v1/session", lambda route: route.abort())
            page.get_by_role("button", name="Sign out oidc:ann").click()
            expect(page.get_by_role("alert")).to_contain_text("Not signed out. The gateway cannot be reached.")
            page.unroute("**/v1/session")
            page.get_by_role("button", name="Sign out oidc:ann").click()
            expect(page.get_by_role("link", name="Sign in with 127.0.0.1")).to_be_visible()


def test_both_ways_are_offered_where_there_are_both(tmp_path, open_page):
    oidc = {"issuer": "http://127.0.0.1:1", "client_id": "c", "url": "http://127.0.0.1:1"}
    oidc["groups"] = [{"group": "guards", "roles": ["view"]}]
    with served_in_thread(tmp_path, cameras=1, tokens=True, security={"oidc": oidc}) as served:
        page = open_page(served.url, ready="input[type=password]", new=True)
        expect(page.get_by_role("link", name="Sign in with 127.0.0.1")).to_be_visible()
        page.fill("input[type=password]", served.secrets["view"])
        page.keyboard.press("Enter")
        expect(page.locator(".tile")).to_have_count(1)
