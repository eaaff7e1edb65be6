// Asks for what the first look needs while the rest of the page is still on its way: the events, and behind them, so that
// nothing is missed in between, the cameras.
const abort = new AbortController();
const underWay = new Map();
const ask = (path) => underWay.set(path, fetch(path, { credentials: "same-origin", cache: "no-store", signal: abort.signal }));

ask("/v1/events");
underWay.get("/v1/events").then(
  (response) => response.ok && ask("/v1/cameras"),
  () => {
    // Whoever takes it sees the error.
  },
);

/** The response to `path` that is on its way already, once; aborted with `signal`. */
export function take(path, signal) {
  const response = underWay.get(path);
  if (response && underWay.delete(path)) signal?.addEventListener("abort", () => abort.abort());
  return response;
}
