"""OpenTelemetry traces of sampled windows, from packet to alert.

A decoder samples strides of a camera's time; frames carry the trace to the replica, and answers carry it to alerting
(:mod:`cluster.tracing.spans`). Without ``tracing.endpoint`` nothing is created and no OpenTelemetry library is
imported.
"""

from cluster.tracing.spans import Spans, check_tracing, make_spans

__all__ = ["Spans", "check_tracing", "make_spans"]
