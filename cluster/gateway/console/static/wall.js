// The wall: one tile per camera, those that need attention first. Virtualised: only visible rows are in the document,
// so that its cost does not depend on the number of cameras.
import { attention, byName, isTrouble, matches, topAnswer } from "./attention.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./dom.js";
import { count, plural } from "./format.js";
import { Choice, Empty, Icon, NoCameras, useKept } from "./parts.js";
import { pictures } from "./pictures.js";
import { store, useTopics } from "./store.js";
import { recall, remember } from "./theme.js";
import { Tile } from "./tile.js";

const GAP = 12;
const TEXT_HEIGHT = 86;
const LEAST_WIDTH = { comfortable: 232, compact: 156 };
const OVERSCAN_ROWS = 1;
const FIRST_ROWS = 3;
const HOLD_MS = 1500;
const READ_MS = 10_000;

const FILTERS = [
  { id: "all", word: "All", test: () => true },
  { id: "attention", word: "Needs attention", test: (camera, seen) => seen.level >= 30 },
  { id: "incident", word: "With an incident", test: (camera, seen) => Boolean(seen.incident) },
  { id: "trouble", word: "Not working", test: isTrouble },
  { id: "lowered", word: "Lower quality", test: (camera) => Boolean(camera.rung) && camera.rung !== "full" },
];
// Highest first, then by name. Rounded, so that small score changes do not reorder the wall.
const SORTS = {
  attention: { word: "Attention", key: ({ seen }) => Math.round(seen.level) },
  name: { word: "Name", key: () => 0 },
  score: { word: "Score", key: ({ camera }) => Math.round(100 * (topAnswer(camera)?.score ?? -1)) },
  lag: { word: "Lag", key: ({ camera }) => Math.round(10 * (camera.expected_lag_s ?? 0)) },
};
let painted = false;

export function Wall() {
  useTopics("cameras", "incidents", "me");
  const [search, setSearch] = useKept("wall-search", "");
  const [filter, setFilter] = useKept("wall-filter", "all");
  const [sort, setSort] = useKept("wall-sort", "attention");
  const [kept, setKept] = useState(pictures.kept);
  const [density, setDensity] = useState(recall("sightline-density") ?? (innerWidth < 600 ? "compact" : "comfortable"));
  const held = useRef({ until: 0, order: [], key: "" });
  const all = [...store.cameras.values()].map((camera) => ({ camera, seen: attention(camera, store.openIncidents(camera.name)) }));
  const chosen = FILTERS.find((each) => each.id === filter);
  const needle = search.trim().toLocaleLowerCase();
  const found = all.filter(({ camera, seen }) => chosen.test(camera, seen) && matches(camera, needle));
  const shown = ordered(found, SORTS[sort], held.current, `${filter} ${sort} ${needle}`);

  return html`<div class="wall-page">
    <h1 class="unseen">Cameras</h1>
    <${Toolbar} search=${search} setSearch=${setSearch} sort=${sort} setSort=${setSort} kept=${kept}
      setKept=${(on) => (pictures.showKept(on), setKept(on))} density=${density}
      setDensity=${(value) => (remember("sightline-density", value), setDensity(value))} />
    <div class="chips" role="group" aria-label="Which cameras">
      ${FILTERS.map(({ id, word, test }) => html`<button type="button" key=${id} class=${`chip ${id}`} aria-pressed=${filter === id} onClick=${() => setFilter(id)}>
        ${word} <span class="chip-count">${count(all.filter(({ camera, seen }) => test(camera, seen)).length)}</span>
      </button>`)}
    </div>
    <p class="unseen" role="status">${needle || filter !== "all" ? `${plural(shown.length, "camera")} shown` : ""}</p>
    ${shown.length > 0 && html`<${Grid} entries=${shown} least=${LEAST_WIDTH[density]} held=${held.current} />`}
    ${!all.length && html`<${NoCameras} />`}
    ${all.length > 0 && !shown.length && html`<${Empty} title="No matching camera">Change the search, or show all cameras.<//>`}
  </div>`;
}

function Toolbar({ search, setSearch, sort, setSort, kept, setKept, density, setDensity }) {
  const field = useRef(null);
  useEffect(() => {
    const slash = (event) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
      event.preventDefault();
      field.current.focus();
    };
    addEventListener("keydown", slash);
    return () => removeEventListener("keydown", slash);
  }, []);
  return html`<div class="toolbar">
    <label class="search"><span class="unseen">Search cameras by name, source, state or replica</span><${Icon} name="search" />
      <input ref=${field} type="search" placeholder="Search cameras" value=${search} aria-keyshortcuts="/" autocomplete="off" spellcheck=${false}
        onInput=${(event) => setSearch(event.target.value)}
        onKeyDown=${(event) => event.key === "Escape" && (search ? setSearch("") : event.target.blur())} /></label>
    <${Choice} label="Sort" value=${sort} options=${Object.entries(SORTS).map(([id, { word }]) => [id, word])} onChange=${setSort} />
    <${Choice} label="Tiles" value=${density} options=${[["comfortable", "Large"], ["compact", "Small"]]} onChange=${setDensity} />
    <label class="field switch" title="Lit: patches that the model sees. Dimmed: unchanged according to the codec.">
      <input type="checkbox" role="switch" checked=${kept} onChange=${(event) => setKept(event.target.checked)} />Kept patches</label>
  </div>`;
}

function Grid({ entries, least, held }) {
  const grid = useRef(null);
  const [width, setWidth] = useState(0);
  const [range, setRange] = useState({ from: 0, to: FIRST_ROWS });
  const [active, setActive] = useState(null);
  const columns = Math.max(1, Math.floor((width + GAP) / (least + GAP)));
  const tileWidth = Math.floor((width - GAP * (columns - 1)) / columns);
  const tileHeight = Math.round((tileWidth * 9) / 16) + TEXT_HEIGHT;
  const rows = Math.ceil(entries.length / columns);

  useLayoutEffect(() => setWidth(grid.current.clientWidth), []);
  useLayoutEffect(() => {
    if (!width) return undefined;
    const measure = () => {
      const top = grid.current.getBoundingClientRect().top;
      const pitch = tileHeight + GAP;
      const from = Math.max(0, Math.floor(-top / pitch) - OVERSCAN_ROWS);
      const to = Math.max(from + 1, Math.ceil((innerHeight - top) / pitch) + OVERSCAN_ROWS);
      setRange((before) => (before.from === from && before.to === to ? before : { from, to }));
    };
    measure();
    const observer = new ResizeObserver(() => {
      setWidth(grid.current.clientWidth);
      measure();
    });
    observer.observe(grid.current);
    addEventListener("scroll", measure, { passive: true });
    addEventListener("resize", measure);
    return () => {
      observer.disconnect();
      removeEventListener("scroll", measure);
      removeEventListener("resize", measure);
    };
  }, [tileHeight, width > 0]);
  useLayoutEffect(() => {
    // Marked one task after the frame that paints the first tiles, for `sightline bench console`.
    if (width && !painted) requestAnimationFrame(() => setTimeout(() => performance.mark("wall-painted")));
    painted ||= width > 0;
  }, [width]);

  const hadFocus = grid.current?.contains(document.activeElement);
  useLayoutEffect(() => {
    // Moving a tile in the document drops its focus.
    if (hadFocus && !grid.current.contains(document.activeElement)) grid.current.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
  });
  const activeIndex = useMemo(() => entries.findIndex(({ camera }) => camera.name === active), [entries, active]);
  const focusAt = (index) => {
    const target = entries[Math.min(Math.max(0, index), entries.length - 1)].camera.name;
    setActive(target);
    requestAnimationFrame(() => requestAnimationFrame(() => {
      const link = grid.current?.querySelector(`[data-camera="${CSS.escape(target)}"]`);
      link?.focus();
      link?.scrollIntoView({ block: "nearest" });
    }));
  };
  const onKeyDown = (event) => {
    const here = Math.max(0, activeIndex);
    const page = columns * Math.max(1, Math.floor(innerHeight / (tileHeight + GAP)));
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, PageDown: page, PageUp: -page };
    if (event.key in steps) focusAt(here + steps[event.key]);
    else if (event.key === "Home") focusAt(0);
    else if (event.key === "End") focusAt(entries.length - 1);
    else return;
    event.preventDefault();
  };
  const inRange = [];
  if (width) {
    const last = Math.min(entries.length, range.to * columns);
    for (let index = range.from * columns; index < last; index += 1) inRange.push(index);
    // Keep the focused tile in the document however far it is scrolled away, so that focus is not lost.
    if (activeIndex >= 0 && !inRange.includes(activeIndex)) inRange.push(activeIndex);
  }
  const stop = activeIndex >= 0 ? activeIndex : (inRange[0] ?? 0);
  // For a limited time: a pointer may rest there all night. The order is updated afterwards.
  const hold = (ms) => () => {
    held.until = performance.now() + ms;
    clearTimeout(held.timer);
    held.timer = setTimeout(() => store.touch("cameras"), ms);
  };
  return html`<ul class="grid" ref=${grid} aria-label="Cameras; move with the arrow keys" style=${{ height: `${rows * (tileHeight + GAP)}px` }}
      onKeyDown=${onKeyDown} onPointerMove=${hold(READ_MS)} onPointerLeave=${hold(HOLD_MS)} onFocusIn=${hold(READ_MS)} onFocusOut=${hold(HOLD_MS)}>
    ${inRange.map((index) => {
      const { camera, seen } = entries[index];
      const left = (index % columns) * (tileWidth + GAP);
      const top = Math.floor(index / columns) * (tileHeight + GAP);
      const place = { width: `${tileWidth}px`, height: `${tileHeight}px`, transform: `translate(${left}px, ${top}px)` };
      return html`<li key=${camera.name} style=${place} aria-setsize=${entries.length} aria-posinset=${index + 1}>
        <${Tile} camera=${camera} seen=${seen} reachable=${index === stop} onFocus=${() => setActive(camera.name)} />
      </li>`;
    })}
  </ul>`;
}

/** Sorts the entries; while the wall is being read, tiles keep their places and new ones are appended. */
function ordered(entries, sort, held, key) {
  const named = (a, b) => byName(a.camera, b.camera);
  if (held.key === key && performance.now() < held.until) {
    const place = new Map(held.order.map((name, i) => [name, i]));
    const of = ({ camera }) => place.get(camera.name) ?? Infinity;
    entries.sort((a, b) => (of(a) === of(b) ? named(a, b) : of(a) - of(b)));
  } else {
    entries.sort((a, b) => sort.key(b) - sort.key(a) || named(a, b));
  }
  Object.assign(held, { key, order: entries.map(({ camera }) => camera.name) });
  return entries;
}

export function WallSkeleton() {
  return html`<div class="grid-skeleton" role="status" aria-label="Loading the cameras">
    ${Array.from({ length: 12 }, (_, i) => html`<div class="skeleton tile-skeleton" key=${i}></div>`)}
  </div>`;
}
