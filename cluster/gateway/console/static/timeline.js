// One day of a camera: scores, incidents and their clips, outages, quality.
import { cameraPath } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { useFetched } from "./fetching.js";
import { day, now, score, toMinute, words } from "./format.js";
import { titleOf } from "./incident_row.js";
import { Choice, Failure, Skeleton } from "./parts.js";

const MINUTE = 60;
const MINUTES = 1440;
const DAY_S = MINUTES * MINUTE;
const LANES = { scores: [0, 70], incidents: [76, 14], state: [94, 10], rung: [108, 10] };
const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -60, PageUp: 60 };
const DAYS = [[0, "the last 24 hours"], [1, "the 24 hours before"]];

const nextMinute = () => (Math.floor(now() / MINUTE) + 1) * MINUTE;

export function Timeline({ name, incidents }) {
  const [back, setBack] = useState(0);
  const [question, setQuestion] = useState("");
  // Rounded to the minute: the path identifies the fetched data.
  const [end, setEnd] = useState(nextMinute);
  useEffect(() => {
    const period = setInterval(() => document.visibilityState === "visible" && setEnd(nextMinute()), MINUTE * 1000);
    return () => clearInterval(period);
  }, []);
  const newest = end - back * DAY_S;
  const fetched = useFetched(`${cameraPath(name)}/timeline?since_s=${newest - DAY_S}&until_s=${newest}`);
  // Keep showing the previous data until the next is loaded.
  const drawn = useRef(null);
  if (fetched.data) drawn.current = { data: fetched.data, until: newest };
  const { error, reload } = fetched;
  const { data, until } = drawn.current ?? {};
  const since = until - DAY_S;
  if (error && !data) return html`<${Failure} error=${error} onRetry=${reload} />`;
  if (!data) return html`<${Skeleton} rows=${3} />`;
  const questions = Object.keys(data.scores).sort();
  const shown = questions.includes(question) ? question : questions[0] ?? "";
  const shownIncidents = incidents.filter((each) => each.opened_s < until && (each.ended_s ?? until) > since);
  return html`<div class="toolbar">
      <${Choice} label="Of" value=${back} options=${DAYS} onChange=${setBack} />
      ${questions.length > 1 && html`<${Choice} label="Question" value=${shown} options=${questions.map((id) => [id, words(id)])} onChange=${setQuestion} />`}
    </div>
    <${Day} key=${back} name=${name} since=${since} until=${until} question=${shown} bins=${data.scores[shown] ?? []} states=${data.states} incidents=${shownIncidents} />`;
}

/** `bins`: rows of time, highest score, level, windows, positives; `states`: rows of time, state, rung, gaps. */
function Day({ name, since, until, question, bins, states, incidents }) {
  const [minute, setMinute] = useState(null);
  const line = useRef(null);
  const x = (time) => Math.min(MINUTES, Math.max(0, (time - since) / MINUTE));
  const periods = states.map(([time, state, rung, gaps], i) => ({ from: Math.max(since, time), to: Math.min(until, now(), states[i + 1]?.[0] ?? until), state, rung, gaps, before: states[i - 1]?.[3] ?? gaps }));
  const at = since + (minute ?? MINUTES - 1) * MINUTE;
  const point = (event) => {
    const box = line.current.getBoundingClientRect();
    setMinute(Math.min(MINUTES - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * MINUTES))));
  };
  const onKeyDown = (event) => {
    const from = minute ?? MINUTES - 1;
    if (event.key === "Enter" && incidentsAt(incidents, at, until).length) location.hash = `#/incidents/${encodeURIComponent(incidentsAt(incidents, at, until)[0].id)}`;
    else if (event.key === "Home") setMinute(0);
    else if (event.key === "End") setMinute(MINUTES - 1);
    else if (event.key in STEPS) setMinute(Math.min(MINUTES - 1, Math.max(0, from + STEPS[event.key])));
    else return;
    event.preventDefault();
  };
  const lane = ([top, height], key) => html`<rect key=${key} class="lane" x="0" width=${MINUTES} y=${top} height=${height} />`;
  const box = (className, [top, height], from, to, key) => html`<rect key=${key} class=${className} x=${x(from)} width=${Math.max(2, x(to) - x(from))} y=${top} height=${height} />`;
  const reading = readingOf({ at, until, question, bins, periods, incidents });
  return html`<div class="day-line" ref=${line} tabindex="0" role="slider" aria-label=${`Timeline of ${name}`} aria-orientation="horizontal"
      aria-valuemin="0" aria-valuemax=${MINUTES - 1} aria-valuenow=${minute ?? MINUTES - 1} aria-valuetext=${reading.text}
      onPointerMove=${point} onPointerDown=${point} onKeyDown=${onKeyDown}>
      <svg viewBox=${`0 0 ${MINUTES} 120`} preserveAspectRatio="none" aria-hidden="true">
        ${Object.entries(LANES).map(([key, place]) => lane(place, key))}
        ${bins.map(([time, highest]) => html`<rect key=${time} class="scores" x=${x(time)} width="1.2" y=${70 - 70 * highest} height=${70 * highest} />`)}
        ${incidents.map((each) => box(`incident ${each.severity}`, LANES.incidents, each.opened_s, each.ended_s ?? until, each.id))}
        ${periods.filter((each) => each.state !== "running").map((each) => box("state", LANES.state, each.from, each.to, each.from))}
        ${periods.filter((each) => each.gaps > each.before).map((each) => box("state", LANES.state, each.from, each.from + MINUTE, `gap ${each.from}`))}
        ${periods.filter((each) => each.rung && each.rung !== "full").map((each) => box("lowered", LANES.rung, each.from, each.to, each.from))}
        ${minute !== null && html`<line class="cursor" x1=${minute + 0.5} x2=${minute + 0.5} y1="0" y2="120" />`}
      </svg>
      <div class="day-hours soft" aria-hidden="true"><span>${day(since)}, ${toMinute(since)}</span><span>${toMinute(until)}</span></div>
    </div>
    <p class="soft">From the top: highest score of each minute, incidents, not running or video lost, quality below full. Hover over it, or use the arrow keys.</p>
    <div class="day-reading"><span>${reading.text}</span>
      ${reading.incidents.map((each) => html`<a key=${each.id} href=${`#/incidents/${encodeURIComponent(each.id)}`}>${titleOf(each)}${each.clip === "whole" || each.clip === "part" ? ", with its clip" : ""}</a>`)}</div>
    <details><summary>The hour before this minute as a table</summary>
      <${HourTable} at=${at} until=${until} question=${question} bins=${bins} periods=${periods} incidents=${incidents} /></details>`;
}

const incidentsAt = (incidents, at, until) => incidents.filter((each) => each.opened_s < at + MINUTE && (each.ended_s ?? until) >= at);

/** One minute as text. */
function readingOf({ at, until, question, bins, periods, incidents }) {
  const bin = bins.find(([time]) => time >= at && time < at + MINUTE);
  const period = periods.findLast((each) => each.from < at + MINUTE);
  const found = incidentsAt(incidents, at, until);
  const said = [
    bin ? `${words(question)} ${score(bin[1])}, ${bin[4]} of ${bin[3]} windows yes` : "no answer",
    period ? `${period.state}${period.rung && period.rung !== "full" ? `, quality ${period.rung}` : ""}` : "state not known",
    ...(period && period.gaps > period.before && period.from >= at ? ["video was lost"] : []),
    ...found.map((each) => `incident: ${titleOf(each)}`),
  ];
  return { text: `${toMinute(at)}: ${said.join("; ")}`, incidents: found };
}

function HourTable({ at, until, question, bins, periods, incidents }) {
  const minutes = Array.from({ length: 60 }, (_, i) => at - i * MINUTE);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of the hour"><table>
    <thead><tr><th scope="col">Time</th><th scope="col">Score</th><th scope="col">Yes</th><th scope="col">State</th><th scope="col">Quality</th><th scope="col">Incidents</th></tr></thead>
    <tbody>${minutes.map((time) => {
      const bin = bins.find(([start]) => start >= time && start < time + MINUTE);
      const period = periods.findLast((each) => each.from < time + MINUTE);
      return html`<tr key=${time}><td>${toMinute(time)}</td><td>${bin ? score(bin[1]) : "–"}</td><td>${bin ? `${bin[4]} of ${bin[3]}` : "–"}</td>
        <td>${period?.state ?? "–"}</td><td>${period?.rung ?? "–"}</td><td>${incidentsAt(incidents, time, until).map((each) => titleOf(each)).join(", ") || "–"}</td></tr>`;
    })}</tbody>
  </table></div>`;
}
