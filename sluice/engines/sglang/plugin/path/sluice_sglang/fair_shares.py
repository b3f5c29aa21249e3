"""Jobs of a pool get equal shares of an engine, or shares by their weights.

Among waiting requests the next is of the job that has had the fewest tokens for its weight: the
virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models" (VTC). A job
that has had no requests for a while begins where the job with the fewest tokens is, so it cannot
save up. Requests that run are not interrupted.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .pool_credential import job_of, tag_of, weight_of

POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
# Cost of a generated token relative to one of a prompt, as in the paper.
GENERATED_COST = 2.0
# Returns nothing; called with a job, `prompt` or `generated`, and a number of tokens.
Account = Callable[[str, str, int], None]


@dataclass(slots=True)
class Open:
    """A request that has not ended, and how many of its tokens have been counted."""

    request: Any
    generated: int = 0
    started: bool = False


@dataclass(slots=True)
class FairShares:
    """Orders waiting requests. Every rank of an engine computes the same order."""

    account: Account = lambda job, kind, tokens: None
    # Weighted tokens that each job has had.
    counters: dict[str, float] = field(default_factory=dict)
    _open: dict[int, Open] = field(default_factory=dict)

    def order(self, _: Any, policy: Any, waiting: list[Any], *args: Any, **kwargs: Any) -> None:
        """Order SGLang's queue of waiting requests in place, after SGLang has."""
        self.count(waiting)
        queues: dict[str, deque[Any]] = {}
        for request in waiting:
            queues.setdefault(tag_of(request.rid), deque()).append(request)
        if len(queues) < 2:
            return
        # Requests of equal counters keep the order of their jobs' first requests.
        heap = [
            (self.counters[job_of(tag)], place, tag, queue)
            for place, (tag, queue) in enumerate(queues.items())
        ]
        heapq.heapify(heap)
        waiting.clear()
        while heap:
            counter, place, tag, queue = heapq.heappop(heap)
            request = queue.popleft()
            waiting.append(request)
            if queue:
                counter += len(request.origin_input_ids) / weight_of(tag)
                heapq.heappush(heap, (counter, place, tag, queue))

    def count(self, waiting: Iterable[Any]) -> None:
        """Add the tokens since the last call to the counters."""
        waits = {id(request) for request in waiting}
        for request in waiting:
            if id(request) not in self._open:
                self._begin(request)
        for key, known in list(self._open.items()):
            if key not in waits:
                self._charge(known)
                if known.request.finished():
                    del self._open[key]

    def _begin(self, request: Any) -> None:
        job = job_of(tag_of(request.rid))
        active = {job_of(tag_of(known.request.rid)) for known in self._open.values()}
        if job not in active:
            least = min((self.counters[other] for other in active), default=0.0)
            self.counters[job] = max(self.counters.get(job, 0.0), least)
        self._open[id(request)] = Open(request)

    def _charge(self, known: Open) -> None:
        """Count a request that has left the queue."""
        tag = tag_of(known.request.rid)
        job, cost = job_of(tag), 0.0
        if not known.started:
            known.started = True
            prompt = len(known.request.origin_input_ids)
            self.account(job, "prompt", prompt)
            cost += prompt
        new = len(known.request.output_ids) - known.generated
        if new > 0:
            known.generated += new
            self.account(job, "generated", new)
            cost += GENERATED_COST * new
        self.counters[job] += cost / weight_of(tag)


def exported() -> Account:
    """Return a function that counts tokens in SGLang's metrics."""
    # SGLang has set where processes leave their metrics before it starts the scheduler.
    from prometheus_client import Counter

    tokens = Counter(
        "sluice_pool_tokens", "Tokens that each job of the pool has had.", ["job", "kind"]
    )
    return lambda job, kind, count: tokens.labels(job, kind).inc(count)
