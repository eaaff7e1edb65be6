// A free question to a camera: the streamed answer and the moments it is based on.
import { stream } from "./api.js";
import { AskAll } from "./ask_all.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";
import { Badge, Choice, Empty, Thumbnail } from "./parts.js";
import { may, store, useTopics } from "./store.js";

export const LONGEST = 2000;
const MOST_TURNS = 16;
const MOST_OFFERED = 24;
const EXAMPLES = ["Did anybody come in?", "Was there a vehicle, and what did it look like?", "What changed?"];
const SPANS = [[0, "everything it remembers"], [300, "the last 5 minutes"], [3600, "the last hour"], [12 * 3600, "the last 12 hours"]];

export function AskPage({ camera }) {
  useTopics("cameras", "me");
  const [typed, setName] = useState(camera || null);
  const [all, setAll] = useState(false);
  const names = [...store.cameras.keys()].sort();
  const cameras = [...store.cameras.values()];
  const name = typed ?? (cameras.find((each) => each.state === "running") ?? cameras[0])?.name ?? "";
  const known = store.cameras.has(name);
  const needle = known ? "" : name.toLocaleLowerCase();
  const offered = names.filter((each) => each.toLocaleLowerCase().includes(needle)).slice(0, MOST_OFFERED);
  return html`<div class="ask-page">
    <header class="page-head"><h1>Ask</h1><p class="soft">A question about what a camera has seen, answered from its memory.</p></header>
    <div class="card">
      <label class="field switch ask-all-switch"><input type="checkbox" role="switch" checked=${all} onChange=${(event) => setAll(event.target.checked)} />All cameras</label>
      ${all ? may("ask") && html`<${AskAll} />` : html`<label class="field column">Camera
        <input list="ask-cameras" value=${name} placeholder="Camera name" autocomplete="off" spellcheck=${false} onInput=${(event) => setName(event.target.value)} /></label>
      <datalist id="ask-cameras">${offered.map((each) => html`<option key=${each} value=${each}></option>`)}</datalist>
      <div class="chips ask-cameras" role="group" aria-label="Cameras">${offered.map((each) => html`<button type="button" class="chip" key=${each}
        aria-pressed=${each === name} onClick=${() => setName(each)}>${each}</button>`)}</div>
      `}
      ${!may("ask") && html`<p class="soft">Asking needs a token with the role “ask”.</p>`}
      ${!all && may("ask") && known && html`<${AskBox} camera=${name} key=${name} />`}
      ${!all && may("ask") && !known && html`<${Empty} title=${name ? "There is no such camera" : "Choose a camera"}>${names.length ? "Choose one of those above." : "There are none yet."}<//>`}
    </div>
  </div>`;
}

/** Question box and conversation; later questions continue it. */
export function AskBox({ camera }) {
  const [text, setText] = useState("");
  const [since, setSince] = useState(0);
  const [turns, setTurns] = useState([]);
  const [busy, setBusy] = useState(false);
  const conversation = useRef("");
  const abort = useRef(null);
  const end = useRef(null);
  const box = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  const last = (change) => setTurns((before) => [...before.slice(0, -1), { ...before[before.length - 1], ...change }]);

  const ask = async (event) => {
    event?.preventDefault();
    const question = text.trim();
    if (!question || busy) return;
    setTurns((before) => [...before, { question, answer: "", state: "thinking" }].slice(-MOST_TURNS));
    // Now rather than when the answer arrives: by then the user may be looking at something else.
    requestAnimationFrame(() => end.current?.scrollIntoView({ block: "nearest" }));
    setText("");
    setBusy(true);
    abort.current = new AbortController();
    let answer = "";
    try {
      const body = { camera, text: question, with_pictures: true };
      if (since) body.since_s = since;
      if (conversation.current) body.conversation = conversation.current;
      let finished = false;
      for await (const event of stream("/v1/ask", body, abort.current.signal)) {
        if (event.text) last({ answer: (answer += event.text), state: "answering" });
        if (event.result) {
          finished = true;
          conversation.current = event.result.conversation;
          last({ answer: event.result.text || answer, result: event.result, state: "done" });
        }
      }
      if (!finished) throw new Error("The answer ended before it was complete.");
    } catch (error) {
      // A conversation ends with its replica; the next question starts a new one.
      if (error.status === 409) conversation.current = "";
      last({ state: "failed", error: error.message });
    }
    setBusy(false);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
    if (event.key === "Escape" && busy) abort.current.abort();
  };
  return html`<div class="ask-box">
    <ol class="turns" aria-label="Conversation">${turns.map((turn, i) => html`<${Turn} key=${i} turn=${turn} />`)}</ol>
    <span ref=${end}></span>
    <form onSubmit=${ask}>
      <label class="field column">${turns.length ? "Follow-up question" : "Question"}
        <textarea ref=${box} rows="2" maxlength=${LONGEST} value=${text} placeholder="What happened here?" onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea></label>
      ${!turns.length && !text && html`<div class="chips" role="group" aria-label="Examples">${EXAMPLES.map((each) => html`<button type="button" class="chip" key=${each}
        onClick=${() => (setText(each), box.current.focus())}>${each}</button>`)}</div>`}
      <${AskActions} since=${since} setSince=${setSince} busy=${busy} onStop=${() => abort.current.abort()} word="Ask" disabled=${!text.trim()} />
    </form>
  </div>`;
}

/** Time span and the Ask or Stop button; a double click on Ask does not press Stop. */
export function AskActions({ since, setSince, busy, onStop, word, disabled }) {
  return html`<div class="ask-actions">
    <${Choice} label="About" value=${since} options=${SPANS} onChange=${setSince} />
    ${busy
      ? html`<button type="button" class="button" onClick=${(event) => event.detail < 2 && onStop()}>Stop</button>`
      : html`<button class="button primary" disabled=${disabled}>${word}</button>`}
  </div>`;
}

function Turn({ turn }) {
  const { question, answer, state, result, error } = turn;
  return html`<li class="turn">
    <p class="turn-question">${question}</p>
    <div class="turn-answer" aria-live="polite" aria-busy=${state === "thinking" || state === "answering"}>
      ${state === "thinking" && html`<span class="soft thinking">Looking back…</span>`}
      ${answer}${state === "answering" && html`<span class="caret" aria-hidden="true"></span>`}
    </div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${result && html`<${Grounds} result=${result} />`}
  </li>`;
}

function Grounds({ result }) {
  const moments = result.moments ?? [];
  return html`<div class="grounds">
    ${result.remark && html`<p class="notice">${result.remark[0].toUpperCase()}${result.remark.slice(1)}.</p>`}
    ${moments.length > 0 && html`<h3>Based on</h3>
      <ol class="moments">${moments.map((moment, i) => html`<li key=${i}>
        <${Thumbnail} picture=${moment.picture} label=${`${duration(moment.ago_s)} ago`} />
        <span>${moment.ago_s < 1 ? "newest" : `${duration(moment.ago_s)} ago`}</span>
        <span class="soft">${percent(moment.weight)} of its attention</span>
      </li>`)}</ol>`}
    <p class="soft">${cost(result)} ${result.degraded && html`<${Badge} tone="warning">part of the memory was unreachable<//>`}</p>
  </div>`;
}

function cost({ first_token_s: first, total_s: total, tokens_read: read, tokens_held: held, bytes_read: fetched }) {
  const size = fetched ? ` (${bytes(fetched)})` : "";
  return `${duration(first)} to the first word, ${duration(total)} in total; ${count(read)} of ${count(held)} remembered tokens read${size}.`;
}
