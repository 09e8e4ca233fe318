// The slider that tries thresholds, with the service's own marked on it; and what a score means against it.
// A score says how alike two pictures are, never who somebody is: the words here are "possible match" and "below".

import { element } from "./dom.js";
import { emit, isMatch, on, serviceThreshold, state, threshold } from "./state.js";
import { countItems, holdsPeople, words } from "./words.js";

const STEP = 0.005;

export const formatScore = (score) => score.toFixed(3);

/** A slider in `host`; all of them show and change the same threshold. */
export function thresholdSlider(host, name) {
  const id = `${name}-slider`;
  const value = element("output", { for: id });
  const slider = element("input", { type: "range", id, step: STEP, max: 1, oninput: () => attemptThreshold(Number(slider.value)) });
  const mark = element("span", { class: "mark", "aria-hidden": true });
  const own = element("p", { class: "hint" });
  const back = element("button", { type: "button", class: "quiet", onclick: () => { attemptThreshold(null); slider.focus(); } });
  const head = element("div", { class: "threshold-head" }, element("label", { for: id }, "Threshold"), value, back);
  host.replaceChildren(element("div", { class: "threshold" }, head, element("div", { class: "track" }, slider, mark), own));

  const show = () => {
    const service = name === "compare" ? comparisonThreshold() : serviceThreshold();
    const chosen = state.tried ?? service;
    slider.min = service !== null && service < 0 ? -1 : 0;
    slider.value = chosen ?? 0.5;
    slider.setAttribute("aria-valuetext", chosen === null ? "none chosen" : formatScore(chosen));
    value.textContent = chosen === null ? "–" : formatScore(chosen);
    own.textContent = explained(service, name === "compare" ? null : predicted());
    mark.hidden = service === null;
    mark.style.setProperty("--at", service === null ? 0 : share(service, Number(slider.min)));
    back.hidden = state.tried === null;
    back.textContent = service === null ? "Remove the threshold" : `Reset to ${formatScore(service)}`;
  };
  on("threshold", show);
  for (const name of ["info", "collection", "collections"]) on(name, show);
  show();
}

/** "possible match", "below threshold", or that there is no threshold, with the class of its mark. */
export function judgement(score, said) {
  const above = isMatch(score, said);
  if (above === null) return element("span", { class: "judgement" }, "no threshold");
  return element("span", { class: `judgement ${above ? "above" : "below"}` }, above ? "possible match" : "below threshold");
}

const ALARMING = 0.01;   // share of strangers who would match, from which the note is a warning

/**
 * Tell in `place` how many strangers would match in a search of `faces` faces; nothing where no rate is known: the
 * false-match rate is that of the service's own threshold, and is one comparison's. A search makes one with every face.
 */
export function showFalseMatches(place, faces) {
  const [rate, fpir] = [falseMatchRate(), predicted()?.fpir];
  const share = faces === 0 || state.tried !== null ? 0 : fpir ?? 1 - (1 - (rate ?? 0)) ** faces;
  place.className = share >= ALARMING ? "warning" : "hint";
  place.textContent = share === 0 ? "" : falseMatchNote(share);
}

function falseMatchNote(share) {
  const { strangers } = words();
  if (share > 0.95) return `At this threshold, nearly all ${strangers} would match here. Use a stricter one.`;
  const among = 10 ** Math.max(1, Math.ceil(-Math.log10(share)));
  return `At this threshold, about ${Math.round(share * among)} in ${grouped(among)} ${strangers} would match here by mistake.`;
}

/** A score as a bar from 0 to 1 with the threshold ticked on it. */
export function scoreBar(score, limit = threshold()) {
  const bar = element("span", { class: "score-bar", "aria-hidden": true }, element("i", { class: "fill" }),
    limit === null ? null : element("i", { class: "tick" }));
  bar.style.setProperty("--score", share(score, 0));
  if (limit !== null) bar.style.setProperty("--limit", share(limit, 0));
  return bar;
}

function attemptThreshold(value) {
  state.tried = value;
  emit("threshold");
}

function explained(service, held) {
  if (state.info === null) return "";
  if (service === null) return "The service has no threshold. Move the slider to try one.";
  if (held !== null) return `The mark is the threshold for searches among ${countItems(held.persons)}, ${formatScore(service)}. ${heldText(held)}`;
  const rate = falseMatchRate(service);
  const odds = rate ? ` One in ${grouped(Math.round(1 / rate))} pairs of ${words().strangers} reaches it.` : "";
  return `The mark is the service's threshold, ${formatScore(service)}.${odds}`;
}

/** The threshold of two pictures, which with --fpir is another than that of a search. */
const comparisonThreshold = () => predicted() === null ? serviceThreshold() : state.info.threshold;

function heldText({ fpir, persons, most }) {
  const { strangers, one } = words();
  const among = Math.max(1, Math.floor(1 / fpir + 1e-6));
  const who = holdsPeople() ? "somebody" : `a ${one}`;
  const beyond = persons > most ? ` Beyond ${grouped(most)} nothing was measured: it is extrapolated.` : "";
  return `At most 1 in ${grouped(among)} ${strangers} is taken for ${who} among them, as predicted.${beyond}`;
}

/** With --fpir: the rate, how many the chosen collection has, and up to how many there is evidence; null of another model. */
function predicted() {
  const chosen = state.collections.find((one) => one.name === state.collection);
  if (chosen === undefined || (state.info?.fpir ?? null) === null || chosen.contract_id !== state.info.model.contract_id) return null;
  return { fpir: state.info.fpir, persons: chosen.persons, most: state.info.fpir_persons };
}

/** The rate that was measured of the service's threshold; null of that of another model. */
const falseMatchRate = (service = serviceThreshold()) => service === state.info?.threshold ? state.info?.false_match_rate ?? null : null;

const grouped = (number) => number.toLocaleString("en");

const share = (value, from) => Math.min(Math.max((value - from) / (1 - from), 0), 1);
