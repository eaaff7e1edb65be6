// A camera's standing questions: edit, replay on its memory, schedule, copy to other cameras.
import { cameraPath, get, put } from "./api.js";
import { idOf } from "./question_id.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { count, plural, score, words } from "./format.js";
import { Choice, Dialog } from "./parts.js";
import { Replay } from "./replay.js";
import { store } from "./store.js";

const DAYS = [["mon", "Mon"], ["tue", "Tue"], ["wed", "Wed"], ["thu", "Thu"], ["fri", "Fri"], ["sat", "Sat"], ["sun", "Sun"]];
const SEVERITIES = [["", "cluster default"], ["info", "info"], ["warning", "warning"], ["critical", "critical"]];
const MOST_LISTED = 200;
const NEW = { id: "", text: "", threshold: 0.5 };

export function Questions({ camera, questions, onSave }) {
  const [editing, setEditing] = useState(null);
  const [copying, setCopying] = useState(null);
  const [error, setError] = useState("");
  const own = questions ?? [];
  const save = async (next) => {
    setError("");
    await onSave(next);
    setEditing(null);
  };
  const without = (id) => own.filter((each) => each.id !== id);
  const drop = async (id) => {
    if (!confirm(`Remove “${words(id)}”? ${camera} will no longer be asked it.`)) return;
    try {
      await save(without(id));
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`${own.length === 0 && html`<p class="soft">This camera uses the cluster's questions. A question added here replaces them.</p>`}
    <ul class="plain">${own.map((question) => html`<li key=${question.id} class="question-row">
      <div><strong>${words(question.id)}</strong><p class="soft wrap">${question.text} Threshold ${score(question.threshold ?? 0.5)}${question.when ? `, ${scheduled(question.when)}` : ""}</p></div>
      <div class="actions">
        <button type="button" class="button small" aria-label=${`Edit ${words(question.id)}`} onClick=${() => setEditing(question)}>Edit</button>
        <button type="button" class="button small" aria-label=${`Copy ${words(question.id)} to other cameras`} onClick=${() => setCopying(question)}>Copy…</button>
        ${own.length > 1 && html`<button type="button" class="button small" aria-label=${`Remove ${words(question.id)}`} onClick=${() => drop(question.id)}>Remove</button>`}
      </div></li>`)}</ul>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${editing
      ? html`<${QuestionForm} key=${editing.id} camera=${camera} question=${editing} taken=${own.map(({ id }) => id)} onCancel=${() => setEditing(null)}
          onSave=${(next) => save([...without(editing.id), next])} />`
      : html`<div class="actions"><button type="button" class="button primary" onClick=${() => setEditing(NEW)}>Write a question</button></div>`}
    ${copying && html`<${CopyDialog} camera=${camera} question=${copying} onClose=${() => setCopying(null)} />`}`;
}

function scheduled({ days, hours, timezone }) {
  const when = days && days.length < 7 ? days.join(" ") : "every day";
  return `asked ${when}${hours?.length ? ` ${hours.join(", ")}` : ""} (${timezone ?? "UTC"})`;
}

function QuestionForm({ camera, question, taken, onCancel, onSave }) {
  const [draft, setDraft] = useState(question);
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const box = useRef(null);
  useEffect(() => box.current.focus(), []);
  const set = (change) => setDraft((before) => ({ ...before, ...change }));
  const number = (text) => (text === "" ? undefined : Number(text));
  const save = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError("");
    const next = Object.fromEntries(Object.entries({ ...draft, text: draft.text.trim() }).filter(([, value]) => value !== undefined && value !== null && value !== ""));
    next.id ??= unlike(idOf(draft.text), taken);
    try {
      await onSave(next);
    } catch (failure) {
      setError(failure.message);
      setBusy(false);
    }
  };
  return html`<form class="question-form" aria-label=${question.id ? `Edit ${words(question.id)}` : "New question"} onSubmit=${save}>
    <label class="field column">Question
      <textarea ref=${box} rows="2" maxlength="2000" required value=${draft.text} placeholder="Is anyone climbing the fence?" onInput=${(event) => set({ text: event.target.value })}></textarea></label>
    <p class="soft">A yes/no question.</p>
    <${Replay} camera=${camera} question=${{ threshold: 0.5, ...draft }} known=${Boolean(question.id) && draft.text.trim() === question.text}
      onThreshold=${(threshold) => set({ threshold })} />
    <div class="form-row">
      <label class="field column">Windows in a row
        <input type="number" min="1" max="1000" placeholder="cluster default" value=${draft.consecutive ?? ""} onInput=${(event) => set({ consecutive: number(event.target.value) })} /></label>
      <label class="field column">Cooldown, seconds
        <input type="number" min="0" placeholder="cluster default" value=${draft.cooldown_s ?? ""} onInput=${(event) => set({ cooldown_s: number(event.target.value) })} /></label>
      <${Choice} label="Severity" column value=${draft.severity ?? ""} options=${SEVERITIES} onChange=${(severity) => set({ severity: severity || undefined })} />
    </div>
    <label class="field switch"><input type="checkbox" role="switch" checked=${draft.explain ?? false} onChange=${(event) => set({ explain: event.target.checked || undefined })} /> Also explain the answer, which adds time to every window</label>
    <${Schedule} when=${draft.when} onChange=${(when) => set({ when })} />
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <div class="actions"><button type="button" class="button" onClick=${onCancel}>Cancel</button>
      <button class="button primary" disabled=${busy || !draft.text.trim()}>Save question</button></div>
  </form>`;
}

function unlike(id, taken) {
  let found = id;
  for (let number = 2; taken.includes(found); number += 1) found = `${id}-${number}`;
  return found;
}

/** When it is asked: days, hours, time zone. Outside these times it costs nothing. */
function Schedule({ when, onChange }) {
  const here = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  const days = when?.days ?? DAYS.map(([day]) => day);
  const toggle = (day) => {
    const next = DAYS.map(([each]) => each).filter((each) => (each === day ? !days.includes(each) : days.includes(each)));
    if (next.length) onChange({ ...when, days: next });
  };
  return html`<label class="field switch"><input type="checkbox" role="switch" checked=${Boolean(when)} onChange=${(event) => onChange(event.target.checked ? { days, hours: ["08:00-18:00"], timezone: here } : undefined)} /> Only at certain times</label>
    ${when && html`<fieldset class="schedule"><legend>Asked on</legend>
      <div class="chips">${DAYS.map(([day, word]) => html`<button type="button" class="chip" key=${day} aria-pressed=${days.includes(day)} onClick=${() => toggle(day)}>${word}</button>`)}</div>
      <label class="field column">Hours
        <input type="text" value=${(when.hours ?? []).join(", ")} placeholder="08:00-18:00, 22:00-06:00; empty: all day" onChange=${(event) => onChange({ ...when, hours: event.target.value.split(/[,\s]+/).filter(Boolean) })} /></label>
      <label class="field column">Time zone
        <input type="text" value=${when.timezone ?? "UTC"} onChange=${(event) => onChange({ ...when, timezone: event.target.value.trim() || "UTC" })} /></label>
      <p class="soft">Outside the times of all its questions, a camera is not watched and remembers nothing.</p>
    </fieldset>`}`;
}

function CopyDialog({ camera, question, onClose }) {
  const [chosen, setChosen] = useState(() => new Set());
  const [search, setSearch] = useState("");
  const [done, setDone] = useState(null);
  const names = [...store.cameras.keys()].filter((name) => name !== camera).sort();
  const listed = names.filter((name) => name.toLocaleLowerCase().includes(search.trim().toLocaleLowerCase()));
  const toggle = (name) => {
    const next = new Set(chosen);
    if (!next.delete(name)) next.add(name);
    setChosen(next);
  };
  const copy = async () => {
    const failed = [];
    let copied = 0;
    setDone({ copied, failed, busy: true });
    for (const name of chosen) {
      try {
        const { source, settings, revision } = await get(`${cameraPath(name)}/settings`);
        const questions = [...(settings.questions ?? []).filter(({ id }) => id !== question.id), question];
        await put(cameraPath(name), { source, settings: { ...settings, questions }, revision });
        copied += 1;
      } catch (failure) {
        failed.push(`${name}: ${failure.message}`);
      }
      setDone({ copied, failed: [...failed], busy: true });
    }
    setDone({ copied, failed, busy: false });
  };
  return html`<${Dialog} title=${`Copy “${words(question.id)}” to`} action="Copy" disabled=${!chosen.size || Boolean(done)} cancel=${done && !done.busy ? "Close" : "Cancel"}
      onSubmit=${copy} onClose=${onClose}>
      <p class="soft">Of a camera that is asked the cluster's own questions, it takes their place.</p>
      ${names.length > 8 && html`<input type="search" aria-label="Search cameras" value=${search} onInput=${(event) => setSearch(event.target.value)} />`}
      <div class="copy-list" role="group" aria-label="Cameras" tabindex="0">${listed.slice(0, MOST_LISTED).map((name) => html`<label class="field" key=${name}>
        <input type="checkbox" checked=${chosen.has(name)} onChange=${() => toggle(name)} /> ${name}</label>`)}</div>
      ${listed.length > MOST_LISTED && html`<p class="soft">The first ${MOST_LISTED} of ${count(listed.length)}. Search to find the others.</p>`}
      <div role="status">${done && html`<p>${plural(done.copied, "camera")} of ${chosen.size} changed.</p>
        ${done.failed.map((each) => html`<p class="error" key=${each}>${each}</p>`)}`}</div>
  <//>`;
}
