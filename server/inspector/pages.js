// SPDX-License-Identifier: Apache-2.0
/** Layers x heads: the map of pages, and small maps of what each of them keeps. */

import { $, count, element, plural, wrap } from "./elements.js";
import { state, spans } from "./state.js";
import { colour, showRamp } from "./colours.js";
import { draw, pictureUnder } from "./map.js";

/** The heat map: a row for each layer, a cell for each of its heads. @param {Trace} trace */
export function showPages(trace) {
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
  grid.classList.toggle("dense", height < 14 || trace.kv_heads > 16);
  grid.querySelector("[role=gridcell]").tabIndex = 0;
  const whole = count(Math.floor(trace.kept_by.length / trace.block_size));
  const when = trace.cut ? "without eviction" : "before";
  const note = `${whole} ${when}; a page holds ${trace.block_size} tokens`;
  showRamp($("pages-legend"), "0 pages", count(most), note);
  $("pages-said").textContent = "Choose a cell to see what its head keeps.";
}

function pageCell(layer, head, pages, most) {
  const said = `Layer ${layer}, head ${head}: ${plural(pages, "page")}`;
  const attributes = { role: "gridcell", tabindex: "-1", "aria-label": said, title: said };
  // Below, white has the greater contrast with the cell's colour; above, black.
  const cell = element("span", pages / most > 0.41 ? "bright" : "", String(pages), attributes);
  Object.assign(cell.dataset, { layer, head });
  cell.style.backgroundColor = colour(pages / most);
  return cell;
}

/** Mark the cells of the chosen layer and head. */
export function showChosenCells() {
  const { layer, head } = state;
  for (const cell of $("pages").querySelectorAll("[role=gridcell]")) {
    const inLayer = layer === null || Number(cell.dataset.layer) === layer;
    const inHead = head === null || Number(cell.dataset.head) === head;
    const chosen = inLayer && inHead && (layer !== null || head !== null);
    cell.setAttribute("aria-selected", String(chosen));
  }
  for (const button of $("thumbnails").querySelectorAll("button")) {
    const of = button.dataset;
    const chosen = Number(of.layer) === layer && (of.head === "" || Number(of.head) === head);
    button.setAttribute("aria-pressed", String(chosen));
  }
}

/** Go to a cell. @returns {boolean} whether it exists */
export function focusCell(layer, head) {
  const cell = $("pages").querySelector(`[data-layer="${layer}"][data-head="${head}"]`);
  if (!cell) return false;
  for (const other of $("pages").querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  cell.tabIndex = 0;
  cell.focus();
  return true;
}

/** Where a key leads from the cell it is pressed in; null if nowhere. */
export function cellAfter(event) {
  const [layer, head] = cellOf(event);
  const { layers, kv_heads: heads } = state.trace;
  const targets = {
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
  };
  return targets[event.key] ?? null;
}

/** Layer and head of the cell an event is about; NaN if it is about none. */
export const cellOf = ({ target }) => [Number(target.dataset.layer), Number(target.dataset.head)];

export function sayCell(event) {
  const [layer, head] = cellOf(event);
  const { pages, block_size: size } = state.trace;
  const tokens = pages[layer]?.[head] * size;
  if (tokens >= 0) $("pages-said").textContent = `${event.target.title}, ${count(tokens)} tokens`;
}

/**
 * A small map for each layer and head, or for each layer if its heads keep the same.
 *
 * @param {Layer[]} layers
 * @param {(layer: number, head: number|null) => void} choose
 */
export function showThumbnails(layers, choose) {
  const { trace } = state;
  const span = spans(trace)[state.span];
  const under = pictureUnder(trace);
  const rows = layers.map(({ layer, token_sets: sets }) => {
    const maps = sets.map(({ heads, positions }) => {
      const kept = new Float32Array(trace.kept_by.length);
      for (const position of positions) kept[position] = 1;
      const canvas = element("canvas", "", "", { "aria-hidden": "true" });
      draw(canvas, span, { kept, under, side: 96 });
      const head = heads.length === trace.kv_heads && trace.granularity === "layer" ? null : heads[0];
      const name = head === null ? `Layer ${layer}, all heads` : `Layer ${layer}, head ${head}`;
      const end = span.start + span.length;
      const number = positions.filter((p) => p >= span.start && p < end).length;
      const button = wrap("button", "thumbnail", canvas);
      Object.assign(button, { type: "button", title: name });
      button.setAttribute("aria-label", `${name}: ${count(number)} of ${plural(span.length, "token")}`);
      Object.assign(button.dataset, { layer, head: head ?? "" });
      button.addEventListener("click", () => choose(layer, head));
      return button;
    });
    return wrap("div", "thumbnail-row", element("span", "note", String(layer)), ...maps);
  });
  $("thumbnails").replaceChildren(...rows);
  showChosenCells();
}
