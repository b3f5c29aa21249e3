"""Command line and environment of the server, which runs in a container of the trainer's image."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from sluice.api import RLJobSpec
from sluice.engines.arguments import brought_by_trainer, normalized
from sluice.engines.protocol import Plugin, ServerPlacement
from sluice.runtime import kernel_cache


class Launch:
    """The start of the server."""

    health = "/health"
    undecided: Mapping[str, str] = MappingProxyType({})

    def plugin(self, spec: RLJobSpec) -> Plugin | None:
        """Return None: the server is sluice's own."""
        return None

    def command(self, spec: RLJobSpec) -> list[str]:
        return ["python", "-m", "sluice.engines.transformers.server"]

    def missing(self) -> str:
        """Return one sentence if this Python lacks torch or transformers."""
        lacking = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if not lacking:
            return ""
        return f"rollout.engine: transformers needs {' and '.join(lacking)} in this environment"

    def env(self, spec: RLJobSpec) -> dict[str, str]:
        return {} if spec.rollout.gpus_per_replica else {"OMP_NUM_THREADS": "1"}

    def caches(self, directory: str) -> dict[str, str]:
        """Return variables for the caches of compilers that a model's code may use."""
        return kernel_cache.caches(directory)

    def args(self, spec: RLJobSpec, place: ServerPlacement) -> list[str]:
        """Return the server's arguments: sluice's, overridden by spec.rollout.engineArgs.

        Weights are not read from disk if the trainer sends them.
        """
        args: dict[str, Any] = {
            "model-path": place.model,
            "host": place.bind,
            "port": place.port,
            "device": "cuda" if spec.rollout.gpus_per_replica else "cpu",
            "dtype": "bfloat16" if spec.rollout.gpus_per_replica else "float32",
            "draw-weights": brought_by_trainer(spec),
            "fp32-lm-head": spec.model.fp32_lm_head,
            "trust-remote-code": spec.model.trust_remote_code,
        }
        args |= normalized(spec.rollout.engine_args, {})
        words: list[str] = []
        for name, value in args.items():
            if value is not False:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words
