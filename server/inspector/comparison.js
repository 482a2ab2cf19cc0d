// SPDX-License-Identifier: Apache-2.0
/** One question with all methods and several budgets, asked one after another. */

import { $, budgetName, count, element, percent, plural, refuse, showError, wrap } from "./elements.js";
import { api, tracePath } from "./server.js";
import { spans, state } from "./state.js";
import { SIGNS, differences, holds, verdictOf } from "./differences.js";
import { memoryKept, showAnswers } from "./answers.js";
import { draw, pictureUnder } from "./map.js";
import { isAsked, questionToAsk, send, waitChosen } from "./question.js";
import { openTrace } from "./trace.js";
import { loadRecent } from "./recent.js";

const MOST_BUDGETS = 5;

/**
 * @typedef {{settings: Settings, evicted: Evicted|null, trace: Trace|null, error: string|null}} Entry
 *   evicted and error: null until it is asked
 * @typedef {{asked: Asked, full: Full|null, entries: Entry[], running: AbortController|null}}
 *   Comparison
 */

/** @type {Comparison|null} */
let comparison = null;

/** What a saved file holds of it. */
export const comparisonRecord = () =>
  comparison && {
    full: comparison.full,
    entries: comparison.entries.map(({ settings, evicted, error }) => ({ settings, evicted, error })),
  };

/** Fractions and tokens per KV head; null after saying what is wrong. @returns {number[]|null} */
function budgetsChosen() {
  const parts = $("compare-budgets").value.split(",").map((part) => part.trim());
  const budgets = parts.map(Number);
  const fits = (budget) => (budget > 0 && budget <= 1) || (Number.isInteger(budget) && budget > 1);
  if (budgets.length <= MOST_BUDGETS && budgets.every(fits)) return [...new Set(budgets)];
  const form = `up to ${MOST_BUDGETS} fractions or tokens per KV head, such as 0.05, 0.1, 128`;
  return refuse(`Budgets to compare: give ${form}.`, "compare-budgets");
}

export async function compareAll() {
  const asked = questionToAsk();
  const budgets = asked && budgetsChosen();
  const defer = budgets && waitChosen();
  if (!budgets || Number.isNaN(defer)) return;
  comparison?.running?.abort();
  const schedule = state.schedules ? "none" : null; // which would take the place of the budgets
  const methods = state.methods.filter((name) => name !== "none");
  const entries = methods.flatMap((policy) =>
    budgets.map((budget) => ({
      settings: { policy, budget, defer, schedule },
      ...{ evicted: null, trace: null, error: null },
    })),
  );
  const running = new AbortController();
  const full = isAsked(asked) ? state.full : null;
  const found = (comparison = { asked, full, entries, running });
  showComparison();
  $("compare-stop").focus();
  try {
    for (const entry of entries) {
      await fillEntry(found, entry, running.signal);
      if (comparison !== found) return;
      showComparison();
    }
  } catch (error) {
    if (!running.signal.aborted) showError(error);
  } finally {
    found.running = null;
    if (comparison === found) {
      if (document.activeElement === $("compare-stop")) $("compare").focus();
      showComparison();
    }
    loadRecent();
  }
}

/** Ask one of them; what the server refuses, such as a method without its file, is its result. */
async function fillEntry(found, entry, signal) {
  try {
    const { full, evicted } = await send(found.asked, entry.settings, found.full === null, signal);
    if (full) found.full = full;
    // At once: the server keeps the latest traces only.
    if (evicted.trace !== null) entry.trace = await api(tracePath(evicted.trace), { signal });
    entry.evicted = evicted;
  } catch (error) {
    if (signal.aborted) throw error;
    entry.error = error.message;
  }
}

export const stopComparing = () => comparison?.running?.abort();

/** @param {Entry} entry */
function openEntry({ settings, evicted, trace }) {
  const { asked, full } = comparison;
  Object.assign(state, { asked, full, evicted, settings, seconds: 0 });
  showAnswers();
  if (trace) openTrace(trace.id, null, { trace }).catch(showError);
  $("answers").scrollIntoView({ block: "start" });
  $("answers-title").focus({ preventScroll: true });
}

export function showComparison() {
  if (!comparison) return;
  const { asked, full, entries, running } = comparison;
  const done = entries.filter(({ evicted, error }) => evicted || error);
  const verdicts = done.map(verdict);
  const numbers = Object.keys(SIGNS)
    .map((name) => [verdicts.filter((found) => found === name).length, name])
    .filter(([number]) => number)
    .map(([number, name]) => `${number} ${name}`);
  const failed = done.filter(({ error }) => error).length;
  if (failed) numbers.push(`${failed} refused`);
  const isRight = full && asked.expected && holds(full.text, asked.expected);
  $("compare-stop").hidden = !running;
  $("compare-progress").hidden = !running;
  Object.assign($("compare-progress"), { max: entries.length, value: done.length });
  const next = entries[done.length]?.settings;
  $("compare-said").textContent =
    (running && next
      ? `Asked ${done.length} of ${entries.length}, now ${next.policy} at ${budgetName(next.budget)}.`
      : `${plural(done.length, "answer")} of ${entries.length}.`) +
    (done.length ? ` ${numbers.join(", ")}.` : "");
  $("compare-asked").hidden = full === null;
  $("compare-asked").replaceChildren(
    ...[element("q", "", asked.question), " Full cache: "],
    element("strong", "", full?.text.trim() ?? ""),
    asked.expected && (isRight ? " \u2713\u00a0right" : " \u2260\u00a0not right"),
  );
  showMultiples();
}

/** @param {Entry} entry @returns {keyof typeof SIGNS|undefined} */
const verdict = ({ evicted }) =>
  evicted && verdictOf(evicted.text, comparison.full.text, comparison.asked.expected);

/** A row for each method; only what has changed is drawn again. */
function showMultiples() {
  const rows = new Map();
  for (const entry of comparison.entries) {
    const { policy } = entry.settings;
    if (!rows.has(policy)) rows.set(policy, []);
    entry.shown = shownEntry(entry, entry.shown);
    rows.get(policy).push(entry.shown);
  }
  const made = [...rows].map(([policy, cells]) =>
    wrap("div", "method-row", element("h3", "", policy), wrap("div", "multiples", ...cells)),
  );
  const focused = document.activeElement;
  $("multiples").replaceChildren(...made);
  if ($("multiples").contains(focused)) focused.focus();
}

/** @param {Entry} entry @param {HTMLElement|undefined} before  its last element */
function shownEntry(entry, before) {
  const { settings, evicted, trace, error } = entry;
  const budget = budgetName(settings.budget);
  const judged = verdict(entry);
  const shown = `${error ?? judged ?? "not yet"}, ${comparison.asked.expected}`;
  if (before?.dataset.shown === shown) return before;
  if (!evicted) {
    const cell = wrap("div", "multiple", element("span", "note", budget));
    cell.append(element("span", error ? "refused" : "note", error ?? "\u2026"));
    cell.dataset.shown = shown;
    return cell;
  }
  const maps = wrap("span", "multiple-maps", ...(trace ? mapsOf(trace) : []));
  const memory = `${percent(memoryKept(evicted))} of memory`;
  const looks = judged === "different" ? "differs" : "same";
  const mark = element("strong", looks, `${SIGNS[judged]} ${judged}`);
  const answer = element("span", "multiple-answer");
  for (const [text, differs] of differences(comparison.full.text, evicted.text)[1]) {
    answer.append(differs ? element("mark", "other", text) : text);
  }
  const cell = wrap("button", "multiple", maps, wrap("span", "multiple-head", budget, mark), answer);
  cell.append(element("span", "note", memory));
  cell.type = "button";
  cell.dataset.shown = shown;
  const said = `${settings.policy} at ${budget}, ${judged}`;
  cell.setAttribute("aria-label", `${said}: ${evicted.text}, ${memory} kept`);
  cell.addEventListener("click", () => openEntry(entry));
  return cell;
}

/** A small map of every image, or of the prompt where there is none. */
function mapsOf(trace) {
  const pairs = trace.layers * trace.kv_heads;
  const kept = Float32Array.from(trace.kept_by, (number) => number / pairs);
  return spans(trace)
    .slice(0, trace.vision.length || 1)
    .map((span, index) => {
      const canvas = element("canvas", "", "", { "aria-hidden": "true" });
      draw(canvas, span, { kept, under: pictureUnder(trace, index) });
      return canvas;
    });
}
