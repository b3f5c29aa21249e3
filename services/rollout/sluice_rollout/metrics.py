"""A worker's Prometheus metrics of failures, of user code, and of a teacher."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

GROUP_FAILURES = Counter(
    "sluice_rollout_group_failures",
    "Groups given back because of an error of their own. reason: engine, timeout (of a request), "
    "filter, internal.",
    ["reason"],
)
FUNCTION_FAILURES = Counter(
    "sluice_rollout_function_failures",
    "Samples that failed in rollout.function, by reason",
    ["reason"],
)
HOOK_FAILURES = Counter(
    "sluice_rollout_hook_failures", "Samples that failed in a hook, by hook", ["hook"]
)
TOOL_CALLS = Counter(
    "sluice_rollout_tool_calls",
    "Calls of tools by the model. outcome: ok; raised, timeout, misunderstood (the model is told); "
    "unavailable (the "
    "sample fails).",
    ["tool", "outcome"],
)
HANGING_CALLS = Gauge(
    "sluice_rollout_hanging_calls",
    "Calls of user functions that have hung past their time, by pool",
    ["pool"],
)
TEACHER = Counter(
    "sluice_rollout_teacher",
    "Samples that a teacher was asked to score. outcome: ok, or why not: timeout, refused, "
    "invalid.",
    ["outcome"],
)
TEACHER_SECONDS = Histogram(
    "sluice_rollout_teacher_seconds",
    "Time from a finished response to its teacher's log-probs, waiting included.",
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
