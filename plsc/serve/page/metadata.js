// Writing metadata: a row for each entry, with the kind of value told as it is typed.

import { element, isolated, userError } from "./dom.js";
import { kindOf, readScalar, writeScalar } from "./scalars.js";
import { state } from "./state.js";

/** The editor in `host`: read() gives the object, write(object) shows one. */
export class MetadataEditor {
  constructor(host, name) {
    this.rows = element("ul", { class: "entries" });
    this.more = element("button", { type: "button", class: "quiet", onclick: () => this.add().querySelector("input").focus() }, "Add a field");
    host.append(element("div", { role: "group", "aria-labelledby": `${name}-label` },
      element("span", { class: "label", id: `${name}-label` }, "Metadata"), this.rows, this.more));
  }

  write(metadata) {
    this.rows.replaceChildren();
    for (const [key, value] of Object.entries(metadata)) this.add(key, writeScalar(value));
  }

  /** Rows without a key and a value are passed over; a key that is there twice, or a value alone, is a mistake. */
  read() {
    const found = new Map();
    for (const row of this.rows.children) {
      const [key, value] = [...row.querySelectorAll("input")].map((input) => input.value.trim());
      if (key === "" && value === "") continue;
      if (key === "") throw userError(`"${value}" has no field name; give it one, or remove it`);
      if (found.has(key)) throw userError(`the field "${key}" appears twice; remove one`);
      found.set(key, readScalar(value));
    }
    return Object.fromEntries(found);
  }

  add(key = "", value = "") {
    const kind = element("span", { class: "kind" });
    const tellKind = () => { kind.textContent = entry.value.trim() === "" ? "" : kindOf(readScalar(entry.value)); };
    const entry = element("input", { type: "text", "aria-label": "value", placeholder: "value", value, autocomplete: "off", oninput: tellKind });
    const name = element("input", { type: "text", "aria-label": "field", placeholder: "field", value: key, autocomplete: "off" });
    const remove = element("button", { type: "button", class: "quiet", "aria-label": "Remove this field", onclick: () => { row.remove(); this.more.focus(); } }, "Remove");
    const row = element("li", {}, name, entry, kind, remove);
    tellKind();
    this.rows.append(row);
    return row;
  }
}

/** Metadata as a line of small labels, for lists; the value under the service's link key is a link. */
export function metadataLine(metadata) {
  const entries = Object.entries(metadata);
  if (entries.length === 0) return null;
  return element("ul", { class: "chips", "aria-label": "metadata" },
    ...entries.map(([key, value]) => element("li", {}, isolated(key, { class: "key" }), " ", linked(key, value) ?? isolated(String(value)))));
}

/** A link to the address that an entry holds, null where it is none. Nothing is fetched until somebody follows it. */
export function linked(key, value) {
  if (key !== state.info?.link_key || typeof value !== "string" || !/^https?:\/\//i.test(value) || !URL.canParse(value)) return null;
  return element("a", { href: value, target: "_blank", rel: "noopener noreferrer" }, isolated(value));
}
