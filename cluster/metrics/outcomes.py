"""What becomes of windows and of free questions."""

from __future__ import annotations

from typing import Literal

from cluster.metrics.families import ask_read_bytes, ask_seconds, asks, stage_seconds, tokens, windows
from cluster.types import Answer, AskResult

WindowResult = Literal["done", "gated", "late", "dropped", "lost"]
Stage = Literal["queue", "vision", "plan", "llm", "total"]


def record_window(answer: Answer, *, late: bool = False) -> None:
    """Count one answered window: its result, tokens and stage latencies. Call once per window, not per question."""
    windows.labels("gated" if answer.gated else "done", "").inc()
    if late:
        windows.labels("late", "").inc()
    for kind in ("full", "kept", "refreshed", "reused", "new", "query", "encoded"):
        tokens.labels(kind).inc(getattr(answer.tokens, kind))
    timing = answer.timing
    if not answer.gated:
        for stage in ("queue", "vision", "plan", "llm"):
            stage_seconds.labels(stage).observe(getattr(timing, f"{stage}_s"))
    stage_seconds.labels("total").observe(timing.latency_s)


def drop_window(reason: str, count: int = 1) -> None:
    """Count windows that were dropped on purpose."""
    windows.labels("dropped", reason).inc(count)


def lose_window(count: int = 1) -> None:
    """Count windows that went down with a process."""
    windows.labels("lost", "").inc(count)


def record_ask(result: AskResult) -> None:
    """Count one answered free question."""
    asks.labels("answered").inc()
    ask_seconds.labels("first_token").observe(result.first_token_s)
    ask_seconds.labels("total").observe(result.total_s)
    ask_read_bytes.inc(result.bytes_read)
