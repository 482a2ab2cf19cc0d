// SPDX-License-Identifier: Apache-2.0
/**
 * A question with its images, settings and answers, as a link or as a file. The link's part behind
 * `#` never leaves the browser. A file may hold a question without answers, to be asked.
 */

import { $, hideError, refuse, showError } from "./elements.js";
import { remember, state } from "./state.js";
import { pictureOf, showPictures } from "./picture.js";
import { question as questionInForm, showSettings } from "./question.js";
import { showAnswers } from "./answers.js";
import { closeTrace, loadLayers, openTrace } from "./trace.js";
import { comparisonRecord } from "./comparison.js";

export const FORMAT = "vllm-tgvkv inspector";
export const PREFIX = "#saved=";
const MOST_LINK = 500_000; // Chromium takes 2 MB, others less

/** Question, images, settings and answers that are shown. */
function record() {
  const { asked, settings, full, evicted, model } = state;
  const { pictures, ...others } = asked;
  const images = pictures.map(({ name, url, places }) => ({
    ...{ name, url, places: Object.fromEntries(places) },
  }));
  return { format: FORMAT, version: 2, model, images, ...others, settings, full, evicted };
}

/** A link that brings back what is shown; null if it would be too long. */
export async function linkOf() {
  const { evicted, ...others } = record();
  const short = { ...others, evicted: { ...evicted, tokens: null } };
  const bytes = await piped(new Blob([JSON.stringify(short)]), new CompressionStream("deflate-raw"));
  const text = Array.from(new Uint8Array(bytes), (byte) => String.fromCharCode(byte)).join("");
  const code = btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  if (code.length > MOST_LINK) {
    const size = Math.ceil(code.length / 1000);
    const images = state.asked.pictures.length > 1 ? "these images" : "this image";
    return refuse(`With ${images} the link has ${size} kB, too many. Save a file.`, "save-file");
  }
  return location.origin + location.pathname + PREFIX + code;
}

const piped = (blob, stream) => new Response(blob.stream().pipeThrough(stream)).arrayBuffer();

/** The same with the map that is shown, all of its layers, and the comparison. */
export async function fileOf() {
  const { trace, evicted } = state;
  const of = trace && trace.id === evicted.trace ? trace : null;
  const layers = of && (await loadLayers(of));
  const whole = { ...record(), trace: of, layers, comparison: comparisonRecord() };
  return new Blob([JSON.stringify(whole, null, 1)], { type: "application/json" });
}

/** What the page's address holds, if it is a record. */
export async function openLink(hash) {
  try {
    const code = hash.slice(PREFIX.length).replaceAll("-", "+").replaceAll("_", "/");
    const bytes = Uint8Array.from(atob(code), (character) => character.charCodeAt(0));
    const json = await piped(new Blob([bytes]), new DecompressionStream("deflate-raw"));
    await openRecord(JSON.parse(new TextDecoder().decode(json)));
  } catch {
    showError(new Error("This link is damaged: parts of it are missing. Copy all of it."));
  }
}

/** @param {Blob} file */
export async function openFile(file) {
  try {
    await openRecord(JSON.parse(await file.text()));
  } catch {
    showError(new Error(`${file.name} was not saved by this page.`));
  }
}

/** Bring a record back. It comes from anywhere, so whatever is wrong in it raises an error. */
export async function openRecord(saved) {
  if (saved.format !== FORMAT || ![1, 2].includes(saved.version)) throw new Error("another format");
  const pictures = await Promise.all((saved.images ?? [saved.image]).map(pictureOf));
  const { question, start = "", expected = "", tokens, settings, full, evicted } = saved;
  const texts = [question, start, expected, ...(full ? [full.text, evicted.text] : [])];
  if (texts.some((text) => typeof text !== "string")) throw new Error("no text");
  state.running?.abort();
  state.running = null; // so that what it asked does not close what is opened here
  $("question").value = question;
  $("start").value = start;
  $("expected").value = expected;
  $("max-tokens").value = String(tokens);
  hideError();
  showPictures(pictures);
  if (settings) showSettings(settings);
  if (full) await openAnswers({ ...saved, asked: questionInForm() });
  else showUnasked();
}

/** A question that waits to be asked. */
function showUnasked() {
  Object.assign(state, { asked: null, full: null, evicted: null });
  $("answers").hidden = true;
  closeTrace();
  $("ask").focus();
}

async function openAnswers({ asked, settings, full, evicted, trace = null, layers = null }) {
  Object.assign(state, { asked, settings, full, evicted, seconds: 0 });
  showAnswers();
  const address = location.hash;
  if (evicted.trace !== null) {
    remember(evicted.trace, asked, evicted.tokens);
    const known = trace && { trace, layers };
    // The server may not have this trace any more, or be another one: then there is no map.
    await openTrace(evicted.trace, null, known).catch(closeTrace);
  } else {
    closeTrace();
  }
  if (address.startsWith(PREFIX)) history.replaceState(null, "", address);
}

/** Let the reader save a file. @param {Blob} blob */
export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The map with its title, as a PNG. @returns {Promise<Blob>} */
export function pictureOfMap() {
  const map = $("map");
  const canvas = document.createElement("canvas");
  const line = Math.round(map.width / 28);
  Object.assign(canvas, { width: map.width, height: map.height + 3 * line });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = "#15181e";
  const { policy, budget } = state.trace;
  const write = (text, row, weight) => {
    pen.font = `${weight} ${Math.round(0.72 * line)}px system-ui, sans-serif`;
    pen.fillText(text, line / 2, row * line, canvas.width - line);
  };
  write(`${$("map-title").textContent} (${policy}, ${budget})`, 1, 600);
  write($("map-said").textContent, 2, 400);
  pen.drawImage(map, 0, 3 * line);
  return new Promise((done) => canvas.toBlob(done));
}
