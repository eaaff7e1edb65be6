// Client of the gateway's HTTP API: JSON requests, error messages, streamed answers.
import { take } from "./first.js";
import { tellTime } from "./format.js";

/** A failed request; `status` 0: the gateway was unreachable. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const UNREACHABLE = "The gateway cannot be reached. It may be restarting, or the network is down.";
/** The gateway itself gives up after 30 s. */
const LIMIT_MS = 40_000;
let whenSignedOut = () => {};

/** `callback` is called when the gateway answers 401. */
export function onSignedOut(callback) {
  whenSignedOut = callback;
}

export const cameraPath = (name) => `/v1/cameras/${encodeURIComponent(name)}`;
export const incidentPath = (id) => `/v1/incidents/${encodeURIComponent(id)}`;
export const get = (path, signal) => request("GET", path, undefined, within(LIMIT_MS, signal));
export const post = (path, body, signal) => request("POST", path, body, signal);
export const put = (path, body) => request("PUT", path, body);
export const remove = (path) => request("DELETE", path);

/** `signal` plus a timeout of `ms`: a dead connection would otherwise block for minutes. */
export const within = (ms, signal) => AbortSignal.any([AbortSignal.timeout(ms), ...(signal ? [signal] : [])]);

/** Resolves to a successful response; throws ApiError with the gateway's message. */
export async function open(path, options = {}) {
  let response;
  try {
    response = await (take(path, options.signal) ?? fetch(path, { credentials: "same-origin", cache: "no-store", ...options }));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, UNREACHABLE);
  }
  tellTime(response.headers.get("Date"));
  if (response.ok || response.status === 304) return response;
  const message = await sentence(response);
  if (response.status === 401) whenSignedOut();
  throw new ApiError(response.status, message);
}

async function request(method, path, body, signal) {
  const options = { method, signal };
  if (body !== undefined) {
    options.headers = { "Content-Type": "application/json" };
    options.body = JSON.stringify(body);
  }
  const response = await open(path, options);
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(response.status, "The gateway's reply could not be read.");
  }
}

async function sentence(response) {
  try {
    const body = await response.json();
    const said = body.error?.message ?? body.error;
    if (said) return String(said);
  } catch {
    // Not JSON: a proxy answered instead of the gateway.
  }
  return `The gateway answered ${response.status} ${response.statusText}.`.replace(" .", ".");
}

/** Yields the objects of a POST's newline-delimited JSON response; throws ApiError if one has an `error`. */
export async function* stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  try {
    const response = await open(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    for await (const text of pieces(response, /\r?\n/)) {
      if (!text.trim()) continue;
      const event = JSON.parse(text);
      if (event.error) throw new ApiError(response.status, event.error);
      yield event;
    }
  } catch (error) {
    throw error.name === "AbortError" ? new ApiError(0, "Stopped.") : error;
  }
}

/** Yields the body's text split at `separator`, the remainder last. No timeout: abort the request to stop it. */
export async function* pieces(response, separator, onBytes = () => {}) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      onBytes();
      const parts = (rest + decoder.decode(value, { stream: true })).split(separator);
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    await reader.cancel().catch(() => {});
  }
}
