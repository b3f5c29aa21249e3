"""SGLang's HTTP application stands behind the fence of `attempts`, begins with requests `in_turn`,
takes buckets `in_order` and passes them on `ahead`, and says what the plugin can.
"""

import logging
import multiprocessing

from . import ahead, receive
from .attempts import Fence
from .in_order import InOrder
from .in_turn import InTurn

log = logging.getLogger(__name__)


def register() -> None:
    if multiprocessing.parent_process() is not None:  # HTTP is served by the first process
        return
    try:
        from sglang.srt.entrypoints.http_server import app, get_global_state
    except ImportError as error:
        log.warning(
            "this SGLang serves HTTP in a way of its own, and does not refuse a trainer that was "
            "replaced: %s",
            error,
        )
        return
    app.add_middleware(InOrder)
    app.add_middleware(Fence)
    app.add_middleware(InTurn, paused=lambda: get_global_state().tokenizer_manager.is_pause)
    if receive.updater_hooks():
        app.add_api_route(receive.PASSES_ON, lambda: {"passes_on": True})
        ahead.register()
