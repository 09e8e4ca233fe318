// The page's beginning: tabs, the token, dropped and pasted pictures, and the first questions to the service.

import * as browse from "./browse.js";
import { loadCollections, setUpCollections } from "./collections.js";
import * as compare from "./compare.js";
import { byId, runWithErrors, showError, userError } from "./dom.js";
import * as enrol from "./enrol.js";
import { chosenFiles, droppedFiles } from "./folders.js";
import { look, setUpHealth } from "./health.js";
import { setUpManage } from "./manage.js";
import { setUpMany } from "./many.js";
import * as migration from "./migration.js";
import * as person from "./person.js";
import * as search from "./search.js";
import { call, token } from "./service.js";
import { emit, isLocked, on, setLocked, state } from "./state.js";
import { setUpThumbnails } from "./thumbnail.js";
import { setUpWords } from "./words.js";

const VIEWS = { search, compare, enrol, browse, service: migration };
const tabs = [...document.querySelectorAll("[role=tab]")];
const wanted = () => location.hash.slice(1);
let current = null;

function show(name, focus = false) {
  current = Object.hasOwn(VIEWS, name) ? name : "search";
  for (const tab of tabs) {
    const chosen = tab.id === `tab-${current}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  document.title = `${byId(`tab-${current}`).textContent} · plsc`;
  if (wanted() !== current && wanted() !== "main") history.replaceState(null, "", `#${current}`);
  VIEWS[current].shown?.();
}

function setUpTabs() {
  for (const [at, tab] of tabs.entries()) {
    const go = (place) => show(tabs[(place + tabs.length) % tabs.length].id.slice(4), true);
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 };
    tab.onclick = () => show(tab.id.slice(4));
    tab.onkeydown = (event) => {
      if (event.key in moves) go(moves[event.key]);
    };
  }
  window.addEventListener("hashchange", () => wanted() !== "main" && show(wanted()));
  show(wanted());
}

/** Pictures dropped or pasted anywhere go to what is open. */
function setUpPictures() {
  const receive = (transfer) => {
    const open = byId("person").open ? person : document.querySelector("dialog[open]") ? {} : VIEWS[current];
    const someCame = (transfer?.files ?? []).length > 0;
    if (someCame && !isLocked()) droppedFiles(transfer).then((found) => open.receive?.(found));
    return someCame;
  };
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();   // the browser would leave the page and open the file
    receive(event.dataTransfer);
  });
  document.addEventListener("paste", (event) => receive(event.clipboardData) && event.preventDefault());
}

function setUpToken() {
  const form = byId("token-form");
  const ask = () => {
    form.hidden = false;
    byId("token").focus();
  };
  on("unauthorized", () => {
    setLocked(true);
    if (form.hidden) ask();
  });
  form.onsubmit = (event) => {
    event.preventDefault();
    runWithErrors(byId("token-error"), tryToken, form.querySelector("button"));
  };
  byId("token-change").onclick = ask;
  byId("token-forget").onclick = () => {
    token.forget();
    start();
  };
}

async function tryToken() {
  const written = byId("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(written)) throw userError("A token has letters, digits and punctuation, without spaces.");
  const former = token.get();
  token.set(written);
  try {
    await load();
  } catch (error) {
    if (former === null) token.forget();
    else token.set(former);
    if (state.info !== null && error.code === "unauthorized") setLocked(false);   // the former token is as good as before
    throw error;
  }
  byId("token").value = "";
  byId("token-form").hidden = true;
  byId("page-error").hidden = true;
  tabs.find((tab) => tab.tabIndex === 0).focus();
}

async function load() {
  state.info = await call("GET", "v1/info");
  setLocked(false);
  emit("info");
  await loadCollections();
}

async function start() {
  try {
    await load();
    byId("page-error").hidden = true;
  } catch (error) {
    if (error.code !== "unauthorized") showError(byId("page-error"), error);
    state.info = null;
    state.collections = [];
    state.collection = null;
    emit("info");
    emit("collection");
  }
}

for (const setUp of [setUpWords, search.setUpSearch, compare.setUpCompare, enrol.setUpEnrol, browse.setUpBrowse, person.setUpPerson,
  setUpThumbnails, setUpCollections, setUpManage, migration.setUpMigration, setUpMany, setUpTabs, setUpPictures, setUpToken]) setUp();
setUpHealth(async () => {
  await load();
  await look();
});
on("enrol", (files) => {
  show("enrol", true);
  enrol.receive(chosenFiles(files));
});
on("back", start);
start();
