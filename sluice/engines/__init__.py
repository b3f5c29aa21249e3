"""Inference engines: how each is launched, asked for samples, and given weights."""

from __future__ import annotations

from sluice.api import RLJobSpec
from sluice.engines.protocol import Engine
from sluice.engines.sglang import Sglang
from sluice.engines.vllm import Vllm

_ENGINES: dict[str, Engine] = {"sglang": Sglang(), "vllm": Vllm()}
"""By the word of `rollout.engine`."""
NAMES = tuple(_ENGINES)
"""Of engines, and of the distributions that they are installed from."""
UNDECIDED = {
    name: value for engine in _ENGINES.values() for name, value in engine.launch.undecided.items()
}
"""Variables of engines' containers, with the value that leaves it to the place what they say."""


def engine_of(spec: RLJobSpec) -> Engine:
    """The kind of engine that generates for the job."""
    return _ENGINES[spec.rollout.engine]
