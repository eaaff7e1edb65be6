"""The report of a run: a typed model, its JSON, and one self-contained HTML page."""

from cluster.report.model import CameraRecord, ComparedWindow, Comparison, Cost, LiveWindow, Report, SampleFrame
from cluster.report.render import render, write_report

__all__ = [
    "CameraRecord",
    "ComparedWindow",
    "Comparison",
    "Cost",
    "LiveWindow",
    "Report",
    "SampleFrame",
    "render",
    "write_report",
]
