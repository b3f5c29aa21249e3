"""PEFT's files of an adapter: `adapter_config.json` and `adapter_model.safetensors`.

transformers, vLLM and SGLang load them. Every tensor has the name that PEFT gives it in a
transformers model, whichever backend has trained it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sluice.api.groups.lora import Lora
from sluice.engines.protocol import ADAPTER_PREFIX
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model import safetensors_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TWICE = " (files of a job with initialise: pissa have twice its rank)"
# Shapes of whole tensors by their names in the transformers model.
Shapes = Mapping[str, tuple[int, ...]]


if TYPE_CHECKING:
    from peft import LoraConfig


class AdapterError(ConfigurationError):
    """Files of an adapter that do not fit the job. The message is for people."""


def peft_config(
    settings: Lora, targets: Collection[str], parameters: Collection[str] = ()
) -> LoraConfig:
    """Return PEFT's configuration of the adapter.

    Parameters
    ----------
    settings
        `trainer.lora`.
    targets
        Names of the adapted layers. Engines know these only, no patterns.
    parameters
        Names of adapted tensors of all experts of a layer.

    """
    from peft import LoraConfig  # it takes a second, and most jobs train no adapter

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rank_stabilized,
        target_modules=sorted(targets) or None,
        target_parameters=sorted(parameters) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )


def of_base(config: LoraConfig, base: Path) -> LoraConfig:
    """Return the configuration of an adapter that was trained from the checkpoint `base`."""
    return replace(config, base_model_name_or_path=str(base), inference_mode=True)


def write_adapter(tensors: dict[str, Tensor], directory: Path, config: LoraConfig) -> None:
    """Write both files into `directory`, which exists.

    tensors: by name in the transformers model, such as
    `model.layers.0.self_attn.q_proj.lora_A.weight`.
    """
    named = {ADAPTER_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors_file.save(named, directory / WEIGHTS)
    content = config.to_dict()  # type: ignore[no-untyped-call]
    content = {k: sorted(v) if isinstance(v, set) else v for k, v in content.items()}
    (directory / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def save_adapter(tensors: dict[str, Tensor], directory: Path, config: LoraConfig) -> None:
    """Write an adapter that appears complete or not at all; one of the same name is replaced."""
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_adapter(tensors, temporary, config)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(temporary, directory)


def read_adapter(directory: Path) -> dict[str, Tensor]:
    """Return an adapter's tensors on the CPU, by their names in the transformers model.

    Raises
    ------
    AdapterError
        There is no such file, or it cannot be read.

    """
    path = directory / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    return {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in tensors.items()}


def added(weight: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Return W + factor B A, summed in float32 and rounded to the precision of W.

    weight: [out, in]; a: [rank, in]; b: [out, rank]; each may have further dimensions before.
    """
    return (weight.float() + factor * b.float() @ a.float()).to(weight.dtype)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Raises
    ------
    AdapterError
        The file cannot be read, or describes more than one pair of A and B for each layer.

    """
    path = directory / CONFIG
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        rank, alpha = stored["r"], stored["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{path} cannot be read as PEFT's: {error!r}") from error
    if stored.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{path} is an adapter of type {stored['peft_type']}, expected LORA")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)):
        raise AdapterError(f"{path} has r {rank} and lora_alpha {alpha}, expected numbers above 0")
    for key in ("rank_pattern", "alpha_pattern", "use_dora", "modules_to_save"):
        if stored.get(key):
            raise AdapterError(f"{path} has {key}, which sluice does not support")
    return stored


def shapes(parameters: Mapping[str, Tensor]) -> Shapes:
    """Return the shapes of parameters by name; of sharded ones, those of the whole tensors."""
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def first_adapter(directory: Path, config: LoraConfig, trained: Shapes) -> dict[str, Tensor]:
    """Return the tensors of `lora.from`.

    Raises
    ------
    AdapterError
        It cannot be read, or has another shape than the adapter that the job trains.

    """
    check_config(directory, config, "lora.from")
    tensors = read_adapter(directory)
    check_tensors(directory, tensors, trained)
    return tensors


def check_tensors(directory: Path, tensors: Mapping[str, Tensor], trained: Shapes) -> None:
    """Raise AdapterError unless an adapter has the names and shapes of the trained parameters."""
    if different := sorted(trained.keys() ^ tensors.keys()):
        has = "has no tensor" if different[0] in trained else "has a tensor"
        raise AdapterError(
            f"{directory} {has} {different[0]}: it is of another model, or adapts other layers"
        )
    for name, shape in trained.items():
        if tensors[name].shape != shape:
            raise AdapterError(
                f"{directory}: {name} has shape {tuple(tensors[name].shape)}, but the model asks "
                f"for {shape}"
            )


def check_config(directory: Path, expected: LoraConfig, field: str) -> None:
    """Raise AdapterError unless the adapter in `directory` has the shape that the job trains.

    field: the field of the manifest that asks for it.
    """
    stored = read_config(directory)
    names = {
        "r": "rank",
        "lora_alpha": "alpha",
        "use_rslora": "rankStabilized",
        "target_modules": "targetModules",
    }
    for key, name in names.items():
        has, wants = _plain(stored.get(key)), _plain(getattr(expected, key))
        if has != wants:
            raise AdapterError(
                f"{directory / CONFIG} has {key} {has}, but the job trains {wants}: set "
                f"trainer.lora.{name} to that of the adapter, or another {field}"
                + (_TWICE if key == "r" else "")
            )


def _plain(value: Any) -> Any:
    """Return a value of JSON; of layers' names the last part, which is what a job names."""
    if isinstance(value, (list, set)):
        return sorted({name.rpartition(".")[2] for name in value})
    return value
