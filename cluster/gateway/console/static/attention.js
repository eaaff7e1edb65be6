// How badly a camera wants a look: what the wall is sorted by, and what its tiles are coloured by.
const SEVERITIES = ["info", "warning", "critical"];
const SILENT_S = 30;
const collator = new Intl.Collator(undefined, { numeric: true });
const STATE_WORDS = {
  waiting: "Waiting",
  connecting: "Connecting",
  running: "Running",
  backoff: "Trying again",
  error: "Not working",
  ended: "Ended",
  paused: "Paused",
};

export const severityRank = (severity) => SEVERITIES.indexOf(severity);
export const stateWord = (state) => STATE_WORDS[state] ?? state;
/** It runs and nothing comes. In keyframes only, as while nothing is asked, pictures are as far apart as keyframes. */
export const isSilent = (camera) => camera.state === "running" && camera.last_frame_age_s > SILENT_S;
export const isTrouble = (camera) => camera.state === "error" || camera.state === "backoff" || isSilent(camera);
export const byName = (a, b) => collator.compare(a.name, b.name);

export function matches(camera, needle) {
  if (!needle) return true;
  const text = [camera.name, camera.source, camera.state, stateWord(camera.state), camera.replica, camera.priority].join("\n");
  return text.toLocaleLowerCase().includes(needle);
}

/** The highest newest score, and its question: `{question, score, positive}`, or null before the first answer. */
export function topAnswer(camera) {
  let top = null;
  for (const answer of camera.last_answers ?? []) {
    if (!top || answer.positive > top.positive || (answer.positive === top.positive && answer.score > top.score)) {
      top = answer;
    }
  }
  return top;
}

/** Of a camera's incidents that are open: the worst one nobody has acknowledged or muted, else the worst. */
export function worstIncident(incidents) {
  let worst = null;
  for (const incident of incidents ?? []) {
    if (incident.ended_s == null && (!worst || weight(incident) > weight(worst))) worst = incident;
  }
  return worst;
}

/**
 * `{level, tone}`: the higher the level, the further in front. Tones: "critical", "warning", "trouble", "quiet", "good".
 * An open incident comes first, by severity, those that somebody has seen to last; then cameras that do not work or send
 * nothing; then cameras that answer yes; then by score, and by how much quality was taken from them.
 */
export function attention(camera, incidents) {
  const worst = worstIncident(incidents);
  if (worst) return { level: weight(worst), tone: handled(worst) ? "quiet" : toneOf(worst.severity), incident: worst };
  if (isTrouble(camera)) return { level: camera.state === "error" ? 60 : 50, tone: "trouble", incident: null };
  const top = topAnswer(camera);
  // What a camera that is over or away answered last is past.
  const positive = top?.positive && camera.state === "running";
  const level = (positive ? 30 : 0) + 10 * (top?.score ?? 0) + (camera.rung && camera.rung !== "full" ? 2 : 0);
  if (camera.state === "running") return { level, tone: positive ? "warning" : "good", incident: null };
  return { level: 5 + level, tone: "quiet", incident: null };
}

const handled = (incident) => Boolean(incident.acknowledged_by) || incident.muted;
const weight = (incident) => (handled(incident) ? 40 : 100) + 20 * (severityRank(incident.severity) + 1);

function toneOf(severity) {
  return severity === "critical" ? "critical" : "warning";
}
