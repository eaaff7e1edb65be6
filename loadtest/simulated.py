"""What a simulation of the same cluster needs to know of a load test: the ``city`` part of a run in its JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from cluster.config import SightlineConfig
from cluster.control.costs import load
from cluster.control.demand import Demand
from cluster.lab.bench.window_accounting import Slot, within
from loadtest.fleet import Camera
from loadtest.profile import Profile, kind_at
from loadtest.result import Measurement


def city(
    config: SightlineConfig,
    profile: Profile,
    cameras: Sequence[Camera],
    found: Measurement,
    *,
    began_s: float,
    temporal: int,
    query_tokens: int,
) -> dict[str, Any]:
    """Cameras in groups by what they send, each with the demand that was measured of it, and what was measured of all.

    ``config``: of the cluster, whose cost model goes along; ``profile``: what ``cameras``, all of the fleet, did;
    ``began_s``: when the test began, of the generator's clock; ``temporal``: samples of one frame of the model;
    ``query_tokens``: of one question.
    """
    from_s, until_s = began_s + found.from_s, began_s + found.until_s
    groups: dict[str, list[list[Slot]]] = {}
    phases: dict[str, list[float]] = {}
    for camera in cameras:
        kind = kind_at(profile, camera.script.rank, found.from_s)
        groups.setdefault(kind, []).append(within(camera.ledger.slots(until_s), from_s, until_s))
        phases.setdefault(kind, []).append(camera.script.phase)
    seconds = max(1e-9, found.seconds)
    computed = found.measured - found.missing - found.gated
    return {
        "cameras": [_group(config, kind, slots, temporal, query_tokens) for kind, slots in groups.items()],
        "replicas": config.cluster.replicas,
        "seconds": found.seconds,
        "warmup_s": found.from_s,
        # Of few cameras it is their own phases that decide who waits for whom. Those of cameras that come and go, or
        # that begin anew, are as good as drawn.
        "phases": profile.phases if profile.churn_per_min or profile.storm else [*chain(*phases.values())],
        "max_batch": config.cluster.max_batch,
        "per_stream": config.cluster.window_queue,
        "ladder": any(rung != "full" for rung in found.rungs),
        "cost": asdict(load(config.simulated.costs)) if config.simulated.costs else None,
        "measured": {
            "lag_p50_s": found.replica.p50,
            "lag_p99_s": found.replica.p99,
            "answered_per_s": computed / seconds,
            "gated_per_s": found.gated / seconds,
            "dropped_per_s": sum(found.lost.values()) / seconds,
        },
    }


def _group(
    config: SightlineConfig, kind: str, cameras: Sequence[Sequence[Slot]], temporal: int, query_tokens: int
) -> dict[str, Any]:
    seen = [slot for slots in cameras for slot in slots if slot.tokens is not None]
    window, sampling = config.window, config.sampling
    frames = max(1.0, window.length_s * sampling.fps / temporal)
    whole = [slot.tokens for slot in seen if slot.tokens is not None]
    full, kept = (sum(getattr(tokens, name) for tokens in whole) for name in ("full", "kept"))
    # Anchors are complete whatever the pruner does; the rest of the frames is what the share is of.
    anchors = min(1.0, temporal / (sampling.fps * sampling.anchor_interval_s))
    share = kept / full if full else 1.0
    demand = Demand(
        camera=kind,
        window_s=window.length_s,
        stride_s=window.stride_s,
        fps=sampling.fps,
        frame_tokens=round(full / max(1, len(whole)) / frames),
        temporal=temporal,
        questions=max(1, len(config.questions)),
        query_tokens=query_tokens,
        kept=min(1.0, max(0.0, (share - anchors) / (1 - anchors))) if anchors < 1 else 1.0,
        busy=sum(not slot.gated for slot in seen) / max(1, len(seen)),
        anchor_interval_s=sampling.anchor_interval_s,
        refresh_budget=window.refresh_budget,
    )
    fields = asdict(demand)
    del fields["camera"]
    return {"count": len(cameras), "kind": kind, **fields}
