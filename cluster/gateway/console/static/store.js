// The page's state: initialised from lists, kept current by events, bounded in size.
// Pages subscribe to topics ("cameras", "camera:NAME", "incidents", "history:NAME", "live", "me") and are notified at
// most a few times a second, never while the page is hidden.
import { useEffect, useState } from "./dom.js";

export const MAX_INCIDENTS = 1000;
export const MAX_HISTORIES = 120;
export const MAX_POINTS = 120;
const TELL_MS = 200;

export class Store {
  constructor() {
    this.me = null;
    this.live = { state: "connecting", retryAt: 0, reason: "", since: Date.now() };
    this.trouble = "";
    this.loaded = false;
    this.error = null;
    this.cameras = new Map();
    this.incidents = new Map();
    this.openByCamera = new Map();
    this.histories = new Map();
    this.epoch = 0;
    this.trackers = new Set();
    this.listeners = new Map();
    this.changed = new Set();
    this.scheduled = false;
    this.version = 0;
  }

  subscribe(topic, callback) {
    let callbacks = this.listeners.get(topic);
    if (!callbacks) this.listeners.set(topic, (callbacks = new Set()));
    callbacks.add(callback);
    return () => {
      callbacks.delete(callback);
      if (!callbacks.size) this.listeners.delete(topic);
    };
  }

  touch(...topics) {
    this.version += 1;
    for (const topic of topics) if (this.listeners.has(topic)) this.changed.add(topic);
    if (this.scheduled || !this.changed.size) return;
    this.scheduled = true;
    setTimeout(() => requestAnimationFrame(() => this.tell()), TELL_MS);
  }

  tell() {
    this.scheduled = false;
    const topics = this.changed;
    this.changed = new Set();
    const callbacks = new Set();
    for (const topic of topics) for (const callback of this.listeners.get(topic) ?? []) callbacks.add(callback);
    for (const callback of callbacks) callback();
  }

  set(topic, value) {
    this[topic] = value;
    this.touch(topic);
  }

  /** Set of keys touched by events from now on, which are newer than lists being fetched. End with `untrack`. */
  track() {
    const touched = new Set();
    this.trackers.add(touched);
    return touched;
  }

  untrack(touched) {
    this.trackers.delete(touched);
  }

  note(key) {
    for (const touched of this.trackers) touched.add(key);
  }

  /** Replaces the lists except for `touched` keys; `incidents` null: unknown, keep the present ones. */
  takeAll(cameras, incidents, touched) {
    this.takeCameras(cameras, touched);
    if (incidents) this.takeOpen(incidents, touched);
    this.loaded = true;
    this.error = null;
    this.epoch += 1;
    this.touch("cameras", "incidents", "epoch");
    for (const topic of this.listeners.keys()) if (topic.includes(":")) this.touch(topic);
  }

  takeCameras(cameras, touched) {
    const listed = new Set();
    for (const camera of cameras) {
      listed.add(camera.name);
      if (!touched.has(`camera:${camera.name}`)) this.cameras.set(camera.name, camera);
    }
    for (const name of [...this.cameras.keys()]) {
      if (!listed.has(name) && !touched.has(`camera:${name}`)) this.cameras.delete(name);
    }
  }

  /** Replaces the open incidents; `incidents` is the complete list. */
  takeOpen(incidents, touched) {
    const known = new Set(incidents.map((incident) => incident.id));
    for (const incident of this.incidents.values()) {
      // Missing from the list: ended without an event reaching us. Pages that show it refetch it.
      if (incident.ended_s == null && !known.has(incident.id) && !touched.has(`incident:${incident.id}`)) {
        this.forgetIncident(incident);
      }
    }
    for (const incident of incidents) {
      const before = this.incidents.get(incident.id);
      if (!touched.has(`incident:${incident.id}`) && !isOlder(incident, before)) this.keepIncident(incident);
    }
    this.touch("incidents", "cameras");
  }

  camera(status) {
    this.cameras.set(status.name, status);
    this.note(`camera:${status.name}`);
    this.touch("cameras", `camera:${status.name}`);
  }

  removed(name) {
    this.cameras.delete(name);
    this.histories.delete(name);
    this.note(`camera:${name}`);
    this.touch("cameras", `camera:${name}`);
  }

  /** Stores a fetched incident unless events have already brought a newer version. */
  fetchedIncident(incident) {
    if (!isOlder(incident, this.incidents.get(incident.id))) this.incident(incident);
  }

  incident(incident) {
    this.note(`incident:${incident.id}`);
    this.keepIncident(incident);
    this.touch("incidents", "cameras", `camera:${incident.camera}`, `incident:${incident.id}`);
  }

  keepIncident(incident) {
    this.incidents.delete(incident.id);
    this.incidents.set(incident.id, incident);
    const open = this.openByCamera.get(incident.camera) ?? new Map();
    if (incident.ended_s == null) open.set(incident.id, incident);
    else open.delete(incident.id);
    if (open.size) this.openByCamera.set(incident.camera, open);
    else this.openByCamera.delete(incident.camera);
    if (this.incidents.size > MAX_INCIDENTS) this.forgetIncident(this.oldestEnded());
  }

  forgetIncident(incident) {
    this.incidents.delete(incident.id);
    const open = this.openByCamera.get(incident.camera);
    open?.delete(incident.id);
    if (open && !open.size) this.openByCamera.delete(incident.camera);
  }

  oldestEnded() {
    for (const incident of this.incidents.values()) if (incident.ended_s != null) return incident;
    return this.incidents.values().next().value;
  }

  openIncidents(camera) {
    return this.openByCamera.get(camera)?.values() ?? [];
  }

  /** Appends a question's newest score, `[end_unix_s, score, positive, gated]`, for cameras whose history is loaded. */
  answer(camera, question, point) {
    const history = this.histories.get(camera);
    if (!history) return;
    const points = history.scores.get(question) ?? [];
    if (points.length && points[points.length - 1][0] >= point[0]) return;
    points.push(point);
    if (points.length > MAX_POINTS) points.shift();
    history.scores.set(question, points);
    this.touch(`history:${camera}`);
  }

  /** Stores a fetched history, merged with scores that events have added meanwhile. */
  history(camera, body) {
    const before = this.histories.get(camera);
    const scores = new Map(Object.entries(body.scores ?? {}).map(([id, points]) => [id, inOrder(points)]));
    this.histories.delete(camera);
    this.histories.set(camera, { scores, rungs: body.rungs ?? [], epoch: this.epoch });
    for (const [question, points] of before?.scores ?? []) {
      for (const point of points) this.answer(camera, question, point);
    }
    if (this.histories.size > MAX_HISTORIES) this.histories.delete(this.histories.keys().next().value);
    this.touch(`history:${camera}`);
  }

  clear() {
    this.me = null;
    this.cameras.clear();
    this.incidents.clear();
    this.openByCamera.clear();
    this.histories.clear();
    this.loaded = false;
    this.touch("cameras", "incidents", "me");
  }
}

/** Whether `incident` is an older version than `known`: lacks an irreversible step that `known` has taken. */
export function isOlder(incident, known) {
  if (!known) return false;
  return incident.updated_s < known.updated_s
    || (incident.ended_s == null && known.ended_s != null)
    || (!incident.acknowledged_by && Boolean(known.acknowledged_by))
    || (incident.reviewed_s ?? 0) < (known.reviewed_s ?? 0)
    || (incident.clip === "waiting" && known.clip !== "waiting");
}

/** Sorted by time: a slow window may be answered after its successor. */
function inOrder(points) {
  return points.toSorted((a, b) => a[0] - b[0]).slice(-MAX_POINTS);
}

export const store = new Store();

/** Rerenders the component whenever one of the topics changes. */
export function useTopics(...topics) {
  const [, redraw] = useState(0);
  const drawn = store.version;
  useEffect(() => {
    const callback = () => redraw((serial) => serial + 1);
    const ends = topics.map((topic) => store.subscribe(topic, callback));
    // The store may have changed between render and effect.
    if (store.version !== drawn) callback();
    return () => ends.forEach((end) => end());
  }, topics);
}

export const may = (role) => Boolean(store.me?.roles?.some((own) => own === role || own === "admin"));
