"""spec.weightSync: how weights get from the trainer to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, PositiveFloat

LONGEST_PAUSE_SECONDS = 600.0


class WeightSync(Model):
    """How new weights reach the engines."""

    transport: Literal["nccl", "gloo", "disk", "ipc"] | None = Field(
        None,
        description="Default: nccl on GPU, gloo on CPU. With trainer.colocate: ipc (memory that "
        "both open) on one machine, disk in a cluster.",
    )
    bucket_mi_b: Annotated[int, Field(ge=1, le=65536, alias="bucketMiB")] = Field(
        1024,
        alias="bucketMiB",
        description="Weights are sent in flat buckets of this size. While it sends, the trainer "
        "needs three of them, and an engine two: one comes while the other is loaded.",
    )
    fan_out: Literal["direct", "chain"] = Field(
        "direct",
        description="Over nccl and gloo. direct: a trainer rank sends the weights to each of its "
        "engines, one after another over its one link. chain: to the first of them, and each "
        "passes them on to the next one while it loads them, so that many engines pause hardly "
        "longer than one. SGLang with enginePlugin can; others in a chain are served directly. "
        "For three engines of a rank or more: three took 0.76 of the time of direct (4B, over "
        "NVLink).",
    )
    pause_mode: Literal["in_place", "retract", "abort"] = Field(
        "retract",
        description="What happens to running responses: go on with old cache, recompute the cache, "
        "or end.",
    )
    timeout_seconds: PositiveFloat = Field(
        300.0, description="Deadline of each phase of an update."
    )
    late_seconds: PositiveFloat = Field(
        2.0,
        description="An engine is given up in a phase that the others have passed, once it takes "
        "more than twice as long as the slowest of them, and at least this long (ten times this "
        "while its communicator is made). It gets the weights after the update. With one engine "
        "only timeoutSeconds counts. Not with trainer.colocate.",
    )
    verify: bool = Field(
        True, description="Check after each update that the engine serves the new version."
    )
    engine_plugin: bool = Field(
        True,
        description="Start SGLang with sluice's plugin (vLLM always has its own): it receives a "
        "bucket into one buffer while it loads the one before, loads all experts of a mixture's "
        "layer at once, survives a "
        "trainer that dies in the middle of an update, keeps requests from what older weights have "
        "left in its prefix cache, tells which weights sampled each token, and ends when it is "
        "told to, not seconds later. false: for an engine image whose SGLang has no plugins, or "
        "other ones; it then has to tell the weights of each token itself, as SGLang does from "
        "0.5.21 on. A directory (disk) always holds single experts.",
    )

    @property
    def pause_seconds(self) -> float:
        """How long an engine may stay paused:
        until a trainer that died in an update has a successor.

        The operator's probes and the worker beside the engine judge by it.
        """
        return max(LONGEST_PAUSE_SECONDS, 2 * self.timeout_seconds)
