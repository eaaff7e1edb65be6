"""The report of a run: a typed model, its JSON, and one self-contained HTML page."""

from cluster.lab.report.model import CameraRecord, ComparedWindow, Comparison, Cost, LiveWindow, Report, SampleFrame
from cluster.lab.report.render import render, write_report
from cluster.lab.report.truth import Alert, EventInterval, Tally

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
