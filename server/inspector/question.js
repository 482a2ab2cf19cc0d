// SPDX-License-Identifier: Apache-2.0
/** The form, and asking what it holds. */

import { $, hideError, percent, plural, refuse, showDefinitions } from "./elements.js";
import { showError, showOptions } from "./elements.js";
import { api, post } from "./server.js";
import { remember, state } from "./state.js";
import { MOST_BYTES } from "./picture.js";
import { showAnswers } from "./answers.js";
import { closeTrace, openTrace } from "./trace.js";
import { label, loadRecent } from "./recent.js";

const FRACTIONS = [
  0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1,
];
const MOST_TOKENS = 1024;

export async function loadStatus() {
  const { settings, defaults, methods, model, engines } = await api("status");
  Object.assign(state, { model, methods, schedules: Boolean(settings.decode?.schedule.length) });
  showOptions($("method"), methods, methods);
  showSettings({ policy: defaults.policy, budget: defaults.budget });
  const pool = engines[0].pool;
  showDefinitions($("server-facts"), [
    ["Model", model],
    ["Default", `${defaults.policy}, ${defaults.changed ? defaults.budget : settings.budget}`],
    ["KV cache", `${plural(pool.blocks, "block")} of ${pool.block_size} tokens`],
  ]);
}

// --- The form -----------------------------------------------------------------------------------

const budgetKind = () => document.querySelector("[name=budget-kind]:checked").value;
const fractionChosen = () => state.fractions[Number($("budget").value)];
const number = (id) => Number($(id).value);
const isWhole = (value, least, most) => Number.isInteger(value) && value >= least && value <= most;

function chooseFraction(fraction) {
  state.fractions = [...new Set([...FRACTIONS, fraction])].sort((a, b) => a - b);
  $("budget").max = String(state.fractions.length - 1);
  $("budget").value = String(state.fractions.indexOf(fraction));
}

/** Fill the form. @param {Settings} settings */
export function showSettings({ policy, budget, defer, schedule, ceiling }) {
  if (policy && state.methods.includes(policy)) $("method").value = policy;
  const text = String(budget ?? "");
  const value = Number(budget);
  if (text.startsWith("auto:")) state.auto = text;
  chooseFraction(value > 0 && value <= 1 ? value : 0.1);
  if (value > 1) $("budget-tokens").value = text;
  const kind = text.startsWith("auto:") ? "auto" : value > 1 ? "tokens" : "fraction";
  document.querySelector(`[name=budget-kind][value=${kind}]`).checked = true;
  $("defer").value = defer ?? "";
  if (schedule && schedule !== "none") $("schedule").value = schedule;
  if (ceiling) $("ceiling").value = ceiling;
  $("later").value = ceiling ? "ceiling" : schedule === "none" ? "none" : schedule ? "schedule" : "";
  showBudget();
}

export function showBudget() {
  const text = percent(fractionChosen());
  $("budget-value").textContent = text;
  $("budget").setAttribute("aria-valuetext", `${text} of the prompt`);
  const rows = { fraction: "fraction-row", tokens: "tokens-row", auto: "auto-note" };
  for (const [kind, id] of Object.entries(rows)) $(id).hidden = kind !== budgetKind();
  const kind = $("later").value;
  $("schedule-row").hidden = kind !== "schedule";
  $("ceiling-row").hidden = kind !== "ceiling";
  const replaced = kind === "schedule"; // which says both
  for (const control of [$("budget-kinds").parentElement, $("defer")]) control.disabled = replaced;
}

/** The budget that is chosen; null after saying what is wrong. */
function budgetChosen() {
  if (budgetKind() === "auto") return state.auto;
  if (budgetKind() === "fraction") return fractionChosen();
  const tokens = number("budget-tokens");
  if (isWhole(tokens, 2, 1e9)) return tokens;
  return refuse("Tokens per KV head: give a whole number, at least 2.", "budget-tokens");
}

/** How long to wait: null is as the server does; NaN after saying what is wrong. */
export function waitChosen() {
  const wait = $("defer").value === "" ? null : number("defer");
  if (wait === null || isWhole(wait, 0, MOST_TOKENS)) return wait;
  refuse(`Answer tokens to wait for: give a number up to ${MOST_TOKENS}.`, "defer");
  return NaN;
}

/**
 * How much is kept, and when. Null after saying what is wrong. The server checks schedules, and says
 * whether it may evict again.
 * @returns {Settings|null}
 */
function settingsChosen() {
  const kind = $("later").value;
  const policy = $("method").value || null;
  if (kind === "schedule") return { policy, schedule: $("schedule").value.trim() };
  const [budget, defer] = [budgetChosen(), waitChosen()];
  if (budget === null || Number.isNaN(defer)) return null;
  const first = { policy, budget, defer };
  if (kind !== "ceiling") return { ...first, schedule: kind || null };
  const ceiling = number("ceiling");
  if (isWhole(ceiling, 1, Infinity)) return { ...first, ceiling };
  return refuse("Ceiling, tokens per KV head: give a whole number, at least 1.", "ceiling");
}

/** What the form held last. @type {Asked|null} */
let latest = null;

/**
 * What the form holds. It is the same object as long as the question is, whatever is expected: so
 * all that was asked of it follows a change of that.
 * @returns {Asked}
 */
export function question() {
  const [text, start, expected] = ["question", "start", "expected"].map((id) => $(id).value.trim());
  const tokens = Math.trunc(number("max-tokens"));
  const form = { pictures: state.images, question: text, start, tokens };
  const isSame = (known) => known && Object.keys(form).every((key) => known[key] === form[key]);
  latest = [state.asked, latest].find(isSame) ?? form;
  return Object.assign(latest, { expected });
}

/** The same, if it can be asked; null after saying what is missing. @returns {Asked|null} */
export function questionToAsk() {
  const asked = question();
  if (!asked.pictures.length) return refuse("Choose an image first.", "file");
  if (!asked.question) return refuse("Write a question first.", "question");
  if (!isWhole(asked.tokens, 1, MOST_TOKENS)) {
    return refuse(`Answer tokens: give a number from 1 to ${MOST_TOKENS}.`, "max-tokens");
  }
  return asked;
}

/** Whether the last question was this one. @param {Asked} asked */
export const isAsked = (asked) => state.asked === asked;

// --- Asking -------------------------------------------------------------------------------------

/**
 * Ask the server one question; with `compare`, the full cache as well.
 *
 * @param {Asked} asked @param {Settings} settings @returns {Promise<Answers>}
 */
export async function send(asked, settings, compare, signal) {
  const body = JSON.stringify({
    image: asked.pictures.map(({ url }) => url),
    question: asked.question,
    start: asked.start,
    max_tokens: asked.tokens,
    tokens: true,
    compare,
    ...settings,
  });
  if (new Blob([body]).size > MOST_BYTES) throw new Error("This is larger than 32 MiB.");
  const answers = await post("ask", body, signal);
  const { trace, tokens } = answers.evicted;
  if (trace !== null) {
    remember(trace, asked, tokens);
    label(trace, asked.question);
  }
  return answers;
}

/** Ask what the form holds; with `again`, the evicted cache alone, if the full one has answered. */
export async function ask(again = false) {
  const asked = questionToAsk();
  const settings = asked && settingsChosen();
  if (!settings) return;
  const compare = !again || state.full === null;
  state.running?.abort();
  const running = (state.running = new AbortController());
  if (compare) Object.assign(state, { asked, full: null });
  showRunning();
  const started = performance.now();
  try {
    const { full, evicted } = await send(asked, settings, compare, running.signal);
    hideError();
    const seconds = (performance.now() - started) / 1000;
    Object.assign(state, { evicted, settings, seconds });
    if (compare) state.full = full;
    document.body.classList.remove("editing");
    showAnswers();
    if (compare) $("answers").scrollIntoView({ block: "nearest" });
    const isLine = $("ask").offsetParent === null; // of the form, on a phone: the button is gone
    if (isLine) $("answers-title").focus({ preventScroll: true });
    if (evicted.trace === null) closeTrace();
    else await openTrace(evicted.trace);
    loadRecent();
  } catch (error) {
    if (compare && state.running === running) {
      $("answers").hidden = true; // they answer another question
      closeTrace();
    }
    showError(error);
  } finally {
    if (state.running === running) state.running = null;
    showRunning();
  }
}

let askAgainTimer = 0;

/** After a change of method or budget, unless the form holds another question by now. */
export function askAgain() {
  clearTimeout(askAgainTimer);
  askAgainTimer = setTimeout(() => isAsked(question()) && ask(true), 250);
}

function showRunning() {
  const running = state.running !== null;
  $("cancel").hidden = !running;
  $("answers").setAttribute("aria-busy", String(running));
  document.body.classList.toggle("running", running);
  const asking = state.full ? "Asking the evicted cache\u2026" : "Asking both caches\u2026";
  $("progress").textContent = running ? asking : "";
}
