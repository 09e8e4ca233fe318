// One person in a dialog: name and metadata to change, faces to add and delete, the whole person to delete.

import { confirmed } from "./confirm.js";
import { attempt, byId, counted, day, element, quieten } from "./dom.js";
import { MetadataEditor } from "./metadata.js";
import { called } from "./people.js";
import { asInputs, Pictures } from "./picture.js";
import { writeJson } from "./scalars.js";
import { call, inCollection } from "./service.js";
import { may, state, tell } from "./state.js";

const dialog = byId("person");
const error = byId("person-error");
let shown = null;      // the person in the dialog
let place = null;      // the path of the person
let editor = null;
let pictures = null;

export function setUpPerson() {
  editor = new MetadataEditor(byId("person-metadata"), "person-metadata");
  pictures = new Pictures(byId("person-add"), { label: "Add a face", capacity: 8, changed: addFaces });
  byId("person-close").onclick = () => dialog.close();
  byId("person-form").onsubmit = (event) => {
    event.preventDefault();
    attempt(error, save, byId("person-save"));
  };
  byId("person-delete").onclick = deletePerson;
}

/** Open the dialog on a person of the chosen collection. */
export async function openPerson(id) {
  place = inCollection(state.collection, "persons", id);
  const region = byId("page-error");
  await attempt(region, async () => {
    show(await call("GET", place));
    tellDone("");
    quieten(error);
    dialog.showModal();
    byId("person-title").focus();
  });
}

/** Files that were dropped or pasted while the dialog was open. */
export const receive = (files) => pictures.take(files);

function show(person) {
  shown = person;
  byId("person-title").textContent = called(person);
  byId("person-facts").textContent = `#${person.id} in ${state.collection} · since ${day(person.created)}`;
  byId("person-name").value = person.name ?? "";
  editor.write(person.metadata);
  byId("person-faces").replaceChildren(...person.faces.map(faceRow));
  byId("person-fields").disabled = !may("write");
  for (const id of ["person-save", "person-add", "person-delete"]) byId(id).hidden = !may("write");
}

function faceRow(face) {
  const remove = element("button", { type: "button", class: "quiet", "aria-label": `Delete face ${face.id}`, onclick: () => deleteFace(face.id) }, "Delete…");
  return element("li", {}, element("span", {}, `face ${face.id}`), may("write") ? remove : null);
}

async function save() {
  const [name, metadata] = [byId("person-name").value.trim(), editor.read()];
  const body = {};   // what was not touched here may have been changed elsewhere meanwhile
  if (name !== (shown.name ?? "")) body.name = name;
  if (writeJson(metadata) !== writeJson(shown.metadata)) body.metadata = metadata;
  show(await call("PATCH", place, { body }));
  tellDone("Saved.");
  tell("changed");
}

async function addFaces(files) {
  if (files.length === 0) return;
  const added = await attempt(error, async () => {
    const answer = await call("POST", `${place}/faces`, { body: { faces: await asInputs(files) } });
    show(await call("GET", place));
    tellDone(`Added ${answer.faces.map((face) => `face ${face.id}`).join(", ")}.`);
    tell("changed");
  });
  if (added) pictures.clear();
}

async function deleteFace(face) {
  const text = `Face ${face} of ${called(shown)} will no longer be found. There is no undo.`;
  const done = await confirmed("Delete this face?", text, () => call("DELETE", `${place}/faces/${face}`));
  if (!done) return;
  await attempt(error, async () => show(await call("GET", place)));
  tellDone(`Face ${face} is deleted.`);
  byId("person-title").focus();
  tell("changed");
}

async function deletePerson() {
  const text = `${called(shown)} (#${shown.id}) with ${counted(shown.faces.length, "face")} will no longer be found. There is no undo.`;
  const done = await confirmed("Delete this person?", text, () => call("DELETE", place));
  if (!done) return;
  dialog.close();
  tell("changed");
}

function tellDone(text) {
  byId("person-done").textContent = text;
}
