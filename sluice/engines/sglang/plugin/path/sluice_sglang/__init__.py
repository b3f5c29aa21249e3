"""A plugin for SGLang 0.5.17 and later.

It makes weight updates from a sluice trainer cheap, lets the engine survive a lost trainer, and
closes the store in which the engine's processes meet to everyone else. This package runs in
SGLang's image and cannot import sluice.
"""

import logging
from functools import cache


def register() -> None:
    from . import host_memory, loopback, prefill_batching, shutdown, speculation
    from .http import middlewares
    from .numerics import deterministic
    from .weights import (
        adapter,
        cached_model_scan,
        quantized,
        receive,
        stacked_experts,
        streamed_versions,
        versions,
    )

    speculation.register()
    quantized.register()
    stacked_experts.register()
    receive.register()
    cached_model_scan.register()
    shutdown.register()
    loopback.register()
    host_memory.register()
    streamed_versions.register()
    versions.register()
    middlewares.register()
    deterministic.register()
    prefill_batching.register()
    adapter.register()


@cache
def tell_once(what: str) -> None:
    """Log a fact the first time it is true."""
    logging.getLogger(__name__).info(what)
