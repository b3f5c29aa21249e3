"""DeepScaleR's reward: grade the text after the reasoning like `math_prm800k`.

A response that does not end its reasoning gets 0.
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
