// Moving the chosen collection to the service's next model: how far it is, who is missing, what it costs, and its steps.

import { byId, confirmAction, day, element, isolated, pluralize, runWithErrors, showWarnings } from "./dom.js";
import { displayName, openPerson } from "./person.js";
import { asInputs, faceFiles } from "./picture.js";
import { formatRate, rocFigure } from "./roc.js";
import { call } from "./service.js";
import { emit, hasRole, isLocked, on, state } from "./state.js";
import { formatScore } from "./threshold.js";
import { countFaces, countItems, words } from "./words.js";

const [SOON, LATE] = [1500, 12_000];   // milliseconds between looks: while it fills, and once nothing more comes
const MISSING = 100;                   // shown of who is missing
const LABELS = { old: "Old model", new: "New model", estimated: "Estimates" };

const error = byId("migration-error");
const done = byId("migration-done");
const list = byId("migration-missing-list");
const loss = byId("migration-max-loss");
const threshold = byId("migration-threshold");
let migration;           // of the chosen collection; null while it is not being moved, undefined until that is known
let missing = null;      // {persons, next}
let looked = null;       // the collection that both are of
let looks = 0;           // so far: the answer to an earlier one than the last comes too late
let timer = null;
let wait = SOON;
let judged = "";         // the judgement that is drawn, as JSON

/**
 * The steps by their buttons: in which phase they are `offered`, whether they make sense `now`, what they do (`told`),
 * what to `ask` before, the `body` of the request, and the lines while it is `doing` and when it is `done`.
 */
const STEPS = {
  begin: {
    label: "Begin the move", offered: () => migration === null && mayBegin(), now: () => true,
    told: () => `Pictures that are enrolled get vectors of both models from then on, and pictures that were kept are embedded again. Searches answer as before.`,
    body: (collection) => ({ collection }), done: (answer) => `The move has begun. It takes up to ${(answer.needed_bytes / 2 ** 20).toFixed(1)} MiB of disk.`,
  },
  pause: {
    label: "Pause", offered: () => isBefore() && !migration.is_paused, now: () => migration.lacking > 0,
    told: () => "Embeds no kept pictures for the moment. It takes a quarter of the service's time.",
    done: () => "Paused. Pictures that are enrolled get vectors of both models all the same.",
  },
  resume: {
    label: "Resume", offered: () => isBefore() && migration.is_paused, now: () => true,
    told: () => "Goes on embedding kept pictures.", done: () => "It goes on.",
  },
  estimate: {
    label: "Estimate", offered: () => isBefore() || migration?.lacking > 0, now: () => migration.lacking + migration.estimated > 0,
    told: () => `Gives ${words().faces} without a vector of the new model an estimate, learned from those that have both: 50 at the least, of ten ${words().many}. It is worse than a picture, and gives way to one. Estimates that are there are renewed.`,
    doing: "Estimating…", done: (answer) => `${countFaces(answer.estimated)} with an estimate.`,
  },
  judge: {
    label: "Judge", offered: () => isBefore(), now: () => migration.lacking < migration.faces,
    told: () => `Measures what the move costs on ${words().many} of this collection, and finds the threshold with the same false-match rate. It takes ten ${words().many} with two ${words().faces}.`,
    doing: "Judging…", done: (answer) => `Judged by ${countItems(answer.judgement.persons)}.`,
  },
  "cut-over": {
    label: "Cut over…", offered: () => isBefore(), now: () => migration.lacking === 0 && loss.validity.valid && loss.value !== "" && threshold.validity.valid,
    told: () => `Judges once more; then searches read the new model's vectors. It needs one for every ${words().face}. There is a way back.`,
    ask: (collection) => ({ title: "Cut over?", text: cutOverText(collection), yes: "Cut over", no: "Not yet" }),
    body: () => ({ max_loss: Number(loss.value), threshold: threshold.value === "" ? null : Number(threshold.value) }), done: () => "Searches read the new model's vectors now.",
  },
  cancel: {
    label: "Cancel the move…", offered: () => isBefore(), now: () => true,
    told: () => "Deletes the new model's vectors. Searches answer as before.",
    ask: (collection) => ({ title: "Cancel the move?", text: `The new model's vectors of ${collection} will be deleted, and the old ones stay.`, yes: "Delete the new vectors", no: "Go on" }),
    done: () => "The move is cancelled.",
  },
  "roll-back": {
    label: "Roll back", offered: () => migration?.is_cut_over === true, now: () => migration.lacking === 0,
    told: () => `Searches read the old model's vectors again, with all that was enrolled and deleted since.`,
    done: () => "Searches read the old model's vectors again.",
  },
  finish: {
    label: "Finish…", offered: () => migration?.is_cut_over === true, now: () => true,
    told: () => "Deletes the old model's vectors. There is no way back then.",
    ask: (name) => ({ title: "Finish the move?", text: `The old model's vectors of ${name} will be deleted. This cannot be undone. Snapshots that were taken before still hold them.`, yes: "Delete permanently", no: "Keep both", name }),
    done: finishedText,
  },
};

export function setUpMigration() {
  byId("migration-steps").replaceChildren(...Object.keys(STEPS).map(stepRow));
  loss.oninput = threshold.oninput = showSteps;
  document.addEventListener("visibilitychange", shown);
  on("info", show);
  on("collections", show);
  on("collection", () => {
    done.textContent = "";
    error.hidden = true;
    shown();
  });
  on("changed", (by) => by !== "migration" && shown());
}

/** Look now, if somebody can see it. */
export function shown() {
  wait = SOON;
  return look();
}

async function look() {
  clearTimeout(timer);
  looks += 1;
  const [name, turn] = [state.collection, looks];
  if (looked !== name) [looked, migration, missing] = [name, undefined, null];
  if (!isWatched() || name === null || !hasRole("admin")) return show();
  const before = migration?.lacking;
  await runWithErrors(byId("migration-lost"), async () => {
    const found = await ask(name);
    const without = found !== null && found.lacking + found.estimated > 0
      ? await call("GET", `${pathOf(name)}/missing?limit=${MISSING}`) : null;
    if (turn === looks) [migration, missing] = [found, without];
  });
  if (turn !== looks) return undefined;
  wait = migration?.lacking === before ? Math.min(2 * wait, LATE) : SOON;
  if (fills()) timer = setTimeout(look, wait);
  return show();
}

/** The migration of a collection, null where there is none; the list answers for those too without an error. */
async function ask(name) {
  if (!migration) return (await call("GET", "v1/migrations")).migrations.find((one) => one.collection === name) ?? null;
  try {
    return await call("GET", pathOf(name));
  } catch (trouble) {
    if (trouble.code === "not_found") return null;   // it was finished or cancelled elsewhere
    throw trouble;
  }
}

const pathOf = (name) => `v1/migrations/${encodeURIComponent(name)}`;
const isWatched = () => !byId("view-service").hidden && !document.hidden && !isLocked();
const isBefore = () => migration?.is_cut_over === false;
const fills = () => isBefore() && !migration.is_paused && migration.lacking > 0;
const contract = () => state.collections.find((one) => one.name === state.collection)?.contract_id;
const isThere = () => migration === null && contract() === state.info?.next_model;
const mayBegin = () => !isThere() && state.info?.collections === null;

function stepRow(name) {
  const { label, ask: question } = STEPS[name];
  const button = element("button", { type: "button", class: question && name !== "cut-over" ? "danger" : "plain", id: `migration-${name}`, "aria-describedby": `migration-${name}-told`, onclick: () => take(name, button) }, label);
  const told = element("p", { class: "hint", id: `migration-${name}-told` });
  return element("li", {}, button, element("div", {}, told, name === "cut-over" ? byId("migration-loss-field") : null));
}

async function take(name, button) {
  const [collection, step] = [state.collection, STEPS[name]];
  done.textContent = step.doing ?? "";
  let answer = null;
  const act = async () => {
    const path = name === "begin" ? "v1/migrations" : `${pathOf(collection)}/${name}`;
    answer = await call("POST", path, { body: step.body?.(collection) ?? null });
  };
  const question = step.ask?.(collection);
  if (!await (question ? confirmAction(question, act) : runWithErrors(error, act, button))) {
    done.textContent = "";
    return;
  }
  if (state.collection !== collection) return;   // another was chosen meanwhile
  error.hidden = true;   // of an earlier step
  await shown();
  done.textContent = step.done(answer);
  emit("changed", "migration");
  if (button.disabled || button.closest("li").hidden) byId("migration-title").focus();
}

function cutOverText(collection) {
  const found = migration.judgement;
  const last = found === null ? "It was not judged yet." : `When it was judged last: ${lossText(found)}, and a threshold of ${formatScore(found.threshold)} in the place of ${formatScore(found.old_threshold)}.`;
  const next = threshold.value === "" ? "which finds the threshold" : `with the threshold ${threshold.value}`;
  return `The move of ${collection} is judged anew, ${next}, and refused beyond a loss of ${loss.value}; then searches read the new model's vectors. ${last} Until the move is finished, you can roll back.`;
}

function finishedText({ collection, contract_id: id, thresholds, snapshots }) {
  const threshold = thresholds[id] === undefined ? "" : ` and --threshold ${Number(thresholds[id].toFixed(4))}`;
  const kept = snapshots === 0 ? "" : ` The old model's vectors may be in ${pluralize(snapshots, "snapshot")} still.`;
  return `${collection} is moved. Start the service with the new model${threshold} next time.${kept}`;
}

function show() {
  const isShown = hasRole("admin") && state.collection !== null && (Boolean(migration) || state.info.next_model !== null);
  byId("migration").hidden = !isShown;
  if (!isShown) return;
  byId("migration-state").hidden = !migration;
  byId("migration-there").textContent = isThere() ? `${state.collection} is of the next model already.` : "";
  if (migration) showProgress();
  showSteps();
  showMissing();
  showJudgement();
}

function showProgress() {
  const { faces, lacking, estimated, is_cut_over: isOver, is_paused: isPaused } = migration;
  const own = faces - lacking - estimated;
  const bar = byId("migration-bar");
  bar.style.setProperty("--own", own / Math.max(faces, 1));
  bar.style.setProperty("--guessed", estimated / Math.max(faces, 1));
  bar.setAttribute("aria-valuemax", Math.max(faces, 1));
  bar.setAttribute("aria-valuenow", faces === 0 ? 1 : own + estimated);
  const parts = [`${own.toLocaleString("en")} of ${countFaces(faces)} with a vector of the ${isOver ? "old" : "new"} model`];
  if (estimated > 0) parts.push(`${estimated.toLocaleString("en")} with an estimate`);
  if (lacking > 0) parts.push(`${lacking.toLocaleString("en")} without${isPaused && !isOver ? " (paused)" : ""}`);
  byId("migration-count").textContent = `${parts.join(", ")}.`;
  const ids = [migration.contract_id, migration.second_contract_id];
  const figures = { "Searched": isOver ? "the new model" : "the old model", "Begun": day(migration.began), "Old model": ids[isOver ? 1 : 0], "New model": ids[isOver ? 0 : 1] };
  byId("migration-figures").replaceChildren(...Object.entries(figures).map(
    ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, isolated(value)))));
}

function showSteps() {
  for (const [name, step] of Object.entries(STEPS)) {
    const button = byId(`migration-${name}`);
    const isOffered = step.offered();
    button.closest("li").hidden = !isOffered;
    button.disabled = !isOffered || !step.now();
    byId(`migration-${name}-told`).textContent = step.told();
  }
}

function showMissing() {
  byId("migration-missing").hidden = missing === null || missing.persons.length === 0;
  const { persons, next } = missing ?? { persons: [], next: null };
  byId("migration-missing-title").textContent = next === null ? `Missing: ${countItems(persons.length)}` : `Missing: the first ${countItems(persons.length)}`;
  if (migration) byId("migration-missing-hint").textContent = missingText();
  const rows = JSON.stringify(persons);
  if (list.dataset.rows === rows) return;   // drawn anew, it would lose the focus
  const focused = list.contains(document.activeElement) ? document.activeElement.id : null;
  list.dataset.rows = rows;
  list.replaceChildren(...persons.map(missingRow));
  if (focused !== null) (byId(focused) ?? byId("migration-title")).focus();
}

function missingText() {
  const count = countFaces(migration.lacking + migration.estimated);
  if (migration.is_cut_over) return `${count} without a vector of their own by the old model.`;
  return `${count} without a vector of their own by the new model. Kept pictures are embedded by themselves; send those of others again, or estimate.`;
}

function missingRow(person) {
  const facts = [`#${person.id}`, ...(person.external_id === null ? [] : [person.external_id]), countFaces(person.faces.length)];
  const open = element("button", { type: "button", class: "name", id: `missing-${person.id}`, onclick: () => openPerson(person.id) }, isolated(displayName(person)));
  const input = element("input", { type: "file", hidden: true, multiple: true, accept: "image/*", onchange: () => sendAgain(person, input, send) });
  const send = element("button", { type: "button", class: "quiet", id: `send-${person.id}`, "aria-label": `Send pictures of ${displayName(person)}`, onclick: () => input.click() }, "Send pictures…");
  return element("li", {}, open, element("span", { class: "facts" }, isolated(facts.join(" · "))), send, input);
}

/** Send pictures of a person again: which face each of them is of, the service knows by the model that is searched. */
async function sendAgain(person, input, button) {
  const [collection, files] = [state.collection, [...input.files]];
  input.value = "";   // the same may be chosen again
  done.textContent = "";
  let answer = null;
  const isSent = files.length > 0 && await runWithErrors(error, async () => {
    const body = { faces: await asInputs(files) };
    answer = await call("POST", `${pathOf(collection)}/persons/${person.id}/pictures`, { body, files: faceFiles(files) });
  }, button);
  if (!isSent || state.collection !== collection) return;
  await shown();
  done.textContent = `${countFaces(answer.faces.length)} of ${displayName(person)} with a vector of the picture.`;
  (byId(button.id) ?? byId("migration-title")).focus();
}

function showJudgement() {
  const found = migration?.judgement ?? null;
  byId("migration-report").hidden = found === null;
  const written = JSON.stringify(found);
  if (found === null || judged === written) return;
  judged = written;
  const names = Object.keys(found.spaces);
  byId("migration-loss").textContent = `${lossText(found)}, by ${found.genuine_pairs.toLocaleString("en")} pairs of the same and ${found.impostor_pairs.toLocaleString("en")} of different ${words().many}. Threshold: ${formatScore(found.old_threshold)} before, ${formatScore(found.threshold)} after.`;
  showWarnings(byId("migration-warning"), found.warnings);
  const table = byId("migration-rates");
  table.tHead.rows[0].replaceChildren(element("td"), ...names.map((name) => element("th", { scope: "col" }, LABELS[name])));
  table.tBodies[0].replaceChildren(...rateRows(found, names.map((name) => found.spaces[name])));
  const curves = names.map((name) => ({ name, label: LABELS[name], ...found.curves[name] }));
  byId("migration-roc").replaceChildren(...[rocFigure(curves, found.judged_fmr)].filter(Boolean));
}

function rateRows({ judged_fmr: rate }, spaces) {
  const row = (name, cells) => element("tr", {}, element("th", { scope: "row" }, name), ...cells);
  const rates = (key) => spaces.map((space) => element("td", {}, percent(space[key]), element("span", { class: "facts" }, space[`${key}_interval`].map(points).join("–"))));
  const plain = (write) => spaces.map((space) => element("td", {}, write(space)));
  return [
    row(`TAR at FMR ${formatRate(rate)}`, rates("tar")),
    row("Threshold for it", plain((space) => formatScore(space.threshold))),
    row("TAR at the threshold used", rates("used_tar")),
    row("FMR at the threshold used", plain((space) => formatRate(space.used_fmr))),
  ];
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;
const points = (share) => (100 * share).toFixed(1).replace("-", "−");

/** How much of the true accept rate is lost, with what 95% of draws of persons lie between. */
function lossText({ loss: lost, loss_interval: interval, spaces }) {
  const isOfEstimates = spaces.estimated !== undefined && spaces.estimated.used_tar < spaces.new.used_tar;
  return `True accept rate lost${isOfEstimates ? ` by ${words().faces} with an estimate` : ""}: ${points(lost)} percentage points (95%: ${interval.map(points).join(" to ")})`;
}
