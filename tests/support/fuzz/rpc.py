"""gRPC: every method of both servers, with messages that are valid, damaged, or no messages at all."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from sightline.v1 import (
    cameras_pb2,
    frames_pb2,
    incidents_pb2,
    ingest_pb2,
    kv_pb2,
    memory_pb2,
    pictures_pb2,
    replicas_pb2,
    results_pb2,
)

from cluster.wire.channel import open_channel
from fuzz.server import TOKEN

TEXTS = (
    "",
    " ",
    "gate",
    "yard",
    "nobody",
    "a" * 200,
    "A" * 70_000,
    "\x00",
    "\u202e",
    "\ud7ff",
    "ü" * 50,
    "💥",
    "../../etc/passwd",
    "%00",
    "%s%n",
    "${HOME}",
    "{{7*7}}",
    "'; --",
    "<script>",
    "null",
    "NaN",
    "-1",
    "1e400",
    "rtsp://u:p@h:99999/x",
    "rtsp://[::1",
    "file:///dev/zero",
    "h264",
    "\r\nX: y",
    "=?",
    "camera/gate",
    "0,0 1,0 1,1",
    "0,0 nan,0 1,1",
    "*",
    "[",
)
NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e305, float("inf"), float("-inf"), float("nan"), 3600.0)


def text(rng: random.Random) -> str:
    """A text of which something may break."""
    if rng.random() < 0.75:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD000)))) for _ in range(rng.randrange(20)))


def raw(rng: random.Random, most: int = 64) -> bytes:
    """Random bytes."""
    return rng.randbytes(rng.randrange(most + 1))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """``data`` with a few bytes changed, lost, doubled or put in."""
    body = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(6):
            case 0 if body:
                body[at % len(body)] ^= 1 << rng.randrange(8)
            case 1:
                body[at:at] = raw(rng, 8)
            case 2:
                del body[at : at + rng.randrange(1, 9)]
            case 3:
                body = body[:at]
            case 4:
                body[at:at] = body[max(0, at - rng.randrange(1, 17)) : at]
            case _ if body:
                body[at % len(body)] = rng.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(body)


def tree(rng: random.Random, depth: int = 3) -> Any:
    """What JSON and YAML can say."""
    kinds = 8 if depth else 6
    match rng.randrange(kinds):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice(NUMBERS)
        case 3:
            return rng.choice(FLOATS)
        case 4 | 5:
            return text(rng)
        case 6:
            return [tree(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            return {text(rng): tree(rng, depth - 1) for _ in range(rng.randrange(4))}


OUTER = (cameras_pb2, incidents_pb2, ingest_pb2, memory_pb2, pictures_pb2, replicas_pb2, results_pb2)
INNER = (frames_pb2, incidents_pb2, kv_pb2, memory_pb2, pictures_pb2)
ABSENT = {
    ("inner", f"sightline.v1.{name}")
    for name in ("Pictures/Picture", "Pictures/Live", "Pictures/Test", "Pictures/Discover", "Memory/AskAll")
}
"""What the gateway alone offers: pictures and tests come from decoders, and no process inside asks all cameras."""
ONLY_INSIDE = {"sightline.v1.Recorder"}

DEFECTS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
LOCAL = "Internal error from Core"
"""What a client tells itself when it writes to a call that has ended."""
FOLLOW_S = 0.05
"""An endless stream is followed for so long."""
HANG_S = 20.0

Field = FieldDescriptor


@dataclass(frozen=True, slots=True)
class Method:
    """One method; ``where``: ``gateway`` or ``inner``. ``asks``, ``tells``: whether either side streams."""

    where: str
    path: str
    request: Descriptor
    asks: bool
    tells: bool


def methods() -> list[Method]:
    """All there are, from the protos."""
    found = []
    for where, modules in (("gateway", OUTER), ("inner", INNER)):
        for module in modules:
            for service in module.DESCRIPTOR.services_by_name.values():
                if service.full_name in ONLY_INSIDE:
                    continue
                found += [
                    Method(
                        where,
                        f"/{service.full_name}/{method.name}",
                        method.input_type,
                        method.client_streaming,
                        method.server_streaming,
                    )
                    for method in service.methods
                    if (where, f"{service.full_name}/{method.name}") not in ABSENT
                ]
    return found


def message(rng: random.Random, kind: Descriptor, depth: int = 4) -> Message:
    """A message with random fields of values that programs trip over."""
    made = GetMessageClass(kind)()
    for field in kind.fields:
        if rng.random() < 0.3 or (field.message_type is not None and depth == 0):
            continue
        if field.is_repeated:
            _several(rng, made, field, depth)
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(message(rng, field.message_type, depth - 1))
        else:
            setattr(made, field.name, _value(rng, field))
    return made


def _several(rng: random.Random, made: Message, field: FieldDescriptor, depth: int) -> None:
    target: Any = getattr(made, field.name)
    kind = field.message_type
    for _ in range(rng.randrange(4)):
        if kind is None:
            target.append(_value(rng, field))
        elif kind.GetOptions().map_entry:
            key = _value(rng, kind.fields_by_name["key"])
            if kind.fields_by_name["value"].message_type is None:
                target[key] = _value(rng, kind.fields_by_name["value"])
        else:
            target.add().CopyFrom(message(rng, kind, depth - 1))


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == Field.CPPTYPE_STRING:
        return raw(rng, 200) if field.type == Field.TYPE_BYTES else text(rng)
    if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return rng.choice(FLOATS)
    if kind == Field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.enum_type is not None:
        return rng.choice([value.number for value in field.enum_type.values])
    bits = 64 if kind in (Field.CPPTYPE_INT64, Field.CPPTYPE_UINT64) else 32
    number = rng.choice(NUMBERS) % 2**bits
    signed = kind in (Field.CPPTYPE_INT32, Field.CPPTYPE_INT64)
    return number - 2**bits if signed and number >= 2 ** (bits - 1) else number


def body(rng: random.Random, kind: Descriptor) -> bytes:
    """What is sent as one message: whole (half of them), damaged, or random bytes."""
    choice = rng.random()
    if choice > 0.9:
        return raw(rng, 100)
    data = message(rng, kind).SerializeToString()
    return data if choice < 0.5 else damaged(rng, data)


class RpcCases:
    """Calls one after the other, over a channel to each server."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._channels = {where: open_channel(addresses[where]) for where in ("gateway", "inner")}
        self._methods = methods()
        self.outcomes: Counter[str] = Counter()

    async def close(self) -> None:
        """Of the channels."""
        for channel in self._channels.values():
            await channel.close()

    async def one(self, rng: random.Random) -> str:
        """Do one case; empty when all is well, else what went wrong."""
        method = rng.choice(self._methods)
        bodies = [body(rng, method.request) for _ in range(rng.randrange(1, 5) if method.asks else 1)]
        secret = TOKEN if rng.random() < 0.95 else text(rng).encode("ascii", "ignore").decode().strip() or "x"
        metadata = (("authorization", f"Bearer {''.join(c for c in secret if c.isprintable())}"),)
        timeout_s = FOLLOW_S if method.tells else HANG_S
        code, details = await self._call(method, bodies, metadata, timeout_s)
        self.outcomes[code.name] += 1
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and not method.tells:
            return f"{method.path} did not answer within {HANG_S:g} s"
        if code in DEFECTS and details != LOCAL:
            return f"{method.path} answered {code.name}: {details}"
        return ""

    async def _call(
        self, method: Method, bodies: list[bytes], metadata: Any, timeout_s: float
    ) -> tuple[grpc.StatusCode, str]:
        channel = self._channels[method.where]

        async def asked() -> AsyncIterator[bytes]:
            for data in bodies:
                yield data

        call: Any
        if method.asks and method.tells:
            call = channel.stream_stream(method.path)(asked(), metadata=metadata, timeout=timeout_s)
        elif method.asks:
            call = channel.stream_unary(method.path)(asked(), metadata=metadata, timeout=timeout_s)
        elif method.tells:
            call = channel.unary_stream(method.path)(bodies[0], metadata=metadata, timeout=timeout_s)
        else:
            call = channel.unary_unary(method.path)(bodies[0], metadata=metadata, timeout=timeout_s)
        try:
            async with asyncio.timeout(timeout_s + HANG_S):
                if method.tells:
                    async for _ in call:
                        pass
                else:
                    await call
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except asyncio.CancelledError:
            # gRPC's way to say that a call ended while its requests were still being written.
            if not call.done():
                raise
            return await call.code(), str(await call.details())
        except TimeoutError:
            call.cancel()
            return grpc.StatusCode.INTERNAL, "the call outlived its deadline"
        return grpc.StatusCode.OK, ""
