"""OpenAI's own client asks a camera; what a camera cannot do is said in words that the client understands."""

import contextlib
from itertools import pairwise

import openai
import pytest
from gateway_parts import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until_async

from cluster.errors import CapacityError, ConfigError, NotReadyError
from cluster.gateway.http.openai import Message, camera_of, conversation
from cluster.gateway.http.replies import HttpError

MODEL = "camera/cam-001"


@contextlib.asynccontextmanager
async def asking(folder, *, role="ask", **options):
    """``(client, served)``; two cameras, of which the token sees ``cam-001``."""
    async with serving(folder, cameras=2, tokens=True, scopes=["cam-001", "dark"], **options) as served:
        key = served.secrets.get(role, role)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
            yield client, served


def said(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]


async def test_an_answer(tmp_path):
    async with asking(tmp_path) as (client, served):
        answer = await client.chat.completions.create(model=MODEL, messages=said("Who came in?"))
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "Somebody in a red coat came in.")
        assert choice.finish_reason == "stop"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (17, 4, 21)
        assert (answer.object, answer.model) == ("chat.completion", MODEL)
        assert answer.sightline["moments"][0]["weight"] == 0.6
        (spec,) = served.replica.asked
        assert (spec.stream, spec.text, spec.turns, spec.since_s) == ("cam-001", "Who came in?", (), None)


async def test_a_conversation_is_what_its_client_sends(tmp_path):
    async with asking(tmp_path) as (client, served):
        messages = [
            {"role": "system", "content": "Answer in German."},
            {"role": "assistant", "content": "Hello!"},
            *said("Who?", "A man.", "Where?"),
            {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "when?"}]},
        ]
        for _ in range(2):
            await client.chat.completions.create(model=MODEL, messages=messages, extra_body={"since_s": 3600})
        first, second = served.replica.asked
        assert first == second, "nothing is remembered from one request to the next"
        assert first.text == "Answer in German.\n\nWhere?\nAnd\nwhen?"
        assert first.turns == (("Who?", "A man."),)
        assert first.since_s == 3600.0


async def test_a_stream(tmp_path):
    async with asking(tmp_path) as (client, _):
        stream = await client.chat.completions.create(
            model=MODEL, messages=said("Who?"), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        *pieces, end, usage = chunks
        assert pieces[0].choices[0].delta.role == "assistant"
        assert [piece.choices[0].delta.content for piece in pieces[1:]] == [
            "Somebody ",
            "in a red ",
            "coat ",
            "came in.",
        ]
        assert end.choices[0].finish_reason == "stop"
        assert usage.choices == []
        assert usage.usage.total_tokens == 21
        assert len({chunk.id for chunk in chunks}) == 1
        plain = await client.chat.completions.create(model=MODEL, messages=said("Who?"), stream=True)
        assert not [chunk.usage async for chunk in plain if chunk.usage is not None]


async def test_a_longer_answer_than_the_cluster_gives_is_cut(tmp_path):
    async with asking(tmp_path) as (client, served):
        answer = await client.chat.completions.create(model=MODEL, messages=said("Who?"), max_completion_tokens=2)
        assert answer.choices[0].message.content == "Somebody in a red "
        assert answer.choices[0].finish_reason == "length"
        await client.chat.completions.create(model=MODEL, messages=said("Who?"), max_tokens=4096)
        assert [spec.max_new_tokens for spec in served.replica.asked] == [2, 48]


async def test_models_are_the_cameras_that_may_be_seen(tmp_path):
    async with asking(tmp_path) as (client, _):
        assert [model.id async for model in client.models.list()] == [MODEL, "fleet"]
        assert (await client.models.retrieve(MODEL)).owned_by == "sightline"
        with pytest.raises(openai.PermissionDeniedError):
            await client.models.retrieve("camera/cam-000")


async def test_what_fails_comes_as_the_clients_own_errors(tmp_path):
    async with asking(tmp_path) as (client, served):
        ask = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'; models are camera/NAME") as missing:
            await ask(model="gpt-5", messages=said("Who?"))
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        served.world.cameras.pop("cam-001")
        with pytest.raises(openai.NotFoundError, match="there is no camera 'cam-001'") as missing:
            await ask(model=MODEL, messages=said("Who?"))
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.PermissionDeniedError, match="'cam-000' is not among those"):
            await ask(model="camera/cam-000", messages=said("Who?"))
        served.world.cameras["dark"] = served.world._camera("dark", 0)
        with pytest.raises(openai.ConflictError, match="has seen nothing yet"):
            await ask(model="camera/dark", messages=said("Who?"))
        served.world.trouble = "the controller is restarting"
        with pytest.raises(openai.InternalServerError, match="the controller is restarting"):
            await ask(model=MODEL, messages=said("Who?"))


async def test_errors_while_the_answer_comes(tmp_path):
    async with asking(tmp_path) as (client, served):
        served.replica.error = CapacityError("too many questions wait")
        with pytest.raises(openai.RateLimitError, match="too many questions wait") as full:
            await client.chat.completions.create(model=MODEL, messages=said("Who?"), stream=True)
        assert full.value.code == "rate_limit_exceeded"
        served.replica.error, served.replica.error_at = NotReadyError("it was removed"), 2
        stream = await client.chat.completions.create(model=MODEL, messages=said("Who?"), stream=True)
        with pytest.raises(openai.APIError, match="it was removed"):
            _ = [chunk async for chunk in stream]
        with pytest.raises(openai.ConflictError, match="it was removed"):
            await client.chat.completions.create(model=MODEL, messages=said("Who?"))


async def test_a_client_that_leaves_ends_the_answer(tmp_path):
    async with asking(tmp_path) as (client, served):
        served.replica.words, served.replica.pause_s = ["x "] * 48, 0.05
        stream = await client.chat.completions.create(model=MODEL, messages=said("Who?"), stream=True)
        await anext(aiter(stream))
        assert served.replica.under_way == 1
        await stream.close()
        await until_async(lambda: not served.replica.under_way)


async def test_tokens_and_roles(tmp_path):
    async with asking(tmp_path, role="sl_wrong") as (client, _):
        with pytest.raises(openai.AuthenticationError, match="this token is not known here") as unknown:
            await client.models.list()
        assert unknown.value.code == "invalid_api_key"
    async with asking(tmp_path, role="view") as (client, _):
        with pytest.raises(openai.PermissionDeniedError, match="a token with the role ask"):
            await client.chat.completions.create(model=MODEL, messages=said("Who?"))


REFUSED = {
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: a camera cannot call tools"),
    "choices": ({"n": 2}, "n is 2; it must be 1"),
    "stop": ({"stop": ["."]}, "stop: stop sequences are not supported"),
    "JSON": ({"response_format": {"type": "json_object"}}, "response_format: answers are plain text"),
    "log probabilities": ({"logprobs": True}, "logprobs"),
    "no tokens": ({"max_tokens": 0}, "max_tokens is out of range"),
    "a long question": ({"messages": said("x" * 2001)}, "the question has 2,001 characters"),
    "no question": ({"messages": said("Who?", "Nobody.")}, "the last message must be the user's"),
    "nothing": ({"messages": []}, "messages is invalid"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages.0 contains 'image_url'; only text is supported",
    ),
    "a tool's word": (
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "5"}]},
        "omit tool messages",
    ),
    "a role": ({"messages": [{"role": "boss", "content": "5"}]}, "messages.0.role is invalid"),
}


async def test_what_a_camera_cannot_do_is_refused_in_words(tmp_path):
    async with asking(tmp_path) as (client, served):
        for what, (keys, sentence) in REFUSED.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**{"model": MODEL, "messages": said("Who?"), **keys})
            assert sentence in str(refused.value), what
            assert refused.value.type == "invalid_request_error"
        assert not served.replica.asked
        harmless = {"tools": [], "stop": None, "logprobs": False, "n": 1, "response_format": {"type": "text"}}
        await client.chat.completions.create(
            model=MODEL, messages=said("Who?"), temperature=0.2, seed=1, user="u", **harmless
        )


messages = st.lists(
    st.builds(
        Message, role=st.sampled_from(["system", "user", "assistant"]), content=st.sampled_from(["a", "b", "cc"])
    ),
    max_size=80,
)


@settings(max_examples=60)
@given(messages)
def test_whatever_is_said_the_last_word_is_the_users(given_messages):
    spoken = [message for message in given_messages if message.role != "system"]
    if not spoken or spoken[-1].role != "user":
        with pytest.raises(ConfigError):
            conversation(given_messages)
        return
    question, turns = conversation(given_messages)
    assert question.endswith(spoken[-1].content)
    assert len(turns) <= 16
    answers = [
        message.content for before, message in pairwise(spoken) if (before.role, message.role) == ("user", "assistant")
    ]
    assert [answer for _, answer in turns] == answers[-16:]


@pytest.mark.parametrize("model", ["", "camera/", "gate", "Camera/gate", "camera"])
def test_a_model_that_is_no_camera(model):
    with pytest.raises(HttpError, match="models are camera/NAME"):
        camera_of(model)


async def test_the_fleet_answers_for_the_cameras_that_the_token_sees(tmp_path):
    async with asking(tmp_path) as (client, served):
        # What it may not see is not asked.
        names = [model.id async for model in await client.models.list()]
        assert names == [MODEL, "fleet"]
        assert (await client.models.retrieve("fleet")).id == "fleet"
        answer = await client.chat.completions.create(model="fleet", messages=said("Who came in?"), max_tokens=9)
        assert {spec.stream for spec in served.replica.asked} == {"cam-001"}
        assert served.replica.asked[0].max_new_tokens == 9
        text = answer.choices[0].message.content
        assert "1. cam-001, 60 s ago, rank 0.00: Somebody in a red coat came in." in text
        assert "1 of 1 cameras answered." in text
        assert (answer.usage.total_tokens, answer.sightline["progress"]["answered"]) == (21, 1)
        served.replica.yes = lambda camera: 0.9
        chunks = []
        async for chunk in await client.chat.completions.create(model="fleet", messages=said("Who?"), stream=True):
            chunks.append(chunk.choices[0].delta.content or "")
        whole = "".join(chunks)
        assert whole.startswith("cam-001: Somebody in a red coat came in. (0.90)\n1. cam-001")
        assert len([each for each in chunks if each]) >= 3


async def test_the_fleet_is_asked_as_seldom_as_over_other_ways(tmp_path):
    """The rate limit has it as a question to all, and not as one to a camera."""
    async with asking(tmp_path, security={"calls_burst": 12, "calls_per_s": 0.01}) as (client, _):
        for _ in range(2):
            await client.chat.completions.create(model="fleet", messages=said("Who?"))
        with pytest.raises(openai.RateLimitError, match="calls too often"):
            await client.chat.completions.create(model="fleet", messages=said("Who?"))
