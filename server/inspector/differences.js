// SPDX-License-Identifier: Apache-2.0
/** What two answers have in common, and whether one holds what is expected. */

const SHORT = 24;

/** The sign before each verdict on an answer. */
export const SIGNS = { right: "\u2713", same: "=", "same up to here": "=", different: "\u2260" };

/** Whether an answer holds what is expected: not as a part of a longer word or number. */
export function holds(text, expected) {
  const words = expected.split(/\s+/).map((word) => word.replace(/\W/g, "\\$&"));
  const before = /^\w/.test(expected) ? "(?<!\\w|\\d[.,])" : "";
  const after = /\w$/.test(expected) ? "(?!\\w|[.,]\\d)" : "";
  return new RegExp(before + words.join("\\s+") + after, "i").test(text);
}

/**
 * What an answer is beside the full cache's. Either may have ended earlier.
 *
 * @param {string} expected  empty if it is not known
 * @returns {keyof typeof SIGNS}
 */
export function verdictOf(text, fullText, expected) {
  if (expected && holds(text, expected)) return "right";
  if (expected && holds(fullText, expected)) return "different";
  const [one, full] = [text.trim(), fullText.trim()];
  if (one === full) return "same";
  const begun = one && full && (one.startsWith(full) || full.startsWith(one));
  return begun ? "same up to here" : "different";
}

/**
 * Both texts in pieces, those that the other one lacks marked true: words, or single characters
 * where neither text has a space. What follows the end of the other text is not marked.
 * @returns {[[string, boolean][], [string, boolean][]]}
 */
export function differences(one, other) {
  if (verdictOf(one, other, "") !== "different") return [one, other].map((text) => [[text, false]]);
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

/**
 * The characters of two short answers by position, such as numbers and codes; null for others.
 * @returns {[string, string][]|null} an empty string where an answer has ended
 */
export function byPosition(one, other) {
  const [a, b] = [[...one], [...other]];
  if (/\s/.test(one + other) || Math.max(a.length, b.length) > SHORT) return null;
  if (verdictOf(one, other, "") !== "different") return null;
  const length = Math.max(a.length, b.length);
  return Array.from({ length }, (_, index) => [a[index] ?? "", b[index] ?? ""]);
}
