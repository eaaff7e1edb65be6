// The sign-in form: identity provider, token, or both.
import { get, post } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { recall, remember } from "./theme.js";

const LEFT = "sightline-left";

/** Restores the page requested before sign-in at the provider, which redirects to the start page. */
export function comeBack() {
  const left = recall(LEFT, "sessionStorage");
  remember(LEFT, "", "sessionStorage");
  if (left && !location.hash) history.replaceState(null, "", left);
}

export function Login({ onDone }) {
  const field = useRef(null);
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const [ways, setWays] = useState({ tokens: true, provider: "" });
  useEffect(() => {
    get("/v1/sign-in").then(setWays, () => {});
  }, []);
  useEffect(() => {
    if (!ways.provider) field.current?.focus();
  }, [ways]);
  const signIn = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await post("/v1/session", { token: field.current.value.trim() });
      onDone();
    } catch (failure) {
      setError(failure.status === 401 ? "This token is not known, or it has expired." : failure.message);
      setBusy(false);
      field.current.select();
    }
  };
  return html`<main id="main" class="login">
    <form class="card" onSubmit=${signIn} aria-labelledby="login-title">
      <p class="brand"><span class="brand-mark" aria-hidden="true"></span>Sightline</p>
      <h1 id="login-title">Sign in</h1>
      ${ways.provider && html`<a class="button primary wide" href="/v1/sign-in/provider" onClick=${() => remember(LEFT, location.hash, "sessionStorage")}>Sign in with ${ways.provider}</a>`}
      ${ways.tokens && html`
        <p class="soft">Administrators of this cluster create tokens with <code>sightline tokens create</code>.</p>
        <label class="field column">Token
          <input ref=${field} type="password" name="token" required autocomplete="current-password" aria-invalid=${Boolean(error)} aria-describedby="login-error" /></label>
        <p id="login-error" class="error" role="alert">${error}</p>
        <button class=${`button wide ${ways.provider ? "" : "primary"}`} disabled=${busy}>${busy ? "Signing in…" : "Sign in"}</button>`}
    </form>
  </main>`;
}
