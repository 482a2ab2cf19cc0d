# SPDX-License-Identifier: Apache-2.0
"""The model as Hugging Face's LLaVA, and the training pass that asks many questions at once."""

from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from demo import chat
from demo.batches import GRID, SLOTS, Batch
from demo.blocks import IGNORE
from demo.huggingface import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from demo.pages import PAGE_SIZE, PATCH, VALUE_LENGTHS

WIDTH = 128

LOSSES = {
    "answer": 1.0,
    "choice": 1.0,
    "outlook": 0.5,
    "lead": 0.5,
    "partner": 0.5,
    "glyph": 0.5,
    "key": 0.5,
    "rank": 0.5,
    "slot": 0.5,
}
"""Weights of the losses; ``choice`` is an additional weight on the keys in answers."""


def make_config() -> LlavaConfig:
    """Return the configuration: head size 32, two KV heads for four query heads."""
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=PAGE_SIZE,
        patch_size=PATCH,
        projection_dim=WIDTH,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=chat.VOCABULARY_SIZE,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=chat.MAX_LENGTH,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=chat.TOKENS[chat.BOS],
        eos_token_id=chat.TOKENS[chat.EOS],
        pad_token_id=chat.TOKENS[chat.PAD],
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=chat.TOKENS[chat.IMAGE],
        image_seq_length=GRID * GRID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )


class Trainee(nn.Module):
    """LLaVA with heads that only training uses.

    ``key``, ``rank`` and ``slot`` teach every patch its entry and its place in the entry and on the
    page, as a large tower would know. Glyph and key are read through the tied embedding, so that
    patches represent characters as the text does.

    ``outlook`` makes the rows of a question predict the characters of the answer, but not their
    order: the end of the prompt must attend to all of the value, yet cannot spell it for later
    rows. ``lead`` and ``partner`` make lower layers look up a key of the question, so that higher
    layers can compare digits and find the order in a row.
    """

    def __init__(self, start: Path | None = None) -> None:
        """Start from the weights in the folder ``start``, or from random ones."""
        super().__init__()
        self.llava = LlavaForConditionalGeneration(make_config())
        with torch.no_grad():
            positions = self.llava.model.vision_tower.embeddings.position_embedding.weight
            positions[1:] = _grid_waves(WIDTH)
        if start:
            trained = LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
            self.llava.load_state_dict(trained.state_dict())
        self.key = nn.Linear(WIDTH, WIDTH)
        self.rank = nn.Linear(WIDTH, len("K:") + max(VALUE_LENGTHS))
        self.slot = nn.Linear(WIDTH, SLOTS)
        self.outlook = nn.Linear(WIDTH, chat.VOCABULARY_SIZE)
        self.lead = nn.Linear(WIDTH, chat.VOCABULARY_SIZE)
        self.partner = nn.Linear(WIDTH, chat.VOCABULARY_SIZE)

    def forward(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the losses of ``LOSSES`` by name, those of questions only if there are any.

        Also return ``[Q]``, for every block the share of prompts without a wrong token in it.
        """
        features = self._look(batch)
        embedding = cast(torch.Tensor, self.llava.get_input_embeddings().weight)
        losses = {
            "glyph": _cross_entropy(functional.linear(features, embedding), batch.glyphs),
            "key": _cross_entropy(functional.linear(self.key(features), embedding), batch.keys),
            "rank": _cross_entropy(self.rank(features), batch.ranks),
            "slot": _cross_entropy(self.slot(features), batch.slots),
        }
        if not batch.tasks:
            return losses, features.new_zeros(0)
        blocks = batch.blocks
        _, _, second, third, last = self._read(batch, features)
        logits = functional.linear(last, embedding)
        asked = blocks.asked != IGNORE
        guess = self.outlook(last[asked]).float().log_softmax(-1)
        losses |= {
            "answer": _cross_entropy(logits, blocks.targets),
            "choice": _cross_entropy(logits, blocks.choices),
            "outlook": -(blocks.outlook[blocks.asked[asked]] * guess).sum(-1).mean(),
            "lead": _cross_entropy(self.lead(second), blocks.leads),
            "partner": _cross_entropy(self.partner(third), blocks.partners),
        }
        wrong = (logits.argmax(-1) != blocks.targets) & (blocks.targets != IGNORE)
        wrong_in_block = wrong.float() @ functional.one_hot(blocks.owners).float()
        return losses, (wrong_in_block == 0).float().mean(0)

    def _look(self, batch: Batch) -> torch.Tensor:
        """Return projected features ``[N, S, d]`` of the patches that the language model sees."""
        tower = self.llava.model.vision_tower
        embeddings = tower.embeddings
        patches = functional.linear(batch.patches, embeddings.patch_embedding.weight.flatten(1))
        first = embeddings.class_embedding.expand(len(patches), 1, -1).to(patches.dtype)
        places = functional.pad(batch.places + 1, (1, 0))
        hidden = torch.cat([first, patches], 1) + embeddings.position_embedding(places)
        hidden = tower.encoder(inputs_embeds=tower.pre_layrnorm(hidden)).last_hidden_state
        number = torch.arange(len(hidden), device=hidden.device)[:, None]
        return self.llava.model.multi_modal_projector(hidden[number, batch.seen + 1])

    def _read(self, batch: Batch, features: torch.Tensor) -> list[torch.Tensor]:
        """Return the hidden states of the blocks, ``[B, R, d]``, before and after every layer."""
        prompts = len(batch.blocks.tokens)
        embed = self.llava.get_input_embeddings()
        prefix = embed(batch.prefix).expand(prompts, -1, -1)
        pages = features.reshape(prompts, -1, features.shape[-1])
        inputs = torch.cat([prefix, pages, embed(batch.blocks.tokens)], 1)

        before, count = len(batch.prefix), len(features) // prompts
        starts = before + GRID * GRID * torch.arange(count + 1, device=pages.device)
        first = torch.arange(before, device=pages.device)
        places = batch.places.gather(1, batch.seen)
        positions = torch.cat(
            [
                first.expand(prompts, -1),
                (places.view(prompts, count, -1) + starts[:-1, None]).flatten(1),
                (batch.blocks.offsets + starts[-1]).expand(prompts, -1),
            ],
            1,
        )
        context = before + pages.shape[1]
        output = self.llava.model.language_model(
            inputs_embeds=inputs,
            position_ids=positions,
            attention_mask=_block_mask(context, batch.blocks.owners),
            use_cache=False,
            output_hidden_states=True,
        )
        return [hidden[:, context:] for hidden in output.hidden_states]


def _block_mask(context: int, owners: torch.Tensor) -> torch.Tensor:
    """Return an additive causal mask ``[1, 1, S, S]`` that hides blocks from each other."""
    owner = functional.pad(owners, (context, 0), value=-1)
    seen = (owner == -1) | (owner == owner[:, None])
    mask = torch.zeros(seen.shape, device=owners.device)
    return mask.masked_fill_(~seen.tril(), -torch.inf)[None, None]


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    chosen = targets != IGNORE
    total = functional.cross_entropy(logits[chosen].float(), targets[chosen], reduction="sum")
    return total / chosen.sum().clamp(min=1)


def _grid_waves(width: int) -> torch.Tensor:
    """Return initial position embeddings, sines and cosines of column and row, ``[576, width]``."""
    rates = 100 ** (-torch.arange(width // 4) / (width // 4))
    angles = torch.arange(GRID)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    rows = waves[:, None].expand(-1, GRID, -1)
    columns = waves[None].expand(GRID, -1, -1)
    return 0.5 * torch.cat([rows, columns], -1).flatten(0, 1)
