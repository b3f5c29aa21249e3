"""Translates settings of jobs whose rows have images, for slime and verl alike."""

from __future__ import annotations

from sluice_migrate.draft import Draft
from sluice_migrate.translation import Setting

COLUMN = "images"
OTHER_MEDIA = "sluice reads no video and no sound; it refuses rows with them"


def set_images(draft: Draft, setting: Setting, *, column: str = COLUMN) -> None:
    """Set data.images, the column of the images of all prompts, and the backend that trains them.

    Call it when the fields of the trainer are set.

    Parameters
    ----------
    draft
        The job.
    setting
        Setting that says that rows have images.
    column
        Column of the images.

    """
    if draft.get("trainer.backend", "megatron") != "fsdp":
        draft.set("trainer.backend", "fsdp", setting.shown)
        why = "fsdp: Megatron trains language models alone"
        draft.note("check", "trainer.backend", why, setting.line)
        if draft.drop("trainer.parallelism"):
            why = "trainer.backend: fsdp splits the model over all GPUs"
            draft.note("not translated", "trainer.parallelism", why)
    draft.set("data.images", {}, setting.shown)
    if column != COLUMN:
        for path in ("data.prompts", "evaluation.datasets"):
            for source in draft.get(path, []):
                source["imagesKey"] = column
