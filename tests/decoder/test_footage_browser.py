"""A real browser plays clips: as the camera sent them, with B-pictures, and encoded anew."""

import re

import pytest
from console_bench import browser as open_browser
from footage_parts import video

from cluster.decoder.footage.clip import clip_writer
from cluster.decoder.footage.ring import PacketRing, RingBudget

PAGE = """<!doctype html><pre id="said"></pre><script>
const said = document.getElementById("said"), names = {names};
function say(text) {{ said.textContent += text + "\\n"; }}
for (const name of names) {{
  const player = document.createElement("video");
  player.muted = true;
  player.src = name;
  player.addEventListener("error", () => say(name + " failed: " + player.error.message));
  player.addEventListener("loadeddata", () => {{ player.currentTime = 2; }});
  player.addEventListener("seeked", () => say(
    name + " " + player.videoWidth + "x" + player.videoHeight + " " + player.duration + " s at " + player.currentTime));
  document.body.append(player);
}}
</script>"""


def test_chromium_plays_and_seeks(tmp_path, h264, h264_b):
    for name, (header, packets) in {"plain": h264, "b": h264_b, "anew": video(100, "mjpeg")}.items():
        ring = PacketRing(100.0, 1 << 24, RingBudget(1 << 30))
        ring.open(header)
        for packet in packets[:100]:
            ring.add_packet(packet)
        recording = ring.record(0, 5_000_000)
        writer = clip_writer(recording.segment, 0, painter=None, height=720)
        (tmp_path / f"{name}.mp4").write_bytes(writer.feed(recording.pop_packets(1000)) + writer.close())
    (tmp_path / "page.html").write_text(PAGE.format(names=["plain.mp4", "b.mp4", "anew.mp4"]))
    with open_browser() as chromium:
        page = chromium.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_function("said.textContent.split('\\n').length > 3", timeout=60_000)
        said = page.text_content("#said")
    shown = dict(re.findall(r"(\w+)\.mp4 (.*)", said))
    assert {name: text.split(" ")[0] for name, text in shown.items()} == dict.fromkeys(("plain", "b", "anew"), "96x64")
    for text in shown.values():
        length, at = re.fullmatch(r"\S+ (\S+) s at (\S+)", text).groups()
        assert float(length) == pytest.approx(5.0, abs=0.15)
        assert float(at) == pytest.approx(2.0, abs=0.15)
