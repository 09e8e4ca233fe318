// Enrolling a folder of folders: one person for each, a few at a time, with a report at the end.

import { byId, clearError, day, download, element, isolated, pluralize, showError } from "./dom.js";
import { askAboutKnown, enrolOnce } from "./known.js";
import { asInput, faceFiles, fileName, MOST } from "./picture.js";
import { callPatiently, inCollection } from "./service.js";
import { emit, state } from "./state.js";
import { countItems, words } from "./words.js";

const AT_ONCE = 3;      // people under way
const SHARE = 0.9;      // of a request's bytes for pictures
const HOPELESS = ["gone", "unauthorized", "forbidden", "quota_exceeded"];   // what no later request would escape
const OUTCOMES = { enrolled: "enrolled", added: "added to a match", known: "known already, not added", "left out": "left out", "not tried": "not tried" };

let work = null;   // {collection, groups, leftOut, results, stopped, asking, standing} of the folder that is shown

export function setUpMany() {
  byId("many-start").onclick = run;
  byId("many-stop").onclick = () => {
    work.stopped = true;   // what is under way ends
    byId("many-stop").disabled = true;
  };
  byId("many-close").onclick = close;
  byId("many-text").onclick = () => download("enrolment.txt", reportText(), "text/plain");
  byId("many-json").onclick = () => download("enrolment.json", JSON.stringify(report(), null, 2), "application/json");
}

export const isRunning = () => work !== null && !byId("many-stop").hidden;

/** Show what a folder holds and offer to enrol it. */
export function offer({ groups, leftOut }) {
  work = { collection: null, groups, leftOut, results: [], stopped: false, asking: Promise.resolve(), standing: null };
  const pictures = groups.reduce((sum, group) => sum + group.files.length, 0);
  const others = leftOut.length === 0 ? "" : ` ${pluralize(leftOut.length, "file")} will be left out: ${leftOut[0].name} (${leftOut[0].why})${leftOut.length > 1 ? ", …" : "."}`;
  byId("many-title").textContent = `${countItems(groups.length)} with ${pluralize(pictures, "picture")}`;
  byId("many-plan").textContent = `Each folder is one ${words().one}, with the folder's name: ${groups.slice(0, 3).map(({ name }) => name).join(", ")}${groups.length > 3 ? ", …" : "."}${others}`;
  byId("many-start").textContent = `Enrol ${countItems(groups.length)}`;
  byId("many-stop").disabled = false;
  byId("many-start").disabled = byId("enrol-send").disabled;
  byId("many-summary").textContent = "";
  byId("many-report").replaceChildren();
  clearError(byId("many-error"));
  show("offered");
  byId("many-title").focus();
}

function show(stage) {
  const shownIn = { "many-start": ["offered"], "many-stop": ["running"], "many-text": ["done"], "many-json": ["done"], "many-close": ["offered", "done"], "many-progress": ["running"] };
  for (const [id, stages] of Object.entries(shownIn)) byId(id).hidden = !stages.includes(stage);
  byId("many-close").textContent = stage === "done" ? "Done" : "Cancel";
  byId("many").hidden = stage === "closed";
  byId("enrol-form").hidden = stage !== "closed";
}

/** Back to the form for one. */
export function close() {
  work = null;
  show("closed");
  byId("enrol-pictures").querySelector(".choose").focus();
}

async function run() {
  Object.assign(work, { collection: state.collection });
  window.onbeforeunload = (event) => event.preventDefault();
  show("running");
  byId("many-stop").focus();
  byId("many-progress").max = work.groups.length;
  const waiting = [...work.groups];
  const takeTurns = async () => {
    while (waiting.length > 0 && !work.stopped) await enrolGroup(waiting.shift());
  };
  tell();
  await Promise.all(Array.from({ length: AT_ONCE }, takeTurns));
  for (const { name, files } of waiting) work.results.push(newResult(name, files, "not tried"));
  window.onbeforeunload = null;
  show("done");
  tell();
  byId("many-report").replaceChildren(...work.results.filter(isRemarkable).map(reportRow));
  byId("many-title").focus();
  emit("changed");
}

const newResult = (name, files, outcome) => ({ name, outcome, id: null, pictures: 0, of: files.length, why: "", left_out: [], warnings: [] });

/** Enrol one folder, in several requests where it is large; what went wrong stands in its result. */
async function enrolGroup({ name, files }) {
  const result = newResult(name, files, "left out");
  try {
    for await (const batch of batches(files)) {
      await sendBatch(result, batch);
      if (result.outcome === "known") break;
    }
  } catch (error) {
    result.why = error.message;
    if (HOPELESS.includes(error.code) && !work.stopped) {
      work.stopped = true;
      showError(byId("many-error"), error);
    }
  }
  work.results.push(result);
  tell();
}

/** The files with their inputs, as many together as one request may hold. */
async function* batches(files) {
  const room = SHARE * (state.info?.limits.body_bytes ?? 0);
  let [batch, size] = [[], 0];
  for (const file of files) {
    const input = { ...await asInput(file), ...(state.info?.detector ? { face: "largest" } : {}) };   // a warning tells of others
    if (batch.length > 0 && (batch.length === MOST || size + input.image.length > room)) {
      yield batch;
      [batch, size] = [[], 0];
    }
    batch.push({ file, input });
    size += input.image.length;
  }
  yield batch;
}

/** Send pictures; those that the service refuses by name are left out, and the others sent again. */
async function sendBatch(result, batch) {
  while (batch.length > 0) {
    const faces = batch.map(({ input }) => input);
    const files = batch.map(({ file }) => file);
    try {
      const answer = await (result.id === null
        ? enrolOnce(work.collection, { name: result.name, faces }, files, (known) => decide(known, result.name, files.length))
        : callPatiently("POST", inCollection(work.collection, "persons", result.id, "faces"), { body: { faces }, files: faceFiles(files) }));
      Object.assign(result, { id: answer.id ?? result.id, outcome: answer.outcome ?? result.outcome });
      if (answer.outcome === "known") result.why = `matches ${answer.name ?? words().one} (#${answer.id})`;
      else result.pictures += faces.length;
      result.warnings.push(...answer.warnings ?? []);
      return;
    } catch (error) {
      if (!error.file) throw error;
      result.left_out.push({ file: fileName(error.file), why: error.message });
      batch = batch.filter(({ file }) => file !== error.file);
    }
  }
}

/** What to do about a folder whose pictures match somebody: one question at a time, and none after "for all". */
function decide(known, name, pictures) {
  work.asking = work.asking.then(async () => {
    if (work.standing !== null) return work.standing;
    const { choice, forAll } = await askAboutKnown(known, pictures, { of: ` of ${name}`, offerAll: true });
    if (forAll) work.standing = choice;
    return choice;
  });
  return work.asking;
}

function counts() {
  const found = Object.fromEntries(Object.keys(OUTCOMES).map((outcome) => [outcome, 0]));
  for (const { outcome } of work.results) found[outcome] += 1;
  return found;
}

function tell() {
  byId("many-progress").value = work.results.length;
  const parts = Object.entries(counts()).filter(([, count]) => count > 0).map(([outcome, count]) => `${count} ${OUTCOMES[outcome]}`);
  byId("many-summary").textContent = `${work.results.length} of ${countItems(work.groups.length)}: ${parts.join(", ") || "…"}.`;
}

const isRemarkable = (result) => result.outcome !== "enrolled" || result.why !== "" || result.left_out.length > 0 || result.warnings.length > 0;

const remarks = ({ why, left_out: leftOut, warnings }) => [why, ...leftOut.map((one) => `${one.why}; left out`), ...warnings].filter(Boolean);

const reportRow = (result) => element("li", {}, isolated(result.name, { class: "key" }), ` ${OUTCOMES[result.outcome]}. `, ...remarks(result).map((text) => element("span", { class: "why" }, `${text}.`)));

const report = () => ({ collection: work.collection, date: new Date().toISOString(), counts: counts(), results: work.results, files_left_out: work.leftOut });

function reportText() {
  const lines = work.results.map((result) => [result.name, OUTCOMES[result.outcome], result.id === null ? "" : `#${result.id}`,
    `${result.pictures} of ${pluralize(result.of, "picture")}`, ...remarks(result)].join("\t"));
  const files = work.leftOut.map(({ name, why }) => `${name}\tleft out: ${why}`);
  return `${[`${byId("many-summary").textContent} Collection ${work.collection}, ${day(new Date().toISOString())}.`, ...lines, ...files].join("\n")}\n`;
}
