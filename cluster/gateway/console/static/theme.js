// Dark or light: the system's choice until somebody makes one. Loaded before the page is drawn.
const KEY = "sightline-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = recall(KEY);
let whenChanged = () => {};

/** What `remember` was told, by this page or an earlier one (`where` "sessionStorage": of this tab); null if nothing. */
export function recall(key, where = "localStorage") {
  try {
    return window[where].getItem(key);
  } catch {
    // A browser that lets pages store nothing throws even here.
    return null;
  }
}

export function remember(key, value, where = "localStorage") {
  try {
    window[where].setItem(key, value);
  } catch {
    // Blocked or full: it holds until the page is left.
  }
}

export const theme = () => document.documentElement.dataset.theme;

/** `callback` is called when it changes, whoever changed it. */
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
