// A camera's newest scores as a small line chart that marks positive answers.
import { html } from "./dom.js";

const WIDTH = 100;
const HEIGHT = 24;
const MOST_LINES = 4;

export function Sparkline({ history, question }) {
  const lines = [...(history?.scores ?? [])].filter(([, points]) => points.length > 1);
  if (!lines.length) return html`<svg class="sparkline" viewBox="0 0 100 24" aria-hidden="true"></svg>`;
  lines.sort(([a], [b]) => (a === question) - (b === question));
  const shown = lines.slice(-MOST_LINES);
  const first = Math.min(...shown.map(([, points]) => points[0][0]));
  const last = Math.max(...shown.map(([, points]) => points[points.length - 1][0]));
  const x = (time) => (WIDTH * (time - first)) / Math.max(1e-6, last - first);
  const y = (score) => HEIGHT - 3 - (HEIGHT - 5) * score;
  const top = shown[shown.length - 1];
  const newest = top[1][top[1].length - 1];
  const label = `${top[0]}: ${top[1].length} scores, newest ${newest[1].toFixed(2)}`;
  return html`<svg class="sparkline" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label=${label}>
    ${shown.map(([id, points]) => html`<path key=${id} class=${id === top[0] ? "line top" : "line"} d=${line(points, x, y)} />`)}
    <path class="yes" d=${stretches(top[1], x)} />
  </svg>`;
}

/** An SVG path through `points`, `[time, score, …]` each. */
export function line(points, x, y) {
  return points.map(([time, score], i) => `${i ? "L" : "M"}${x(time).toFixed(1)} ${y(score).toFixed(1)}`).join("");
}

function stretches(points, x) {
  let path = "";
  points.forEach(([time, , positive], i) => {
    if (!positive) return;
    const from = x(i ? points[i - 1][0] : time);
    path += `M${from.toFixed(1)} ${HEIGHT - 1}H${x(time).toFixed(1)}`;
  });
  return path;
}
