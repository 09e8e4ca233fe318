// Choosing pictures: by the file dialog, by dropping, by pasting; and seeing what was chosen.

import { element, userError } from "./dom.js";

/** What a picture is called in messages. */
export const fileName = (file) => file.name || "the pasted picture";

const TYPES = "image/jpeg,image/png,image/webp";

/** A place for up to `capacity` pictures; one more than one takes the place of the last. `changed(files)` is called. */
export class Pictures {
  constructor(host, { label, capacity = 1, changed = () => {} }) {
    this.files = [];
    this.label = label;
    this.capacity = capacity;
    this.changed = changed;
    this.input = element("input", {
      type: "file", accept: TYPES, multiple: capacity > 1, hidden: true, onchange: () => this.take([...this.input.files]),
    });
    this.tray = element("ul", { class: "tray", "aria-label": `${label}: chosen` });
    this.choose = element("button", { type: "button", class: "choose", onclick: () => this.input.click() });
    this.box = element("div", { class: capacity > 1 ? "pictures several" : "pictures single", role: "group", "aria-label": label },
      this.tray, this.choose, this.input);
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.files.length > 0) {
        event.preventDefault();   // in a dialog, the first Escape clears and the second closes
        event.stopPropagation();
        this.clear();
      }
    });
    this.listenForDrops();
    host.append(this.box);
    this.show();
  }

  /** Add files that were chosen, dropped or pasted. */
  take(files) {
    this.input.value = "";   // the same file may be chosen again
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

  show() {
    for (const image of this.tray.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    this.tray.replaceChildren(...this.files.map((file, index) => this.thumbnail(file, index)));
    this.tray.hidden = this.files.length === 0;
    this.box.dataset.filled = this.files.length > 0;
    this.choose.replaceChildren(...this.invitation());
  }

  invitation() {
    if (this.files.length > 0) return [this.capacity > 1 ? "Add another picture" : "Choose another"];
    return [element("strong", {}, this.label), element("span", {}, "Drop, paste or choose; JPEG, PNG or WEBP")];
  }

  thumbnail(file, index) {
    const image = element("img", { src: URL.createObjectURL(file), alt: fileName(file) });
    image.addEventListener("error", () => image.replaceWith(element("p", { class: "blind" }, `no preview of ${fileName(file)}`)));
    const remove = element("button", { type: "button", class: "quiet", onclick: () => this.drop(index), "aria-label": `Remove ${image.alt}` }, "Remove");
    return element("li", {}, image, remove);
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
      this.take([...event.dataTransfer.files]);
    });
  }
}

/** A file as the service's input: {"image": base64}. */
export async function asInput(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(userError(`${file.name} cannot be read; choose it again`));
    reader.readAsDataURL(file);
  });
  return { image: url.slice(url.indexOf(",") + 1) };
}

export const asInputs = (files) => Promise.all(files.map(asInput));

/** Files by the names that the service gives to the inputs of the list "faces". */
export const faceFiles = (files) => Object.fromEntries(files.map((file, index) => [`faces[${index}]`, file]));
