// How urgently a camera needs attention: determines the wall's order and its tiles' colours.
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
/** Running without pictures. Generous, since keyframe-only decoding (no active question) shows only keyframes. */
export const isSilent = (camera) => camera.state === "running" && camera.last_frame_age_s > SILENT_S;
export const isTrouble = (camera) => camera.state === "error" || camera.state === "backoff" || isSilent(camera);
export const byName = (a, b) => collator.compare(a.name, b.name);

export function matches(camera, needle) {
  if (!needle) return true;
  const text = [camera.name, camera.source, camera.state, stateWord(camera.state), camera.replica, camera.priority].join("\n");
  return text.toLocaleLowerCase().includes(needle);
}

/** The highest of the newest scores, positive ones first: `{question, score, positive}`, or null. */
export function topAnswer(camera) {
  let top = null;
  for (const answer of camera.last_answers ?? []) {
    if (!top || answer.positive > top.positive || (answer.positive === top.positive && answer.score > top.score)) {
      top = answer;
    }
  }
  return top;
}

/** A camera's worst open incident; those acknowledged or muted rank last. */
export function worstIncident(incidents) {
  let worst = null;
  for (const incident of incidents ?? []) {
    if (incident.ended_s == null && (!worst || weight(incident) > weight(worst))) worst = incident;
  }
  return worst;
}

/**
 * `{level, tone}`; higher levels come first. Tones: "critical", "warning", "trouble", "quiet", "good". Order: open
 * incidents by severity, those acknowledged or muted last; cameras that do not work or send nothing; cameras whose
 * answer is yes; then by score and lowered quality.
 */
export function attention(camera, incidents) {
  const worst = worstIncident(incidents);
  if (worst) return { level: weight(worst), tone: handled(worst) ? "quiet" : toneOf(worst.severity), incident: worst };
  if (isTrouble(camera)) return { level: camera.state === "error" ? 60 : 50, tone: "trouble", incident: null };
  const top = topAnswer(camera);
  // The last answer of a camera that has ended or is offline is out of date.
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
