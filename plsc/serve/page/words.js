// What the collections hold, as `plsc serve --items` names it: people with faces, or anything else with pictures.

import { pluralize } from "./dom.js";
import { on, state } from "./state.js";

const PEOPLE = { one: "person", many: "people", face: "face", faces: "faces", strangers: "strangers", question: "Who is this?" };

export const holdsPeople = () => (state.info?.items ?? PEOPLE.many) === PEOPLE.many;

/** The words of this service; until it has answered, those of people. */
export function words() {
  if (holdsPeople()) return PEOPLE;
  const { item: one, items: many } = state.info;
  return { one, many, face: "picture", faces: "pictures", strangers: `unknown ${many}`, question: `Which ${one} is this?` };
}

export const countItems = (count) => pluralize(count, words().one, words().many);
export const countFaces = (count) => pluralize(count, words().face);
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** Fill the elements marked data-word="many", or "Many" for a capital letter. */
export function setUpWords() {
  on("info", () => {
    for (const place of document.querySelectorAll("[data-word]")) {
      const { word } = place.dataset;
      const found = words()[word.toLowerCase()];
      place.textContent = word === word.toLowerCase() ? found : capital(found);
    }
  });
}
