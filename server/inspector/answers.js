// SPDX-License-Identifier: Apache-2.0
/** The answers of both caches, and what the eviction gave back. */

import { $, budgetName, count, element, percent, plural, wrap } from "./elements.js";
import { state } from "./state.js";
import { SIGNS, byPosition, differences, holds, verdictOf } from "./differences.js";

const VERDICTS = {
  same: "Both answers are the same",
  "same up to here": "Both answers are the same up to where one of them ends",
  different: "The answers differ where marked",
};

const SKIP_REASONS = {
  policy_none: "the method \u201cnone\u201d keeps the whole cache",
  text_only: "the prompt has no image",
  prompt_too_short: "the prompt is too short for it",
  budget_covers_prompt: "the budget holds the whole prompt",
  single_token: "an answer of one token does not read the cache again; allow more answer tokens",
  answer_too_short: "the answer ended before the wait did; lower \u201cAnswer tokens to wait for\u201d",
  pool_too_small: "the server's cache cannot hold the prompt and what is kept at the same time",
  auto_too_long: "the prompt is too long for the budget \u201cAutomatic\u201d; give a fraction",
  method_needs_vision: "this method measures attention to images, and there are none",
  unknown_patch_grid: "the method pools over a grid of patches that is not known for this image",
  invalid_request: "the server did not understand the request's options",
  handed_over_whole: "another server decodes it, and cuts it if memory is short there",
  policy_failed: "the method failed, and the request with it; the server's log says how",
  unsupported_request: "requests of this kind cannot be evicted",
};

/** The verdict on the evicted cache's answer as a sentence, without its full stop. */
function verdictName(verdict, full, expected) {
  if (!expected) return VERDICTS[verdict];
  const isFullRight = holds(full, expected);
  if (verdict !== "right") {
    return `${VERDICTS[verdict]}; ${isFullRight ? "only the full cache\u2019s is" : "neither is"} right`;
  }
  return isFullRight ? "Both answers are right" : "Only the answer after eviction is right";
}

/** What follows the first eviction, in words. @param {Evicted["decode"]} decode */
function laterName(decode) {
  if (!decode) return "";
  const { schedule, max_tokens: ceiling } = decode;
  if (schedule) return `, then in steps to ${budgetName(schedule.at(-1)[1])}`;
  return `, then ${ceiling} tokens per KV head`;
}

/** When a cut or a choice was made, and what it did. @param {Cut} cut */
export function cutName({
  answer_tokens: tokens,
  blocks_before: before,
  blocks_after: after,
  cause,
  recalled_tokens: recalled,
}) {
  const when = tokens ? `After ${plural(tokens, "token")} of the answer` : "Before the answer";
  if (recalled != null) return `${when}: ${recalled.toFixed(1)} tokens per KV head came back`;
  const why = {
    pressure: ", memory was short",
    restored: ", all came back",
    preempted: ", preempted: computed again",
  }[cause] ?? "";
  return `${when}${why}: ${count(before)} \u2192 ${plural(after, "block")}`;
}

/** Whether to say when the cache was cut: not if it was cut once, before the answer. */
export const areTimed = (cuts) => cuts.length > 1 || cuts[0]?.answer_tokens > 0;

/** Of all layers, those included that eviction does not reach. @param {Evicted} evicted */
export const memoryKept = ({ blocks, blocks_before: before, memory }) =>
  Math.min(1, memory ? memory.after / memory.before : blocks / before);

/** What eviction does not reach, in words. @param {Evicted} evicted */
function fixedName({ memory }) {
  const fixed = memory ? memory.windows + memory.states + (memory.drafts ?? 0) : 0;
  return fixed ? `; windows, states and drafts keep ${percent(fixed / memory.before)} of the memory` : "";
}

export function showAnswers() {
  const { full, evicted } = state;
  const { blocks, blocks_before: before, kept_tokens: kept, skip_reason: reason } = evicted;
  $("welcome").hidden = true;
  $("answers").hidden = false;
  document.body.classList.add("answered");
  $("asked").textContent = state.asked?.question ?? "";
  $("saved").textContent = percent(1 - memoryKept(evicted));
  const tokens = kept === null ? "" : `: ${count(kept)} of ${count(evicted.prompt_tokens)} tokens`;
  const held = `${count(blocks)} of ${plural(before, "block")} held${tokens}`;
  $("saved-note").textContent = held + fixedName(evicted);
  // A square for each block, as long as they can be told apart.
  const squares = Math.min(before, 80);
  const filled = Math.ceil((blocks / before) * squares);
  $("blocks").replaceChildren(
    ...Array.from({ length: squares }, (_, index) => element("i", index < filled ? "held" : "")),
  );
  showCuts(evicted.cuts);
  $("skip").hidden = reason === null;
  $("skip").textContent = `Nothing was evicted: ${SKIP_REASONS[reason] ?? reason}.`;

  const start = state.asked?.start;
  $("began").hidden = !start;
  $("began").replaceChildren("Both answers go on from ", element("q", "", start ?? ""));
  // A space follows the words that began the answer.
  const [shownFull, shownEvicted] = [full.text, evicted.text].map((text) => text.trimStart());
  const [left, right] = differences(shownFull, shownEvicted);
  showMarked($("full-text"), left, "missing");
  showMarked($("evicted-text"), right, "other");
  showPositions(byPosition(shownFull, shownEvicted));
  $("full-blocks").textContent = plural(full.blocks, "block");
  $("evicted-blocks").textContent = plural(blocks, "block");
  const expected = state.asked?.expected ?? "";
  const verdict = verdictOf(evicted.text, full.text, expected);
  const said = verdictName(verdict, full.text, expected);
  $("verdict").className = `note verdict ${verdict === "different" ? "differs" : "same"}`;
  $("verdict").dataset.sign = SIGNS[verdict];
  $("verdict").textContent =
    `${said}. ${evicted.policy} at ${budgetName(evicted.budget)}${laterName(evicted.decode)}` +
    (state.seconds ? `, answered in ${state.seconds.toFixed(1)} s.` : ".");
  $("spoken").textContent =
    `${said}. Full cache: ${full.text}. After eviction: ${evicted.text}. ` +
    `${$("saved").textContent} less memory.`;
}

/** A line for each cut, its bar as long as what is held then. @param {Cut[]} cuts */
function showCuts(cuts) {
  $("cuts").hidden = !areTimed(cuts);
  const most = Math.max(1, ...cuts.map((cut) => cut.blocks_before));
  const lines = cuts.map((cut) => {
    const bar = wrap("span", "bar", element("i"));
    bar.firstChild.style.width = `${(100 * cut.blocks_after) / most}%`;
    bar.setAttribute("aria-hidden", "true");
    return wrap("li", "", element("span", "", cutName(cut)), bar);
  });
  $("cuts").replaceChildren(...lines);
}

/** @param {[string, boolean][]} pieces */
function showMarked(target, pieces, className) {
  const marked = (text) => element("mark", className, text);
  const nodes = pieces.map(([text, differs]) => (differs ? marked(text) : text));
  target.replaceChildren(...(nodes.length ? nodes : [element("em", "", "(no text)")]));
  target.classList.toggle("long", target.textContent.length > 60);
}

/** @param {[string, string][]|null} pairs */
function showPositions(pairs) {
  $("positions").hidden = pairs === null;
  if (pairs === null) return;
  const cell = (text, differs, name) =>
    wrap("td", "", differs ? element("mark", name, text || "\u2205") : text);
  const row = (title, side, name) =>
    wrap(
      ...["tr", "", element("th", "", title, { scope: "row" })],
      ...pairs.map((pair) => cell(pair[side], pair[0] !== pair[1], name)),
    );
  const numbers = pairs.map((_, index) => element("th", "", String(index + 1), { scope: "col" }));
  const wrong = pairs.filter(([one, other]) => one !== other).length;
  $("positions-said").textContent = `${wrong} of ${plural(pairs.length, "position")} differ`;
  $("positions-table").replaceChildren(
    wrap("tr", "", element("th", "", "Position", { scope: "row" }), ...numbers),
    row("Full cache", 0, "missing"),
    row("After eviction", 1, "other"),
  );
}
