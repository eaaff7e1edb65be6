// The incident list, and the details of one: picture, clip, events, deliveries, acknowledgement, review.
import { incidentPath, open as openPath, post } from "./api.js";
import { severityRank } from "./attention.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { useFetched, useIncidents } from "./fetching.js";
import { day, duration, moment, now, plural, score, words } from "./format.js";
import { answerOf, IncidentRow, Snapshot, StateOf, titleOf } from "./incident_row.js";
import { MuteButton, Mutes } from "./mutes.js";
import { Back, Badge, Choice, Empty, Failure, Icon, SeverityBadge, Skeleton, useAttempt, useClock, useKept } from "./parts.js";
import { isOlder, may, store, useTopics } from "./store.js";

const LIMIT = 200;
const OWED_PERIOD_S = 4;
const SPANS = [[3600, "the last hour"], [24 * 3600, "the last day"], [7 * 24 * 3600, "the last week"], [0, "everything"]];
const SEVERITIES = [["", "all"], ["critical", "critical"], ["warning", "warning"], ["info", "info"]];
const VERDICTS = [["", "all"], ["unreviewed", "not reviewed"], ["confirmed", "confirmed"], ["rejected", "rejected"]];

export function IncidentsPage({ id }) {
  useTopics("me");
  useClock(10);
  const [onlyOpen, setOnlyOpen] = useKept("incidents-open", false);
  const [severity, setSeverity] = useKept("incidents-severity", "");
  const [verdict, setVerdict] = useKept("incidents-verdict", "");
  const [span, setSpan] = useKept("incidents-span", 24 * 3600);
  const [camera, setCamera] = useKept("incidents-search", "");
  const [muted, setMuted] = useState(0);
  // Rounded to the minute: the path identifies the list and would otherwise change with every render.
  const since = span ? Math.floor((now() - span) / 60) * 60 : 0;
  const [sinceAsked, setSinceAsked] = useState(since);
  useEffect(() => setSinceAsked(since), [span]);
  // Id to page from: incidents older than this one; empty: the newest. Pages of older incidents add no new ones.
  const [before, setBefore] = useState("");
  useEffect(() => setBefore(""), [span, onlyOpen, verdict]);
  const { data, error, reload, incidents } = useIncidents(`/v1/incidents?limit=${LIMIT}${onlyOpen ? "&open=1" : ""}${sinceAsked ? `&since_s=${sinceAsked}` : ""}${verdict ? `&verdict=${verdict}` : ""}${before ? `&before=${before}` : ""}`, () => !before);
  const of = SPANS.find(([value]) => value === span)[1];
  const needle = camera.trim().toLocaleLowerCase();
  // Open incidents always fit the time span, whenever they began.
  const fitting = incidents
    .filter((incident) => incident.ended_s == null || incident.opened_s >= since)
    .filter((incident) => (!onlyOpen || incident.ended_s == null) && (!severity || incident.severity === severity))
    .filter((incident) => !verdict || (incident.verdict || "unreviewed") === verdict)
    .filter((incident) => `${incident.camera}\n${words(incident.subject)}\n${incident.question}`.toLocaleLowerCase().includes(needle));
  const listed = fitting.slice(0, LIMIT);
  const full = Math.max(data?.incidents.length ?? 0, fitting.length) >= LIMIT;
  const cut = before ? `${data?.incidents.length ?? 0} older incidents` : full ? `the newest ${LIMIT} incidents` : "";
  const turn = (id) => {
    setBefore(id);
    scrollTo(0, 0);
  };

  return html`<div class=${`incidents-page ${id ? "with-detail" : ""}`}>
    <section class="timeline" aria-label="Incidents">
      <header class="page-head"><h1>Incidents</h1><p class="soft">${plural(listed.filter((each) => each.ended_s == null).length, "open incident")}</p></header>
      <div class="toolbar">
        <label class="search"><span class="unseen">Search incidents by camera or question</span><${Icon} name="search" />
          <input type="search" placeholder="Camera or question" value=${camera} onInput=${(event) => setCamera(event.target.value)} /></label>
        <${Choice} label="Of" value=${span} options=${SPANS} onChange=${setSpan} />
        <${Choice} label="Severity" value=${severity} options=${SEVERITIES} onChange=${setSeverity} />
        <${Choice} label="Verdict" value=${verdict} options=${VERDICTS} onChange=${setVerdict} />
        <label class="field switch"><input type="checkbox" role="switch" checked=${onlyOpen} onChange=${(event) => setOnlyOpen(event.target.checked)} />Only open</label>
      </div>
      ${listed.length > 0 && html`<${Strip} incidents=${listed} span=${span} />`}
      <${Mutes} serial=${muted} />
      ${error && !data && html`<${Failure} error=${error} onRetry=${reload} />`}
      ${!data && !error && html`<${Skeleton} rows=${6} />`}
      ${data && !listed.length && html`<${Empty} title="No matching incidents">${cut ? `None of ${cut}` : "No incident"} of ${of} matches.<//>`}
      ${cut && html`<p class="soft">Only ${cut} of ${of} are searched.</p>`}
      ${byDay(listed).map(([title, incidents]) => html`<div key=${title} class="day"><h2>${title}</h2>
        <ul class="incident-list">${incidents.map((incident) => html`<${IncidentRow} key=${incident.id} incident=${incident} current=${incident.id === id} />`)}</ul></div>`)}
      ${cut && html`<p class="actions">
        <button type="button" class="button" disabled=${!before} onClick=${() => turn("")}>Newest</button>
        <button type="button" class="button" disabled=${!(data?.incidents.length >= LIMIT)} onClick=${() => turn(data.incidents.at(-1).id)}>Older</button></p>`}
    </section>
    ${id && html`<${Detail} key=${id} id=${id} onMuted=${() => setMuted((serial) => serial + 1)} />`}
  </div>`;
}

function byDay(incidents) {
  const days = new Map();
  for (const incident of incidents) {
    const title = day(incident.opened_s);
    days.set(title, [...(days.get(title) ?? []), incident]);
  }
  return [...days];
}

/** Histogram over time: one bar per interval, its height the number of incidents, its colour the worst severity. */
function Strip({ incidents, span }) {
  const end = now();
  const start = span ? end - span : Math.min(...incidents.map((each) => each.opened_s), end - 3600);
  const bars = 48;
  const cells = Array.from({ length: bars }, () => ({ count: 0, worst: -1 }));
  for (const { opened_s: opened, severity } of incidents) {
    const cell = cells[Math.min(bars - 1, Math.max(0, Math.floor(((opened - start) / (end - start)) * bars)))];
    cell.count += 1;
    cell.worst = Math.max(cell.worst, severityRank(severity));
  }
  const most = Math.max(...cells.map((cell) => cell.count));
  const tones = ["info", "warning", "critical"];
  return html`<figure class="strip" aria-hidden="true">
    <svg viewBox=${`0 0 ${bars * 10} 40`} preserveAspectRatio="none">
      ${cells.map((cell, i) => cell.count > 0 && html`<rect key=${i} class=${tones[cell.worst]} x=${i * 10 + 1} width="8" y=${38 - (36 * cell.count) / most} height=${2 + (36 * cell.count) / most} rx="1.5" />`)}
    </svg>
    <figcaption><span>${duration(end - start)} ago</span><span>now</span></figcaption>
  </figure>`;
}

function Detail({ id, onMuted }) {
  const aside = useRef(null);
  useEffect(() => {
    // On narrow screens it replaces the list, which may have been scrolled down.
    if (aside.current.getBoundingClientRect().top < 0) scrollTo(0, 0);
    const row = document.activeElement.closest(".incident-row a");
    if (row) aside.current.focus({ preventScroll: true });
    return () => aside.current?.contains(document.activeElement) && row?.focus({ preventScroll: true });
  }, []);
  useTopics(`incident:${id}`, "epoch");
  const newest = store.incidents.get(id);
  const [owed, setOwed] = useState(false);
  const askedFor = useRef(null);
  // Events update the incident but not its deliveries, so poll while any is pending.
  const { data, error, reload } = useFetched(incidentPath(id), { periodS: owed ? OWED_PERIOD_S : 0 });
  useEffect(() => {
    if (!data) return;
    store.fetchedIncident(data.incident);
    setOwed(data.deliveries.some((each) => each.state === "pending"));
  }, [data]);
  useEffect(() => {
    // Once per event: while incidents cannot be written to disk, the fetched version stays behind.
    if (!data || askedFor.current === newest || !isOlder(data.incident, newest)) return;
    askedFor.current = newest;
    reload();
  }, [data, newest]);
  useEffect(() => {
    const escape = (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && (location.hash = "#/incidents");
    addEventListener("keydown", escape);
    return () => removeEventListener("keydown", escape);
  }, []);
  const incident = newest ?? data?.incident;
  return html`<aside class="detail card" aria-label="Incident" ref=${aside} tabindex="-1">
    <${Back} href="#/incidents">All incidents<//>
    ${error && !incident && html`<${Failure} error=${error} onRetry=${reload} />`}
    ${!incident && !error && html`<${Skeleton} rows=${5} />`}
    ${incident && html`<${InFull} incident=${incident} detail=${data} onMuted=${onMuted} />`}
  </aside>`;
}

function InFull({ incident, detail, onMuted }) {
  const open = incident.ended_s == null;
  return html`<h2 class="detail-title">${titleOf(incident)}</h2>
    <p><a href=${`#/camera/${encodeURIComponent(incident.camera)}`}>${incident.camera}</a></p>
    <div class="badges"><${SeverityBadge} severity=${incident.severity} /><${StateOf} incident=${incident} /></div>
    <p class="said">${answerOf(incident)}</p>
    <${Footage} incident=${incident} />
    <div class="actions"><${Acknowledge} incident=${incident} /><${Review} incident=${incident} />
      <${MuteButton} camera=${incident.camera} subject=${incident.subject} onDone=${onMuted} /></div>
    <dl class="lines">
      <div><dt>Began</dt><dd>${moment(incident.opened_s)}</dd></div>
      <div><dt>${open ? "So far" : "Ended"}</dt><dd>${open ? duration(now() - incident.opened_s) : moment(incident.ended_s)}${incident.reason ? `: ${incident.reason}` : ""}</dd></div>
      ${incident.kind === "question" && html`<div><dt>Highest score</dt><dd>${score(incident.score)} over ${plural(incident.windows, "window")}</dd></div>`}
      ${incident.acknowledged_by && html`<div><dt>Acknowledged</dt><dd>by ${incident.acknowledged_by}${incident.acknowledged_s ? `, ${moment(incident.acknowledged_s)}` : ""}</dd></div>`}
      ${incident.verdict && html`<div><dt>${incident.verdict === "confirmed" ? "Confirmed" : "Rejected"}</dt><dd>by ${incident.reviewed_by}, ${moment(incident.reviewed_s)}</dd></div>`}
      <div><dt>Id</dt><dd><code>${incident.id}</code></dd></div>
    </dl>
    ${detail?.events?.length > 0 && html`<h3>Events</h3><ol class="plain events">
      ${detail.events.map((event) => html`<li key=${event.key}><span>${moment(event.at_s)}</span> ${event.cause || event.kind}${event.silent ? " (muted)" : ""}</li>`)}</ol>`}
    ${detail?.deliveries?.length > 0 && html`<h3>Deliveries</h3><ul class="plain">
      ${detail.deliveries.map((each, i) => html`<li key=${i}><span>${each.sink}</span>
        <${Badge} tone=${each.state === "delivered" ? "good" : each.state === "dead" ? "critical" : "warning"}>${each.state}<//>
        ${each.error && html`<span class="soft">${each.error}</span>`}</li>`)}</ul>`}`;
}

/** The clip; without one, the snapshot and the reason why there is no clip. */
function Footage({ incident }) {
  const { clip, footage_note: note, clip_url: url } = incident;
  const path = `${incidentPath(incident.id)}/clip.mp4`;
  const [failure, setFailure] = useState(null);
  const gone = failure?.clip === clip ? failure.why : "";
  const failed = async () => {
    try {
      const response = await openPath(path, { headers: { Range: "bytes=0-0" } });
      await response.body?.cancel();
      setFailure({ clip, why: "This browser cannot play the clip." });
    } catch (error) {
      setFailure({ clip, why: error.message });
    }
  };
  if ((clip === "whole" || clip === "part") && !gone) {
    return html`<video class="clip" src=${path} poster=${`${incidentPath(incident.id)}/snapshot.jpg`} controls playsinline muted preload="none"
        aria-label=${`Clip of ${words(incident.subject)} at ${incident.camera}, with what came before and after`} onError=${failed}></video>
      ${note && html`<p class="soft clip-note">${note}</p>`}`;
  }
  const why = gone || note || (clip === "waiting" ? "The clip is being recorded; it continues for a while after the alert." : "");
  return html`${url ? html`<${Snapshot} incident=${incident} large />` : null}${why && html`<p class="soft clip-note">${why}</p>`}`;
}

/** `[run, busy, error]`: `run(path, body)` posts to the incident and stores the reply. */
function usePost(incident) {
  const [attempt, busy, error] = useAttempt();
  const send = async (path, body) => store.fetchedIncident(await post(`${incidentPath(incident.id)}/${path}`, { ...body, by: store.me?.name || "console" }));
  return [(path, body) => attempt(() => send(path, body)), busy, error];
}

function Acknowledge({ incident }) {
  const [run, busy, error] = usePost(incident);
  if (!may("ask")) return null;
  // Always rendered: another button in its place could receive a click meant for it.
  return html`<button type="button" class="button primary" disabled=${busy || incident.ended_s != null || incident.acknowledged_by}
      onClick=${() => run("acknowledge", {})}>${incident.acknowledged_by ? "Acknowledged" : "Acknowledge"}</button>
    ${error && html`<p class="error" role="alert">${error}</p>`}`;
}

/** Verdict: true incident or false alarm, the input of `cameras calibrate`. Pressing it again withdraws it. */
function Review({ incident }) {
  const [run, busy, error] = usePost(incident);
  if (!may("ask")) return null;
  return html`<span class="verdict" role="group" aria-label="Was it a true incident?">
      ${[["confirmed", "Confirm"], ["rejected", "Reject"]].map(([verdict, word]) => html`<button type="button" class="button" key=${verdict} disabled=${busy}
        aria-pressed=${incident.verdict === verdict} onClick=${() => run("review", { verdict: incident.verdict === verdict ? "" : verdict })}>${word}</button>`)}
    </span>
    ${error && html`<p class="error" role="alert">${error}</p>`}`;
}
