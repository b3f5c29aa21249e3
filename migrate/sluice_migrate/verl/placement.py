"""Translates verl's GPUs to trainer and engines."""

from __future__ import annotations

from collections.abc import Mapping

from sluice_migrate.draft import Draft
from sluice_migrate.translation import Setting, how_to_supply

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_OFFLOADS = (
    "fsdp_config.param_offload",
    "fsdp_config.optimizer_offload",
    "megatron.param_offload",
    "megatron.grad_offload",
    "megatron.optimizer_offload",
)
_NODES = ("rollout.nnodes", f"{_ROLLOUT}.nnodes")
_GPUS = ("rollout.n_gpus_per_node", f"{_ROLLOUT}.n_gpus_per_node")
_TENSOR = f"{_ROLLOUT}.tensor_model_parallel_size"
# Keys that this module reads.
PLACEMENT_KEYS = (_TENSOR, *_NODES, *_GPUS, *(f"{_ACTOR}.{group}" for group in _OFFLOADS))

Later = Mapping[str, Setting | None]


def placement(draft: Draft, later: Later, *, separate: bool) -> None:
    """Set the engines' GPUs: those of the trainer, or `separate` ones."""
    separate = separate or later[_GPUS[0]] is not None
    # verl splits an engine over two GPUs if the script does not say otherwise.
    engine, per_node = _number(later[_TENSOR], 2), draft.get("trainer.gpusPerNode", 8)
    gpus = _first(later, _GPUS) if separate else None
    machine = _number(gpus, per_node)
    draft.set("rollout.gpusPerReplica", min(engine, machine), _TENSOR)
    if engine > machine:
        draft.set("rollout.nodesPerReplica", -(-engine // machine), _TENSOR)
    if not separate and per_node % engine == 0:
        _share(draft, later)
        return
    trainer = draft.get("trainer.nodes", 1) * per_node
    total = _number(_first(later, _NODES), 1) * machine if separate else trainer
    origin = _GPUS[0] if separate else "trainer.nnodes"
    draft.set("rollout.replicas", max(1, total // engine), origin)
    if separate:
        _note_missing(draft, later)
        return
    why = (
        f"verl's engines share the trainer's {trainer} GPUs; engines of {engine} GPUs cannot in "
        "sluice, so they have their own"
    )
    draft.note("check", "rollout.replicas", f"{why}: {2 * trainer} GPUs together")


def _share(draft: Draft, later: Later) -> None:
    draft.set("trainer.colocate", True, "hybrid engine")
    if _offloads(later, "optimizer_offload") and not _offloads(later, "param_offload"):
        draft.set("trainer.offload", "optimizer", f"{_ACTOR}: optimizer_offload")


def _note_missing(draft: Draft, later: Later) -> None:
    """Report numbers of GPUs that the script does not contain."""
    for setting in (_first(later, _NODES), _first(later, _GPUS)):
        if setting and setting.missing:
            why = f"the value is not in the script: {how_to_supply(setting.missing)}"
            draft.note("check", "rollout.replicas", f"{setting.name}: {why}", setting.line)


def _first(later: Later, names: tuple[str, ...]) -> Setting | None:
    """Return the first of several names for one setting, preferably an explicit one."""
    settings = [setting for name in names if (setting := later[name])]
    explicit = [setting for setting in settings if setting.explicit]
    return next(iter([*explicit, *settings]), None)


def _offloads(later: Later, what: str) -> bool:
    switches = [later[f"{_ACTOR}.{group}"] for group in _OFFLOADS if group.endswith(what)]
    return any(setting and setting.value is True for setting in switches)


def _number(setting: Setting | None, default: int) -> int:
    if setting is None or not isinstance(setting.value, int) or setting.value < 1:
        return default
    return setting.value
