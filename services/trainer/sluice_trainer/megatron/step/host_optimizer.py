"""AdamW with its state in host memory, updated by the CPU (ZeRO-Offload, Ren et al. 2021).

Megatron's own offload (`optimizer_cpu_offload`, its HybridDeviceOptimizer) creates an optimizer for
each parameter, keeps copies of all gradients in page-locked memory (four more bytes a parameter),
and sends weights back in float32 from memory that is not page-locked. Unless it is also set to be
precision-aware, the float32 weights stay on the GPU too. Without a GPU it is a no-op, so it cannot
be tested there.

This one copies through a few buffers, piece by piece, and sends weights in the model's precision.
Everything else stays Megatron's: shares of parameters, norm and clipping of gradients, gathering of
weights, and checkpoints.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from sluice.runtime.cpu_threads import usable_processors
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.megatron.step import adamw
from sluice_trainer.memory.staging import host_memory


@dataclass(frozen=True)
class _Piece:
    """Adjacent elements of one parameter, [n] each."""

    # On the device, like `model`.
    gradient: Tensor
    model: Tensor
    # In host memory, like the moments; float32.
    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    # Number of Adam's steps before this one.
    step: float
    # The parameter group: learning rate, betas, eps, weight decay.
    rates: dict[str, Any]

    def update(self, gradient: Tensor) -> None:
        """Take an AdamW step on the CPU. gradient: a copy in host memory."""
        adamw.update(self.weights, gradient, self.exp_avg, self.exp_avg_sq, self.step, self.rates)


class HostOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """Megatron's distributed optimizer with the state of some parameters in host memory.

    For gradient norm and clipping on the device, Megatron gets stand-ins for these parameters:
    tensors of the same shape without memory.
    """

    def move(self, fraction: float) -> None:
        """Move parameters to host memory, one after another, until it holds this fraction.

        Call it once, before the first step.
        """
        shares = [share for group in self.optimizer.param_groups for share in group["params"]]
        left = fraction * sum(share.numel() for share in shares)
        self._stand_ins: dict[Tensor, Tensor] = {}
        moved: dict[Tensor, Tensor] = {}
        for share in shares:
            if left <= 0:
                break
            left -= share.numel()
            moved[share] = host = share.detach().to("cpu", copy=True)
            self._stand_ins[host] = _stand_in(share)
        lists = [group["params"] for group in self.optimizer.param_groups]
        for mains in (*lists, *self.shard_fp32_from_float16_groups, *self.shard_fp32_groups):
            mains[:] = [moved.get(share, share) for share in mains]
        for group in self.model_float16_groups:
            for parameter in group:
                parameter.main_param = moved.get(parameter.main_param, parameter.main_param)
        self._buffers = _Buffers(self.config.params_dtype)

    def on_host(self, weights: Tensor) -> bool:
        """Return True if a parameter's float32 weights and moments are in host memory."""
        return weights in self._stand_ins

    def get_parameters(self) -> list[Tensor]:
        """Return the tensors whose gradients are normed and clipped."""
        return [self._stand_ins.get(share, share) for share in super().get_parameters()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for stand_in in self._stand_ins.values():
            stand_in.grad = None

    def _copy_model_grads_to_main_grads(self) -> None:
        for parameter, share in self._pairs():
            place = self._get_model_param_range_map(parameter)["param"]
            gradient = parameter.main_grad.view(-1)[place.start : place.end]
            self._stand_ins.get(share, share).grad = gradient.float()

    def _copy_main_params_to_model_params(self) -> None:
        """Update the parameters in host memory, and copy each one's weights to the model.

        By now torch's optimizer has queued the update of the others.
        """
        for parameter, share in self._pairs():
            if share not in self._stand_ins:
                self._model_share(parameter).copy_(share)
        with _threads_of_this_rank():
            self._buffers.run(list(self._pieces()))
        for share in self._stand_ins:
            self.optimizer.state[share]["step"] += 1

    def _init_optimizer_states_with_dummy_values(self) -> None:
        for group in self.optimizer.param_groups:
            for share in group["params"]:
                if share in self._stand_ins:
                    self._state(share, group)
                else:
                    share.grad = torch.zeros_like(share)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _pairs(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield (parameter of the model, this rank's share of its float32 weights)."""
        for models, mains in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for parameters, shares in zip(models, mains, strict=True):
                yield from zip(parameters, shares, strict=True)

    def _model_share(self, parameter: Tensor) -> Tensor:
        """Return this rank's share of a parameter in the buffer that other ranks gather from."""
        place = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        number, _, bucket = self.model_param_gbuf_map[parameter]
        weights: Tensor = self.buffers[number].buckets[bucket].param_data.view(-1)
        return weights[place.start : place.end]

    def _state(self, share: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.optimizer.state[share] or adamw.first_state(share, group)
        self.optimizer.state[share] = state
        return state

    def _pieces(self) -> Iterator[_Piece]:
        groups = {s: group for group in self.optimizer.param_groups for s in group["params"]}
        for parameter, share in self._pairs():
            stand_in = self._stand_ins.get(share)
            if stand_in is None or stand_in.grad is None:
                continue
            state = self._state(share, groups[share])
            for place in adamw.pieces(len(share)):
                yield _Piece(
                    gradient=stand_in.grad[place],
                    model=self._model_share(parameter)[place],
                    weights=share[place],
                    exp_avg=state["exp_avg"][place],
                    exp_avg_sq=state["exp_avg_sq"][place],
                    step=state["step"].item(),
                    rates=groups[share],
                )


class _Buffers:
    """Page-locked buffers through which gradients arrive and weights leave.

    64 MiB of gradients take about 2 ms over PCIe, and the CPU needs longer to process them. There
    are two buffers in each direction: while the CPU processes one piece, the next gradient and the
    previous weights are in transit.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._in = [_buffer(torch.float32) for _ in range(2)]
        self._out = [_buffer(dtype) for _ in range(2)]

    def run(self, pieces: list[_Piece]) -> None:
        """Take an AdamW step of all pieces, between earlier and later work on the stream."""
        stream: Any = torch.cuda.Stream
        current, down, up = torch.cuda.current_stream(), stream(), stream()
        down.wait_stream(current)
        up.wait_stream(current)
        sent: list[Any] = []

        def fetch(number: int) -> tuple[Tensor, Any]:
            piece = pieces[number]
            gradient = self._in[number % 2][: len(piece.gradient)]
            with torch.cuda.stream(down):
                gradient.copy_(piece.gradient, non_blocking=True)
            return gradient, down.record_event()

        following = fetch(0) if pieces else None
        for number, piece in enumerate(pieces):
            assert following is not None
            (gradient, arrived), following = following, None
            if number + 1 < len(pieces):
                following = fetch(number + 1)
            arrived.synchronize()
            piece.update(gradient)
            if number >= 2:
                sent[number - 2].synchronize()
            weights = self._out[number % 2][: len(piece.weights)]
            weights.copy_(piece.weights)
            with torch.cuda.stream(up):
                piece.model.copy_(weights, non_blocking=True)
            sent.append(up.record_event())
        current.wait_stream(up)


def _buffer(dtype: torch.dtype) -> Tensor:
    return host_memory(adamw.PIECE * dtype.itemsize).view(dtype)


def _stand_in(share: Tensor) -> Tensor:
    """Return a tensor of the same shape, type and attributes with the memory of one element."""
    stand_in = share.new_empty(1).expand(share.shape)
    vars(stand_in).update(vars(share))
    return stand_in


@contextlib.contextmanager
def _threads_of_this_rank() -> Iterator[None]:
    """Use this rank's share of the processors inside the context.

    torchrun gives each rank one thread unless OMP_NUM_THREADS is set, as it is for a CPU trainer.
    """
    before = torch.get_num_threads()
    if DEVICE.type == "cuda" and before == 1:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(usable_processors() // ranks, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
