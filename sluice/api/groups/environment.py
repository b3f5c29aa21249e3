"""spec.rollout.environment: a program that plays each episode."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from sluice import container_images
from sluice.api.schema.base import FreeForm, Model, PositiveFloat, PositiveInt
from sluice.api.schema.kubernetes_fields import NetworkPolicyPeer, PodTemplate
from sluice.api.schema.paths import CommandWord, UserFunction
from sluice.api.schema.rules import (
    Rule,
    any_set,
    at_most_one_of,
    exactly_one,
    field,
    requires,
    written,
)

# Variables that lead a program to the gateway, as do those that begin with SLUICE_.
GATEWAY_VARIABLES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_BASE",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
)
# On a job's spec: samples have a reward, of `reward` or of their environment.
REWARDED = written(
    "(has(self.reward) || has(self.rollout.environment) && (!has(self.rollout.environment.command) "
    "|| has(self.rollout.environment.verifier)))",
    lambda spec: spec.rewarded,
)
_Name = Annotated[str, Field(min_length=1, max_length=253)]
_RowImage = Annotated[str, Field(min_length=1, max_length=4096, pattern=container_images.PATTERN)]
_AllowedImage = Annotated[str, Field(max_length=512, pattern=container_images.ALLOWED_PATTERN)]
_Value = Annotated[str, Field(max_length=65536)]
_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
_RESERVED = rf"^(SLUICE_.*|{'|'.join(GATEWAY_VARIABLES)})$"


def _may_be_set(name: str) -> bool:
    return bool(re.search(_PATTERN, name)) and not re.search(_RESERVED, name)


class Verifiers(Model):
    """Environment of verifiers 0.4: its tasks, its agents' programs and its rewards."""

    name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Id of the taskset, a package installed in the same environment as verifiers."
    )
    args: FreeForm = Field(
        default_factory=dict,
        description="Configuration of the environment, as `env` of verifiers: `taskset`, "
        "`agent`, ... By default the programs of agents run in the worker's container.",
    )
    python: CommandWord | None = Field(
        None, description="Python interpreter that has verifiers. Default: that of the worker."
    )


class OpenEnvironment(Model):
    """Server of OpenEnv (openenv-core 0.3). Each episode has a session on it."""

    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] | None = Field(
        None, description="Address of the server, such as `http://wordle:8000`."
    )
    image: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="Image of the server, in place of `url`. On a cluster it runs in each "
        "engine's pod, as the container `openenv`.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        8000, description="Port of the server, with `image`."
    )
    action: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None,
        description="Field of an action that takes the model's text. Default: the only "
        "required field, if it is a text; otherwise the model answers with JSON.",
    )
    observation: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None,
        description="Field of an observation that the model reads. Default: its only text, "
        "or all of it as JSON.",
    )
    function: UserFunction | None = Field(
        None,
        description="Own function (message, observation) -> action, in place of `action`. It "
        "turns the model's message, with its tool calls, into what the environment takes.",
    )
    timeout_seconds: PositiveFloat = Field(
        60.0,
        description="Timeout of one answer, in seconds. A server that is full or not ready "
        "is asked again for as long.",
    )

    rules = (
        exactly_one("url", "image", message="expected either url or image"),
        at_most_one_of(
            "action",
            "function",
            message="action and function both say what an answer does: set one of them",
            about="action",
        ),
    )

    @property
    def address(self) -> str:
        """Address of the server, for workers."""
        return self.url or f"http://127.0.0.1:{self.port}"


class Gym(Model):
    """Environment with Gymnasium's interface: `reset` with a seed, `step` with an action."""

    id: _Name | None = Field(
        None,
        description="Id of the environment for `module.make`: `FrozenLake-v1`, or "
        "`package:Name-v0` of a package that registers its own.",
    )
    module: _Name = Field(
        "gymnasium", description="Package with `make(id, **args)`. `gem` for GEM's environments."
    )
    make: UserFunction | None = Field(
        None,
        description="Own class or function, in place of `id`. It is called with `args` and "
        "returns an environment.",
    )
    args: FreeForm = Field(
        default_factory=dict,
        description="Arguments of the environment. An environment that can draw itself as "
        "text gets `render_mode: ansi` unless the arguments say otherwise.",
    )
    actions: Annotated[list[_Name], Field(min_length=1, max_length=1024)] | None = Field(
        None,
        description="Names of the actions of a discrete space, in their order. The model "
        "answers with them. Default: their numbers.",
    )
    function: UserFunction | None = Field(
        None,
        description="Own class or function between environment and text. It is called with "
        "the environment for each episode and returns an object with "
        "`observation(observation, info)`, which gives a text, or `action(answer)`, which "
        "gives an action, or both.",
    )
    max_turns: PositiveInt | None = Field(
        None,
        description="Largest number of turns of the model. Default: the environment ends the "
        "episode.",
    )
    python: CommandWord | None = Field(
        None,
        description="Python interpreter that has the environment. Default: that of the worker.",
    )

    rules = (exactly_one("id", "make", message="expected exactly one of id and make", field="id"),)


class Verifier(Model):
    """Program that judges the files of an episode, out of reach of the episode's program."""

    command: Annotated[list[CommandWord], Field(min_length=1, max_length=64)] = Field(
        description="The verifier and its arguments, word by word, as in "
        "`environment.command`. It writes its reward to `result.json`."
    )
    image: _RowImage | None = Field(
        None,
        description="Image of the verifier, if episodes are pods. It runs in pods of its "
        "own, and may be the row's. Default: `environment.image`.",
    )
    pods: PositiveInt = Field(
        4, description="Number of verifier pods of one engine, if episodes are pods."
    )
    timeout_seconds: PositiveFloat = Field(
        300.0, description="Time to judge one episode, in seconds."
    )
    hidden_metadata: Annotated[list[str], Field(max_length=64)] = Field(
        default_factory=list,
        description="Keys of a row's metadata that only the verifier sees. It alone sees the "
        "label too.",
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="Pod template, merged over that of sluice (strategic merge), if episodes "
        "are pods. The container is `verifier`.",
    )


# On an environment: the image of its episodes, or of its verifier, refers to the row.
_FROM_ROW = written(
    "(has(self.image) && self.image.contains('{metadata.') || has(self.verifier) && "
    "has(self.verifier.image) && self.verifier.image.contains('{metadata.'))",
    lambda environment: environment.has_row_images,
)


class EpisodeSandbox(Model):
    """Pods of episodes and the verifier are created by Sandboxes of agent-sandbox."""


class RolloutEnvironment(Model):
    """Program that is started for each episode and asks the gateway for the model."""

    command: Annotated[list[CommandWord], Field(min_length=1, max_length=64)] | None = Field(
        None,
        description="The program and its arguments, word by word. A word that names a file "
        "next to the manifest (on a cluster: in the worker's working directory) is that "
        "file. Any other first word is looked up on the PATH.",
    )
    verifiers: Verifiers | None = Field(
        None, description="An environment of the package verifiers, in place of `command`."
    )
    openenv: OpenEnvironment | None = Field(
        None, description="An environment of OpenEnv behind a URL, in place of `command`."
    )
    gym: Gym | None = Field(
        None, description="An environment with Gymnasium's interface, in place of `command`."
    )
    env: Annotated[dict[str, _Value], Field(max_length=64)] = Field(
        default_factory=dict,
        description="Environment variables of the program, which inherits few of the worker's.",
    )
    image: _RowImage | None = Field(
        None,
        description="On a cluster each episode is a pod of this image, which has the program "
        "and `/bin/sh`. `{metadata.KEY}` stands for a text of the row: each row then has its own "
        "image. On a laptop the program runs without it, or in a container of it with "
        "`sluice run --containers`.",
    )
    allowed_images: Annotated[list[_AllowedImage], Field(max_length=64)] = Field(
        default_factory=list,
        description="Images that rows may name: `ghcr.io/me/` allows all images below it, "
        "`ghcr.io/me/app` allows that image with any tag or digest. Required if an image refers "
        "to the row. Names without a registry are of Docker Hub.",
    )
    image_timeout_seconds: PositiveFloat = Field(
        600.0,
        description="Time to pull the image of a row, in seconds. After that the sample fails "
        "with the registry's message.",
    )
    pods: PositiveInt = Field(
        8,
        description="Number of episode pods of one engine, with `image`. Pods without an "
        "episode wait for one as a warm pool.",
    )
    egress_to: Annotated[list[NetworkPolicyPeer], Field(max_length=16)] = Field(
        default_factory=list,
        description="NetworkPolicyPeers that the program may connect to in addition to its "
        "model, with `image`. Default: none, and no DNS.",
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="Pod template, merged over that of sluice (strategic merge), with "
        "`image`. The container is `episode`.",
    )
    sandbox: EpisodeSandbox | None = Field(
        None,
        description="With `image`: `{}` creates each pod, also those of the verifier, by a "
        "Sandbox (agents.x-k8s.io). The cluster needs kubernetes-sigs' agent-sandbox. On a "
        "laptop the field has no effect.",
    )
    verifier: Verifier | None = Field(
        None,
        description="Program that judges what `command` leaves in its directory `artifacts`. "
        "The program then does not see the label, and its `result.json` is not read.",
    )

    @property
    def has_row_images(self) -> bool:
        """True if pods of the job have images that rows name."""
        return any(map(container_images.is_from_row, (self.image, self.verifier_image)))

    @property
    def verifier_image(self) -> str | None:
        """Image of the verifier's pods; None if there are none."""
        return (self.verifier.image or self.image) if self.verifier else None

    @property
    def gives_rewards(self) -> bool:
        """True if episodes carry rewards, so that `spec.reward` may be omitted."""
        return self.command is None or self.verifier is not None

    rules = (
        exactly_one(
            "command",
            "verifiers",
            "openenv",
            "gym",
            message="expected exactly one of command, verifiers, openenv and gym",
        ),
        requires(
            field("openenv").is_set,
            ~any_set("image", "env"),
            "openenv starts no program: leave image and env out",
            "openenv",
        ),
        requires(
            any_set("verifiers", "gym"),
            ~field("image").is_set,
            "verifiers and gym run in the worker's container: leave image out; or give the image a "
            "command that plays the environment",
            "image",
        ),
        Rule(
            written(
                f"!has(self.env) || self.env.all(name, name.matches('{_PATTERN}') && "
                f"!name.matches('{_RESERVED}'))",
                lambda e: all(map(_may_be_set, e.env)),
            ),
            "env: expected names of variables that sluice does not set itself: not SLUICE_..., "
            f"{', '.join(GATEWAY_VARIABLES)}",
            "env",
        ),
        requires(
            _FROM_ROW,
            field("allowedImages").is_set,
            "image refers to the row, which is input from outside: list the images or registries "
            "that rows may name in allowedImages, such as ghcr.io/me/",
            "allowedImages",
        ),
        requires(
            any_set("template", "egressTo", "sandbox"),
            field("image").is_set,
            "template, egressTo and sandbox are of pods, which need an image: set it, or leave "
            "them out",
            "image",
        ),
        requires(
            field("verifier").is_set,
            field("command").is_set,
            "verifier judges what command has left: the other environments give rewards themselves",
            "verifier",
        ),
        requires(
            any_set("verifier.image", "verifier.template"),
            field("image").is_set,
            "verifier.image and verifier.template are of pods, and episodes are pods only if "
            "environment.image is set: set it, or leave them out",
            "image",
        ),
    )
