// Comparing two pictures.

import { byId, clearError, element, runWithErrors, showWarnings } from "./dom.js";
import { asInputs, Pictures } from "./picture.js";
import { call } from "./service.js";
import { on, state } from "./state.js";
import { formatScore, judgement, scoreBar, thresholdSlider } from "./threshold.js";

const error = byId("compare-error");
let sides = [];
let answer = null;
let running = null;

export function setUpCompare() {
  sides = [["compare-a", "One picture"], ["compare-b", "The other picture"]].map(
    ([id, label]) => new Pictures(byId(id), { label, changed: compare }),
  );
  thresholdSlider(byId("compare-threshold"), "compare");
  on("threshold", show);
  on("info", show);
}

/** Two files fill both sides; one goes to the side that has the focus, else to the first empty one, else to the second. */
export function receive(found) {
  const files = found.map(({ file }) => file);
  if (files.length > 1) return sides.forEach((side, at) => side.take([files[at]]));
  const focused = sides.find((side) => side.box.contains(document.activeElement));
  const empty = sides.find((side) => side.files.length === 0);
  return (focused ?? empty ?? sides[1]).take(files);
}

async function compare() {
  running?.abort();
  answer = null;
  clearError(error);
  show();
  const files = sides.flatMap((side) => side.files);
  if (files.length < 2) return;
  running = new AbortController();
  const { signal } = running;
  await runWithErrors(error, async () => {
    const [a, b] = await asInputs(files);
    const found = await call("POST", "v1/compare", { body: { a, b }, signal, files: { a: files[0], b: files[1] } });
    if (!signal.aborted) answer = found;
  });
  show();
}

function show() {
  showWarnings(byId("compare-warning"), answer?.warnings);
  const verdict = byId("compare-verdict");
  if (answer === null) return verdict.replaceChildren();
  return verdict.replaceChildren(
    element("span", { class: "number" }, formatScore(answer.score)), scoreBar(answer.score, state.tried ?? answer.threshold), judgement(answer.score, answer.same_person),
  );
}
