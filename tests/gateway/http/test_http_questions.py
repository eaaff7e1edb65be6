"""Replays and rehearsed rules over HTTP, as a client sees them."""

import asyncio
import json
from itertools import pairwise

import pytest
from gateway_parts import Replica
from http_parts import answering

from cluster.errors import NotReadyError

REPLAY = {"camera": "gate", "text": "Is a red van parked here?"}


class Past(Replica):
    """Has seen a minute; of what ended at ``gone`` (microseconds) nothing is left."""

    def __init__(self):
        super().__init__()
        self.gone = -1

    async def ask(self, ask):
        if ask.span[1] == self.gone:
            raise NotReadyError("nothing is remembered of that time")
        async for event in super().ask(ask):
            yield event


async def windows_of(client, **more):
    async with client.open("POST", "/v1/replay", json={**REPLAY, **more}) as reply:
        assert reply.status == 200
        return [json.loads(line)["window"] async for line in reply.content]


async def test_windows_come_oldest_first_with_progress_and_gaps():
    replica = Past()
    replica.gone = 44_000_001
    async with answering(replica) as (client, _):
        windows = await windows_of(client, since_s=40)
        # Five strides of 8 s in 40 s, up to the newest frame, at 60 s.
        assert [(each["done"], each["total"]) for each in windows] == [(number, 5) for number in range(1, 6)]
        scores = [each["score"] for each in windows]
        assert scores[2] is None
        assert [*scores[:2], *scores[3:]] == pytest.approx([0.28, 0.36, 0.52, 0.60], abs=1e-6)
        ends = [each["end_s"] for each in windows]
        assert [after - before for before, after in pairwise(ends)] == pytest.approx([8] * 4, abs=0.01)
        assert windows[-1]["end_s"] - windows[-1]["start_s"] == pytest.approx(40, abs=0.01)
        asked = {(ask.text, ask.standing, ask.max_new_tokens) for ask in replica.asked}
        assert asked == {("Is a red van parked here?", True, 1)}


async def test_a_replay_is_bounded_and_ends_with_its_client():
    replica = Past()
    replica.pause_s = 0.05
    async with answering(replica) as (client, _):
        windows = await windows_of(client, windows=3, since_s=0)
        # Seven strides of 8 s in a minute: every third.
        assert [round(after["end_s"] - before["end_s"]) for before, after in pairwise(windows)] == [24, 24]
        assert (await client("POST", "/v1/replay", {**REPLAY, "windows": 481}))[0] == 400
        assert (await client("POST", "/v1/replay", {**REPLAY, "text": " "}))[0] == 400
        assert (await client("POST", "/v1/replay", {**REPLAY, "camera": "dark"}))[0] == 409
        before = len(replica.asked)
        async with client.open("POST", "/v1/replay", json=REPLAY) as reply:
            await reply.content.readline()
        await asyncio.sleep(0.3)
        assert len(replica.asked) - before < 7
        assert replica.under_way == 0


async def test_a_rule_is_rehearsed_with_the_clusters_defaults():
    async with answering(Past()) as (client, _):
        windows = [[8 * n, 8 * n + 40, score] for n, score in enumerate((0.1, 0.7, 0.8, 0.1, 0.1, 0.7, 0.1))]
        status, body = await client("POST", "/v1/rehearse", {"windows": windows, "rule": {"threshold": 0.6}})
        assert status == 200
        # Two in a row by default; the last one is alone.
        assert [(each["start_s"], each["end_s"], each["windows"]) for each in body["incidents"]] == [(8.0, 56.0, 2)]
        status, body = await client(
            "POST",
            "/v1/rehearse",
            {"windows": windows, "rule": {"threshold": 0.6, "consecutive": 1, "cooldown_s": 0, "severity": "critical"}},
        )
        assert [(each["start_s"], each["severity"]) for each in body["incidents"]] == [
            (8.0, "critical"),
            (40.0, "critical"),
        ]
        assert body["incidents"][1]["end_s"] is None
        for wrong in ([[0, 8]], [[0, 8, 1.5]], [[8, 0, 0.5]], [[8, 16, 0.5], [0, 8, 0.5]], [[0, 1, 0.5]] * 1001):
            assert (await client("POST", "/v1/rehearse", {"windows": wrong}))[0] == 400
