"""Bytes that are no message get a sentence, in every kind of call, and nothing is logged as a failure."""

import logging
from contextlib import asynccontextmanager

import grpc
import pytest
import rpc_serving
from kv_parts import OURS
from memory_parts import Replica
from sightline.v1 import memory_pb2, memory_pb2_grpc

from cluster.alerts.incident import unknown_incident
from cluster.decoder.ingest import IngestServicer
from cluster.errors import CapacityError, ConfigError, UnknownCameraError
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.server import KVServicer
from cluster.replica import memory_service as memory
from cluster.wire import answers as results
from cluster.wire.channel import open_channel
from cluster.wire.status import is_ours, sentence_of, to_error

JUNK = b"\xff\xff\xff\xff"


async def _nobody(camera):
    raise UnknownCameraError(f"there is no camera {camera!r}")


@asynccontextmanager
async def serving():
    asked, told = memory.MemoryServicer(Replica()), results.ResultsServicer(results.AnswerHub())
    pushed = IngestServicer(_nobody, max_packet_bytes=2**20)
    arena = Arena(2**23)
    kv = KVServicer(arena, fingerprint=OURS)
    try:
        async with rpc_serving.serving(asked, told, pushed, kv) as address, open_channel(address) as channel:
            yield channel
    finally:
        kv.close()
        arena.close()


async def junk():
    yield JUNK


async def ended(call):
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


CALLS = {
    "unary": lambda channel: channel.unary_unary("/sightline.v1.Memory/Describe")(JUNK, timeout=30),
    "replies written": lambda channel: channel.unary_stream("/sightline.v1.Memory/Ask")(JUNK, timeout=30),
    "replies yielded": lambda channel: channel.unary_stream("/sightline.v1.Results/Watch")(JUNK, timeout=30),
    "requests read": lambda channel: channel.stream_stream("/sightline.v1.Ingest/Push")(junk(), timeout=30),
    "requests iterated": lambda channel: channel.stream_unary("/sightline.v1.KV/Store")(junk(), timeout=30),
}


@pytest.mark.parametrize("kind", list(CALLS))
async def test_junk(kind, caplog):
    caplog.set_level(logging.WARNING)
    async with serving() as channel:
        call = CALLS[kind](channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert is_ours(caught.value)
    error = to_error(caught.value)
    assert isinstance(error, ConfigError)
    assert "invalid message for " in str(error)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Received message larger than max (9 vs. 4)", "the message is too large for the server (Received"),
        ("received metadata size exceeds hard limit", "received metadata size exceeds hard limit"),
    ],
)
def test_what_is_exhausted_is_not_always_a_message(said, told):
    none = grpc.aio.Metadata()
    error = to_error(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, none, none, said))
    assert isinstance(error, CapacityError)
    assert str(error).startswith(told)


@pytest.mark.parametrize("text", ["x" * 2**20, " " * 2**20, "x://h" + "/@" * 2**19], ids=["word", "spaces", "address"])
def test_an_error_that_quotes_much_is_cut_before_secrets_are_looked_for(text):
    """One of these took minutes, in which nobody else was answered."""
    said = sentence_of(unknown_incident(text))
    assert said.startswith("there is no incident")
    assert len(said) < 2500


async def test_messages_pass():
    async with serving() as channel:
        stub = memory_pb2_grpc.MemoryStub(channel)
        assert (await stub.Describe(memory_pb2.DescribeRequest(camera="gate"), timeout=30)).camera
        events = [event async for event in stub.Ask(memory_pb2.AskRequest(camera="gate", text="Who?"), timeout=30)]
        assert events[-1].WhichOneof("event") == "result"
