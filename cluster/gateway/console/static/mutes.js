// Silencing a camera or a question for a time, and taking that back.
import { post, remove } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { moment, words } from "./format.js";
import { useFetched } from "./fetching.js";
import { may, store } from "./store.js";

const TIMES = [[900, "15 minutes"], [3600, "1 hour"], [8 * 3600, "8 hours"], [24 * 3600, "a day"], [7 * 24 * 3600, "a week"]];

/** A button and its dialog; shown only to those who may mute. */
export function MuteButton({ camera, subject, onDone = () => {} }) {
  const [open, setOpen] = useState(false);
  if (!may("ask")) return null;
  return html`<button type="button" class="button" onClick=${() => setOpen(true)}>Mute…</button>
    ${open && html`<${MuteDialog} camera=${camera} subject=${subject} onClose=${(done) => (setOpen(false), done && onDone())} />`}`;
}

function MuteDialog({ camera, subject, onClose }) {
  const dialog = useRef(null);
  const [seconds, setSeconds] = useState(3600);
  const [all, setAll] = useState(subject === "*");
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus?.();
  }, []);
  const mute = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await post("/v1/mutes", { camera, subject: all ? "*" : subject, for_s: seconds, by: store.me?.name ?? "" });
      onClose(true);
    } catch (failure) {
      setError(failure.message);
      setBusy(false);
    }
  };
  return html`<dialog ref=${dialog} class="dialog" aria-labelledby="mute-title" onClose=${() => onClose(false)}>
    <form onSubmit=${mute}>
      <h2 id="mute-title">Mute ${camera}</h2>
      <p class="soft">Incidents are still recorded; nothing is sent to anybody.</p>
      <label class="field column">What
        <select value=${all ? "*" : subject} onChange=${(event) => setAll(event.target.value === "*")}>
          ${subject !== "*" && html`<option value=${subject}>${words(subject)} only</option>`}
          <option value="*">everything at this camera</option>
        </select></label>
      <label class="field column">For
        <select value=${seconds} onChange=${(event) => setSeconds(Number(event.target.value))}>
          ${TIMES.map(([value, word]) => html`<option key=${value} value=${value}>${word}</option>`)}
        </select></label>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <div class="actions"><button type="button" class="button" onClick=${() => onClose(false)}>Cancel</button>
        <button class="button primary" disabled=${busy}>Mute</button></div>
    </form>
  </dialog>`;
}

/** What is muted now, each with a button to end it; fetched anew when `serial` changes. */
export function Mutes({ serial }) {
  const { data, reload } = useFetched("/v1/mutes", { periodS: 30 });
  useEffect(() => void (serial && reload()), [serial]);
  const [error, setError] = useState("");
  const mutes = data?.mutes ?? [];
  if (!mutes.length) return null;
  const unmute = async (mute) => {
    try {
      const named = new URLSearchParams({ camera: mute.camera, subject: mute.subject });
      await remove(`/v1/mutes?${named}`);
      setError("");
    } catch (failure) {
      setError(failure.message);
    }
    reload();
  };
  return html`<section class="mutes card" aria-label="Muted">
    <h2>Muted</h2>
    <ul class="plain">${mutes.map((mute) => html`<li key=${`${mute.camera}\n${mute.subject}`}>
      <span>${mute.subject === "*" ? "everything" : words(mute.subject)} at ${mute.camera === "*" ? "all cameras" : mute.camera}, until ${moment(mute.until_s)}${mute.by ? `, by ${mute.by}` : ""}</span>
      ${may("ask") && html`<button type="button" class="button small" onClick=${() => unmute(mute)}>End</button>`}
    </li>`)}</ul>
    ${error && html`<p class="error" role="alert">${error}</p>`}
  </section>`;
}
