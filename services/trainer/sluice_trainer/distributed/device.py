"""The device of this process's model."""

from __future__ import annotations

import torch

# The current GPU, or the CPU if there is no GPU.
DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
