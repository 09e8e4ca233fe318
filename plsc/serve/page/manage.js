// What is done with a whole collection or the whole store: its list as a file, a snapshot, deleting.

import { loadCollections } from "./collections.js";
import { byId, confirmAction, day, download, runWithErrors } from "./dom.js";
import { writeJson } from "./scalars.js";
import { call, inCollection } from "./service.js";
import { hasRole, on, state } from "./state.js";
import { countItems, words } from "./words.js";

const PAGE = 1000;   // entries asked for at once
const done = byId("manage-done");

export function setUpManage() {
  byId("manage-list").onclick = downloadList;
  byId("manage-snapshot").onclick = takeSnapshot;
  byId("manage-delete").onclick = deleteCollection;
  on("collection", showRights);
  on("info", showRights);
}

function showRights() {
  done.textContent = "";
  byId("manage-list").hidden = state.collection === null || !hasRole("read");
  byId("manage-delete").hidden = state.collection === null || !hasRole("admin");
  byId("manage-snapshot").hidden = !hasRole("admin") || state.info.collections !== null;
}

async function downloadList() {
  const name = state.collection;
  const text = `The file has the names, metadata and numbers of all ${words().many} in ${name}. It has no pictures and no embeddings: plsc gallery export writes those, from a stopped store.`;
  await confirmAction({ title: "Download the list?", text, yes: "Download", no: "Cancel" }, async () => {
    const persons = [];
    for (let after = 0; after !== null;) {
      const page = await call("GET", `${inCollection(name, "persons")}?after=${after}&limit=${PAGE}`);
      persons.push(...page.persons);
      after = page.next;
    }
    download(`${name}.json`, writeJson({ collection: name, date: new Date().toISOString(), persons }), "application/json");
    done.textContent = `The list has ${countItems(persons.length)}.`;
  });
}

async function takeSnapshot() {
  const text = `A snapshot is a copy of the whole store, with all collections. Whatever is deleted later stays in it until the snapshot is deleted.`;
  await confirmAction({ title: "Take a snapshot?", text, yes: "Take a snapshot", no: "Cancel" }, async () => {
    const { id, created, bytes } = await call("POST", "v1/snapshots");
    done.textContent = `Snapshot ${id} of ${day(created)} has ${(bytes / 2 ** 20).toFixed(1)} MiB.`;
  });
}

async function deleteCollection() {
  const name = state.collection;
  const { persons } = state.collections.find((one) => one.name === name);
  const text = `${name} with ${countItems(persons)} will be deleted from the store. This cannot be undone. Snapshots that were taken before still hold it.`;
  const deleted = await confirmAction(
    { title: "Delete the collection?", text, yes: "Delete permanently", no: "Keep", name },
    () => call("DELETE", inCollection(name)),
  );
  if (!deleted) return;
  await runWithErrors(byId("service-error"), loadCollections);
  done.textContent = `${name} is deleted.`;
  byId("collection").focus();
}
