"""Low-rank adapters (LoRA, Hu et al. 2021) in Megatron's linear layers.

A layer computes W x + factor B A x, as PEFT's does. The branch is added before the layer's own
collective, so it needs little communication. A column-parallel layer has all of A and its rows of
B; with sequence parallelism each rank multiplies its share of the sequence by A, and the product,
which has few columns, is gathered. A row-parallel layer has its columns of A and all of B; the
partial sums of the branch are reduced together with the layer's.

Adapters are float32 in a model of any precision, and are rounded to it in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
)
from torch import Tensor, nn

from sluice.api.groups.lora import Lora
from sluice_trainer.lora.files import (
    Shapes,
    added,
    first_adapter,
    of_base,
    peft_config,
)
from sluice_trainer.lora.initial import initial_a
from sluice_trainer.lora.pissa import joined_config, principal_part
from sluice_trainer.lora.targets import target_modules
from sluice_trainer.megatron.huggingface import mapping
from sluice_trainer.megatron.huggingface.adapter_entries import (
    A,
    AdapterEntries,
    B,
    adapter_entries,
    linear_modules,
    value_head,
)
from sluice_trainer.megatron.huggingface.entries import Entry
from sluice_trainer.megatron.model.building import ValueHead, initial_weights
from sluice_trainer.megatron.model.experts import GroupedExperts
from sluice_trainer.model.huggingface_config import ModelShape
from sluice_trainer.model.huggingface_files import Reader

if TYPE_CHECKING:
    from peft import LoraConfig


class Adapter(nn.Module):
    """The low-rank branch of a linear layer.

    Attributes
    ----------
    a
        [projections x rank, in] float32, this rank's columns.
    b
        [out, rank] float32, this rank's rows.
    initial_a, initial_b
        With `initialise: pissa` the first weights A0 and -B0, shaped as a and b; else None.
    enabled
        False while the model computes as its base does.
    drops
        True in the pass of an optimizer step.

    """

    owners: Tensor | None
    initial_a: Tensor | None
    initial_b: Tensor | None

    def __init__(self, layer: Any, table: AdapterEntries, settings: Lora) -> None:
        super().__init__()
        group = parallel_state.get_tensor_model_parallel_group()
        outputs, inputs = layer.weight.shape
        device, rank = layer.weight.device, settings.rank
        self.a = nn.Parameter(torch.zeros(table.projections * rank, inputs, device=device))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=device))
        for name, trained in (("initial_a", self.a), ("initial_b", self.b)):
            initial = torch.zeros_like(trained, requires_grad=False) if settings.pissa else None
            self.register_buffer(name, initial, persistent=False)
        self.enabled, self.drops = True, False
        self._factor = settings.scaling
        self._dropout = settings.dropout
        self._gathers = layer.sequence_parallel and not table.row_parallel
        owners = table.owners(group.rank(), group.size())
        self.register_buffer(
            "owners", None if owners is None else owners.to(device), persistent=False
        )
        split, whole = (self.a, self.b) if table.row_parallel else (self.b, self.a)
        # Megatron's marks: a split parameter counts on every rank in the gradient's norm. Of a
        # whole one each rank computes the gradient of its tokens or of its inputs, and Megatron
        # adds them.
        setattr(split, "tensor_model_parallel", group.size() > 1)  # noqa: B010
        setattr(whole, "sequence_parallel", layer.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        """Return factor B A x, [..., out], of this rank's share; a row-parallel one is partial."""
        low = F.linear(self._dropped(x), self.a.to(x.dtype)) * self._factor
        if self.initial_a is not None:
            initial = F.linear(x, self.initial_a.to(x.dtype)) * self._factor
            low = torch.cat((low, initial), -1)
        if self._gathers:
            low = gather_from_sequence_parallel_region(low)
        return F.linear(low, self._wide().to(x.dtype))

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.drops and self._dropout):
            return x
        # Tensor-parallel ranks hold different tokens or inputs, and draw differently.
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self._dropout)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's share of W + factor B A, from that of W."""
        a = self.a if self.initial_a is None else torch.cat((self.a, self.initial_a))
        return added(weight, a, self._wide(), self._factor)

    def _wide(self) -> Tensor:
        """Return B for all rows of A, [out, projections x rank], and then -B0 if there is one.

        The blocks of other projections are 0.
        """
        parts = [b for b in (self.b, self.initial_b) if b is not None]
        if self.owners is not None:
            owners = self.owners[:, :, None]
            parts = [(owners * b[:, None, :]).flatten(1) for b in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Adapters:
    """The adapters of a model that is split over ranks, and their names in transformers.

    Attributes
    ----------
    targets
        Names of transformers' layers that have one.
    entries
        The trained parameters of the whole model: those of adapters, and a critic's value head.

    """

    def __init__(
        self, chunks: list[Any], shape: ModelShape, settings: Lora, seed: int, base: Path | None
    ) -> None:
        """Give the targeted layers an adapter, and freeze everything else.

        Parameters
        ----------
        chunks
            Chunks of the model, with its initial weights.
        shape
            Shape of the model.
        settings
            `trainer.lora`.
        seed
            Seed of the first weights.
        base
            Checkpoint of the model's initial weights; None: they are drawn from the seed.

        Raises
        ------
        UnsupportedModelError
            A target is no linear layer of the decoder.
        AdapterError
            The adapter in `lora.from` cannot be read, or has another shape.

        """
        self._chunks, self._settings = chunks, settings
        self.targets = target_modules(
            settings,
            linear_modules(shape),
            shape.model_type,
            mixture=shape.experts is not None,
        )
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        table = list(adapter_entries(shape, tensor, self.targets, settings.rank))
        self.entries: list[Entry] = [entry for layer in table for entry in (layer.a, layer.b)]
        by_name = {layer.layer: layer for layer in table}
        self._by_weight: dict[str, Adapter] = {}
        for chunk in chunks:
            self._add(chunk, by_name)
        self._set_first(shape, seed, base)
        self.entries += value_head(shape)

    def _add(self, chunk: Any, table: dict[str, AdapterEntries]) -> None:
        chunk.requires_grad_(False)
        for name, layer in mapping.named_modules(chunk):
            if isinstance(layer, GroupedExperts):
                layer.join_frozen_weights()
            if name in table:
                adapter = Adapter(layer, table[name], self._settings)
                _attach(layer, adapter)
                self._by_weight[f"{name}.weight"] = adapter
        if chunk.pre_process:
            # Recomputed layers have no gradients unless their input asks for them.
            chunk.embedding.register_forward_hook(_require_gradient)
        if chunk.post_process and isinstance(chunk.output_layer, ValueHead):
            # A head that starts at 0 has no base to adapt.
            chunk.output_layer.float().requires_grad_(True)

    def _set_first(self, shape: ModelShape, seed: int, base: Path | None) -> None:
        """Set the first weights: those of `lora.from`, of PiSSA, or A drawn and B = 0."""
        # A critic does not continue from the policy's adapter.
        directory = None if shape.value_head else self._settings.from_
        if self._settings.pissa:
            with initial_weights(shape, base, seed) as read:
                self._set_principal_parts(read, seed)
            return

        def drawn(name: str, size: tuple[int, ...]) -> Tensor:
            module = name.removesuffix(f".{A}")
            if module == name:
                return torch.zeros(size)
            return initial_a(module, self._settings.rank, size[1], seed)

        if directory is None:
            mapping.fill(self.entries, self.trained, drawn)
        else:
            adapter = Path(directory)
            self.set(first_adapter(adapter, self.config(adapter), self.shapes))

    def _set_principal_parts(self, read: Reader, seed: int) -> None:
        """Set the first weights of PiSSA, and the same ones with the opposite sign.

        Every rank decomposes the whole weights of its layers.
        """
        shapes = self.shapes

        @cache
        def parts(module: str) -> tuple[Tensor, Tensor]:
            size = shapes[f"{module}.{B}"][0], shapes[f"{module}.{A}"][1]
            weight = read(f"{module}.weight", size)
            return principal_part(weight, module, self._settings, seed)

        def first(name: str, _: tuple[int, ...]) -> Tensor:
            is_a = name.endswith(A)
            a, b = parts(name.removesuffix(f".{A if is_a else B}"))
            return a if is_a else b

        def opposite(name: str, size: tuple[int, ...]) -> Tensor:
            return first(name, size) * (1 if name.endswith(A) else -1)

        mapping.fill(self.entries, self.trained, first)
        mapping.fill(self.entries, self._initial, opposite)

    @property
    def trained(self) -> dict[str, list[Tensor]]:
        """The parameters of this rank that learn, by Megatron's names; each alone in a list."""
        return mapping.named_trained(self._chunks)

    @property
    def _initial(self) -> dict[str, list[Tensor]]:
        """The frozen tensors of PiSSA of this rank, by the names of the trained parameters."""
        return {
            f"{name.removesuffix('.weight')}.adapter.{side}": [tensor]
            for name, adapter in self._by_weight.items()
            for side, tensor in (("a", adapter.initial_a), ("b", adapter.initial_b))
            if tensor is not None
        }

    @property
    def initial_names(self) -> set[str]:
        """The names in transformers of tensors that files have twice, with PiSSA."""
        sides = (f".{A}", f".{B}") if self._settings.pissa else ()
        return {name for name in self.shapes if name.endswith(sides)}

    def initial(self) -> dict[str, Tensor]:
        """Return the whole frozen tensors of PiSSA, by transformers' names. Collective."""
        names = self.initial_names
        table = [entry for entry in self.entries if entry.hf[0][0] in names]
        return dict(mapping.whole_tensors(table, self._initial)) if table else {}

    def set_initial(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the frozen tensors of PiSSA from whole ones by transformers' names."""
        mapping.fill(self.entries, self._initial, lambda name, _: tensors[name])

    @property
    def shapes(self) -> Shapes:
        """The shapes of the whole tensors by transformers' names."""
        return dict(source for entry in self.entries for source in entry.hf)

    def set(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the trained parameters from whole tensors by transformers' names."""
        mapping.fill(self.entries, self.trained, lambda name, _: tensors[name])

    def shares(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shares of whole tensors that are shaped as the trained ones."""
        empty = {name: [torch.empty_like(own)] for name, (own,) in self.trained.items()}
        mapping.fill(self.entries, empty, lambda name, _: tensors[name])
        return {name: share for name, (share,) in empty.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole trained tensors in float32, by transformers' names. Collective."""
        return dict(mapping.whole_tensors(self.entries, self.trained))

    def gathered(self, shares: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors from a flat one for each trained parameter. Collective."""
        held = {name: [shares[own].float().view_as(own)] for name, (own,) in self.trained.items()}
        return dict(mapping.whole_tensors(self.entries, held))

    def config(self, base: Path) -> LoraConfig:
        """Return PEFT's configuration, of an adapter trained from the checkpoint `base`."""
        config = peft_config(self._settings, self.targets)
        return of_base(joined_config(config) if self._settings.pissa else config, base)

    def merged(self, parameter: str, weight: Tensor) -> Tensor:
        """Return this rank's share of a weight, with its adapter added in."""
        adapter = self._by_weight.get(parameter)
        return adapter.merged(weight) if adapter else weight

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute as the base model does."""
        for adapter in self._by_weight.values():
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self._by_weight.values():
                adapter.enabled = True

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Apply the adapters' dropout, which only the pass of an optimizer step has."""
        for adapter in self._by_weight.values():
            adapter.drops = True
        try:
            yield
        finally:
            for adapter in self._by_weight.values():
                adapter.drops = False


def _attach(layer: Any, adapter: Adapter) -> None:
    """Add an adapter's branch to the product of a linear layer, before the layer's collective."""
    layer.adapter = adapter
    product = layer._forward_impl

    def with_branch(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: A002
        output: Tensor = product(input, weight, *args, **options)
        return output + adapter(input) if adapter.enabled else output

    layer._forward_impl = with_branch


def _require_gradient(_: Any, __: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()
