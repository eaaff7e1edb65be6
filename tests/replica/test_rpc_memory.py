"""The Memory service against a scripted replica: answers, follow-ups, refusals with their sentences, cancellation."""

import asyncio

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_parts import MOMENTS, STATUS, replica, result
from sightline.v1 import memory_pb2, memory_pb2_grpc

from cluster import metrics
from cluster.errors import CapacityError, ConfigError, NotReadyError, UnavailableError
from cluster.replica.ask_queue import Conversations
from cluster.types import AskSpec
from cluster.wire.channel import open_channel
from cluster.wire.memory_wire import (
    MAX_PICTURES_BYTES,
    AskOutcome,
    ask_from_proto,
    check_question,
    outcome_from_proto,
    outcome_to_proto,
    status_from_proto,
    status_to_proto,
)

Code = grpc.StatusCode


def request(text="What happened?", camera="gate", **more):
    return memory_pb2.AskRequest(camera=camera, text=text, **more)


async def ask(stub, *arguments, **more):
    """``(pieces, result)``."""
    events = [event async for event in stub.Ask(request(*arguments, **more))]
    assert [event.WhichOneof("event") for event in events[:-1]] == ["piece"] * (len(events) - 1)
    return [event.piece for event in events[:-1]], events[-1].result


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code(), failure.value.details()


def stub_of(channel):
    return memory_pb2_grpc.MemoryStub(channel)


def history(*turns):
    return memory_pb2.History(turns=[memory_pb2.Turn(question=asked, answer=answer) for asked, answer in turns])


async def test_a_history_that_the_client_keeps_is_not_kept_here():
    conversations = Conversations(limit=4)
    options = {"conversations": conversations, "max_asks": 2}
    async with replica(**options) as (handler, address), open_channel(address) as channel:
        many = [(f"What {number}?", f"This {number}.") for number in range(20)]
        _, told = await ask(stub_of(channel), history=history(*many))
        assert (told.conversation, len(conversations._known)) == ("", 0)
        assert handler.asked[0].turns == tuple(many[-16:])
        await ask(stub_of(channel), history=history())
        assert (handler.asked[1].turns, len(conversations._known)) == ((), 0)
        for turn, conversation, sentence in (
            (("a", "b"), "x", "a conversation or a history, not both"),
            (("a", "b" * 8001), "", "longer than 8,000 characters"),
            (("a", "\x00"), "", "or not text"),
            (("", "b"), "", "the question is empty"),
        ):
            code, text = await refusal(ask(stub_of(channel), history=history(turn), conversation=conversation))
            assert (code, sentence in text) == (Code.INVALID_ARGUMENT, True), sentence
        assert len(handler.asked) == 2


async def test_pieces_then_one_result():
    async with replica() as (handler, address), open_channel(address) as channel:
        pieces, told = await ask(
            stub_of(channel), "  What happened? ", since_s=90.5, max_new_tokens=7, with_pictures=True
        )
        assert pieces == ["two ", "words"], "empty pieces are not sent"
        assert handler.asked == [AskSpec("gate", "What happened?", (), 90.5, 7)]
        assert outcome_from_proto(told, "gate") == AskOutcome(
            result("two words"), told.conversation, (b"\xff\xd8one", b"")
        )
        assert [moment.ago_s for moment in told.moments] == [723.0, 10.0]
        _, plain = await ask(stub_of(channel))
        assert handler.asked[1] == AskSpec("gate", "What happened?")
        assert [moment.picture for moment in plain.moments] == [b"", b""], "not asked for"


async def test_a_follow_up_knows_what_was_said():
    async with replica() as (handler, address), open_channel(address) as channel:
        _, first = await ask(stub_of(channel), "Who?")
        handler.words = ["red"]
        _, second = await ask(stub_of(channel), "Which colour?", conversation=first.conversation)
        assert second.conversation == first.conversation
        await ask(stub_of(channel), "Sure?", conversation=first.conversation)
        _, other = await ask(stub_of(channel), "And now?")
        assert other.conversation != first.conversation
        said = ("Who?", "two words"), ("Which colour?", "red")
        assert [spec.turns for spec in handler.asked] == [(), said[:1], said, ()]


async def test_the_second_question_on_a_conversation_waits_and_the_third_is_refused(until):
    async with replica() as (handler, address), open_channel(address) as channel:
        stub = stub_of(channel)
        _, begun = await ask(stub, "Who?")
        handler.stuck_at = 0
        waiting = [asyncio.create_task(ask(stub, text, conversation=begun.conversation)) for text in ("one", "two")]
        await until(lambda: len(handler.asked) == 2)
        await asyncio.sleep(0.05)
        assert len(handler.asked) == 2, "the second waits"
        code, sentence = await refusal(ask(stub, "three", conversation=begun.conversation))
        assert (code, "has a question waiting already" in sentence) == (Code.RESOURCE_EXHAUSTED, True)
        handler.go.set()
        await asyncio.gather(*waiting)
        first, second = handler.asked[1:]
        assert second.turns == (("Who?", "two words"), (first.text, "two words"))


async def test_a_question_that_fails_is_not_part_of_the_conversation():
    async with replica() as (handler, address), open_channel(address) as channel:
        stub = stub_of(channel)
        _, begun = await ask(stub, "Who?")
        handler.error, handler.error_at = NotReadyError("the memory is away"), 1
        assert await refusal(ask(stub, "lost", conversation=begun.conversation)) == (
            Code.FAILED_PRECONDITION,
            "the memory is away",
        )
        handler.error = None
        await ask(stub, "again", conversation=begun.conversation)
        assert handler.asked[-1].turns == (("Who?", "two words"),)


REFUSED = {
    "empty": (request(" \n"), Code.INVALID_ARGUMENT, "the question is empty"),
    "long": (request("x" * 2001), Code.INVALID_ARGUMENT, "has 2,001 characters; at most 2,000"),
    "control": (request("a\x1b[2J"), Code.INVALID_ARGUMENT, "character 2 is U+001B"),
    "no camera": (request(camera=""), Code.INVALID_ARGUMENT, "no camera is named"),
    "odd camera": (request(camera="a\n"), Code.INVALID_ARGUMENT, "the camera's name is longer"),
    "negative": (request(since_s=-1), Code.INVALID_ARGUMENT, "since_s is -1"),
    "not a number": (request(since_s=float("nan")), Code.INVALID_ARGUMENT, "since_s is nan"),
    "more microseconds than a number holds": (request(since_s=1e305), Code.INVALID_ARGUMENT, "since_s is 1e+305"),
    "endless": (request(max_new_tokens=49), Code.INVALID_ARGUMENT, "max_new_tokens is 49; answers have at most 48"),
    "unknown": (request(camera="nobody"), Code.NOT_FOUND, "there is no camera 'nobody'"),
    "nothing yet": (request(camera="dark"), Code.FAILED_PRECONDITION, "has seen nothing yet"),
    "no conversation": (request(conversation="?"), Code.FAILED_PRECONDITION, "there is no conversation '?'"),
}


@pytest.mark.parametrize(("message", "code", "sentence"), REFUSED.values(), ids=REFUSED)
async def test_refusals(message, code, sentence):
    async with replica() as (_, address), open_channel(address) as channel:
        found, said = await refusal(stub_of(channel).Ask(message).read())
        assert found is code
        assert sentence in said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CapacityError("9 questions wait already"), Code.RESOURCE_EXHAUSTED),
        (ConfigError("the question has too many tokens"), Code.INVALID_ARGUMENT),
        (KeyError("a defect"), Code.INTERNAL),
    ],
)
async def test_what_the_replica_raises(error, code):
    async with replica() as (handler, address), open_channel(address) as channel:
        handler.error = error
        assert await refusal(ask(stub_of(channel))) == (code, str(error))
        assert handler.under_way == 0


async def test_an_answer_without_a_result_is_a_defect():
    async with replica() as (handler, address), open_channel(address) as channel:
        handler.with_result = False
        assert (await refusal(ask(stub_of(channel))))[0] is Code.INTERNAL


async def test_another_cameras_conversation():
    async with replica() as (_, address), open_channel(address) as channel:
        _, told = await ask(stub_of(channel), camera="yard")
        code, sentence = await refusal(ask(stub_of(channel), conversation=told.conversation))
        assert code is Code.INVALID_ARGUMENT
        # Who has the id may not be allowed to know of the other camera.
        assert "is about another camera; begin a new one about camera 'gate'" in sentence


async def test_too_many_questions_at_once(until):
    async with replica(max_asks=2) as (handler, address), open_channel(address) as channel:
        handler.stuck_at = 1
        calls = [asyncio.create_task(ask(stub_of(channel))) for _ in range(2)]
        await until(lambda: handler.under_way == 2)
        refused = metrics.asks.labels("refused")._value.get()
        code, sentence = await refusal(ask(stub_of(channel)))
        assert code is Code.RESOURCE_EXHAUSTED
        assert "2 questions are being answered" in sentence
        assert metrics.asks.labels("refused")._value.get() == refused + 1
        calls.pop().cancel()
        await until(lambda: handler.under_way == 1)
        calls.append(asyncio.create_task(ask(stub_of(channel))))
        await until(lambda: handler.under_way == 2)
        assert (await refusal(ask(stub_of(channel))))[0] is Code.RESOURCE_EXHAUSTED
        handler.go.set()
        await asyncio.gather(*calls)
        await ask(stub_of(channel))


@pytest.mark.parametrize("stuck_at", [0, 2])
async def test_a_client_that_leaves_ends_the_answer(until, stuck_at):
    async with replica() as (handler, address), open_channel(address) as channel:
        _, begun = await ask(stub_of(channel), "Who?")
        handler.stuck_at = stuck_at
        call = stub_of(channel).Ask(request("lost", conversation=begun.conversation))
        if stuck_at:
            assert (await call.read()).piece == "two "
        else:
            await until(lambda: handler.under_way == 1)
        call.cancel()
        await until(lambda: handler.under_way == 0)
        handler.stuck_at = None
        await ask(stub_of(channel), "again", conversation=begun.conversation)
        assert handler.asked[-1].turns == (("Who?", "two words"),)


async def test_deadlines():
    async with replica(ask_s=0.1, call_s=0.1) as (handler, address), open_channel(address) as channel:
        handler.stuck_at = 1
        late = (Code.DEADLINE_EXCEEDED, "the replica did not answer within 0.1 s")
        assert await refusal(ask(stub_of(channel))) == late
        assert handler.under_way == 0
        assert await refusal(stub_of(channel).Describe(memory_pb2.DescribeRequest(camera="gate"))) == late


async def test_forgetting_ends_conversations():
    async with replica() as (handler, address), open_channel(address) as channel:
        stub = stub_of(channel)
        _, told = await ask(stub)
        _, other = await ask(stub, camera="yard")
        reply = await stub.Forget(memory_pb2.ForgetRequest(camera="gate"))
        assert (reply.frames, reply.bytes) == (7, 2**40)
        reply = await stub.Forget(memory_pb2.ForgetRequest(camera="gate", before_s=1))
        assert (reply.frames, reply.bytes) == (7, 0), "a memory may grow while it forgets"
        assert handler.forgotten == [("gate", None), ("gate", 1.0)]
        assert (await refusal(ask(stub, conversation=told.conversation)))[0] is Code.FAILED_PRECONDITION
        await ask(stub, camera="yard", conversation=other.conversation)
        for wrong, code in (
            (memory_pb2.ForgetRequest(camera="gate", before_s=-1), Code.INVALID_ARGUMENT),
            (memory_pb2.ForgetRequest(camera="nobody"), Code.NOT_FOUND),
            (memory_pb2.ForgetRequest(), Code.INVALID_ARGUMENT),
        ):
            assert (await refusal(stub.Forget(wrong)))[0] is code


async def test_what_is_said_before_a_deletion_fails_is_not_gone_on_with():
    async with replica() as (handler, address), open_channel(address) as channel:
        stub = stub_of(channel)

        async def fails(camera, ago_s, **_):
            handler.told = (await ask(stub))[1]
            raise UnavailableError("Redis is down")

        handler.delete_memory = fails
        assert (await refusal(stub.Forget(memory_pb2.ForgetRequest(camera="gate"))))[0] is Code.UNAVAILABLE
        assert (await refusal(ask(stub, conversation=handler.told.conversation)))[0] is Code.FAILED_PRECONDITION


async def test_what_is_said_while_it_forgets_is_not_gone_on_with(until):
    async with replica() as (handler, address), open_channel(address) as channel:
        handler.stuck_at = 1
        under_way = asyncio.create_task(ask(stub_of(channel)))
        await until(lambda: handler.under_way == 1)
        await stub_of(channel).Forget(memory_pb2.ForgetRequest(camera="gate"))
        handler.go.set()
        _, told = await under_way
        assert (await refusal(ask(stub_of(channel), conversation=told.conversation)))[0] is Code.FAILED_PRECONDITION


async def test_describe():
    async with replica() as (_, address), open_channel(address) as channel:
        status = await stub_of(channel).Describe(memory_pb2.DescribeRequest(camera="gate"))
        assert status_from_proto(status) == STATUS
        assert list(status_from_proto(status).tier_bytes) == ["recent", "zone", "arena"], "in their order"
        dark = stub_of(channel).Describe(memory_pb2.DescribeRequest(camera="dark"))
        assert (await refusal(dark))[0] is Code.FAILED_PRECONDITION


def test_pictures_that_do_not_fit_into_a_message_stay_away():
    large = bytes(MAX_PICTURES_BYTES - 10)
    kept = outcome_to_proto(AskOutcome(result("x"), "id", (large, bytes(11)))).moments
    assert [len(moment.picture) for moment in kept] == [len(large), 0]
    kept = outcome_to_proto(AskOutcome(result("x"), "id", (bytes(MAX_PICTURES_BYTES + 1), bytes(11)))).moments
    assert [len(moment.picture) for moment in kept] == [0, 11]
    assert [(moment.start, moment.end, moment.weight) for moment in kept] == [
        (m.start, m.end, m.weight) for m in MOMENTS
    ]


def test_a_status_with_nothing_in_it_survives_the_wire():
    empty = memory_pb2.MemoryStatus()
    assert status_to_proto(status_from_proto(empty)) == empty


@given(st.text(max_size=60))
def test_a_question_is_text_or_a_sentence_says_why_not(text):
    try:
        taken = check_question(text)
    except ConfigError:
        bad = any((letter < " " and letter not in "\t\n\r") or "\x7f" <= letter <= "\x9f" for letter in text)
        assert bad or not text.strip() or any("\ud800" <= letter <= "\udfff" for letter in text)
        return
    assert taken == text.strip()
    taken.encode()
    assert ask_from_proto(request(taken), 48).text == taken


async def test_answers_are_as_long_as_the_servicer_allows():
    async with replica(max_new_tokens=200, max_asks=500) as (handler, address), open_channel(address) as channel:
        for wanted in (0, 150, 200):
            await ask(stub_of(channel), max_new_tokens=wanted)
        assert [spec.max_new_tokens for spec in handler.asked] == [200, 150, 200]
        assert (await refusal(ask(stub_of(channel), max_new_tokens=201)))[0] is Code.INVALID_ARGUMENT
