// How people write metadata values and filters, and what the service calls them.

import { userError } from "./dom.js";

const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;
const CLAUSE = /^("(?:[^"\\]|\\.)*"|[^=!<>"]+?)\s*(?:(!=|>=|<=|=|>|<)\s*(.+))?$/su;
const OPERATORS = { "=": "eq", "!=": "ne", ">": "gt", ">=": "gte", "<": "lt", "<=": "lte" };

/** A written value: true and false, numbers (a BigInt beyond 2^53), else text; quotes make text of anything. */
export function readScalar(written) {
  const text = written.trim();
  if (text === "true" || text === "false") return text === "true";
  if (NUMBER.test(text) && Number.isFinite(Number(text))) return exact(text);
  if (/^".*"$/s.test(text)) {
    try {
      return JSON.parse(text);
    } catch {
      return text;   // quotes within quotes: taken as they stand
    }
  }
  return text;
}

/** The text that readScalar takes for `value`. */
export function writeScalar(value) {
  if (typeof value !== "string") return String(value);
  return readScalar(value) === value ? value : JSON.stringify(value);
}

/** "number", "text" or "yes or no". */
export const kindOf = (value) => ({ number: "number", bigint: "number", boolean: "yes or no" })[typeof value] ?? "text";

/** The service's filter for `city = Bern, age >= 30, email, !phone`, or for the JSON itself; null for none. */
export function readFilter(written) {
  const text = written.trim();
  if (text === "") return null;
  if (text.startsWith("{")) return readJson(text);
  const found = new Map();
  for (const clause of clauses(text)) {
    const [key, operator, value] = readClause(clause);
    if (!found.has(key)) found.set(key, new Map());
    if (found.get(key).has(operator)) throw userError(`"${key}" has the same condition twice; remove one`);
    found.get(key).set(operator, value);
  }
  return Object.fromEntries([...found].map(([key, asked]) => [key, Object.fromEntries(asked)]));
}

function readClause(clause) {
  const negated = clause.startsWith("!");
  const match = CLAUSE.exec(negated ? clause.slice(1).trim() : clause);
  if (match === null || (negated && match[2])) throw userError(`"${clause}" is not a condition; write city = Bern, age >= 30, or a key alone`);
  const [, key, operator, value] = match;
  const name = key.startsWith('"') ? readScalar(key) : key.trim();
  return operator ? [name, OPERATORS[operator], readScalar(value)] : [name, "exists", !negated];
}

/** The parts between commas that stand outside quotes. */
function clauses(text) {
  const parts = text.match(/(?:"(?:[^"\\]|\\.)*"|[^,"]|")+/gs) ?? [];
  return parts.map((part) => part.trim()).filter((part) => part !== "");
}

function readJson(text) {
  try {
    return parseJson(text);
  } catch (error) {
    throw userError(`the filter looks like JSON but is not valid: ${error.message}`);
  }
}

/** JSON whose long integers become BigInts, where the browser lets their digits be seen, rather than being rounded. */
export const parseJson = (text) => JSON.parse(text, (key, value, context) => (
  typeof value === "number" && context?.source !== undefined ? exact(context.source) : value));

/** The JSON of a value that may hold BigInts. */
export const writeJson = (value) => JSON.stringify(value, (key, one) => (typeof one === "bigint" ? raw(one) : one));

function raw(integer) {
  if (JSON.rawJSON === undefined) throw userError(`this browser would round ${integer}; put quotes around it, or use a newer browser`);
  return JSON.rawJSON(String(integer));
}

function exact(text) {
  return /[.eE]/.test(text) || Number.isSafeInteger(Number(text)) ? Number(text) : BigInt(text);
}
