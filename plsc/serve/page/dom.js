// DOM helpers. Elements are filled with text nodes only, so that nothing from the service or a user becomes markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes, listeners (`onclick: f`) and children; null children and attributes are left out. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Text whose direction of writing cannot disturb what stands beside it. */
export const isolated = (text, attributes = {}) => element("bdi", attributes, text);

/** An error caused by the user's input; it is not logged to the console. */
export const userError = (message) => Object.assign(new Error(message), { shown: true });

/** Show an error's one line in `region`; an aborted request is no error. */
export function showError(region, error) {
  if (error.name === "AbortError") return;
  region.textContent = error.message.replace(/\s+/g, " ");
  region.hidden = false;
  if (!error.shown) console.error(error);
}

export function clearError(region) {
  region.hidden = true;
  region.textContent = "";
}

/** Run `action` and show its error in `region`; resolves to whether it succeeded. `button` cannot run it twice at once. */
export async function runWithErrors(region, action, button = null) {
  if (button?.getAttribute("aria-disabled") === "true") return false;
  clearError(region);
  button?.setAttribute("aria-disabled", "true");
  try {
    await action();
    return true;
  } catch (error) {
    showError(region, error);
    return false;
  } finally {
    button?.removeAttribute("aria-disabled");
  }
}

/** Up, Down, Home and End move the focus among the elements of `list` that fit `selector`. */
export function arrowKeyNav(list, selector) {
  list.addEventListener("keydown", (event) => {
    const stops = [...list.querySelectorAll(selector)];
    const here = stops.indexOf(event.target.closest("li")?.querySelector(selector));
    const there = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: stops.length - 1 }[event.key];
    if (here < 0 || there === undefined || event.target.matches("input")) return;
    event.preventDefault();
    stops[Math.min(Math.max(there, 0), stops.length - 1)].focus();
  });
}

export const pluralize = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

/** Show in a status line what was done, with a button that undoes it; `undo` resolves to the line that follows. */
export function offerUndo(line, text, error, undo) {
  const button = element("button", { type: "button", class: "quiet", onclick: async () => {
    let done = "";
    if (await runWithErrors(error, async () => { done = await undo(); }, button)) line.textContent = done;
  } }, "Undo");
  line.replaceChildren(`${text} `, button);
}

/** Show the warnings of an answer in `region`. */
export function showWarnings(region, warnings = []) {
  region.replaceChildren(...warnings.map((warning) => element("span", {}, `${warning}.`)));
}

/** Give the user a file to keep. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);   // milliseconds: the browser reads it in its own time
}

/** A date as people read it; what is no date stays as it is. */
export function day(iso) {
  const date = new Date(iso);
  return Number.isNaN(date.valueOf()) ? iso : date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
}

/**
 * Ask in a dialog; `action` runs on `yes`, and its error is shown there. Resolves to whether it was done. With `name`,
 * that has to be typed first.
 */
export function confirmAction({ title, text, yes: yesLabel, no: noLabel, name = null }, action) {
  const dialog = byId("confirm");
  const error = byId("confirm-error");
  const yes = byId("confirm-yes");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  yes.textContent = yesLabel;
  byId("confirm-no").textContent = noLabel;
  error.hidden = true;
  const typed = byId("confirm-typed");
  byId("confirm-typing").hidden = name === null;
  typed.labels[0].textContent = `Type ${name} to confirm`;
  typed.value = "";
  yes.disabled = name !== null;
  typed.oninput = () => { yes.disabled = typed.value.trim() !== name; };
  dialog.showModal();
  return new Promise((resolve) => {
    let done = false;
    yes.onclick = async () => {
      done = await runWithErrors(error, action, yes);
      if (done) dialog.close();
    };
    byId("confirm-no").onclick = () => dialog.close();
    dialog.onclose = () => {
      if (!dialog.open) resolve(done);   // the event comes late: the question may be open anew by then
    };
  });
}
