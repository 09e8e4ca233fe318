// Whether the service is ready, and its figures.

import { byId, day, element, isolated, runWithErrors } from "./dom.js";
import { readiness, token } from "./service.js";
import { emit, isLocked, on, state } from "./state.js";
import { capital, countFaces, countItems, holdsPeople, words } from "./words.js";

const EVERY = 10_000;   // milliseconds between looks
const limitsShown = () => ({
  body_bytes: ["One request", (bytes) => `${grouped(bytes / 2 ** 20)} MiB`],
  whole_pixels: ["One picture", (pixels) => `${grouped(pixels / 1e6)} million pixels`],
  jpeg_pixels: ["One JPEG", (pixels) => `${grouped(pixels / 1e6)} million pixels`],
  inputs: ["Pictures at once", grouped],
  k: ["One search", (k) => `${grouped(k)} matches`],
  matches: ["Searches of one request", (many) => `${grouped(many)} matches together`],
  collections: ["Collections", grouped],
  persons: [`${capital(words().many)} in a collection`, grouped],
  store_bytes: ["The store", (bytes) => `${grouped(bytes / 2 ** 20)} MiB`],
  metadata_bytes: ["Metadata of one", (bytes) => `${grouped(bytes)} bytes`],
  answer_bytes: ["One answer", (bytes) => `${grouped(bytes / 2 ** 20)} MiB`],
});
const WORDS = { asking: "connecting…", ready: "ready", busy: "not ready", gone: "not answering", locked: "token needed" };
let found = "asking";   // what the last look found
let refresh = async () => {};

/** `reload` asks for everything again: after the service was away, and on the button. */
export function setUpHealth(reload) {
  refresh = reload;
  byId("service-refresh").onclick = (event) => runWithErrors(byId("service-error"), () => refresh(true), event.target);
  on("info", show);
  on("collections", show);
  on("gone", () => tell("gone"));
  on("locked", () => tell(found));
  setInterval(look, EVERY);
  document.addEventListener("visibilitychange", look);
  look();
}

/** Look now. Coming back is told by "back", so that what failed can be asked for again. */
export async function look() {
  if (document.hidden) return;
  const before = found;
  tell(await readiness());
  if (before === "gone" && found === "ready") emit("back");
}

function tell(now) {
  found = now;
  const word = found === "ready" && isLocked() ? "locked" : found;
  byId("health").dataset.state = word;
  if (byId("health-word").textContent !== WORDS[word]) byId("health-word").textContent = WORDS[word];
}

function show() {
  const { info, collections } = state;
  byId("token-forget").hidden = token.get() === null;
  if (info === null) return clear();
  const total = (key) => collections.reduce((sum, one) => sum + one[key], 0);
  fill("service-figures", {
    "Enrolled": `${countFaces(total("faces"))} of ${countItems(total("persons"))}`,
    "Model": info.model.source,
    "Embedding": `${info.model.embedding_dim} numbers from ${sizeOf(info.model)} pixels`,
    "Contract": info.model.contract_id,
    "Threshold": threshold(info),
    "Thumbnails": info.thumbnails ? "kept of each enrolled picture" : "not kept",
    ...(holdsPeople() ? { "Detector": info.detector ? "finds the face in a picture" : "none; pictures must be aligned crops" } : {}),
    "Your role": info.role,
    "Version": info.version,
  });
  const known = limitsShown();
  const given = Object.entries(info.limits).filter(([, value]) => value !== null);
  fill("service-limits", Object.fromEntries(given.map(([key, value]) => [known[key]?.[0] ?? key, limit(value, known[key]?.[1])])));
  byId("service-collections").tBodies[0].replaceChildren(...collections.map(collectionRow));
  byId("kept").textContent = info.thumbnails
    ? "The service keeps a small crop of each enrolled picture. The crop is deleted with its entry."
    : `The service keeps embeddings only, no pictures. ${capital(words().many)} are shown by initials and numbers.`;
  for (const hint of document.querySelectorAll(".crops")) showCrops(hint, info);
}

function clear() {
  for (const id of ["service-figures", "service-limits"]) byId(id).replaceChildren();
  byId("service-collections").tBodies[0].replaceChildren();
}

function threshold({ threshold: own, false_match_rate: rate, fpir }) {
  if (own === null) return "none";
  const short = Number(own.toFixed(4));
  const text = rate === null ? String(short) : `${short}, for a false-match rate of ${rate}`;
  return (fpir ?? null) === null ? text : `by each collection's size, for an FPIR of ${fpir}; of two pictures ${text}`;
}

function collectionRow(one) {
  const { model, next_model: next } = state.info;
  const known = { ...(next === null ? {} : { [next]: "the next one" }), [model.contract_id]: "this one" };
  const models = one.contract_id.split(",").map((id) => known[id] ?? "another"); // several where they are compatible
  const made = [...new Set(models)].join(" and ");
  const cells = [one.persons.toLocaleString("en"), one.faces.toLocaleString("en"), made, day(one.created)];
  return element("tr", {}, element("th", { scope: "row" }, isolated(one.name)), ...cells.map((text) => element("td", {}, text)));
}

function showCrops(hint, info) {
  hint.hidden = info.detector || !holdsPeople();
  hint.textContent = `The model expects aligned crops of ${sizeOf(info.model)} pixels. This service does not find faces in larger pictures.`;
}

// image_size is the side of a square, or [height, width]; people read width × height.
function sizeOf(model) {
  const [height, width] = Array.isArray(model.image_size) ? model.image_size : [model.image_size, model.image_size];
  return `${width} × ${height}`;
}

function fill(id, figures) {
  byId(id).replaceChildren(...Object.entries(figures).map(
    ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, isolated(value))),
  ));
}

function limit(value, written = grouped) {
  return typeof value === "number" ? written(value) : JSON.stringify(value);
}

function grouped(number) {
  return number.toLocaleString("en", { maximumFractionDigits: 1 });
}
