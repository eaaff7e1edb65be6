"""Settings to compare (pruning, refresh, window), and grids of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from cluster.control.ladder import Rung
from cluster.errors import ConfigError
from cluster.vision import make_pruner

Role = Literal["full", "codecsight", "ours", "other"]

# Shares of the overlap to recompute; 0 reuses everything.
BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.4)
STRIDES = (0.1, 0.2, 0.3, 0.5, 1.0)
TAUS = (0.25, 0.5, 1.0, 2.0, 5.0)
MARGINS = (2.0, 3.0, 4.5, 7.0, 10.0, 14.0)
ANCHOR_INTERVALS = (2.0, 4.0, 8.0, 16.0)
WINDOWS = (10.0, 15.0, 20.0)
SIMILARITIES = (0.9, 0.97, 0.99, 0.997)
# Threshold above any share or motion: switches a cue off.
NEVER = 1e9


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Windowing of a stream; lengths and intervals in seconds, ``fps`` in samples per second."""

    window_s: float = 20.0
    stride_s: float = 4.0
    fps: float = 2.0
    anchor_interval_s: float = 8.0

    def check(self) -> None:
        """Raises ``ConfigError`` for invalid values."""
        for name in ("window_s", "stride_s", "fps", "anchor_interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name):g}")
        if self.stride_s > self.window_s:
            raise ConfigError(f"the stride ({self.stride_s:g} s) must not exceed the window ({self.window_s:g} s)")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to answer a stream's windows.

    * ``options``: of the pruner; ``budget``: share of the overlap's tokens to recompute, ``None`` for the refresh
      policy's default
    * ``role``: part in the figures; ``sweep``: curve and x value of a sweep point
    * ``tower``: encode a frame's kept patches once, or again in every window that includes it
    * ``similarity``: threshold to reuse a token of an earlier frame (see ``SimilarityReuse``), ``None`` for never
    * ``profile``: layer shares for the refresh policy ``first_percent``, ``None`` for the model's own
    * ``source``: the original stream, or as in CodecSight's paper: re-encoded as H.264 at the sampling rate, with a GOP
      of the anchor interval
    """

    name: str
    pruner: str
    refresh: str
    budget: float | None = None
    options: tuple[tuple[str, float], ...] = ()
    shape: WindowShape = WindowShape()
    role: Role = "other"
    sweep: tuple[str, float] | None = None
    tower: Literal["once", "every window"] = "once"
    similarity: float | None = None
    profile: tuple[float, ...] | None = None
    source: Literal["camera", "encoded again"] = "camera"

    @property
    def key(self) -> str:
        """Cache identity, all that results depend on: settings with equal keys are computed once."""
        identity: dict[str, Any] = {
            **asdict(self),
            "options": sorted(self.options),
            **dict.fromkeys(("name", "role", "sweep")),
        }
        return json.dumps(identity, separators=(",", ":"))

    @property
    def input(self) -> tuple[float, float, str]:
        """What all settings of one pass over a video share: samples per second, seconds between anchors, source."""
        return self.shape.fps, self.shape.anchor_interval_s, self.source

    def check(self) -> None:
        """Raises ``ConfigError`` for an invalid pruner, option or shape; the engine checks the refresh policy."""
        self.shape.check()
        make_pruner(self.pruner, dict(self.options))


def full_computation(shape: WindowShape) -> Setting:
    """Nothing pruned, nothing reused."""
    return Setting("full", "none", "all", shape=shape, role="full", tower="every window")


def codecsight(shape: WindowShape) -> Setting:
    """CodecSight as published: its pruning rule and threshold, with anchor refresh."""
    return Setting("codecsight", "codecsight", "anchors", shape=shape, role="codecsight")


def ours(shape: WindowShape, budget: float, options: Mapping[str, float] | None = None) -> Setting:
    """Replenishment with budgeted refresh."""
    chosen = tuple(sorted((options or {}).items()))
    varied = "".join(f" {name} {value:g}" for name, value in chosen)
    return Setting(f"ours{varied} budget {budget:g}", "replenish", "budget", budget, chosen, shape, role="ours")


def as_deployed(shape: WindowShape) -> Setting:
    """Replenishment with the default refresh policy of cameras."""
    return Setting("ours as deployed", "replenish", "anchors", shape=shape)


def quick_grid(shape: WindowShape) -> list[Setting]:
    """Full computation, CodecSight, its two components alone, and ours from rare anchors to frequent ones."""
    interval = shape.anchor_interval_s
    rare, *often = (
        replace(shape, anchor_interval_s=each)
        for each in (min(2 * interval, shape.window_s), interval / 2, 3 * interval / 8, interval / 4)
    )
    return [
        full_computation(shape),
        codecsight(shape),
        Setting("codecsight pruning alone", "codecsight", "all", shape=shape),
        Setting("codecsight refresh alone", "none", "anchors", shape=shape),
        *(_with_anchor_interval(ours(rare, budget), rare.anchor_interval_s) for budget in (0.0, 0.1)),
        _with_anchor_interval(as_deployed(rare), rare.anchor_interval_s),
        *(ours(shape, budget) for budget in (0.0, 0.1)),
        *(_with_anchor_interval(ours(cut, 0.1), cut.anchor_interval_s) for cut in often),
    ]


def systems_grid(shape: WindowShape) -> list[Setting]:
    """``quick_grid`` and other systems: embedding caches alone, CodecSight on re-encoded input as in its paper,
    CacheBlend (caches only KV, so every window encodes its frames) and its refresh on cached embeddings, VLCache
    (caches both; with the model's layer profile), Déjà Vu's reuse in the tower, and ablations of ours."""
    published, cut = codecsight(shape), replace(shape, anchor_interval_s=shape.anchor_interval_s / 4)
    uncached = Setting("codecsight pruning, no cache", "codecsight", "all", shape=shape, tower="every window")
    parts: dict[str, dict[str, float]] = {
        "without vectors": {"net_motion": NEVER, "intra": NEVER},
        "without dilation": {"dilation": 0},
        "without exposure": {"exposure": 0},
        "without what stands": {"restate": 0},
    }
    return [
        *quick_grid(shape),
        Setting("full, cached embeddings", "none", "all", shape=shape),
        uncached,
        replace(published, name="codecsight encoded again", source="encoded again"),
        *(Setting(f"déjà vu {share:g}", "none", "all", shape=shape, similarity=share) for share in SIMILARITIES),
        Setting("cacheblend", "none", "topk_deviation", shape=shape, tower="every window"),
        Setting("cacheblend, cached embeddings", "none", "topk_deviation", shape=shape),
        Setting("vlcache", "none", "first_percent", shape=shape),
        *(replace(ours(cut, 0.1, options), name=f"ours {name}", role="other") for name, options in parts.items()),
        Setting("ours without anchors' refresh", "replenish", "none", shape=cut),
    ]


def standard_grid(shape: WindowShape) -> list[Setting]:
    """``quick_grid``, the frontier of ours, every refresh policy at one budget, and the sweeps."""
    interval = shape.anchor_interval_s
    frontier = [
        _with_anchor_interval(ours(replace(shape, anchor_interval_s=every), budget, options), every)
        for every in (interval, 2 * interval)
        for options in ({"margin": 3.0}, {}, {"margin": 7.0}, {"margin": 10.0})
        for budget in (0.0, 0.1, 0.4)
    ]
    policies = [
        Setting(_product_name("replenish", refresh, budget), "replenish", refresh, budget, shape=shape)
        for refresh, budget in (("all", None), ("anchors", None), *((name, 0.1) for name in _budgeted_policies()))
    ]
    return [*quick_grid(shape), *frontier, *policies, *sweep_settings(shape)]


def full_grid(shape: WindowShape) -> list[Setting]:
    """``standard_grid`` and every pruner with every refresh policy at every budget."""
    from cluster.registry import pruners

    product = [
        Setting(_product_name(pruner, refresh, budget), pruner, refresh, budget, shape=shape)
        for pruner in pruners.names()
        for refresh, budget in (
            ("all", None),
            ("none", None),
            *((name, share) for name in _budgeted_policies() for share in (None, *BUDGETS[1:])),
        )
    ]
    return [*standard_grid(shape), *product]


def sweep_settings(shape: WindowShape) -> list[Setting]:
    """Curves of the paper's figures 16 to 18, and over window, budget and the GOP of the re-encoded video (also its
    anchor interval), for CodecSight, ours and (over stride and window) full computation."""
    found: list[Setting] = []
    for share in STRIDES:
        cut = replace(shape, stride_s=max(share * shape.window_s, 1.0))
        for base in (full_computation(cut), codecsight(cut), ours(cut, 0.1)):
            found.append(_sweep_point(base, "stride", share))
    for tau in TAUS:
        published = replace(codecsight(shape), name=f"codecsight tau {tau:g}", options=(("tau", tau),))
        found.append(_sweep_point(published, "threshold", tau))
    for margin in MARGINS:
        found.append(_sweep_point(ours(shape, 0.1, {"margin": margin}), "margin", margin))
    for interval in ANCHOR_INTERVALS:
        cut = replace(shape, anchor_interval_s=interval)
        for base in (codecsight(cut), ours(cut, 0.1)):
            found.append(_sweep_point(base, "anchor interval", interval))
            again = replace(base, name=f"{base.name} encoded again", source="encoded again")
            found.append(_sweep_point(again, "camera GOP", interval))
    for window in WINDOWS:
        cut = replace(shape, window_s=window, stride_s=max(0.2 * window, 1.0))
        for base in (full_computation(cut), codecsight(cut), ours(cut, 0.1)):
            found.append(_sweep_point(base, "window", window))
    return found + [_sweep_point(ours(shape, share), "budget", share) for share in BUDGETS]


# Cumulative: each rung adds to the changes of those above.
LADDER = (
    Rung("full"),
    Rung("prune", prune=1.5),
    Rung("refresh", prune=1.5, refresh_budget=0.0),
    Rung("stride", prune=1.5, refresh_budget=0.0, stride=2.0),
    Rung("fps", prune=1.5, refresh_budget=0.0, stride=2.0, fps=0.5),
)


def ladder_grid(shape: WindowShape) -> list[Setting]:
    """Full computation and every answering rung with the default refresh policy: the input of ``sightline eval
    ladder``."""
    margin = float(make_pruner("replenish", {}).margin)  # type: ignore[attr-defined]
    found = [full_computation(shape)]
    for rung in LADDER:
        cut = replace(shape, stride_s=rung.stride * shape.stride_s, fps=rung.fps * shape.fps)
        options = () if rung.prune == 1 else (("margin", rung.prune * margin),)
        deployed = as_deployed(cut)
        found.append(replace(deployed, name=f"ladder {rung.name}", budget=rung.refresh_budget, options=options))
    return found


GRIDS: dict[str, Callable[[WindowShape], list[Setting]]] = {
    # To compare models or precisions.
    "basic": lambda shape: [full_computation(shape), ours(shape, 0.1)],
    "quick": quick_grid,
    "systems": systems_grid,
    "sweeps": lambda shape: [*quick_grid(shape), *sweep_settings(shape)],
    "standard": standard_grid,
    "full": full_grid,
    "ladder": ladder_grid,
}


def make_grid(name: str, shape: WindowShape) -> list[Setting]:
    """Validated settings of a grid, full computation first.

    A setting that is also a sweep point appears once for the table and once per sweep. Raises ``ConfigError``: unknown
    grid, or an invalid shape.
    """
    if name not in GRIDS:
        raise ConfigError(f"unknown settings {name!r}; there are: {', '.join(GRIDS)}")
    shape.check()
    settings: dict[tuple[str, tuple[str, float] | None], Setting] = {}
    for setting in GRIDS[name](shape):
        setting.check()
        settings.setdefault((setting.key, setting.sweep), setting)
    return list(settings.values())


def _with_anchor_interval(setting: Setting, interval: float) -> Setting:
    return replace(setting, name=f"{setting.name}, anchors {interval:g} s")


_SHAPES = ("stride", "anchor interval", "camera GOP", "window")
"""Curves whose settings do not show the x value in their own name."""


def _sweep_point(base: Setting, curve: str, place: float) -> Setting:
    varied = f", {curve} {place:g}" if curve in _SHAPES else f" ({curve} curve)"
    return replace(base, name=base.name + varied, sweep=(curve, place))


def _budgeted_policies() -> list[str]:
    """Names of refresh policies that take a budget."""
    from cluster.registry import refresh_policies

    return [name for name in refresh_policies.names() if refresh_policies.get(name).budgeted]


def _product_name(pruner: str, refresh: str, budget: float | None) -> str:
    return f"{pruner} + {refresh}" + ("" if budget is None else f" {budget:g}")
