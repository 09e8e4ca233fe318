// How a person is shown in a list: initials, name, number, metadata.

import { element, isolated } from "./dom.js";
import { metadataLine } from "./metadata.js";
import { openPerson } from "./person.js";

export const called = (person) => person.name || `Person ${person.id}`;

/** The first letters of the first and the last word of a name; "#" for none. */
function initials(name) {
  const words = (name ?? "").split(/\s+/u).map((word) => /[\p{L}\p{N}]/u.exec(word)?.[0]).filter(Boolean);
  return words.length === 0 ? "#" : [...new Set([0, words.length - 1])].map((at) => words[at]).join("").toUpperCase();
}

/** The beginning of a row: initials, and the name as a button that opens the person. */
export function personHead(person, ...facts) {
  const open = element("button", { type: "button", class: "name", onclick: () => openPerson(person.id) }, isolated(called(person)));
  return [
    element("span", { class: "initials", "aria-hidden": true }, initials(person.name)),
    element("div", { class: "who" },
      element("div", { class: "line" }, open, element("span", { class: "facts" }, [`#${person.id}`, ...facts].join(" · "))),
      metadataLine(person.metadata)),
  ];
}
