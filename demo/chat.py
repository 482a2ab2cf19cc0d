# SPDX-License-Identifier: Apache-2.0
"""The character vocabulary and the chat template.

A prompt is ``<s> [<|system|> text] <|user|> <image>... text <|assistant|>`` and the answer follows
up to ``</s>``. Every printable ASCII character is one token, so an answer of six digits takes six
decoding steps. Anything else becomes ``<unk>``.
"""

import string

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
IMAGE, SYSTEM, USER, ASSISTANT = "<image>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, BOS, EOS, UNK, IMAGE, SYSTEM, USER, ASSISTANT)
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
TOKENS = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
VOCABULARY_SIZE = 128
"""Rows of the embedding; those beyond ``TOKENS`` are never used."""

MAX_LENGTH = 8192
"""Limit on the tokens of a prompt and its answer together."""

PIXEL_MEAN = PIXEL_STD = 0.5

# Images come before the text of a message, in any order of the request: training puts the page
# first, and OpenAI requests often put it last.
CHAT_TEMPLATE = """\
{{- '<s>' -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] if part['type'] in ('image', 'image_url') -%}
{{- '<image>' -}}
{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- '</s>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def encode(text: str) -> list[int]:
    """Return the token of each character of ``text``, which holds no special token."""
    return [TOKENS.get(character, TOKENS[UNK]) for character in text]
