// Choosing pictures: by the file dialog, by dropping, by pasting; and seeing what was chosen.

import { element, userError } from "./dom.js";
import { chosenFiles, droppedFiles, groupByFolder, isPicture } from "./folders.js";
import { shrunk } from "./shrink.js";
import { on } from "./state.js";

/** What a picture is called in messages. */
export const fileName = (file) => file.name || "the pasted picture";

const TYPES = "image/*,.heic,.heif";
export const MOST = 32;   // pictures in one request

/**
 * A place for up to `capacity` pictures; one more than one takes the place of the last. `changed(files)` is called.
 * With `foldersChosen`, folders may be chosen or dropped too: it gets what groupByFolder makes of them.
 */
export class Pictures {
  constructor(host, { label, capacity = 1, changed = () => {}, foldersChosen = null }) {
    this.files = [];
    this.reasons = new Map();   // file -> why the service refused it
    this.label = label;
    this.capacity = capacity;
    this.changed = changed;
    this.foldersChosen = foldersChosen;
    this.input = this.fileInput({ accept: TYPES, multiple: capacity > 1 });
    this.camera = this.fileInput({ accept: "image/*", capture: "environment" });
    this.folder = this.fileInput({ webkitdirectory: true });
    this.tray = element("ul", { class: "tray", "aria-label": `${label}: chosen` });
    this.choose = element("button", { type: "button", class: "choose", onclick: () => this.input.click() });
    const ways = element("div", { class: "ways" },
      element("button", { type: "button", class: "quiet camera", onclick: () => this.camera.click() }, "Take a picture"),
      foldersChosen && element("button", { type: "button", class: "quiet", onclick: () => this.folder.click() }, "Choose a folder…"));
    this.box = element("div", { class: capacity > 1 ? "pictures several" : "pictures single", role: "group", "aria-label": label },
      this.tray, this.choose, ways, this.input);
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.files.length > 0) {
        event.preventDefault();   // in a dialog, the first Escape clears and the second closes
        event.stopPropagation();
        this.clear();
      }
    });
    this.listenForDrops();
    on("refused", ({ file, why }) => this.mark(file, why));
    host.append(this.box);
    this.show();
  }

  fileInput(attributes) {
    const input = element("input", { type: "file", hidden: true, ...attributes, onchange: () => this.receive(chosenFiles(input.files)) });
    return input;
  }

  /** Take what was chosen or dropped, as [{path, file}]. */
  receive(found) {
    for (const input of [this.input, this.camera, this.folder]) input.value = "";   // the same may be chosen again
    const inFolders = found.some(({ path }) => path.includes("/"));
    if (!inFolders) this.take(found.map(({ file }) => file));
    else if (this.foldersChosen !== null) this.foldersChosen(groupByFolder(found));
    else this.take(found.map(({ file }) => file).filter(isPicture));
  }

  /** Add pictures. */
  take(files) {
    if (files.length === 0) return;
    this.files = (this.capacity > 1 ? [...this.files, ...files] : files).slice(-this.capacity);
    this.show();
    this.changed(this.files);
  }

  clear() {
    this.files = [];
    this.show();
    this.changed(this.files);
    this.choose.focus();
  }

  drop(index) {
    this.files = this.files.filter((_, place) => place !== index);
    this.show();
    this.changed(this.files);
    this.choose.focus();
  }

  /** Tell at a picture why the service refused it. */
  mark(file, why) {
    if (!this.files.includes(file)) return;
    this.reasons.set(file, why);
    this.show();
  }

  show() {
    for (const image of this.tray.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    this.tray.replaceChildren(...this.files.map((file, index) => this.thumbnail(file, index)));
    this.tray.hidden = this.files.length === 0;
    this.box.dataset.filled = this.files.length > 0;
    this.choose.replaceChildren(...this.invitation());
  }

  invitation() {
    if (this.files.length > 0) return [this.capacity > 1 ? "Add another picture" : "Choose another"];
    return [element("strong", {}, this.label), element("span", {}, this.foldersChosen === null ? "Drop, paste or choose" : "Drop pictures or a folder, paste, or choose")];
  }

  thumbnail(file, index) {
    const why = this.reasons.get(file);
    const image = element("img", { src: URL.createObjectURL(file), alt: "" });   // the name stands below it
    image.addEventListener("error", () => image.replaceWith(element("p", { class: "blind" }, `no preview of ${fileName(file)}`)));
    const remove = element("button", { type: "button", class: "quiet", onclick: () => this.drop(index), "aria-label": `Remove ${fileName(file)}` }, "Remove");
    const caption = element("p", { class: "caption" }, fileName(file), why === undefined ? null : element("span", { class: "why" }, why));
    return element("li", { class: why === undefined ? null : "refused" }, image, caption, remove);
  }

  listenForDrops() {
    let depth = 0;   // dragenter and dragleave come for every child
    const over = (step) => {
      depth = step === 0 ? 0 : depth + step;
      this.box.classList.toggle("over", depth > 0);
    };
    this.box.addEventListener("dragenter", () => over(1));
    this.box.addEventListener("dragleave", () => over(-1));
    this.box.addEventListener("drop", (event) => {
      event.preventDefault();
      event.stopPropagation();
      over(0);
      droppedFiles(event.dataTransfer).then((found) => this.receive(found));
    });
  }
}

/** A file as the service's input, large ones made smaller: {"image": base64}. */
export async function asInput(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(userError(`${file.name} cannot be read; choose it again`));
    shrunk(file).then((picture) => reader.readAsDataURL(picture));
  });
  return { image: url.slice(url.indexOf(",") + 1) };
}

export const asInputs = (files) => Promise.all(files.map(asInput));

/** Files by the names that the service gives to the inputs of the list "faces". */
export const faceFiles = (files) => Object.fromEntries(files.map((file, index) => [`faces[${index}]`, file]));
