// Muting a camera or a question for a time, and unmuting it.
import { post, remove } from "./api.js";
import { html, useEffect, useState } from "./dom.js";
import { moment, words } from "./format.js";
import { useFetched } from "./fetching.js";
import { Choice, Dialog, useAttempt } from "./parts.js";
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
  const [seconds, setSeconds] = useState(3600);
  const [what, setWhat] = useState(subject);
  const mute = async () => {
    await post("/v1/mutes", { camera, subject: what, for_s: seconds, by: store.me?.name ?? "" });
    onClose(true);
  };
  const subjects = [...(subject === "*" ? [] : [[subject, `${words(subject)} only`]]), ["*", "everything at this camera"]];
  return html`<${Dialog} title=${`Mute ${camera}`} action="Mute" onSubmit=${mute} onClose=${onClose}>
    <p class="soft">Incidents are still recorded, but no alerts are sent.</p>
    <${Choice} label="What" column value=${what} options=${subjects} onChange=${setWhat} />
    <${Choice} label="For" column value=${seconds} options=${TIMES} onChange=${setSeconds} />
  <//>`;
}

/** Active mutes (`camera`: of this one), each with a button to end it; refetched when `serial` changes. */
export function Mutes({ serial, camera = "" }) {
  const { data, reload } = useFetched("/v1/mutes", { periodS: 30 });
  useEffect(() => void (serial && reload()), [serial]);
  const [attempt, , error] = useAttempt();
  const mutes = (data?.mutes ?? []).filter((mute) => !camera || mute.camera === camera || mute.camera === "*");
  if (!mutes.length) return null;
  const unmute = async ({ camera, subject }) => {
    await attempt(() => remove(`/v1/mutes?${new URLSearchParams({ camera, subject })}`));
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
