// One incident as a row of a list.
import { incidentPath } from "./api.js";
import { html, useState } from "./dom.js";
import { ago, clock, duration, moment, now, plural, score, words } from "./format.js";
import { Badge, SeverityBadge } from "./parts.js";

export function IncidentRow({ incident, current = false, bare = false }) {
  return html`<li class=${`incident-row ${incident.severity} ${incident.ended_s == null ? "open" : "ended"}`}>
    <a href=${`#/incidents/${encodeURIComponent(incident.id)}`} aria-current=${current ? "true" : undefined}>
      <time class="incident-time" dateTime=${new Date(incident.opened_s * 1000).toISOString()} title=${moment(incident.opened_s)}>
        ${clock(incident.opened_s)}<span class="soft">${ago(incident.opened_s)}</span></time>
      <${Snapshot} incident=${incident} />
      <span class="incident-what">
        <span class="incident-title">${titleOf(incident)}${!bare && html`<span class="soft"> at </span>${incident.camera}`}</span>
        <span class="incident-text soft">${answerOf(incident)}</span>
        <span class="badges"><${SeverityBadge} severity=${incident.severity} /><${StateOf} incident=${incident} /></span>
      </span>
    </a>
  </li>`;
}

/** Title: the question, or the camera's fault. */
export const titleOf = (incident) => incident.question || words(incident.subject);

/** The answer: its explanation, or the score if there is none. */
export function answerOf(incident) {
  const bare = /^(yes|no)?\W*$/i.test(incident.text);
  return bare && incident.kind === "question" ? `Yes, ${score(incident.score)} at most over ${plural(incident.windows, "window")}` : incident.text;
}

export function StateOf({ incident }) {
  const open = incident.ended_s == null;
  const lasted = duration((open ? now() : incident.ended_s) - incident.opened_s);
  return html`<${Badge} tone=${open ? incident.severity : "quiet"}>${open ? `open for ${lasted}` : `lasted ${lasted}`}<//>
    ${incident.acknowledged_by && html`<${Badge} tone="good">acknowledged by ${incident.acknowledged_by}<//>`}
    ${incident.verdict && html`<${Badge} tone=${incident.verdict === "confirmed" ? "good" : "quiet"}>${incident.verdict}<//>`}
    ${incident.muted && html`<${Badge}>muted<//>`}`;
}

/** The incident's snapshot, or an empty box. */
export function Snapshot({ incident, large = false }) {
  // A new incident has no snapshot yet: try again when its clip's state changes. Derived, not reset in an effect, which
  // on a slow page would run after the error.
  const [missingAt, setMissingAt] = useState(null);
  if (missingAt === incident.clip || !incident.snapshot_url) return html`<span class=${`snapshot none ${large ? "large" : ""}`}>${large ? "No snapshot" : ""}</span>`;
  return html`<img class=${`snapshot ${large ? "large" : ""}`} src=${`${incidentPath(incident.id)}/snapshot.jpg`} loading="lazy" decoding="async"
    alt=${large ? `${titleOf(incident)} at ${incident.camera}` : ""} onError=${() => setMissingAt(incident.clip)} />`;
}
