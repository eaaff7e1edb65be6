"""The other sides of sinks: a webhook receiver, and brokers from Debian, each on a port it keeps when started again."""

from __future__ import annotations

import asyncio
import getpass
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from cluster.lab.bench.processes import free_port


class Receiver:
    """An aiohttp server that keeps what it is sent; ``reply`` says with what it answers (a status, or a coroutine)."""

    def __init__(self) -> None:
        self.port = free_port()
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.reply = lambda request: 204
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> Receiver:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        answer = self.reply(request)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer < 300:
            self.got.append((dict(request.headers), body))
        headers = {"Retry-After": "7"} if answer == 429 else {}
        return web.Response(status=answer, text="said so" if answer >= 300 else None, headers=headers)


def program(*names: str) -> str:
    """The path of a program that the tests need (Makefile, SYSTEM_PACKAGES)."""
    for name in names:
        found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/bin:/sbin")
        if found:
            return found
    pytest.fail(f"{names[0]} is not installed; `make system-packages` installs it")


class Broker:
    """A program that listens on a port, killed and started again at will."""

    def __init__(self, command: list[str], port: int) -> None:
        self._command, self.port = command, port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, f"{self._command[0]} ended with {self._process.returncode}"
                assert time.monotonic() < deadline, f"{self._command[0]} does not listen"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def mosquitto(folder: Path, *lines: str):
    """An MQTT broker; its subscribers' sessions survive its death."""
    port = free_port()
    settings = folder / "mosquitto.conf"
    # It would become another user, who may not read this folder.
    begin = [f"user {getpass.getuser()}", f"listener {port} 127.0.0.1", f"persistence_location {folder}/"]
    settings.write_text("\n".join([*begin, *(lines or ["allow_anonymous true"])]))
    broker = Broker([program("mosquitto"), "-c", str(settings)], port)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


@contextmanager
def alertmanager(folder: Path):
    """A Prometheus Alertmanager that tells nobody."""
    port = free_port()
    settings = folder / "alertmanager.yml"
    settings.write_text("route:\n  receiver: none\nreceivers:\n- name: none\n")
    command = [
        program("prometheus-alertmanager", "alertmanager"),
        f"--config.file={settings}",
        f"--storage.path={folder}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    server = Broker(command, port)
    server.start()
    try:
        yield server
    finally:
        server.kill()
