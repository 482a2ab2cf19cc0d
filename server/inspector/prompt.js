// SPDX-License-Identifier: Apache-2.0
/** The prompt's text, token by token, kept or evicted. Its words are in this page only. */

import { $, count, element, percent, plural, wrap } from "./elements.js";
import { state } from "./state.js";
import { reasonOf } from "./colours.js";
import { mainReason } from "./map.js";

const MOST_SHOWN = 3000;

export function showPrompt() {
  const { trace } = state;
  const { prompt_tokens: prompt, cuts } = trace;
  const texts = state.tokens.get(trace.id);
  $("prompt").hidden = !texts;
  if (!texts) return;
  const starts = new Map(trace.vision.map((span, index) => [span.start, [span, index]]));
  const pieces = [];
  // The cut cannot evict the answer's tokens unless there is a ceiling; those before it stay.
  const reached = Math.max(state.kept.length, prompt + cuts[trace.cut].answer_tokens);
  const total = Math.min(texts.length, reached);
  let position = 0;
  for (; position < total && pieces.length < MOST_SHOWN; ) {
    const [span, index] = starts.get(position) ?? [];
    if (span) pieces.push(imagePiece(span, index));
    else pieces.push(tokenPiece(texts[position], position));
    position += span ? span.length : 1;
  }
  const left = texts.length - position;
  const behind = position < total ? "are not shown" : "of the answer came after this cut";
  if (left > 0) pieces.push(element("span", "note", ` ${plural(left, "token")} ${behind}.`));
  $("prompt-text").replaceChildren(...pieces);
}

function tokenPiece(text, position) {
  const { trace, reasons } = state;
  const kept = state.kept[position] ?? 1;
  const stays = kept >= 0.5;
  const piece = element(stays ? "span" : "del", "token", shown(text));
  const reason = reasons && mainReason(reasons, position);
  const why = reason ? `, ${reasonOf(reason).name}` : "";
  const part = position >= trace.prompt_tokens ? " of the answer" : "";
  piece.title = `Token ${position}${part}, kept by ${percent(kept)} of the heads${why}`;
  if (reason) {
    piece.style.setProperty("--reason", reasonOf(reason).colour);
    piece.classList.add("reasoned");
  }
  return piece;
}

/** White space that can be seen. */
const shown = (text) => text.replaceAll("\n", "\u21b5\n") || "\u2205";

function imagePiece({ start, length }, index) {
  const within = state.kept.subarray(start, start + length);
  const mean = within.reduce((sum, part) => sum + part, 0);
  const said = `image ${index + 1}: ${count(mean, 1)} of ${plural(length, "token")}`;
  return wrap("span", "token image", said);
}
