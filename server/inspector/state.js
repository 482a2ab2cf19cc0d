// SPDX-License-Identifier: Apache-2.0
/**
 * What the page knows. Actions change it, functions named `show...` write the document from it.
 *
 * @typedef {{answer_tokens: number, blocks_before: number, blocks_after: number,
 *   kept_tokens: number, cause?: string, recalled_tokens?: number|null}} Cut  answer_tokens: tokens
 *   of the answer at the time; recalled_tokens: of a choice by recall
 * @typedef {{id: string, policy: string, budget: string, granularity: "layer"|"head",
 *   time: number, prompt_tokens: number, kept_tokens: number, blocks_before: number,
 *   blocks_after: number, cuts: Cut[]}} Summary
 * @typedef {{start: number, length: number, grid: [number, number]|null}} Span  rows, columns
 * @typedef {Summary & {cut: number, block_size: number, layers: number, kv_heads: number,
 *   vision: Span[], pages: number[][], kept_by: number[]}} Trace  of one cut, by its index: pages
 *   by layer and head; how many of the layers x heads keep a token of the prompt and of the part of
 *   the answer that the cut could evict
 * @typedef {{heads: number[], positions: number[], scores: (number|null)[],
 *   reasons: Record<string, number[]>}} TokenSet  reasons: the positions by what kept them
 * @typedef {{layer: number, token_sets: TokenSet[]}} Layer
 * @typedef {{text: string, blocks: number}} Full
 * @typedef {Full & {policy: string, budget: number|string, defer: number,
 *   decode: {schedule?: [number, number][], max_tokens?: number}|null, prompt_tokens: number,
 *   kept_tokens: number|null, blocks_before: number, cuts: Cut[], skip_reason: string|null,
 *   memory: {before: number, after: number, windows: number, states: number,
 *     drafts: number}|null,
 *   trace: string|null, tokens: string[]|null}} Evicted
 * @typedef {{model: string, full: Full|null, evicted: Evicted}} Answers
 * @typedef {[number, number, number, number]} Box  left, top, width and height in a picture's pixels
 * @typedef {{name: string, url: string, pixels: ImageBitmap, places: Map<string, Box[]>}} Picture
 *   url: with the data in it; places: where words stand, if that is known
 * @typedef {{pictures: Picture[], question: string, start: string, expected: string,
 *   tokens: number}} Asked  start: words that begin the answer; expected: what a right one holds, or
 *   empty; tokens: of an answer
 * @typedef {{policy: string|null, budget?: number|string, defer?: number|null,
 *   schedule?: string|null, ceiling?: number}} Settings  of an eviction
 * @typedef {{name: string, weights: Float32Array}[]} Reasons  by token, the part of the chosen
 *   heads that keep it for this reason
 * @typedef {{title: string, prompt: number, spans: Span[], kept: Float32Array}} Pin
 */

const REMEMBERED = 80;

export const state = {
  /** @type {string} */ model: "",
  /** @type {string[]} */ methods: [],
  /** Whether the server cuts by a schedule, unless a request says otherwise. */ schedules: false,
  /** Of the form; each change makes another array. @type {Picture[]} */ images: [],
  fractions: [1],
  auto: "auto:0.98",
  /** What `full` answers. @type {Asked|null} */ asked: null,
  /** What `evicted` was asked with. @type {Settings|null} */ settings: null,
  /** @type {Full|null} */ full: null,
  /** @type {Evicted|null} */ evicted: null,
  seconds: 0,
  /** @type {AbortController|null} */ running: null,
  /** @type {Summary[]} */ recent: [],
  /** @type {Trace|null} */ trace: null,
  /** Of the trace. @type {Map<number, Promise<Layer>>} */ layers: new Map(),
  /** Questions asked on this page, by trace. @type {Map<string, Asked>} */ questions: new Map(),
  /** Texts of their tokens. @type {Map<string, string[]>} */ tokens: new Map(),
  /** Null is all. @type {number|null} */ layer: null,
  /** Null is all. @type {number|null} */ head: null,
  /** Index in `spans`. */ span: 0,
  /** @type {"kept"|"reasons"|"scores"} */ view: "kept",
  zoom: 1,
  /** Under the pointer or chosen by key. @type {number|null} */ patch: null,
  /** By token, the part of the chosen heads that keep it. */ kept: new Float32Array(0),
  /** By token, NaN where there is none. @type {Float32Array|null} */ scores: null,
  /** @type {Reasons|null} */ reasons: null,
  /** @type {{a: Pin|null, b: Pin|null}} */ pins: { a: null, b: null },
  opening: 0,
  drawing: 0,
};

/** Keep what belongs to the last traces of this page. */
export function remember(id, asked, tokens) {
  state.questions.set(id, asked);
  if (tokens) state.tokens.set(id, tokens);
  for (const known of [state.questions, state.tokens]) {
    if (known.size > REMEMBERED) known.delete(known.keys().next().value);
  }
}

/** The parts that can be shown; the last one is all tokens of the trace. @returns {Span[]} */
export const spans = (trace) => [
  ...trace.vision,
  { start: 0, length: trace.kept_by.length, grid: null },
];

/** Rows and columns to draw; tokens without a grid are written like text, in a square. */
export function shapeOf(/** @type {Span} */ { length, grid }) {
  if (grid && grid[0] * grid[1] === length) return { rows: grid[0], columns: grid[1], grid: true };
  const columns = Math.ceil(Math.sqrt(length));
  return { rows: Math.ceil(length / columns), columns, grid: false };
}

/** @param {"layer"|"head"} kind */
export const named = (kind) => (state[kind] === null ? `all ${kind}s` : `${kind} ${state[kind]}`);
