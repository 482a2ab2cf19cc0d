// SPDX-License-Identifier: Apache-2.0
/** Requests to the server, below the page's own address. */

/**
 * @returns {Promise<any>} the answer's JSON; throws an Error with a message for the reader and the
 *   `status`
 */
export async function api(path, options = {}) {
  let response;
  try {
    // Not relative to the document, whose URL may carry a user name, which `fetch` refuses.
    response = await fetch(new URL(path, location.origin + location.pathname), options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Error("The server did not answer. Is it running, and is the network up? Try again.");
  }
  const body = await response.json().catch(() => null);
  options.signal?.throwIfAborted();
  if (!response.ok) {
    throw Object.assign(new Error(explain(response.status, body)), { status: response.status });
  }
  if (body === null) throw new Error("The server's answer could not be read. Try again.");
  return body;
}

/** @returns {Promise<any>} */
export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return api(path, { method: "POST", headers, body, signal });
}

/** @param {string} id @param {number|null} cut  by default, the last one */
export const tracePath = (id, cut = null, layer = null) =>
  `requests/${encodeURIComponent(id)}${layer === null ? "" : `/layers/${layer}`}` +
  (cut === null ? "" : `?cut=${cut}`);

function explain(status, body) {
  const detail = body?.error?.message ?? body?.detail ?? "";
  const said = Array.isArray(detail) ? detail.map((item) => item.msg).join("; ") : detail;
  const known = {
    400: `The server could not use this request: ${said}`,
    401: "The server wants its API key. Reload the page and give the key as the password.",
    404: "This request is not there (any more): the server keeps the latest traces only.",
    409: `The server cannot do this: ${said}`,
    413: `This is too large for the server: ${said}`,
    422: `The server did not accept this request: ${said}`,
  };
  return known[status] ?? `The server failed with status ${status}. ${said}`;
}
