"""Runs verl's agent loops: subclasses of `AgentLoopBase` whose `run` returns an AgentLoopOutput.

A loop asks `server_manager.generate(request_id=, prompt_ids=, sampling_params=)`, which is the
episode's gateway. Each episode has a new loop, as in verl.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sluice.api import RLJobSpec
from sluice.samples.sample import Purpose, SampleStatus
from sluice_migrate.functions.episodes import (
    UnsupportedError,
    add_metadata,
    claim_tokens,
    source_of,
)
from sluice_migrate.stubs.http import post
from sluice_migrate.stubs.verl.agent_loop import AgentLoopOutput, DictConfigWrap
from sluice_migrate.stubs.verl.replica import TokenOutput

if TYPE_CHECKING:
    from sluice_rollout.episode import Episode
    from sluice_rollout.gateway.endpoint import Gateway

_BASE = "AgentLoopBase"
_RENAMED = {"max_tokens": "max_new_tokens"}
# verl's sampling parameters that are dropped: the gateway always returns log-probs.
_DROPPED = ("logprobs", "prompt_logprobs")


def is_agent_loop(value: Any) -> bool:
    """Tell whether this is a subclass of AgentLoopBase, the stub's or that of an installed verl."""
    return inspect.isclass(value) and any(
        base.__name__ == _BASE and base is not value for base in value.__mro__
    )


class Config(dict[str, Any]):
    """The part of verl's configuration that agent loops read: by attributes, by keys, by `get`."""

    def __init__(self, values: Mapping[str, Any], path: str = "config") -> None:
        super().__init__(
            {
                k: Config(v, f"{path}.{k}") if isinstance(v, Mapping) else v
                for k, v in values.items()
            }
        )
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        path = object.__getattribute__(self, "_path")
        raise AttributeError(
            f"{path}.{name}: sluice does not set this key of verl; set it in "
            "spec.rollout.functionArgs, under `config`"
        )


def config_of(spec: RLJobSpec, dataset: str) -> Config:
    """Return the configuration for a data set; values of rollout.functionArgs.config win."""
    source, sampling = source_of(spec, dataset), spec.rollout.sampling
    rollout = {
        "name": spec.rollout.engine,
        # verl has always a limit; 2**31 stands for none.
        "prompt_length": spec.data.max_prompt_tokens or 2**31,
        "response_length": sampling.max_response_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "n": spec.rollout.samples_per_prompt,
        "calculate_log_probs": True,
        "full_determinism": False,
        "multi_turn": {
            "enable": True,
            "max_user_turns": None,
            "max_assistant_turns": None,
            "max_parallel_calls": 1,
            "max_tool_response_length": 256,
            "tool_response_truncate_side": "middle",
            "format": "hermes",
        },
    }
    base = {
        "actor_rollout_ref": {"model": {"path": spec.model.path}, "rollout": rollout},
        "data": {
            "max_prompt_length": spec.data.max_prompt_tokens,
            "max_response_length": sampling.max_response_tokens,
            "apply_chat_template_kwargs": dict(source.chat_template_args) if source else {},
        },
    }
    return Config(_merged(base, spec.rollout.function_args.get("config") or {}))


def _merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings key by key; values of `other` win."""
    both = {k: _merged(v, other[k]) for k, v in base.items() if _all_mappings(v, other.get(k))}
    return {**base, **other, **both}


def _all_mappings(*values: Any) -> bool:
    return all(isinstance(value, Mapping) for value in values)


class ServerManager:
    """The engine as a loop asks it, with token ids in and out."""

    def __init__(self, gateway: Gateway) -> None:
        self._url = "http://{}:{}/generate".format(*gateway.router)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **media: Any,
    ) -> TokenOutput:
        """Generate a turn after these tokens.

        Raises PostError, and UnsupportedError for images, sound and video.
        """
        if any(media.get(name) for name in ("image_data", "video_data", "audio_data")):
            raise UnsupportedError(
                "server_manager.generate: sluice does not support images, sound and video"
            )
        params = {_RENAMED.get(k, k): v for k, v in sampling_params.items() if k not in _DROPPED}
        payload = {"input_ids": [int(i) for i in prompt_ids], "sampling_params": params}
        meta = (await post(self._url, payload))["meta_info"]
        entries = meta["output_token_logprobs"]
        return TokenOutput(
            token_ids=[entry[1] for entry in entries],
            log_probs=[entry[0] for entry in entries],
            stop_reason="completed" if meta["finish_reason"]["type"] == "stop" else "length",
        )


class AgentLoop:
    """Plays an episode with an agent loop of verl."""

    def __init__(self, loop: Any, spec: RLJobSpec) -> None:
        self.loop, self.spec = loop, spec

    async def __call__(self, episode: Episode) -> None:
        """Play the episode. Raises UnsupportedError and ClaimError."""
        config = config_of(self.spec, episode.prompt.dataset)
        arguments = {k: v for k, v in self.spec.rollout.function_args.items() if k != "config"}
        loop = self.loop(
            trainer_config=DictConfigWrap(config),
            server_manager=ServerManager(episode.gateway),
            tokenizer=episode.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(config.data),
            **arguments,
        )
        params = {k: episode.sampling[k] for k in ("temperature", "top_p", "top_k", "stop")}
        set_sample(episode, await loop.run(params | {"repetition_penalty": 1.0}, **row_of(episode)))


def row_of(episode: Episode) -> dict[str, Any]:
    """Return the fields of a row as verl's data set has them."""
    prompt = episode.prompt
    messages = prompt.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    extra = prompt.metadata.get("extra_info")
    return prompt.metadata | {
        "raw_prompt": messages,
        "data_source": prompt.metadata.get("data_source", prompt.dataset),
        "reward_model": {"ground_truth": prompt.label},
        "extra_info": extra if isinstance(extra, dict) else prompt.metadata,
        "index": prompt.row,
        "uid": str(prompt.group_id),
        "validate": prompt.purpose is Purpose.EVALUATE,
    }


def set_sample(episode: Episode, output: AgentLoopOutput) -> None:
    """Set the episode's tokens, mask, reward and metadata from the loop's output.

    Raises UnsupportedError and ClaimError.
    """
    if not hasattr(output, "response_mask"):
        raise UnsupportedError(
            f"run returned {type(output).__name__}: expected one AgentLoopOutput"
        )
    mask = output.response_mask
    if len(mask) != len(output.response_ids):
        raise UnsupportedError(
            f"response_mask has {len(mask)} entries for {len(output.response_ids)} response_ids: "
            "expected the same number"
        )
    if claim_tokens(episode, [*output.prompt_ids, *output.response_ids], mask):
        episode.sample.status = SampleStatus.TRUNCATED
    if output.reward_score is not None:
        episode.reward(output.reward_score)
    add_metadata(episode, output.extra_fields | {"num_turns": output.num_turns})
