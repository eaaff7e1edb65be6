// Preview of a question: its recent scores, or scores replayed from the camera's memory, and the incidents that its
// threshold would open. The gateway computes the incidents by its alert rule; the page only draws them.
import { post, stream } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { clock, count, duration, plural, score } from "./format.js";
import { Choice } from "./parts.js";
import { line } from "./sparkline.js";
import { useHistory } from "./fetching.js";

const SETTLE_MS = 150;
const HOUR_S = 3600;
const SPANS = [[900, "the last 15 minutes"], [HOUR_S, "the last hour"], [6 * HOUR_S, "the last 6 hours"]];
const WIDTH = 600;
const HEIGHT = 140;
const MOST_LISTED = 8;

/** `question`: as in the form; `known`: its text is unchanged, so that recent scores apply to it. */
export function Replay({ camera, question, known, onThreshold }) {
  const history = useHistory(camera);
  const [since, setSince] = useState(HOUR_S);
  const [replay, setReplay] = useState(null);
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  // Scores of another text do not apply.
  useEffect(() => {
    abort.current?.abort();
    setReplay(null);
  }, [question.text]);
  const lately = known ? (history?.scores.get(question.id) ?? []).map(([end, value, , , length]) => [end - (length || 1), end, value]) : [];
  // Extend each window back to the previous one: skipped windows would leave gaps between them.
  const windows = joined(replay ? replay.windows : lately);
  const incidents = useRehearsal(windows, question);

  const run = async () => {
    abort.current = new AbortController();
    let state = { windows: [], done: 0, total: 0, missing: 0, busy: true, error: "" };
    const tell = (change) => setReplay((state = { ...state, ...change }));
    tell({});
    try {
      const body = { camera, text: question.text.trim(), since_s: since };
      for await (const { window } of stream("/v1/replay", body, abort.current.signal)) {
        const { start_s: start, end_s: end, score: value, done, total } = window;
        if (value === null) tell({ done, total, missing: state.missing + 1 });
        else tell({ done, total, windows: [...state.windows, [start, end, value]] });
      }
      tell({ busy: false });
    } catch (failure) {
      tell({ busy: false, error: failure.message });
    }
  };
  const busy = replay?.busy;
  return html`<div class="replay">
    <div class="ask-actions">
      <${Choice} label="About" value=${since} options=${SPANS} onChange=${setSince} />
      ${busy
        ? html`<button type="button" class="button" onClick=${() => abort.current.abort()}>Stop</button>`
        : html`<button type="button" class="button" disabled=${!question.text.trim()} onClick=${run}>Replay</button>`}
    </div>
    <p class="soft" role="status">${status(replay, windows, lately)}</p>
    ${busy && replay.total > 0 && html`<progress value=${replay.done} max=${replay.total} aria-label="Windows replayed"></progress>`}
    ${replay?.error && html`<p class="error" role="alert">${replay.error}</p>`}
    <label class="field column">Threshold ${score(question.threshold)}
      <input type="range" min="0.01" max="0.99" step="0.01" value=${question.threshold} onInput=${(event) => onThreshold(Number(event.target.value))} /></label>
    ${windows.length > 1 && html`<${ScorePlot} windows=${windows} threshold=${question.threshold} incidents=${incidents ?? []} />`}
    ${windows.length > 0 && html`<div class="rehearsal" aria-live="polite">
      <p><strong>${incidents ? plural(incidents.length, "incident") : "…"}</strong> at this threshold,
        ${" "}${count(windows.filter(([, , value]) => value >= question.threshold).length)} of ${plural(windows.length, "window")} yes.</p>
      <ul class="plain">${(incidents ?? []).slice(-MOST_LISTED).map((each) => html`<li key=${each.start_s}>
        ${clock(each.start_s)} to ${each.end_s === null ? "now" : clock(each.end_s)}, highest ${score(each.score)}, ${each.severity}</li>`)}</ul>
    </div>`}
  </div>`;
}

function joined(windows) {
  return windows.map(([start, end, value], i) => [i ? Math.min(start, windows[i - 1][1]) : start, end, value]);
}

function status(replay, windows, lately) {
  if (replay?.busy) return replay.total ? `${count(replay.done)} of ${plural(replay.total, "window")} replayed…` : "Looking back…";
  if (replay) {
    const missing = replay.missing ? `; no memory of ${plural(replay.missing, "window")}` : "";
    const [last, before] = [windows[windows.length - 1], windows[windows.length - 2]];
    const apart = before && last[1] - before[1];
    return `${plural(windows.length, "window")} replayed from its memory${apart ? `, ${duration(apart)} apart` : ""}${missing}.`;
  }
  if (lately.length) return `Its scores of the last ${duration(lately[lately.length - 1][1] - lately[0][0])}.`;
  return "Replay it on the camera's memory to see what it would have answered.";
}

/** The incidents that the alert rule would open for the windows; null until computed. */
function useRehearsal(windows, { threshold, consecutive, cooldown_s, severity }) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    if (!windows.length) return setFound(null);
    let wanted = true;
    const timer = setTimeout(async () => {
      const rule = { threshold, consecutive: consecutive ?? null, cooldown_s: cooldown_s ?? null, severity: severity ?? null };
      const reply = await post("/v1/rehearse", { windows: windows.slice(-1000), rule }).catch(() => null);
      if (wanted && reply) setFound(reply.incidents);
    }, SETTLE_MS);
    return () => {
      wanted = false;
      clearTimeout(timer);
    };
  }, [windows.length, windows[0]?.[1], threshold, consecutive, cooldown_s, severity]);
  return found;
}

function ScorePlot({ windows, threshold, incidents }) {
  const first = windows[0][1];
  const last = Math.max(windows[windows.length - 1][1], first + 1);
  const x = (time) => (WIDTH * (Math.min(Math.max(time, first), last) - first)) / (last - first);
  const y = (value) => 6 + (HEIGHT - 12) * (1 - value);
  const label = `Scores from ${clock(first)} to ${clock(last)}, highest ${score(Math.max(...windows.map(([, , value]) => value)))}`;
  return html`<svg class="score-plot hue-0" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${label}>
    ${incidents.map((each) => html`<rect key=${each.start_s} class="rehearsed" x=${x(each.start_s)} width=${Math.max(2, x(each.end_s ?? last) - x(each.start_s))} y="0" height=${HEIGHT} />`)}
    <g class="series"><path d=${line(windows.map(([, end, value]) => [end, value]), x, y)} /></g>
    <line class="threshold" x1="0" x2=${WIDTH} y1=${y(threshold)} y2=${y(threshold)} />
  </svg>`;
}
