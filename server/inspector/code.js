// SPDX-License-Identifier: Apache-2.0
/** The request that is shown, as a command and as a program. */

import { state } from "./state.js";

const IMAGE_NAME = /^[\w.][\w. -]*$/;

/** The request's options, as the API has them. */
function options() {
  const { policy, budget, defer, schedule, ceiling } = state.settings;
  const named = {
    kv_eviction: policy,
    kv_eviction_budget: budget,
    kv_eviction_when: "always",
    kv_eviction_defer: defer,
    kv_eviction_schedule: schedule,
    kv_eviction_max_tokens: ceiling,
  };
  const given = Object.entries(named).filter(([, value]) => value !== null && value !== undefined);
  return { ...Object.fromEntries(given), kv_eviction_report: 1, kv_eviction_trace: 1 };
}

/** Type and file of each image; the reader's files may have any name, and the same one. */
function files() {
  const { pictures } = state.asked;
  const names = new Set(pictures.map(({ name }) => name));
  return pictures.map(({ name, url }, index) => {
    const type = url.slice("data:".length, url.indexOf(";"));
    const number = pictures.length > 1 ? `-${index + 1}` : "";
    const named = IMAGE_NAME.test(name) && names.size === pictures.length;
    return { type, file: named ? name : `image${number}.${type.split("/")[1]}` };
  });
}

const server = () => new URL("..", location.origin + location.pathname).href;

/** What belongs to a request whose answer has been begun. */
const CONTINUED = { add_generation_prompt: false, continue_final_message: true };

function body(url) {
  const { pictures, question, start, tokens } = state.asked;
  const content = [
    ...pictures.map(() => ({ type: "image_url", image_url: { url } })),
    { type: "text", text: question },
  ];
  const begun = start ? [{ role: "assistant", content: start }] : [];
  return {
    model: state.model,
    messages: [{ role: "user", content }, ...begun],
    temperature: 0,
    max_tokens: tokens,
    ...(start ? CONTINUED : {}),
    vllm_xargs: options(),
  };
}

/** A command for a POSIX shell; run it where the images are. */
export function asCurl() {
  const { question, start } = state.asked;
  let mark = "IMAGE-DATA";
  while (`${question} ${start}`.includes(mark)) mark += "-";
  // What a shell would read in the text: backslashes, dollars and backquotes.
  const json = JSON.stringify(body(mark), null, 2).replace(/[\\$`]/g, "\\$&");
  const data = files().map(({ type, file }) => `data:${type};base64,$(base64 < '${file}' | tr -d '\\n')`);
  return [
    `curl '${server()}v1/chat/completions' \\`,
    `  -H "Authorization: Bearer $VLLM_API_KEY" -H 'Content-Type: application/json' \\`,
    "  --data-binary @- << END-OF-REQUEST",
    json.split(mark).map((part, index) => part + (data[index] ?? "")).join(""),
    "END-OF-REQUEST",
  ].join("\n");
}

/** A program for the OpenAI client. */
export function asPython() {
  const text = (value) => JSON.stringify(value); // also a literal of Python
  const { model, max_tokens: tokens, vllm_xargs: xargs } = body("");
  const { question, start } = state.asked;
  const images = files().map(({ type, file }) => `image(${text(file)}, ${text(type)}),`);
  const begun = start && `\n        {"role": "assistant", "content": ${text(start)}},`;
  const continued =
    start && '\n        "add_generation_prompt": False,\n        "continue_final_message": True,';
  return `import base64
import os

from openai import OpenAI


def image(path, kind):
    with open(path, "rb") as file:
        data = base64.b64encode(file.read()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


client = OpenAI(base_url=${text(`${server()}v1`)}, api_key=os.environ.get("VLLM_API_KEY", "none"))
answer = client.chat.completions.create(
    model=${text(model)},
    messages=[
        {
            "role": "user",
            "content": [
                ${images.join("\n                ")}
                {"type": "text", "text": ${text(question)}},
            ],
        },${begun}
    ],
    temperature=0,
    max_tokens=${tokens},
    extra_body={${continued}
        "vllm_xargs": ${text(xargs).replaceAll('":', '": ').replaceAll(',"', ', "')},
    },
)
print(answer.choices[0].message.content)
print(answer.kv_transfer_params["kv_eviction"])
`;
}

/** Put a text on the clipboard. @returns {Promise<boolean>} whether the browser allowed it */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // only on https and localhost
    return true;
  } catch {
    return false;
  }
}
