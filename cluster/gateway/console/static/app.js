// Entry point of the console: routing, and the events and lists that keep the store current.
import { get, onSignedOut, remove } from "./api.js";
import { AskPage } from "./ask.js";
import { CameraPage } from "./camera.js";
import { AddCameraPage, CamerasPage, SettingsPage } from "./cameras.js";
import { html, render, useEffect, useRef, useState } from "./dom.js";
import { FleetPage } from "./fleet.js";
import { clock, now, plural, words } from "./format.js";
import { ImportPage } from "./import_cameras.js";
import { IncidentsPage } from "./incidents.js";
import { Live } from "./live.js";
import { comeBack, Login } from "./login.js";
import { Empty, Failure, Icon, Skeleton, useClock } from "./parts.js";
import { store, useTopics } from "./store.js";
import { onTheme, theme, toggleTheme } from "./theme.js";
import { Wall, WallSkeleton } from "./wall.js";

const RESYNC_MS = 5_000;
const LOOK_PERIOD_MS = 10_000;
const OPEN = "/v1/incidents?open=1&limit=1000";
/** Same breakpoint as in pages.css. */
const LIST_GIVES_WAY = matchMedia("(max-width: 1100px)");
const PAGES = [
  { path: "", word: "Wall", icon: "wall" },
  { path: "incidents", word: "Incidents", icon: "incidents" },
  { path: "ask", word: "Ask", icon: "ask" },
  { path: "cameras", word: "Cameras", icon: "cameras" },
  { path: "fleet", word: "Fleet", icon: "fleet" },
];

/** Subpages of the cameras page. */
const MANAGED = new Set(["add-camera", "settings", "import-cameras"]);

let asked = 0;
let taken = 0;

async function sync() {
  const touched = store.track();
  const turn = (asked += 1);
  const open = openIncidents();
  try {
    const [cameras, incidents] = await Promise.all([get("/v1/cameras"), open]);
    // Ignore lists that arrive after those of a later request.
    if (turn > taken) {
      taken = turn;
      store.takeAll(cameras.cameras, incidents, touched);
    }
  } catch (error) {
    store.error = new Error(`The cameras cannot be listed; retrying automatically: ${error.message}`);
    store.touch("cameras", "epoch");
    // Incidents may be available even so.
    const incidents = await open.catch(() => null);
    if (incidents && turn > taken) store.takeOpen(incidents, touched);
    if (error.status !== 401) setTimeout(() => live.state === "live" && sync(), RESYNC_MS);
  }
  store.untrack(touched);
}

let incidentsOwed = false;

/** Open incidents; null while alerting does not answer, so that cameras are shown without it. */
async function openIncidents() {
  try {
    const { incidents } = await get(OPEN);
    incidentsOwed = false;
    return incidents;
  } catch (error) {
    if (error.status === 401) throw error;
    incidentsOwed = true;
    return null;
  }
}

/** Fetches incidents that could not be fetched before: no event announces that they are available again. */
async function lookAround() {
  if (!incidentsOwed || live.state !== "live" || document.visibilityState !== "visible") return;
  const touched = store.track();
  const found = await openIncidents().catch(() => null);
  if (found) {
    store.takeOpen(found, touched);
    // Pages could not fetch theirs either.
    store.set("epoch", store.epoch + 1);
  }
  store.untrack(touched);
}

let announced = "";
let caughtUp = 0;
let catchingUp = 0;

const HANDLERS = {
  camera: (status) => store.camera(status),
  removed: (body) => store.removed(body.name),
  trouble: (body) => store.set("trouble", body.trouble),
  answer(answer) {
    const end = answer.end_unix_s ?? now() - answer.timing.latency_s;
    store.answer(answer.camera, answer.question, [end, answer.score, answer.positive, answer.gated, (answer.end - answer.start) / 1e6]);
  },
  incident({ incident, cause }) {
    if (!cause && !store.incidents.has(incident.id) && incident.ended_s == null) {
      announced = `New incident, ${incident.severity}: ${words(incident.subject)} at ${incident.camera}, ${clock(incident.opened_s)}`;
    }
    store.incident(incident);
    // Nothing is drawn while the page is hidden, but its title is visible in the tab.
    retitle();
  },
  missed() {
    // The gateway dropped events because this browser was slow: fetch the lists instead. Rate-limited, to not slow it
    // down further.
    catchingUp ||= setTimeout(() => {
      catchingUp = 0;
      caughtUp = Date.now();
      sync();
    }, Math.max(0, caughtUp + RESYNC_MS - Date.now()));
  },
};

const live = new Live({
  onState(state, retryAt, reason) {
    const since = state === store.live.state ? store.live.since : Date.now();
    store.set("live", { state, retryAt, reason, since, ever: store.live.ever || state === "live" });
    if (state === "down" && !store.loaded) sync();
  },
  onOpen() {
    sync();
    get("/v1/me").then((me) => store.set("me", me), () => {});
  },
  onEvent: (kind, body) => HANDLERS[kind]?.(body),
});

function App() {
  useTopics("me", "incidents");
  const [route, setRoute] = useState(parse(location.hash));
  const [signedOut, setSignedOut] = useState(false);
  const [stillIn, setStillIn] = useState("");
  const main = useRef(null);
  const shown = useRef(route);
  const places = useRef({});
  useEffect(() => {
    history.scrollRestoration = "manual";
    const change = (event) => {
      const left = parse(new URL(event.oldURL).hash);
      if (!left.rest) places.current[left.page] = scrollY;
      setRoute(parse(location.hash));
    };
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  const begin = () => {
    setSignedOut(false);
    live.start();
  };
  useEffect(() => {
    onSignedOut(() => {
      live.stop();
      store.clear();
      setStillIn("");
      setSignedOut(true);
    });
    begin();
    const looking = setInterval(lookAround, LOOK_PERIOD_MS);
    return () => clearInterval(looking);
  }, []);
  const open = unseen();
  useEffect(retitle, [route, open]);
  useEffect(() => {
    const before = shown.current;
    shown.current = route;
    if (before === route) return;
    // An incident opens beside the list, which keeps its scroll position; the incident takes the focus itself.
    const beside = route.page === "incidents" && before.page === "incidents";
    if (!beside || LIST_GIVES_WAY.matches) scrollTo(0, route.rest ? 0 : (places.current[route.page] ?? 0));
    if (!beside) main.current?.focus({ preventScroll: true });
  }, [route]);
  if (signedOut) return html`<${Login} onDone=${begin} />`;
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), main.current.focus())}>Skip to content</a>
    <${Header} route=${route} open=${open} onSignOut=${async () => {
      setStillIn(await remove("/v1/session").then(() => "", (error) => error.message));
      live.stop();
      store.clear();
      begin();
    }} />
    <${NotLive} />
    ${stillIn && html`<div class="not-live" role="alert"><strong>Not signed out.</strong> <span>${stillIn} Close the browser, or try again.</span></div>`}
    <main id="main" ref=${main} tabindex="-1"><${Page} route=${route} /></main>
    <p class="unseen" role="status">${announced}</p>`;
}

function Page({ route }) {
  useTopics("epoch");
  if (["", "camera", "ask", "cameras"].includes(route.page) && !store.loaded) {
    if (store.error) return html`<${Failure} error=${store.error} />`;
    return html`<${route.page === "" ? WallSkeleton : Skeleton} rows=${6} />`;
  }
  if (route.page === "") return html`<${Wall} />`;
  if (route.page === "camera" && route.rest) return html`<${CameraPage} name=${route.rest} key=${route.rest} />`;
  if (route.page === "incidents") return html`<${IncidentsPage} id=${route.rest} />`;
  if (route.page === "ask") return html`<${AskPage} camera=${route.rest} />`;
  if (route.page === "cameras") return html`<${CamerasPage} />`;
  if (route.page === "add-camera") return html`<${AddCameraPage} />`;
  if (route.page === "import-cameras") return html`<${ImportPage} />`;
  if (route.page === "settings" && route.rest) return html`<${SettingsPage} name=${route.rest} key=${route.rest} />`;
  if (route.page === "fleet") return html`<${FleetPage} />`;
  return html`<h1>Page not found</h1><${Empty} title="There is no such page"><a href="#/">Back to the wall</a><//>`;
}

function Header({ route, open, onSignOut }) {
  const [, redraw] = useState(0);
  useEffect(() => onTheme(() => redraw((serial) => serial + 1)), []);
  const dark = theme() === "dark";
  return html`<header class="top">
    <a class="brand" href="#/"><span class="brand-mark" aria-hidden="true"></span>Sightline</a>
    <nav aria-label="Pages">${PAGES.map(({ path, word, icon }) => html`<a key=${path} href=${`#/${path}`}
      aria-current=${route.page === path || (path === "" && route.page === "camera") || (path === "cameras" && MANAGED.has(route.page)) ? "page" : undefined}>
      <${Icon} name=${icon} /><span>${word}</span>${path === "incidents" && open > 0 && html`<span class="nav-count" title=${plural(open, "open incident")}>${open > 99 ? "99+" : open}<span class="unseen"> open</span></span>`}
    </a>`)}</nav>
    <div class="top-right">
      <${LiveDot} />
      <button type="button" class="icon-button" aria-label=${dark ? "Light colours" : "Dark colours"} title=${dark ? "Light colours" : "Dark colours"}
        onClick=${toggleTheme}><${Icon} name=${dark ? "sun" : "moon"} /></button>
      ${store.me?.authenticated && html`<button type="button" class="icon-button" onClick=${onSignOut} aria-label=${`Sign out ${store.me.name}`} title=${`Signed in as ${store.me.name}; sign out`}><${Icon} name="out" /></button>`}
    </div>
  </header>`;
}

function LiveDot() {
  useTopics("live", "trouble");
  const state = store.live.state === "live" && store.trouble ? "down" : store.live.state;
  const word = { live: "Live", connecting: "Connecting", down: store.live.state === "live" ? "Not current" : "Not live" }[state];
  return html`<span class=${`live ${state}`} role="status"><span class="dot" aria-hidden="true"></span>${word}</span>`;
}

/** Banner while the page is not current: the reason, and when the next attempt is made. */
function NotLive() {
  useTopics("live", "trouble");
  useClock(1);
  const { state, retryAt, reason, since, ever } = store.live;
  if (state === "live" && store.trouble) {
    return html`<div class="not-live"><strong>Not current.</strong> <span>The gateway cannot see the cameras: ${store.trouble}</span></div>`;
  }
  if (state === "live" || (!ever && state === "connecting" && Date.now() - since < 4000)) return null;
  const seconds = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
  return html`<div class="not-live">
    <strong>Not live.</strong> <span>What you see may be out of date${reason ? `: ${reason.replace(/\.?$/, ".")}` : "."}
      ${state === "down" ? ` Trying again ${seconds ? `in ${seconds} s` : "now"}.` : " Connecting…"}</span>
    ${state === "down" && html`<button type="button" class="button small" onClick=${() => live.connect()}>Try now</button>`}
  </div>`;
}

function parse(hash) {
  const [page = "", ...rest] = hash.replace(/^#\/?/, "").split("/");
  let name = rest.join("/");
  try {
    name = decodeURIComponent(name);
  } catch {
    // A malformed address: keep it as it is; no page will match.
  }
  return { page, rest: name };
}

/** Number of open incidents that are neither acknowledged nor muted. */
const unseen = () => [...store.incidents.values()].filter((each) => each.ended_s == null && !each.acknowledged_by && !each.muted).length;

function retitle() {
  document.title = `${unseen() ? `(${unseen()}) ` : ""}${titleOf(parse(location.hash))} · Sightline`;
}

function titleOf({ page, rest }) {
  if (page === "camera") return rest;
  if (page === "settings") return `Settings of ${rest}`;
  if (page === "add-camera") return "Add a camera";
  if (page === "import-cameras") return "Import cameras";
  return PAGES.find(({ path }) => path === page)?.word ?? "Page not found";
}

comeBack();
render(html`<${App} />`, document.getElementById("app"));
