// SPDX-License-Identifier: Apache-2.0
/** The map of patches: what is kept, why, or the scores; over the image where it fits. */

import { $, count, element, percent, plural, wrap } from "./elements.js";
import { state, spans, shapeOf, named } from "./state.js";
import { EVICTED, EXPECTED, GROUND, colour, faded, reasonOf, showKeys, showRamp } from "./colours.js";

const MAP_PIXELS = 1120; // of the longer side
const SMALL_PIXELS = 168;
const ZOOMS = [1, 1.5, 2, 3, 4, 6];

/**
 * The picture a part may be laid over: it fits if each image is one part, and this one has a grid.
 * @returns {{pixels: ImageBitmap, places: Box[]}|null}  places: of the expected answer
 */
export function pictureUnder(trace, index = state.span) {
  const { pictures = [], expected } = state.questions.get(trace.id) ?? {};
  const fits = trace.vision.length === pictures.length && index < pictures.length;
  if (!fits || !shapeOf(trace.vision[index]).grid) return null;
  const { pixels, places } = pictures[index];
  return { pixels, places: places.get(expected) ?? [] };
}

/** Scores on a scale from 0 to 1: a square root, as few are large, up to the 99th percentile. */
function scaled(scores) {
  const known = scores.filter((score) => !Number.isNaN(score)).sort();
  const [low, high] = [known[0], known[Math.floor(0.99 * (known.length - 1))]];
  const part = (score) => Math.min(1, Math.max(0, (score - low) / (high - low || 1)));
  return scores.map((score) => Math.sqrt(part(score)));
}

/** The reason that most of the heads have that keep a token; null if none keeps it. */
export function mainReason(reasons, position) {
  let [found, most] = [null, 0];
  for (const { name, weights } of reasons) {
    if (weights[position] > most) [found, most] = [name, weights[position]];
  }
  return found;
}

/**
 * Draw one part of a prompt.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Span} span
 * @param {{kept: Float32Array, scores?: Float32Array|null, reasons?: Reasons|null,
 *   under?: {pixels: ImageBitmap, places: Box[]}|null, side?: number, fill?: (index: number) => string,
 *   patch?: number|null, frame?: boolean}} what  kept, scores and reasons of all tokens; side: pixels
 *   of the longer side; fill: colours in place of those of what is kept
 */
export function draw(canvas, span, what) {
  const { under = null, side = SMALL_PIXELS, fill = null, patch = null, frame = false } = what;
  const { rows, columns } = shapeOf(span);
  const within = (array) => array.subarray(span.start, span.start + span.length);
  const kept = within(what.kept);
  const scores = what.scores ? scaled(within(what.scores)) : null;
  const aspect = under ? under.pixels.width / under.pixels.height : columns / rows;
  canvas.width = Math.max(1, Math.round(side * Math.min(1, aspect)));
  canvas.height = Math.max(1, Math.round(side / Math.max(1, aspect)));
  const pen = canvas.getContext("2d");
  const box = boxes(columns, rows, canvas);
  pen.fillStyle = GROUND;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  if (under) {
    pen.filter = scores || what.reasons || fill ? "grayscale(1)" : "none";
    pen.drawImage(under.pixels, 0, 0, canvas.width, canvas.height);
    pen.filter = "none";
  }
  const ink = fill ?? ((index) => inkOf(index + span.start, index, kept, scores, what.reasons, under));
  const gap = under || canvas.width / columns < 4 ? 0 : 1;
  for (let index = 0; index < kept.length; index++) {
    const [left, top, width, height] = box(index);
    pen.fillStyle = ink(index);
    pen.fillRect(left, top, width - gap, height - gap);
  }
  if (frame) stroke(pen, edgesOf(kept, columns, box), "#ffc53d", side / 370);
  const dashes = side > SMALL_PIXELS ? [side / 70, side / 90] : [];
  const line = Math.max(1, side / 280);
  if (under) stroke(pen, placesOn(canvas, under, 1.5 * line), EXPECTED, line, dashes);
  if (patch !== null) {
    const path = new Path2D();
    path.rect(...box(patch));
    stroke(pen, path, "#ffffff", side / 224);
  }
}

function inkOf(position, index, kept, scores, reasons, under) {
  const part = kept[index];
  if (scores) {
    if (Number.isNaN(scores[index])) return "#6b7280";
    return colour(scores[index], under ? 0.78 : 1);
  }
  const shade = under ? `rgb(12 15 24 / ${0.72 * (1 - Math.sqrt(part))})` : null;
  if (reasons) {
    const reason = mainReason(reasons, position);
    if (reason) return faded(reasonOf(reason).colour, under ? 0.35 + 0.4 * part : 0.4 + 0.6 * part);
    return shade ?? EVICTED;
  }
  return shade ?? (part ? colour(0.3 + 0.7 * part) : EVICTED);
}

/** @returns {(index: number) => number[]} left, top, width and height of a patch */
export function boxes(columns, rows, { width, height }) {
  const cut = (number, of, size) => Math.round((number * size) / of);
  return (index) => {
    const [row, column] = [Math.floor(index / columns), index % columns];
    const [left, right] = [column, column + 1].map((n) => cut(n, columns, width));
    const [top, bottom] = [row, row + 1].map((n) => cut(n, rows, height));
    return [left, top, right - left, bottom - top];
  };
}

/** Rectangles at a distance around the expected answer, which stays free. */
function placesOn({ width, height }, { pixels, places }, gap) {
  const path = new Path2D();
  const [across, down] = [width / pixels.width, height / pixels.height];
  for (const [left, top, wide, high] of places) {
    const [x, y] = [left * across - gap, top * down - gap];
    path.rect(x, y, wide * across + 2 * gap, high * down + 2 * gap);
  }
  return path;
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
function stroke(pen, path, style, width, dashes = []) {
  pen.lineCap = "square";
  for (const [ink, line, pattern] of [[GROUND, 2 * width, []], [style, width, dashes]]) {
    Object.assign(pen, { strokeStyle: ink, lineWidth: line });
    pen.setLineDash(pattern);
    pen.stroke(path);
  }
}

// --- The large map ------------------------------------------------------------------------------

export function showMap() {
  const { trace, patch, kept, scores, reasons, zoom } = state;
  const span = spans(trace)[state.span];
  const under = pictureUnder(trace);
  const frame = shapeOf(span).grid && !reasons;
  const side = MAP_PIXELS * Math.min(2, zoom);
  draw($("map"), span, { kept, scores, reasons, under, side, patch, frame });
  $("place").hidden = !under?.places.length;
  $("place-line").style.borderColor = EXPECTED;
  showMapText(span, kept.subarray(span.start, span.start + span.length), under);
}

function showMapText(span, kept, under) {
  const { patch, scores, reasons } = state;
  const { grid } = shapeOf(span);
  const noun = grid ? "patches" : "tokens";
  const subject = scores ? "Scores" : reasons ? "Why kept" : `Kept ${noun}`;
  const title = `${subject}: ${named("layer")}, ${named("head")}`;
  const any = kept.filter((part) => part > 0).length;
  const summary = `${count(any)} of ${count(span.length)} ${noun} kept by at least one head`;
  $("map-title").textContent = title;
  $("map").setAttribute("aria-label", `${title}. ${summary}. Arrow keys move over the ${noun}.`);

  const framed = grid ? "Framed: kept by at least half of the heads" : "";
  if (scores) showRamp($("map-legend"), "low score", "high", framed);
  else if (reasons) showReasonKeys(reasons);
  else if (!under) showRamp($("map-legend"), "few heads keep it", "all", "Grey: none");
  else $("map-legend").replaceChildren(`The more heads keep a patch, the brighter. ${framed}`);
  $("map-said").textContent = patch === null ? summary : patchText(span, patch);
}

/** The reasons of this trace, in the order of the palette. */
function showReasonKeys(reasons) {
  const keys = reasons.map(({ name }) => {
    const { colour: ink, name: word, about } = reasonOf(name);
    return [ink, word, about];
  });
  const one = state.layer !== null && state.head !== null;
  showKeys($("map-legend"), keys, one ? "" : "Where heads differ: the most frequent reason.");
}

function patchText(span, patch) {
  const { kept, scores, reasons } = state;
  const position = span.start + patch;
  const { columns, grid } = shapeOf(span);
  const place = ` in row ${Math.floor(patch / columns)}, column ${patch % columns}`;
  const said = [
    `Token ${position}${grid ? place : ""}`,
    `kept by ${percent(kept[position])} of the heads`,
    Number.isFinite(scores?.[position]) ? `score ${scores[position].toPrecision(3)}` : "",
    ...(reasons ?? [])
      .filter(({ weights }) => weights[position] > 0)
      .map(({ name, weights }) => `${reasonOf(name).name} ${percent(weights[position])}`),
  ];
  return said.filter(Boolean).join(", ");
}

export function movePatch(index) {
  if (index === state.patch || !state.trace) return;
  state.patch = index;
  showMap();
}

export function onMapPointer(event) {
  const span = spans(state.trace)[state.span];
  const { rows, columns } = shapeOf(span);
  const box = $("map").getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
  const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
  const index = row * columns + column;
  movePatch(column >= 0 && column < columns && row >= 0 && index < span.length ? index : null);
}

export function onMapKey(event) {
  const span = spans(state.trace)[state.span];
  const { columns } = shapeOf(span);
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  const zooms = { "+": 1, "=": 1, "-": -1 };
  if (event.key === "Escape") movePatch(null);
  if (event.key in zooms && !event.ctrlKey && !event.metaKey) zoom(zooms[event.key]);
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  const next = state.patch === null ? 0 : state.patch + step;
  if (next < 0 || next >= span.length) return;
  movePatch(next);
  scrollToPatch(span, next);
}

/** Keep the chosen patch in sight of a map that is zoomed in. */
function scrollToPatch(span, patch) {
  const [frame, canvas] = [$("map-frame"), $("map")];
  const { rows, columns } = shapeOf(span);
  const [width, height] = [canvas.clientWidth / columns, canvas.clientHeight / rows];
  const [left, top] = [(patch % columns) * width, Math.floor(patch / columns) * height];
  const into = (from, size, seen, start) => Math.max(start + size - seen, Math.min(from, start));
  frame.scrollTo(
    into(frame.scrollLeft, width, frame.clientWidth, left),
    into(frame.scrollTop, height, frame.clientHeight, top),
  );
}

/** @param {-1|1} direction */
export const zoom = (direction) => zoomTo(ZOOMS.indexOf(state.zoom) + direction);

function zoomTo(index) {
  if (!(index in ZOOMS)) return;
  const [frame, before] = [$("map-frame"), state.zoom];
  state.zoom = ZOOMS[index];
  $("map").style.width = `${100 * state.zoom}%`;
  $("zoom-value").textContent = `${count(state.zoom, 1)}\u00d7`;
  $("zoom-out").disabled = index === 0;
  $("zoom-in").disabled = index === ZOOMS.length - 1;
  if (state.trace) showMap();
  // The middle stays where it is.
  const ratio = state.zoom / before;
  const middle = (start, size) => (start + size / 2) * ratio - size / 2;
  frame.scrollTo(middle(frame.scrollLeft, frame.clientWidth), middle(frame.scrollTop, frame.clientHeight));
}

/** As large as the expected answer fits into the frame, and in its middle. */
export function zoomToPlace() {
  const [frame, canvas] = [$("map-frame"), $("map")];
  const { pixels, places } = pictureUnder(state.trace);
  const [left, top] = [0, 1].map((axis) => Math.min(...places.map((box) => box[axis])));
  const [right, bottom] = [0, 1].map((axis) => Math.max(...places.map((box) => box[axis] + box[axis + 2])));
  const room = Math.min(pixels.width / (right - left), pixels.height / (bottom - top));
  zoomTo(ZOOMS.findLastIndex((number) => number <= Math.max(1, 0.95 * room)));
  const middle = (from, to, size, seen, whole) => ((from + to) / 2 / whole) * size - seen / 2;
  frame.scrollTo(
    middle(left, right, canvas.clientWidth, frame.clientWidth, pixels.width),
    middle(top, bottom, canvas.clientHeight, frame.clientHeight, pixels.height),
  );
}

// --- Small maps ---------------------------------------------------------------------------------

/** Every image of the prompt, if there are several, with what the chosen heads keep of it. */
export function showParts(choose) {
  const { trace, kept, scores, reasons } = state;
  const all = trace.vision.length > 1 ? trace.vision : [];
  const buttons = all.map((span, index) => {
    const canvas = element("canvas", "", "", { "aria-hidden": "true" });
    draw(canvas, span, { kept, scores, reasons, under: pictureUnder(trace, index) });
    const within = kept.subarray(span.start, span.start + span.length);
    const number = within.filter((part) => part > 0).length;
    const said = `Image ${index + 1}: ${count(number)} of ${plural(span.length, "token")}`;
    const button = wrap("button", "part", canvas, element("span", "", said));
    button.type = "button";
    button.setAttribute("aria-pressed", String(index === state.span));
    button.addEventListener("click", () => choose(index));
    return button;
  });
  const focused = [...$("parts").children].indexOf(document.activeElement);
  $("parts").replaceChildren(...buttons);
  $("parts").hidden = !all.length;
  $("parts").children[focused]?.focus();
}
