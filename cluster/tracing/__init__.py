"""Traces of sampled windows from packet to alert, by OpenTelemetry.

A decoder chooses a stride of a camera's time (:mod:`cluster.tracing.spans`), its frames carry the trace to the
replica (:mod:`cluster.tracing.spans`), answers carry it to alerting (:mod:`cluster.tracing.spans`). Without
``tracing.endpoint`` nothing here is made and no library of OpenTelemetry is loaded.
"""

from cluster.tracing.spans import Spans, check_tracing, make_spans

__all__ = ["Spans", "check_tracing", "make_spans"]
