// State shared by the views, and events that announce its changes.

const bus = new EventTarget();

export const state = {
  info: null,          // the answer of /v1/info, null before the first
  collections: [],
  collection: null,    // the chosen collection's name
  tried: null,         // a threshold that is tried out, null while the service's own judges
};

const RANKS = ["search", "read", "write", "admin"];

export function on(name, act) {
  bus.addEventListener(name, (event) => act(event.detail));
}

export function emit(name, detail = null) {
  bus.dispatchEvent(new CustomEvent(name, { detail }));
}

/** While the service needs a token that it was not given, the page shows the field for one alone (page.css). */
export const isLocked = () => "locked" in document.body.dataset;

export function setLocked(locked) {
  document.body.toggleAttribute("data-locked", locked);
  emit("locked");
}

/** Whether the caller's token allows what needs `role`. */
export function hasRole(role) {
  return RANKS.indexOf(state.info?.role) >= RANKS.indexOf(role);
}

/** The service's threshold for the model of the chosen collection; null without any. */
export function serviceThreshold() {
  const chosen = state.collections.find((one) => one.name === state.collection);
  return (chosen === undefined ? state.info?.threshold : chosen.threshold) ?? null;
}

/** The threshold that judges now: the tried one, or the service's; null without any. */
export function threshold() {
  return state.tried ?? serviceThreshold();
}

/** Whether `score` reaches the threshold, null without one; while none is tried, the service's own word `said` counts. */
export function isMatch(score, said) {
  if (state.tried === null) return said;
  return score >= state.tried;
}
