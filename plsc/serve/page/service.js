// The only caller of the service. The token lives in sessionStorage: it ends with the tab.

import { fileName } from "./picture.js";
import { parseJson, writeJson } from "./scalars.js";
import { emit, state } from "./state.js";

const BASE = new URL("../", import.meta.url);   // works below a proxy's prefix too
const KEY = "plsc-token";

/** What went wrong in one line; `code` is the service's, or "gone" where nothing answered. */
export class ServiceError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
    this.shown = true;   // meant for people: the console need not repeat it
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

/**
 * Ask the service; answers its JSON, or null where it has nothing to say. Throws ServiceError, or AbortError.
 * `files` are the files behind the body's inputs by the names that the service gives them: {query: file}.
 */
export async function call(method, path, { body = null, signal = null, files = {} } = {}) {
  const headers = authorization();
  if (body !== null) headers["Content-Type"] = "application/json";
  const answer = await reach(path, { method, headers, signal, body: body === null ? null : bodyOf(body) });
  const text = await readText(answer);
  if (!answer.ok) throw toServiceError(answer, text, files);
  const found = text === "" ? null : parseJson(text);
  if (found?.warnings !== undefined) found.warnings = found.warnings.map((warning) => withFileName(warning, files));
  return found;
}

/** The object URL of a picture that the service has, null where it has none. */
export async function callForPicture(path) {
  try {
    const answer = await reach(path, { headers: authorization() });
    return answer.ok ? URL.createObjectURL(await answer.blob()) : null;
  } catch {
    return null;   // the requests beside it tell that the service is gone
  }
}

const authorization = () => (token.get() === null ? {} : { Authorization: `Bearer ${token.get()}` });

/** The path of a collection, and of what is in it. */
export const inCollection = (name, ...parts) => ["v1/collections", encodeURIComponent(name), ...parts].join("/");

/** Whether the service is ready, as a word: "ready", "busy" (it answers, but not yet) or "gone". */
export async function readiness() {
  try {
    return (await fetch(new URL("health/ready", BASE), { cache: "no-store" })).ok ? "ready" : "busy";
  } catch {
    return "gone";
  }
}

/** The JSON of a body; one that the service would refuse is not sent, for it hangs up before it has read it. */
function bodyOf(body) {
  const text = writeJson(body);
  const limit = state.info?.limits.body_bytes ?? Infinity;
  if (text.length <= limit) return text;
  throw new ServiceError("too_large", `The service takes ${Math.floor(limit / 2 ** 20)} MiB per request, and pictures grow by a third when they are sent; choose smaller ones.`);
}

async function reach(path, request) {
  try {
    return await fetch(new URL(path, BASE), { ...request, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    throw connectionError(error);
  }
}

async function readText(answer) {
  try {
    return await answer.text();
  } catch (error) {
    throw connectionError(error);
  }
}

function connectionError(error) {
  if (error.name === "AbortError") return error;
  emit("gone");
  return new ServiceError("gone", `The service at ${BASE.host} does not answer; check that it is running, then try again.`);
}

/** A message that begins with an input's name, with the name of the file that the user chose instead. */
function withFileName(message, files) {
  const input = Object.keys(files).find((name) => message.startsWith(name) && /^(?:: | is | has | does not )/.test(message.slice(name.length)));
  return input === undefined ? message : `${fileName(files[input])}${message.slice(input.length)}`;
}

function toServiceError(answer, text, files) {
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    // a proxy's page, perhaps: the status is shown instead
  }
  const code = error?.code ?? `http ${answer.status}`;
  if (answer.status === 401) emit("unauthorized");
  const message = error?.message === undefined ? undefined : withFileName(error.message, files);
  return new ServiceError(code, message ?? `The answer was ${answer.status} without a reason. Is there a proxy in between?`);
}
