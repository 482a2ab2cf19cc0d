# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and image processor in the form that transformers and vLLM load."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from demo import chat
from demo.huggingface import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast
from demo.pages import PAGE_SIZE, PATCH


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer; without a chat template it puts ``<s>`` before a text."""
    core = Tokenizer(models.WordLevel(chat.TOKENS, unk_token=chat.UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single=f"{chat.BOS} $A",
        pair=f"{chat.BOS} $A $B",
        special_tokens=[(chat.BOS, chat.TOKENS[chat.BOS])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=chat.PAD,
        bos_token=chat.BOS,
        eos_token=chat.EOS,
        unk_token=chat.UNK,
        extra_special_tokens={
            "image_token": chat.IMAGE,
            "system_token": chat.SYSTEM,
            "user_token": chat.USER,
            "assistant_token": chat.ASSISTANT,
        },
        model_max_length=chat.MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=chat.CHAT_TEMPLATE,
    )


def save_processor(folder: Path) -> None:
    """Write tokenizer, image processor and chat template to ``folder``."""
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": PAGE_SIZE},
        crop_size={"height": PAGE_SIZE, "width": PAGE_SIZE},
        image_mean=[chat.PIXEL_MEAN] * 3,
        image_std=[chat.PIXEL_STD] * 3,
    )
    LlavaProcessor(
        image_processor=image_processor,
        tokenizer=make_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=chat.IMAGE,
        chat_template=chat.CHAT_TEMPLATE,
    ).save_pretrained(folder)
