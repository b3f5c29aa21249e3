"""spec.weightSync: transfer of weights from the trainer to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.telemetry import SecretRef
from sluice.api.schema.base import Model, PositiveFloat, PositiveInt
from sluice.api.schema.rules import field, requires

LONGEST_PAUSE_SECONDS = 600.0


# Stores that can be written, and absolute paths.
STORE_URI = r"^(/|file:///|(s3|gs|az)://[A-Za-z0-9$]).+"


class WeightStore(Model):
    """Store to which the trainer publishes weights, and from which engines fetch them."""

    uri: Annotated[str, Field(max_length=2048, pattern=STORE_URI)] = Field(
        description="Place of the weights: `s3://bucket/path`, `gs://`, `az://`, or the absolute "
        "path of a directory that trainer and workers share. Each job has a directory there."
    )
    secret_ref: SecretRef | None = Field(
        None,
        description="Secret whose keys become variables of trainer and worker, such as "
        "AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL. Default: what the pods have by themselves, such "
        "as workload identity.",
    )
    snapshot_every: PositiveInt = Field(
        20,
        description="Versions from one snapshot, which has all weights, to the next. Those between "
        "hold what has changed since the version before. An engine that joins fetches the newest "
        "snapshot and the changes since.",
    )
    keep: PositiveInt = Field(
        2,
        description="Snapshots that stay in the store, with the versions since. What an engine is "
        "reading is not removed.",
    )


class WeightSync(Model):
    """Transfer of new weights to the engines."""

    transport: Literal["nccl", "gloo", "disk", "ipc", "store"] | None = Field(
        None,
        description="Transport of weights. Default: nccl on GPUs, gloo on CPU; with "
        "trainer.colocate ipc (shared memory) on one machine, disk in a cluster. store: the "
        "trainer publishes snapshots and lossless deltas, and the worker next to each engine "
        "fetches them, so that the trainer needs no connection to any engine.",
    )
    store: WeightStore | None = Field(
        None, description="Store of weights. Needed with transport: store."
    )
    bucket_mi_b: Annotated[int, Field(ge=1, le=65536, alias="bucketMiB")] = Field(
        1024,
        alias="bucketMiB",
        description="Size in MiB of the flat buckets in which weights are sent. During an "
        "update the trainer needs three of them, and an engine two: it receives one while it "
        "loads the other.",
    )
    fan_out: Literal["direct", "chain"] = Field(
        "direct",
        description="Route of weights over nccl and gloo. direct: a trainer rank sends the "
        "weights to each of its engines, one after another over its one link. chain: it "
        "sends them to the first engine, and each engine passes them on to the next while it "
        "loads them, so that many engines pause hardly longer than one. Needs SGLang with "
        "enginePlugin; other engines in a chain are served directly. Worthwhile from three "
        "engines per rank: three took 0.76 of the time of direct (4B, over NVLink).",
    )
    pause_mode: Literal["in_place", "retract", "abort", "versions"] = Field(
        "retract",
        description="What happens to running responses. in_place: they continue with their "
        "cache. retract: their cache is computed again. abort: they end. versions: they are not "
        "interrupted and end with the weights that they began with; nothing pauses. "
        "Needs lora: adapter; the engine keeps the adapters of the last rollout.maxStaleness + 1 "
        "versions, and older ones until no response uses them.",
    )
    timeout_seconds: PositiveFloat = Field(
        300.0, description="Deadline in seconds of each phase of an update."
    )
    late_seconds: PositiveFloat = Field(
        2.0,
        description="Least time in seconds after which a late engine is left out of an "
        "update. An engine is late in a phase if it takes more than twice as long as the "
        "slowest of the others. Ten times this applies while its communicator is made. It "
        "gets the weights after the update. With one engine only timeoutSeconds counts. Not "
        "with trainer.colocate.",
    )
    verify: bool = Field(
        True, description="Check after each update that the engine serves the new version."
    )
    engine_plugin: bool = Field(
        True,
        description="Start SGLang with sluice's plugin. The plugin receives a bucket while "
        "it loads the one before, loads all experts of a mixture's layer at once, survives a "
        "trainer that dies during an update, keeps new requests from the prefix cache of "
        "older weights, reports which weights sampled each token, and ends without delay. "
        "vLLM always has its own plugin. false: for an engine image whose SGLang has no "
        "plugins, or others; it must then report the weights of each token itself, as SGLang "
        "does from 0.5.21 on. A directory (disk) always holds single experts.",
    )

    lora: Literal["adapter", "merged"] = Field(
        "merged",
        description="What engines get from a trainer with trainer.lora. merged: all weights, with "
        "the adapter added. adapter: the adapter alone, megabytes; the engine reads the model from "
        "its checkpoint once. SGLang keeps a copy of the layers that have adapters and adds the "
        "adapter to it; vLLM, and SGLang with pauseMode: versions, apply it to every request. "
        "Needs vLLM, or SGLang with enginePlugin, and a model with weights on disk.",
    )

    @property
    def pause_seconds(self) -> float:
        """Longest pause of an engine in seconds, for the probes of the operator and the worker.

        A trainer that died during an update is replaced within this time.
        """
        return max(LONGEST_PAUSE_SECONDS, 2 * self.timeout_seconds)


_STORE = field("weightSync.transport") == "store"

# Rules of a job's spec.
STORED_WEIGHTS = (
    requires(
        _STORE,
        field("weightSync.store").is_set,
        "transport store needs a place for the weights: set weightSync.store.uri",
        "weightSync.store",
    ),
    requires(
        field("weightSync.store").is_set,
        _STORE,
        "the store is used with weightSync.transport: store alone: set it, or leave store out",
        "weightSync.store",
    ),
    requires(
        _STORE,
        field("trainer.colocate").is_false,
        "engines that share the trainer's GPUs wait for their weights with the memory of both: "
        "with colocate leave weightSync.transport out",
        "weightSync.transport",
    ),
    requires(
        _STORE,
        ~field("rollout.pool").is_set,
        "workers fetch weights to a disk that engines of a pool do not see: leave "
        "weightSync.transport out",
        "weightSync.transport",
    ),
    requires(
        _STORE,
        field("rollout.nodesPerReplica") == 1,
        "the worker fetches weights to the disk of its pod, and an engine of several pods would "
        "need them in each: set rollout.nodesPerReplica: 1, or leave weightSync.transport out",
        "rollout.nodesPerReplica",
    ),
    requires(
        _STORE,
        field("weightSync.fanOut") == "direct",
        "engines fetch weights from the store themselves: leave weightSync.fanOut out",
        "weightSync.fanOut",
    ),
)
