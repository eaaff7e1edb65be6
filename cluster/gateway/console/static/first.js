// Prefetches the first page's data while scripts are still loading: the event stream, then the cameras, so that no
// change between the two is missed.
const underWay = new Map();
const ask = (path) => {
  const abort = new AbortController();
  underWay.set(path, { abort, response: fetch(path, { credentials: "same-origin", cache: "no-store", signal: abort.signal }) });
};

ask("/v1/events");
underWay.get("/v1/events").response.then(
  (response) => response.ok && ask("/v1/cameras"),
  () => {
    // The caller of `take` handles the error.
  },
);

/** Promise of the prefetched response to `path`, once; aborted with `signal`. */
export function take(path, signal) {
  const asked = underWay.get(path);
  if (asked && underWay.delete(path)) signal?.addEventListener("abort", () => asked.abort.abort());
  return asked?.response;
}
