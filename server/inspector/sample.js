// SPDX-License-Identifier: Apache-2.0
/** A question to try: the model's own, or one about a page that is drawn here. */

import { $ } from "./elements.js";
import { api } from "./server.js";
import { FORMAT, openRecord } from "./record.js";

const SIDE = 336;
const LETTERS = [..."ABCDEFGHJKLMNPRSTUVWXYZ"];

/** Fill in the model's own question, or one about a drawn page: few models have their own. */
export async function fillSample() {
  const found = await api("sample").catch((error) => {
    if (error.status !== 404) throw error;
    return drawnQuestion();
  });
  openRecord(found);
}

/** A record of a question about a page with four keys and their values. */
function drawnQuestion() {
  const canvas = Object.assign(document.createElement("canvas"), { width: SIDE, height: SIDE });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#f3efe4";
  pen.fillRect(0, 0, SIDE, SIDE);
  pen.font = '27px "DejaVu Sans", Verdana, sans-serif';
  pen.fillStyle = "#22304a";
  const keys = LETTERS.sort(() => Math.random() - 0.5).slice(0, 4);
  const values = keys.map(() => String(Math.floor(1e4 + 9e4 * Math.random())));
  const places = {};
  keys.forEach((key, index) => {
    const [left, base] = [14 + (index % 2) * 140, 31 + index * 84];
    pen.fillText(`${key}:${values[index]}`, left, base);
    const [before, width] = [`${key}:`, values[index]].map((text) => pen.measureText(text).width);
    places[values[index]] = [[left + before - 2, base - 24, width + 4, 28]];
  });
  const name = "Drawn page (small models may not read it)";
  const images = [{ name, url: canvas.toDataURL("image/png"), places }];
  return {
    ...{ format: FORMAT, version: 2, images, tokens: $("max-tokens").value },
    ...{ question: `What is the value of ${keys[1]}?`, expected: values[1] },
  };
}
