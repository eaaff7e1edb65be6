"""A real OpenID provider (npm's ``oidc-provider``) on this machine, and people who sign in there."""

import contextlib
import json
import re
import subprocess
from pathlib import Path

import aiohttp
from joserfc.jwk import KeySet

from cluster.lab.bench.processes import free_port

ROOT = Path(__file__).parents[2]
MODULES = ROOT / ".tools" / "oidc" / "node_modules"
SCRIPT = Path(__file__).with_name("oidc_provider.mjs")
ROBOT_SECRET = "robot-secret-0123456789"


def new_keys(kind="RSA"):
    return KeySet.generate_key_set(kind, {"RSA": 2048, "EC": "P-256"}[kind], {"use": "sig"}, count=1).as_dict(
        private=True
    )


class Provider:
    """``people``: name -> claims. Starts and stops; a new one may take the port of an old one, with other keys."""

    def __init__(self, people, redirect, *, port=None, keys=None, **options):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {"port": self.port, "redirect": redirect, "people": people, "jwks": keys or new_keys(), **options}
        assert MODULES.is_dir(), f"{MODULES} is missing: make tools"
        self._process = subprocess.Popen(
            ["node", str(SCRIPT), json.dumps(given), str(MODULES / "x.js")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise RuntimeError("the provider did not start")

    def stop(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    async def robot_token(self, name, **form):
        """A JWT of a program, with the claims of ``name``."""
        form = {"grant_type": "client_credentials", **form}
        identity = aiohttp.BasicAuth(f"robot-{name}", ROBOT_SECRET)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/token", data=form, auth=identity) as reply,
        ):
            return (await reply.json())["access_token"]


@contextlib.contextmanager
def provider(*arguments, **options):
    made = Provider(*arguments, **options)
    try:
        yield made
    finally:
        made.stop()


async def sign_in(session, url, name):
    """Go the way of a browser; ``(status, text, cookies for the console)`` of where it ends."""
    async with session.get(f"{url}/v1/sign-in/provider") as reply:
        text, where = await reply.text(), reply.url
        if reply.status != 200 or "/people/" not in str(where):
            return reply.status, text
    async with session.post(where, data={"login": name}) as reply:
        return reply.status, await reply.text()


def sentence(page):
    """Of the page that says why nobody was signed in."""
    found = re.search(r'role="alert">(.*?)</p>', page)
    return found[1] if found else page
