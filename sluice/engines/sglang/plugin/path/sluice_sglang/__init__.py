"""A plugin for SGLang 0.5.17 and later: what a weight update from our trainer costs an engine, and
what it survives; and that nobody but the engine reaches the store in which its processes meet.

This package runs in SGLang's image, with nothing of ours beside it.
"""

import logging
from functools import cache


def register() -> None:
    from . import (
        ending,
        exact,
        fence,
        gather,
        host_memory,
        loopback,
        once,
        receive,
        stacks,
        versions,
    )

    stacks.register()
    receive.register()
    once.register()
    ending.register()
    loopback.register()
    host_memory.register()
    versions.register()
    fence.register()
    exact.register()
    gather.register()


@cache
def tell_once(what: str) -> None:
    logging.getLogger(__name__).info(what)
