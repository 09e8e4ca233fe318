// Asking before something is deleted for ever.

import { attempt, byId } from "./dom.js";

/** Ask in a dialog; `action` runs on yes and a failure is told there. Answers whether it was done. */
export function confirmed(title, text, action) {
  const dialog = byId("confirm");
  const error = byId("confirm-error");
  const yes = byId("confirm-yes");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  error.hidden = true;
  dialog.showModal();
  return new Promise((resolve) => {
    let done = false;
    yes.onclick = async () => {
      done = await attempt(error, action, yes);
      if (done) dialog.close();
    };
    byId("confirm-no").onclick = () => dialog.close();
    dialog.onclose = () => {
      if (!dialog.open) resolve(done);   // the event comes late: the question may be open anew by then
    };
  });
}
