"""Rules of `data.images` about the trainer: what can train a vision-language model."""

from __future__ import annotations

from sluice.api.groups.losses import PREFERENCE_LOSSES
from sluice.api.schema.rules import field, requires

_IMAGES = field("data.images").is_set

# Rules of a job's spec.
IMAGE_TRAINING = (
    requires(
        _IMAGES,
        field("trainer.backend") != "megatron",
        "Megatron trains language models alone: with data.images set trainer.backend: fsdp",
        "trainer.backend",
    ),
    requires(
        _IMAGES,
        field("trainer.parallelism.context") == 1,
        "ranks cannot share sequences with images yet: with data.images leave "
        "trainer.parallelism.context out",
        "trainer.parallelism.context",
    ),
    requires(
        field("trainer.freeze").is_set,
        _IMAGES,
        "freeze names parts of a vision-language model: set data.images, or leave it out",
        "trainer.freeze",
    ),
    requires(
        field("trainer.freeze").is_set,
        ~field("trainer.lora").is_set,
        "adapters are added to the language model, and all else stays as it is: leave freeze or "
        "lora out",
        "trainer.freeze",
    ),
    requires(
        _IMAGES,
        ~field("algorithm.loss.type").is_in(PREFERENCE_LOSSES),
        "preferences cannot have images yet: with data.images leave this algorithm.loss.type out",
        "data.images",
    ),
)
