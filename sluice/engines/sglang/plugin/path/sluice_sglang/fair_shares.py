"""Jobs of a pool get equal shares of an engine, or shares by their weights.

Among waiting requests the next is of the job that has had the fewest tokens for its weight: the
virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models" (VTC). A job
that has had no requests for a while begins where the job with the fewest tokens is, so it cannot
save up. Requests that run are not interrupted.
"""

import heapq
from collections import Counter, deque
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
class TrackedRequest:
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
    weights: dict[str, int] = field(default_factory=dict)
    _open: dict[int, TrackedRequest] = field(default_factory=dict)

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
        active = {job_of(tag_of(tracked.request.rid)) for tracked in self._open.values()}
        for request in waiting:
            if id(request) not in self._open:
                self._begin(request, active)
        tokens: Counter[tuple[str, str]] = Counter()
        for key, tracked in list(self._open.items()):
            if key not in waits:
                self._charge(tracked, tokens)
                if tracked.request.finished():
                    del self._open[key]
        for (job, kind), count in tokens.items():
            self.account(job, kind, count)

    def forget(self, requests: Iterable[Any]) -> None:
        """Stop to track requests that were aborted before they began.

        SGLang only takes them out of its queue, so they look like those that run, and never end.
        """
        for request in requests:
            self._open.pop(id(request), None)

    def _begin(self, request: Any, active: set[str]) -> None:
        """Track a new request. active: the jobs that have requests, to which its job is added."""
        tag = tag_of(request.rid)
        job = job_of(tag)
        self.weights[job] = weight_of(tag)
        if job not in active:
            least = min((self.counters[other] for other in active), default=0.0)
            self.counters[job] = max(self.counters.get(job, 0.0), least)
            active.add(job)
        self._open[id(request)] = TrackedRequest(request)

    def _charge(self, tracked: TrackedRequest, tokens: Counter[tuple[str, str]]) -> None:
        """Count the new tokens of a request that has left the queue, and add them to `tokens`."""
        tag = tag_of(tracked.request.rid)
        job, prompt = job_of(tag), 0
        if not tracked.started:
            tracked.started = True
            prompt = len(tracked.request.origin_input_ids)
        generated = max(len(tracked.request.output_ids) - tracked.generated, 0)
        tracked.generated += generated
        tokens[job, "prompt"] += prompt
        tokens[job, "generated"] += generated
        self.counters[job] += (prompt + GENERATED_COST * generated) / weight_of(tag)
