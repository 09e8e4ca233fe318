// Searching by a picture, and the matches.

import { arrowKeyNav, byId, clearError, element, pluralize, runWithErrors, showError, userError } from "./dom.js";
import { displayName, personHead } from "./person.js";
import { asInput, Pictures } from "./picture.js";
import { readFilter } from "./scalars.js";
import { call, inCollection } from "./service.js";
import { emit, hasRole, isMatch, on, state } from "./state.js";
import { formatScore, judgement, scoreBar, thresholdSlider } from "./threshold.js";

const error = byId("search-error");
const summary = byId("search-summary");
let pictures = null;
let matches = null;     // null before the first search
let running = null;     // the AbortController of the search under way

export function setUpSearch() {
  pictures = new Pictures(byId("search-picture"), { label: "A picture to search by", changed: search });
  thresholdSlider(byId("search-threshold"), "search");
  arrowKeyNav(byId("matches"), "button.name");
  byId("search-form").onsubmit = (event) => {
    event.preventDefault();
    if (pictures.files.length > 0) search();
    else showError(error, userError("Choose a picture first."));
  };
  byId("search-enrol").onclick = () => emit("enrol", pictures.files);
  on("threshold", show);
  on("info", show);
  on("collection", search);
  on("changed", (by) => by !== "search" && search());
}

export const receive = (files) => pictures.take(files);

async function search() {
  running?.abort();
  if (pictures.files.length === 0 || state.info === null) return forget();
  running = new AbortController();
  const { signal } = running;
  byId("matches").setAttribute("aria-busy", "true");
  const done = await runWithErrors(error, async () => {
    const body = { query: await asInput(pictures.files[0]), k: Number(byId("search-k").value), ...chosenFilter() };
    const answer = await call("POST", inCollection(chosen(), "search"), { body, signal });
    matches = answer.results[0].matches;
    byId("search-foot").textContent = approximationNote(answer);
  });
  if (signal.aborted) return;
  byId("matches").removeAttribute("aria-busy");
  if (!done) matches = null;
  show();
}

function forget() {
  matches = null;
  byId("matches").removeAttribute("aria-busy");
  clearError(error);
  show();
}

function chosen() {
  if (state.collection === null) throw userError("There is no collection yet; create one first.");
  return state.collection;
}

function chosenFilter() {
  const filter = readFilter(byId("search-filter").value);
  return filter === null ? {} : { filter };
}

function show() {
  byId("search-enrol").hidden = matches === null || !hasRole("write");
  if (matches === null) {
    summary.textContent = error.hidden && pictures.files.length === 0 ? "The matches appear here." : "";
    byId("search-foot").textContent = "";
    byId("matches").replaceChildren();
    return;
  }
  summary.textContent = summaryText();
  byId("matches").replaceChildren(...matches.map(row));
}

function summaryText() {
  if (matches.length === 0) return "Nobody in this collection fits.";
  const [best] = matches;
  const same = isMatch(best.score, best.same_person);
  const verdict = same === null ? "" : same ? ", the same person" : ", but someone else";
  return `${pluralize(matches.length, "match", "matches")}; the best is ${displayName(best.person)} at ${formatScore(best.score)}${verdict}.`;
}

function row(match) {
  const add = element("button", { type: "button", class: "plain small", "aria-label": `Add this picture to ${displayName(match.person)}`, onclick: () => addFace(match.person, add) }, "Add this picture");
  const score = element("div", { class: "score" }, element("span", { class: "number" }, formatScore(match.score)), scoreBar(match.score), judgement(match.score, match.same_person));
  return element("li", {}, ...personHead(match.person, `face ${match.face}`), score, hasRole("write") ? add : null);
}

async function addFace(person, button) {
  let face = null;
  const done = await runWithErrors(error, async () => {
    const faces = [await asInput(pictures.files[0])];
    const answer = await call("POST", inCollection(state.collection, "persons", person.id, "faces"), { body: { faces } });
    face = answer.faces[0].id;
  }, button);
  if (!done) return;
  emit("changed", "search");
  await search();
  summary.textContent = `The picture is now face ${face} of ${displayName(person)}.`;
}

function approximationNote(answer) {
  if (!answer.approximate) return "";
  const share = answer.recall === null ? "" : `: it finds ${(100 * answer.recall).toFixed(1)}% of the true neighbours`;
  return `This search was approximate${share}.`;
}
