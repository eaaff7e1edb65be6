// Formatting of numbers and times for display.
const WHOLE = new Intl.NumberFormat();
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const MINUTE = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { weekday: "long", day: "numeric", month: "long" });
const FULL = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

let ahead = 0;
/** Unix time by the gateway's clock, as all other times here: a browser's clock may be hours off. */
export const now = () => Date.now() / 1000 - ahead;
export const count = (value) => WHOLE.format(Math.round(value ?? 0));
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
export const percent = (share, digits = 0) => `${(100 * (share ?? 0)).toFixed(digits)} %`;
export const score = (value) => (value ?? 0).toFixed(2);
export const clock = (unix) => CLOCK.format(new Date(unix * 1000));
export const toMinute = (unix) => MINUTE.format(new Date(unix * 1000));
export const day = (unix) => DAY.format(new Date(unix * 1000));
export const moment = (unix) => FULL.format(new Date(unix * 1000));

/** A duration in seconds as text: "320 ms", "4.2 s", "3 min", "2 h 10 min", "3 d". */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "unknown";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
  return `${Math.round(minutes / 1440)} d`;
}

/** Sets the clock offset from the `Date` of a reply just received; ignores offsets up to 5 s (rounding, latency). */
export function tellTime(date) {
  const off = (Date.now() - Date.parse(date)) / 1000;
  ahead = Math.abs(off) > 5 ? off : 0;
}

/** How long ago a Unix time was. */
export function ago(unix, at = now()) {
  const passed = at - unix;
  return passed < 2 ? "just now" : `${duration(Math.max(1, Math.round(passed)))} ago`;
}

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  let rest = value ?? 0;
  let unit = 0;
  while (rest >= 1024 && unit < UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit && rest < 100 ? rest.toFixed(1) : Math.round(rest)} ${UNITS[unit]}`;
}

/** A question's id as words: "person-at-gate" → "person at gate". */
export const words = (id) => String(id ?? "").replace(/[-_]+/g, " ");
