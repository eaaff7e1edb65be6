"""A trace through the real parts of three processes, over real sockets, to a real collector: packet to alert."""

import asyncio
from dataclasses import replace

import pytest
from camera_parts import camera_bench
from loop_thread import EventLoopThread
from otlp_collector import Collector
from waiting import until

from cluster import metrics
from cluster.alerts.service import AlertService
from cluster.config import load_config
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.replica.events import ReplicaEvents, WorkerFrames
from cluster.replica.memory import WorkerMemory
from cluster.replica.thumbnails import ThumbnailStore
from cluster.replica.worker import EngineWorker
from cluster.tracing import make_spans
from cluster.tracing.spans import AlertTraces, ReplicaTraces
from cluster.wire.answers import AnswerHub

WAIT_S = 20.0
CONFIG = {
    "questions": [{"id": "person", "text": "Is there a person?", "threshold": 1e-6}],
    "alerts": {"consecutive": 1, "sinks": [{"name": "log", "kind": "log"}]},
}


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def spans(collector):
    tracing = load_config(None, {"tracing": {"endpoint": collector.endpoint, "ratio": 1}}).tracing
    made = {name: make_spans(tracing, name) for name in ("decoder-0", "replica-0", "alerting")}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture
def replica(spans):
    import torch

    from cluster.engine.native.engine import NativeEngine
    from cluster.models.loading import load_model

    torch.set_num_threads(1)
    bank = MemoryBank(TierStack([Arena(32 * 2**20)]))
    engine = NativeEngine(load_model("tiny-qwen2_5_vl"), memories=bank)
    hub, answered, traces = AnswerHub(), metrics.AnsweredCameras(), ReplicaTraces(spans["replica-0"])
    worker = EngineWorker(engine, ReplicaEvents(hub, answered, traces), per_stream=8)
    worker.start()
    yield hub, WorkerFrames(worker, WorkerMemory(worker, ThumbnailStore(), timeout_s=5.0), answered, traces)
    assert worker.stop(WAIT_S)
    # A thread that is inside torch when Python ends takes the process with it.
    assert bank.wait_written(WAIT_S)
    answered.retain_cameras([])


async def alerting(hub, traces, folder):
    """As the actor does it."""

    def on_event(event):
        traces.event_queued(event.incident.camera, event.incident.subject, event.kind)

    service = AlertService(load_config(None, CONFIG), folder, on_event=on_event)
    await service.start()
    try:
        with hub.subscribe() as answers:
            async for answer, missed in answers:
                traces.answer_received(answer)
                # The model knows nothing: what counts here is that its answer becomes an alert.
                service.accept_answer(replace(answer, positive=True, score=0.9), missed)
    finally:
        await service.stop()


def test_one_tree_from_packet_to_alert(clip, spans, replica, collector, tmp_path):
    hub, frames = replica
    with EventLoopThread() as loop:
        running = asyncio.run_coroutine_threadsafe(alerting(hub, AlertTraces(spans["alerting"]), tmp_path), loop.loop)
        # An answer that comes before it is told to nobody.
        until(lambda: hub._subscriptions, "alerting among those who watch")
        with camera_bench(clip, spans=spans["decoder-0"]) as bench:
            bench.camera.route(bench.replica(frames))
            # Of one window: an answer behind it, perhaps a gated one, would be the newest when the alert is on disk.
            bench.push(3)
            until(lambda: collector.named("alert"), lambda: ("an alert's span", running, len(collector.spans)))
            trace = collector.named("alert")[0].trace_id
            until(lambda: any(span.trace_id == trace for span in collector.named("llm")), "its answer's span")
        hub.close()
        running.result(WAIT_S)
    for each in spans.values():
        each.close()
    by_id = {span.span_id: span for span in collector.spans}

    def path(span):
        return [span.name, *(path(by_id[span.parent_span_id]) if span.parent_span_id else [])]

    [alert] = collector.named("alert")[:1]
    assert path(alert)[:3] == ["alert", "answer", "frame"]
    mine = [span for span in collector.spans if span.trace_id == alert.trace_id]
    assert {"ingest", "decode", "sample", "send", "queue", "vision", "plan", "llm"} <= {span.name for span in mine}
    assert all(path(span)[-1] == "frame" for span in mine)
    # Time runs on from the packet to the alert; machines' clocks are one here.
    first = min(span.start_time_unix_nano for span in mine)
    answer = by_id[alert.parent_span_id]
    assert first <= answer.start_time_unix_nano <= answer.end_time_unix_nano <= alert.end_time_unix_nano
    for name in ("ingest", "decode", "sample", "send"):
        for span in collector.named(name):
            assert span.start_time_unix_nano <= span.end_time_unix_nano
    assert collector.processes == {"decoder-0", "replica-0", "alerting"}
