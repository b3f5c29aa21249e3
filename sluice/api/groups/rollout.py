"""spec.rollout: the engines, and how they sample."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictFloat, StrictInt, WithJsonSchema

from sluice.api.groups.engine_args import schema as engine_args_schema
from sluice.api.groups.environment import RolloutEnvironment
from sluice.api.groups.episode import EpisodeLimits, EpisodeSeat, OtherModel
from sluice.api.groups.lifecycle import Topology
from sluice.api.groups.resources import Resources
from sluice.api.schema.base import (
    FreeForm,
    Model,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Unique,
)
from sluice.api.schema.kubernetes_fields import PodTemplate
from sluice.api.schema.paths import GroupFilter, UserFunction
from sluice.api.schema.rules import (
    Rule,
    any_given,
    at_most_one_of,
    field,
    only_with,
    requires,
    written,
)


class Sampling(Model):
    """How responses are sampled."""

    temperature: PositiveFloat = Field(1.0, description="Training logits are divided by it too.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Sample among the likeliest tokens that together have this probability."
    )
    top_k: int = Field(-1, description="-1: all tokens.", ge=-1)
    max_response_tokens: PositiveInt = Field(
        1024, description="Longest response; a longer one is cut off there."
    )
    stop: Annotated[list[str], Field(max_length=32)] = Field(
        default_factory=list, description="Stop strings."
    )

    @property
    def truncated(self) -> bool:
        """True where some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0


class Partial(Model):
    """The treatment of responses that an interruption cut off."""

    enabled: bool = Field(
        False,
        description="Continue responses that an interruption cut off, instead of dropping them.",
    )
    mask_off_policy: bool = Field(
        False, description="Train only on the tokens of the newest weights."
    )


class HooksSpec(Model):
    """Own functions (prompt, sample) that may change each finished sample, sync or async."""

    before_reward: UserFunction | None = Field(None, description="Before the sample is judged.")
    after_reward: UserFunction | None = Field(
        None, description="After it was judged: its reward is set."
    )


EngineArg = Annotated[
    str | int | float | bool | list[str | StrictInt | StrictFloat],
    WithJsonSchema({"x-kubernetes-preserve-unknown-fields": True}),
]


class EngineHealthPolicy(Model):
    """When the worker beside an engine takes it for lost, and ends so that the pod is replaced.

    An engine that is paused for a weight update is well, for weightSync's timeouts.
    """

    period_seconds: PositiveFloat = Field(5.0, description="Between two health checks.")
    timeout_seconds: PositiveFloat = Field(
        5.0, description="A health check without an answer fails after this time."
    )
    failure_threshold: PositiveInt = Field(
        3,
        description="The engine is lost after so many failed checks in a row: a dead or frozen one "
        "after failureThreshold x (periodSeconds + timeoutSeconds) at most.",
    )
    stall_seconds: PositiveFloat = Field(
        60.0,
        description="With work and without an answer for this long, the checks ask for a token.",
    )
    generate_seconds: PositiveFloat = Field(30.0, description="Such a check fails after this time.")

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


class Rollout(Model):
    """The engines that generate."""

    replicas: NonNegativeInt = Field(
        1,
        description="Engines. An autoscaler changes it: leave it out of a manifest that one "
        "scales. With the default, trainer.colocate runs as many as the trainer's GPUs hold.",
    )
    min_replicas: PositiveInt = Field(
        1,
        description="Engines that a queue admits together with the trainer (podGroupPolicy). The "
        "job has no fewer, whatever replicas says, but for replicas: 0.",
    )
    engine: Literal["sglang", "vllm"] = Field(
        "sglang", description="What generates. vllm: vLLM 0.32."
    )
    gpus_per_replica: NonNegativeInt = Field(1, description="GPUs of one engine; 0: CPU.")
    nodes_per_replica: PositiveInt = Field(1, description="Pods of one engine.")
    engine_args: Annotated[
        dict[str, EngineArg],
        WithJsonSchema(engine_args_schema()),
    ] = Field(
        default_factory=dict,
        description="Further arguments of the engine's server, without the leading dashes.",
    )
    batch_size: PositiveInt = Field(32, description="Prompt groups of one training step.")
    samples_per_prompt: PositiveInt = Field(
        8, description="Responses of one prompt: the size of a group."
    )
    sampling: Sampling = Field(default_factory=Sampling)
    concurrency: PositiveInt = Field(
        256, description="Requests that one worker keeps open at its engine."
    )
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="sync: every sample comes from the newest weights. async: maxStaleness steps "
        "may lie between.",
    )
    max_staleness: NonNegativeInt = Field(
        0, description="Steps that a sample's weights may be behind. 0 with mode sync."
    )
    partial: Partial = Field(default_factory=Partial)
    dynamic_filter: GroupFilter | None = Field(
        None,
        description="`nonzero_std` drops groups whose rewards are all equal; or an own function by "
        "dotted path.",
    )
    over_sampling: Annotated[float, Field(ge=1, le=16)] = Field(
        1.0, description="Start this many times batchSize groups and take the first that finish."
    )
    function: UserFunction | None = Field(
        None,
        description="Own generate function `async def play(episode)`, for several turns and tools; "
        "or, decorated with `whole_group`, `async def play(episodes)` for all samples of a prompt. "
        "slime's `generate(args, sample, sampling_params)` and verl's agent loops work as they "
        "are.",
    )
    function_args: FreeForm = Field(
        default_factory=dict,
        description="Its further arguments, by name; for slime's functions attributes of `args`, "
        "for verl's agent loops arguments of the class, and keys of its configuration below "
        "`config`.",
    )
    function_seconds: PositiveFloat = Field(
        120.0,
        description="`function` or `environment` may take this long between two turns of the model "
        "(its tools); then its sample fails.",
    )
    environment: RolloutEnvironment | None = Field(
        None,
        description="In place of `function`: a program in any language, started for each episode, "
        "that asks the gateway for the model.",
    )
    models: Annotated[list[OtherModel], Field(max_length=16), Unique("name")] = Field(
        default_factory=list,
        description="Models that episodes may ask at the gateway besides the one that is trained.",
    )
    seats: Annotated[list[EpisodeSeat], Field(max_length=16), Unique("name")] = Field(
        default_factory=list,
        description="Players of an episode that are all the model that is trained, each with a "
        "conversation and a reward of its own: the sides of a game, proposer and solver. Programs "
        "ask for one by its name. The rewards of a seat are compared with those of the same seat.",
    )
    limits: EpisodeLimits = Field(
        default_factory=EpisodeLimits, description="Of an episode; of each of its seats."
    )
    hooks: HooksSpec = Field(default_factory=HooksSpec)
    health: EngineHealthPolicy = Field(
        default_factory=EngineHealthPolicy,
        description="How long an engine may be silent before it is replaced.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Of the engine's container. Default: requests of 2 CPUs and 8Gi for each GPU, "
        "and a memory limit of 256Gi for each; without GPUs 250m and 1Gi, at most 32Gi.",
    )
    worker_resources: Resources = Field(
        default_factory=Resources,
        description="Of the container beside the engine, which judges samples. Default: requests "
        "of 500m and 1Gi, without GPUs 100m and 256Mi; a memory limit of 16Gi, and what judging "
        "processes and programs of episodes may take.",
    )
    topology: Topology | None = Field(
        None, description="Domain of the cluster for the pods of one engine."
    )
    template: PodTemplate = Field(
        default_factory=dict, description="Pod template, merged over ours (strategic merge)."
    )

    @property
    def has_episode_pods(self) -> bool:
        """On a cluster each episode is a pod."""
        return self.environment is not None and self.environment.image is not None

    @property
    def samples_at_once(self) -> int:
        """The samples that one worker makes side by side, as far as it may choose."""
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
            "seats",
            any_given("function", "environment"),
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
            ~field("environment").given | field("environment.command").given,
            "environments of verifiers, OpenEnv and gym ask for one model and no seats: leave them "
            "out",
        ),
        requires(field("maxStaleness") > 0, field("mode") == "async", "", "maxStaleness"),
        requires(
            field("mode") == "async",
            field("maxStaleness") > 0,
            "mode: async needs maxStaleness of at least 1, which is one step",
            "maxStaleness",
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
