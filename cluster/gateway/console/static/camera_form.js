// The fields of a camera's source, and its test, which probes the source without adding the camera.
import { post } from "./api.js";
import { html, useState } from "./dom.js";
import { duration, percent } from "./format.js";
import { Choice, Thumbnail } from "./parts.js";

const PRIORITIES = [["normal", "normal"], ["critical", "critical: on time at the expense of others"], ["background", "background: shed first"]];

/** The request body for a draft. Empty settings are omitted, so that the cluster's defaults apply. */
export function entryOf({ source, priority, settings }) {
  const kept = { ...settings };
  delete kept.priority;
  if (priority !== "normal") kept.priority = priority;
  for (const key of ["privacy_masks", "zones"]) if (!kept[key]?.length) delete kept[key];
  return { source: source.trim(), settings: kept };
}

const isFile = (source) => /^(demo:|file:|\/|\.)/.test(source.trim());
const loops = (settings) => Boolean(settings.source_options?.loop && settings.source_options?.realtime);

function looping(settings, on) {
  const { loop: _loop, realtime: _realtime, ...rest } = settings.source_options ?? {};
  const options = on ? { ...rest, loop: true, realtime: true } : rest;
  const { source_options: _options, ...kept } = settings;
  return Object.keys(options).length ? { ...kept, source_options: options } : kept;
}

export function SourceFields({ draft, onChange }) {
  const set = (change) => onChange({ ...draft, ...change });
  return html`<label class="field column">Source
      <input type="text" value=${draft.source} autocomplete="off" spellcheck=${false} placeholder="rtsp://user:password@10.0.0.11/stream1" onInput=${(event) => set({ source: event.target.value })} /></label>
    <p class="soft">A URL, a file the decoders can read, or empty for a camera that pushes. ${draft.source.includes("***") && "*** stands for the stored password, which is kept."}</p>
    ${isFile(draft.source) && html`<label class="field switch"><input type="checkbox" role="switch" checked=${loops(draft.settings)} onChange=${(event) => set({ settings: looping(draft.settings, event.target.checked) })} />
      Loop it in real time, like a camera</label>`}
    <${Choice} label="Priority" column value=${draft.priority} options=${PRIORITIES} onChange=${(priority) => set({ priority })} />`;
}

/** A button; then a picture, codec, size, frame rate, GOP, and the patches that the cue keeps. */
export function SourceTest({ name, draft }) {
  const [state, setState] = useState({ busy: false, found: null, error: "" });
  const test = async () => {
    setState({ busy: true, found: null, error: "" });
    try {
      setState({ busy: false, found: await post("/v1/cameras/test", { name, ...entryOf(draft) }), error: "" });
    } catch (failure) {
      setState({ busy: false, found: null, error: failure.message });
    }
  };
  const { busy, found, error } = state;
  return html`<div class="source-test">
    <button type="button" class="button" disabled=${busy || !draft.source.trim()} onClick=${test}>${busy ? "Testing…" : "Test the source"}</button>
    <div role="status" aria-live="polite">
      ${error && html`<p class="error">${error}</p>`}
      ${found && html`<div class="two">
        <figure><${Thumbnail} picture=${found.jpeg} label="What the source shows" /><figcaption class="soft">What it shows</figcaption></figure>
        <figure><${Thumbnail} picture=${found.kept_jpeg} label="What the cue sees" /><figcaption class="soft">What the cue sees${found.kept ? `: ${percent(found.kept)} of the picture` : ""}</figcaption></figure>
      </div>
      <dl class="lines">
        <div><dt>Stream</dt><dd>${found.codec} ${found.width} × ${found.height}, ${found.fps ? `${found.fps.toFixed(1)} pictures/s` : "one picture"}, ${Math.round(found.kbit_s)} kbit/s</dd></div>
        <div><dt>Keyframes</dt><dd>${found.gop_pictures ? `every ${found.gop_pictures} pictures, ${duration(found.gop_s)}` : "only one during the test"}</dd></div>
        <div><dt>Cue</dt><dd>${found.cue}, decoded on ${found.decode}${found.decode_errors ? `, ${found.decode_errors} decoding errors` : ""}</dd></div>
        <div><dt>First picture</dt><dd>after ${duration(found.first_picture_s)}</dd></div>
      </dl>`}
    </div>
  </div>`;
}
