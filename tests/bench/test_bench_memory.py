"""The memory bench end to end on a short clip: what it counts, not how fast it is."""

import json

from cluster.bench.harness import main
from cluster.clips import make_clip
from cluster.memory.compress import compressors


def test_the_bench_holds_every_compressor_to_the_cap(tmp_path):
    clip, body = tmp_path / "street.mp4", tmp_path / "memory.json"
    make_clip("street", clip, seconds=20, size=(160, 96))
    options = ["--model", "demo-qwen2_5_vl", "--seconds", "20", "--window", "4", "--stride", "2", "--threads", "1"]
    assert main(["memory", "--clips", str(clip), *options, "--json", str(body)]) == 0
    found = json.loads(body.read_text())
    assert found["figures"]["cap_violations"] == 0
    assert {row["compressor"] for row in found["rows"]} == set(compressors.names()) - {"none"}
    for row in found["rows"]:
        assert 0 < row["held"] <= row["tokens"] // int(row["cap"][2:])
        assert row["compressions"] > 0
        assert all(0 <= row[f"coverage_{space}"] <= 1 for space in ("key", "value", "joint"))
    # An eighth covers at least what a sixteenth does.
    by_cap = {(row["compressor"], row["cap"]): row["coverage_joint"] for row in found["rows"]}
    assert by_cap["cords", "1/8"] > 0.9 * by_cap["cords", "1/16"]
