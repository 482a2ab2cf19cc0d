// SPDX-License-Identifier: Apache-2.0
/**
 * Colours of the maps. tests/unit/test_colours.py checks their contrast, and that they stay apart
 * for readers who see fewer colours.
 */

import { element, wrap } from "./elements.js";

export const GROUND = "#12151c";
export const EVICTED = "#2a303c";

/** Of the frame around the expected answer, which is dashed. */
export const EXPECTED = "#e6007a";

/** What kept a token, in the order of legends. Other words are a method's own preference. */
export const REASONS = {
  sink: { colour: "#9d5314", name: "sink", about: "one of the first tokens" },
  text: { colour: "#6a54c6", name: "text", about: "text comes before image tokens" },
  recent: { colour: "#cc8dfd", name: "recent", about: "the method keeps the latest tokens" },
  vision: { colour: "#cc8dfd", name: "image first", about: "image tokens come before text" },
  preferred: { colour: "#cc8dfd", name: "preferred", about: "the method keeps it first" },
  score: { colour: "#ffff37", name: "score", about: "its own score is high enough" },
  neighbour: { colour: "#78fff8", name: "neighbour", about: "pooling raised its score" },
  tail: { colour: "#46c468", name: "last block", about: "the last, partial block always stays" },
};

/** Which of two pinned maps keeps a token. */
export const DIFFERENCE = { both: "#f2f4f7", a: "#f59f00", b: "#3b82f6" };

/** @returns {{colour: string, name: string, about: string}} */
export const reasonOf = (word) => REASONS[word] ?? { ...REASONS.preferred, name: word };

/** Violet, green, yellow, the lightness rising evenly, by way of OKLCH. 0 <= x <= 1. */
export function colour(x, alpha = 1) {
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

/** `#rrggbb` with an opacity. */
export const faded = (hex, alpha) => `${hex}${Math.round(255 * alpha).toString(16).padStart(2, "0")}`;

export function showRamp(target, low, high, note) {
  const steps = Array.from({ length: 24 }, (_, step) => {
    const piece = element("i");
    piece.style.backgroundColor = colour(step / 23);
    return piece;
  });
  const [from, to] = [low, high].map((text) => element("span", "", text));
  target.replaceChildren(from, wrap("span", "ramp", ...steps), to, element("span", "note", note));
}

/** @param {[string, string, string][]} keys  colour, name and what it means */
export function showKeys(target, keys, note = "") {
  const entries = keys.map(([ink, name, about]) => {
    const swatch = element("i", "swatch");
    swatch.style.backgroundColor = ink;
    return wrap("span", "key", swatch, element("strong", "", name), about);
  });
  target.replaceChildren(...entries, ...(note ? [element("span", "note", note)] : []));
}
