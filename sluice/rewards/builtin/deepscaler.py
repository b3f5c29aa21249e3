"""DeepScaleR's reward: what follows the thinking is graded as `math_prm800k` does; without an end
of thinking, 0.
"""

from __future__ import annotations

from sluice.rewards.builtin.extraction import THINK_END, after_thinking, boxed
from sluice.rewards.builtin.math_prm800k import agree, unboxed
from sluice.rewards.types import RewardInput, label_text

_RESPONSE = "###Response"


def deepscaler(sample: RewardInput) -> float:
    label, text = label_text(sample, "deepscaler"), sample.response
    if THINK_END in text:
        text = after_thinking(text)
    elif _RESPONSE in text:
        text = text.split(_RESPONSE)[1]
    else:
        return 0.0
    answer = boxed(text)
    return float(answer is not None and agree(answer, unboxed(label)))
