// Searching by a picture, and the matches.

import { arrowKeyNav, byId, clearError, confirmAction, element, offerUndo, runWithErrors, showError, showWarnings, userError } from "./dom.js";
import { FacesPicture } from "./faces.js";
import { displayName, personHead } from "./person.js";
import { asInput, Pictures } from "./picture.js";
import { readFilter } from "./scalars.js";
import { call, inCollection } from "./service.js";
import { emit, hasRole, isMatch, on, state, threshold } from "./state.js";
import { formatScore, judgement, scoreBar, showFalseMatches, thresholdSlider } from "./threshold.js";
import { countFaces, countItems, words } from "./words.js";

const error = byId("search-error");
const summary = byId("search-summary");
const MOST_FACES = 64;   // of a picture, each with its matches: more than the service allows are of the largest alone
let pictures = null;
let matches = null;     // null before the first search; of the chosen face where the picture shows several
let faces = [];         // of the picture, where it shows several
let chosenFace = null;
let facesFound = 0;
let facesPicture = null;
let searched = null;    // {k, filtered} of the search that found them
let running = null;     // the AbortController of the search under way

export function setUpSearch() {
  pictures = new Pictures(byId("search-picture"), { label: "A picture to search by", changed: () => { forgetDone(); search(); } });
  facesPicture = new FacesPicture(byId("search-faces-picture"), chooseFace);
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
  on("collections", show);
  on("collection", () => { forgetDone(); search(); });
  on("changed", (by) => by !== "search" && search());
}

export const receive = (found) => pictures.receive(found);

async function search() {
  running?.abort();
  if (pictures.files.length === 0 || state.info === null) return forget();
  running = new AbortController();
  const { signal } = running;
  byId("matches").setAttribute("aria-busy", "true");
  const done = await runWithErrors(error, async () => {
    const [file] = pictures.files;
    const k = Number(byId("search-k").value);
    const every = state.info.detector && k * MOST_FACES <= state.info.limits.matches ? { faces: "all" } : {};
    const body = { query: await asInput(file), ...every, k, ...chosenFilter() };
    const answer = await call("POST", inCollection(chosen(), "search"), { body, signal, files: { query: file } });
    const [result] = answer.results;
    [matches, facesFound] = [result.matches, result.faces_found ?? 0];
    faces = (result.faces ?? []).length > 1 ? result.faces : [];
    chosenFace = faces[0] ?? null;
    searched = { k: body.k, filtered: body.filter !== undefined };
    byId("search-foot").textContent = approximationNote(answer);
    showWarnings(byId("search-warning"), answer.warnings);
  });
  if (signal.aborted) return;
  byId("matches").removeAttribute("aria-busy");
  if (!done) [matches, faces] = [null, []];
  show();
}

function chooseFace(face) {
  [chosenFace, matches] = [face, face.matches];
  forgetDone();
  show();
}

function forget() {
  [matches, faces] = [null, []];
  byId("matches").removeAttribute("aria-busy");
  clearError(error);
  show();
}

function forgetDone() {
  byId("search-done").replaceChildren();
}

function chosen() {
  if (state.collection === null) throw userError("There is no collection yet; create one first.");
  return state.collection;
}

function chosenFilter() {
  const filter = readFilter(byId("search-filter").value);
  return filter === null ? {} : { filter };
}

/** The faces of the picture, each with the name of its best match, or "unknown" below the threshold. */
function showFaces() {
  byId("search-faces").hidden = faces.length === 0;
  if (faces.length === 0) return;
  const labels = new Map(faces.map((face) => [face, faceLabel(face)]));
  const known = faces.filter((face) => labels.get(face).known).length;
  const left = facesFound > faces.length ? ` of ${facesFound}` : "";
  byId("search-faces-summary").textContent = `${countFaces(faces.length)}${left} in the picture, ${known} above the threshold. Choose one to see its matches.`;
  facesPicture.show(pictures.files[0], faces, (face) => labels.get(face), chosenFace);
}

function faceLabel({ matches: [best] }) {
  const above = best === undefined ? false : isMatch(best.score, best.same_person);
  if (above === false) return { name: "unknown", note: "", known: false };
  return { name: displayName(best.person), note: formatScore(best.score), known: above === true };
}

function show() {
  showFaces();
  byId("search-enrol").hidden = matches === null || !hasRole("write");
  if (matches === null) {
    summary.textContent = error.hidden && pictures.files.length === 0 ? "The matches appear here." : "";
    byId("search-foot").textContent = "";
    showFalseMatches(byId("search-odds"), 0);
    showWarnings(byId("search-warning"));
    byId("matches").replaceChildren();
    return;
  }
  summary.textContent = `${faces.length === 0 ? "" : `Face ${chosenFace.number}: `}${summaryText()}`;
  showFalseMatches(byId("search-odds"), matches.length === 0 ? 0 : gallery().faces);
  byId("matches").replaceChildren(...matches.map(row));
}

const gallery = () => state.collections.find((one) => one.name === state.collection) ?? { persons: 0, faces: 0 };

function summaryText() {
  if (matches.length === 0) return searched.filtered ? `No ${words().many} here match the filter.` : `No ${words().many} are enrolled here yet.`;
  const [best] = matches;
  const nearest = `${displayName(best.person)} at ${formatScore(best.score)}`;
  const among = searched.filtered ? `the filtered ${words().many}` : countItems(gallery().persons);
  if (threshold() === null) return `The nearest of ${among} is ${nearest}. There is no threshold to compare with.`;
  const above = matches.filter((match) => isMatch(match.score, match.same_person)).length;
  if (above === 0) return `No match among ${among}. The nearest is ${nearest}.`;
  const more = above === searched.k ? " or more" : "";
  return `${above}${more} above the threshold among ${among}. The best is ${nearest}.`;
}

function row(match) {
  const add = element("button", { type: "button", class: "plain small", "aria-label": `Add this picture to ${displayName(match.person)}`, onclick: () => addFace(match, add) }, "Add this picture");
  const score = element("div", { class: "score" }, element("span", { class: "number" }, formatScore(match.score)), scoreBar(match.score), judgement(match.score, match.same_person));
  return element("li", {}, ...personHead(match.person, match.face, `${words().face} ${match.face}`), score, hasRole("write") ? add : null);
}

/** Add the picture to a match; below the threshold only after a question, for one wrong face spoils later searches. */
async function addFace(match, button) {
  const send = () => sendFace(match.person);
  const isAbove = isMatch(match.score, match.same_person) === true;
  const added = await (isAbove ? runWithErrors(error, send, button) : confirmAction(question(match), send));
  if (added) byId("search-done").querySelector("button")?.focus();   // the row that had the focus was drawn anew
}

function question({ person, score }) {
  const name = displayName(person);
  const limit = threshold();
  const judged = limit === null ? "there is no threshold to compare with" : `below the threshold of ${formatScore(limit)}`;
  const [best] = matches;
  const nearest = best.person.id === person.id ? "Nothing here is nearer."
    : `The nearest is ${displayName(best.person)} at ${formatScore(best.score)}.`;
  const text = `The picture scores ${formatScore(score)} with ${name}: ${judged}. ${nearest} If it does not show ${name}, later searches will find ${name} by mistake.`;
  return { title: `Add this picture to ${name}?`, text, yes: `Add it to ${name}`, no: "Do not add" };
}

async function sendFace(person) {
  const [file] = pictures.files;
  const which = faces.length === 0 ? {} : { face: chosenFace.number };
  const path = inCollection(state.collection, "persons", person.id, "faces");
  const answer = await call("POST", path, { body: { faces: [{ ...await asInput(file), ...which }] }, files: { "faces[0]": file } });
  const [{ id }] = answer.faces;
  offerUndo(byId("search-done"), `The picture is now ${words().face} ${id} of ${displayName(person)}.`, error, async () => {
    await call("DELETE", `${path}/${id}`);
    await renew();
    byId("search-again").focus();
    return `Undone: ${words().face} ${id} of ${displayName(person)} is deleted.`;
  });
  await renew();
}

async function renew() {
  emit("changed", "search");
  await search();
}

function approximationNote(answer) {
  if (!answer.approximate) return "";
  const share = answer.recall === null ? "" : `: it finds ${(100 * answer.recall).toFixed(1)}% of the true neighbours`;
  return `This search was approximate${share}.`;
}
