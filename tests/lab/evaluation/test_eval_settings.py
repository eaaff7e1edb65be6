"""The grids hold what the issue's tables and curves need, and nothing twice."""

from dataclasses import replace

import pytest

from cluster.config.camera import PruningConfig, WindowConfig
from cluster.errors import ConfigError
from cluster.lab.evaluation.settings import (
    GRIDS,
    Setting,
    WindowShape,
    as_deployed,
    codecsight,
    full_computation,
    make_grid,
    ours,
)
from cluster.registry import pruners, refresh_policies
from cluster.vision.pruners.baselines import CodecSight

SHAPE = WindowShape()


@pytest.mark.parametrize("name", [name for name in GRIDS if name not in ("basic", "ladder")])
def test_every_grid_of_comparisons_has_full_the_published_rule_and_ours(name):
    settings = make_grid(name, SHAPE)
    assert settings[0] == full_computation(SHAPE)
    roles = [setting.role for setting in settings if setting.sweep is None]
    assert roles.count("full") == 1
    assert roles.count("codecsight") == (2 if name == "systems" else 1)
    assert roles.count("ours") >= 3
    names = [setting.name for setting in settings]
    assert len(set(names)) == len(names)
    assert len({(s.key, s.sweep) for s in settings}) == len(settings)


def test_what_is_measured_as_deployed_is_what_cameras_do_by_default():
    setting, pruning, window = as_deployed(SHAPE), PruningConfig(), WindowConfig()
    assert (setting.pruner, dict(setting.options)) == (pruning.policy, pruning.options)
    assert (setting.refresh, setting.budget) == (window.refresh, window.refresh_budget)


def test_the_basic_grid_is_full_and_ours():
    assert [setting.role for setting in make_grid("basic", SHAPE)] == ["full", "ours"]


def test_the_published_rule_is_as_published():
    setting = codecsight(SHAPE)
    assert (setting.pruner, setting.refresh, setting.budget, setting.options) == ("codecsight", "anchors", None, ())
    assert CodecSight().tau == 0.25


def test_the_full_grid_is_every_policy_at_every_budget():
    found = {(s.pruner, s.refresh, s.budget) for s in make_grid("full", SHAPE) if s.shape == SHAPE and not s.options}
    for pruner in pruners.names():
        for refresh in refresh_policies.names():
            budgets = (None, 0.05, 0.1, 0.2, 0.4) if refresh_policies.get(refresh).budgeted else (None,)
            assert {(pruner, refresh, budget) for budget in budgets} <= found


def test_sweeps_over_stride_threshold_and_anchor_interval():
    curves = {}
    for setting in make_grid("standard", SHAPE):
        if setting.sweep:
            curves.setdefault(setting.sweep[0], {}).setdefault(setting.role, []).append(setting)
    assert {name: sorted(roles) for name, roles in curves.items()} == {
        "stride": ["codecsight", "full", "ours"],
        "threshold": ["codecsight"],
        "margin": ["ours"],
        "anchor interval": ["codecsight", "ours"],
        "camera GOP": ["codecsight", "ours"],
        "window": ["codecsight", "full", "ours"],
        "budget": ["ours"],
    }
    assert [s.shape.stride_s for s in curves["stride"]["full"]] == [2, 4, 6, 10, 20]
    assert [dict(s.options)["tau"] for s in curves["threshold"]["codecsight"]] == [0.25, 0.5, 1, 2, 5]
    assert [s.shape.anchor_interval_s for s in curves["anchor interval"]["ours"]] == [2, 4, 8, 16]
    assert [s.input for s in curves["camera GOP"]["codecsight"]] == [(2.0, s, "encoded again") for s in (2, 4, 8, 16)]
    assert [(s.shape.window_s, s.shape.stride_s) for s in curves["window"]["full"]] == [(10, 2), (15, 3), (20, 4)]
    assert [s.budget for s in curves["budget"]["ours"]] == [0, 0.05, 0.1, 0.2, 0.4]


def test_a_key_is_what_results_depend_on_and_not_the_name():
    setting = ours(SHAPE, 0.1)
    assert replace(setting, name="other", sweep=("stride", 0.2), role="other").key == setting.key
    changed = [
        replace(setting, budget=0.2),
        replace(setting, options=(("margin", 3.0),)),
        replace(setting, pruner="none"),
        replace(setting, refresh="random"),
        replace(setting, shape=replace(SHAPE, fps=1.0)),
        replace(setting, shape=replace(SHAPE, anchor_interval_s=4.0)),
        replace(setting, tower="every window"),
        replace(setting, source="encoded again"),
        replace(setting, similarity=0.9),
        replace(setting, profile=(1.0, 0.0)),
    ]
    assert len({each.key for each in changed} | {setting.key}) == len(changed) + 1


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (replace(SHAPE, stride_s=21), "must not exceed the window"),
        (replace(SHAPE, fps=0), "fps must be above 0"),
        (replace(SHAPE, anchor_interval_s=-1), "anchor_interval_s must be above 0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(shape, reason):
    with pytest.raises(ConfigError, match=reason):
        make_grid("quick", shape)


def test_unknown_names_are_refused():
    with pytest.raises(
        ConfigError, match="unknown settings 'slow'; there are: basic, quick, systems, sweeps, standard, full"
    ):
        make_grid("slow", SHAPE)
    with pytest.raises(ConfigError, match="no parameter 'taw'"):
        Setting("x", "codecsight", "anchors", options=(("taw", 1.0),)).check()


def test_other_systems_are_in_the_table():
    found = {setting.name: setting for setting in make_grid("systems", SHAPE)}
    assert found["full, cached embeddings"].tower == found["codecsight pruning alone"].tower == "once"
    assert found["full"].tower == found["codecsight pruning, no cache"].tower == "every window"
    assert found["codecsight encoded again"].source == "encoded again"
    assert {found[name].refresh for name in ("cacheblend", "vlcache")} == {"topk_deviation", "first_percent"}
    # CacheBlend keeps KV, VLCache embeddings too.
    assert (found["cacheblend"].tower, found["vlcache"].tower) == ("every window", "once")
    assert found["cacheblend, cached embeddings"].key == replace(found["cacheblend"], tower="once").key
    assert found["déjà vu 0.9"].similarity == 0.9
    parts = {"without vectors", "without dilation", "without exposure", "without anchors' refresh"}
    assert {f"ours {part}" for part in parts} <= found.keys()
