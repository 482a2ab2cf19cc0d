// SPDX-License-Identifier: Apache-2.0
/**
 * The inspector page. Data flows one way:
 *
 *   control -> action (ask, openTrace, select, ...) -> server -> `state` -> show...() -> document
 *
 * Actions change `state`; functions named `show...` change the document from it, and nothing else.
 * Whatever takes long gives way to a newer wish: questions by an AbortController, traces and maps
 * by a counter. Text from the server or the user is only ever set as `textContent`.
 *
 * @typedef {{answer_tokens: number, blocks_before: number, blocks_after: number,
 *   kept_tokens: number}} Cut  answer_tokens: tokens of the answer at the time
 * @typedef {{id: string, policy: string, budget: string, granularity: "layer"|"head",
 *   time: number, prompt_tokens: number, kept_tokens: number, blocks_before: number,
 *   blocks_after: number, cuts: Cut[]}} Summary
 * @typedef {{start: number, length: number, grid: [number, number]|null}} Span  rows, columns
 * @typedef {Summary & {cut: number, block_size: number, layers: number, kv_heads: number,
 *   vision: Span[], pages: number[][], kept_by: number[]}} Trace  of one cut, by its index: pages
 *   by layer and head; how many of the layers x heads keep a token of the prompt and of the part of
 *   the answer that the cut could evict
 * @typedef {{heads: number[], positions: number[], scores: (number|null)[]}} TokenSet
 * @typedef {{layer: number, token_sets: TokenSet[]}} Layer
 * @typedef {{text: string, blocks: number}} Full
 * @typedef {Full & {policy: string, budget: number|string, defer: number,
 *   decode: {schedule?: [number, number][], max_tokens?: number}|null, prompt_tokens: number,
 *   kept_tokens: number|null, blocks_before: number, cuts: Cut[], skip_reason: string|null,
 *   trace: string|null}} Evicted
 * @typedef {{model: string, full: Full|null, evicted: Evicted}} Answers
 * @typedef {{name: string, url: string, pixels: ImageBitmap}} Picture  url: with the data in it
 */

const FRACTIONS = [
  0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1,
];
const MOST_BYTES = 32 * 2 ** 20;
const MOST_PIXELS = 64e6;
const MOST_TOKENS = 1024;
const REMEMBERED_PICTURES = 20;
const RECENT_EVERY_MS = 15_000;
const MAP_PIXELS = 1120; // of the longer side

const SKIP_REASONS = {
  policy_none: "the method \u201cnone\u201d keeps the whole cache",
  text_only: "the prompt has no image",
  prompt_too_short: "the prompt is too short for it",
  budget_covers_prompt: "the budget holds the whole prompt",
  single_token: "an answer of one token does not read the cache again; allow more answer tokens",
  answer_too_short: "the answer ended before the wait for it did; lower kv_eviction_defer",
  pool_too_small: "the server's cache cannot hold the prompt and what is kept at the same time",
  method_needs_vision: "this method measures attention to images, and there are none",
  unknown_patch_grid: "the method pools over a grid of patches that is not known for this image",
  invalid_request: "the server did not understand the request's options",
  policy_failed: "the method failed, and the request with it; the server's log says how",
  unsupported_request: "requests of this kind cannot be evicted",
};

const state = {
  /** @type {Picture|null} */ picture: null,
  fractions: FRACTIONS,
  auto: "auto:0.98",
  /** What `full` answers. @type {{picture: Picture, question: string, tokens: number}|null} */
  asked: null,
  /** @type {Full|null} */ full: null,
  /** @type {Evicted|null} */ evicted: null,
  seconds: 0,
  /** @type {AbortController|null} */ running: null,
  /** @type {Summary[]} */ recent: [],
  /** @type {Trace|null} */ trace: null,
  /** Of the trace. @type {Map<number, Promise<Layer>>} */ layers: new Map(),
  /** Of requests made on this page, by trace. @type {Map<string, Picture>} */ pictures: new Map(),
  /** Null is all. @type {number|null} */ layer: null,
  /** Null is all. @type {number|null} */ head: null,
  /** Index in `spans`. */ span: 0,
  /** Under the pointer or chosen by key. @type {number|null} */ patch: null,
  /** By token, the part of the chosen heads that keep it. */ kept: new Float32Array(0),
  /** By token, NaN where there is none. @type {Float32Array|null} */ scores: null,
  opening: 0,
  drawing: 0,
};

const $ = (id) => document.getElementById(id);
const count = (number, digits = 0) =>
  number.toLocaleString("en-GB", { maximumFractionDigits: digits });
const percent = (part) => `${count(100 * part, part > 0 && part < 0.1 ? 1 : 0)}\u00a0%`;
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const budgetName = (budget) => (Number(budget) <= 1 ? percent(Number(budget)) : String(budget));

/** @param {Record<string, string>} attributes  beside class and text */
function element(name, className = "", content = "", attributes = {}) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = content;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function wrap(name, className, ...children) {
  const made = element(name, className);
  made.append(...children);
  return made;
}

function showDefinitions(target, pairs) {
  const entries = pairs.map(([name, value]) =>
    wrap("div", "", element("dt", "", name), element("dd", "", value)),
  );
  target.replaceChildren(...entries);
}

function showOptions(target, names, values = names.map((_, index) => index)) {
  const options = names.map((name, i) => element("option", "", name, { value: values[i] }));
  target.replaceChildren(...options);
}

// --- Server -------------------------------------------------------------------------------------

/** @returns {Promise<any>} the answer's JSON; throws an Error with a message for the reader */
async function api(path, options = {}) {
  let response;
  try {
    // Not relative to the document, whose URL may carry a user name, which `fetch` refuses.
    response = await fetch(new URL(path, location.origin + location.pathname), options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Error("The server did not answer. Is it running, and is the network up? Try again.");
  }
  const body = await response.json().catch(() => null);
  options.signal?.throwIfAborted();
  if (!response.ok) throw new Error(explain(response.status, body));
  if (body === null) throw new Error("The server's answer could not be read. Try again.");
  return body;
}

function explain(status, body) {
  const detail = body?.error?.message ?? body?.detail ?? "";
  const said = Array.isArray(detail) ? detail.map((item) => item.msg).join("; ") : detail;
  const known = {
    400: `The server could not use this request: ${said}`,
    401: "The server wants its API key. Reload the page and give the key as the password.",
    404: "This request is not there (any more): the server keeps the latest traces only.",
    409: `The server cannot do this: ${said}`,
    413: `This is too large for the server: ${said}`,
    422: `The server did not accept this request: ${said}`,
  };
  return known[status] ?? `The server failed with status ${status}. ${said}`;
}

function showError(error) {
  if (error.name === "AbortError") return;
  const close = element("button", "link", "Dismiss", { type: "button" });
  close.addEventListener("click", hideError);
  $("alert").replaceChildren(element("p", "", error.message), close);
  $("alert").scrollIntoView({ block: "nearest" });
}

const hideError = () => $("alert").replaceChildren();

async function loadStatus() {
  const { settings, defaults, methods, model, engines } = await api("status");
  showOptions($("method"), methods, methods);
  $("method").value = defaults.policy;
  const fraction = Number(defaults.budget);
  if (fraction > 0 && fraction <= 1) {
    state.fractions = [...new Set([...FRACTIONS, fraction])].sort((a, b) => a - b);
  } else if (String(defaults.budget).startsWith("auto:")) {
    state.auto = defaults.budget;
    document.querySelector("[name=budget-kind][value=auto]").checked = true;
  }
  $("budget").max = String(state.fractions.length - 1);
  $("budget").value = String(state.fractions.indexOf(fraction <= 1 ? fraction : 0.1));
  showBudget();
  const pool = engines[0].pool;
  showDefinitions($("server-facts"), [
    ["Model", model],
    ["Default", `${defaults.policy}, ${defaults.changed ? defaults.budget : settings.budget}`],
    ["KV cache", `${plural(pool.blocks, "block")} of ${pool.block_size} tokens`],
  ]);
}

// --- Picture ------------------------------------------------------------------------------------

/** @param {Blob} file */
async function takePicture(file, name = file.name) {
  try {
    const most = (3 * MOST_BYTES) / 4; // base64 makes four characters of three bytes
    if (file.size > most) throw new Error(`${name} is larger than ${most / 2 ** 20} MiB.`);
    const pixels = await createImageBitmap(file).catch(() => {
      throw new Error(`${name} is not an image that can be read. Choose a PNG, JPEG or WebP file.`);
    });
    const number = pixels.width * pixels.height;
    if (number > MOST_PIXELS) {
      throw new Error(`${name} has ${count(number / 1e6, 1)} megapixels; 64 can be sent.`);
    }
    state.picture = { name, pixels, url: await dataUrl(file) };
    hideError();
    showPicture();
  } catch (error) {
    showError(error);
  }
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error("The file could not be read."));
    reader.readAsDataURL(file);
  });
}

function showPicture() {
  const { name, pixels, url } = state.picture;
  $("preview").src = url;
  $("preview").hidden = false;
  $("drop").classList.add("filled");
  $("file-name").textContent = name;
  $("file-hint").textContent = `${pixels.width} \u00d7 ${pixels.height} px, change it`;
}

/** A page with something to read, for those who have no image at hand. */
function drawSample() {
  const canvas = element("canvas", "", "", { width: 336, height: 336 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#f3efe4";
  pen.fillRect(0, 0, 336, 336);
  pen.font = '27px "DejaVu Sans", Verdana, sans-serif';
  pen.fillStyle = "#22304a";
  const keys = [..."ABCDEFGHJKLMNPRSTUVWXYZ"].sort(() => Math.random() - 0.5).slice(0, 4);
  keys.forEach((key, index) => {
    const value = Math.floor(1e4 + 9e4 * Math.random());
    pen.fillText(`${key}:${value}`, 14 + (index % 2) * 140, 31 + index * 84);
  });
  $("question").value = `What is the value of ${keys[1]}?`;
  canvas.toBlob((blob) => takePicture(blob, "Sample page"));
}

// --- Ask ----------------------------------------------------------------------------------------

const isAuto = () => document.querySelector("[name=budget-kind]:checked").value === "auto";
const fractionChosen = () => state.fractions[Number($("budget").value)];

/**
 * How much is kept, and when: fields of the question. Null after saying what is wrong. The server
 * checks schedules, and says whether it may evict again.
 */
function laterChosen() {
  const kind = $("later").value;
  if (kind === "schedule") return { schedule: $("schedule").value.trim() };
  const number = (id) => Number($(id).value);
  const wait = $("defer").value === "" ? null : number("defer");
  if (wait !== null && !(Number.isInteger(wait) && wait >= 0 && wait <= MOST_TOKENS)) {
    return refuse(`Answer tokens to wait for: give a number up to ${MOST_TOKENS}.`, "defer");
  }
  const first = { budget: isAuto() ? state.auto : fractionChosen(), defer: wait };
  if (kind !== "ceiling") return { ...first, schedule: kind || null };
  for (const id of ["ceiling", "buffer"]) {
    if (!(Number.isInteger(number(id)) && number(id) >= 1)) {
      return refuse("A ceiling and its growth are whole numbers, at least 1.", id);
    }
  }
  return { ...first, ceiling: number("ceiling"), buffer: number("buffer") };
}

/** What the form holds. @returns {state["asked"]} */
function question() {
  const tokens = Math.trunc(Number($("max-tokens").value));
  return { picture: state.picture, question: $("question").value.trim(), tokens };
}

/** Ask the server; with `again`, the evicted cache alone, if there is an answer of the full one. */
async function ask(again = false) {
  const asked = question();
  if (!asked.picture) return refuse("Choose an image first.", "file");
  if (!asked.question) return refuse("Write a question first.", "question");
  if (!(asked.tokens >= 1 && asked.tokens <= MOST_TOKENS)) {
    return refuse(`Answer tokens: give a number from 1 to ${MOST_TOKENS}.`, "max-tokens");
  }
  const later = laterChosen();
  if (later === null) return;
  const compare = !again || state.full === null;
  const body = JSON.stringify({
    image: asked.picture.url,
    question: asked.question,
    policy: $("method").value || null,
    max_tokens: asked.tokens,
    compare,
    ...later,
  });
  if (new Blob([body]).size > MOST_BYTES) return refuse("This is larger than 32 MiB.", "file");

  state.running?.abort();
  const running = (state.running = new AbortController());
  if (compare) Object.assign(state, { asked, full: null });
  showRunning();
  const started = performance.now();
  try {
    const headers = { "Content-Type": "application/json" };
    /** @type {Answers} */
    const { full, evicted } = await api("ask", {
      ...{ method: "POST", headers, body, signal: running.signal },
    });
    hideError();
    Object.assign(state, { evicted, seconds: (performance.now() - started) / 1000 });
    if (compare) state.full = full;
    showAnswers();
    if (compare) $("answers").scrollIntoView({ block: "nearest" }); // on a phone, below the form
    if (evicted.trace === null) {
      closeTrace();
    } else {
      remember(evicted.trace, asked.picture);
      await openTrace(evicted.trace);
    }
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

function refuse(message, id) {
  showError(new Error(message));
  $(id).focus();
  return null;
}

function remember(id, picture) {
  state.pictures.set(id, picture);
  const oldest = state.pictures.keys().next().value;
  if (state.pictures.size > REMEMBERED_PICTURES) state.pictures.delete(oldest);
}

let askAgainTimer = 0;

/** After a change of method or budget, unless the form holds another question by now. */
function askAgain() {
  clearTimeout(askAgainTimer);
  askAgainTimer = setTimeout(() => {
    const [asked, now] = [state.asked, question()];
    if (asked && Object.keys(now).every((key) => asked[key] === now[key])) ask(true);
  }, 250);
}

function showRunning() {
  const running = state.running !== null;
  $("cancel").hidden = !running;
  $("answers").setAttribute("aria-busy", String(running));
  document.body.classList.toggle("running", running);
  const asking = state.full ? "Asking the evicted cache\u2026" : "Asking both caches\u2026";
  $("progress").textContent = running ? asking : "";
}

function showBudget() {
  const text = percent(fractionChosen());
  $("budget-value").textContent = text;
  $("budget").setAttribute("aria-valuetext", `${text} of the prompt`);
  $("fraction-row").hidden = isAuto();
  $("auto-note").hidden = !isAuto();
  const kind = $("later").value;
  $("schedule-row").hidden = kind !== "schedule";
  $("ceiling-row").hidden = kind !== "ceiling";
  const replaced = kind === "schedule"; // which says both
  for (const control of [$("budget-kinds").parentElement, $("defer")]) control.disabled = replaced;
}

/** What follows the first eviction, in words. @param {Evicted["decode"]} decode */
function laterName(decode) {
  if (!decode) return "";
  const { schedule, max_tokens: ceiling } = decode;
  return schedule ? `, then in steps to ${budgetName(schedule.at(-1)[1])}` : `, then ${ceiling} tokens`;
}

/** When a cut was made, and what it did. @param {Cut} cut */
function cutName({ answer_tokens: tokens, blocks_before: before, blocks_after: after }) {
  const when = tokens ? `After ${plural(tokens, "token")} of the answer` : "Before the answer";
  return `${when}: ${count(before)} \u2192 ${plural(after, "block")}`;
}

/** Whether to say when the cache was cut: not if it was cut once, before the answer. */
const areTimed = (cuts) => cuts.length > 1 || cuts[0]?.answer_tokens > 0;

function showAnswers() {
  const { full, evicted } = state;
  const { blocks, blocks_before: before, kept_tokens: kept, skip_reason: reason } = evicted;
  $("welcome").hidden = true;
  $("answers").hidden = false;
  $("saved").textContent = percent(Math.max(0, 1 - blocks / before));
  const tokens = kept === null ? "" : `: ${count(kept)} of ${count(evicted.prompt_tokens)} tokens`;
  $("saved-note").textContent = `${count(blocks)} of ${plural(before, "block")} held${tokens}`;
  // A square for each block, as long as they can be told apart.
  const squares = Math.min(before, 80);
  const held = Math.ceil((blocks / before) * squares);
  $("blocks").replaceChildren(
    ...Array.from({ length: squares }, (_, index) => element("i", index < held ? "held" : "")),
  );
  $("cuts").hidden = !areTimed(evicted.cuts);
  $("cuts").replaceChildren(...evicted.cuts.map((cut) => element("li", "", cutName(cut))));
  $("skip").hidden = reason === null;
  $("skip").textContent = `Nothing was evicted: ${SKIP_REASONS[reason] ?? reason}.`;

  const [left, right] = differences(full.text, evicted.text);
  showMarked($("full-text"), left, "missing");
  showMarked($("evicted-text"), right, "other");
  $("full-blocks").textContent = plural(full.blocks, "block");
  $("evicted-blocks").textContent = plural(blocks, "block");
  const same = full.text === evicted.text;
  const verdict = same ? "Both answers are the same" : "The answers differ where marked";
  $("verdict").className = `note verdict ${same ? "same" : "differs"}`;
  $("verdict").textContent =
    `${verdict}. ${evicted.policy} at ${budgetName(evicted.budget)}${laterName(evicted.decode)}, ` +
    `answered in ${state.seconds.toFixed(1)} s.`;
  $("spoken").textContent =
    `${verdict}. Full cache: ${full.text}. After eviction: ${evicted.text}. ` +
    `${$("saved").textContent} less memory.`;
}

/** @param {[string, boolean][]} pieces */
function showMarked(target, pieces, className) {
  const marked = (text) => element("mark", className, text);
  const nodes = pieces.map(([text, differs]) => (differs ? marked(text) : text));
  target.replaceChildren(...(nodes.length ? nodes : [element("em", "", "(no text)")]));
  target.classList.toggle("long", target.textContent.length > 60);
}

/**
 * Both texts in pieces, those that the other one lacks marked true: words, or single characters
 * where neither text has a space.
 * @returns {[[string, boolean][], [string, boolean][]]}
 */
function differences(one, other) {
  const words = /\s/.test(one + other);
  const [a, b] = [one, other].map((text) => (words ? (text.match(/\s+|\S+/g) ?? []) : [...text]));
  const pairs = longestCommon(a, b);
  return [a, b].map((parts, side) => {
    const shared = new Set(pairs.map((pair) => pair[side]));
    const pieces = [];
    parts.forEach((part, index) => {
      const differs = !shared.has(index);
      if (pieces.at(-1)?.[1] === differs) pieces.at(-1)[0] += part;
      else pieces.push([part, differs]);
    });
    return pieces;
  });
}

/** Index pairs of a longest common subsequence; of the common start only, if both are long. */
function longestCommon(a, b) {
  const pairs = [];
  let start = 0;
  while (start < a.length && a[start] === b[start]) pairs.push([start, start++]);
  if ((a.length - start) * (b.length - start) > 4e6) return pairs;
  const width = b.length + 1;
  const length = new Uint16Array((a.length + 1) * width); // of what follows both indices
  for (let i = a.length - 1; i >= start; i--) {
    for (let j = b.length - 1; j >= start; j--) {
      const [below, right] = [length[(i + 1) * width + j], length[i * width + j + 1]];
      const both = length[(i + 1) * width + j + 1] + 1;
      length[i * width + j] = a[i] === b[j] ? both : Math.max(below, right);
    }
  }
  for (let i = start, j = start; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) pairs.push([i++, j++]);
    else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
    else j++;
  }
  return pairs;
}

// --- Traces -------------------------------------------------------------------------------------

async function loadRecent() {
  try {
    state.recent = (await api("requests")).requests;
    showRecent();
  } catch {
    // The list is a convenience: what is wrong is said when somebody asks or opens a trace.
  }
}

function showRecent() {
  const focused = document.activeElement?.dataset.id;
  const items = state.recent.map((summary) => {
    const { id, policy, budget, blocks_before: before, blocks_after: after, cuts, time } = summary;
    const said = cuts.length > 1 ? `, ${plural(cuts.length, "cut")}` : "";
    const link = wrap(
      ...["a", "", element("strong", "", `${policy}, ${budget}`)],
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

/**
 * Show a trace at one of its cuts, by default the last one; layer, head and part of the prompt stay
 * as they are, where they exist.
 */
async function openTrace(id, cut = null) {
  const opening = ++state.opening;
  /** @type {Trace} */
  const trace = await api(`requests/${encodeURIComponent(id)}${cut === null ? "" : `?cut=${cut}`}`);
  if (opening !== state.opening) return;
  Object.assign(state, { trace, layers: new Map(), patch: null });
  if (state.layer >= trace.layers) state.layer = null;
  if (state.head >= trace.kv_heads) state.head = null;
  if (state.span >= trace.vision.length) state.span = 0;
  const address = `#${encodeURIComponent(id)}`;
  if (location.hash !== address) history.replaceState(null, "", address);
  $("answers").hidden = state.evicted?.trace !== id;
  showTrace();
  await updateMap();
}

/** Open the trace that the page's address names. */
async function openFromAddress() {
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

function closeTrace() {
  state.opening++;
  state.trace = null;
  $("trace").hidden = true;
  history.replaceState(null, "", location.pathname);
}

/** The parts that can be shown; the last one is all tokens of the trace. */
const spans = (trace) => [...trace.vision, { start: 0, length: trace.kept_by.length, grid: null }];

/** Rows and columns to draw; tokens without a grid are written like text, in a square. */
function shapeOf(/** @type {Span} */ { length, grid }) {
  if (grid && grid[0] * grid[1] === length) return { rows: grid[0], columns: grid[1], grid: true };
  const columns = Math.ceil(Math.sqrt(length));
  return { rows: Math.ceil(length / columns), columns, grid: false };
}

function showTrace() {
  const trace = state.trace;
  const cut = trace.cuts[trace.cut];
  $("welcome").hidden = true;
  $("trace").hidden = false;
  showCut(trace);
  $("trace-about").textContent = `${trace.policy}, ${trace.budget}, ${clock(trace.time)}`;
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
  $("span").value = String(state.span);
  showPages(trace);
}

/** Which cut is shown; the slider is there if there are several. @param {Trace} trace */
function showCut({ cuts, cut }) {
  const said = cutName(cuts[cut]);
  $("cut-field").hidden = cuts.length === 1;
  $("cut").max = String(cuts.length - 1);
  $("cut").value = String(cut);
  $("cut").setAttribute("aria-valuetext", `${cut + 1} of ${cuts.length}. ${said}`);
  $("cut-value").textContent = `${cut + 1} of ${cuts.length}`;
  $("cut-said").hidden = !areTimed(cuts);
  $("cut-said").textContent = said;
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
function select(layer, head) {
  // Scores of different layers do not compare, so there is no map of all of them.
  if (layer === null) $("scores").checked = false;
  Object.assign(state, { layer, head });
  updateMap();
}

/** @returns {Promise<Layer>} */
function loadLayer(trace, layer) {
  const layers = state.layers;
  if (!layers.has(layer)) {
    const path = `requests/${encodeURIComponent(trace.id)}/layers/${layer}?cut=${trace.cut}`;
    layers.set(layer, api(path));
    layers.get(layer).catch(() => layers.delete(layer));
  }
  return layers.get(layer);
}

/** Work out what the chosen layer and head keep, and draw it. */
async function updateMap() {
  const drawing = ++state.drawing;
  const { trace, layer, head } = state;
  showChoice();
  try {
    const pairs = trace.layers * trace.kv_heads;
    let kept = Float32Array.from(trace.kept_by, (number) => number / pairs);
    let scores = null;
    if (layer !== null || (head !== null && trace.granularity === "head")) {
      const wanted = layer === null ? trace.pages.map((_, index) => index) : [layer];
      if (wanted.some((index) => !state.layers.has(index))) await pause(80); // a slider on its way
      if (drawing !== state.drawing) return;
      const loaded = await Promise.all(wanted.map((index) => loadLayer(trace, index)));
      if (drawing !== state.drawing) return;
      kept = keptIn(trace, loaded, head);
      if (layer !== null && $("scores").checked) scores = scoresIn(trace, loaded[0], head);
    }
    Object.assign(state, { kept, scores });
    showMap();
  } catch (error) {
    if (drawing === state.drawing) showError(error);
  }
}

/** By token, the part of the layers' heads - or, for one head, of the layers - that keep it. */
function keptIn(trace, layers, head) {
  const kept = new Float32Array(trace.kept_by.length);
  for (const { heads, positions } of layers.flatMap((layer) => layer.token_sets)) {
    const part = head === null ? heads.length / trace.kv_heads : Number(heads.includes(head));
    if (part) for (const position of positions) kept[position] += part / layers.length;
  }
  return kept;
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

/** @param {"layer"|"head"} kind */
const named = (kind) => (state[kind] === null ? `all ${kind}s` : `${kind} ${state[kind]}`);

function showChoice() {
  const { layer, head } = state;
  for (const [id, value] of Object.entries({ layer, head })) {
    $(id).value = String(value === null ? 0 : value + 1);
    $(id).setAttribute("aria-valuetext", named(id));
    $(`${id}-value`).textContent = value === null ? "all" : String(value);
  }
  for (const cell of $("pages").querySelectorAll("[role=gridcell]")) {
    const inLayer = layer === null || Number(cell.dataset.layer) === layer;
    const inHead = head === null || Number(cell.dataset.head) === head;
    const chosen = inLayer && inHead && (layer !== null || head !== null);
    cell.setAttribute("aria-selected", String(chosen));
  }
  $("all").disabled = layer === null && head === null;
}

// --- Maps ---------------------------------------------------------------------------------------

/** Violet, green, yellow, the lightness rising evenly, by way of OKLCH. 0 <= x <= 1. */
function colour(x, alpha = 1) {
  const light = 0.28 + 0.64 * x;
  const chroma = 0.11 + 0.06 * x;
  const hue = ((295 - 190 * x) * Math.PI) / 180;
  const [a, b] = [chroma * Math.cos(hue), chroma * Math.sin(hue)];
  const l = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (light - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const channels = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((value) => Math.round(255 * Math.min(1, Math.max(0, value)) ** (1 / 2.2)));
  return `rgb(${channels.join(" ")} / ${alpha})`;
}

function showLegend(target, low, high, note) {
  const steps = Array.from({ length: 24 }, (_, step) => {
    const piece = element("i");
    piece.style.backgroundColor = colour(step / 23);
    return piece;
  });
  const [from, to] = [low, high].map((text) => element("span", "", text));
  target.replaceChildren(from, wrap("span", "ramp", ...steps), to, element("span", "note", note));
}

/** The picture a part may be laid over: only a single image with a grid is sure to fit. */
function pictureUnder(trace) {
  const fits = trace.vision.length === 1 && state.span === 0 && shapeOf(trace.vision[0]).grid;
  return fits ? (state.pictures.get(trace.id)?.pixels ?? null) : null;
}

/** Scores on a scale from 0 to 1: a square root, as few are large, up to the 99th percentile. */
function scaled(scores) {
  const known = scores.filter((score) => !Number.isNaN(score)).sort();
  const [low, high] = [known[0], known[Math.floor(0.99 * (known.length - 1))]];
  const part = (score) => Math.min(1, Math.max(0, (score - low) / (high - low || 1)));
  return scores.map((score) => Math.sqrt(part(score)));
}

function showMap() {
  const { trace, patch } = state;
  const span = spans(trace)[state.span];
  const { rows, columns, grid } = shapeOf(span);
  const within = (array) => array.subarray(span.start, span.start + span.length);
  const kept = within(state.kept);
  const scores = state.scores && scaled(within(state.scores));
  const under = pictureUnder(trace);

  const canvas = $("map");
  const aspect = under ? under.width / under.height : columns / rows;
  canvas.width = Math.round(MAP_PIXELS * Math.min(1, aspect));
  canvas.height = Math.round(MAP_PIXELS / Math.max(1, aspect));
  const pen = canvas.getContext("2d");
  /** Left, top, width, height of a patch. */
  const box = (index) => {
    const [row, column] = [Math.floor(index / columns), index % columns];
    const [left, right] = [column, column + 1].map((n) => Math.round((n * canvas.width) / columns));
    const [top, bottom] = [row, row + 1].map((n) => Math.round((n * canvas.height) / rows));
    return [left, top, right - left, bottom - top];
  };
  pen.fillStyle = "#12151c";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  if (under) {
    pen.filter = scores ? "grayscale(1)" : "none";
    pen.drawImage(under, 0, 0, canvas.width, canvas.height);
    pen.filter = "none";
  }
  kept.forEach((part, index) => {
    if (scores) pen.fillStyle = colour(scores[index] || 0, under ? 0.78 : 1);
    else if (under) pen.fillStyle = `rgb(12 15 24 / ${0.72 * (1 - Math.sqrt(part))})`;
    else pen.fillStyle = part ? colour(0.3 + 0.7 * part) : "#2a303c";
    if (scores && Number.isNaN(scores[index])) pen.fillStyle = "#6b7280";
    const [left, top, width, height] = box(index);
    const gap = under ? 0 : 1;
    pen.fillRect(left, top, width - gap, height - gap);
  });
  if (grid) stroke(pen, edgesOf(kept, columns, box), "#ffc53d", 3);
  if (patch !== null) {
    const frame = new Path2D();
    frame.rect(...box(patch));
    stroke(pen, frame, "#ffffff", 5);
  }
  showMapText(span, kept, under);
}

/** The line around what at least half of the heads keep. */
function edgesOf(kept, columns, box) {
  const path = new Path2D();
  kept.forEach((part, index) => {
    if (part < 0.5) return;
    const [left, top, width, height] = box(index);
    const [right, bottom] = [left + width, top + height];
    const column = index % columns;
    const outside = (other) => !(kept[other] >= 0.5);
    const edges = [
      [column === 0 || outside(index - 1), left, top, left, bottom],
      [column === columns - 1 || outside(index + 1), right, top, right, bottom],
      [outside(index - columns), left, top, right, top],
      [outside(index + columns), left, bottom, right, bottom],
    ];
    for (const [isEdge, fromX, fromY, toX, toY] of edges) {
      if (!isEdge) continue;
      path.moveTo(fromX, fromY);
      path.lineTo(toX, toY);
    }
  });
  return path;
}

/** A line that can be seen on any ground. */
function stroke(pen, path, style, width) {
  pen.lineCap = "square";
  for (const [ink, line] of [["#12151c", 2 * width], [style, width]]) {
    Object.assign(pen, { strokeStyle: ink, lineWidth: line });
    pen.stroke(path);
  }
}

function showMapText(span, kept, under) {
  const { patch, scores } = state;
  const { columns, grid } = shapeOf(span);
  const noun = grid ? "patches" : "tokens";
  const title = `${scores ? "Scores" : `Kept ${noun}`}: ${named("layer")}, ${named("head")}`;
  const any = kept.filter((part) => part > 0).length;
  const summary = `${count(any)} of ${count(span.length)} ${noun} kept by at least one head`;
  $("map-title").textContent = title;
  $("map").setAttribute("aria-label", `${title}. ${summary}. Arrow keys move over the ${noun}.`);

  const framed = grid ? "Framed: kept by at least half of the heads" : "";
  if (scores) showLegend($("map-legend"), "low score", "high", framed);
  else if (!under) showLegend($("map-legend"), "few heads keep it", "all", "Grey: none");
  else $("map-legend").replaceChildren(`The more heads keep a patch, the brighter. ${framed}`);

  $("map-said").textContent = summary;
  if (patch === null) return;
  const position = span.start + patch;
  const place = `row ${Math.floor(patch / columns)}, column ${patch % columns}`;
  const said = [
    `Token ${position}${grid ? ` in ${place}` : ""}`,
    `kept by ${percent(kept[patch])} of the heads`,
    Number.isFinite(scores?.[position]) ? `score ${scores[position].toPrecision(3)}` : "",
  ];
  $("map-said").textContent = said.filter(Boolean).join(", ");
}

function movePatch(index) {
  if (index === state.patch || !state.trace) return;
  state.patch = index;
  showMap();
}

function onMapPointer(event) {
  const span = spans(state.trace)[state.span];
  const { rows, columns } = shapeOf(span);
  const box = $("map").getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
  const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
  const index = row * columns + column;
  movePatch(column >= 0 && column < columns && row >= 0 && index < span.length ? index : null);
}

function onMapKey(event) {
  const span = spans(state.trace)[state.span];
  const { columns } = shapeOf(span);
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  const step = steps[event.key];
  if (event.key === "Escape") movePatch(null);
  if (!step) return;
  event.preventDefault();
  const next = state.patch === null ? 0 : state.patch + step;
  if (next >= 0 && next < span.length) movePatch(next);
}

/** The heat map: a row for each layer, a cell for each of its heads. @param {Trace} trace */
function showPages(trace) {
  const most = Math.max(1, ...trace.pages.flat());
  const height = Math.min(44, Math.max(9, 560 / trace.layers));
  const layerStep = Math.ceil(15 / height);
  const headStep = Math.ceil(trace.kv_heads / 16);
  const heads = trace.pages[0].map((_, head) => {
    const name = head % headStep ? "" : String(head);
    return element("span", "", name, { role: "columnheader", "aria-label": `head ${head}` });
  });
  const rows = trace.pages.map((numbers, layer) => {
    const name = layer % layerStep ? "" : String(layer);
    const header = element("span", "", name, { role: "rowheader", "aria-label": `layer ${layer}` });
    return wrap(
      ...["div", "row", header],
      ...numbers.map((pages, head) => pageCell(layer, head, pages, most)),
    );
  });
  const grid = $("pages");
  grid.replaceChildren(wrap("div", "row", element("span", "corner"), ...heads), ...rows);
  for (const row of grid.children) row.setAttribute("role", "row");
  grid.style.setProperty("--cell", `${height}px`);
  grid.classList.toggle("dense", height < 20 || trace.kv_heads > 16);
  grid.querySelector("[role=gridcell]").tabIndex = 0;
  const whole = count(Math.floor(trace.kept_by.length / trace.block_size));
  const note = `${whole} ${trace.cut ? "without eviction" : "before"}; a page holds ${trace.block_size} tokens`;
  showLegend($("pages-legend"), "0 pages", count(most), note);
  $("pages-said").textContent = "Choose a cell to see what its head keeps.";
}

function pageCell(layer, head, pages, most) {
  const said = `Layer ${layer}, head ${head}: ${plural(pages, "page")}`;
  const attributes = { role: "gridcell", tabindex: "-1", "aria-label": said, title: said };
  const cell = element("span", pages / most > 0.5 ? "bright" : "", String(pages), attributes);
  Object.assign(cell.dataset, { layer, head });
  cell.style.backgroundColor = colour(pages / most);
  return cell;
}

function chooseCell(layer, head) {
  const cell = $("pages").querySelector(`[data-layer="${layer}"][data-head="${head}"]`);
  if (!cell) return;
  for (const other of $("pages").querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  cell.tabIndex = 0;
  cell.focus();
  select(layer, head);
}

function onPagesKey(event) {
  const [layer, head] = cellOf(event);
  const { layers, kv_heads: heads } = state.trace;
  const target = {
    ArrowUp: [layer - 1, head],
    ArrowDown: [layer + 1, head],
    ArrowLeft: [layer, head - 1],
    ArrowRight: [layer, head + 1],
    Home: [layer, 0],
    End: [layer, heads - 1],
    PageUp: [0, head],
    PageDown: [layers - 1, head],
    Enter: [layer, head],
    " ": [layer, head],
  }[event.key];
  if (event.key === "Escape") select(null, null);
  if (!target) return;
  event.preventDefault();
  chooseCell(...target);
}

/** Layer and head of the cell an event is about; NaN if it is about none. */
const cellOf = ({ target }) => [Number(target.dataset.layer), Number(target.dataset.head)];

function sayCell(event) {
  const [layer, head] = cellOf(event);
  const { pages, block_size: size } = state.trace;
  const tokens = pages[layer]?.[head] * size;
  if (tokens >= 0) $("pages-said").textContent = `${event.target.title}, ${count(tokens)} tokens`;
}

// --- Start --------------------------------------------------------------------------------------

function listen() {
  const on = (id, type, action) => $(id).addEventListener(type, action);
  on("form", "submit", (event) => {
    event.preventDefault();
    ask();
  });
  on("question", "keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
  });
  on("cancel", "click", () => state.running?.abort());
  on("file", "change", () => $("file").files[0] && takePicture($("file").files[0]));
  on("sample", "click", drawSample);
  on("form", "input", showBudget);
  const kept = ["defer", "later", "schedule", "ceiling", "buffer"];
  for (const id of ["budget", "budget-kinds", "method", ...kept]) on(id, "change", askAgain);
  on("refresh", "click", loadRecent);

  const chosen = (id) => (Number($(id).value) ? Number($(id).value) - 1 : null);
  for (const id of ["layer", "head"]) {
    on(id, "input", () => select(chosen("layer"), chosen("head")));
  }
  on("cut", "input", () => openTrace(state.trace.id, Number($("cut").value)).catch(showError));
  on("span", "change", () => {
    Object.assign(state, { span: Number($("span").value), patch: null });
    updateMap();
  });
  on("scores", "change", () => {
    select($("scores").checked ? (state.layer ?? 0) : state.layer, state.head);
  });
  on("map", "pointermove", onMapPointer);
  on("map", "pointerleave", () => movePatch(null));
  on("map", "blur", () => movePatch(null));
  on("map", "keydown", onMapKey);
  on("pages", "keydown", onPagesKey);
  on("pages", "pointerover", sayCell);
  on("pages", "focusin", sayCell);
  on("pages", "click", (event) => chooseCell(...cellOf(event)));
  on("all", "click", () => {
    $("pages").querySelector('[tabindex="0"]').focus(); // the button goes
    select(null, null);
  });

  document.addEventListener("paste", (event) => {
    const items = [...event.clipboardData.items];
    const image = items.find((item) => item.type.startsWith("image/"));
    if (image) takePicture(image.getAsFile(), "Pasted image");
  });
  for (const type of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(type, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      $("drop").classList.toggle("over", type === "dragover");
      if (type === "drop") takePicture(event.dataTransfer.files[0]);
    });
  }
  window.addEventListener("hashchange", openFromAddress);
  const refresh = () => document.hidden || loadRecent();
  document.addEventListener("visibilitychange", refresh);
  setInterval(refresh, RECENT_EVERY_MS);
}

$("budget").max = String(FRACTIONS.length - 1);
$("budget").value = String(FRACTIONS.indexOf(0.1));
showBudget();
listen();
loadStatus().catch(showError);
loadRecent();
openFromAddress();
