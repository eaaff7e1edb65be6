// The fleet: utilisation of replicas, lag of answers, lowered quality, alert delivery.
import { post } from "./api.js";
import { html, useState } from "./dom.js";
import { useFetched } from "./fetching.js";
import { count, duration, percent, plural } from "./format.js";
import { Badge, Empty, Failure, Figure, Skeleton, useAttempt } from "./parts.js";
import { may, store, useTopics } from "./store.js";
import { isTrouble } from "./attention.js";

const PERIOD_S = 5;
const FULL_AT = 0.95;
const BUSY_AT = 0.8;
const RUNGS = ["full", "prune", "refresh", "stride", "fps", "shed"];
const LAG_STEPS_S = [0.5, 1, 2, 4, 8];

export function FleetPage() {
  useTopics("cameras", "me");
  const replicas = useFetched("/v1/replicas", { periodS: PERIOD_S });
  const fleet = useFetched("/v1/fleet", { periodS: PERIOD_S });
  const outbox = useFetched("/v1/outbox", { periodS: 3 * PERIOD_S });
  const cameras = [...store.cameras.values()];
  const listed = replicas.data?.replicas ?? [];
  return html`<div class="fleet-page">
    <header class="page-head"><h1>Fleet</h1></header>
    <${Summary} cameras=${cameras} replicas=${listed} fleet=${fleet.data} />
    <div class="two">
      <section class="card" aria-labelledby="fleet-ladder"><h2 id="fleet-ladder">Quality</h2>
        <p class="soft">Under overload, cameras step down this ladder, those that lose least first.</p>
        <${Ladder} cameras=${cameras} /></section>
      <section class="card" aria-labelledby="fleet-lag"><h2 id="fleet-lag">Lag</h2>
        <p class="soft">From a window's last frame to its answer, per camera.</p>
        <${Lags} cameras=${cameras} /></section>
    </div>
    <section class="card" aria-labelledby="fleet-replicas"><h2 id="fleet-replicas">Replicas</h2>
      ${replicas.error && html`<${Failure} error=${replicas.error} onRetry=${replicas.reload} />`}
      ${!replicas.data && !replicas.error && html`<${Skeleton} rows=${3} />`}
      ${replicas.data && (listed.length ? html`<${Replicas} replicas=${listed} reload=${replicas.reload} />` : html`<${Empty} title="No replica is ready">Cameras wait until one is.<//>`)}
    </section>
    <section class="card" aria-labelledby="fleet-sinks"><h2 id="fleet-sinks">Alerts</h2><${Sinks} outbox=${outbox} /></section>
  </div>`;
}

function Summary({ cameras, replicas, fleet }) {
  const running = cameras.filter((camera) => camera.state === "running" && !isTrouble(camera)).length;
  const trouble = cameras.filter(isTrouble).length;
  const rate = fleet?.windows_per_s ?? cameras.reduce((sum, camera) => sum + (camera.windows_per_s ?? 0), 0);
  const full = cameras.reduce((sum, camera) => sum + camera.tokens_full, 0);
  const computed = cameras.reduce((sum, camera) => sum + camera.tokens_computed, 0);
  const taking = replicas.filter((replica) => !replica.draining);
  const used = taking.length ? taking.reduce((sum, replica) => sum + replica.utilisation, 0) / taking.length : null;
  return html`<dl class="figures fleet-figures card">
    <${Figure} label="Cameras running" value=${count(running)} note=${`of ${count(cameras.length)}${trouble ? `, ${count(trouble)} not working` : ""}`} tone=${trouble ? "warning" : ""} />
    <${Figure} label="Windows answered" value=${`${rate.toFixed(rate < 10 ? 1 : 0)} /s`} />
    <${Figure} label="Capacity used" value=${used === null ? "unknown" : percent(used)} note=${taking.length ? `on average over ${plural(taking.length, "replica")}` : "no replica accepts cameras"} tone=${used > FULL_AT ? "warning" : ""} />
    <${Figure} label="Tokens saved" value=${full ? percent(1 - computed / full) : "unknown"} note="of what full windows would compute" />
  </dl>`;
}

function Bars({ rows, total }) {
  return html`<ul class="bars">${rows.map(({ name, value, tone }) => html`<li key=${name}>
    <span>${name}</span><span class="bar" aria-hidden="true"><span class=${tone} style=${{ width: `${total ? (100 * value) / total : 0}%` }}></span></span>
    <span class="number">${count(value)}</span></li>`)}</ul>`;
}

function Ladder({ cameras }) {
  if (!cameras.length) return html`<${Empty} title="No cameras yet">Nothing to lower.<//>`;
  const counts = new Map(RUNGS.map((rung) => [rung, 0]));
  for (const camera of cameras) counts.set(camera.rung || "full", (counts.get(camera.rung || "full") ?? 0) + 1);
  const rows = [...counts].map(([name, value]) => ({ name, value, tone: name === "full" ? "good" : name === "shed" ? "critical" : "lowered" }));
  return html`<${Bars} rows=${rows} total=${cameras.length} />`;
}

function Lags({ cameras }) {
  const measured = cameras.filter((camera) => camera.windows_done > 0).map((camera) => camera.latency_s);
  if (!measured.length) return html`<${Empty} title="No answers yet">Lag is known once cameras have answered.<//>`;
  const rows = [...LAG_STEPS_S, Infinity].map((step, i) => {
    const from = i ? LAG_STEPS_S[i - 1] : 0;
    const value = measured.filter((lag) => lag >= from && lag < step).length;
    return { name: step === Infinity ? `${from} s and more` : `under ${step} s`, value, tone: i < 3 ? "good" : i < 5 ? "warning" : "critical" };
  });
  measured.sort((a, b) => a - b);
  const at = (share) => duration(measured[Math.min(measured.length - 1, Math.floor(share * measured.length))]);
  return html`<${Bars} rows=${rows} total=${measured.length} /><p class="soft">Half of the cameras under ${at(0.5)}, 99 % under ${at(0.99)}.</p>`;
}

function Replicas({ replicas, reload }) {
  const [attempt, , error] = useAttempt();
  const drain = async (replica) => {
    const question = `Drain ${replica.name}? Its ${plural(replica.cameras, "camera")} move to the other replicas.`;
    if (!replica.draining && !confirm(question)) return;
    await attempt(() => post(`/v1/replicas/${encodeURIComponent(replica.name)}/drain`, { undo: replica.draining }));
    reload();
  };
  return html`${error && html`<p class="error" role="alert">${error}</p>`}
  <div class="scroll" tabindex="0" role="region" aria-label="Table of replicas"><table>
    <thead><tr><th scope="col">Replica</th><th scope="col">Load</th><th scope="col">Cameras</th><th scope="col">Lowered</th><th scope="col">Expected lag</th><th scope="col">Waiting</th>${may("admin") && html`<th scope="col"><span class="unseen">Actions</span></th>`}</tr></thead>
    <tbody>${replicas.map((replica) => html`<tr key=${replica.name}>
      <th scope="row">${replica.name} ${replica.draining && html`<${Badge} tone="warning">draining, holds ${count(replica.held)}<//>`} ${replica.trouble && html`<${Badge} tone="critical">${replica.trouble}<//>`}</th>
      <td><span class="load"><span class="bar" aria-hidden="true"><span class=${replica.utilisation > FULL_AT ? "critical" : replica.utilisation > BUSY_AT ? "warning" : "good"}
        style=${{ width: `${Math.min(100, 100 * replica.utilisation)}%` }}></span></span>${replica.utilisation ? percent(replica.utilisation) : "unknown"}</span></td>
      <td>${count(replica.cameras)}</td><td>${count(replica.lowered)}</td>
      <td>${replica.expected_lag_s ? duration(replica.expected_lag_s) : "unknown"}</td><td>${duration(replica.backlog_s)}</td>
      ${may("admin") && html`<td><button type="button" class="button small" onClick=${() => drain(replica)}>${replica.draining ? "Take back" : "Drain"}</button></td>`}
    </tr>`)}</tbody></table></div>`;
}

function Sinks({ outbox: { data, error, reload } }) {
  if (error && !data) return html`<${Failure} error=${error} onRetry=${reload} />`;
  if (!data) return html`<${Skeleton} rows=${2} />`;
  const sinks = Object.entries(data.sinks);
  const mayTest = may("admin");
  return html`${data.trouble && html`<p class="notice">Alerts are not written to disk: ${data.trouble}</p>`}
    ${data.lost > 0 && html`<p class="notice">${plural(data.lost, "alert")} were lost.</p>`}
    ${!sinks.length && html`<${Empty} title="No sink is configured">Incidents are recorded here, but nobody is notified. See <code>alerts.sinks</code> in the configuration.<//>`}
    ${sinks.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of sinks"><table>
      <thead><tr><th scope="col">Sink</th><th scope="col">State</th><th scope="col">Waiting</th><th scope="col">Delivered</th><th scope="col">Failed attempts</th><th scope="col">Dead</th>${mayTest && html`<th scope="col"><span class="unseen">Actions</span></th>`}</tr></thead>
      <tbody>${sinks.map(([name, sink]) => html`<tr key=${name}><th scope="row">${name} <span class="soft">${sink.kind}</span></th>
        <td>${sink.trouble ? html`<${Badge} tone="critical">${sink.trouble}<//>` : html`<${Badge} tone="good">accepting alerts<//>`}</td>
        <td>${count(sink.waiting)}</td><td>${count(sink.delivered)}</td><td>${count(sink.failures)}</td><td>${count(sink.dead)}</td>
        ${mayTest && html`<td><${TestButton} sink=${name} /></td>`}</tr>`)}</tbody></table></div>`}`;
}

/** Sends a test incident to a sink and shows the result. */
function TestButton({ sink }) {
  const [said, setSaid] = useState("");
  const [busy, setBusy] = useState(false);
  const test = async () => {
    setBusy(true);
    setSaid("");
    try {
      await post(`/v1/sinks/${encodeURIComponent(sink)}/test`, {});
      setSaid("Accepted.");
    } catch (failure) {
      setSaid(failure.message);
    }
    setBusy(false);
  };
  return html`<button type="button" class="button small" disabled=${busy} onClick=${test}>${busy ? "Testing…" : "Test"}<span class="unseen"> ${sink}</span></button>
    <span role="status">${said}</span>`;
}
