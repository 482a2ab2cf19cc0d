// SPDX-License-Identifier: Apache-2.0
/** The images of the question. */

import { $, count, element, hideError, showError, wrap } from "./elements.js";
import { state } from "./state.js";

export const MOST_BYTES = 32 * 2 ** 20;
const MOST_PIXELS = 64e6;
const DATA_URL = /^data:(image\/(?:png|jpeg|webp|gif|bmp));base64,([A-Za-z0-9+/]+=*)$/;

/** Add images to those of the form. @param {Blob[]} files @param {string} [name]  if they have none */
export async function takePictures(files, name) {
  try {
    const read = await Promise.all(files.map((file) => readPicture(file, name ?? file.name, {})));
    hideError();
    showPictures([...state.images, ...read]);
  } catch (error) {
    showError(error);
  }
}

/** @param {Record<string, Box[]>} places @returns {Promise<Picture>} */
async function readPicture(file, name, places) {
  const most = (3 * MOST_BYTES) / 4; // base64 makes four characters of three bytes
  if (file.size > most) throw new Error(`${name} is larger than ${most / 2 ** 20} MiB.`);
  const pixels = await createImageBitmap(file).catch(() => {
    throw new Error(`${name} is not an image that can be read. Choose a PNG, JPEG or WebP file.`);
  });
  const number = pixels.width * pixels.height;
  if (number > MOST_PIXELS) {
    throw new Error(`${name} has ${count(number / 1e6, 1)} megapixels; 64 can be sent.`);
  }
  return { name, pixels, url: await dataUrl(file), places: new Map(Object.entries(places)) };
}

/** The picture of a saved record. @returns {Promise<Picture>} */
export function pictureOf({ name, url, places = {} }) {
  const [, type, data] = DATA_URL.exec(url) ?? [];
  if (!data) throw new Error("The saved image cannot be read.");
  const isBox = (box) => box.length === 4 && box.every(Number.isFinite);
  if (!Object.values(places).flat().every(isBox)) throw new Error("The saved places cannot be read.");
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return readPicture(new Blob([bytes], { type }), String(name), places);
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error("The file could not be read."));
    reader.readAsDataURL(file);
  });
}

/** Put images in the form. @param {Picture[]} images */
export function showPictures(images) {
  state.images = images;
  const items = images.map((picture) => {
    const { name, pixels, url } = picture;
    const size = element("span", "note", `${pixels.width} \u00d7 ${pixels.height} px`);
    const remove = element("button", "link", "Remove", { type: "button", "aria-label": `Remove ${name}` });
    remove.addEventListener("click", () => {
      showPictures(state.images.filter((other) => other !== picture));
      $("file").focus();
    });
    const about = wrap("span", "about", element("strong", "", name), size);
    return wrap("li", "", element("img", "", "", { src: url, alt: "" }), about, remove);
  });
  $("pictures").replaceChildren(...items);
  $("pictures").hidden = !items.length;
  $("drop").classList.toggle("filled", items.length > 0);
  $("file-name").textContent = items.length ? "Add another image" : "Choose an image";
}
