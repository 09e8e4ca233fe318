// Enrolling a new person from pictures, a name and metadata.

import { byId, element, isolated, pluralize, runWithErrors, showWarnings, userError } from "./dom.js";
import { MetadataEditor } from "./metadata.js";
import { displayName, openPerson } from "./person.js";
import { asInputs, faceFiles, Pictures } from "./picture.js";
import { call, inCollection } from "./service.js";
import { emit, hasRole, on, state } from "./state.js";

const MOST = 32;   // pictures in one request
let pictures = null;
let editor = null;

export function setUpEnrol() {
  pictures = new Pictures(byId("enrol-pictures"), { label: "Pictures of the person", capacity: MOST });
  editor = new MetadataEditor(byId("enrol-metadata"), "enrol-metadata");
  byId("enrol-form").onsubmit = (event) => {
    event.preventDefault();
    runWithErrors(byId("enrol-error"), enrol, byId("enrol-send"));
  };
  on("info", showRights);
  on("collection", showRights);
}

export const receive = (files) => pictures.take(files);

async function enrol() {
  byId("enrol-done").replaceChildren();
  showWarnings(byId("enrol-warning"));
  if (pictures.files.length === 0) throw userError("Choose a picture first.");
  const body = { metadata: editor.read(), faces: await asInputs(pictures.files) };
  const name = byId("enrol-name").value.trim();
  if (name !== "") body.name = name;
  const person = await call("POST", inCollection(state.collection, "persons"), { body, files: faceFiles(pictures.files) });
  showWarnings(byId("enrol-warning"), person.warnings);
  editor.write({});
  byId("enrol-name").value = "";
  pictures.clear();
  const open = element("button", { type: "button", class: "quiet", onclick: () => openPerson(person.id) }, "Open");
  byId("enrol-done").append("Enrolled ", isolated(displayName(person)), ` as #${person.id} with ${pluralize(person.faces.length, "face")}. `, open);
  emit("changed");
}

function showRights() {
  const why = state.collection === null ? "There is no collection yet; create one first."
    : hasRole("write") ? "" : `Your token may only ${hasRole("read") ? "read" : "search"}. Enrolling needs a token with the role write.`;
  byId("enrol-send").disabled = why !== "";
  byId("enrol-done").textContent = state.info === null ? "" : why;
}
