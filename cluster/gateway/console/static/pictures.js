// The newest pictures of the visible cameras, a few concurrent requests, drawn on canvas.
import { cameraPath, open, within } from "./api.js";
import { recall, remember } from "./theme.js";

export const PERIOD_MS = 5_000;
const AT_ONCE = 4;
const MISSING_MS = 15_000;

class Pictures {
  constructor() {
    this.watched = new Map();
    this.running = 0;
    this.kept = recall("sightline-kept") === "1";
    this.observer = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "80px" });
    document.addEventListener("visibilitychange", () => this.pump());
  }

  /** Shows kept patches lit and the rest dimmed, or plain pictures; refetches all of them. */
  showKept(kept) {
    this.kept = kept;
    remember("sightline-kept", kept ? "1" : "0");
    for (const entry of this.watched.values()) Object.assign(entry, { etag: "", due: 0 });
    this.pump();
  }

  /** Keeps `canvas` showing `camera`; `onState("there" | "missing", text)`. Returns a function that ends it. */
  watch(canvas, camera, width, onState) {
    const entry = { canvas, camera, width, onState, etag: "", due: 0, visible: false, abort: null };
    this.watched.set(canvas, entry);
    this.observer.observe(canvas);
    return () => {
      this.observer.unobserve(canvas);
      this.watched.delete(canvas);
      entry.abort?.abort();
    };
  }

  seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const entry = this.watched.get(target);
      if (!entry) continue;
      entry.visible = isIntersecting;
      if (!isIntersecting) entry.abort?.abort();
    }
    this.pump();
  }

  pump() {
    clearTimeout(this.timer);
    if (document.visibilityState !== "visible") return;
    // Monotonic: if the wall clock were set back, nothing would be due for that long.
    const now = performance.now();
    let next = Infinity;
    const due = [];
    for (const entry of this.watched.values()) {
      if (!entry.visible || entry.abort) continue;
      if (entry.due <= now) due.push(entry);
      else next = Math.min(next, entry.due);
    }
    due.sort((a, b) => a.due - b.due);
    for (const entry of due.slice(0, AT_ONCE - this.running)) this.fetch(entry);
    if (next < Infinity) this.timer = setTimeout(() => this.pump(), Math.max(50, next - now));
  }

  async fetch(entry) {
    this.running += 1;
    entry.abort = new AbortController();
    entry.due = performance.now() + PERIOD_MS;
    try {
      const path = `${cameraPath(entry.camera)}/picture.jpg?kept=${this.kept ? 1 : 0}&width=${entry.width}`;
      const headers = entry.etag ? { "If-None-Match": entry.etag } : {};
      const response = await open(path, { signal: within(MISSING_MS, entry.abort.signal), headers });
      if (response.status !== 304) {
        const bitmap = await createImageBitmap(await response.blob());
        entry.canvas.width = bitmap.width;
        entry.canvas.height = bitmap.height;
        entry.canvas.getContext("2d").drawImage(bitmap, 0, 0);
        bitmap.close();
        entry.etag = response.headers.get("ETag") ?? "";
      }
      entry.onState("there", "");
    } catch (error) {
      if (error.name === "AbortError") entry.due = 0;
      else {
        entry.due = performance.now() + MISSING_MS;
        entry.onState("missing", error.status === 404 ? "No picture yet" : "No picture");
      }
    }
    entry.abort = null;
    this.running -= 1;
    this.pump();
  }
}

export const pictures = new Pictures();
