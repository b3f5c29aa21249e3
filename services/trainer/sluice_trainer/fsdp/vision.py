"""The forward pass of a vision-language model over a packed row: tower, merging, decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import __version__

from sluice.runtime.recent import Recent
from sluice_trainer.batch.images import BatchImage
from sluice_trainer.fsdp.families import backbone, trained_parts
from sluice_trainer.fsdp.row import Row
from sluice_trainer.fsdp.row_images import rope_positions
from sluice_trainer.model.flops import tower_flops
from sluice_trainer.model.unsupported import UnsupportedModelError

# The features [tokens, h] of images, and those of earlier layers of the tower that the decoder's
# first layers add (DeepStack, Meng et al. 2024), if the family has them.
Features = list[Tensor]
# Features that one process keeps of a model with a frozen tower.
FEATURE_BYTES = 2 << 30


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


class Tower:
    """The tower of a vision-language model with its projector.

    What a frozen tower makes of an image never changes, so it is computed once and kept in host
    memory, for all samples and passes. A kept image of a megapixel takes some 10 to 30 MB.

    Parameters
    ----------
    model
        A vision-language model of transformers.
    limit
        Bytes to keep.

    """

    def __init__(self, model: Any, limit: int = FEATURE_BYTES) -> None:
        self._model = model
        self._recent: Recent[Features] = Recent(limit)
        self._flops = tower_flops(model.config.to_dict())

    def features(self, images: list[BatchImage], device: torch.device) -> Features:
        """Return the features of images, one after the other."""
        images[0].work.counts.needed += len(images)
        if trained_in_tower(self._model):
            return self._computed(images, device)
        kept = {image.digest: self._recent.get(image.digest) for image in images}
        missing = [image for image in images if kept[image.digest] is None]
        if missing:
            sizes = [image.tokens for image in missing]
            parts = [torch.split(part, sizes) for part in self._computed(missing, device)]
            for image, own in zip(missing, zip(*parts, strict=True), strict=True):
                # Copies, because a view would keep the features of the other images, too.
                copies = [part.detach().to("cpu", copy=True) for part in own]
                size = sum(part.nbytes for part in copies)
                kept[image.digest] = self._recent.put(image.digest, copies, size)
        rows = [features for image in images if (features := kept[image.digest])]
        return [torch.cat(parts).to(device) for parts in zip(*rows, strict=True)]

    def _computed(self, images: list[BatchImage], device: torch.device) -> Features:
        pixels = [image.pixels() for image in images]
        values = torch.from_numpy(np.concatenate([p.values for p in pixels])).to(device)
        grids = torch.from_numpy(np.concatenate([p.grids for p in pixels])).to(device)
        work = images[0].work
        with work.tower_pass(device):
            output = backbone(self._model).get_image_features(values, grids, return_dict=True)
        work.counts.tower_flops += sum(map(self._operations, images))
        deep = getattr(output, "deepstack_features", None) or []
        return [torch.cat(output.pooler_output), *deep]

    def _operations(self, image: BatchImage) -> float:
        """Return the operations of a pass over an image that count.

        Those of a frozen tower are computed once, in whichever pass needs the image first. Those of
        a trained tower count with the backward pass; its log-prob passes do not count.
        """
        if self._flops is None:
            return 0.0
        if not trained_in_tower(self._model):
            return self._flops.forward(image.rows, image.columns)
        if not torch.is_grad_enabled():
            return 0.0
        return self._flops.training(image.rows, image.columns, trained_parts(self._model))


def check_positions(model: Any) -> None:
    """Check that transformers gives tokens of images the positions of `rope_positions`.

    Raises
    ------
    UnsupportedModelError
        It does not, in the release that is installed.

    """
    merge = model.config.vision_config.spatial_merge_size
    images = [(3, 2, 4), (15, 3, 1)]
    kinds = torch.zeros(1, 20, dtype=torch.int32)
    for start, rows, columns in images:
        kinds[0, start : start + rows * columns] = 1
    grids = torch.tensor([[1, rows * merge, columns * merge] for _, rows, columns in images])
    expected, _ = backbone(model).get_rope_index(
        torch.zeros_like(kinds, dtype=torch.int64), mm_token_type_ids=kinds, image_grid_thw=grids
    )
    if not np.array_equal(expected[:, 0].numpy(), rope_positions(20, images)):
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} cannot be trained with images: transformers "
            f"{__version__} counts the positions of their tokens in another way"
        )


def hidden_states(model: Any, tower: Tower, tokens: Tensor, row: Row, attention: str) -> Tensor:
    """Return the decoder's last states [t, h] of a row whose images are merged in.

    Parameters
    ----------
    model
        A vision-language model of transformers.
    tower
        Its tower.
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
        merged, *deep = (
            features.index_select(0, row.images.features)
            for features in tower.features(row.images.images, tokens.device)
        )
        embeddings = embeddings.index_copy(0, row.images.places, merged.to(embeddings.dtype))
        if deep:
            of_image = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
            of_image[row.images.places] = True
            more |= {"visual_pos_masks": of_image[None], "deepstack_visual_embeds": deep}
    elif trained := trained_in_tower(model):
        # FSDP reduces gradients of the same parameters on every rank, or waits for ever: without an
        # image they are 0, not absent.
        embeddings = embeddings + sum(parameter.sum() for parameter in trained) * 0.0
    output = model.get_decoder()(
        inputs_embeds=embeddings[None], **(row.arguments(attention) | more)
    )
    states: Tensor = output.last_hidden_state[0]
    return states
