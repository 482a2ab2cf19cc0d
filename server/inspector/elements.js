// SPDX-License-Identifier: Apache-2.0
/** Elements of the document, and numbers in words. Text is only ever set as `textContent`. */

export const $ = (id) => document.getElementById(id);

export const count = (number, digits = 0) =>
  number.toLocaleString("en-GB", { maximumFractionDigits: digits });
export const percent = (part) =>
  `${count(100 * part, part > 0 && part < 0.1 ? 1 : 0)}\u00a0%`;
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
export const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

/** @param {number|string} budget  a fraction, tokens per head, or `auto:SHARE,min=...,max=...` */
export function budgetName(budget) {
  const number = Number(budget);
  if (number <= 1) return percent(number);
  if (number > 1) return plural(number, "token");
  return `Automatic, ${percent(parseFloat(String(budget).slice("auto:".length)))} of the attention`;
}

/** @param {Record<string, string|number>} attributes  in addition to class and text */
export function element(name, className = "", content = "", attributes = {}) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = content;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function wrap(name, className, ...children) {
  const made = element(name, className);
  made.append(...children);
  return made;
}

export function showDefinitions(target, pairs) {
  const entries = pairs.map(([name, value]) =>
    wrap("div", "", element("dt", "", name), element("dd", "", value)),
  );
  target.replaceChildren(...entries);
}

export function showOptions(target, names, values = names.map((_, index) => index)) {
  const options = names.map((name, i) => element("option", "", name, { value: values[i] }));
  target.replaceChildren(...options);
}

export function showError(error) {
  if (error.name === "AbortError") return;
  const close = element("button", "link", "Dismiss", { type: "button" });
  close.addEventListener("click", hideError);
  $("alert").replaceChildren(element("p", "", error.message), close);
  $("alert").scrollIntoView({ block: "nearest" });
}

export const hideError = () => $("alert").replaceChildren();

/** Say what is wrong with a control, and go there. @returns {null} */
export function refuse(message, id) {
  showError(new Error(message));
  $(id).focus();
  return null;
}
