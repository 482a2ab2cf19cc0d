// SPDX-License-Identifier: Apache-2.0
/** The list of recent requests. Questions stand in it if the reader wants, and in no other place. */

import { $, clock, count, element, plural, wrap } from "./elements.js";
import { api } from "./server.js";
import { state } from "./state.js";

const STORE = "kv-eviction-questions";
const MOST_LABELS = 100;

/** Questions by trace; null if the reader does not want them kept. */
let labels = loadLabels();

/** @returns {Map<string, string>|null} */
function loadLabels() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORE));
    return stored === null ? null : new Map(stored);
  } catch {
    return null; // a browser that stores nothing, or something else under this name
  }
}

function storeLabels() {
  try {
    if (labels === null) localStorage.removeItem(STORE);
    else localStorage.setItem(STORE, JSON.stringify([...labels]));
  } catch {
    // They last as long as the page then.
  }
}

/** Whether this browser keeps the questions that are asked here. */
export function keepLabels(wanted) {
  labels = wanted ? new Map() : null;
  if (wanted && state.evicted?.trace && state.asked) labels.set(state.evicted.trace, state.asked.question);
  storeLabels();
  showRecent();
}

export function label(id, question) {
  if (labels === null) return;
  labels.set(id, question);
  if (labels.size > MOST_LABELS) labels.delete(labels.keys().next().value);
  storeLabels();
}

export async function loadRecent() {
  try {
    state.recent = (await api("requests")).requests;
    showRecent();
  } catch {
    // The list is a convenience: what is wrong is said when somebody asks or opens a trace.
  }
}

export function showRecent() {
  const focused = document.activeElement?.dataset.id;
  $("labels").checked = labels !== null;
  const items = state.recent.map((summary) => {
    const { id, policy, budget, blocks_before: before, blocks_after: after, cuts, time } = summary;
    const said = cuts.length > 1 ? `, ${plural(cuts.length, "cut")}` : "";
    const question = labels?.get(id);
    const link = wrap(
      ...["a", "", element("strong", "", `${policy}, ${budget}`)],
      ...(question ? [element("q", "", question)] : []),
      element("span", "", `${count(before)} \u2192 ${plural(after, "block")}${said}`),
      element("span", "", clock(time)),
    );
    link.href = `#${encodeURIComponent(id)}`;
    link.dataset.id = id;
    if (id === state.trace?.id) link.setAttribute("aria-current", "true");
    return wrap("li", "", link);
  });
  $("recent-empty").hidden = items.length > 0;
  $("recent-list").replaceChildren(...items);
  if (focused) $("recent-list").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}
