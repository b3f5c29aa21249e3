"""Where a trainer's model lives."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
"""The current GPU, or the CPU where there is none."""
