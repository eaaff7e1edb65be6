// One camera: picture, answers, quality and its reason, memory, and a question box.
import { AskBox } from "./ask.js";
import { attention } from "./attention.js";
import { html, useState } from "./dom.js";
import { useFetched, useHistory, useIncidents } from "./fetching.js";
import { bytes, clock, count, duration, moment, percent, plural, score, words } from "./format.js";
import { IncidentRow } from "./incident_row.js";
import { MuteButton, Mutes } from "./mutes.js";
import { Back, Badge, Empty, Failure, Figure, Picture, RungBadge, Skeleton, StateBadge } from "./parts.js";
import { pictures } from "./pictures.js";
import { LiveView } from "./player.js";
import { Plot } from "./plot.js";
import { MAX_INCIDENTS, may, store, useTopics } from "./store.js";
import { Timeline } from "./timeline.js";

const MOST_LISTED = 50;

export function CameraPage({ name }) {
  useTopics(`camera:${name}`, "epoch", "me");
  const [muted, setMuted] = useState(0);
  const listed = useIncidents(`/v1/incidents?camera=${encodeURIComponent(name)}&limit=${MAX_INCIDENTS}`, (incident) => incident.camera === name);
  const camera = store.cameras.get(name);
  if (!camera) {
    return html`<${Back} href="#/">All cameras<//><h1>${name}</h1>
      <${Empty} title="There is no such camera">It was removed, or your token may not see it.<//>`;
  }
  const seen = attention(camera, store.openIncidents(name));
  return html`<article class="camera-page">
    <${Back} href="#/">All cameras<//>
    <header class="page-head">
      <h1>${name}</h1>
      <div class="badges">
        <${StateBadge} camera=${camera} /><${RungBadge} camera=${camera} always />
        ${seen.incident && html`<a href=${`#/incidents/${encodeURIComponent(seen.incident.id)}`}><${Badge} tone=${seen.tone}>${words(seen.incident.subject)}<//></a>`}
        ${camera.priority !== "normal" && html`<${Badge}>priority ${camera.priority}<//>`}
      </div>
      <div class="actions"><${MuteButton} camera=${name} subject="*" onDone=${() => setMuted(muted + 1)} /></div>
    </header>
    <${Mutes} serial=${muted} camera=${name} />
    ${camera.reason && html`<p class="notice">${camera.reason}${camera.retry_in_s > 0 ? `; next try in ${duration(camera.retry_in_s)}` : ""}</p>`}
    <div class="camera-top">
      <section class="card picture-card" aria-label="Newest picture"><${BigPicture} name=${name} /><${LiveView} name=${name} key=${name} /></section>
      <section class="card" aria-labelledby="camera-figures"><h2 id="camera-figures">Now</h2><${Figures} camera=${camera} /></section>
    </div>
    <section class="card" aria-labelledby="camera-scores"><h2 id="camera-scores">Scores</h2><${Scores} camera=${camera} /></section>
    <section class="card" aria-labelledby="camera-day"><h2 id="camera-day">Timeline</h2><${Timeline} name=${name} key=${name} incidents=${listed.incidents} /></section>
    <div class="two">
      <section class="card" aria-labelledby="camera-ask"><h2 id="camera-ask">Ask this camera</h2>
        ${may("ask") ? html`<${AskBox} camera=${name} key=${name} />` : html`<p class="soft">Asking needs a token with the role “ask”.</p>`}</section>
      <section class="card" aria-labelledby="camera-memory"><h2 id="camera-memory">Memory</h2><${Memory} camera=${camera} /></section>
    </div>
    <section class="card" aria-labelledby="camera-incidents"><h2 id="camera-incidents">Incidents</h2><${Incidents} listed=${listed} /></section>
  </article>`;
}

function BigPicture({ name }) {
  const [kept, setKept] = useState(pictures.kept);
  const show = (on) => {
    pictures.showKept(on);
    setKept(on);
  };
  return html`<${Picture} camera=${name} width=${640} />
    <label class="field switch"><input type="checkbox" role="switch" checked=${kept} onChange=${(event) => show(event.target.checked)} />
      Highlight the kept patches, which the model sees</label>`;
}

function Figures({ camera }) {
  const lowered = camera.rung && camera.rung !== "full";
  const saved = camera.tokens_full > 0 ? 1 - camera.tokens_computed / camera.tokens_full : null;
  return html`<dl class="figures">
    <${Figure} label="Tokens saved" value=${saved === null ? "not known yet" : percent(saved)}
      note=${saved === null ? "" : `${count(camera.tokens_computed)} computed of ${count(camera.tokens_full)}`} />
    <${Figure} label="Quality" value=${camera.rung || "full"} tone=${lowered ? "lowered" : ""} note=${lowered ? camera.rung_reason : "as configured"} />
    <${Figure} label="Last answer took" value=${duration(camera.latency_s)}
      note=${camera.expected_lag_s > 0 ? `${duration(camera.expected_lag_s)} expected` : ""} />
    <${Figure} label="Windows" value=${count(camera.windows_done)} note=${windows(camera)} />
    <${Figure} label="Memory held" value=${bytes(camera.memory_bytes)} note=${plural(camera.memory_frames, "frame")} />
    <${Figure} label="Newest frame" value=${camera.state === "running" ? `${duration(camera.last_frame_age_s)} ago` : "none"}
      note=${camera.width ? `${camera.codec} ${camera.width} × ${camera.height}, cue ${camera.cue}, decoded on ${camera.decode}` : ""} />
  </dl>
  <dl class="lines">
    <div><dt>Source</dt><dd class="wrap">${camera.source || "pushed"}</dd></div>
    <div><dt>Decoder</dt><dd>${camera.decoder || "none yet"}</dd></div>
    <div><dt>Replica</dt><dd>${camera.replica || "none yet"}</dd></div>
    ${camera.decode_errors + camera.gaps > 0 && html`<div><dt>Damage</dt><dd>${plural(camera.decode_errors, "decoding error")}, ${plural(camera.gaps, "gap")}</dd></div>`}
  </dl>`;
}

function windows(camera) {
  const parts = [[camera.windows_gated, "nothing moved"], [camera.windows_dropped, "dropped"], [camera.windows_lost, "lost"]];
  return parts.filter(([number]) => number > 0).map(([number, word]) => `${count(number)} ${word}`).join(", ");
}

function Scores({ camera }) {
  const history = useHistory(camera.name);
  if (!history) return html`<${Skeleton} rows=${3} />`;
  if (![...history.scores.values()].some((points) => points.length)) {
    return html`<${Empty} title="No answers yet">The first one comes after the camera's first stride.<//>`;
  }
  const newest = [...history.scores].filter(([, points]) => points.length).map(([id, points]) => [id, points[points.length - 1]]);
  return html`<ul class="answers">
      ${newest.sort((a, b) => b[1][1] - a[1][1]).map(([id, [time, value, positive, gated]]) => html`<li key=${id}>
        <span class="answer-question">${words(id)}</span>
        <span class="bar" aria-hidden="true"><span class=${positive ? "yes" : ""} style=${{ width: `${100 * value}%` }}></span></span>
        <span class=${`tile-score ${positive ? "yes" : ""}`}>${positive ? "yes" : "no"} ${score(value)}</span>
        <span class="soft">${clock(time)}${gated ? ", nothing moved" : ""}</span>
      </li>`)}
    </ul>
    <${Plot} history=${history} />
    ${history.rungs.length > 1 && html`<details><summary>Changes of quality</summary><ul class="plain">
      ${history.rungs.slice(1).slice(-10).reverse().map(([time, rung, reason]) => html`<li key=${time}>${moment(time)}: <strong>${rung}</strong>${reason ? `, ${reason}` : ""}</li>`)}
    </ul></details>`}`;
}

function Memory({ camera }) {
  const { data, error, reload } = useFetched(`/v1/memory/${encodeURIComponent(camera.name)}`, { periodS: 15 });
  if (error && error.status !== 404 && error.status !== 409 && !data) return html`<${Failure} error=${error} onRetry=${reload} />`;
  if (error && !data) return html`<${Empty} title="No memory">${error.message}<//>`;
  if (!data) return html`<${Skeleton} rows=${2} />`;
  return html`${camera.memory_state && html`<p class="notice">${camera.memory_state}</p>`}
    <dl class="lines">
      <div><dt>Reaches back</dt><dd>${camera.memory_oldest_s > 0 ? duration(camera.memory_oldest_s) : "not yet"}</dd></div>
      <div><dt>Frames</dt><dd>${count(data.frames)}</dd></div>
      ${Object.entries(data.tier_bytes ?? {}).map(([tier, size]) => html`<div key=${tier}><dt>${tier === "recent" ? "In no tier yet" : `In tier ${words(tier)}`}</dt>
        <dd>${bytes(size)}${tier === "recent" ? "" : ` of ${bytes(data.cap_bytes)}`}${data.tier_states?.[tier] ? html` <${Badge} tone="warning">${data.tier_states[tier]}<//>` : ""}</dd></div>`)}
      <div><dt>Kept by</dt><dd>${[data.compressor, data.organiser, data.retriever].filter(Boolean).join(", ")}</dd></div>
    </dl>`;
}

function Incidents({ listed: { data, error, reload, incidents } }) {
  if (error && !data) return html`<${Failure} error=${error} onRetry=${reload} />`;
  if (!data) return html`<${Skeleton} rows=${2} />`;
  if (!incidents.length) return html`<${Empty} title="No incidents">No question has opened an incident here.<//>`;
  return html`<ul class="incident-list">${incidents.slice(0, MOST_LISTED).map((incident) => html`<${IncidentRow} key=${incident.id} incident=${incident} bare />`)}</ul>
    ${incidents.length > MOST_LISTED && html`<p class="soft">Only the newest ${MOST_LISTED}. The timeline shows two days.</p>`}`;
}
