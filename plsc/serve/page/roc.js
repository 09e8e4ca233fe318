// ROC curves as a drawing: the true accept rate over the false accept rate, whose axis is logarithmic.

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [420, 250];
const [LEFT, RIGHT, TOP, BOTTOM] = [46, WIDTH - 10, 10, HEIGHT - 44];   // the edges of what is drawn in
const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2];   // between marks of the true accept rate
const MARKS = 5;                              // of it, at most
const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A false accept rate, as 1.2e-4. */
export const formatRate = (rate) => (rate === 0 ? "0" : rate.toExponential(1));

/**
 * A figure of curves, {name, label, roc: {far, tar}, auc} each; `name` is the line's class (page.css). A line across
 * marks the rate `judged`. Null where there is none to draw.
 */
export function rocFigure(curves, judged) {
  const drawn = curves.filter((curve) => curve.roc !== null);
  if (drawn.length === 0) return null;
  const axes = axesFor(drawn);
  const at = judged >= 10 ** axes.lowest ? axes.x(judged) : null;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": described(drawn) },
    ...farMarks(axes), ...tarMarks(axes),
    ...(at === null ? [] : [line("judged", at, TOP, at, BOTTOM)]),
    ...drawn.map((curve) => svg("polyline", { class: `curve ${curve.name}`, points: points(curve.roc, axes) })),
    text((LEFT + RIGHT) / 2, HEIGHT - 6, "middle", "False accept rate"));
  return element("figure", { class: "roc" }, element("p", { class: "hint" }, "True accept rate, %"), picture, legend(drawn, at === null ? null : judged));
}

/** Where values lie: {x, y, lowest, floor}, from the lowest exponent that the curves have, and the lowest mark. */
function axesFor(curves) {
  const lowest = Math.min(...curves.map(({ roc }) => Math.log10(roc.far[0])));
  const least = Math.min(...curves.flatMap(({ roc }) => roc.tar));
  const step = STEPS.find((one) => (1 - least) / one <= MARKS) ?? STEPS.at(-1);
  const floor = Math.max(1 - step * Math.max(Math.ceil((1 - least) / step), 1), 0);
  const x = (far) => LEFT + (1 - Math.log10(far) / Math.min(lowest, -0.1)) * (RIGHT - LEFT);
  const y = (tar) => BOTTOM - (tar - floor) / (1 - floor) * (BOTTOM - TOP);
  return { x, y, lowest, floor, step };
}

function farMarks({ x, lowest }) {
  const exponents = Array.from({ length: Math.floor(-lowest + 1e-9) + 1 }, (_, at) => -at);
  return exponents.flatMap((exponent) => {
    const at = x(10 ** exponent);
    return [line("grid", at, TOP, at, BOTTOM), text(at, BOTTOM + 17, exponent === 0 ? "end" : "middle", power(exponent))];
  });
}

function tarMarks({ y, floor, step }) {
  const marks = Array.from({ length: Math.round((1 - floor) / step) + 1 }, (_, at) => 1 - at * step);
  return marks.flatMap((tar) => [line("grid", LEFT, y(tar), RIGHT, y(tar)), text(LEFT - 7, y(tar) + 4, "end", String(Math.round(100 * tar)))]);
}

/** The lines by name, with the area under each: by their dashes, too, for those who see no colours. */
function legend(curves, judged) {
  const sample = (kind) => svg("svg", { viewBox: "0 0 28 8", "aria-hidden": "true" }, line(kind, 0, 4, 28, 4));
  const entries = curves.map(({ name, label, auc }) => [`curve ${name}`, `${label}, AUC ${auc.toFixed(4)}`]);
  if (judged !== null) entries.push(["judged", `Judged at ${formatRate(judged)}`]);
  return element("ul", {}, ...entries.map(([kind, label]) => element("li", {}, sample(kind), label)));
}

const described = (curves) => `ROC curves. ${curves.map(({ label, roc }) => (
  `${label}: true accept rate ${(100 * roc.tar[0]).toFixed(1)}% at a false accept rate of ${formatRate(roc.far[0])}`)).join("; ")}.`;

const points = ({ far, tar }, { x, y }) => far.map((value, at) => `${x(value).toFixed(1)},${y(tar[at]).toFixed(1)}`).join(" ");

const power = (exponent) => (exponent === 0 ? "1" : `10⁻${[...String(-exponent)].map((digit) => SUPERSCRIPT[digit]).join("")}`);

const line = (kind, x1, y1, x2, y2) => svg("line", { class: kind, x1, y1, x2, y2 });

const text = (x, y, anchor, written) => svg("text", { x, y, "text-anchor": anchor }, written);

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
