// Dark or light: the system's preference until the user chooses. Loaded before the page is drawn.
const KEY = "sightline-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = recall(KEY);
let whenChanged = () => {};

/** The stored value of `key`, or null. `where` "sessionStorage": kept for this tab only. */
export function recall(key, where = "localStorage") {
  try {
    return window[where].getItem(key);
  } catch {
    // With storage blocked, even access to it throws.
    return null;
  }
}

export function remember(key, value, where = "localStorage") {
  try {
    window[where].setItem(key, value);
  } catch {
    // Blocked or full: the value lasts until the page is left.
  }
}

export const theme = () => document.documentElement.dataset.theme;

/** `callback` is called when the user or the system changes the theme. */
export function onTheme(callback) {
  whenChanged = callback;
}

export function toggleTheme() {
  chosen = theme() === "dark" ? "light" : "dark";
  remember(KEY, chosen);
  apply();
}

function apply() {
  document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
  whenChanged();
}

dark.addEventListener("change", apply);
apply();
