// SPDX-License-Identifier: Apache-2.0
/** The trace that is open: which layer, head, cut and part of it is shown. */

import { $, clock, count, element, pause, percent, plural, showDefinitions } from "./elements.js";
import { showError, showOptions, wrap } from "./elements.js";
import { api, tracePath } from "./server.js";
import { state, spans, shapeOf, named } from "./state.js";
import { REASONS } from "./colours.js";
import { areTimed, cutName } from "./answers.js";
import { showMap, showParts } from "./map.js";
import { showChosenCells, showPages, showThumbnails } from "./pages.js";
import { showPrompt } from "./prompt.js";
import { showPins } from "./pins.js";

/** Last characters of an answer that are shown beside a step. */
const MOST_OF_ANSWER = 90;

/**
 * Show a trace at one of its cuts, by default the last one; layer, head and part of the prompt stay
 * as they are, where they exist.
 *
 * @param {{trace: Trace, layers?: Layer[]}|null} known  what need not be asked
 */
export async function openTrace(id, cut = null, known = null) {
  const opening = ++state.opening;
  /** @type {Trace} */
  const trace = known?.trace ?? (await api(tracePath(id, cut)));
  if (opening !== state.opening) return;
  const layers = (known?.layers ?? []).map((layer) => [layer.layer, Promise.resolve(layer)]);
  Object.assign(state, { trace, layers: new Map(layers), patch: null });
  if (state.layer >= trace.layers) state.layer = null;
  if (state.head >= trace.kv_heads) state.head = null;
  if (state.span >= trace.vision.length) state.span = 0;
  const address = `#${encodeURIComponent(id)}`;
  if (location.hash !== address) history.replaceState(null, "", address);
  $("answers").hidden = state.evicted?.trace !== id;
  showTrace();
  await updateMap();
}

export function closeTrace() {
  state.opening++;
  state.trace = null;
  $("trace").hidden = true;
  history.replaceState(null, "", location.pathname);
}

function showTrace() {
  const trace = state.trace;
  const cut = trace.cuts[trace.cut];
  $("welcome").hidden = true;
  $("trace").hidden = false;
  document.body.classList.add("answered");
  showCut(trace);
  const wait = trace.cuts[0].answer_tokens;
  const waited = wait ? `, waited for ${plural(wait, "token")} of the answer` : "";
  $("trace-about").textContent = `${trace.policy}, ${trace.budget}${waited}, ${clock(trace.time)}`;
  showDefinitions($("numbers"), [
    ["Prompt tokens", count(trace.prompt_tokens)],
    ["Kept, mean of heads", count(cut.kept_tokens)],
    ["Blocks before", count(cut.blocks_before)],
    ["Blocks after", count(cut.blocks_after)],
  ]);
  showShares(trace);
  $("layer").max = String(trace.layers);
  $("head").max = String(trace.kv_heads);
  const names = spans(trace).map((span, index) => {
    const whole = span.length > trace.prompt_tokens ? "Prompt and answer" : "Whole prompt";
    if (index === trace.vision.length) return `${whole}, ${plural(span.length, "token")}`;
    const { rows, columns, grid } = shapeOf(span);
    const size = grid ? `${rows} \u00d7 ${columns} patches` : plural(span.length, "token");
    return `Image ${index + 1}, ${size}`;
  });
  showOptions($("span"), names);
  showPages(trace);
}

/** Which cut is shown; the slider is there if there are several. @param {Trace} trace */
function showCut({ id, cuts, cut, prompt_tokens: prompt }) {
  const said = cutName(cuts[cut]);
  $("cut-field").hidden = cuts.length === 1;
  // Choices by recall are no cuts.
  $("cut-kind").textContent = cuts.some((each) => each.recalled_tokens != null) ? "Step" : "Cut";
  $("cut").max = String(cuts.length - 1);
  $("cut").value = String(cut);
  $("cut").setAttribute("aria-valuetext", `${cut + 1} of ${cuts.length}. ${said}`);
  $("cut-value").textContent = `${cut + 1} of ${cuts.length}`;
  $("cut-said").hidden = !areTimed(cuts);
  $("cut-said").textContent = said;
  // Of requests made on this page.
  const answer = state.tokens.get(id)?.slice(prompt, prompt + cuts[cut].answer_tokens) ?? [];
  $("cut-answer").hidden = !answer.length;
  $("cut-answer").lastElementChild.textContent = answer.join("").slice(-MOST_OF_ANSWER);
}

/** How much of text, images and answer is kept, mean over layers and heads. */
function showShares(trace) {
  const mean = (tokens) =>
    tokens.reduce((sum, number) => sum + number, 0) / (trace.layers * trace.kv_heads);
  const vision = trace.vision.flatMap(({ start, length }) =>
    trace.kept_by.slice(start, start + length),
  );
  const prompt = trace.kept_by.slice(0, trace.prompt_tokens);
  const answer = trace.kept_by.slice(trace.prompt_tokens);
  const rows = [
    ["Image", mean(vision), vision.length],
    ["Text", mean(prompt) - mean(vision), prompt.length - vision.length],
    ...(answer.length ? [["Answer", mean(answer), answer.length]] : []),
  ].map(([name, kept, of]) => {
    const fill = element("i");
    fill.style.width = `${(100 * kept) / (of || 1)}%`;
    const said = `${count(kept, 1)} of ${plural(of, "token")} (${percent(kept / (of || 1))})`;
    const bar = wrap("span", "bar", fill);
    return wrap("div", "share", element("strong", "", name), bar, element("span", "", said));
  });
  $("shares").replaceChildren(...rows);
}

/** Choose a layer and a head; null is all of them. */
export function select(layer, head) {
  // Scores of different layers do not compare, so there is no map of all of them.
  if (layer === null && state.view === "scores") state.view = "kept";
  Object.assign(state, { layer, head });
  updateMap();
}

/** @param {"kept"|"reasons"|"scores"} view */
export function selectView(view) {
  state.view = view;
  select(view === "scores" ? (state.layer ?? 0) : state.layer, state.head);
}

/** Choose an image, or the whole prompt, by its index in `spans`. */
export function selectPart(span) {
  Object.assign(state, { span, patch: null });
  updateMap();
}

/** @returns {Promise<Layer>} */
export function loadLayer(trace, layer) {
  const layers = state.layers;
  if (!layers.has(layer)) {
    layers.set(layer, api(tracePath(trace.id, trace.cut, layer)));
    layers.get(layer).catch(() => layers.delete(layer));
  }
  return layers.get(layer);
}

export const loadLayers = (trace) =>
  Promise.all(trace.pages.map((_, layer) => loadLayer(trace, layer)));

/** Work out what the chosen layer and head keep, and draw it. */
export async function updateMap() {
  const drawing = ++state.drawing;
  const { trace, layer, head, view } = state;
  showChoice();
  try {
    const pairs = trace.layers * trace.kv_heads;
    let kept = Float32Array.from(trace.kept_by, (number) => number / pairs);
    let [scores, reasons] = [null, null];
    const ofHead = head !== null && trace.granularity === "head";
    if (layer !== null || ofHead || view === "reasons") {
      const wanted = layer === null ? trace.pages.map((_, index) => index) : [layer];
      if (wanted.some((index) => !state.layers.has(index))) await pause(80); // a slider on its way
      if (drawing !== state.drawing) return;
      const loaded = await Promise.all(wanted.map((index) => loadLayer(trace, index)));
      if (drawing !== state.drawing) return;
      kept = keptIn(trace, loaded, head);
      if (view === "scores") scores = scoresIn(trace, loaded[0], head);
      if (view === "reasons") reasons = reasonsIn(trace, loaded, head);
    }
    Object.assign(state, { kept, scores, reasons });
    showMap();
    showParts(selectPart);
    showPrompt();
    showPins();
    await updateThumbnails();
  } catch (error) {
    if (drawing === state.drawing) showError(error);
  }
}

/** Draw the small maps if they are open. */
export async function updateThumbnails() {
  const { trace, span, drawing } = state;
  if (!trace || !$("thumbnails-open").open) return;
  const layers = await loadLayers(trace);
  if (trace === state.trace && span === state.span && drawing === state.drawing) {
    showThumbnails(layers, select);
  }
}

/** The part of the chosen heads that a token set stands for, of some layers. */
const weightOf = (trace, heads, head, layers) =>
  (head === null ? heads.length / trace.kv_heads : Number(heads.includes(head))) / layers.length;

/** By token, the part of the layers' heads - or, for one head, of the layers - that keep it. */
function keptIn(trace, layers, head) {
  const kept = new Float32Array(trace.kept_by.length);
  for (const { heads, positions } of layers.flatMap((layer) => layer.token_sets)) {
    const part = weightOf(trace, heads, head, layers);
    if (part) for (const position of positions) kept[position] += part;
  }
  return kept;
}

/** The reasons there are, and by token how many heads keep it for each. @returns {Reasons} */
function reasonsIn(trace, layers, head) {
  const found = new Map();
  for (const { heads, reasons } of layers.flatMap((layer) => layer.token_sets)) {
    const part = weightOf(trace, heads, head, layers);
    for (const [name, positions] of part ? Object.entries(reasons) : []) {
      if (!found.has(name)) found.set(name, new Float32Array(trace.kept_by.length));
      for (const position of positions) found.get(name)[position] += part;
    }
  }
  const order = Object.keys(REASONS);
  const place = (name) => (order.includes(name) ? order.indexOf(name) : order.indexOf("preferred"));
  return [...found]
    .map(([name, weights]) => ({ name, weights }))
    .sort((one, other) => place(one.name) - place(other.name));
}

/** By token, the mean score of the heads; NaN where there is none: in the tail, and if evicted. */
function scoresIn(trace, layer, head) {
  const sets = layer.token_sets.filter(({ heads }) => head === null || heads.includes(head));
  const mean = (_, position) => {
    const known = sets.map(({ scores }) => scores[position]).filter(Number.isFinite);
    return known.reduce((sum, score) => sum + score, 0) / known.length;
  };
  return Float32Array.from({ length: trace.kept_by.length }, mean);
}

function showChoice() {
  const { layer, head } = state;
  for (const [id, value] of Object.entries({ layer, head })) {
    $(id).value = String(value === null ? 0 : value + 1);
    $(id).setAttribute("aria-valuetext", named(id));
    $(`${id}-value`).textContent = value === null ? "all" : String(value);
  }
  $("view").value = state.view;
  $("span").value = String(state.span);
  showChosenCells();
  $("all").disabled = layer === null && head === null;
}
