"""What Prometheus scrapes of user code in a worker."""

from __future__ import annotations

from prometheus_client import Counter

FUNCTION_FAILURES = Counter(
    "sluice_rollout_function_failures", "Samples that failed in rollout.function, by reason", ["reason"]
)
HOOK_FAILURES = Counter("sluice_rollout_hook_failures", "Samples that failed in a hook, by hook", ["hook"])
TOOL_CALLS = Counter("sluice_rollout_tool_calls", "Calls of tools by the model, by outcome", ["tool", "outcome"])
