"""The report of a run: a typed model, its JSON, and one self-contained HTML page."""

from cluster.report.model import CameraRecord, ComparedWindow, Comparison, Cost, LiveWindow, Report, SampleFrame
from cluster.report.render import render, write_report
from cluster.report.truth import Alert, EventInterval, Tally

__all__ = [
    "Alert",
    "CameraRecord",
    "ComparedWindow",
    "Comparison",
    "Cost",
    "EventInterval",
    "LiveWindow",
    "Report",
    "SampleFrame",
    "Tally",
    "render",
    "write_report",
]
