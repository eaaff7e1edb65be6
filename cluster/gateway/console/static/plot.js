// Scores over time, one line per question, with changes of the quality rung; readable by pointer or as a table.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { clock, score, words } from "./format.js";
import { line } from "./sparkline.js";

const HEIGHT = 220;
const MARGIN = { left: 34, right: 12, top: 14, bottom: 26 };
const TABLE_ROWS = 20;

export function Plot({ history }) {
  const frame = useRef(null);
  const [width, setWidth] = useState(640);
  const [hidden, setHidden] = useState(() => new Set());
  const [at, setAt] = useState(null);
  useLayoutEffect(() => setWidth(frame.current.clientWidth || 640), []);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(200, entry.contentRect.width)));
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  const questions = [...history.scores.keys()].sort();
  const shown = questions.filter((id) => !hidden.has(id) && history.scores.get(id).length);
  const times = shown.flatMap((id) => history.scores.get(id).map(([time]) => time));
  const first = Math.min(...times);
  const last = Math.max(...times, first + 1);
  const inner = width - MARGIN.left - MARGIN.right;
  const x = (time) => MARGIN.left + (inner * (time - first)) / (last - first);
  const y = (value) => MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - value);
  const toggle = (id) => {
    const next = new Set(hidden);
    if (!next.delete(id)) next.add(id);
    setHidden(next);
  };
  const move = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const time = first + ((event.clientX - box.left - MARGIN.left) / inner) * (last - first);
    setAt(times.reduce((best, each) => (Math.abs(each - time) < Math.abs(best - time) ? each : best), times[0]));
  };
  return html`<div class="plot" ref=${frame}>
    <div class="legend" role="group" aria-label="Questions shown">
      ${questions.map(
        (id, i) => html`<button type="button" key=${id} class=${`legend-item hue-${i % 6}`} aria-pressed=${!hidden.has(id)} onClick=${() => toggle(id)}>
          <span class="swatch" aria-hidden="true"></span>${words(id)}
        </button>`,
      )}
    </div>
    ${shown.length === 0
      ? html`<p class="soft">No scores to show.</p>`
      : html`<svg width=${width} height=${HEIGHT} role="img" aria-label="Scores over time; the table below has the same numbers"
          onPointerMove=${move} onPointerLeave=${() => setAt(null)}>
          ${[0, 0.25, 0.5, 0.75, 1].map((value) => html`<g key=${value} class="tick">
            <line x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${y(value)} y2=${y(value)} />
            ${value % 0.5 === 0 && html`<text x=${MARGIN.left - 8} y=${y(value) + 4} text-anchor="end">${value}</text>`}
          </g>`)}
          ${ticks(first, last, Math.max(2, Math.floor(inner / 110))).map(
            (time, i, all) => html`<text key=${time} class="tick-label" x=${x(time)} y=${HEIGHT - 6}
              text-anchor=${i === 0 ? "start" : i === all.length - 1 ? "end" : "middle"}>${clock(time)}</text>`,
          )}
          ${history.rungs.slice(1).filter(([time]) => time > first && time < last).map(
            ([time, rung]) => html`<g key=${time} class="rung-change">
              <line x1=${x(time)} x2=${x(time)} y1=${MARGIN.top} y2=${HEIGHT - MARGIN.bottom} />
              <text x=${x(time) + 4} y=${MARGIN.top + 8}>${rung}</text>
            </g>`,
          )}
          ${shown.map((id) => {
            const points = history.scores.get(id);
            return html`<g key=${id} class=${`series hue-${questions.indexOf(id) % 6}`}>
              <path d=${line(points, x, y)} />
              ${points.filter(([, , positive]) => positive).map(([time, value]) => html`<circle key=${time} cx=${x(time)} cy=${y(value)} r="3.2" />`)}
            </g>`;
          })}
          ${at !== null && html`<line class="cursor" x1=${x(at)} x2=${x(at)} y1=${MARGIN.top} y2=${HEIGHT - MARGIN.bottom} />`}
        </svg>`}
    <p class="plot-reading" aria-hidden="true">
      ${at === null ? "Filled points: the answer was yes. Move over the plot to read it." : reading(history, shown, at)}
    </p>
    <details>
      <summary>The newest scores as a table</summary>
      <${ScoreTable} history=${history} questions=${questions} />
    </details>
  </div>`;
}

function ScoreTable({ history, questions }) {
  const rows = questions
    .flatMap((id) => history.scores.get(id).map(([time, value, positive, gated]) => ({ id, time, value, positive, gated })))
    .sort((a, b) => b.time - a.time)
    .slice(0, TABLE_ROWS);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of scores"><table>
    <thead><tr><th scope="col">Time</th><th scope="col">Question</th><th scope="col">Score</th><th scope="col">Answer</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.id + row.time}>
      <td>${clock(row.time)}</td><td>${words(row.id)}</td><td>${score(row.value)}</td>
      <td>${row.positive ? "yes" : "no"}${row.gated ? ", nothing moved" : ""}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

function reading(history, shown, at) {
  const said = shown.flatMap((id) => {
    const point = history.scores.get(id).find(([time]) => Math.abs(time - at) < 0.5);
    return point ? [`${words(id)} ${score(point[1])}${point[3] ? " (nothing moved)" : ""}`] : [];
  });
  return `${clock(at)}: ${said.join(", ")}`;
}

function ticks(first, last, most) {
  return Array.from({ length: most }, (_, i) => first + ((last - first) * i) / (most - 1));
}
