// A picture that shows several faces: a box around each, a list of them below, and the question which is meant.

import { arrowKeyNav, byId, element, isolated, userError } from "./dom.js";
import { fileName } from "./picture.js";
import { shrunk } from "./shrink.js";

/** A picture with its faces in `host`; `choose(face)` is called with the one that is clicked, or taken from the list. */
export class FacesPicture {
  constructor(host, choose) {
    this.choose = choose;
    this.file = null;
    this.image = element("img", { alt: "" });   // the list says what it shows
    this.image.onload = () => this.place();
    this.image.onerror = () => { this.frame.hidden = true; };   // a format that the browser cannot decode: the list alone
    this.boxes = element("div", { "aria-hidden": true });       // the same buttons for mouse and finger
    this.frame = element("div", { class: "frame", hidden: true }, this.image, this.boxes);
    this.list = element("ol", { class: "found", "aria-label": "Faces in the picture, the largest first" });
    arrowKeyNav(this.list, "button");
    host.append(this.frame, this.list);
  }

  /** Show `faces` of `file`, each as `label(face)` has it: {name, note, known}, where the name may be empty; `chosen` is one of them, or null. */
  show(file, faces, label, chosen) {
    this.load(file);
    const focused = this.list.contains(document.activeElement);
    this.faces = faces;
    this.boxes.replaceChildren(...faces.map((face) => this.box(face, label(face), face === chosen)));
    this.list.replaceChildren(...faces.map((face) => this.row(face, label(face), face === chosen)));
    this.place();
    if (focused) this.list.querySelector("[aria-pressed=true]")?.focus();
  }

  async load(file) {
    if (file === this.file) return;
    URL.revokeObjectURL(this.image.src);
    this.frame.hidden = true;
    this.file = file;
    const sent = file === null ? null : await shrunk(file);   // boxes are in pixels of what was sent
    if (sent !== null && file === this.file) this.image.src = URL.createObjectURL(sent);
  }

  place() {
    const { naturalWidth: width, naturalHeight: height } = this.image;
    this.frame.hidden = width === 0 || this.file === null;
    for (const [index, box] of [...this.boxes.children].entries()) {
      const [left, top, right, bottom] = this.faces[index].box;
      const sides = { left: left / width, top: top / height, width: (right - left) / width, height: (bottom - top) / height };
      for (const [side, share] of Object.entries(sides)) box.style.setProperty(side, `${100 * share}%`);
    }
  }

  box(face, { name, known }, chosen) {
    const classes = ["box", known ? "known" : "", chosen ? "chosen" : ""].join(" ");
    return element("span", { class: classes, onclick: () => this.choose(face) }, element("span", { class: "tag" }, `${face.number} `, isolated(name)));
  }

  row(face, { name, note, known }, chosen) {
    const words = [element("span", { class: "place" }, name === "" ? `Face ${face.number}` : String(face.number)), isolated(name, { class: known ? "known" : null }), element("span", { class: "facts" }, note)];
    return element("li", {}, element("button", { type: "button", class: "plain", "aria-pressed": String(chosen), onclick: () => this.choose(face) }, ...words));
  }
}

/**
 * What `send` resolves to; where the service asks which face of a picture is meant, the user is asked, the answer is
 * noted in `inputs`, and they are sent again. `files` are those of the inputs.
 */
export async function withChosenFaces(inputs, files, send) {
  try {
    return await send();
  } catch (error) {
    if (!error.faces) throw error;
    for (const [index, file] of files.entries()) {
      const faces = error.faces.filter(({ input }) => input === `faces[${index}]`);
      if (faces.length === 0) continue;
      const chosen = await askWhich(file, faces);
      if (chosen === null) throw userError(`No face was chosen in ${fileName(file)}. Nothing is saved.`);
      inputs[index].face = chosen.number;
    }
    return send();
  }
}

let asking = null;   // the picture in the dialog

function askWhich(file, faces) {
  const dialog = byId("which");
  let chosen = null;
  asking ??= new FacesPicture(byId("which-faces"), (face) => asking.chosen(face));
  asking.chosen = (face) => {
    chosen = face;
    dialog.close();
  };
  byId("which-text").textContent = `${fileName(file)} shows ${faces.length} faces. Choose the one that is meant.`;
  byId("which-cancel").onclick = () => dialog.close();
  asking.show(file, faces, () => ({ name: "", note: "", known: false }), null);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      if (!dialog.open) resolve(chosen);   // the event comes late
    };
  });
}
