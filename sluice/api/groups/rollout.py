"""spec.rollout: engines, sampling and episodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictFloat, StrictInt, WithJsonSchema

from sluice.api.groups.engine_args import schema as engine_args_schema
from sluice.api.groups.environment import RolloutEnvironment
from sluice.api.groups.episode import EpisodeLimits, EpisodeSeat, OtherModel
from sluice.api.groups.lifecycle import Topology
from sluice.api.groups.resources import Resources
from sluice.api.groups.speculative import Speculative
from sluice.api.schema.base import (
    FreeForm,
    Model,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ShortName,
    Unique,
)
from sluice.api.schema.kubernetes_fields import PodTemplate
from sluice.api.schema.paths import GroupFilter, UserFunction
from sluice.api.schema.rules import (
    Rule,
    any_set,
    at_most_one_of,
    field,
    only_with,
    requires,
    written,
)


class Sampling(Model):
    """Sampling of responses."""

    temperature: PositiveFloat = Field(
        1.0, description="Temperature. The logits of the trainer are divided by it too."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample among the most likely tokens that together have this probability."
    )
    top_k: int = Field(
        -1, description="Sample among this many most likely tokens. -1: all tokens.", ge=-1
    )
    max_response_tokens: PositiveInt = Field(
        1024, description="Largest number of tokens of a response. A longer one is cut."
    )
    stop: Annotated[list[str], Field(max_length=32)] = Field(
        default_factory=list, description="Strings that end a response."
    )

    @property
    def truncated(self) -> bool:
        """True if some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0


class Partial(Model):
    """Treatment of responses that an interruption cut off."""

    enabled: bool = Field(
        False,
        description="Continue interrupted responses instead of dropping them.",
    )
    mask_off_policy: bool = Field(False, description="Train only on tokens of the newest weights.")


class HooksSpec(Model):
    """Own functions (prompt, sample) that may change each finished sample, sync or async."""

    before_reward: UserFunction | None = Field(
        None, description="Called before the sample is judged."
    )
    after_reward: UserFunction | None = Field(
        None, description="Called after the sample was judged and has its reward."
    )


EngineArg = Annotated[
    str | int | float | bool | list[str | StrictInt | StrictFloat],
    WithJsonSchema({"x-kubernetes-preserve-unknown-fields": True}),
]
EngineArgs = Annotated[dict[str, EngineArg], WithJsonSchema(engine_args_schema())]


class EngineHealthPolicy(Model):
    """Health checks by which the worker declares its engine lost, so that the pod is replaced.

    An engine that is paused for a weight update counts as healthy within the timeouts of
    weightSync.
    """

    period_seconds: PositiveFloat = Field(5.0, description="Seconds between two health checks.")
    timeout_seconds: PositiveFloat = Field(
        5.0, description="Seconds after which a health check without an answer fails."
    )
    failure_threshold: PositiveInt = Field(
        3,
        description="Number of failed checks in a row after which the engine is lost. A dead "
        "or frozen engine is lost after at most failureThreshold x (periodSeconds + "
        "timeoutSeconds).",
    )
    stall_seconds: PositiveFloat = Field(
        60.0,
        description="Seconds with requests and without an answer after which the checks ask "
        "for a token.",
    )
    generate_seconds: PositiveFloat = Field(
        30.0, description="Seconds after which a check that asks for a token fails."
    )

    @property
    def silence_seconds(self) -> float:
        """Longest silence of an engine that does not answer at all."""
        return self.failure_threshold * (self.period_seconds + self.timeout_seconds)

    @property
    def hang_seconds(self) -> float:
        """Longest silence of an engine that answers, and makes no tokens."""
        return self.stall_seconds + self.failure_threshold * (
            self.period_seconds + self.generate_seconds
        )


Precision = Literal["bf16", "fp8", "fp8_block", "int8"]
CacheDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2"]


class Rollout(Model):
    """Engines that generate, and how they do."""

    replicas: NonNegativeInt = Field(
        1,
        description="Number of engines. Leave it out of a manifest if an autoscaler changes "
        "it. With the default, trainer.colocate runs as many engines as the trainer's GPUs "
        "hold. Ignored with pool: the job uses all engines of the pool.",
    )
    pool: ShortName | None = Field(
        None,
        description="RLEnginePool of the job's namespace whose engines generate, together with "
        "those of other jobs; on a laptop the pool of that name. The job starts no engines. "
        "Needs trainer.lora with weightSync: {lora: adapter, pauseMode: versions}. "
        "gpusPerReplica, resources and engineArgs are those of the pool.",
    )
    pool_weight: PositiveInt = Field(
        1,
        description="Share of the pool's tokens, relative to other jobs, while they compete: a job "
        "with 2 gets twice as many as one with 1.",
    )
    min_replicas: PositiveInt = Field(
        1,
        description="Number of engines that a queue admits together with the trainer "
        "(podGroupPolicy). The job has at least as many, whatever replicas says, unless "
        "replicas is 0.",
    )
    engine: Literal["sglang", "vllm", "transformers"] = Field(
        "sglang",
        description="Inference engine. vllm: vLLM 0.32. transformers: any model that transformers "
        "has, slowly, on a CPU or one GPU.",
    )
    gpus_per_replica: NonNegativeInt = Field(1, description="Number of GPUs of one engine. 0: CPU.")
    nodes_per_replica: PositiveInt = Field(1, description="Number of pods of one engine.")
    engine_args: EngineArgs = Field(
        default_factory=dict,
        description="Arguments of the engine's server, without the leading dashes.",
    )
    precision: Precision = Field(
        "bf16",
        description="Precision of the engines' matrices. bf16: as the trainer sends them. The "
        "others halve the memory and the bytes of an update: the trainer quantizes the weights of "
        "each update, and engines quantize activations as they compute. fp8_block: E4M3 with a "
        "scale for each block of 128 x 128, as DeepSeek-V3; fp8 and int8: with a scale for each "
        "row. Embedding, output layer, norms and routers stay as they are. Needs sglang with "
        "weightSync.enginePlugin. Samples come from a slightly other policy, so "
        "algorithm.offPolicy.method is then tis by default.",
    )
    kv_cache_dtype: CacheDtype = Field(
        "auto",
        description="Precision of the engines' KV cache. auto: that of activations. The FP8 forms "
        "hold twice the tokens, without scales, so an update changes nothing in them. Need sglang "
        "or vllm on GPUs. algorithm.offPolicy.method is then tis by default.",
    )
    speculative: Speculative | None = Field(
        None,
        description="Speculative decoding, which shortens the generation of few responses at a "
        "time. Needs sglang. Default: off.",
    )
    batch_size: PositiveInt = Field(32, description="Number of prompt groups of one training step.")
    samples_per_prompt: PositiveInt = Field(
        8, description="Number of responses to one prompt, the size of a group."
    )
    sampling: Sampling = Field(default_factory=Sampling)
    concurrency: PositiveInt = Field(
        256, description="Number of requests that one worker keeps open at its engine."
    )
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="sync: every sample comes from the newest weights. async: weights may be "
        "up to maxStaleness steps older.",
    )
    max_staleness: NonNegativeInt = Field(
        0,
        description="Largest number of steps that the weights of a sample may be behind. 0 "
        "with mode sync.",
    )
    partial: Partial = Field(default_factory=Partial)
    dynamic_filter: GroupFilter | None = Field(
        None,
        description="nonzero_std drops groups whose rewards are all equal. Or an own "
        "function by dotted path.",
    )
    over_sampling: Annotated[float, Field(ge=1, le=16)] = Field(
        1.0, description="Start this many times batchSize groups and take the first that finish."
    )
    function: UserFunction | None = Field(
        None,
        description="Own generate function `async def play(episode)`, for several turns and "
        "tools. Decorated with `whole_group`: `async def play(episodes)` for all samples of "
        "a prompt. slime's `generate(args, sample, sampling_params)` and verl's agent loops "
        "work unchanged.",
    )
    function_args: FreeForm = Field(
        default_factory=dict,
        description="Arguments of `function`, by name. For functions of slime they are "
        "attributes of `args`; for agent loops of verl arguments of the class, and keys of "
        "its configuration below `config`.",
    )
    function_seconds: PositiveFloat = Field(
        120.0,
        description="Seconds that `function` or `environment` may take between two turns of "
        "the model, for its tools. Then its sample fails.",
    )
    environment: RolloutEnvironment | None = Field(
        None,
        description="Program in any language that is started for each episode and asks the "
        "gateway for the model, in place of `function`.",
    )
    models: Annotated[list[OtherModel], Field(max_length=16), Unique("name")] = Field(
        default_factory=list,
        description="Models that episodes may ask at the gateway in addition to the trained one.",
    )
    seats: Annotated[list[EpisodeSeat], Field(max_length=16), Unique("name")] = Field(
        default_factory=list,
        description="Players of an episode that the trained model plays, each with its own "
        "conversation and reward: the sides of a game, proposer and solver. Programs ask for "
        "a seat by its name. Rewards are compared with those of the same seat.",
    )
    limits: EpisodeLimits = Field(
        default_factory=EpisodeLimits,
        description="Limits of an episode. Turns, branches and tokens are those of each of its "
        "seats.",
    )
    hooks: HooksSpec = Field(default_factory=HooksSpec)
    health: EngineHealthPolicy = Field(
        default_factory=EngineHealthPolicy,
        description="Health checks of the engine.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of the engine's container. Default: requests of 2 CPUs and "
        "8Gi and a memory limit of 256Gi for each GPU; without GPUs 250m and 1Gi, at most "
        "32Gi.",
    )
    worker_resources: Resources = Field(
        default_factory=Resources,
        description="Resources of the worker's container, which judges samples. Default: "
        "requests of 500m and 1Gi, without GPUs 100m and 256Mi; a memory limit of 16Gi plus "
        "what judging processes and programs of episodes may use.",
    )
    topology: Topology | None = Field(
        None, description="Domain of the cluster for the pods of one engine."
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="Pod template, merged over that of sluice (strategic merge).",
    )

    @property
    def is_quantized(self) -> bool:
        """True if engines compute in another precision than the trainer."""
        return self.precision != "bf16" or self.kv_cache_dtype != "auto"

    @property
    def has_episode_pods(self) -> bool:
        """True if each episode is a pod on a cluster."""
        return self.environment is not None and self.environment.image is not None

    @property
    def samples_at_once(self) -> int:
        """Largest number of samples that one worker generates at a time."""
        if self.environment is None or self.environment.image is None:
            return self.concurrency
        return min(self.concurrency, self.environment.pods)

    rules = (
        at_most_one_of(
            "environment",
            "function",
            message="environment and function both play the episodes: set one of them",
            about="environment",
        ),
        Rule(
            written(
                "self.limits.overflow != 'summarise' || self.limits.summary.tokens + "
                "self.limits.?turnTokens.orValue(1) < self.sampling.maxResponseTokens",
                lambda r: (
                    r.limits.overflow != "summarise"
                    or r.limits.summary.tokens + (r.limits.turn_tokens or 1)
                    < r.sampling.max_response_tokens
                ),
            ),
            "a summary and a turn have to fit into sampling.maxResponseTokens: shorten "
            "limits.summary.tokens or limits.turnTokens, or make it longer",
            "limits.summary.tokens",
        ),
        only_with(
            "limits.seconds",
            any_set("function", "environment"),
            "limits.seconds is of episodes that a program plays: set function or environment; a "
            "source of data with single answers may say function: none",
        ),
        only_with(
            "seats",
            any_set("function", "environment"),
            "seats are of episodes that a program plays: set function or environment",
        ),
        Rule(
            written(
                "!has(self.seats) || !has(self.models) || "
                "!self.seats.exists(s, self.models.exists(m, m.name == s.name))",
                lambda r: not {seat.name for seat in r.seats} & {model.name for model in r.models},
            ),
            "seats: one of them has the name of one of models",
            "seats",
        ),
        only_with(
            "seats",
            ~field("environment").is_set | field("environment.command").is_set,
            "environments of verifiers, OpenEnv and gym ask for one model and no seats: leave them "
            "out",
        ),
        only_with(
            "poolWeight",
            field("pool").is_set,
            "poolWeight is a job's share of a pool: set pool, or leave it out",
        ),
        requires(field("maxStaleness") > 0, field("mode") == "async", "", "maxStaleness"),
        requires(
            field("mode") == "async",
            field("maxStaleness") > 0,
            "mode: async needs maxStaleness of at least 1, which is one step",
            "maxStaleness",
        ),
        requires(
            field("engine") == "transformers",
            ~(field("gpusPerReplica") > 1) & (field("nodesPerReplica") == 1),
            "the engine transformers computes on a CPU or on one GPU: gpusPerReplica must be 0 or "
            "1, or engine sglang",
            "gpusPerReplica",
        ),
        requires(
            field("precision") != "bf16",
            field("engine") == "sglang",
            "only SGLang has been shown to take quantized weights in updates: leave precision out, "
            "or choose engine sglang",
            "precision",
        ),
        only_with(
            "speculative",
            field("engine") == "sglang",
            "only SGLang has been shown to sample from the policy and to return its log-probs "
            "under speculative decoding: leave speculative out, or choose engine sglang",
        ),
        requires(
            field("kvCacheDtype") != "auto",
            field("engine").is_in(("sglang", "vllm")) & (field("gpusPerReplica") > 0),
            "only sglang and vllm on GPUs have a KV cache in FP8: leave kvCacheDtype out",
            "kvCacheDtype",
        ),
        requires(
            field("engine") == "vllm",
            field("nodesPerReplica") == 1,
            "a vLLM engine is one pod here: nodesPerReplica must be 1, or engine sglang",
            "nodesPerReplica",
        ),
        Rule(
            written(
                "self.engine != 'vllm' || self.sampling.temperature == 1.0 || "
                "(self.sampling.topP == 1.0 && self.sampling.topK <= 0)",
                lambda r: (
                    r.engine != "vllm" or r.sampling.temperature == 1 or not r.sampling.truncated
                ),
            ),
            "vLLM gives log-probs of all tokens at temperature 1, or at another one without topP "
            "and topK: set temperature to 1, or leave them out, or choose engine sglang",
            "sampling.temperature",
        ),
    )
