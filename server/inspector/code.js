// SPDX-License-Identifier: Apache-2.0
/** The request that is shown, as a command and as a program. */

import { state } from "./state.js";

const IMAGE_NAME = /^[\w.][\w. -]*$/;

/** The request's options, as the API has them. */
function options() {
  const { policy, budget, defer, schedule, ceiling, buffer } = state.settings;
  const named = {
    kv_eviction: policy,
    kv_eviction_budget: budget,
    kv_eviction_defer: defer,
    kv_eviction_schedule: schedule,
    kv_eviction_max_tokens: ceiling,
    kv_eviction_buffer: buffer,
  };
  const given = Object.entries(named).filter(([, value]) => value !== null && value !== undefined);
  return { ...Object.fromEntries(given), kv_eviction_report: 1, kv_eviction_trace: 1 };
}

/** Type and file of the image; the reader's file may have any name. */
function image() {
  const { name, url } = state.asked.picture;
  const type = url.slice("data:".length, url.indexOf(";"));
  const file = IMAGE_NAME.test(name) ? name : `image.${type.split("/")[1]}`;
  return { type, file };
}

const server = () => new URL("..", location.origin + location.pathname).href;

function body(url) {
  const { question, tokens } = state.asked;
  const content = [
    { type: "image_url", image_url: { url } },
    { type: "text", text: question },
  ];
  return {
    model: state.model,
    messages: [{ role: "user", content }],
    temperature: 0,
    max_tokens: tokens,
    vllm_xargs: options(),
  };
}

/** A command for a POSIX shell; run it where the image is. */
export function asCurl() {
  const { type, file } = image();
  const mark = "IMAGE-DATA";
  // What a shell would read in the text: backslashes, dollars and backquotes.
  const json = JSON.stringify(body(mark), null, 2).replace(/[\\$`]/g, "\\$&");
  const data = `data:${type};base64,$(base64 < '${file}' | tr -d '\\n')`;
  return [
    `curl '${server()}v1/chat/completions' \\`,
    `  -H "Authorization: Bearer $VLLM_API_KEY" -H 'Content-Type: application/json' \\`,
    "  --data-binary @- << END-OF-REQUEST",
    json.replace(mark, () => data),
    "END-OF-REQUEST",
  ].join("\n");
}

/** A program for the OpenAI client. */
export function asPython() {
  const { type, file } = image();
  const text = (value) => JSON.stringify(value); // also a literal of Python
  const { model, messages, max_tokens: tokens, vllm_xargs: xargs } = body("");
  const question = messages[0].content[1].text;
  return `import base64
import os

from openai import OpenAI

client = OpenAI(base_url=${text(`${server()}v1`)}, api_key=os.environ.get("VLLM_API_KEY", "none"))
with open(${text(file)}, "rb") as file:
    image = base64.b64encode(file.read()).decode()
answer = client.chat.completions.create(
    model=${text(model)},
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:${type};base64,{image}"}},
                {"type": "text", "text": ${text(question)}},
            ],
        }
    ],
    temperature=0,
    max_tokens=${tokens},
    extra_body={"vllm_xargs": ${text(xargs).replaceAll('":', '": ').replaceAll(',"', ', "')}},
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
