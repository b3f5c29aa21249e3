"""The forward pass of a vision-language model over a packed row: tower, merging, decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sluice_trainer.batch.images import BatchImage
from sluice_trainer.fsdp.families import backbone
from sluice_trainer.fsdp.row import Row


def has_vision(model: Any) -> bool:
    """Return True if the model has a vision tower that a job can use."""
    return hasattr(backbone(model), "visual")


def tower_blocks(model: Any) -> list[nn.Module]:
    """Return the layers of the vision tower; empty for a language model."""
    return list(backbone(model).visual.blocks) if has_vision(model) else []


def trained_in_tower(model: Any) -> list[nn.Parameter]:
    """Return the trained parameters of tower and projector."""
    if not has_vision(model):
        return []
    return [
        parameter for parameter in backbone(model).visual.parameters() if parameter.requires_grad
    ]


def hidden_states(model: Any, tokens: Tensor, row: Row, attention: str) -> Tensor:
    """Return the decoder's last states [t, h] of a row whose images are merged in.

    Parameters
    ----------
    model
        A vision-language model of transformers.
    tokens
        [t] int64.
    row
        Layout of the row.
    attention
        Name of the decoder's attention implementation.

    """
    embeddings = model.get_input_embeddings()(tokens)
    text = row.positions.expand(3, -1)
    rope = text if row.images is None else row.images.positions
    # The first of the four rows, which restarts at 0, tells sequences apart.
    more: dict[str, Any] = {"position_ids": torch.cat((text[:1], rope))[:, None]}
    if row.images is not None:
        features, deep = tower_features(model, row.images.images, tokens.device)
        chosen = features.index_select(0, row.images.features)
        embeddings = embeddings.index_copy(0, row.images.places, chosen.to(embeddings.dtype))
        if deep:
            of_image = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
            of_image[row.images.places] = True
            more["visual_pos_masks"] = of_image[None]
            more["deepstack_visual_embeds"] = [
                states.index_select(0, row.images.features) for states in deep
            ]
    elif trained := trained_in_tower(model):
        # FSDP reduces gradients of the same parameters on every rank, or waits for ever: without an
        # image they are 0, not absent.
        embeddings = embeddings + sum(parameter.sum() for parameter in trained) * 0.0
    output = model.get_decoder()(
        inputs_embeds=embeddings[None], **(row.arguments(attention) | more)
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def tower_features(
    model: Any, images: list[BatchImage], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return the features [tokens, h] of images, one after the other.

    Also those of the tower's earlier layers that the decoder's first layers add (DeepStack, Meng et
    al. 2024), if the family has them.
    """
    pixels = [image.pixels() for image in images]
    values = torch.from_numpy(np.concatenate([p.values for p in pixels])).to(device)
    grids = torch.from_numpy(np.concatenate([p.grids for p in pixels])).to(device)
    output = backbone(model).get_image_features(values, grids, return_dict=True)
    return torch.cat(output.pooler_output), list(getattr(output, "deepstack_features", None) or [])
