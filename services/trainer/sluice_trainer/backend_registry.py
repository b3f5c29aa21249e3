"""The backends that `trainer.backend` can name."""

from __future__ import annotations

from sluice.api import RLJobSpec
from sluice_trainer.backend import BackendClass


def backend_class(spec: RLJobSpec) -> BackendClass:
    """Import and return the class of the backend that `trainer.backend` names."""
    # Imported on demand: each backend takes seconds to import and has separate dependencies.
    match spec.trainer.backend:
        case "megatron":
            from sluice_trainer.megatron import policy as megatron

            return megatron.MegatronPolicy
        case "fsdp":
            from sluice_trainer.fsdp import policy as fsdp

            return fsdp.ShardedPolicy
