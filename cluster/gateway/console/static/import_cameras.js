// Importing a list of cameras: checked line by line, added only if every line is valid.
import { post, stream } from "./api.js";
import { BackToCameras } from "./cameras.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { plural } from "./format.js";
import { Badge } from "./parts.js";
import { may, useTopics } from "./store.js";

const EXAMPLE = 'name,source,question\ngate,rtsp://user:password@10.0.0.11/stream1,Is anyone climbing the fence?';
const MOST_SHOWN = 500;

export function ImportPage() {
  useTopics("me");
  const [text, setText] = useState("");
  const [force, setForce] = useState(false);
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  if (!may("admin")) return html`<${BackToCameras} /><h1>Import a list</h1><p class="soft">This needs a token with the role “admin”.</p>`;
  const send = async (apply) => {
    setBusy(true);
    setError("");
    try {
      setFound((await post("/v1/cameras/import", { text, apply, force })).cameras);
    } catch (failure) {
      setFound(null);
      setError(failure.message);
    }
    setBusy(false);
  };
  const change = (value) => {
    setText(value);
    setFound(null);
  };
  const wrong = (found ?? []).filter((each) => each.error);
  const added = (found ?? []).filter((each) => each.added);
  return html`<div class="cameras-page">
    <${BackToCameras} />
    <header class="page-head"><h1>Import a list</h1></header>
    <${Discovery} onTake=${(listed) => change(`${text.trim() ? `${text.trimEnd()}\n` : "name,source\n"}${listed}`)} />
    <div class="card">
      <label class="field column">Cameras
        <textarea rows="10" spellcheck=${false} value=${text} placeholder=${EXAMPLE} onInput=${(event) => change(event.target.value)}></textarea></label>
      <p class="soft">CSV with the columns name, source, priority, question, paused; or YAML or JSON as in the configuration.</p>
      <label class="field column">From a file
        <input type="file" accept=".csv,.yaml,.yml,.json,.txt" onChange=${async (event) => event.target.files[0] && change(await event.target.files[0].text())} /></label>
      <label class="field switch"><input type="checkbox" role="switch" checked=${force} onChange=${(event) => setForce(event.target.checked)} /> Add them even if there is no capacity</label>
      <div class="actions"><button type="button" class="button" disabled=${busy || !text.trim()} onClick=${() => send(false)}>Check the list</button>
        <button type="button" class="button primary" disabled=${busy || !found || wrong.length > 0 || added.length > 0} onClick=${() => send(true)}>Add ${found ? plural(found.length, "camera") : "them"}</button></div>
      <div role="status">
        ${error && html`<p class="error">${error}</p>`}
        ${found && html`<p>${added.length ? `${plural(added.length, "camera")} added` : `${plural(found.length, "camera")} read`}${wrong.length ? `, ${plural(wrong.length, "line")} wrong${added.length ? "" : ": nothing is added"}` : ""}.</p>`}
      </div>
      ${found && html`<div class="scroll" tabindex="0" role="region" aria-label="Cameras of the list"><table>
        <thead><tr><th scope="col">Line</th><th scope="col">Name</th><th scope="col">Source</th><th scope="col">Result</th></tr></thead>
        <tbody>${[...wrong, ...found.filter((each) => !each.error)].slice(0, MOST_SHOWN).map((each) => html`<tr key=${each.line}>
          <td>${each.line}</td><th scope="row">${each.name || "none"}</th><td>${each.source}</td>
          <td>${each.error ? html`<${Badge} tone="critical">wrong<//> ${each.error}` : html`<${Badge} tone="good">${each.added ? "added" : "good"}<//>`}</td></tr>`)}</tbody>
      </table></div>
      ${found.length > MOST_SHOWN && html`<p class="soft">The first ${MOST_SHOWN} of ${plural(found.length, "camera")}, those with errors before the others.</p>`}`}
    </div>
  </div>`;
}

/** Searches a network for ONVIF cameras; `onTake` receives a chosen one as a CSV line. */
function Discovery({ onTake }) {
  const [asked, setAsked] = useState({ network: "", user: "", password: "" });
  const [state, setState] = useState({ busy: false, said: "", error: "", cameras: [] });
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  const field = (name) => ({ value: asked[name], onInput: (event) => setAsked({ ...asked, [name]: event.target.value }) });
  const search = async (event) => {
    event.preventDefault();
    abort.current = new AbortController();
    const cameras = [];
    let said = "";
    setState({ busy: true, said: "Searching…", error: "", cameras });
    try {
      for await (const { discovery } of stream("/v1/cameras/discover", asked, abort.current.signal)) {
        if (discovery.camera) cameras.push(discovery.camera);
        said = `${discovery.probed} of ${plural(discovery.total, "address", "addresses")} probed, ${discovery.asked} of ${plural(discovery.answered, "device")} asked.`;
        setState({ busy: true, said, error: "", cameras: [...cameras] });
      }
      setState({ busy: false, said, error: "", cameras });
    } catch (failure) {
      setState({ busy: false, said: "", error: failure.message, cameras });
    }
  };
  const take = (camera, stream) => {
    const name = `${camera.name} ${camera.address.split(":")[0]}`.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
    const credentials = asked.user ? `${encodeURIComponent(asked.user)}:${encodeURIComponent(asked.password)}@` : "";
    onTake(`${name},"${stream.source.replace("://", `://${credentials}`).replaceAll('"', "%22")}"\n`);
  };
  return html`<details class="card"><summary>Search a network for ONVIF cameras</summary>
    <form onSubmit=${search}>
      <label class="field column">Network<input type="text" required placeholder="10.0.0.0/24" autocomplete="off" spellcheck=${false} ...${field("network")} /></label>
      <label class="field column">User of the cameras<input type="text" autocomplete="off" spellcheck=${false} ...${field("user")} /></label>
      <label class="field column">Password of the cameras<input type="password" autocomplete="new-password" ...${field("password")} /></label>
      <p class="soft">Only networks named in the configuration. Every device that answers receives the user name and a digest of the password. Nothing is added automatically.</p>
      <div class="actions">${state.busy
        ? html`<button type="button" class="button" onClick=${() => abort.current.abort()}>Stop</button>`
        : html`<button class="button" disabled=${!asked.network.trim()}>Search</button>`}</div>
    </form>
    <p role="status">${state.said}</p>
    ${state.error && html`<p class="error" role="alert">${state.error}</p>`}
    <ul class="camera-rows">${state.cameras.map((camera) => html`<li key=${camera.address} class="camera-row">
      <div class="camera-row-what">${camera.name || "unnamed"} <span class="soft">${camera.address}${camera.error ? `: ${camera.error}` : ""}</span></div>
      <div class="actions">${camera.streams.map((stream) => html`<button key=${stream.source} type="button" class="button small" onClick=${() => take(camera, stream)}>Add ${stream.profile} (${stream.codec} ${stream.width}×${stream.height}) to the list</button>`)}</div>
    </li>`)}</ul>
  </details>`;
}
