// The box that asks for a token, shown when the gateway wants one.
import { post } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";

export function Login({ onDone, note }) {
  const field = useRef(null);
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => field.current.focus(), []);
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
      <p class="soft">${note || "This cluster asks for a token. Whoever runs it makes them with "}${!note && html`<code>sightline token create</code>.`}</p>
      <label class="field column">Token
        <input ref=${field} type="password" name="token" required autocomplete="current-password" aria-invalid=${Boolean(error)} aria-describedby="login-error" /></label>
      <p id="login-error" class="error" role="alert">${error}</p>
      <button class="button primary wide" disabled=${busy}>${busy ? "Signing in…" : "Sign in"}</button>
    </form>
  </main>`;
}
