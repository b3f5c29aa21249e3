"""spec.rollout.environment: a program that plays each episode."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from sluice.api.schema.base import FreeForm, Model, PositiveFloat, PositiveInt
from sluice.api.schema.kubernetes_fields import NetworkPolicyPeer, PodTemplate
from sluice.api.schema.paths import CommandWord, UserFunction
from sluice.api.schema.rules import (
    Rule,
    any_given,
    at_most_one_of,
    exactly_one,
    field,
    requires,
    written,
)

GATEWAY_VARIABLES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_BASE",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
)
"""Variables that lead a program to the gateway; so do those that begin with SLUICE_."""
# On a job's spec: samples have a reward, of `reward` or of their environment.
REWARDED = written(
    "(has(self.reward) || has(self.rollout.environment) && !has(self.rollout.environment.command))",
    lambda spec: spec.rewarded,
)
_Name = Annotated[str, Field(min_length=1, max_length=253)]
_Value = Annotated[str, Field(max_length=65536)]
_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
_RESERVED = rf"^(SLUICE_.*|{'|'.join(GATEWAY_VARIABLES)})$"


def _may_be_set(name: str) -> bool:
    return bool(re.search(_PATTERN, name)) and not re.search(_RESERVED, name)


class Verifiers(Model):
    """An environment of verifiers 0.4: its tasks, its agents' programs and its rewards."""

    name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Id of the taskset: a package that is installed beside verifiers."
    )
    args: FreeForm = Field(
        default_factory=dict,
        description="Configuration of the environment, as verifiers' `env` has it: `taskset`, "
        "`agent`, ... Agents' programs run beside the worker where it says nothing else.",
    )
    python: CommandWord | None = Field(
        None, description="Interpreter that has verifiers. Default: the worker's own."
    )


class OpenEnvironment(Model):
    """A server of OpenEnv (openenv-core 0.3). Each episode has a session of its own there."""

    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] | None = Field(
        None, description="Its address, as `http://wordle:8000`."
    )
    image: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="In place of `url`: the server's image. On a cluster it runs in each engine's "
        "pod, as the container `openenv`.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        8000, description="With an image: the port that its server listens on."
    )
    action: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None,
        description="The field of an action that the model's text becomes. Default: the only one "
        "that an action needs, where that is a text; else the model answers with JSON.",
    )
    observation: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None,
        description="The field of an observation that the model reads. Default: its only text, or "
        "all of it as JSON.",
    )
    function: UserFunction | None = Field(
        None,
        description="Own function (message, observation) -> action, in place of `action`: from the "
        "model's message, with its tool calls, to what the environment takes.",
    )
    timeout_seconds: PositiveFloat = Field(
        60.0,
        description="Time of one answer; and for which a server that is full, or not there yet, is "
        "asked again.",
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
        """The server's address, as workers see it."""
        return self.url or f"http://127.0.0.1:{self.port}"


class Gym(Model):
    """An environment of Gymnasium's interface: `reset` with a seed, `step` with an action."""

    id: _Name | None = Field(
        None,
        description="Its id, as `module.make` takes it: `FrozenLake-v1`, or `package:Name-v0` of a "
        "package that registers its own.",
    )
    module: _Name = Field(
        "gymnasium", description="The package that has `make(id, **args)`: `gem`, for GEM's."
    )
    make: UserFunction | None = Field(
        None,
        description="In place of `id`: own class or function that is called with `args`, and gives "
        "an environment.",
    )
    args: FreeForm = Field(
        default_factory=dict,
        description="Arguments with which it is made. One that can draw itself as text is made "
        "with `render_mode: ansi`, unless they say otherwise.",
    )
    actions: Annotated[list[_Name], Field(min_length=1, max_length=1024)] | None = Field(
        None,
        description="Names of a discrete space's actions, in their order: the model answers with "
        "them. Default: their numbers.",
    )
    function: UserFunction | None = Field(
        None,
        description="Own class or function between environment and text. It is called with the "
        "environment, for each episode, and gives an object with `observation(observation, info)`, "
        "a text, or `action(answer)`, an action, or both.",
    )
    max_turns: PositiveInt | None = Field(
        None, description="Turns of the model. Default: until the environment ends the episode."
    )
    python: CommandWord | None = Field(
        None, description="Interpreter that has the environment. Default: the worker's own."
    )

    rules = (exactly_one("id", "make", message="expected exactly one of id and make", field="id"),)


class Verifier(Model):
    """A program that judges what an episode's program has left behind, where that cannot reach."""

    command: Annotated[list[CommandWord], Field(min_length=1, max_length=64)] = Field(
        description="The verifier and its arguments, in words as the program's own `command`. It "
        "leaves its reward in `result.json`."
    )
    image: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="Its image, where episodes are pods: it runs in pods of its own. Default: "
        "`environment.image`.",
    )
    pods: PositiveInt = Field(4, description="Where episodes are pods: its pods of one engine.")
    timeout_seconds: PositiveFloat = Field(300.0, description="Time for one episode.")
    hidden_metadata: Annotated[list[str], Field(max_length=64)] = Field(
        default_factory=list,
        description="Keys of a row's metadata that the verifier alone is shown, as the label is.",
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="Where episodes are pods: pod template, merged over ours (strategic merge). "
        "The verifier's container is `verifier`.",
    )


class EpisodeSandbox(Model):
    """Sandboxes of kubernetes-sigs' agent-sandbox make the pods of episodes and of the verifier."""


class RolloutEnvironment(Model):
    """A program that is started for each episode, and asks the gateway for the model."""

    command: Annotated[list[CommandWord], Field(min_length=1, max_length=64)] | None = Field(
        None,
        description="The program and its arguments. A word that names a file beside the manifest "
        "(on a cluster: in the worker's working directory) is that file; any other first word is "
        "looked up on the PATH.",
    )
    verifiers: Verifiers | None = Field(
        None, description="In place of `command`: an environment of the package verifiers."
    )
    openenv: OpenEnvironment | None = Field(
        None, description="In place of `command`: an environment of OpenEnv, behind a URL."
    )
    gym: Gym | None = Field(
        None, description="In place of `command`: an environment of Gymnasium's interface."
    )
    env: Annotated[dict[str, _Value], Field(max_length=64)] = Field(
        default_factory=dict,
        description="Further variables of the program, which inherits few of the worker's.",
    )
    image: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="On a cluster each episode is a pod of this image, which has the program and "
        "`/bin/sh`. On a laptop the program runs as without it, or in a container of it where "
        "`sluice run` has `--containers`.",
    )
    pods: PositiveInt = Field(
        8,
        description="With an image: pods of one engine. Those that have no episode wait for one: "
        "the warm pool.",
    )
    egress_to: Annotated[list[NetworkPolicyPeer], Field(max_length=16)] = Field(
        default_factory=list,
        description="With an image: NetworkPolicyPeers that the program may connect to, besides "
        "its model. Default: none, no DNS either.",
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="With an image: pod template, merged over ours (strategic merge). The "
        "program's container is `episode`.",
    )
    sandbox: EpisodeSandbox | None = Field(
        None,
        description="With an image: `{}` has each pod, the verifier's too, made by a Sandbox "
        "(agents.x-k8s.io) of its own. The cluster needs kubernetes-sigs' agent-sandbox; on a "
        "laptop the field changes nothing.",
    )
    verifier: Verifier | None = Field(
        None,
        description="Judges what `command` has left in its directory `artifacts`. The program then "
        "sees no label, and its own `result.json` is not read.",
    )

    @property
    def gives_rewards(self) -> bool:
        """Its episodes have rewards of their own: the job needs no other."""
        return self.command is None

    rules = (
        exactly_one(
            "command",
            "verifiers",
            "openenv",
            "gym",
            message="expected exactly one of command, verifiers, openenv and gym",
        ),
        requires(
            field("openenv").given,
            ~any_given("image", "env"),
            "openenv starts no program: leave image and env out",
            "openenv",
        ),
        requires(
            any_given("verifiers", "gym"),
            ~field("image").given,
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
            any_given("template", "egressTo", "sandbox"),
            field("image").given,
            "template, egressTo and sandbox are of pods, which need an image: set it, or leave "
            "them out",
            "image",
        ),
        requires(
            field("verifier").given,
            field("command").given,
            "verifier judges what command has left: the other environments give rewards themselves",
            "verifier",
        ),
        requires(
            any_given("verifier.image", "verifier.template"),
            field("image").given,
            "verifier.image and verifier.template are of pods, and episodes are pods only if "
            "environment.image is set: set it, or leave them out",
            "image",
        ),
    )
