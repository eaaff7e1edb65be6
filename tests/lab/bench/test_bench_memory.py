"""The parts of the memory bench on short clips: what they count, not how fast it is."""

import argparse
import json
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kv_parts import serving

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SightlineError
from cluster.lab.bench.harness import against_goals, main, timed_calls
from cluster.lab.bench.memory import GOALS, PARTS, add_arguments, cap, evidence
from cluster.lab.bench.memory.compressors import COMPARED, object_cells
from cluster.lab.bench.memory.footage import Footage, Listener, ListeningBank, Watched, made_chunks, model_chunks
from cluster.lab.bench.memory.frames import WatchedEngine, best_clusters
from cluster.lab.bench.memory.published import published_frames
from cluster.lab.bench.memory.retrieval import JoinedHeads, _ask_in_turns, remembered
from cluster.lab.bench.node import FINGERPRINT
from cluster.lab.bench.soak import SyntheticCamera
from cluster.lab.evaluation.metrics import estimate
from cluster.lab.scenes.street_clips import make_clip
from cluster.lab.scenes.truth import TrueObject, TrueSample
from cluster.memory.bank import MemoryBank
from cluster.memory.organise.table import ClusterTable, NewTokens
from cluster.memory.retrieve import HeadRetriever
from cluster.memory.retrieve.nearest import TopK
from cluster.memory.retrieve.rekv import ReKV
from cluster.memory.stream import StreamMemory
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.remote import RemoteTier
from cluster.memory.tiers.stack import TierStack
from cluster.models.loading import load_model
from cluster.registry import compressors, organisers, retrievers
from cluster.types import MemorySpec, Question, StreamSpec

OPTIONS = ["--model", "tiny-qwen2_5_vl", "--bench-model", "tiny-qwen2_5_vl", "--window", "4", "--stride", "2"]
OPTIONS += ["--threads", "1", "--repeats", "1"]
# A model that takes more pixels, so that a part of a frame's tokens is more than one.
WIDER = ("--model", "demo-qwen2_5_vl")
# A drawn camera of fewer pixels.
SMALL = replace(evidence.CAMERA, width=224, height=128)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("clip") / "street.mp4"
    make_clip("street", path, seconds=26, size=(256, 160))
    return path


def measured(clip: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    body = tmp_path / "memory.json"
    assert main(["memory", "--clips", str(clip), "--seconds", "26", *OPTIONS, *options, "--json", str(body)]) == 0
    found: dict[str, Any] = json.loads(body.read_text())
    assert {row["part"] for row in found["rows"]} == {row["part"] for row in found["goals"]}
    return found


def test_every_compressor_is_held_to_the_cap_and_timed(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.lab.bench.memory.compressors.SHARES", (8,))
    found = measured(clip, tmp_path, "--part", "compress", "--caps", "24", "--seconds", "18")
    coverage = measured(clip, tmp_path, "--part", "coverage", "--seconds", "18", *WIDER)
    assert coverage["figures"]["cap_violations"] == 0
    rows = {"compress": found["rows"], "coverage": coverage["rows"]}
    names = set(compressors.names()) - {"none"}
    assert {row["compressor"] for row in rows["coverage"]} == names
    assert {row["compressor"] for row in rows["compress"]} == names | {"production"}
    assert all(row["compressions"] > 0 for part in rows.values() for row in part)
    for name in ("production", "novelty", "cords", "infinipot_v"):
        shares = [row["share_of_encode"] for row in rows["compress"] if row["compressor"] == name]
        assert found["figures"][f"compress_share_{name}"] == max(shares) > 0
    for row in rows["coverage"]:
        assert 0 < row["held"] <= row["tokens"] // int(row["cap"][2:])
        for space in ("key", "value", "joint"):
            assert 0 <= row[f"coverage_{space}"] <= 1
    # What never compresses is not the cheapest.
    monkeypatch.setattr("cluster.memory.stream.evict", lambda _memory, new: new)
    with pytest.raises(SightlineError, match="production compressed nothing of street at 24 tokens"):
        measured(clip, tmp_path, "--part", "compress", "--caps", "24", "--seconds", "18")


def test_cells_of_moving_objects_by_hand(tmp_path: Path) -> None:
    """Cells of 10 x 10 pixels: a moving box over one cell, half of the next and less of the third; one that stands."""
    drawn = make_clip("night", tmp_path / "night.mp4", seconds=1, fps=2, size=(64, 64))
    moving = TrueObject(0, "vehicle", "driving", "red", (0, 0, 15, 10))
    still = TrueObject(1, "person", "sitting", "red", (20, 10, 40, 20))
    truth = replace(drawn, width=40, height=20, samples=(TrueSample(0.0, ()), TrueSample(1.0, (moving, still))))
    assert object_cells(truth, 0.0, 2, 4) == set()
    assert object_cells(truth, 1.0, 2, 4) == {0, 1}
    smaller = replace(moving, box=(1, 0, 14, 10))
    assert object_cells(replace(truth, samples=(TrueSample(1.0, (smaller,)),)), 1.0, 2, 4) == {0}


def test_what_is_kept_of_objects_is_counted(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.lab.bench.memory.compressors.TUNED", ())
    monkeypatch.setattr("cluster.lab.bench.memory.compressors.HELD_OUT", (("street", 3),))
    found = measured(clip, tmp_path, "--part", "objects", "--object-seconds", "20", *WIDER)
    assert {row["compressor"] for row in found["rows"]} == set(COMPARED)
    for row in found["rows"]:
        assert found["figures"][f"object_kept_{row['compressor']}_quarter"] == row["object_kept"]
        assert 0 < row["held"] <= 0.25
        assert 0 < row["object"] < 0.1
        assert row["compressions"] > 0


def test_a_day_stays_below_the_cap_and_is_asked_twice(clip: Path, tmp_path: Path) -> None:
    found = measured(clip, tmp_path, "--part", "day", "--day-seconds", "432")
    short, long, end = found["rows"]
    assert [(row["seconds"], row["frames"]) for row in (short, long, end)] == [(3, 3), (144, 144), (432, 432)]
    assert found["figures"] == {
        "ttft_8h_over_10min": long["ttft_ms"] / short["ttft_ms"],
        "bytes_per_camera_day": end["most_mib"] / 64,
        "memory_lost": 0,
    }
    assert end["lost"] == 0
    assert short["most_mib"] < long["most_mib"] < end["most_mib"] <= 64
    with pytest.raises(ConfigError, match="at least 144"):
        measured(clip, tmp_path, "--part", "day", "--day-seconds", "100")


def test_planted_evidence_is_looked_for_with_every_compressor(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, bytes_held = evidence.filled_memory, []

    def noted(*args: Any) -> tuple[MemoryBank, StreamMemory]:
        bank, memory = filled(*args)
        bytes_held.append(memory.held_bytes / memory.spec.cap_bytes)
        return bank, memory

    monkeypatch.setattr(evidence, "SHARES", (8,))
    monkeypatch.setattr(evidence, "CAMERA", SMALL)
    monkeypatch.setattr(evidence, "filled_memory", noted)
    options = ("--part", "evidence", "--model", "demo", "--scenes", "1", "--scene-seconds", "80")
    found = measured(clip, tmp_path, *options)
    rows = {row["compressor"]: row for row in found["rows"] if "retriever" not in row}
    assert rows.keys() == set(compressors.names()) - {"none"}
    read = {(row["organiser"], row["retriever"]): row for row in found["rows"] if "retriever" in row}
    assert read.keys() == set(product(organisers.names(), retrievers.names()))
    assert all(0 < row["read"] <= 1 and 0 <= row["recall"] <= 1 for row in read.values())
    assert read[MemorySpec().organiser, MemorySpec().retriever]["ours_more"] == 0
    # Passages of one camera are not independent: it tells nothing of others.
    assert all(row["recall_low"] is row["recall_high"] is row["ours_more_low"] is None for row in found["rows"])
    assert 0.5 < max(bytes_held) <= 1
    assert all(0 <= row["recall"] <= 1 and 0 < row["held"] < 1 for row in rows.values())
    own = rows.pop(MemorySpec().compressor)["recall"]
    assert found["figures"] == {
        "evidence_recall_eighth": own,
        "evidence_gain_eighth": own - max(row["recall"] for row in rows.values()),
    }


def test_scenes_without_an_object_to_look_for_are_refused(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "watch", lambda *_: evidence.Watched([], []))
    with pytest.raises(ConfigError, match="increase --scene-seconds"):
        measured(clip, tmp_path, "--part", "evidence", "--model", "demo", "--scenes", "1")


def test_intervals_of_evidence_are_over_cameras() -> None:
    """Three cameras, of which one has most of the passages and finds none."""
    cameras = [evidence.Watched((), [torch.tensor([0])] * passages) for passages in (2, 1, 30)]
    weights = evidence._weights(cameras)
    assert weights.shape[1] == 33
    assert all(len(set(row[a:b])) == 1 for row in weights[:50].tolist() for a, b in ((0, 2), (3, 33)))
    found = estimate(evidence._mean(np.repeat([1.0, 1.0, 0.0], [2, 1, 30]), weights))
    assert (found.value, found.low, found.high) == (3 / 33, 0, 1)


def test_what_the_last_window_holds_is_not_part_of_the_time_that_compressing_is_held_against(
    clip: Path, tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    footage = Footage(parser.parse_args(["--clips", str(clip), "--seconds", "20", *OPTIONS]), tmp_path)
    [(name, samples)] = footage.samples("demo-qwen2_5_vl")
    with timed_calls([("step", NativeEngine, "step")], time.perf_counter) as seconds:
        watched = footage.watch("demo-qwen2_5_vl", name, samples)
    left = watched.tokens / sum(sample.tokens for sample in samples)
    assert 0 < watched.encode_s <= left * seconds["step"] < seconds["step"]


def test_cells_that_show_an_object_by_hand() -> None:
    """A picture of 4 x 4 cells."""

    class Drawing:
        def objects(self, _second: float) -> list[Any]:
            boxes = {
                1: (0.25, 0.0, 0.75, 0.5),
                2: (0.0, 0.5, 0.36, 0.7),
                3: (0.8, 0.8, 0.85, 0.9),
                4: (0.9, 0.5, 1.2, 1.0),
            }
            return [SimpleNamespace(id=number, box=box) for number, box in boxes.items()]

    found = {number: list(cells) for number, cells in evidence.shown_cells(Drawing(), 0.0, 4, 4)}  # type: ignore[arg-type]
    # Of 4 the column is covered by 0.4: the cell of its centre is named, which is in the last column.
    assert found == {1: [1, 2, 5, 6], 2: [8], 3: [15], 4: [15]}


def test_infinipot_v_is_held_against_the_published_rule(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(clip, tmp_path, "--part", "infinipot_v")
    assert found["figures"] == {"infinipot_v_parity": 1.0}
    assert {row["budget"] for row in found["rows"]} == {"0.25", "0.75"}
    # Settings that are not the published ones are seen.
    monkeypatch.setitem(compressors._entries, "infinipot_v_paper", compressors.get("infinipot_v"))
    assert measured(clip, tmp_path, "--part", "infinipot_v")["figures"]["infinipot_v_parity"] < 0.9


def test_the_cap_holds_over_many_frames(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.lab.bench.memory.cap.CAP_BYTES", 2**19)
    found = measured(clip, tmp_path, "--part", "cap", "--frames", "500", "--leak-cap-mib", "0.25")
    assert found["figures"]["cap_violations"] == found["figures"]["memory_lost"] == 0
    assert "leak_at_ten_caps" in found["figures"]
    assert found["rows"][-1]["frames"] == 500
    assert found["rows"][-1]["compressions"] > 0
    assert all(0 < row["most_node_kib"] <= 512 and row["most_host_kib"] <= 256 for row in found["rows"])
    with pytest.raises(ConfigError, match="at least 100"):
        main(["memory", "--part", "cap", "--frames", "99"])


def test_a_memory_that_never_compresses_is_seen_below_the_tiers_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever exceeds the cap does not reach a tier, and is lost."""
    monkeypatch.setattr("cluster.lab.bench.memory.cap.CAP_BYTES", 2**17)
    monkeypatch.setattr("cluster.memory.stream.evict", lambda _memory, new: new)
    figures, _ = cap._watch(500, MemorySpec(cap_bytes=2**17))
    assert figures["cap_violations"] == 0
    assert figures["memory_lost"] > 0


@contextmanager
def near_tier(total_bytes: int, kind: type[RemoteTier] = RemoteTier) -> Iterator[RemoteTier]:
    """``far_tier`` from a server of this process, which is there at once."""
    with (
        serving(Arena(total_bytes, name="node", evicts=False), fingerprint=FINGERPRINT) as node,
        closing(kind(node.address, fingerprint=FINGERPRINT, deadline_s=30.0, name="node")) as tier,
    ):
        yield tier


def test_clusters_are_compared_where_they_find_as_much_as_tokens(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.lab.bench.memory.retrieval.far_tier", near_tier)
    monkeypatch.setattr("cluster.lab.bench.memory.retrieval.CLUSTER_SHARES", (0.02, 1.0))
    monkeypatch.setattr("cluster.lab.bench.memory.retrieval.CLUSTERED", ("resv",))
    monkeypatch.setattr("cluster.lab.bench.memory.retrieval.REKV_TOKENS", 256)
    monkeypatch.setattr("cluster.lab.bench.memory.retrieval.QUESTIONS", ("What happened?",))
    monkeypatch.setattr("cluster.lab.bench.memory.retrieval.REKV_SCENE_S", 60.0)
    monkeypatch.setattr(evidence, "CAMERA", SMALL)
    found = measured(clip, tmp_path, "--part", "retrieval")
    tokens, *clusters = found["rows"][:-4]
    assert tokens["organiser"] == "tokens"
    for name, (rekv, longer) in {
        "ttft_vs_rekv": found["rows"][-4:-2],
        "ttft_vs_rekv_top_keys": found["rows"][-2:],
    }.items():
        assert rekv["organiser"] == "frames"
        assert rekv["read"] > 0
        assert longer["recall"] >= rekv["recall"] > 0
        assert longer["tokens"] == rekv["tokens"] >= 256
        assert found["figures"][name] == longer["ttft_ratio"]
    assert [row["clip"] for row in found["rows"][-4:-2]] == ["drawn"] * 2
    assert {row["organiser"] for row in clusters} == {"resv"}
    for row in clusters:
        assert row["recall"] >= tokens["recall"] > 0
        assert row["transfers_ratio"] == pytest.approx(tokens["transfers"] / row["transfers"])
        assert found["figures"][f"transfers_vs_token_retrieval_{row['organiser']}"] == row["transfers_ratio"]
    for figure in ("ttft_vs_token_retrieval", "transfers_vs_token_retrieval"):
        assert found["figures"][figure] == found["figures"][f"{figure}_{MemorySpec().organiser}"]


def test_a_memory_is_read_from_another_process() -> None:
    model = load_model("tiny-qwen2_5_vl")
    watched = Watched("drawn", [], list(model_chunks(model, 40, rows=4, columns=4)))
    with remembered(model, watched, "frames", JoinedHeads) as found:
        node = found.bank.tiers.lowest
        assert isinstance(node, JoinedHeads)
        before = node.state().counts
        found.choose([("top_k", {"share": 1.0})], 1.0, found.top_recall)
        assert found.recall == 1.0
        read, blocks, first_token_s = found.ask("What happened?")
        layers, heads = found.keys.shape[:2]
        assert (read, blocks) == (1.0, 40 * layers * heads)
        assert first_token_s > 0
        assert node.state().counts["bytes_in"] > before["bytes_in"]
        assert node.state().trouble == ""


def test_all_memories_are_asked_in_turns_and_held_against_the_first() -> None:
    order: list[str] = []

    def memory(name: str, ttft_ms: float) -> Any:
        def ask(_text: str) -> str:
            order.append(name)
            return name

        def outcome(asked: Any) -> dict[str, Any]:
            assert set(asked) == {name}
            return {"organiser": name, "ttft_ms": ttft_ms, "transfers": 10 * ttft_ms}

        return SimpleNamespace(ask=ask, outcome=outcome)

    rows = _ask_in_turns([memory("tokens", 12.0), memory("mosaic", 3.0), memory("resv", 4.0)], repeats=2)
    assert order == ["tokens", "mosaic", "resv"] * (len(order) // 3)
    assert [row["ttft_ratio"] for row in rows] == [row["transfers_ratio"] for row in rows] == [1.0, 4.0, 3.0]


def test_a_passage_that_is_repeated_is_found_by_any_of_its_repetitions() -> None:
    chunks = list(made_chunks("c", 5, layers=1, heads=1, rows=1, columns=4, width=4))
    seen = evidence.Watched(chunks[:2], [torch.tensor([3]), torch.tensor([2**20, 2**20 + 3])])
    longer = evidence.repeated(seen, chunks)
    assert longer.passages[0].tolist() == [3, 2 * 2**20 + 3, 4 * 2**20 + 3]
    # The fifth frame is the first one's third time; the second one's is not there.
    assert longer.passages[1].tolist() == [2**20, 2**20 + 3, 3 * 2**20, 3 * 2**20 + 3]


def test_rekv_reads_the_published_frames_and_another_rule_does_not(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(clip, tmp_path, "--part", "rekv", "--seconds", "40")
    assert found["figures"] == {"rekv_parity": 1.0}
    (row,) = found["rows"]
    assert row["questions"] > 0
    assert row["layers"] > 1
    assert row["query_heads"] > row["key_heads"] > 1
    assert row["frames"] > row["read"]
    # Each head for itself.
    monkeypatch.setattr(ReKV, "select_layer", lambda *heads: HeadRetriever.select_layer(*heads))
    monkeypatch.setattr(ReKV, "select", lambda self, query, table: TopK(tokens=1).select(query, table))
    assert measured(clip, tmp_path, "--part", "rekv", "--seconds", "40")["figures"]["rekv_parity"] < 1
    with pytest.raises(ConfigError, match="street: too few frames left a window for a question; increase --seconds"):
        measured(clip, tmp_path, "--part", "rekv", "--seconds", "12")


def test_the_published_rule_by_hand() -> None:
    # One key head of two query heads. Mean queries (2, 0) and (0, 2): products 8, 6 + 2 and 10; of equals the older.
    query = np.array([[[1.0, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 2.0]]])
    keys = [np.array([[[4.0, 0.0]]]), np.array([[[1.0, 1.0], [5.0, 1.0]]]), np.array([[[0.0, 5.0]]])]
    assert published_frames(query, keys, 1) == {2}
    assert published_frames(query, keys, 2) == {0, 2}
    assert published_frames(query, keys, 9) == {0, 1, 2}


def test_frames_are_timed_with_and_without_their_past(clip: Path, tmp_path: Path) -> None:
    found = measured(clip, tmp_path, "--part", "frames", "--seconds", "40")
    [row] = found["rows"]
    assert row["frames"] > 0
    assert row["late"] == 0
    assert 0 < row["read"] <= row["held"]
    assert row["read_share"] == pytest.approx(row["read"] / row["held"])
    assert row["time_ratio"] == pytest.approx(row["ms_with"] / row["ms_without"])
    assert found["figures"]["frames_top_recall"] == row["top_recall"]
    assert found["figures"]["frames_attention_read"] == row["attention_read"]


def test_a_clip_in_which_no_frame_reads_a_cluster_says_so(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="street: no frame read a cluster in 12 s; increase --seconds"):
        measured(clip, tmp_path, "--part", "frames", "--seconds", "12")


@pytest.mark.parametrize("ratio", [1.0, 0.0])
def test_what_frames_read_is_held_against_what_they_attend_to(ratio: float) -> None:
    model = load_model("demo-qwen2_5_vl", device="cpu", dtype="float32")
    engine = WatchedEngine(model, memories=ListeningBank(TierStack([Arena(2**26)])))
    options = {"ratio": ratio, "deadline_s": 60.0}
    memory = MemorySpec(compressor="none", block_frames=2, frame_retrieval="resv", frame_retrieval_options=options)
    question = (Question("q", "Is there a car?"),)
    engine.admit(StreamSpec("cam", question, 6.0, 2.0, refresh="none", static_gate=False, memory=memory))
    camera = SyntheticCamera("cam", model.geometry, width=112, height=112, seed=1)
    for number in range(16):
        for request in engine.push(camera.sample(number)):
            engine.step([request])
        assert engine.memories.wait_written()
    assert len(engine.recalls) == len(engine.shares) == len(engine.bests) >= len(model.layers)
    for found in (engine.recalls, engine.shares, engine.masses):
        assert all(0 <= each <= 1 + 1e-6 for each in found)
        # The heaviest cluster of each row alone is not everything.
        assert (min(found) > 1 - 1e-6) is (ratio == 1)


def test_the_best_clusters_are_those_with_the_most_attention_to_a_token() -> None:
    table, none = ClusterTable(1), torch.zeros(5, dtype=torch.int64)
    table.add(NewTokens(torch.zeros(5, 1), torch.zeros(5, 1), none, none), torch.tensor([0, 0, 1, 2, 2]))
    attention = torch.tensor([4.0, 1.0, 2.0, 2.0, 1.0])
    # The first cluster has 2.5 a token, the second 2 and the last 1.5.
    assert [best_clusters(attention, table, tokens) for tokens in (1, 2, 3, 5)] == pytest.approx([0, 0.5, 0.7, 1])


def test_history_is_as_long_as_asked_for_and_read_alike(clip: Path, tmp_path: Path) -> None:
    found = measured(clip, tmp_path, "--part", "history", "--history", "1024", "2048")
    little, much = found["rows"]
    assert (little["history"], much["history"]) == (1024, 2048)
    assert all(512 <= row["read"] < 700 for row in (little, much))
    assert found["figures"]["ttft_64k_over_4k"] == pytest.approx(much["ttft_ms"] / little["ttft_ms"])
    with pytest.raises(ConfigError, match="512 or more"):
        main(["memory", "--part", "history", "--history", "100", "2048", *OPTIONS])


def test_splits_and_restoring(clip: Path, tmp_path: Path) -> None:
    found = measured(clip, tmp_path, "--part", "splits", "restore")
    *_, restored = found["rows"]
    assert restored["frames_remembered"] > 0
    assert restored["same_answers"]
    assert restored["logit_diff"] < 1e-4
    assert found["figures"]["restore_speedup"] == restored["speedup"] > 1
    assert 0 <= found["figures"]["deferred_split_saving"] <= 1


def test_prefetch_is_measured_with_right_wrong_and_real_predictions(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.lab.bench.memory.prefetch.LATENCIES_MS", (1,))
    # Several questions, of which all are predicted.
    monkeypatch.setattr("cluster.lab.bench.memory.footage.ASK_EVERY", 3)
    options = ("--part", "prefetch", "--layers", "3", "--blocks", "4", "--out", str(tmp_path))
    found = measured(clip, tmp_path, *options)
    assert set(found["figures"]) == {"prefetch_hidden_1ms", "prediction_recall", "prefetch_hidden_real"}
    right, _, _, real, again = found["rows"]
    assert (right["used"], right["missed"]) == (8, 4)
    assert real["queries"] == again["queries"] == "tiny-qwen2_5_vl"
    assert 0 < real["accuracy"] <= 1
    assert real["used"] + real["missed"] > 0
    assert real["predicted"] == real["used"] + real["wasted"]
    assert ET.parse(tmp_path / "prefetch.svg").getroot().tag.endswith("svg")


def test_a_listener_names_what_its_retriever_does_and_remembers_the_last_rows() -> None:
    table = ClusterTable(2)
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]])
    none = torch.zeros(3, dtype=torch.int64)
    table.add(NewTokens(key=key, value=key, frame=none, partition=none), torch.tensor([0, 1, 0]))
    listener = Listener(TopK(tokens=1))
    for query in (torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])):
        chosen = listener.select(query, table)
    assert chosen.tolist() == [0]
    [rows], tables, [read] = listener.calls[-1]
    assert rows.tolist() == [[1.0, 0.0]]
    assert tables == [table]
    assert read.tolist() == [True, False, True]


def test_made_frames_are_the_same_again_and_change_with_the_scene() -> None:
    shape = {"layers": 1, "heads": 1, "rows": 2, "columns": 2, "width": 8}
    one, other = (list(made_chunks("camera", 66, **shape)) for _ in range(2))
    assert all(torch.equal(a.key, b.key) for a, b in zip(one, other, strict=True))
    assert float((one[0].key - one[1].key).norm()) < float((one[63].key - one[64].key).norm())


def test_goals_are_met_on_their_own_side() -> None:
    rows = against_goals(GOALS, "cap", {"cap_violations": 0.0, "memory_growth": 0.02, "other": 3.0})
    assert [row["met"] for row in rows] == ["yes", "no", None]
    assert set(PARTS) >= {row["part"] for row in rows}
    assert GOALS["restore_speedup"] == (">=", 10.0)
