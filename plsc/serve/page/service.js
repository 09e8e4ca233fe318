// The only caller of the service. The token lives in sessionStorage: it ends with the tab.

import { fileName } from "./picture.js";
import { parseJson, writeJson } from "./scalars.js";
import { emit, state } from "./state.js";

const BASE = new URL("../", import.meta.url);   // works below a proxy's prefix too
const KEY = "plsc-token";

/**
 * What went wrong in one line; `code` is the service's, or "gone" where nothing answered. `file` is the picture that it
 * is about, and `why` the line without its name; `known` is somebody enrolled who matches; `faces` are those of which
 * one has to be chosen; `wait` are the seconds after which the service wants to be asked again.
 */
export class ServiceError extends Error {
  constructor(code, message, more = {}) {
    super(message);
    this.code = code;
    Object.assign(this, more);
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
  if (!answer.ok) throw announced(toServiceError(answer, text, files));
  const found = text === "" ? null : parseJson(text);
  if (found?.warnings !== undefined) found.warnings = found.warnings.map((warning) => withFileName(warning, files));
  return found;
}

const TRIES = 5;   // of a request while the service is busy

/** The same, asked again after a while where the service says so. */
export async function callPatiently(method, path, options) {
  for (let left = TRIES - 1; ; left -= 1) {
    try {
      return await call(method, path, options);
    } catch (error) {
      if (!error.wait || left === 0) throw error;
      await new Promise((resolve) => setTimeout(resolve, 1000 * error.wait));
    }
  }
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

/** A message that begins with an input's name, as {file, why}: the file that the user chose, and what is said of it. */
function aboutFile(message, files) {
  const input = Object.keys(files).find((name) => message.startsWith(name) && /^(?:: | is | has | shows | does not )/.test(message.slice(name.length)));
  return input === undefined ? null : { file: files[input], why: message.slice(input.length) };
}

/** The same with the file's name in the place of the input's. */
function withFileName(message, files) {
  const about = aboutFile(message, files);
  return about === null ? message : `${fileName(about.file)}${about.why}`;
}

function announced(error) {
  if (error.code === "unauthorized") emit("unauthorized");
  if (error.file !== undefined && error.known === null && error.faces === null) emit("refused", { file: error.file, why: error.why.replace(/^:? /, "") });
  return error;
}

function toServiceError(answer, text, files) {
  let [error, known, faces] = [null, null, null];
  try {
    ({ error, known = null, faces = null } = JSON.parse(text));
  } catch {
    // a proxy's page, perhaps: the status is shown instead
  }
  const code = error?.code ?? `http ${answer.status}`;
  if (answer.status === 401) return new ServiceError(code, token.get() === null ? "The service needs a token." : "The service does not know this token.");
  if (error?.message === undefined) return new ServiceError(code, `The answer was ${answer.status} without a reason. Is there a proxy in between?`);
  const more = { ...aboutFile(error.message, files), known, faces, wait: Number(answer.headers.get("Retry-After") ?? 0) };
  return new ServiceError(code, withFileName(error.message, files), more);
}
