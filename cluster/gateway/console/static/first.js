// Asks for what the first look needs while the rest of the page is still on its way: the events, and behind them, so that
// nothing is missed in between, the cameras.
const underWay = new Map();
const ask = (path) => {
  const abort = new AbortController();
  underWay.set(path, { abort, response: fetch(path, { credentials: "same-origin", cache: "no-store", signal: abort.signal }) });
};

ask("/v1/events");
underWay.get("/v1/events").response.then(
  (response) => response.ok && ask("/v1/cameras"),
  () => {
    // Whoever takes it sees the error.
  },
);

/** The response to `path` that is on its way already, once; aborted with `signal`. */
export function take(path, signal) {
  const asked = underWay.get(path);
  if (asked && underWay.delete(path)) signal?.addEventListener("abort", () => asked.abort.abort());
  return asked?.response;
}
