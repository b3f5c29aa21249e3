"""Prometheus metrics of a worker: requests, groups, failures, user code, teacher, gateway."""

from __future__ import annotations

import urllib.request

from prometheus_client import Counter, Gauge, Histogram

from sluice.telemetry.phases import Phases, process_age

_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)

PHASES = Phases(
    "sluice_rollout_phase_seconds",
    "Time in each phase: starting, idle (nothing to do, or no weights), generating, tail (of a "
    "batch: less than a quarter of its samples are left), unresponsive (its engine fails health "
    "checks), draining.",
    first="starting",
    before=process_age(),
)
REQUESTS = Counter(
    "sluice_rollout_requests",
    "Requests that the engine has answered. finish: stop, length, abort (a weight update, or the "
    "worker's end), refused (the prompt), error.",
    ["finish"],
)
REQUESTS_AT_ENGINE = Gauge("sluice_rollout_requests_at_engine", "Requests at the engine now.")
REQUESTS_WAITING = Gauge(
    "sluice_rollout_requests_waiting", "Requests that wait for a place (rollout.concurrency)."
)
REQUEST_SECONDS = Histogram(
    "sluice_rollout_request_seconds", "Time of a request at the engine.", buckets=_SECONDS
)
GENERATED_TOKENS = Counter("sluice_rollout_generated_tokens", "Tokens that the engine has made.")
PROMPT_TOKENS = Counter(
    "sluice_rollout_prompt_tokens", "Tokens of requests' prompts, those in the cache included."
)
GROUPS = Counter(
    "sluice_rollout_groups",
    "Groups that this worker is done with. outcome: submitted, returned (unfinished, or failed).",
    ["outcome"],
)
GROUP_SECONDS = Histogram(
    "sluice_rollout_group_seconds",
    "Time from a group's lease until it is submitted, rewards included.",
    buckets=_SECONDS,
)
LEASES = Gauge("sluice_rollout_leases", "Groups in work.")
VERSION = Gauge("sluice_rollout_version", "Weight version that the engine serves; -1: none.")
GROUP_FAILURES = Counter(
    "sluice_rollout_group_failures",
    "Groups given back because of an error of their own. reason: engine, timeout (of a request), "
    "filter, internal.",
    ["reason"],
)
FUNCTION_FAILURES = Counter(
    "sluice_rollout_function_failures",
    "Samples that failed in rollout.function or rollout.environment, by reason",
    ["reason"],
)
EPISODE_PROGRAMS = Gauge(
    "sluice_rollout_episode_programs", "Programs of rollout.environment that run now."
)
HOOK_FAILURES = Counter(
    "sluice_rollout_hook_failures", "Samples that failed in a hook, by hook", ["hook"]
)
TOOL_SECONDS = Histogram(
    "sluice_rollout_tool_seconds",
    "Time of a tool's call, waiting included.",
    ["tool"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
TOOL_CALLS = Counter(
    "sluice_rollout_tool_calls",
    "Calls of tools by the model. outcome: ok; raised, timeout, misunderstood (the model is told); "
    "unavailable (the sample fails).",
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


GATEWAY_REQUESTS = Counter(
    "sluice_rollout_gateway_requests",
    "Requests at the gateway. endpoint: as chat/completions. outcome: ok, refused (the client's "
    "mistake), key, unavailable (the engine, or the end of the pod), gone (the client), failed "
    "(ours).",
    ["endpoint", "outcome"],
)
GATEWAY_OVERHEAD = Histogram(
    "sluice_rollout_gateway_overhead_seconds",
    "Time of an answered request that was not spent on the engine or on waiting for it.",
    buckets=(0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1, 0.3, 1),
)
GATEWAY_TURNS = Counter(
    "sluice_rollout_gateway_turns",
    "Turns that the gateway has asked the engine for. history: new; continued (from the sampled "
    "tokens); rerendered (in part, from text).",
    ["history"],
)
GATEWAY_RERENDERED = Counter(
    "sluice_rollout_gateway_rerendered_tokens",
    "Tokens of histories that were encoded again from text, because a client or the chat template "
    "had changed them.",
)
GATEWAY_DROPPED = Counter(
    "sluice_rollout_gateway_dropped_results",
    "Results of tools that gave way because their history was too long (rollout.limits.overflow).",
)
GATEWAY_SUMMARIES = Counter(
    "sluice_rollout_gateway_summaries",
    "Summaries of histories that were too long (rollout.limits.overflow). outcome: ok; cut (it had "
    "no end, and the episode ends).",
    ["outcome"],
)
GATEWAY_BRANCHES = Counter(
    "sluice_rollout_gateway_branches",
    "Branches of episodes' conversations: sequences that are trained.",
)
GATEWAY_REFUSED_KEYS = Counter(
    "sluice_rollout_gateway_refused_keys",
    "Requests with a wrong key. reason: missing, unknown, expired.",
    ["reason"],
)
GATEWAY_OVERRIDDEN = Counter(
    "sluice_rollout_gateway_overridden_settings",
    "Requests whose sampling settings differ from the job's, which hold, by setting.",
    ["setting"],
)
GATEWAY_OTHER_SECONDS = Histogram(
    "sluice_rollout_gateway_other_model_seconds",
    "Time of a request to a model of rollout.models.",
    ["model"],
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
EPISODE_PODS = Gauge(
    "sluice_rollout_episode_pods",
    "Pods of episodes that have joined this worker. role: episode, verifier. state: waiting "
    "(warm), playing.",
    ["role", "state"],
)
VERIFIER_SECONDS = Histogram(
    "sluice_rollout_verifier_seconds",
    "Time of a verifier (rollout.environment.verifier) at an episode, failures included.",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000),
)


def of_engine(url: str) -> bytes:
    """Return the engine's metrics.

    The worker serves them, so only the worker needs access to the engine, which obeys everyone who
    can reach it. Raises OSError.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=5.0) as answer:  # noqa: S310 - our engine
        return bytes(answer.read())
