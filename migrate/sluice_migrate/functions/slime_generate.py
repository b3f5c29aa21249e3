"""Runs slime's generate functions (`--custom-generate-function-path`).

A function is `async def generate(args, sample, sampling_params)` and returns the sample. It asks
`http://{args.sglang_router_ip}:{args.sglang_router_port}/generate`, which is the episode's gateway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sluice.api import RLJobSpec
from sluice.data import chat
from sluice.samples.sample import Purpose, SampleStatus
from sluice_migrate.functions.episodes import (
    UnsupportedError,
    add_metadata,
    claim_tokens,
    source_of,
)
from sluice_migrate.stubs.slime.types import Sample, Status

if TYPE_CHECKING:
    from sluice_rollout.episode import Episode

_PARAMETERS = ["args", "sample"]
_STATUSES = {Status.COMPLETED: SampleStatus.COMPLETED, Status.TRUNCATED: SampleStatus.TRUNCATED}


def is_generate(function: Callable[..., Any]) -> bool:
    """Tell whether an async function has slime's parameters."""
    if not _is_async(function):
        return False
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return False
    return len(names) >= 3 and names[:2] == _PARAMETERS


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (function, call)))


class Args(SimpleNamespace):
    """The arguments of slime that generate functions read, for one episode.

    Values of rollout.functionArgs win.
    """

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args.{name}: sluice does not set this argument of slime; set it in "
            "spec.rollout.functionArgs"
        )


def args_of(spec: RLJobSpec, episode: Episode, sampling_params: dict[str, Any]) -> Args:
    """Return the arguments of an episode."""
    host, port = episode.gateway.router
    source = source_of(spec, episode.prompt.dataset)
    context = spec.rollout.engine_args.get("context-length")
    values: dict[str, Any] = {
        "hf_checkpoint": getattr(episode.tokenizer, "name_or_path", spec.model.path),
        "tokenizer": episode.tokenizer,
        "sampling_params": sampling_params,
        "sglang_router_ip": host,
        "sglang_router_port": port,
        "sglang_server_concurrency": spec.rollout.concurrency,
        "rollout_temperature": sampling_params["temperature"],
        "rollout_top_p": sampling_params["top_p"],
        "rollout_top_k": sampling_params["top_k"],
        "rollout_max_response_len": sampling_params["max_new_tokens"],
        "rollout_max_context_len": context,
        "rollout_max_prompt_len": spec.data.max_prompt_tokens,
        "rollout_stop": sampling_params["stop"],
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_batch_size": spec.rollout.batch_size,
        "rollout_seed": spec.data.seed,
        "n_samples_per_prompt": spec.rollout.samples_per_prompt,
        "max_tokens_per_gpu": spec.trainer.max_tokens_per_gpu,
        "context_parallel_size": spec.trainer.parallelism.context,
        "apply_chat_template": bool(source and source.apply_chat_template),
        "apply_chat_template_kwargs": dict(source.chat_template_args) if source else {},
        "reward_key": spec.reward.key if spec.reward else None,
        "custom_generate_function_path": spec.rollout.function,
        # An interrupted function starts again, so it never continues a partial response.
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "group_rm": False,
        "ci_test": False,
        "use_rollout_routing_replay": False,
        "router_policy": None,
        "sglang_model_routers": None,
    }
    return Args(**(values | spec.rollout.function_args))


def sampling_of(episode: Episode) -> dict[str, Any]:
    """Return SGLang's parameters as slime passes them: special tokens and stops stay in texts."""
    form = {
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    return episode.sampling | form


class Generate:
    """Plays an episode with a generate function of slime."""

    def __init__(self, function: Callable[..., Any], spec: RLJobSpec) -> None:
        self.function, self.spec = function, spec
        self.takes_evaluation = "evaluation" in inspect.signature(function).parameters

    async def __call__(self, episode: Episode) -> None:
        """Play the episode. Raises UnsupportedError and ClaimError."""
        params = sampling_of(episode)
        evaluation = episode.prompt.purpose is Purpose.EVALUATE
        returned = await self.function(
            args_of(self.spec, episode, dict(params)),
            self._sample(episode),
            params,
            **({"evaluation": evaluation} if self.takes_evaluation else {}),
        )
        set_sample(episode, _single_sample(returned))

    def _sample(self, episode: Episode) -> Sample:
        """Return the sample before generation."""
        prompt = episode.prompt
        source = source_of(self.spec, prompt.dataset)
        text = prompt.prompt
        if source and source.apply_chat_template:
            text = chat.render(
                episode.tokenizer, text, chat=True, tools=prompt.tools,
                arguments=source.chat_template_args,
            )  # fmt: skip
        tools = {"tools": prompt.tools} if prompt.tools else {}
        return Sample(
            group_index=prompt.group_id,
            index=episode.sample.index,
            prompt=text,
            label=prompt.label,
            metadata=prompt.metadata | tools,
        )


def _single_sample(returned: Any) -> Sample:
    """Return the sample of the episode. Raises UnsupportedError."""
    if isinstance(returned, list) and len(returned) == 1:
        (returned,) = returned
    if isinstance(returned, list):
        raise UnsupportedError(
            f"the function returned {len(returned)} samples, but an episode has one. Return the "
            "one to train, or use episode.branch for several (docs/rollout.md)"
        )
    if not hasattr(returned, "loss_mask"):
        raise UnsupportedError(
            f"the function returned {type(returned).__name__}: expected slime's Sample"
        )
    return returned  # type: ignore[no-any-return]


def set_sample(episode: Episode, sample: Sample) -> None:
    """Set the episode's tokens, mask, status, reward and metadata from slime's sample.

    Raises
    ------
    UnsupportedError
        If the sample failed, or is inconsistent.
    ClaimError
        If the engine did not sample a token that is trained.

    """
    status = Status(getattr(sample.status, "value", sample.status))
    if status in (Status.FAILED, Status.ABORTED):
        raise UnsupportedError(f"the function gave its sample the status {status.value!r}")
    n = sample.response_length
    mask = [1] * n if sample.loss_mask is None else list(sample.loss_mask)
    if len(mask) != n:
        raise UnsupportedError(
            f"sample.loss_mask has {len(mask)} entries, but sample.response_length is {n}: "
            "expected the same number"
        )
    cut = claim_tokens(episode, sample.tokens, [0] * n if sample.remove_sample else mask)
    if status in _STATUSES or cut:
        episode.sample.status = SampleStatus.TRUNCATED if cut else _STATUSES[status]
    episode.sample.response = sample.response
    if sample.reward is not None:
        episode.reward(sample.reward)
    extras = sample.extras() if isinstance(sample, Sample) else {}
    add_metadata(episode, {k: v for k, v in sample.metadata.items() if k != "tools"} | extras)
