"""Prompts wait a few passes for each other, while others generate.

SGLang stops all that generates for each prompt that comes, for about as long as a token of theirs
takes: both passes read all weights. Where responses have very different lengths one ends with
nearly every token, and an engine that is kept full spends half of its time with prompts, one or two
at a time. But a prompt that waits leaves its place empty. So prompts wait until the empty places
have cost as many tokens as their pass will. Whenever they come, that loses at most twice what it
has to (as acknowledgements in TCP: Dooly, Goldman and Scott, STOC 1998). SGLang's own
`--enable-prefill-delayer` waits for a share of the requests with some models, and ends the engine
of others.

All ranks of an engine have the same requests, so that they decide alike without a word.
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
    """Around the scheduler's choice of the prompts that run next.

    most: passes that one waits. waited: passes since the first of those that wait came. empty:
    tokens that their places have not generated meanwhile.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.waited = self.empty = 0

    def __call__(self, original: Any, scheduler: Any, running: Any) -> Any:
        waiting = scheduler.waiting_queue
        # A prompt in parts is on its way. With attention in data-parallel ranks these go together.
        bound = scheduler.chunked_req is not None or scheduler.enable_dp_attention
        if not self.one_more(0 if bound else len(waiting), len(running.reqs)):
            return original(scheduler, running)
        tell_once("prompts wait for each other while others generate")
        # SGLang sees no prompt and goes on generating. It may add one whose grammar is ready.
        scheduler.waiting_queue = []
        try:
            return original(scheduler, running)
        finally:
            scheduler.waiting_queue = waiting + scheduler.waiting_queue

    def one_more(self, waiting: int, running: int) -> bool:
        """Decide for this pass, and count it. True where prompts wait it out."""
        waits = self.waits(waiting, running)
        self.waited, self.empty = (self.waited + 1, self.empty + waiting) if waits else (0, 0)
        return waits

    def waits(self, waiting: int, running: int) -> bool:
        """True where so many prompts wait one pass more beside so many requests that generate."""
        return waiting > 0 and self.empty + waiting < running and self.waited < self.most
