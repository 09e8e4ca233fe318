// A person: as a row of a list, and in a dialog to change name and metadata, add and delete faces, delete the person.

import { byId, clearError, confirmAction, day, element, isolated, offerUndo, runWithErrors, showWarnings } from "./dom.js";
import { withChosenFaces } from "./faces.js";
import { linked, MetadataEditor, metadataLine } from "./metadata.js";
import { asInputs, faceFiles, Pictures } from "./picture.js";
import { writeJson } from "./scalars.js";
import { call, inCollection } from "./service.js";
import { emit, hasRole, state } from "./state.js";
import { faceThumbnail, portrait } from "./thumbnail.js";
import { capital, countFaces, words } from "./words.js";

const dialog = byId("person");
const error = byId("person-error");
const DELETION = { yes: "Delete permanently", no: "Keep" };
let shown = null;      // the person in the dialog
let place = null;      // the path of the person
let editor = null;
let pictures = null;

export function setUpPerson() {
  editor = new MetadataEditor(byId("person-metadata"), "person-metadata");
  pictures = new Pictures(byId("person-add"), { label: "Add a picture", capacity: 8, changed: addFaces });
  byId("person-close").onclick = () => dialog.close();
  byId("person-form").onsubmit = (event) => {
    event.preventDefault();
    runWithErrors(error, save, byId("person-save"));
  };
  byId("person-delete").onclick = deletePerson;
}

/** Open the dialog on a person of the chosen collection. */
export async function openPerson(id) {
  place = inCollection(state.collection, "persons", id);
  const region = byId("page-error");
  await runWithErrors(region, async () => {
    show(await call("GET", place));
    tellDone("");
    clearError(error);
    dialog.showModal();
    byId("person-title").focus();
  });
}

/** What was dropped or pasted while the dialog was open. */
export const receive = (found) => pictures.receive(found);

function show(person) {
  shown = person;
  byId("person-title").textContent = displayName(person);
  byId("person-facts").textContent = `#${person.id} in ${state.collection} · since ${day(person.created)}`;
  byId("person-link").replaceChildren(...Object.entries(person.metadata).map(([key, value]) => linked(key, value)).filter(Boolean));
  byId("person-name").value = person.name ?? "";
  editor.write(person.metadata);
  byId("person-faces").replaceChildren(...person.faces.map(faceRow));
  byId("person-fields").disabled = !hasRole("write");
  for (const id of ["person-save", "person-add", "person-delete"]) byId(id).hidden = !hasRole("write");
}

function faceRow(face) {
  const remove = element("button", { type: "button", class: "quiet", "aria-label": `Delete ${words().face} ${face.id}`, onclick: () => deleteFace(face.id) }, "Delete…");
  return element("li", {}, faceThumbnail(shown, face.id), element("span", {}, `${words().face} ${face.id}`), hasRole("write") ? remove : null);
}

async function save() {
  const [name, metadata] = [byId("person-name").value.trim(), editor.read()];
  const body = {};   // what was not touched here may have been changed elsewhere meanwhile
  if (name !== (shown.name ?? "")) body.name = name;
  if (writeJson(metadata) !== writeJson(shown.metadata)) body.metadata = metadata;
  show(await call("PATCH", place, { body }));
  tellDone("Saved.");
  emit("changed");
}

async function addFaces(files) {
  if (files.length === 0) return;
  const added = await runWithErrors(error, async () => {
    const faces = await asInputs(files);
    const answer = await withChosenFaces(faces, files, () => call("POST", `${place}/faces`, { body: { faces }, files: faceFiles(files) }));
    show(await call("GET", place));
    showWarnings(byId("person-warning"), answer.warnings);
    const [path, ids] = [place, answer.faces.map((face) => face.id)];
    offerUndo(byId("person-done"), `Added ${ids.map((id) => `${words().face} ${id}`).join(", ")}.`, error, () => undo(path, ids));
    emit("changed");
  });
  if (added) pictures.clear();
}

/** Delete the faces that were just added. */
async function undo(path, faces) {
  for (const face of faces) await call("DELETE", `${path}/faces/${face}`);
  if (dialog.open && path === place) show(await call("GET", place));
  byId("person-title").focus();
  showWarnings(byId("person-warning"));
  emit("changed");
  return `Undone: ${countFaces(faces.length)} deleted.`;
}

async function deleteFace(face) {
  const text = `${capital(words().face)} ${face} of ${displayName(shown)} will no longer be found. This cannot be undone.`;
  const done = await confirmAction({ title: `Delete this ${words().face}?`, text, ...DELETION }, () => call("DELETE", `${place}/faces/${face}`));
  if (!done) return;
  await runWithErrors(error, async () => show(await call("GET", place)));
  tellDone(`${capital(words().face)} ${face} is deleted.`);
  byId("person-title").focus();
  emit("changed");
}

async function deletePerson() {
  const text = `${displayName(shown)} (#${shown.id}) with ${countFaces(shown.faces.length)} will no longer be found. This cannot be undone.`;
  const done = await confirmAction({ title: `Delete this ${words().one}?`, text, ...DELETION }, () => call("DELETE", place));
  if (!done) return;
  dialog.close();
  emit("changed");
}

function tellDone(text) {
  byId("person-done").textContent = text;
  showWarnings(byId("person-warning"));
}

export const displayName = (person) => person.name || `${capital(words().one)} ${person.id}`;

/** The first letters of the first and the last word of a name; "#" for none. */
function initials(name) {
  const words = (name ?? "").split(/\s+/u).map((word) => /[\p{L}\p{N}]/u.exec(word)?.[0]).filter(Boolean);
  return words.length === 0 ? "#" : [...new Set([0, words.length - 1])].map((at) => words[at]).join("").toUpperCase();
}

/** The beginning of a row: the thumbnail of `face` or initials, and the name as a button that opens the person. */
export function personHead(person, face, ...facts) {
  const open = { type: "button", class: "name", onclick: () => openPerson(person.id) };
  const name = element(hasRole("read") ? "button" : "strong", hasRole("read") ? open : {}, isolated(displayName(person)));
  return [
    portrait(person, face, initials(person.name)),
    element("div", { class: "who" },
      element("div", { class: "line" }, name, element("span", { class: "facts" }, [`#${person.id}`, ...facts].join(" · "))),
      metadataLine(person.metadata)),
  ];
}
