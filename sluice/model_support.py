"""What tests have shown of model families, with each trainer backend and each engine.

Tests write and check the table (`model_support.json`, `make models`). They run on CPUs, with tiny
models of random weights: what works there says that names, shapes and formulas are right. A cell
that no test ran is not in the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from sluice.api import RLJobSpec, Rollout, Trainer

FILE = Path(__file__).with_suffix(".json")
WORKS = "works"
NOT_TESTED = "not tested"
_FAILS = "fails: "

# What is tested of a trainer backend and of an engine.
OF_BACKENDS = ("trains", "lora", "images")
OF_ENGINES = ("serves", "updates", "lora", "images")
Table = dict[str, dict[str, dict[str, str]]]


def uses() -> dict[str, tuple[str, ...]]:
    """Return what is tested of each part, which is a backend or an engine."""
    backends = get_args(Trainer.model_fields["backend"].annotation)
    engines = get_args(Rollout.model_fields["engine"].annotation)
    return dict.fromkeys(backends, OF_BACKENDS) | dict.fromkeys(engines, OF_ENGINES)


@cache
def table() -> Table:
    """Return the outcomes by model type, part and use."""
    stored: Table = json.loads(FILE.read_text())
    return stored


def outcome(model_type: str, part: str, use: str) -> str:
    """Return `works`, `not tested`, or `fails: ` and the reason."""
    return table().get(model_type, {}).get(part, {}).get(use, NOT_TESTED)


def failure(reason: str) -> str:
    """Return the outcome of a cell that does not work."""
    return _FAILS + reason


def reason(outcome: str) -> str:
    """Return why a cell does not work; empty if it works or was not tested."""
    return outcome.removeprefix(_FAILS) if outcome.startswith(_FAILS) else ""


def row(config: Mapping[str, Any]) -> str:
    """Return the model type under which the table has a checkpoint with this config.json.

    It is that of the language model if the table does not have the whole model.
    """
    whole = str(config.get("model_type"))
    text = config.get("text_config")
    inner = str(text.get("model_type")) if isinstance(text, dict) else whole
    return inner if whole not in table() and inner in table() else whole


def needs(spec: RLJobSpec) -> Iterator[tuple[str, str, str, bool]]:
    """Yield field, part and use of each cell that a job depends on, and whether it runs on CPUs."""
    backend, images = spec.trainer.backend, spec.data.images is not None
    lora = spec.trainer.lora is not None
    on_cpu = spec.trainer.gpus_per_node == 0
    if not spec.debug.rollout_only:
        for use, needed in (("trains", True), ("lora", lora), ("images", images)):
            if needed:
                yield "trainer.backend", backend, use, on_cpu
    if not spec.generates:
        return
    engine, on_cpu = spec.rollout.engine, spec.rollout.gpus_per_replica == 0
    adapter = spec.weight_sync.lora == "adapter" and lora
    for use, needed in (
        ("serves", True),
        ("updates", not adapter),
        ("lora", adapter),
        ("images", images),
    ):
        if needed:
            yield "rollout.engine", engine, use, on_cpu


def findings(spec: RLJobSpec, config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return problems and notes about a job's model with its backend and engine.

    A cell that fails on a CPU is a problem of a job on CPUs alone: GPUs have other kernels.
    """
    problems, untested = list[str](), dict[str, list[str]]()
    name = row(config)
    notes: list[str] = []
    for field, part, use, on_cpu in needs(spec):
        result = outcome(name, part, use)
        if why := reason(result):
            text = f"model_type {name!r} ({use}) does not work with {field}: {part} on a CPU: {why}"
            (problems if on_cpu else notes).append(text)
        elif result == NOT_TESTED:
            untested.setdefault(f"{field}: {part}", []).append(use)
    if untested:
        cells = " and ".join(f"{what} ({', '.join(uses)})" for what, uses in untested.items())
        notes.append(
            f"model_type {name!r} is not tested with {cells}: try it with a few steps first "
            "(docs/models.md lists what tests show)"
        )
    return problems, notes
