// The slider that tries thresholds, with the service's own marked on it; and what a score means against it.

import { element } from "./dom.js";
import { emit, isMatch, on, state, threshold } from "./state.js";

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
  const head = element("div", { class: "threshold-head" }, element("label", { for: id }, "Same person from"), value, back);
  host.replaceChildren(element("div", { class: "threshold" }, head, element("div", { class: "track" }, slider, mark), own));

  const show = () => {
    const [chosen, service] = [threshold(), state.info?.threshold ?? null];
    slider.min = service !== null && service < 0 ? -1 : 0;
    slider.value = chosen ?? 0.5;
    slider.setAttribute("aria-valuetext", chosen === null ? "none chosen" : formatScore(chosen));
    value.textContent = chosen === null ? "–" : formatScore(chosen);
    own.textContent = explained(service);
    mark.hidden = service === null;
    mark.style.setProperty("--at", service === null ? 0 : share(service, Number(slider.min)));
    back.hidden = state.tried === null;
    back.textContent = service === null ? "Judge no more" : `Back to the service's ${formatScore(service)}`;
  };
  on("threshold", show);
  on("info", show);
  show();
}

/** "same person", "someone else", or that nobody can say, and the class of its mark. */
export function judgement(score, said) {
  const same = isMatch(score, said);
  if (same === null) return element("span", { class: "judgement" }, "no threshold");
  return element("span", { class: `judgement ${same ? "same" : "other"}` }, same ? "same person" : "someone else");
}

/** A score as a bar from 0 to 1 with the threshold ticked on it. */
export function scoreBar(score) {
  const limit = threshold();
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

function explained(service) {
  if (state.info === null) return "";
  if (service === null) return "The service has no threshold of its own: move the slider to try one.";
  const rate = state.info.false_match_rate;
  const odds = rate ? `, where one in ${Math.round(1 / rate).toLocaleString("en")} strangers passes` : "";
  return `The mark is the service's own: ${formatScore(service)}${odds}.`;
}

const share = (value, from) => Math.min(Math.max((value - from) / (1 - from), 0), 1);
