"""Adds the adapter of a job to the weights of the model, each time an update brings one.

The engine keeps a copy of the weights that it has read from its checkpoint, and computes
`W + scaling B A` from it. Generation then runs the same kernels as without an adapter. SGLang's
kernels for adapters compute a second product in each layer; engines that hold several versions or
serve several jobs need those (adapter_store.py).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import tell_once
from ..startup.model_parts import name_in_language_model, tensor_names
from .adapter_places import JOINED
from .adapter_store import Bucket, recorded, spare_bucket
from .adapter_tensors import EMPTY, PREFIX, SCALING, matrix_of
from .parameter_places import Place, find_places

ALL_LINEAR = "all-linear"
# Parts of a model that see images. They have no adapters.
_TOWERS = {"visual", "vision_model", "vision_tower"}
log = logging.getLogger(__name__)


class AddedAdapter:
    """The model's weights in one rank of the engine, with and without the adapter.

    Parameters
    ----------
    layers
        Names of the layers that may have an adapter, such as `q_proj`; `all-linear`: all of them.

    """

    # An update changes the only adapter of the only job.
    versions = 0
    pool = False

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = set(layers)
        self._model: Any = None
        self._parameters: dict[str, torch.nn.Parameter] = {}
        # The parameters as they were read from the checkpoint.
        self._base: dict[str, torch.Tensor] = {}
        self._coming: list[Bucket] = []
        # Memory of the update before.
        self._spare: list[Bucket] = []
        self._places: list[Place] = []
        self._shapes: dict[str, tuple[int, int]] = {}
        # Names of the checkpoint's tensors by their names in its language model.
        self._stored: dict[str, str] = {}
        # GPU work after which the spare memory may be overwritten.
        self._read: Any = None

    def attach(self, _: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Copy the weights that may get an adapter, before SGLang divides up what is left."""
        if runner.is_draft_worker:
            return
        self._model = runner.model
        names = tensor_names(Path(runner.server_args.model_path))
        self._stored = {name_in_language_model(name): name for name in names}
        self._parameters = dict(_linear_weights(runner.model, self.layers))
        # An engine that shares its GPU with a trainer gives it this memory too.
        with runner.memory_saver_adapter.region("weights", enable_cpu_backup=True):
            self._base = {name: weight.data.clone() for name, weight in self._parameters.items()}
        size = sum(tensor.nbytes for tensor in self._base.values())
        log.info("a copy of the weights that adapters change takes %.2f GB", size / 1e9)

    def begin(self, _: str) -> None:
        """Begin an update, and drop what has come of one that has not ended."""
        self._coming = []

    def bucket(self, _: str, names: Any, dtypes: Any, shapes: Any) -> Bucket:
        """Return memory for the next bucket of an update."""
        spare = spare_bucket(self._coming, self._spare, names, dtypes, shapes)
        if spare is not None:
            if self._read is not None:
                self._read.synchronize()
            return spare
        return Bucket.of(names, dtypes, shapes, self._device)

    def received(self, _: str, bucket: Bucket) -> None:
        """Note that a bucket has come."""
        self._coming.append(bucket)

    def commit(self, *_: Any) -> None:
        """Add the adapter that has come. Raises ValueError if it does not fit the model."""
        buckets, self._coming = self._coming, []
        tensors = {name: t for bucket in buckets for name, t in bucket.tensors.items()}
        scaling = float(tensors.pop(SCALING, torch.ones(1)))
        factors = self._factors(tensors)
        shapes = {name: (b.shape[0], a.shape[1]) for name, (a, b) in factors.items()}
        if shapes != self._shapes:
            self._places, self._shapes = self._find(shapes), shapes
            self._reset()
        self._add(factors, scaling)
        tell_once("an adapter is added to the weights of the model")
        self._spare = buckets
        self._read = recorded(self._device)

    @property
    def _device(self) -> Any:
        return next(iter(self._base.values())).device

    def _factors(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B by the checkpoint's names of the matrices that they change."""
        factors = {}
        for name, a in tensors.items():
            layer, is_a, rank = matrix_of(name, a.shape)
            if is_a:
                b = tensors.get(f"{layer}.lora_B.weight")
                if b is None or b.shape[1] != rank:
                    raise ValueError(f"{name} comes without its matrix B")
                matrix = f"{layer.removeprefix(PREFIX)}.weight"
                factors[self._stored.get(name_in_language_model(matrix), matrix)] = a, b
        if not factors:
            raise ValueError(EMPTY)
        return factors

    def _find(self, shapes: Mapping[str, tuple[int, int]]) -> list[Place]:
        """Return the places of all matrices, layer by layer to save memory."""
        if hasattr(self._model, "post_load_weights"):
            raise ValueError(
                f"{type(self._model).__name__} computes other tensors from its weights when they "
                "are loaded, so an adapter cannot be added to them: set weightSync.lora: merged"
            )
        places = []
        for parent, matrices in _by_layer(shapes).items():
            parameters = {n: p for n, p in self._parameters.items() if _layer(n) == parent}
            unknown = [m for m in matrices if not any(_holds(p, m) for p in parameters)]
            if unknown:
                raise ValueError(
                    f"this engine adapts {', '.join(sorted(self.layers))}, and has no such layer "
                    f"for {unknown[0]}: set weightSync.lora: merged"
                )
            try:
                places += find_places(self._model.load_weights, matrices, parameters, self._device)
            except ValueError as error:
                raise ValueError(f"{error}: set weightSync.lora: merged") from None
        return places

    def _reset(self) -> None:
        """Take away an adapter of other layers than the next one's."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._base[name])

    def _add(
        self, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scaling: float
    ) -> None:
        for place in self._places:
            a, b = factors[place.matrix]
            base = place.target(self._base[place.parameter])
            torch.addmm(
                base,
                b[place.rows].to(base.dtype),
                a[:, place.columns].to(base.dtype),
                alpha=scaling,
                out=place.target(self._parameters[place.parameter].data),
            )


def _linear_weights(model: Any, layers: set[str]) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Yield the weights of linear layers of these names that are not quantized."""
    from sglang.srt.layers.linear import LinearBase

    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        leaf = path.rpartition(".")[2]
        chosen = ALL_LINEAR in layers or not layers.isdisjoint({leaf, *JOINED.get(leaf, ())})
        if (
            isinstance(module, LinearBase)
            and weight is not None
            and weight.dim() == 2  # SGLang has convolutions as linear layers, too
            and weight.is_floating_point()
            and weight.element_size() > 1
            and _TOWERS.isdisjoint(path.split("."))
            and chosen
        ):
            yield f"{path}.weight", weight


def _layer(name: str) -> str:
    """Return the number of the layer that has a parameter or matrix; empty if it is in none."""
    return name.partition(".layers.")[2].partition(".")[0]


def _by_layer(shapes: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, tuple[int, int]]]:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, shape in shapes.items():
        found.setdefault(_layer(name), {})[name] = shape
    return found


def _holds(parameter: str, matrix: str) -> bool:
    """Return True if the engine may keep the matrix in this parameter of the same layer.

    The modules between layer and matrix have other names in some engines.
    """
    parameter_leaf, matrix_leaf = (name.split(".")[-2] for name in (parameter, matrix))
    return matrix_leaf in JOINED.get(parameter_leaf, (parameter_leaf,))
