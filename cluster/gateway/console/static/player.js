// Live view at the camera's own frame rate: the gateway's fragmented MP4, played at its live edge.
import { cameraPath, open } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";

const BEHIND_S = 0.6;
const KEPT_S = 20;
const RETRY_MS = 2_000;
const SILENCE_MS = 15_000;

/** A codec that this browser cannot play. */
class Unplayable extends Error {
  constructor(codec) {
    super(`This browser cannot play ${codec.startsWith("h") ? "hevc" : codec}, so there is no live view.`);
  }
}

export function LiveView({ name }) {
  const [on, setOn] = useState(false);
  return html`<div class="live-view">
    <button type="button" class="button small" aria-pressed=${on} onClick=${() => setOn(!on)}>${on ? "Stop live view" : "Live view"}</button>
    ${on && html`<${Player} name=${name} />`}
  </div>`;
}

function Player({ name }) {
  const video = useRef(null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    const abort = new AbortController();
    watch(video.current, `${cameraPath(name)}/live.mp4`, abort.signal, setTrouble);
    return () => abort.abort();
  }, [name]);
  return html`<video ref=${video} muted playsinline autoplay aria-label=${`${name}, live`}></video>
    ${trouble && html`<p class="soft" role="status">${trouble}</p>`}`;
}

/** Plays until aborted; restarts when the stream ends (the camera reconnected, this browser was too slow). */
async function watch(video, path, signal, say) {
  while (!signal.aborted) {
    try {
      await play(video, path, signal, say);
      say("The live view was interrupted and restarts.");
    } catch (error) {
      if (signal.aborted) return;
      say(error.message);
      // Retrying does not help against privacy masks or an unsupported codec.
      if (error.status === 404 || error.status === 403 || error instanceof Unplayable) return;
    }
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

async function play(video, path, signal, say) {
  const response = await open(path, { signal });
  const reader = response.body.getReader();
  const source = new MediaSource();
  const address = URL.createObjectURL(source);
  let silence = 0;
  video.src = address;
  try {
    await new Promise((done) => source.addEventListener("sourceopen", done, { once: true }));
    let buffer = null;
    let head = new Uint8Array();
    for (;;) {
      // A dead connection would show its last picture forever.
      silence = setTimeout(() => reader.cancel(), SILENCE_MS);
      const { done, value } = await reader.read();
      clearTimeout(silence);
      if (done || signal.aborted) return;
      if (!buffer) {
        // The codec is in the init segment, which may arrive in pieces or together with later data.
        head = joined(head, value);
        const codec = codecOf(head);
        if (!codec) continue;
        const type = `video/mp4; codecs="${codec}"`;
        if (!MediaSource.isTypeSupported(type)) throw new Unplayable(codec);
        buffer = source.addSourceBuffer(type);
        await append(buffer, head);
        say("");
      } else await append(buffer, value);
      await keepUp(video, buffer);
    }
  } finally {
    clearTimeout(silence);
    await reader.cancel().catch(() => {});
    URL.revokeObjectURL(address);
  }
}

function append(buffer, data) {
  return new Promise((done, failed) => {
    // Not addEventListener: error listeners, which rarely fire, would accumulate with every fragment.
    buffer.onupdateend = done;
    buffer.onerror = () => failed(new Error("The video cannot be played."));
    buffer.appendBuffer(data);
  });
}

/** Seeks to the live edge after a start or stall, and removes old data from the buffer. */
async function keepUp(video, buffer) {
  const ranges = buffer.buffered;
  if (!ranges.length) return;
  const end = ranges.end(ranges.length - 1);
  if (end - video.currentTime > BEHIND_S) video.currentTime = Math.max(ranges.start(ranges.length - 1), end - 0.1);
  if (video.paused) video.play().catch(() => {});
  const first = ranges.start(0);
  if (video.currentTime - first > 2 * KEPT_S) {
    await new Promise((done) => {
      buffer.onupdateend = done;
      buffer.remove(first, video.currentTime - KEPT_S);
    });
  }
}

/** The RFC 6381 codec string of an MP4's init segment, from its avcC (ISO 14496-15, 5.3.3.1) or hvcC (8.3.3.1). */
export function codecOf(data) {
  const hex = (byte) => byte.toString(16).padStart(2, "0");
  const after = (name) => {
    for (let at = 0; at + 24 <= data.length; at += 1) if ([...name].every((letter, i) => data[at + i] === letter.charCodeAt(0))) return at + 4;
    return 0;
  };
  const avc = after("avcC");
  if (avc) return `avc1.${[...data.subarray(avc + 1, avc + 4)].map(hex).join("")}`;
  const hevc = after("hvcC");
  if (!hevc) return "";
  const [general, ...rest] = data.subarray(hevc + 1, hevc + 13);
  // Annex E.3: profile, compatibility flags in reversed order, tier and level, constraints without zeros at the end.
  const flags = rest.slice(0, 4).map((byte) => byte.toString(2).padStart(8, "0")).join("");
  const constraints = rest.slice(4, 10);
  while (constraints.length && !constraints[constraints.length - 1]) constraints.pop();
  return [
    after("hvc1") ? "hvc1" : "hev1",
    `${["", "A", "B", "C"][general >> 6]}${general & 0x1f}`,
    parseInt([...flags].reverse().join(""), 2).toString(16).toUpperCase(),
    `${general & 0x20 ? "H" : "L"}${rest[10]}`,
    ...constraints.map((byte) => byte.toString(16).toUpperCase()),
  ].join(".");
}

function joined(head, more) {
  const whole = new Uint8Array(head.length + more.length);
  whole.set(head);
  whole.set(more, head.length);
  return whole;
}
