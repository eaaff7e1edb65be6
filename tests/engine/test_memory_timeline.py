"""Places of remembered frames: by hand, by brute force, and against cameras that pause for as long as is left."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.native import NativeEngine
from cluster.engine.native.ask_run import NativeAskRun
from cluster.engine.native.timeline import Timeline, frames_that_fit, shorten_gaps
from cluster.lab.bench.soak import SyntheticCamera
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.base import FrameSpan, VisionLanguageModel
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS
from cluster.types import MICROSECONDS, AskSpec, MemorySpec, Question, StreamSpec

TEXT = "Is anyone climbing the fence?"
HOURS_S = 9000


@pytest.fixture(scope="module", params=[name for name in PRESETS if name.startswith("tiny-")])
def family(request: Any) -> VisionLanguageModel:
    torch.set_num_threads(1)
    return load_model(request.param)


@pytest.fixture
def model(family: VisionLanguageModel) -> Any:
    before = family.settings
    yield family
    family.settings = before


def line(times_s: list[float], opened_s: float, most: int, frame_s: float = 1.0) -> Timeline:
    times = [round(each * MICROSECONDS) for each in times_s]
    numbers = [10 * number for number in range(len(times))]
    return Timeline.of(numbers, times, round(opened_s * MICROSECONDS), frame_s=frame_s, most=most)


@pytest.mark.parametrize(
    ("most", "time_s", "slot", "length"),
    [
        # All fits: as it was.
        (3700, [0, 1, 2, 3602, 3603], [0, 1, 2, 3602, 3603], 3605),
        # The hour gets what 1 + 1 + 1 + 2 leave of 12.
        (12, [0, 1, 2, 9, 10], [0, 1, 2, 9, 10], 12),
        # The hour is no longer than the pause before the window.
        (7, [0, 1, 2, 4, 5], [0, 1, 2, 4, 5], 7),
        # Side by side.
        (5, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], 5),
        # Five frames on three places.
        (3, [0, 0.6, 1.2, 1.8, 2.4], [0, 0, 1, 1, 2], 3),
    ],
)
def test_long_gaps_get_what_the_short_ones_leave(
    most: int, time_s: list[float], slot: list[int], length: float
) -> None:
    found = line([7, 8, 9, 3609, 3610], 3612, most)
    assert found.time_s.tolist() == pytest.approx(time_s)
    assert found.slot.tolist() == slot
    assert found.length_s == pytest.approx(length)
    assert found.slots == length
    placed, slots = found.places(torch.tensor([30, 0, 40, 30]))
    assert placed.tolist() == pytest.approx([time_s[3], 0, time_s[4], time_s[3]])
    assert slots.tolist() == [slot[3], 0, slot[4], slot[3]]


def test_frames_closer_than_usual_take_a_slot_each() -> None:
    found = line([0, 0.3, 0.6, 1.6, 2.61], 3.6, 100)
    assert found.slot.tolist() == [0, 1, 2, 3, 4]
    assert found.time_s.tolist() == [0, 0.3, 0.6, 1.6, 2.61]


def test_a_memory_of_nothing_has_no_length() -> None:
    found = line([], 5, 10)
    assert (len(found.slot), found.length_s, found.slots) == (0, 0.0, 0)


@given(gaps=st.lists(st.floats(0.01, 1e5), min_size=1, max_size=30), most=st.floats(0.5, 1e5))
def test_the_limit_is_the_largest_that_fits(gaps: list[float], most: float) -> None:
    low, high = 0.0, max(gaps)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(gap, middle) for gap in gaps) <= most else (low, middle)
    limit = high if sum(gaps) <= most + 1e-6 else low
    found = shorten_gaps(torch.tensor(gaps, dtype=torch.float64), most)
    assert found.tolist() == pytest.approx([min(gap, limit) for gap in gaps], rel=1e-6, abs=1e-6)


@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), most=st.integers(1, 400), busy=st.floats(0.2, 1.0))
def test_order_is_kept_and_no_gap_grows(
    family: VisionLanguageModel, seed: int, count: int, most: int, busy: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    quiet = torch.randint(2, 20000, (count,), generator=rng)
    gap = torch.where(torch.rand(count, generator=rng) < busy, 1, quiet)
    times = [0, *gap.cumsum(0).tolist()]
    found = line([float(each) for each in times[:-1]], float(times[-1]), most)
    placed = torch.cat([found.time_s, torch.tensor([found.length_s], dtype=torch.float64)])
    slots = torch.cat([found.slot, torch.tensor([found.slots])])
    assert bool((slots.diff() <= gap).all())
    assert bool((placed.diff() <= gap + 1e-9).all())
    side = family.geometry.square or 112
    grid = family.geometry.grid(side, side)

    def first_of(time_s: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        cells = torch.zeros(len(slot), 2, dtype=torch.int64)
        return family.token_positions(0, time_s, slot, cells, grid)[0]

    positions = first_of(placed, slots)
    true = first_of(torch.tensor(times, dtype=torch.float64), torch.tensor(times))
    (farthest,) = first_of(torch.tensor([most], dtype=torch.float64), torch.tensor([most])).tolist()
    assert int(positions[-1] - positions[0]) <= farthest
    assert bool((positions.diff() >= (1 if count <= most else 0)).all())
    if times[-1] <= most:
        assert torch.equal(positions, true)
    if count > most:
        # Evenly: no place has more frames than another, but for one.
        shared = torch.bincount(found.slot, minlength=most)
        assert int(shared.max()) - int(shared.min()) <= 1


def test_room_is_what_window_and_text_leave(model: VisionLanguageModel) -> None:
    side = model.geometry.square or 112
    grid, frame_s, text = model.geometry.grid(side, side), model.geometry.temporal / 2, 100
    cells = torch.zeros(0, 2, dtype=torch.int64)
    window = [FrameSpan(number * frame_s, number, cells, grid) for number in range(4)]
    taken = model.window_positions(20, window).next + text
    most = frames_that_fit(model, taken, frame_s, grid)
    last = [
        model.window_positions(20, [FrameSpan((count + 3) * frame_s, count + 3, cells, grid)]).next + text
        for count in (most, most + 1)
    ]
    assert last[0] <= 32768 < last[1]
    model.settings = dataclasses.replace(model.settings, memory_s=40.0)
    assert frames_that_fit(model, taken, frame_s, grid) == 40 / frame_s
    assert frames_that_fit(model, 40000, frame_s, grid) == 1


def asked(model: VisionLanguageModel, pause_s: int, memory_s: float | None = None) -> tuple[NativeAskRun, float]:
    """A question about a camera that paused, and the seconds of the past before its window."""
    model.settings = dataclasses.replace(model.settings, memory_s=memory_s)
    engine = NativeEngine(model, memories=MemoryBank(TierStack([Arena(64 * 2**20)])), max_new_tokens=4)
    memory = MemorySpec(
        compressor="none",
        block_frames=3,
        kv_dtype="model",
        retriever="top_k",
        retriever_options={"share": 1.0},
        organiser="resv",
    )
    # Patient, as if read from a file: no time passes here.
    spec = StreamSpec("cam", (Question("q", TEXT),), 8.0, 4.0, static_gate=False, memory=memory, patient=True)
    engine.admit(spec)
    size = 112 if engine.geometry.square is None else engine.geometry.square
    camera = SyntheticCamera("cam", engine.geometry, width=size, height=size, anchor_every=4)
    frame_s = model.geometry.temporal / 2
    for number in range(round(32 / frame_s)):
        sample = camera.sample(number)
        if number * frame_s >= 16:
            # Fresh, so that no window sees the length of the pause.
            fresh = number * frame_s == 16
            sample = dataclasses.replace(sample, pts=sample.pts + pause_s * MICROSECONDS, fresh=fresh)
        for request in engine.push(sample):
            engine.step([request])
        assert engine.memories is not None
        assert engine.memories.wait_written()
    run = engine.ask(AskSpec("cam", TEXT))
    run.step()
    opened = next(frame.pts for frame in engine._streams["cam"].frames)
    oldest = engine.memories.get_memory("cam")[0].oldest  # type: ignore[union-attr]
    assert oldest is not None
    return run, (opened - oldest) / MICROSECONDS


def test_a_camera_that_paused_for_hours_is_one_that_paused_for_what_is_left(model: VisionLanguageModel) -> None:
    short, length_s = asked(model, 20)
    # Qwen3-VL's clock shows the same after this time.
    long, found_s = asked(model, 20 + HOURS_S, length_s)
    assert found_s == length_s + HOURS_S
    assert torch.allclose(short.logits, long.logits, atol=1e-4)
    # Positions matter: with hardly any room it is another prompt.
    crowded, _ = asked(model, 20 + HOURS_S, 2.0)
    assert not torch.allclose(short.logits, crowded.logits, atol=1e-4)
