"""The processes that the alerts bench kills: alerting, and a webhook receiver that writes down what it takes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

from cluster.alerts.service import AlertService
from cluster.config import SightlineConfig, load_config
from cluster.gateway.merger import ResultsMerger
from cluster.wire.answers import AnswerHub

QUESTION = "q"


def configuration(hook: str) -> SightlineConfig:
    """One webhook; incidents as they come, none told twice."""
    return load_config(
        None,
        {
            "questions": [{"id": QUESTION, "text": "Is anything there?"}],
            "alerts": {
                "sinks": [{"name": "hook", "kind": "webhook", "options": {"url": hook, "secret": "bench"}}],
                "cooldown_s": 0,
                "update_s": "1h",
                "retry": {"first_s": 0.1, "longest_s": 1.0},
            },
        },
    )


async def serve_alerting(replica: str, hook: str, folder: Path) -> None:
    """The whole of alerting but for the controller; until it is killed."""
    service = AlertService(configuration(hook), folder)
    await service.start()
    hub = AnswerHub(limit=50_000)
    merger = ResultsMerger(hub, recent=True)
    with hub.subscribe() as answers:
        merger.follow([replica])
        print("{}", flush=True)
        async for answer, missed in answers:
            service.accept_answer(answer, missed)


async def serve_hook(port: int, log: Path) -> None:
    """Takes alerts over by appending them to ``log``, with the time; until it is killed."""
    from aiohttp import web

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def take(request: web.Request) -> web.Response:
        at_s = time.time()
        body = await request.json()
        incident = body["incident"]
        line = {"at": at_s, "key": body["key"], "event": body["event"], "camera": incident["camera"]}
        line |= {"start": incident["start_us"], "end": incident["end_us"]}
        os.write(out, json.dumps(line).encode() + b"\n")
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    print("{}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """``alerting REPLICA HOOK FOLDER`` or ``hook PORT LOG``."""
    parser = argparse.ArgumentParser(prog="cluster.lab.bench.alerts_processes")
    roles = parser.add_subparsers(dest="role", required=True)
    alerting = roles.add_parser("alerting")
    for name in ("replica", "hook", "folder"):
        alerting.add_argument(name)
    hook = roles.add_parser("hook")
    hook.add_argument("port", type=int)
    hook.add_argument("log")
    args = parser.parse_args()
    if args.role == "alerting":
        asyncio.run(serve_alerting(args.replica, args.hook, Path(args.folder)))
    else:
        asyncio.run(serve_hook(args.port, Path(args.log)))


if __name__ == "__main__":
    main()
