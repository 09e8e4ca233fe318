// Enrolling with a look at who is enrolled already: two entries for one person are both found, and deleted apart.

import { byId } from "./dom.js";
import { withChosenFaces } from "./faces.js";
import { faceFiles } from "./picture.js";
import { callPatiently, inCollection } from "./service.js";
import { formatScore } from "./threshold.js";
import { capital, words } from "./words.js";

const CHOICES = ["add", "enrol", "neither"];

/**
 * Enrol in `collection`; where somebody there matches, `decide(known)` resolves to "add", "enrol" or "neither".
 * Resolves to {outcome, id, name, faces, warnings}, with the outcome "enrolled", "added" or "known".
 */
export async function enrolOnce(collection, body, files, decide) {
  const path = inCollection(collection, "persons");
  const send = (to, what) => withChosenFaces(what.faces, files, () => callPatiently("POST", to, { body: what, files: faceFiles(files) }));
  try {
    return { outcome: "enrolled", ...await send(`${path}?on_known=refuse`, body) };
  } catch (error) {
    if (!error.known) throw error;
    const choice = await decide(error.known);
    if (choice === "enrol") return { outcome: "enrolled", ...await send(`${path}?on_known=enrol`, body) };
    if (choice === "neither") return { outcome: "known", faces: [], ...error.known };
    return { outcome: "added", ...error.known, ...await send(`${path}/${error.known.id}/faces`, { faces: body.faces }) };
  }
}

/** Ask what to do; resolves to {choice, forAll}. Closing the dialog is "neither". `of` names whose pictures they are. */
export function askAboutKnown(known, pictures, { of = "", offerAll = false } = {}) {
  const dialog = byId("known");
  const it = pictures === 1 ? "it" : "them";
  const name = known.name ?? `${capital(words().one)} ${known.id}`;
  byId("known-text").textContent = `${pictures === 1 ? "This picture" : "One of these pictures"}${of} matches ${name} (#${known.id}) at ${formatScore(known.score)}. Add ${it} there, or enrol anyway?`;
  byId("known-add").textContent = `Add to ${name}`;
  byId("known-rest").hidden = !offerAll;
  byId("known-all").checked = false;
  dialog.showModal();
  return new Promise((resolve) => {
    let choice = "neither";
    for (const one of CHOICES) {
      byId(`known-${one}`).onclick = () => {
        choice = one;
        dialog.close();
      };
    }
    dialog.onclose = () => {
      if (!dialog.open) resolve({ choice, forAll: byId("known-all").checked });   // the event comes late
    };
  });
}
