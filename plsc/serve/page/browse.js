// Looking through a collection, page by page, by metadata (the service filters) and by name (this page does).

import { arrowKeyNav, byId, day, element, runWithErrors, showWarnings } from "./dom.js";
import { personHead } from "./person.js";
import { readFilter, writeJson } from "./scalars.js";
import { call, inCollection } from "./service.js";
import { hasRole, on, state } from "./state.js";
import { capital, countFaces, countItems, words } from "./words.js";

const PAGE = 25;      // persons shown at once
const BATCH = 100;    // persons asked for at once while a name is looked for
const ROUNDS = 20;    // batches before it asks whether to look on

const error = byId("browse-error");
const warning = byId("browse-warning");
const list = byId("persons");
let asked = { name: "", filter: null };
let starts = [0];     // where each page so far began; the last is the one shown
let next = null;
let running = null;
let fresh = false;    // whether what is shown is of this collection as it is now

export function setUpBrowse() {
  arrowKeyNav(list, "button.name");
  byId("browse-form").onsubmit = (event) => {
    event.preventDefault();
    starts = [0];
    load();
  };
  byId("browse-next").onclick = () => turn([...starts, next], "browse-next");
  byId("browse-back").onclick = () => turn(starts.slice(0, -1), "browse-back");
  on("collection", () => { starts = [0]; renew(); });
  on("changed", renew);
}

export function shown() {
  if (!fresh) load();
}

function renew() {
  fresh = false;
  if (!byId("view-browse").hidden) load();
}

async function turn(there, button) {
  starts = there;
  await load();
  const pressed = byId(button);
  (pressed.disabled ? list.querySelector("button.name") ?? byId("browse-form").elements[0] : pressed).focus();
}

async function load() {
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  byId("browse-title").textContent = capital(words().many) + (state.collection === null ? "" : ` in ${state.collection}`);
  if (state.collection === null) return empty("There is no collection yet; create one first.");
  if (!hasRole("read")) return empty("Your token may only search. Browsing needs a token with the role read.");
  list.setAttribute("aria-busy", "true");
  let found = null;
  await runWithErrors(error, async () => {
    asked = { name: folded(byId("browse-name").value.trim()), filter: readFilter(byId("browse-filter").value) };
    found = await collect(starts.at(-1), signal);
  });
  if (signal.aborted) return undefined;
  list.removeAttribute("aria-busy");
  if (found === null) return empty("");
  fresh = true;
  return show(found);
}

/** A page of persons above `after` that fit: {persons, next, looked}; `looked` persons were gone through. */
async function collect(after, signal) {
  const persons = [];
  let looked = 0;
  showWarnings(warning);
  for (let round = 0; round < ROUNDS; round += 1) {
    const answer = await call("GET", `${inCollection(state.collection, "persons")}?${query(after)}`, { signal });
    showWarnings(warning, answer.warnings);
    const fitting = answer.persons.filter((person) => folded(person.name ?? "").includes(asked.name));
    looked += answer.persons.length;
    persons.push(...fitting);
    if (persons.length > PAGE) return { persons: persons.slice(0, PAGE), next: persons[PAGE - 1].id, looked };
    if (answer.next === null) return { persons, next: null, looked };
    if (persons.length === PAGE) return { persons, next: answer.next, looked };
    after = answer.next;
    byId("browse-summary").textContent = asked.name === "" ? "" : `checked ${countItems(looked)}…`;
  }
  return { persons, next: after, looked };
}

function query(after) {
  const asking = new URLSearchParams({ after, limit: asked.name === "" ? PAGE : BATCH });
  if (asked.filter !== null) asking.set("filter", writeJson(asked.filter));
  return asking;
}

function show(found) {
  next = found.next;
  list.replaceChildren(...found.persons.map(row));
  byId("browse-summary").textContent = summaryText(found);
  byId("browse-back").disabled = starts.length === 1;
  byId("browse-next").disabled = next === null;
}

function empty(why) {
  next = null;
  fresh = false;
  list.removeAttribute("aria-busy");
  list.replaceChildren();
  byId("browse-summary").textContent = why;
  byId("browse-back").disabled = starts.length === 1;
  byId("browse-next").disabled = true;
}

function summaryText({ persons, looked }) {
  const page = starts.length > 1 ? `Page ${starts.length}: ` : "";
  if (asked.name !== "") return `${page}${persons.length.toLocaleString("en")} of the ${countItems(looked)} checked.`;
  if (persons.length === 0) return asked.filter === null ? `No ${words().many} are enrolled here yet.` : `No ${words().many} here match the filter.`;
  const all = state.collections.find((one) => one.name === state.collection)?.persons;
  const whole = asked.filter === null && all !== undefined ? ` of ${all.toLocaleString("en")}` : "";
  const first = (starts.length - 1) * PAGE;
  return `${(first + 1).toLocaleString("en")} to ${(first + persons.length).toLocaleString("en")}${whole}.`;
}

const row = (person) => element("li", {}, ...personHead(person, person.faces[0]?.id, countFaces(person.faces.length), `since ${day(person.created)}`));

/** Letters without case and accents. */
const folded = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
