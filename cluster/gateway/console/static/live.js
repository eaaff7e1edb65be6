// The event stream, with detection of silence and automatic reconnection.
// fetch instead of EventSource, which hides the pings, needed to detect dead connections, and the status of a refusal.
import { open, pieces } from "./api.js";

export const SILENCE_MS = 40_000;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;
const TICK_MS = 2_000;

/**
 * Follows `/v1/events` until stopped.
 * `onState(state, retryAt, reason)`: "connecting", "live" or "down". `onOpen()`: connected, before the first event;
 * missed events have to be fetched. `onEvent(kind, data)`: one event, `data` parsed.
 */
export class Live {
  constructor({ onState, onOpen, onEvent }) {
    this.onState = onState;
    this.onOpen = onOpen;
    this.onEvent = onEvent;
    this.failures = 0;
    this.stopped = true;
    this.ticked = Date.now();
    this.wake = () => document.visibilityState === "visible" && this.check(true);
  }

  start() {
    if (!this.stopped) return;
    this.stopped = false;
    this.ticker = setInterval(() => this.check(false), TICK_MS);
    for (const name of ["online", "pageshow", "focus"]) addEventListener(name, this.wake);
    document.addEventListener("visibilitychange", this.wake);
    this.connect();
  }

  stop() {
    this.stopped = true;
    clearInterval(this.ticker);
    clearTimeout(this.retry);
    for (const name of ["online", "pageshow", "focus"]) removeEventListener(name, this.wake);
    document.removeEventListener("visibilitychange", this.wake);
    this.abort?.abort();
  }

  /** Reconnects if needed: after silence, a clock jump (the machine slept), or when the page is visible again. */
  check(awake) {
    const now = Date.now();
    const slept = now - this.ticked > SILENCE_MS;
    this.ticked = now;
    if (this.stopped) return;
    if (this.state === "down") {
      if (awake || slept) this.connect();
    } else if (slept || performance.now() - this.heard > SILENCE_MS) {
      this.connect();
    }
  }

  async connect() {
    clearTimeout(this.retry);
    this.abort?.abort();
    const abort = new AbortController();
    this.abort = abort;
    this.heard = performance.now();
    this.tell("connecting", 0, "");
    let reason = "the gateway ended the connection";
    try {
      const response = await open("/v1/events", { signal: abort.signal, headers: { Accept: "text/event-stream" } });
      this.heard = performance.now();
      this.tell("live", 0, "");
      this.onOpen();
      for await (const block of pieces(response, /\r?\n\r?\n/, () => (this.heard = performance.now()))) {
        if (abort.signal.aborted) return;
        this.failures = 0;
        this.dispatch(block);
      }
    } catch (error) {
      reason = error.message;
      if (error.status === 401) {
        this.stop();
        return;
      }
    }
    if (this.stopped || abort !== this.abort) return;
    const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** this.failures) * (0.75 + Math.random() / 2);
    this.failures += 1;
    this.tell("down", Date.now() + pause, reason);
    this.retry = setTimeout(() => this.connect(), pause);
  }

  tell(state, retryAt, reason) {
    this.state = state;
    this.onState(state, retryAt, reason);
  }

  dispatch(block) {
    let kind = "message";
    const data = [];
    for (const line of block.split(/\r?\n/)) {
      if (line.startsWith("event:")) kind = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    }
    if (!data.length) return;
    let body;
    try {
      body = JSON.parse(data.join("\n"));
    } catch {
      console.error("an event of kind", kind, "is not JSON");
      return;
    }
    this.onEvent(kind, body);
  }
}
