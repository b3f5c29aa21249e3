"""Routing replay where a job has no use for it, or cannot have it."""

from __future__ import annotations

from sluice_migrate.draft import Draft

_FIELD = "trainer.routingReplay"


def replayed(draft: Draft) -> None:
    """Take `trainer.routingReplay` out where such a job is refused. Needs backend and batches."""
    by, origin = draft.get(_FIELD, "none"), draft.origins.get(_FIELD, _FIELD)
    if by != "none" and draft.get("trainer.backend") == "fsdp":
        draft.drop(_FIELD)
        draft.note("not translated", origin, "trainer.backend: megatron replays routing, not fsdp")
    elif by == "trainer" and draft.get("trainer.stepsPerBatch", 1) == 1:
        draft.drop(_FIELD)
        why = (
            "one optimizer step a batch takes old log-probs from its own pass: there is no other "
            "routing to replay"
        )
        draft.note("check", origin, why)
