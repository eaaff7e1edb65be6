"""OpenAI's chat protocol: ``model: camera/NAME`` asks that camera about what it has seen, so that existing tools can.

A conversation is what its client sends, every time: nothing of it is kept here. Answers are greedy, whatever is said
about sampling; system messages are put before the last question, since the model's own beginning is shared by all.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from aiohttp import web
from sightline.v1 import cameras_pb2, memory_pb2

from cluster.errors import SightlineError
from cluster.gateway.http.body import read
from cluster.gateway.http.calls import Calls
from cluster.gateway.http.forms import ChatCompletion, Model, Models
from cluster.gateway.http.memory import SERVICE, Answering, result_body
from cluster.gateway.http.openai_wire import PREFIX, Chat, camera_of, check_extras, conversation, error_body
from cluster.gateway.http.replies import reply
from cluster.gateway.http.route import Route
from cluster.security.roles import MODELS
from cluster.wire.memory_wire import Told

TIMEOUT_S = 300.0
_CAMERAS = "/sightline.v1.Cameras/"


class OpenAiRoutes:
    """See :meth:`routes`. ``longest``: most tokens of an answer; who allows more gets as many."""

    def __init__(self, calls: Calls, answering: Answering, longest: int) -> None:
        self._calls = calls
        self._answering = answering
        self._longest = longest
        self._began_s = int(time.time())

    def routes(self) -> list[Route]:
        models = "/v1/models"
        return [
            Route(
                "POST",
                "/v1/chat/completions",
                f"{SERVICE}Ask",
                self.chat,
                "OpenAI's chat completions: model camera/NAME answers from what the camera has seen; stream: true "
                "sends chunks as server-sent events.",
                ChatCompletion,
                body=Chat,
                errors=(404, 409, 504),
                openai=True,
            ),
            Route("GET", models, MODELS, self.models, "The cameras as OpenAI's models.", Models, openai=True),
            Route(
                "GET",
                f"{models}/{{model:.+}}",
                f"{_CAMERAS}Get",
                self.model,
                "One camera.",
                Model,
                errors=(404,),
                openai=True,
            ),
        ]

    async def models(self, _request: web.Request) -> web.Response:
        found = await self._calls.unary(f"{_CAMERAS}List", cameras_pb2.ListCamerasRequest())
        return reply({"object": "list", "data": [self._model(camera.name) for camera in found.cameras]})

    async def model(self, request: web.Request) -> web.Response:
        asked = cameras_pb2.GetCameraRequest(name=camera_of(request.match_info["model"]))
        return reply(self._model((await self._calls.unary(f"{_CAMERAS}Get", asked)).name))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, Chat)
        check_extras(body)
        camera = camera_of(body.model)
        question, turns = conversation(body.messages)
        wanted = body.max_completion_tokens or body.max_tokens or self._longest
        asked = memory_pb2.AskRequest(
            camera=camera, text=question, since_s=body.since_s, max_new_tokens=min(wanted, self._longest)
        )
        asked.history.SetInParent()
        for said, answer in turns:
            asked.history.turns.add(question=said, answer=answer)
        reply_id = f"chatcmpl-{secrets.token_hex(12)}"
        base = {"id": reply_id, "created": int(time.time()), "model": body.model}
        async with self._answering.ask(asked, TIMEOUT_S) as events:
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                return await self._streamed(request, base, events, asked.max_new_tokens, usage)
            told = [event async for event in events][-1]
        assert isinstance(told, Told)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": told.result.text, "refusal": None},
            "logprobs": None,
            "finish_reason": _finish(told, asked.max_new_tokens),
        }
        whole = {
            **base,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(told),
            "sightline": result_body(told),
        }
        return reply(whole)

    async def _streamed(
        self, request: web.Request, base: dict[str, Any], events: Any, limit: int, usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)

        async def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            body = {**base, "object": "chat.completion.chunk", "choices": [choice], **more}
            await response.write(_data(body))

        nothing = {"usage": None} if usage else {}
        try:
            await chunk({"role": "assistant", "content": ""}, **nothing)
            async for event in events:
                if isinstance(event, str):
                    await chunk({"content": event}, **nothing)
                    continue
                await chunk({}, _finish(event, limit), sightline=result_body(event), **nothing)
                if usage:
                    await response.write(
                        _data({**base, "object": "chat.completion.chunk", "choices": [], "usage": _usage(event)})
                    )
            await response.write(b"data: [DONE]\n\n")
        except SightlineError as error:
            await response.write(_data(error_body(error)))
        await response.write_eof()
        return response

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": f"{PREFIX}{name}", "object": "model", "created": self._began_s, "owned_by": "sightline"}


def _finish(told: Told, limit: int) -> str:
    return "length" if told.result.answer_tokens >= limit else "stop"


def _usage(told: Told) -> dict[str, int]:
    asked, answered = told.result.prompt_tokens, told.result.answer_tokens
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def _data(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
