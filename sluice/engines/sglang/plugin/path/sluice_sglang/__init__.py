"""A plugin for SGLang 0.5.17 and later: what a weight update from our trainer costs an engine, and
what it survives; and that nobody but the engine reaches the store in which its processes meet.

This package runs in SGLang's image, with nothing of ours beside it.
"""

import logging
from functools import cache


def register() -> None:
    from . import host_memory, loopback, prefill_batching, shutdown
    from .http import middlewares
    from .numerics import deterministic
    from .weights import cached_model_scan, receive, stacked_experts, versions

    stacked_experts.register()
    receive.register()
    cached_model_scan.register()
    shutdown.register()
    loopback.register()
    host_memory.register()
    versions.register()
    middlewares.register()
    deterministic.register()
    prefill_batching.register()


@cache
def tell_once(what: str) -> None:
    logging.getLogger(__name__).info(what)
