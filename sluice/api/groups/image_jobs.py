"""Rules of `data.images`: what a job whose prompts have images cannot use yet."""

from __future__ import annotations

from sluice.api.schema.rules import field, requires

_IMAGES = field("data.images").is_set

# Rules of a job's spec about its engines and its rollouts.
IMAGES_ACROSS_GROUPS = (
    requires(
        _IMAGES,
        field("rollout.engine") == "sglang",
        "data.images needs an engine that gets images from sluice: leave rollout.engine out",
        "rollout.engine",
    ),
    requires(
        _IMAGES,
        ~field("rollout.pool").is_set,
        "engines of a pool get no images: with data.images leave rollout.pool out",
        "rollout.pool",
    ),
    requires(
        _IMAGES,
        ~field("reward.model").is_set,
        "a reward model gets no images: with data.images leave reward.model out",
        "reward.model",
    ),
    requires(
        _IMAGES,
        ~field("debug.replay").is_set,
        "dumped rollouts name their images and do not hold them: with data.images leave "
        "debug.replay out",
        "debug.replay",
    ),
)
