// The collections: which there are, which is chosen, a new one.

import { byId, element, runWithErrors } from "./dom.js";
import { call } from "./service.js";
import { emit, hasRole, on, state } from "./state.js";

const KEY = "plsc-collection";
const select = byId("collection");

export function setUpCollections() {
  select.onchange = () => choose(select.value);
  byId("new-collection").onclick = () => {
    byId("making-error").hidden = true;
    byId("making-name").value = "";   // not the name that was refused before
    byId("making").showModal();
  };
  byId("making-cancel").onclick = () => byId("making").close();
  byId("making-form").onsubmit = (event) => {
    event.preventDefault();
    runWithErrors(byId("making-error"), make, byId("making-form").querySelector("[type=submit]"));
  };
  on("collection", show);
  on("changed", () => runWithErrors(byId("page-error"), list));
}

/** Ask which collections there are, and keep or make a choice. */
export async function loadCollections() {
  await list();
  const names = state.collections.map((one) => one.name);
  const former = state.collection ?? sessionStorage.getItem(KEY);
  choose(names.includes(former) ? former : names[0] ?? null);
}

async function list() {
  state.collections = (await call("GET", "v1/collections")).collections;
  show();
  emit("collections");
}

async function make() {
  const name = byId("making-name").value.trim();
  await call("POST", "v1/collections", { body: { name } });
  await list();
  choose(name);
  byId("making").close();
}

function choose(name) {
  state.collection = name;
  if (name !== null) sessionStorage.setItem(KEY, name);
  emit("collection");
}

function show() {
  const options = state.collections.map(({ name }) => element("option", { value: name, selected: name === state.collection }, name));
  select.replaceChildren(...(options.length ? options : [element("option", { value: "" }, state.info === null ? "–" : "none yet")]));
  select.disabled = options.length === 0;
  byId("new-collection").hidden = !hasRole("write") || state.info?.collections !== null;
}
