// Thumbnails of enrolled faces, where the service keeps them. They are fetched, for an <img> would send no token.

import { byId, element } from "./dom.js";
import { callForPicture, inCollection } from "./service.js";
import { displayName } from "./person.js";
import { on, state } from "./state.js";
import { words } from "./words.js";

const MOST = 500;          // pictures held at once
const held = new Map();    // path -> a promise of an object URL, or of null where the service has none

export function setUpThumbnails() {
  on("collection", forget);
  on("info", forget);
  byId("larger-close").onclick = () => byId("larger").close();
}

/** What stands for a person in a list: the thumbnail of `face` once it has come, until then and else `initials`. */
export function portrait(person, face, initials) {
  const fallback = element("span", { class: "initials", "aria-hidden": true }, initials);
  if (state.info?.thumbnails && face !== undefined) show(fallback, person, face);
  return fallback;
}

/** The thumbnail of one of a person's faces, an empty place where there is none. */
export function faceThumbnail(person, face) {
  const place = element("span", { class: "thumbnail", hidden: true });
  if (state.info?.thumbnails) show(place, person, face);
  return place;
}

async function show(place, person, face) {
  const url = await find(inCollection(state.collection, "persons", person.id, "faces", face, "thumbnail"));
  if (url === null) return;
  const title = `${displayName(person)}, ${words().face} ${face}`;
  place.replaceWith(element("button", { type: "button", class: "larger", "aria-label": `Show larger: ${title}`, onclick: () => enlarge(url, title) },
    element("img", { class: "thumbnail", src: url, alt: "" })));
}

function enlarge(url, title) {
  byId("larger-title").textContent = title;
  byId("larger-image").replaceChildren(element("img", { src: url, alt: title }));
  byId("larger").showModal();
}

function find(path) {
  if (!held.has(path)) {
    if (held.size >= MOST) forget();
    held.set(path, callForPicture(path));
  }
  return held.get(path);
}

function forget() {
  for (const coming of held.values()) coming.then((url) => url !== null && URL.revokeObjectURL(url));
  held.clear();
}
