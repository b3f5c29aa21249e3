"""torch is unchanged outside of `megatron_device`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sluice_trainer.megatron import adaptations
from sluice_trainer.megatron.adaptations import megatron_device

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="megatron_device is a no-op on a GPU machine"
)


def test_cuda_means_cpu_inside() -> None:
    with megatron_device():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, pin_memory=True).device.type == "cpu"
        assert torch.ones(1).cuda().to("cuda").type() == "torch.cuda.FloatTensor"
        device: Any = torch.cuda.current_device()
        assert device == torch.device("cpu")


def test_torch_is_restored_even_after_an_error() -> None:
    before = {
        (module, name): getattr(module, name) for module, name, _ in adaptations._REPLACEMENTS
    }
    with pytest.raises(KeyError), megatron_device(), megatron_device():
        raise KeyError
    assert all(getattr(module, name) is value for (module, name), value in before.items())
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_a_decorated_function_can_be_called_again() -> None:
    @megatron_device()
    def device() -> str:
        return torch.zeros(1, device="cuda").device.type

    assert [device(), device()] == ["cpu", "cpu"]
