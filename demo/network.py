# SPDX-License-Identifier: Apache-2.0
"""The model as Hugging Face's LLaVA, and the training pass that asks many questions at once."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from demo import chat
from demo.batches import GRID, IGNORE, Batch
from demo.huggingface import (
    AttentionInterface,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from demo.pages import PAGE_SIZE, PATCH, VALUE_LENGTHS

WIDTH = 128
CHUNK = 8
"""Prompts whose attention is computed at once; their scores then stay in the CPU's cache."""


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


@dataclass(frozen=True)
class Losses:
    """Scalars of one batch; ``right`` is the share of answers without a wrong token.

    ``answer``, ``outlook`` and ``right`` are zero for a batch without questions.
    """

    answer: torch.Tensor
    glyph: torch.Tensor
    key: torch.Tensor
    rank: torch.Tensor
    outlook: torch.Tensor
    right: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return self.answer + 0.5 * (self.glyph + self.key + self.rank) + 0.5 * self.outlook


class Trainee(nn.Module):
    """LLaVA with three heads that only training uses.

    ``key`` and ``rank`` make every patch know the entry it belongs to and its place there, as a
    large tower would. Glyph and key are read through the tied embedding, so that a patch comes to
    speak of characters as the text does. ``outlook`` makes
    the rows of a question name the characters of the whole answer, without their order: the end
    of the prompt has to look at all of the value, yet cannot spell it for the rows to come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.llava = LlavaForConditionalGeneration(make_config())
        self.llava.set_attn_implementation("demo_chunked")
        self.key = nn.Linear(WIDTH, WIDTH)
        self.rank = nn.Linear(WIDTH, len("K:") + max(VALUE_LENGTHS))
        self.outlook = nn.Linear(WIDTH, chat.VOCABULARY_SIZE)
        with torch.no_grad():
            positions = self.llava.model.vision_tower.embeddings.position_embedding.weight
            positions[1:] = _grid_waves(WIDTH)

    def forward(self, batch: Batch) -> Losses:
        features = self._look(batch)
        embedding = self.llava.get_input_embeddings().weight
        answer = outlook = right = features.new_zeros(())
        if batch.blocks.numel():
            hidden = self._read(batch, features)
            logits = functional.linear(hidden, embedding).float()
            answer = _cross_entropy(logits, batch.targets)
            wrong = (logits.argmax(-1) != batch.targets) & (batch.targets != IGNORE)
            right = 1 - wrong.any(-1).float().mean()
            wanted = batch.outlook[batch.asked.nonzero()[:, :2].unbind(1)]
            guess = self.outlook(hidden[batch.asked]).float().log_softmax(-1)
            outlook = -(wanted * guess).sum(-1).mean()
        return Losses(
            answer=answer,
            glyph=_cross_entropy(functional.linear(features, embedding), batch.glyphs),
            key=_cross_entropy(functional.linear(self.key(features), embedding), batch.keys),
            rank=_cross_entropy(self.rank(features), batch.ranks),
            outlook=outlook,
            right=right,
        )

    def _look(self, batch: Batch) -> torch.Tensor:
        """Return projected features ``[N, P, d]`` of the visible patches."""
        tower = self.llava.model.vision_tower
        embeddings = tower.embeddings
        patches = functional.linear(batch.patches, embeddings.patch_embedding.weight.flatten(1))
        first = embeddings.class_embedding.expand(len(patches), 1, -1).to(patches.dtype)
        places = functional.pad(batch.places + 1, (1, 0))
        hidden = torch.cat([first, patches], 1) + embeddings.position_embedding(places)
        hidden = tower.encoder(inputs_embeds=tower.pre_layrnorm(hidden)).last_hidden_state
        return self.llava.model.multi_modal_projector(hidden[:, 1:])

    def _read(self, batch: Batch, features: torch.Tensor) -> torch.Tensor:
        """Return the language model's last hidden states of the blocks, ``[B, Q, L, d]``."""
        prompts, questions, length = batch.blocks.shape
        embed = self.llava.get_input_embeddings()
        prefix = embed(batch.prefix).expand(prompts, -1, -1)
        pages = features.reshape(prompts, -1, features.shape[-1])
        inputs = torch.cat([prefix, pages, embed(batch.blocks).flatten(1, 2)], 1)

        before, count = len(batch.prefix), len(features) // prompts
        starts = before + GRID * GRID * torch.arange(count, device=pages.device)
        steps = torch.arange(before + GRID * GRID * count + length, device=pages.device)
        positions = torch.cat(
            [
                steps[:before].expand(prompts, -1),
                (batch.places.view(prompts, count, -1) + starts[:, None]).flatten(1),
                steps[-length:].repeat(prompts, questions),
            ],
            1,
        )
        hidden = self.llava.model.language_model(
            inputs_embeds=inputs,
            position_ids=positions,
            attention_mask=_block_mask(before + pages.shape[1], questions, length, inputs),
            use_cache=False,
        ).last_hidden_state
        return hidden[:, before + pages.shape[1] :].unflatten(1, (questions, length))


def chunked_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of ``[B, heads, S, head size]`` by plain matrix products, ``CHUNK`` rows at a time.

    On CPU and at these sizes two to three times faster than ``scaled_dot_product_attention``.
    ``attention_mask`` is added to the scores, ``[1, 1, S, S]``. Returns
    ``[B, S, heads, head size]`` and no weights.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    chunks = []
    for q, k, v in zip(*(part.split(CHUNK) for part in (query * scaling, key, value)), strict=True):
        scores = q @ k.mT
        if attention_mask is not None:
            scores = scores + attention_mask
        chunks.append(scores.softmax(-1, dtype=scores.dtype) @ v)
    return torch.cat(chunks).transpose(1, 2), None


AttentionInterface.register("demo_chunked", chunked_attention)


def _block_mask(context: int, questions: int, length: int, inputs: torch.Tensor) -> torch.Tensor:
    """Additive mask ``[1, 1, S, S]``: causal, and no block sees another one."""
    owner = torch.arange(questions, device=inputs.device).repeat_interleave(length)
    owner = functional.pad(owner, (context, 0), value=-1)
    seen = (owner == -1) | (owner == owner[:, None])
    dtype = torch.get_autocast_dtype(inputs.device.type)
    mask = torch.zeros(seen.shape, dtype=dtype, device=inputs.device)
    return mask.masked_fill_(~seen.tril(), -torch.inf)[None, None]


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    chosen = targets != IGNORE
    return functional.cross_entropy(logits[chosen].float(), targets[chosen])


def _grid_waves(width: int) -> torch.Tensor:
    """Start of the position embedding: sines and cosines of column and row, ``[576, width]``."""
    rates = 100 ** (-torch.arange(width // 4) / (width // 4))
    angles = torch.arange(GRID)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    rows = waves[:, None].expand(-1, GRID, -1)
    columns = waves[None].expand(GRID, -1, -1)
    return 0.5 * torch.cat([rows, columns], -1).flatten(0, 1)
