"""Spans: their tree over processes, what is chosen, and that a collector that is slow or gone costs spans only."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from otlp_collector import Collector
from waiting import until

from cluster import metrics
from cluster.config import load_config
from cluster.config.cluster import TracingConfig
from cluster.errors import SightlineError
from cluster.tracing import make_spans
from cluster.tracing.spans import FRAMES, AlertTraces, CameraTrace, FrameTimes, ReplicaTraces, trace_id
from cluster.types import Answer, FrameSample, PatchGrid, Timing, TokenCount
from cluster.wire.convert import answer_from_proto, answer_to_proto, frame_from_proto, frame_to_proto

SECOND = 1_000_000
GRID = PatchGrid(2, 2, 14, 2, 1)


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def spans(collector):
    spans = make_spans(TracingConfig(endpoint=collector.endpoint), "decoder-0")
    yield spans
    spans.close()


def sample(index, pts, *, fresh=False):
    patches = np.zeros((4, 1, 3, 14, 14), np.uint8)
    return FrameSample("gate", index, pts, SECOND, fresh, fresh, GRID, np.ones((2, 2), bool), patches, 0.1)


def answer(window, end, *, gated=False, latency_s=1.0):
    timing = Timing(0.1, 0.2, 0.3, 0.4, latency_s)
    return Answer("gate", window, 0, end, "person", 0.9, True, "", gated, TokenCount(9, 8, 3, 2, 3, 1, 3), timing)


def counted(result):
    return metrics.spans.labels(result)._value.get()


def test_a_window_is_one_tree_from_packet_to_alert(collector, spans):
    now = [1000.0]
    decoder = CameraTrace(spans, "gate", 1.0, clock=lambda: now[0])
    replica, alerting = ReplicaTraces(spans, lambda: now[0]), AlertTraces(spans, lambda: now[0])
    for index in range(4):
        traced = decoder.trace_frame(
            sample(index, index * SECOND, fresh=index == 0), 4.0, FrameTimes(999.0, 999.5, 999.8)
        )
        replica.frame_received(frame_from_proto(frame_to_proto(traced)))
    now[0] = 1002.0
    [answered] = replica.window_answered([answer(0, 4 * SECOND)])
    answered = answer_from_proto(answer_to_proto(answered))
    alerting.answer_received(answered)
    now[0] = 1002.5
    alerting.event_queued("gate", "person", "new")
    until(lambda: collector.named("alert"), "the alert's span")
    by_id = {span.span_id: span for span in collector.spans}
    assert {span.trace_id.hex() for span in collector.spans} == {trace_id(answered.trace)}

    def path(span):
        return [span.name, *(path(by_id[span.parent_span_id]) if span.parent_span_id else [])]

    [alert] = collector.named("alert")
    assert path(alert) == ["alert", "answer", "frame", "frame"]
    assert sorted(span.name for span in collector.spans) == sorted(
        ["frame", "ingest", "decode", "sample", "send"] * 4 + ["answer", "queue", "vision", "plan", "llm", "alert"]
    )
    for stage in ("queue", "vision", "plan", "llm"):
        assert path(collector.named(stage)[0]) == [stage, "answer", "frame", "frame"]
    seconds = {s.name: (s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9) for s in collector.spans}
    assert seconds["ingest"] == pytest.approx((999.0, 999.5))
    assert seconds["decode"] == pytest.approx((999.5, 999.8))
    assert seconds["answer"] == pytest.approx((1001.0, 1002.0))
    assert seconds["llm"] == pytest.approx((1001.6, 1002.0))
    assert seconds["alert"] == pytest.approx((1002.0, 1002.5))
    assert collector.processes == {"decoder-0"}


def test_windows_take_the_trace_of_their_own_frames(collector, spans):
    decoder, replica = CameraTrace(spans, "gate", 1.0), ReplicaTraces(spans)
    traces = []
    for index in range(8):
        traced = decoder.trace_frame(sample(index, index * SECOND, fresh=index == 0), 4.0, FrameTimes(1, 1, 1))
        traces.append(trace_id(traced.trace.parent))
        replica.frame_received(traced)
    assert traces == [traces[0]] * 4 + [traces[4]] * 4
    assert traces[0] != traces[4]
    first, second = (replica.window_answered([answer(k, (4 * k + 4) * SECOND)])[0] for k in range(2))
    assert [trace_id(first.trace), trace_id(second.trace)] == [traces[0], traces[4]]
    assert replica.window_answered([answer(2, 12 * SECOND)])[0].trace == ""


def test_a_gated_window_has_no_stages(collector, spans):
    decoder, replica = CameraTrace(spans, "gate", 1.0), ReplicaTraces(spans)
    replica.frame_received(decoder.trace_frame(sample(0, 0, fresh=True), 4.0, FrameTimes(1, 1, 1)))
    replica.window_answered([answer(0, 4 * SECOND, gated=True)])
    until(lambda: collector.named("answer"), "the answer's span")
    assert not collector.named("llm")


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_the_ratio_of_strides_is_traced_and_always_the_same_ones(spans, ratio):
    def chosen():
        camera = CameraTrace(spans, "gate", ratio)
        frames = [sample(i, i * SECOND, fresh=i == 0) for i in range(600)]
        return [camera.trace_frame(frame, 2.0, FrameTimes(1, 1, 1)).trace is not None for frame in frames]

    first = chosen()
    assert first == chosen()
    assert first[::2] == first[1::2]  # both frames of a stride or none
    assert abs(sum(first) / len(first) - ratio) <= (0.0 if ratio in (0, 1) else 0.05)


def test_frames_that_are_never_answered_do_not_pile_up(spans):
    decoder, replica = CameraTrace(spans, "gate", 1.0), ReplicaTraces(spans)
    for index in range(3 * FRAMES):
        replica.frame_received(
            decoder.trace_frame(sample(index, index * SECOND, fresh=index == 0), 4.0, FrameTimes(1, 1, 1))
        )
    assert len(replica._frames["gate"]) == FRAMES
    replica.remove_camera("gate")
    assert replica.window_answered([answer(0, 4 * SECOND)])[0].trace == ""


@pytest.mark.parametrize("parent", ["x", "00-" + "0" * 32 + "-0123456789abcdef-01", "00-12-34-01", "\0" * 55])
def test_what_is_no_trace_off_the_wire_makes_no_span(collector, spans, parent):
    assert spans.span("send", 1.0, 2.0, parent) == ""
    assert trace_id(parent) == ""


def test_a_collector_that_is_down_costs_spans_and_no_time():
    spans = make_spans(TracingConfig(endpoint="http://127.0.0.1:9", timeout_s=0.2, queue=64), "p")
    before, began = counted("dropped"), time.monotonic()
    for _ in range(1000):
        assert spans.span("frame", 1.0, 2.0)
    assert time.monotonic() - began < 20.0
    spans.close(timeout_s=5.0)
    assert counted("dropped") - before == 1000


def test_a_slow_collector_gets_the_newest_spans_and_the_rest_is_counted(collector):
    collector.go_on.clear()
    spans = make_spans(TracingConfig(endpoint=collector.endpoint, timeout_s=10, queue=64), "p")
    dropped, exported = counted("dropped"), counted("exported")
    for number in range(500):
        spans.span(str(number), 1.0, 2.0)
    assert counted("dropped") - dropped >= 500 - 64 - 256
    collector.go_on.set()
    until(lambda: counted("dropped") - dropped + counted("exported") - exported == 500, "every span counted")
    assert len(collector.spans) == counted("exported") - exported
    assert collector.spans[-1].name == "499"
    spans.close()


def test_a_queue_smaller_than_a_batch_is_exported_when_it_is_full(collector, monkeypatch):
    """And not only after a while, in which newer spans push out those that wait."""
    monkeypatch.setattr("cluster.tracing.export.LINGER_S", 600.0)
    spans = make_spans(TracingConfig(endpoint=collector.endpoint, timeout_s=10, queue=64), "p")
    for _ in range(64):
        spans.span("frame", 1.0, 2.0)
    until(lambda: len(collector.spans) == 64, "a full queue is exported")
    spans.close()


def test_closing_does_not_wait_for_a_collector_that_hangs(collector):
    collector.go_on.clear()
    spans = make_spans(TracingConfig(endpoint=collector.endpoint, timeout_s=60), "p")
    spans.span("frame", 1.0, 2.0)
    closed = threading.Thread(target=spans.close, args=(0.2,))
    closed.start()
    closed.join(10)
    assert not closed.is_alive()


def test_off_by_default_and_then_nothing_is_loaded():
    assert make_spans(load_config(None, {}).tracing, "p") is None
    code = "import sys, cluster.tracing.spans, cluster.tracing.spans, cluster.tracing.spans; "
    code += "from cluster.tracing import make_spans; from cluster.config.cluster import TracingConfig; "
    code += "make_spans(TracingConfig(), 'p'); print([m for m in sys.modules if 'opentelemetry' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("bad", [{"endpoint": "collector:4317"}, {"ratio": 1.5}, {"queue": 0}, {"endpont": "x"}])
def test_a_wrong_setting_is_refused(bad):
    with pytest.raises(SightlineError):
        load_config(None, {"tracing": bad})
