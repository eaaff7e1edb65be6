// Small components shared by several pages.
import { html, useEffect, useRef, useState } from "./dom.js";
import { isSilent, stateWord } from "./attention.js";
import { duration } from "./format.js";
import { pictures } from "./pictures.js";
import { may } from "./store.js";
import { recall, remember } from "./theme.js";

const ICONS = {
  wall: "M3 4h7v7H3zM14 4h7v7h-7zM3 14h7v7H3zM14 14h7v7h-7z",
  incidents: "M12 3 2.5 20h19zM12 10v4.5M12 17.2v.3",
  ask: "M4 4h16v12H10l-5 4v-4H4zM8 8.5h8M8 12h5",
  fleet: "M4 5h16v5H4zM4 14h16v5H4zM7.5 7.5h.1M7.5 16.5h.1",
  back: "M15 5l-7 7 7 7",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2.5M12 19.5V22M2 12h2.5M19.5 12H22M5 5l1.7 1.7M17.3 17.3 19 19M19 5l-1.7 1.7M6.7 17.3 5 19",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  search: "M10.5 4a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM15.5 15.5 21 21",
  cameras: "M3 8h11v8H3zM14 11l6-3v8l-6-3M7 16v4h4",
  out: "M14 4h5v16h-5M10 8l-4 4 4 4M6 12h9",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d=${ICONS[name]} /></svg>`;
}

/** A coloured label; its text alone carries the meaning. */
export function Badge({ tone = "quiet", title, children }) {
  return html`<span class=${`badge ${tone}`} title=${title}>${children}</span>`;
}

const STATE_TONES = { running: "good", connecting: "quiet", waiting: "quiet", ended: "quiet", paused: "quiet", backoff: "warning", error: "critical" };

export function StateBadge({ camera }) {
  if (isSilent(camera)) return html`<${Badge} tone="warning" title="Connected, but sending no pictures.">Silent for ${duration(camera.last_frame_age_s)}<//>`;
  const title = camera.reason + (camera.retry_in_s > 0 ? `; next try in ${duration(camera.retry_in_s)}` : "");
  return html`<${Badge} tone=${STATE_TONES[camera.state] ?? "quiet"} title=${title || undefined}>${stateWord(camera.state)}<//>`;
}

export function RungBadge({ camera, always = false }) {
  const full = !camera.rung || camera.rung === "full";
  if (full && !always) return null;
  const why = full ? "As configured" : camera.rung_reason || "Lowered to keep up";
  return html`<${Badge} tone=${full ? "good" : camera.rung === "shed" ? "critical" : "lowered"} title=${why}>
    ${full ? "Full quality" : `Quality: ${camera.rung}`}
  <//>`;
}

const SEVERITY_TONES = { critical: "critical", warning: "warning", info: "info" };

export function SeverityBadge({ severity }) {
  return html`<${Badge} tone=${SEVERITY_TONES[severity] ?? "quiet"}>${severity}<//>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><p class="empty-title">${title}</p><p>${children}</p></div>`;
}

export function NoCameras() {
  return html`<${Empty} title="There are no cameras yet">${may("admin") ? html`<a href="#/add-camera">Add the first one</a>` : "A user with the role “admin” can add one."}<//>`;
}

export function Failure({ error, onRetry }) {
  return html`<div class="failure" role="alert">
    <p>${error.message}</p>
    ${onRetry && html`<button type="button" class="button" onClick=${onRetry}>Try again</button>`}
  </div>`;
}

export function Skeleton({ rows = 4 }) {
  return html`<div class="skeleton-rows" role="status" aria-label="Loading">
    ${Array.from({ length: rows }, (_, row) => html`<div class="skeleton" key=${row}></div>`)}
  </div>`;
}

export function Back({ href, children }) {
  return html`<a class="back" href=${href}><${Icon} name="back" />${children}</a>`;
}

/** A labelled select; `options`: `[value, word]`. */
export function Choice({ label, value, options, column = false, onChange }) {
  return html`<label class=${`field ${column ? "column" : ""}`}>${label}
    <select value=${value} onChange=${(event) => onChange(options[event.target.selectedIndex][0])}>
      ${options.map(([each, word]) => html`<option key=${each} value=${each}>${word}</option>`)}
    </select></label>`;
}

/** A form in a dialog that shows errors thrown by `onSubmit`; restores the focus when closed. */
export function Dialog({ title, action, tone = "primary", disabled = false, cancel = "Cancel", onSubmit, onClose, children }) {
  const dialog = useRef(null);
  const [attempt, busy, error] = useAttempt();
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus?.();
  }, []);
  const submit = (event) => (event.preventDefault(), attempt(onSubmit));
  return html`<dialog ref=${dialog} class="dialog" aria-labelledby="dialog-title" onClose=${() => onClose()}>
    <form onSubmit=${submit}>
      <h2 id="dialog-title">${title}</h2>
      ${children}
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <div class="actions"><button type="button" class="button" onClick=${() => onClose()}>${cancel}</button>
        <button class=${`button ${tone}`} disabled=${busy || disabled}>${action}</button></div>
    </form>
  </dialog>`;
}

/** A labelled figure; `note` explains it. */
export function Figure({ label, value, note, tone }) {
  return html`<div class=${`figure ${tone ?? ""}`}>
    <dt>${label}</dt>
    <dd>${value}${note && html`<span class="figure-note">${note}</span>`}</dd>
  </div>`;
}

/** A camera's newest picture. Until it is loaded, a 16:9 box reserves its space, so that the layout does not jump. */
export function Picture({ camera, width = 320, label }) {
  const canvas = useRef(null);
  const [state, setState] = useState({ word: "loading", text: "" });
  useEffect(() => {
    setState({ word: "loading", text: "" });
    return pictures.watch(canvas.current, camera, width, (word, text) => {
      setState((before) => (before.word === word && before.text === text ? before : { word, text }));
    });
  }, [camera, width]);
  return html`<div class=${`picture ${state.word}`}>
    <canvas ref=${canvas} width="16" height="9" role="img" aria-label=${label ?? `Newest picture of ${camera}`}></canvas>
    ${state.text && html`<span class="picture-note">${state.text}</span>`}
  </div>`;
}

/** A base64 JPEG drawn on a canvas: the content security policy allows images only from the gateway's addresses. */
export function Thumbnail({ picture, label }) {
  const canvas = useRef(null);
  useEffect(() => {
    if (!picture) return;
    const data = Uint8Array.from(atob(picture), (letter) => letter.charCodeAt(0));
    createImageBitmap(new Blob([data], { type: "image/jpeg" })).then(
      (bitmap) => {
        if (canvas.current) {
          Object.assign(canvas.current, { width: bitmap.width, height: bitmap.height });
          canvas.current.getContext("2d").drawImage(bitmap, 0, 0);
        }
        bitmap.close();
      },
      () => console.error("a picture is not a JPEG"),
    );
  }, [picture]);
  if (!picture) return html`<span class="thumbnail none">no picture</span>`;
  return html`<canvas class="thumbnail" ref=${canvas} role="img" aria-label=${label}></canvas>`;
}

/** `[attempt, busy, error]`: `attempt(action)` awaits the action; `error` is the message that it threw. */
export function useAttempt() {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const attempt = async (action) => {
    setBusy(true);
    setError("");
    await action().catch((failure) => setError(failure.message));
    setBusy(false);
  };
  return [attempt, busy, error];
}

/** Rerenders every `periodS`, for components that show elapsed time. */
export function useClock(periodS = 1) {
  const [, redraw] = useState(0);
  useEffect(() => {
    const period = setInterval(() => redraw((serial) => serial + 1), periodS * 1000);
    return () => clearInterval(period);
  }, [periodS]);
}

/** State kept for this tab across pages and reloads: filters and searches. */
export function useKept(name, initial) {
  const [value, setValue] = useState(() => JSON.parse(recall(`sightline-${name}`, "sessionStorage") ?? "null") ?? initial);
  const keep = (next) => {
    remember(`sightline-${name}`, JSON.stringify(next), "sessionStorage");
    setValue(next);
  };
  return [value, keep];
}
