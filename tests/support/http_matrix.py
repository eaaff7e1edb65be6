"""Every route of the gateway's HTTP times every role and scope, whichever way callers say who they are."""

import aiohttp
from gateway_parts import make_answer
from http_parts import Client

from cluster.security.roles import Role

VIEW = {Role.VIEW, Role.ASK, Role.ADMIN}
ASK = {Role.ASK, Role.ADMIN}
ADMIN = {Role.ADMIN}
ANYBODY = {*Role, None, "unknown"}
KNOWN = set(Role)

MAY = {
    "GET /": ANYBODY,
    "GET /console/{path:path}": ANYBODY,
    "GET /healthz": ANYBODY,
    "GET /readyz": ANYBODY,
    "GET /metrics": VIEW,
    "GET /v1/openapi.json": ANYBODY,
    "GET /v1/me": KNOWN,
    "POST /v1/session": ANYBODY,
    "DELETE /v1/session": ANYBODY,
    "GET /v1/sign-in": ANYBODY,
    "GET /v1/sign-in/provider": ANYBODY,
    "GET /v1/sign-in/callback": ANYBODY,
    "GET /v1/cameras": VIEW,
    "POST /v1/cameras": ADMIN,
    "GET /v1/cameras/{name}": VIEW,
    "PUT /v1/cameras/{name}": ADMIN,
    "DELETE /v1/cameras/{name}": ADMIN,
    "GET /v1/cameras/{name}/history": VIEW,
    "GET /v1/cameras/{name}/settings": ADMIN,
    "POST /v1/cameras/test": ADMIN,
    "POST /v1/cameras/discover": ADMIN,
    "POST /v1/cameras/import": ADMIN,
    "POST /v1/replay": ASK,
    "POST /v1/rehearse": VIEW,
    "GET /v1/cameras/{name}/timeline": VIEW,
    "GET /v1/cameras/{name}/picture.jpg": VIEW,
    "GET /v1/cameras/{name}/live.mp4": VIEW,
    "GET /v1/replicas": VIEW,
    "POST /v1/replicas/{name}/drain": ADMIN,
    "GET /v1/fleet": VIEW,
    "GET /v1/incidents": VIEW,
    "GET /v1/incidents/{id}": VIEW,
    "GET /v1/incidents/{id}/snapshot.jpg": VIEW,
    "GET /v1/incidents/{id}/clip.mp4": VIEW,
    "POST /v1/incidents/{id}/acknowledge": ASK,
    "POST /v1/incidents/{id}/review": ASK,
    "GET /v1/mutes": VIEW,
    "POST /v1/mutes": ASK,
    "DELETE /v1/mutes": ASK,
    "GET /v1/outbox": VIEW,
    "POST /v1/sinks/{name}/test": ADMIN,
    "POST /v1/ask": ASK,
    "POST /v1/ask/all": ASK,
    "POST /v1/forget": ADMIN,
    "GET /v1/memory/{name}": VIEW,
    "GET /v1/events": VIEW,
    "POST /v1/chat/completions": ASK,
    "GET /v1/models": VIEW,
    "GET /v1/models/{model:path}": VIEW,
}
HIDDEN = {
    "GET /v1/incidents/{id}",
    "GET /v1/incidents/{id}/snapshot.jpg",
    "GET /v1/incidents/{id}/clip.mp4",
    "POST /v1/incidents/{id}/acknowledge",
    "POST /v1/incidents/{id}/review",
}
"""Not even that there is such a thing is told to a token that is not for its camera."""

OF_ALL = {"POST /v1/cameras/discover", "POST /v1/replicas/{name}/drain", "POST /v1/sinks/{name}/test"}
"""They concern everybody's cameras."""

UNSCOPED = {
    "GET /metrics",
    "GET /v1/cameras",
    "GET /v1/replicas",
    "GET /v1/fleet",
    "GET /v1/incidents",
    "GET /v1/mutes",
    "GET /v1/outbox",
    "GET /v1/models",
    "GET /v1/me",
    "POST /v1/cameras/import",
    "POST /v1/rehearse",
    "POST /v1/ask/all",
}
"""They name no camera: their replies hold only what the token is for, see the test of that."""


def request_of(name, camera, incident, token):
    """``(method, path, body)`` that names ``camera``."""
    method, _, path = name.partition(" ")
    replica = "replica-0" if "replicas" in path else camera
    path = (
        path.replace("{name}", replica)
        .replace("{id}", incident)
        .replace("{path:path}", "index.html")
        .replace("{model:path}", f"camera/{camera}")
    )
    bodies = {
        "POST /v1/session": {"token": token or ""},
        "POST /v1/cameras": {"name": camera, "source": "x"},
        "PUT /v1/cameras/{name}": {"source": "x"},
        "POST /v1/cameras/test": {"name": camera, "source": "demo://gate"},
        "POST /v1/cameras/discover": {"network": "127.0.0.0/30"},
        "POST /v1/cameras/import": {"text": f"name,source\n{camera},demo://gate", "apply": True},
        "POST /v1/replay": {"camera": camera, "text": "Is anyone there?"},
        "POST /v1/rehearse": {"windows": [[0, 8, 0.7], [8, 16, 0.8]]},
        "POST /v1/replicas/{name}/drain": {"undo": True},
        "POST /v1/incidents/{id}/acknowledge": {},
        "POST /v1/incidents/{id}/review": {"verdict": "confirmed"},
        "POST /v1/mutes": {"camera": camera, "subject": "person", "for_s": 60},
        "POST /v1/sinks/{name}/test": {},
        "POST /v1/ask": {"camera": camera, "text": "Who?"},
        "POST /v1/ask/all": {"text": "Who?"},
        "POST /v1/forget": {"camera": camera, "before_s": 0},
        "POST /v1/chat/completions": {"model": f"camera/{camera}", "messages": [{"role": "user", "content": "Who?"}]},
    }
    query = {"DELETE /v1/mutes": f"?camera={camera}&subject=person", "GET /v1/events": f"?cameras={camera}"}
    return method, path + query.get(name, ""), bodies.get(name)


CALLBACK = "GET /v1/sign-in/callback"


async def status_of(client, method, path, body, caller):
    async with client.open(method, path, json=body, allow_redirects=False, **caller) as reply:
        return reply.status


def bearer(secret):
    return {"headers": {"Authorization": f"Bearer {secret}"}} if secret else {}


async def wrong_replies(served, callers):
    """``(route, role, camera, status)`` of what the matrix does not allow; ``callers``: role -> what its requests have,
    whose scope is cam-000: in one way or in several, of which each route gets each."""
    async with Client(served.url, cookie_jar=aiohttp.DummyCookieJar()) as client:
        incidents = await open_incidents(served, ["cam-000", "cam-001"])
        wrong = []
        # Last, what ends the sessions.
        for number, name in enumerate(sorted(MAY, key=lambda each: (each == "DELETE /v1/session", each))):
            for role, ways in {**callers, None: [{}], "unknown": [bearer("sl_unknown")]}.items():
                for place, camera in enumerate(("cam-000", "cam-001")):
                    caller = ways[(number + place) % len(ways)]
                    served.world.cameras.setdefault(camera, served.world._camera(camera, 0))
                    method, path, body = request_of(name, camera, incidents[camera], served.secrets["view"])
                    status = await status_of(client, method, path, body, caller)
                    may = role in MAY[name]
                    if not may and role in (None, "unknown"):
                        fits = status == 401
                    elif not may or name in OF_ALL:
                        fits = status == 403
                    elif camera == "cam-001" and name not in UNSCOPED and MAY[name] is not ANYBODY:
                        fits = status == (404 if name in HIDDEN else 403)
                    else:
                        # Where there is nothing to be had, that is what is said, and not that it is forbidden.
                        fits = status in (200, 303, 404, 409, 503) or (name == CALLBACK and status == 401)
                    if not fits:
                        wrong.append((name, role, camera, status))
        return wrong


async def open_incidents(served, cameras):
    """Incident ids by camera."""
    for window in (1, 2):
        served.publish([make_answer(camera, "person", 0.9, window) for camera in cameras])
    return {incident.camera: incident.id for incident in await served.alerts.incidents()}
