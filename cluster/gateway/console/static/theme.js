// Dark or light: the system's choice until somebody makes one. Loaded before the page is drawn.
const KEY = "sightline-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
let whenChanged = () => {};

export const theme = () => document.documentElement.dataset.theme;

/** `callback` is called when it changes, whoever changed it. */
export function onTheme(callback) {
  whenChanged = callback;
}

export function toggleTheme() {
  localStorage.setItem(KEY, theme() === "dark" ? "light" : "dark");
  apply();
}

function apply() {
  document.documentElement.dataset.theme = localStorage.getItem(KEY) ?? (dark.matches ? "dark" : "light");
  whenChanged();
}

dark.addEventListener("change", apply);
apply();
