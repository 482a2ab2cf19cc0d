// SPDX-License-Identifier: Apache-2.0
/** Two maps that the reader pins, and what only one of them keeps. */

import { $, count, plural } from "./elements.js";
import { named, shapeOf, spans, state } from "./state.js";
import { DIFFERENCE, EVICTED, showKeys } from "./colours.js";
import { boxes, draw } from "./map.js";

/** From this part of the chosen heads on, a token counts as kept. */
const MOST_HEADS = 0.5;

/** Pin what the map shows. @param {"a"|"b"} side */
export function pin(side) {
  const { trace, kept } = state;
  const cut = trace.cuts.length > 1 ? `, cut ${trace.cut + 1}` : "";
  state.pins[side] = {
    title: `${trace.policy}, ${trace.budget}${cut}, ${named("layer")}, ${named("head")}`,
    prompt: trace.prompt_tokens,
    spans: spans(trace),
    kept,
  };
  showPins();
}

export function unpin() {
  Object.assign(state.pins, { a: null, b: null });
  $("pin-a").focus();
  showPins();
}

/** Which of both keeps each token of a part: "both", "a", "b" or null. */
function comparePins(span) {
  const { a, b } = state.pins;
  return Array.from({ length: span.length }, (_, index) => {
    const [inA, inB] = [a, b].map(({ kept }) => kept[span.start + index] >= MOST_HEADS);
    return inA && inB ? "both" : inA ? "a" : inB ? "b" : null;
  });
}

const layout = (pinned) =>
  JSON.stringify([pinned.prompt, pinned.spans.slice(0, -1).map(({ start, length }) => [start, length])]);

export function showPins() {
  const { a, b } = state.pins;
  $("pins").hidden = !a && !b;
  $("pinned-a").textContent = a?.title ?? "nothing yet";
  $("pinned-b").textContent = b?.title ?? "nothing yet";
  const comparable = a && b && layout(a) === layout(b);
  $("difference").hidden = !comparable;
  $("pins-note").hidden = !a || !b || comparable;
  if (!comparable || !state.trace) return;
  const span = a.spans[state.span] ?? a.spans[0];
  const kept = comparePins(span);
  const number = (side) => kept.filter((found) => found === side).length;
  const canvas = $("difference");
  const fill = (index) => DIFFERENCE[kept[index]] ?? EVICTED;
  draw(canvas, span, { kept: a.kept, side: 672, fill }); // no image, which would tint the colours
  hatch(canvas, span, kept);
  const said =
    `${count(number("both"))} kept in both, ${count(number("a"))} only in A, ` +
    `${count(number("b"))} only in B, of ${plural(span.length, "token")}`;
  canvas.setAttribute("aria-label", `Difference of A and B: ${said}`);
  $("difference-said").textContent = said;
  showKeys(
    $("difference-legend"),
    [
      [DIFFERENCE.both, "both", ""],
      [DIFFERENCE.a, "only A", "strokes rise"],
      [DIFFERENCE.b, "only B", "strokes fall"],
    ],
    "A head or at least half of several heads keep it.",
  );
}

/** Strokes in what only one map keeps, for readers who cannot go by colours. */
function hatch(canvas, span, kept) {
  const pen = canvas.getContext("2d");
  const { rows, columns } = shapeOf(span);
  const box = boxes(columns, rows, canvas);
  pen.strokeStyle = "#12151c";
  pen.lineWidth = Math.max(1, canvas.width / columns / 10);
  kept.forEach((side, index) => {
    if (side !== "a" && side !== "b") return;
    const [left, top, width, height] = box(index);
    const [from, to] = side === "a" ? [top + height, top] : [top, top + height];
    pen.beginPath();
    pen.moveTo(left, from);
    pen.lineTo(left + width, to);
    pen.stroke();
  });
}
