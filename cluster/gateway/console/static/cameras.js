// Camera management: list, add, settings. The gateway enforces permissions; pages only hide what it would refuse.
import { cameraPath, get, post, put, remove } from "./api.js";
import { byName, matches } from "./attention.js";
import { SourceFields, SourceTest, entryOf } from "./camera_form.js";
import { html, useEffect, useState } from "./dom.js";
import { plural } from "./format.js";
import { MASKS, ShapeEditor, ZONES } from "./shapes.js";
import { Back, Dialog, Empty, Failure, Icon, NoCameras, Skeleton, StateBadge, useAttempt, useKept } from "./parts.js";
import { idOf } from "./question_id.js";
import { Questions } from "./questions.js";
import { may, store, useTopics } from "./store.js";

const MOST_SHOWN = 200;
const NEEDS_ADMIN = "This needs a token with the role “admin”.";

export function CamerasPage() {
  useTopics("cameras", "me");
  const [search, setSearch] = useKept("cameras-search", "");
  const [attempt, , error] = useAttempt();
  const [removing, setRemoving] = useState(null);
  const needle = search.trim().toLocaleLowerCase();
  const all = [...store.cameras.values()].sort(byName);
  const found = all.filter((camera) => matches(camera, needle));
  const admin = may("admin");
  return html`<div class="cameras-page">
    <header class="page-head"><h1>Cameras</h1><p class="soft">${plural(all.length, "camera")}</p>
      ${admin && html`<div class="actions"><a class="button" href="#/import-cameras">Import a list</a>
        <a class="button primary" href="#/add-camera">Add a camera</a></div>`}</header>
    ${all.length > 0 && html`<div class="toolbar"><div class="search"><${Icon} name="search" />
      <input type="search" aria-label="Search cameras" placeholder="Name, source or state" value=${search} onInput=${(event) => setSearch(event.target.value)} /></div></div>`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${all.length === 0 && html`<${NoCameras} />`}
    ${all.length > 0 && !found.length && html`<${Empty} title="No matching camera">Change the search.<//>`}
    <ul class="camera-rows">${found.slice(0, MOST_SHOWN).map((camera) => html`<li key=${camera.name} class="card camera-row">
      <div class="camera-row-what"><a href=${`#/camera/${encodeURIComponent(camera.name)}`}>${camera.name}</a> <${StateBadge} camera=${camera} />
        <p class="soft wrap">${camera.source || "pushed by an agent"}${camera.reason ? `: ${camera.reason}` : ""}</p></div>
      ${admin && html`<div class="actions">
        <a class="button small" href=${`#/settings/${encodeURIComponent(camera.name)}`} aria-label=${`Settings of ${camera.name}`}>Settings</a>
        <button type="button" class="button small" aria-label=${`${camera.state === "paused" ? "Resume" : "Pause"} ${camera.name}`} onClick=${() => attempt(() => pauseCamera(camera, camera.state !== "paused"))}>${camera.state === "paused" ? "Resume" : "Pause"}</button>
        <button type="button" class="button small" aria-label=${`Remove ${camera.name}`} onClick=${() => setRemoving(camera)}>Remove…</button>
      </div>`}
    </li>`)}</ul>
    ${found.length > MOST_SHOWN && html`<p class="soft">${plural(found.length - MOST_SHOWN, "more camera")}: search for one.</p>`}
    ${removing && html`<${RemoveDialog} camera=${removing} onClose=${() => setRemoving(null)} />`}
  </div>`;
}

async function pauseCamera(camera, paused) {
  const { source, settings, manager, revision } = await get(`${cameraPath(camera.name)}/settings`);
  const takeover = manager !== "cluster" && confirm(`${camera.name} belongs to ${manager}. Take it over?`);
  const changed = { ...settings, paused };
  if (!paused) delete changed.paused;
  await put(cameraPath(camera.name), { source, settings: changed, takeover, revision });
}

function RemoveDialog({ camera, onClose }) {
  const [takeover, setTakeover] = useState(false);
  const foreign = camera.manager && camera.manager !== "cluster";
  const go = async () => {
    await remove(`${cameraPath(camera.name)}?takeover=${takeover ? 1 : 0}`);
    onClose();
  };
  return html`<${Dialog} title=${`Remove ${camera.name}?`} action="Remove" tone="danger" onSubmit=${go} onClose=${onClose}>
    <p>Its memory, incidents and clips are deleted. To stop it temporarily, pause it.</p>
    ${foreign && html`<label class="field"><input type="checkbox" checked=${takeover} onChange=${(event) => setTakeover(event.target.checked)} /> It belongs to ${camera.manager}: remove it anyway</label>`}
  <//>`;
}

export function AddCameraPage() {
  useTopics("me");
  const [draft, setDraft] = useState({ name: "", source: "", priority: "normal", settings: {} });
  const [question, setQuestion] = useState("");
  const [force, setForce] = useState(false);
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  if (!may("admin")) return html`<${BackToCameras} /><h1>Add a camera</h1><p class="soft">${NEEDS_ADMIN}</p>`;
  const add = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      const { source, settings } = entryOf(draft);
      const questions = question.trim() ? [{ id: idOf(question), text: question.trim() }] : [];
      store.camera(await post("/v1/cameras", { name: draft.name.trim(), source, questions, settings, force }));
      location.hash = `#/camera/${encodeURIComponent(draft.name.trim())}`;
    } catch (failure) {
      setError(failure.message);
      setBusy(false);
    }
  };
  return html`<div class="cameras-page">
    <${BackToCameras} />
    <header class="page-head"><h1>Add a camera</h1></header>
    <form class="card" onSubmit=${add}>
      <label class="field column">Name
        <input type="text" required value=${draft.name} autocomplete="off" spellcheck=${false} placeholder="gate" onInput=${(event) => setDraft({ ...draft, name: event.target.value })} /></label>
      <${SourceFields} draft=${draft} onChange=${setDraft} />
      <label class="field column">First question
        <input type="text" value=${question} placeholder="Is anyone climbing the fence?" onInput=${(event) => setQuestion(event.target.value)} /></label>
      <p class="soft">A yes/no question. If empty, the cluster's questions are asked. You can add more later.</p>
      <label class="field switch"><input type="checkbox" role="switch" checked=${force} onChange=${(event) => setForce(event.target.checked)} /> Add it even if there is no capacity</label>
      <${SourceTest} name=${draft.name.trim() || "test"} draft=${draft} />
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <div class="actions"><button class="button primary" disabled=${busy || !draft.name.trim()}>${busy ? "Adding…" : "Add camera"}</button></div>
    </form>
  </div>`;
}

const draftOf = ({ source, settings }) => ({ source, priority: settings.priority ?? "normal", settings });

export function SettingsPage({ name }) {
  useTopics("me", `camera:${name}`);
  const [written, setWritten] = useState(null);
  const [draft, setDraft] = useState(null);
  const [takeover, setTakeover] = useState(false);
  const [error, setError] = useState(null);
  const [said, setSaid] = useState("");
  const [busy, setBusy] = useState(false);
  const load = async () => {
    try {
      const found = await get(`${cameraPath(name)}/settings`);
      setWritten(found);
      setDraft(draftOf(found));
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  useEffect(() => void (may("admin") && load()), [name, store.me?.name]);
  if (store.me && !may("admin")) return html`<${BackToCameras} /><h1>${name}</h1><p class="soft">${NEEDS_ADMIN}</p>`;
  if (!draft) return html`<${BackToCameras} /><h1>${name}</h1>${error ? html`<${Failure} error=${error} onRetry=${load} />` : html`<${Skeleton} rows=${5} />`}`;
  const foreign = written.manager !== "cluster";
  // Of the settings, the source form edits only source_options.
  const drafted = { ...draft, settings: { ...written.settings, source_options: draft.settings.source_options } };
  /** Saves source and settings; throws ApiError. */
  const save = async (next) => {
    setBusy(true);
    setSaid("");
    try {
      // Settings are saved as a whole; the revision lets the gateway reject the save if they were changed meanwhile.
      await put(cameraPath(name), { ...entryOf(next), takeover, revision: written.revision });
      setWritten(await get(`${cameraPath(name)}/settings`));
      setSaid("Saved.");
      setError(null);
    } catch (failure) {
      setError(failure);
      throw failure;
    } finally {
      setBusy(false);
    }
  };
  const saveSettings = (settings) => save(draftOf({ ...written, settings: { ...written.settings, ...settings } }));
  const saveSource = (event) => (event.preventDefault(), save(drafted).catch(() => {}));
  return html`<div class="cameras-page">
    <${BackToCameras} />
    <header class="page-head"><h1>${name}</h1><p class="soft">Settings</p>
      <div class="actions"><a class="button" href=${`#/camera/${encodeURIComponent(name)}`}>View camera</a></div></header>
    ${foreign && html`<div class="notice"><p>This camera belongs to ${written.manager}, which may change it back.</p>
      <label class="field"><input type="checkbox" checked=${takeover} onChange=${(event) => setTakeover(event.target.checked)} /> Take it over when saving</label></div>`}
    <p class="unseen" role="status">${said}</p>
    ${error && html`<p class="error" role="alert">${error.message}</p>`}
    <section class="card" aria-labelledby="set-questions"><h2 id="set-questions">Questions</h2>
      <${Questions} camera=${name} questions=${written.settings.questions} onSave=${(questions) => saveSettings({ questions })} /></section>
    <section class="card" aria-labelledby="set-masks"><h2 id="set-masks">Privacy masks</h2>
      <${ShapeEditor} camera=${name} kind=${MASKS} shapes=${written.settings.privacy_masks ?? []} onSave=${(masks) => saveSettings({ privacy_masks: masks })} /></section>
    <section class="card" aria-labelledby="set-zones"><h2 id="set-zones">Zones</h2>
      <${ShapeEditor} camera=${name} kind=${ZONES} shapes=${written.settings.zones ?? []} onSave=${(zones) => saveSettings({ zones })} /></section>
    <section class="card" aria-labelledby="set-source"><h2 id="set-source">Source</h2>
      <form onSubmit=${saveSource}>
        <${SourceFields} draft=${drafted} onChange=${setDraft} />
        <${SourceTest} name=${name} draft=${drafted} />
        <div class="actions"><button class="button primary" disabled=${busy}>Save source</button></div>
      </form></section>
  </div>`;
}

export const BackToCameras = () => html`<${Back} href="#/cameras">Cameras<//>`;
