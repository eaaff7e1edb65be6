"""A cost model from a GPU's peak numbers, for machines that are not at hand: Qwen2.5-VL-7B in BF16.

The shapes are those of its published configuration. Peak numbers are those that ``cluster.lab.planning`` has from data
sheets; its shares of peak are not taken, since they were calibrated on one stream's ten-token frames, which fill a
hundredth of a GPU. Steps of windows hold thousands of rows, and there serving engines reach 35 to 65 % of the dense
BF16 peak: ``LINEAR`` is taken from the middle, ``ATTENTION`` (FlashAttention-2 forward with head size 128 reaches 50 to
70 % on an A100, and about 35 % on an H100, Dao 2023; less on short ragged runs) likewise.

One check is published: NVIDIA's VSS answers 51 streams of ten-second chunks of 80 frames at 448 x 448 on an H100, in
FP8. That is 51 x 1,024 visual tokens a second, all encoded and prefilled. ``vss_streams`` of these costs is 22 in BF16,
44 at FP8's twice the peak: 14 % fewer.
"""

from __future__ import annotations

from cluster.control.costs import CostModel, WindowWork
from cluster.lab.planning.platforms import platforms

PLATFORMS = ("a100", "h100", "h200")

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 28, 3584, 28, 4, 128, 18944, 152064
TOWER_LAYERS, TOWER_FULL_LAYERS, TOWER_WIDTH, TOWER_MLP, MERGE, TOWER_WINDOW = 32, 4, 1280, 3420, 4, 64
"""Of the published config.json; the tower's attention is over 64 patches (112 x 112 pixels) in all but four layers."""

LINEAR, ATTENTION, MEMORY = 0.50, 0.30, 0.80
"""Shares of peak in steps of thousands of rows; of bandwidth, ``cluster.lab.planning``'s."""

LAUNCH_S = 25e-6
"""Of one layer's kernels and their host work, once per step and layer."""

WINDOW_S = 1.0e-3
"""Planning, rotating and reading one window out, as on a CPU core; it runs beside no kernel."""

PATCHES = 1024
"""Patches of a picture of 448 x 448, over which the tower's four full layers attend."""

ERROR = 0.35
"""Half the span of published shares of peak; not a measured error."""


def platform_costs(name: str) -> CostModel:
    """Seconds per step, window and token on one GPU.

    Raises:
        ConfigError: no such platform.
    """
    platform = platforms.get(name)
    linear, attention = platform.flops * LINEAR, platform.flops * ATTENTION
    layer = WIDTH * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * MLP
    tower = TOWER_LAYERS * (4 * TOWER_WIDTH**2 + 3 * TOWER_WIDTH * TOWER_MLP)
    merger = (MERGE * TOWER_WIDTH) ** 2 + MERGE * TOWER_WIDTH * WIDTH
    seen = TOWER_FULL_LAYERS * PATCHES + (TOWER_LAYERS - TOWER_FULL_LAYERS) * TOWER_WINDOW
    weights = 2.0 * (LAYERS * layer + WIDTH * VOCABULARY + tower + merger)
    source = (
        f"computed, not measured: {MODEL} in BF16 at {LINEAR:.0%} of the {platform.title}'s peak in products and "
        f"{ATTENTION:.0%} in attention ({platform.source}); sightline bench cost --platform {name}"
    )
    return CostModel(
        model=MODEL,
        device=platform.title,
        source=source,
        # Weights are read once per step; with thousands of rows the products hide it, so the launches are what is left.
        step_s=LAUNCH_S * (LAYERS + TOWER_LAYERS) + weights / (platform.memory * MEMORY),
        window_s=WINDOW_S,
        encoded_s=(2.0 * (MERGE * tower + merger)) / linear + 4.0 * MERGE * TOWER_WIDTH * seen / attention,
        computed_s=2.0 * LAYERS * layer / linear,
        attended_s=4.0 * LAYERS * HEADS * HEAD_DIM / attention,
        spread=0.10,
        error=ERROR,
    )


def vss_streams(costs: CostModel) -> float:
    """Streams of NVIDIA's published case that these costs carry: a chunk of 80 frames at 448 x 448 (256 tokens for two
    frames) every ten seconds, encoded and computed in full with a question of 40 tokens."""
    tokens = 80 / 2 * 256
    work = WindowWork.laid_out(kept=tokens, new=tokens, refreshed=0.0, query=40.0, encoded=tokens)
    return 10.0 / (costs.window_seconds(work) + costs.step_s / 8)
