"""The rewards of a run of verl, in its own environment, as sluice's functions give them: one that
verl itself calls is not told whether a response was cut off.
"""

from __future__ import annotations

import json
from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.import_utils import load_extern_object

from sluice.rewards import RewardInput


class Rewards(RewardManagerBase):
    """verl's reward manager, with a reward of sluice. Its file and name are those of verl's
    `custom_reward_function`.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_others: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        function = config.reward.custom_reward_function
        self._function = load_extern_object(function.path, function.name)
        self._longest = config.data.max_response_length

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        item = data[-1]
        responses = item.batch["responses"]
        length = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        ids = responses[:length].tolist()
        sample = RewardInput(
            response=self.tokenizer.decode(ids, skip_special_tokens=True),
            tokens=ids,
            response_length=length,
            truncated=length == self._longest and ids[-1] != self.tokenizer.eos_token_id,
            **json.loads(item.non_tensor_batch["extra_info"]["row"]),
        )
        return {"reward_score": float(self._function(sample)), "reward_extra_info": {}}
