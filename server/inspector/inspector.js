// SPDX-License-Identifier: Apache-2.0
/**
 * The inspector page: which control starts which action. Data flows one way:
 *
 *   control -> action (ask, openTrace, select, ...) -> server -> `state` -> show...() -> document
 *
 * Actions change `state`; functions named `show...` change the document from it, and nothing else.
 * Whatever takes long gives way to a newer wish: questions by an AbortController, traces and maps
 * by a counter. Text from the server or the user is only ever set as `textContent`.
 */

import { $, showError } from "./elements.js";
import { state } from "./state.js";
import { takePictures } from "./picture.js";
import { fillSample } from "./sample.js";
import { ask, askAgain, loadStatus, question, showBudget, showSettings } from "./question.js";
import { keepLabels, loadRecent, showRecent } from "./recent.js";
import { openTrace, select, selectPart, selectView, updateMap, updateThumbnails } from "./trace.js";
import { movePatch, onMapKey, onMapPointer, zoom, zoomToPlace } from "./map.js";
import { showAnswers } from "./answers.js";
import { cellAfter, cellOf, focusCell, sayCell } from "./pages.js";
import { compareAll, showComparison, stopComparing } from "./comparison.js";
import { pin, unpin } from "./pins.js";
import { PREFIX, download, fileOf, linkOf, openFile, openLink, pictureOfMap } from "./record.js";
import { asCurl, asPython, copy } from "./code.js";

const RECENT_EVERY_MS = 15_000;

const on = (id, type, action) => $(id).addEventListener(type, action);

/** Open the trace or the record that the page's address names. */
async function openFromAddress() {
  if (location.hash.startsWith(PREFIX)) return openLink(location.hash);
  const id = decodeURIComponent(location.hash.slice(1));
  if (!id || id === state.trace?.id) return;
  try {
    await openTrace(id);
    showRecent();
    $("trace-title").focus();
  } catch (error) {
    showError(error);
  }
}

/** Take files that were chosen or dropped: images, or one that this page saved. */
function take(files) {
  const saved = files.find((file) => file.type === "application/json");
  return saved ? openFile(saved) : takePictures(files);
}

/** Take the files of an input, which can then be chosen again. */
function takeFrom(id) {
  const files = [...$(id).files];
  $(id).value = "";
  if (files.length) take(files);
}

/** Judge the answers that are shown by what is expected now, if they are to the form's question. */
function judge() {
  question();
  if (state.full && !$("answers").hidden) showAnswers();
  if (state.trace) updateMap();
  showComparison();
}

function chooseCell(layer, head) {
  if (focusCell(layer, head)) select(layer, head);
}

function onPagesKey(event) {
  if (event.key === "Escape") select(null, null);
  const target = cellAfter(event);
  if (!target) return;
  event.preventDefault();
  chooseCell(...target);
}

/** Show a text to take along, and copy it if the browser allows that. */
async function offer(name, text) {
  if (text === null) return;
  $("offer").hidden = false;
  $("offer-text").value = text;
  $("offer-text").setAttribute("aria-label", name);
  const copied = await copy(text);
  $("offer-said").textContent = copied ? `${name}: copied.` : `${name}: select it and copy.`;
  if (!copied) $("offer-text").select();
}

function listenToForm() {
  on("form", "submit", (event) => {
    event.preventDefault();
    ask();
  });
  on("question", "keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
  });
  on("cancel", "click", () => state.running?.abort());
  for (const id of ["file", "saved-file"]) on(id, "change", () => takeFrom(id));
  on("sample", "click", () => fillSample().catch(showError));
  on("expected", "change", judge);
  on("form", "input", showBudget);
  const kept = ["defer", "later", "schedule", "ceiling", "budget-tokens"];
  for (const id of ["budget", "budget-kinds", "method", ...kept]) on(id, "change", askAgain);
  on("refresh", "click", loadRecent);
  on("labels", "change", () => keepLabels($("labels").checked));
  on("edit", "click", () => {
    document.body.classList.toggle("editing");
    $("edit").setAttribute("aria-expanded", String(document.body.classList.contains("editing")));
  });
}

function listenToTrace() {
  const chosen = (id) => (Number($(id).value) ? Number($(id).value) - 1 : null);
  for (const id of ["layer", "head"]) {
    on(id, "input", () => select(chosen("layer"), chosen("head")));
  }
  on("cut", "input", () => openTrace(state.trace.id, Number($("cut").value)).catch(showError));
  on("span", "change", () => selectPart(Number($("span").value)));
  on("view", "change", () => selectView($("view").value));
  on("map", "pointermove", onMapPointer);
  on("map", "pointerleave", () => movePatch(null));
  on("map", "blur", () => movePatch(null));
  on("map", "keydown", onMapKey);
  on("zoom-in", "click", () => zoom(1));
  on("zoom-out", "click", () => zoom(-1));
  on("zoom-place", "click", zoomToPlace);
  on("thumbnails-open", "toggle", () => updateThumbnails().catch(showError));
  on("pages", "keydown", onPagesKey);
  on("pages", "pointerover", sayCell);
  on("pages", "focusin", sayCell);
  on("pages", "click", (event) => chooseCell(...cellOf(event)));
  on("all", "click", () => {
    $("pages").querySelector('[tabindex="0"]').focus(); // the button goes
    select(null, null);
  });
  on("pin-a", "click", () => pin("a"));
  on("pin-b", "click", () => pin("b"));
  on("unpin", "click", unpin);
}

function listenToKeeping() {
  const name = () => `kv-eviction-${state.trace?.policy ?? state.evicted.policy}`;
  const failing = (action) => () => action().catch(showError);
  on("compare", "click", compareAll);
  on("compare-stop", "click", stopComparing);
  on("copy-link", "click", failing(async () => offer("Link", await linkOf())));
  on("copy-curl", "click", failing(() => offer("curl", asCurl())));
  on("copy-python", "click", failing(() => offer("Python", asPython())));
  on("save-file", "click", failing(async () => download(await fileOf(), `${name()}.json`)));
  on("save-map", "click", failing(async () => download(await pictureOfMap(), `${name()}.png`)));
}

function listenToDocument() {
  document.addEventListener("paste", (event) => {
    const items = [...event.clipboardData.items].filter((item) => item.type.startsWith("image/"));
    if (items.length) takePictures(items.map((item) => item.getAsFile()), "Pasted image");
  });
  for (const type of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(type, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      $("drop").classList.toggle("over", type === "dragover");
      if (type === "drop") take([...event.dataTransfer.files]);
    });
  }
  window.addEventListener("hashchange", openFromAddress);
  const refresh = () => document.hidden || loadRecent();
  document.addEventListener("visibilitychange", refresh);
  setInterval(refresh, RECENT_EVERY_MS);
}

showSettings({ policy: null, budget: 0.1 });
for (const listen of [listenToForm, listenToTrace, listenToKeeping, listenToDocument]) listen();
// A record's settings need the server's methods, and stay in place of its defaults.
loadStatus().catch(showError).then(openFromAddress);
loadRecent();
