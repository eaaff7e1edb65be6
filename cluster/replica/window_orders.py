"""Scheduling policies of the window queue: when a camera's next window is due; earliest first within a priority."""


class Deadline:
    """Earliest deadline first: a window is due one stride after its arrival.

    A camera that sends faster than declared is due no sooner than a stride after its last window was, so that it takes
    nothing from others (a constant bandwidth server: Abeni and Buttazzo, RTSS 1998).
    """

    @staticmethod
    def due_s(arrived_s: float, stride_s: float, served_s: float) -> float:
        if served_s <= arrived_s:
            return arrived_s + stride_s
        return min(served_s, arrived_s + stride_s) + stride_s


class Arrival:
    """First come, first served: the baseline."""

    @staticmethod
    def due_s(arrived_s: float, stride_s: float, served_s: float) -> float:  # noqa: ARG004
        return arrived_s
