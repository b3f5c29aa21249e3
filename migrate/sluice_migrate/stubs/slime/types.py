"""slime.utils.types: the sample of generate functions and reward functions."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Any


class Status(enum.Enum):
    """Status of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """slime's sample, without images, experts and top-p sets.

    tokens: ids of prompt and response. loss_mask, rollout_log_probs: [response_length]. The reward
    function also sees attributes that the generate function adds.
    """

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    rollout_id: int | None = None
    non_generation_time: float = 0.0

    Status = Status

    @property
    def effective_response_length(self) -> int:
        """Number of tokens that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or its part that `args.reward_key` names."""
        return self.reward if not args.reward_key else self.reward[args.reward_key]

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Add tokens of the model with their log-probs, or of the environment (trainable=False).

        The status follows the finish reason of `meta_info`, unless `update_terminal_info` is False.
        Raises ValueError if the numbers of tokens and log-probs differ.
        """
        ids = [int(token) for token in tokens] if tokens is not None else []
        numbers = _log_probs(ids, log_probs, trainable=trainable)
        self.response += text or ""
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = [*self.tokens, *ids]
        self.loss_mask += [int(trainable)] * len(ids)
        self.rollout_log_probs += numbers
        self.response_length += len(ids)
        if meta_info and update_terminal_info:
            self._update_status(meta_info)

    def _update_status(self, meta_info: dict[str, Any]) -> None:
        statuses = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
        finish = str((meta_info.get("finish_reason") or {}).get("type"))
        self.status = statuses.get(finish, self.status)

    def extras(self) -> dict[str, Any]:
        """Return attributes that the function added to slime's."""
        names = {field.name for field in fields(self)}
        return {name: value for name, value in vars(self).items() if name not in names}


def _log_probs(ids: list[int], log_probs: Any, *, trainable: bool) -> list[float]:
    """Return a log-prob for each token. Raises ValueError."""
    if not trainable:
        if log_probs is not None:
            raise ValueError("tokens that are not trainable have no log-probs")
        return [0.0] * len(ids)
    numbers = [float(number) for number in log_probs] if log_probs is not None else []
    if len(numbers) != len(ids):
        raise ValueError(
            f"{len(numbers)} log-probs for {len(ids)} trainable tokens: expected the same number"
        )
    return numbers
