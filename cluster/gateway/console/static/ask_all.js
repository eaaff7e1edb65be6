// One question to all cameras: streamed answers, moments ordered by rank, progress.
import { stream } from "./api.js";
import { AskActions, LONGEST } from "./ask.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { count, duration, plural, score } from "./format.js";
import { Badge, Thumbnail } from "./parts.js";

const MOST_SHOWN = 24;
const NOTHING = { moments: [], progress: null, failed: new Map(), state: "" };

export function AskAll() {
  const [text, setText] = useState("");
  const [only, setOnly] = useState("");
  const [since, setSince] = useState(0);
  const [run, setRun] = useState(NOTHING);
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  const busy = run.state === "asking";

  const ask = async (event) => {
    event?.preventDefault();
    const question = text.trim();
    if (!question || busy) return;
    setRun({ ...NOTHING, question, state: "asking" });
    abort.current = new AbortController();
    try {
      const body = { text: question, with_pictures: true };
      if (since) body.since_s = since;
      const patterns = only.split(/[,\s]+/).filter(Boolean);
      if (patterns.length) body.cameras = patterns;
      let finished = false;
      for await (const event of stream("/v1/ask/all", body, abort.current.signal)) {
        finished ||= event.progress?.finished ?? false;
        setRun((before) => step(before, event));
      }
      if (!finished) throw new Error("The answers ended before all cameras were asked.");
      setRun((before) => ({ ...before, state: "done" }));
    } catch (error) {
      setRun((before) => ({ ...before, state: "failed", error: error.message }));
    }
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
    if (event.key === "Escape" && busy) abort.current.abort();
  };
  return html`<div class="ask-all">
    <form onSubmit=${ask} onKeyDown=${onKeyDown}>
      <label class="field column">Question to all cameras
        <textarea rows="2" maxlength=${LONGEST} value=${text} placeholder="Was there a red van?" onInput=${(event) => setText(event.target.value)}></textarea></label>
      <label class="field column">Only cameras named
        <input value=${only} placeholder="all, or patterns such as gate-*, yard-*" autocomplete="off" spellcheck=${false} onInput=${(event) => setOnly(event.target.value)} /></label>
      <${AskActions} since=${since} setSince=${setSince} busy=${busy} onStop=${() => abort.current.abort()} word="Ask all" disabled=${!text.trim()} />
    </form>
    ${run.state && html`<${Found} run=${run} />`}
  </div>`;
}

/** State after one more line of the reply. */
function step(before, { answer, progress }) {
  if (progress) return { ...before, progress };
  if (answer.error) return { ...before, failed: new Map(before.failed).set(answer.camera, answer.error) };
  const more = answer.moments.map((moment) => ({ ...moment, camera: answer.camera, text: answer.text, yes: answer.yes }));
  return { ...before, moments: [...before.moments, ...more].sort((a, b) => b.rank - a.rank).slice(0, MOST_SHOWN) };
}

function Found({ run }) {
  const { moments, progress, failed, state, error } = run;
  const asked = progress ? progress.answered + progress.failed + progress.empty : 0;
  return html`<section class="asked" aria-label="Answers">
    <p class="ask-progress" role="status" aria-busy=${state === "asking"}>
      ${state === "asking" && html`<progress max=${progress?.cameras || 1} value=${asked} aria-label="Cameras asked"></progress> `}
      ${progress ? `${count(progress.answered)} of ${plural(progress.cameras, "camera")} answered${progress.empty ? `; ${count(progress.empty)} with no memory of that time` : ""}${state === "done" && asked < progress.cameras ? "; the others were not reached in time" : ""}.` : "Asking…"}
    </p>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <ol class="found">${moments.map((moment) => html`<li key=${`${moment.camera} ${moment.start}`}>
      <${Thumbnail} picture=${moment.picture} label=${`${moment.camera}, ${duration(moment.ago_s)} ago`} />
      <a href=${`#/camera/${encodeURIComponent(moment.camera)}`}>${moment.camera}</a>
      <span>${moment.ago_s < 1 ? "newest" : `${duration(moment.ago_s)} ago`}</span>
      <${Badge} tone=${moment.yes >= 0.5 ? "good" : "quiet"}>${moment.yes >= 0.5 ? "yes" : "no"} ${score(moment.yes)}<//>
      <span class="soft">rank ${score(moment.rank)}</span>
      ${moment.incident && html`<a href=${`#/incidents/${encodeURIComponent(moment.incident)}`}>Clip</a>`}
      <span class="soft">${moment.text}</span>
    </li>`)}</ol>
    ${failed.size > 0 && html`<details><summary>${plural(failed.size, "camera")} did not answer</summary>
      <ul class="plain">${[...failed].map(([camera, why]) => html`<li key=${camera}>${camera}: <span class="soft">${why}</span></li>`)}</ul></details>`}
  </section>`;
}
