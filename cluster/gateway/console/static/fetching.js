// Fetching for visible components: a few concurrent requests, dropped when their component unmounts.
import { cameraPath, get } from "./api.js";
import { useEffect, useRef, useState } from "./dom.js";
import { isOlder, MAX_INCIDENTS, store, useTopics } from "./store.js";

const AT_ONCE = 4;
const SETTLE_MS = 250;

const waiting = new Map();
let running = 0;
let timer = 0;

/** Score history of a camera while the component is mounted; `undefined` until it is loaded. */
export function useHistory(camera) {
  useTopics(`history:${camera}`, "epoch");
  const epoch = store.epoch;
  useEffect(() => {
    if (store.histories.get(camera)?.epoch === epoch) return undefined;
    waiting.set(camera, epoch);
    // Delayed, so that tiles scrolled past fetch nothing.
    timer ||= setTimeout(pump, SETTLE_MS);
    return () => waiting.delete(camera);
  }, [camera, epoch]);
  return store.histories.get(camera);
}

function pump() {
  timer = 0;
  while (running < AT_ONCE && waiting.size) {
    const camera = waiting.keys().next().value;
    waiting.delete(camera);
    running += 1;
    get(`${cameraPath(camera)}/history`)
      .then((body) => store.history(camera, body))
      // The tile is drawn without its line; the next connection retries.
      .catch(() => {})
      .finally(() => {
        running -= 1;
        pump();
      });
  }
}

/** `{data, error, reload}` of a GET, repeated when `path` changes and every `periodS` while the page is visible. */
export function useFetched(path, { periodS = 0, topics = ["epoch"] } = {}) {
  const [state, setState] = useState({ data: null, error: null, path });
  const [serial, setSerial] = useState(0);
  const underWay = useRef(false);
  useTopics(...topics);
  const epoch = store.epoch;
  useEffect(() => {
    if (!path) return undefined;
    const abort = new AbortController();
    underWay.current = true;
    get(path, abort.signal).then(
      (data) => {
        underWay.current = false;
        setState({ data, error: null, path });
      },
      (error) => {
        if (error.name === "AbortError") return;
        underWay.current = false;
        setState((before) => ({ ...before, error, path }));
      },
    );
    return () => abort.abort();
  }, [path, serial, epoch]);
  useEffect(() => {
    if (!periodS) return undefined;
    const period = setInterval(() => {
      // Wait for a reply that takes longer than the period: aborting it each time would never yield one.
      if (document.visibilityState === "visible" && !underWay.current) setSerial((before) => before + 1);
    }, periodS * 1000);
    return () => clearInterval(period);
  }, [periodS]);
  const fresh = state.path === path ? state : { data: null, error: null };
  return { ...fresh, reload: () => setSerial((before) => before + 1) };
}

/** `useFetched` for a list of incidents, newest first, updated by events; new incidents that pass `fits` are added. */
export function useIncidents(path, fits = () => true) {
  useTopics("incidents");
  const fetched = useFetched(path);
  const known = useRef({});
  if (known.current.data !== fetched.data) known.current = { data: fetched.data, incidents: fetched.data?.incidents ?? [] };
  // Keep the merged list here: the store evicts incidents, and the fetched versions would then reappear out of date.
  const found = new Map(known.current.incidents.map((incident) => [incident.id, incident]));
  for (const incident of store.incidents.values()) {
    const before = found.get(incident.id);
    if ((before || fits(incident)) && !isOlder(incident, before)) found.set(incident.id, incident);
  }
  const incidents = [...found.values()].sort((a, b) => b.opened_s - a.opened_s).slice(0, MAX_INCIDENTS);
  known.current.incidents = incidents;
  return { ...fetched, incidents };
}
