"""Prompts wait a few passes for each other while other requests generate.

SGLang stops all generation for each prompt that comes, for about as long as one token of the
running requests takes: both passes read all weights. If responses have very different lengths, one
ends with nearly every token, and a full engine spends half of its time on prompts, one or two at a
time. But a prompt that waits leaves its place empty. So prompts wait until the empty places have
cost as many tokens as the pass of the prompts will. Whenever they come, that loses at most twice
the minimum (as acknowledgements in TCP: Dooly, Goldman and Scott, STOC 1998). SGLang's
`--enable-prefill-delayer` waits for a share of the requests with some models, and ends the engine
of others.

All ranks of an engine have the same requests, so they decide alike without communication.
"""

import os
from typing import Any

from . import tell_once

PREFILL = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"


def register() -> None:
    passes = int(os.environ.get("SLUICE_PREFILL_PASSES") or 0)
    if passes <= 0:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(PREFILL, PrefillBatching(passes), HookType.AROUND)


class PrefillBatching:
    """Wraps the scheduler's choice of the prompts that run next."""

    def __init__(self, max_passes: int) -> None:
        self.max_passes = max_passes
        # Passes since the first of the waiting prompts came.
        self.waited = 0
        # Tokens that the places of waiting prompts have not generated meanwhile.
        self.lost_tokens = 0

    def __call__(self, original: Any, scheduler: Any, running: Any) -> Any:
        waiting = scheduler.waiting_queue
        # The parts of a chunked prompt, and the ranks of data-parallel attention, go together.
        bound = scheduler.chunked_req is not None or scheduler.enable_dp_attention
        if not self.one_more(0 if bound else len(waiting), len(running.reqs)):
            return original(scheduler, running)
        tell_once("prompts wait for each other while others generate")
        # Without prompts SGLang goes on generating. It may add one whose grammar is ready.
        scheduler.waiting_queue = []
        try:
            return original(scheduler, running)
        finally:
            scheduler.waiting_queue = waiting + scheduler.waiting_queue

    def one_more(self, waiting: int, running: int) -> bool:
        """Decide for this pass, and count it. Return True if prompts wait."""
        waits = self.waits(waiting, running)
        self.waited = self.waited + 1 if waits else 0
        self.lost_tokens = self.lost_tokens + waiting if waits else 0
        return waits

    def waits(self, waiting: int, running: int) -> bool:
        """Return True if waiting prompts wait one more pass while others generate."""
        return (
            waiting > 0 and self.lost_tokens + waiting < running and self.waited < self.max_passes
        )
