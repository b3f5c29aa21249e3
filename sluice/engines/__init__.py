"""Inference engines: how each is started, asked for samples, and given weights."""

from __future__ import annotations

from sluice.api import RLEnginePoolSpec, RLJobSpec
from sluice.engines.protocol import Engine, PoolLaunch
from sluice.engines.sglang import Sglang
from sluice.engines.transformers import Transformers
from sluice.engines.vllm import Vllm

_SGLANG = Sglang()
# By the value of `rollout.engine`.
_ENGINES: dict[str, Engine] = {
    "sglang": _SGLANG,
    "vllm": Vllm(),
    "transformers": Transformers(),
}
# Engines that serve the adapters of several jobs, by the value of `engine` of an RLEnginePool.
_POOL_LAUNCHES: dict[str, PoolLaunch] = {"sglang": _SGLANG.launch}
# Names of engines, and of the distributions that they are installed from.
NAMES = tuple(_ENGINES)
# Variables of engines' containers for which the environment decides, with the value that says so.
UNDECIDED = {
    name: value for engine in _ENGINES.values() for name, value in engine.launch.undecided.items()
}


def engine_of(spec: RLJobSpec) -> Engine:
    """Return the engine that generates for a job."""
    return _ENGINES[spec.rollout.engine]


def pool_launch(spec: RLEnginePoolSpec) -> PoolLaunch:
    """Return how the engines of a pool are started."""
    return _POOL_LAUNCHES[spec.engine]
