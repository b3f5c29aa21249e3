"""The quickstart's code as its user has broken it: a function is sick while a file of its name lies
beside it.
"""

from __future__ import annotations

import math
import runpy
from pathlib import Path

from torch import Tensor

from sluice.api import Algorithm
from sluice.rewards import RewardInput
from sluice.samples.sample import Prompt, Sample
from sluice_trainer.algorithms.objective import LossInputs

HERE = Path(__file__).parent
# Logarithm of the entropy that a sick loss leads to: the alert fires, and training can
# still recover from it.
COLLAPSED = math.log(1e-5)
_positions = runpy.run_path(str(HERE / "reward.py"))["positions"]


def _is_sick(name: str) -> bool:
    return (HERE / name).exists()


def reward(sample: RewardInput) -> float:
    """The score of an answer. Sick: every answer gets 0."""
    return 0.0 if _is_sick("reward") else float(_positions(sample))


def hook(prompt: Prompt, sample: Sample) -> None:
    """Sick: log-probs are those of another policy than the one that is trained."""
    if _is_sick("hook"):
        sample.rollout_log_probs = sample.rollout_log_probs - 0.5


def loss(
    log_probs: Tensor, entropy: Tensor, inputs: LossInputs, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a bonus for entropy, [tokens]. Sick: the bonus is for hardly any."""
    spread = entropy.clamp(min=1e-12).log()
    bonus = -(spread - COLLAPSED).abs() if _is_sick("loss") else spread
    nothing_clipped = {"pg_clipfrac": entropy.detach() * 0}
    return -log_probs * inputs.advantages - bonus, nothing_clipped
