// Enrolling from pictures, a name and metadata: one person here, a folder of many in many.js.

import { byId, element, isolated, runWithErrors, showError, showWarnings, userError } from "./dom.js";
import { askAboutKnown, enrolOnce } from "./known.js";
import * as many from "./many.js";
import { MetadataEditor } from "./metadata.js";
import { displayName, openPerson } from "./person.js";
import { asInputs, MOST, Pictures } from "./picture.js";
import { emit, hasRole, on, state } from "./state.js";
import { countFaces } from "./words.js";

const error = byId("enrol-error");
let pictures = null;
let editor = null;

export function setUpEnrol() {
  pictures = new Pictures(byId("enrol-pictures"), { label: "Pictures to enrol", capacity: MOST, foldersChosen });
  editor = new MetadataEditor(byId("enrol-metadata"), "enrol-metadata");
  byId("enrol-form").onsubmit = (event) => {
    event.preventDefault();
    runWithErrors(error, enrol, byId("enrol-send"));
  };
  on("info", showRights);
  on("collection", showRights);
}

export function receive(found) {
  if (many.isRunning()) return;
  many.close();
  pictures.receive(found);
}

/** A folder of pictures fills the form; a folder of folders, or one with very many pictures, is enrolled as a whole. */
function foldersChosen({ groups, leftOut }) {
  const [first] = groups;
  if (first === undefined) showError(error, userError("There is no picture in this folder."));
  else if (groups.length > 1 || first.files.length > MOST) many.offer({ groups, leftOut });
  else {
    byId("enrol-name").value ||= first.name;
    pictures.take(first.files);
  }
}

async function enrol() {
  byId("enrol-done").replaceChildren();
  showWarnings(byId("enrol-warning"));
  const { files } = pictures;
  if (files.length === 0) throw userError("Choose a picture first.");
  const body = { metadata: editor.read(), faces: await asInputs(files) };
  const name = byId("enrol-name").value.trim();
  if (name !== "") body.name = name;
  const done = await enrolOnce(state.collection, body, files, async (known) => (await askAboutKnown(known, files.length)).choice);
  tell(done);
  if (done.outcome === "known") return;
  editor.write({});
  byId("enrol-name").value = "";
  pictures.clear();
  emit("changed");
}

function tell(done) {
  const name = isolated(displayName(done));
  const open = element("button", { type: "button", class: "quiet", onclick: () => openPerson(done.id) }, "Open");
  const parts = {
    enrolled: ["Enrolled ", name, ` as #${done.id} with ${countFaces(done.faces.length)}. `],
    added: [`Added ${countFaces(done.faces.length)} to `, name, ` (#${done.id}). `],
    known: ["Nothing is enrolled. The match is ", name, ` (#${done.id}). `],
  };
  byId("enrol-done").replaceChildren(...parts[done.outcome], open);
  showWarnings(byId("enrol-warning"), done.warnings);
}

function showRights() {
  const why = state.collection === null ? "There is no collection yet; create one first."
    : hasRole("write") ? "" : `Your token may only ${hasRole("read") ? "read" : "search"}. Enrolling needs a token with the role write.`;
  byId("enrol-send").disabled = why !== "";
  byId("enrol-done").textContent = state.info === null ? "" : why;
}
