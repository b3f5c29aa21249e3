"""Prometheus metrics of a worker: requests, groups, failures, user code, teacher, gateway."""

from __future__ import annotations

import urllib.request

from prometheus_client import Counter, Gauge, Histogram

from sluice.telemetry.phases import Phases, process_age

_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)

PHASES = Phases(
    "sluice_rollout_phase_seconds",
    "Time in each phase: starting, idle (without groups or weights), generating, tail (less than a "
    "quarter of a batch's samples are left), unresponsive (the engine fails health checks), "
    "draining.",
    first="starting",
    before=process_age(),
)
REQUESTS = Counter(
    "sluice_rollout_requests",
    "Requests that the engine has answered. finish: stop, length, abort (by a weight update or the "
    "end of the worker), refused (the prompt), error.",
    ["finish"],
)
REQUESTS_AT_ENGINE = Gauge("sluice_rollout_requests_at_engine", "Requests at the engine now.")
REQUESTS_WAITING = Gauge(
    "sluice_rollout_requests_waiting",
    "Requests that wait, because rollout.concurrency are at the engine.",
)
REQUEST_SECONDS = Histogram(
    "sluice_rollout_request_seconds", "Time of a request at the engine.", buckets=_SECONDS
)
GENERATED_TOKENS = Counter(
    "sluice_rollout_generated_tokens", "Tokens that the engine has generated."
)
SPECULATIVE_PASSES = Counter(
    "sluice_rollout_speculative_passes",
    "Passes in which the engine verified proposed tokens (rollout.speculative). Generated tokens "
    "by passes are the acceptance length.",
)
PROMPT_TOKENS = Counter(
    "sluice_rollout_prompt_tokens",
    "Tokens of the prompts of requests, including those in the cache.",
)
CACHED_TOKENS = Counter(
    "sluice_rollout_cached_tokens",
    "Tokens of the prompts of requests that the engine had in its prefix cache, as SGLang reports "
    "them.",
)
GROUPS = Counter(
    "sluice_rollout_groups",
    "Groups that left this worker. outcome: submitted, returned (unfinished or failed).",
    ["outcome"],
)
GROUP_SECONDS = Histogram(
    "sluice_rollout_group_seconds",
    "Time from a group's lease until it is submitted, rewards included.",
    buckets=_SECONDS,
)
LEASES = Gauge("sluice_rollout_leases", "Groups in work.")
VERSION = Gauge(
    "sluice_rollout_version", "Weight version that the engine serves; -1 before the first update."
)
STORE_BYTES = Counter(
    "sluice_rollout_store_bytes", "Bytes of weights fetched from the store, compressed."
)
STORE_SECONDS = Histogram(
    "sluice_rollout_store_seconds",
    "Time of bringing a weight version from the store to the engine. step: fetch (while the engine "
    "generates), load (while it is paused).",
    ["step"],
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600),
)
STORE_FAILURES = Counter(
    "sluice_rollout_store_failures",
    "Weight versions that did not get from the store to the engine as they should. reason: fetch "
    "(the store), damaged (refused by its hash; another way was taken), load (the engine).",
    ["reason"],
)
GROUP_FAILURES = Counter(
    "sluice_rollout_group_failures",
    "Groups given back because of an error. reason: engine, timeout (of a request), filter, "
    "internal.",
    ["reason"],
)
FUNCTION_FAILURES = Counter(
    "sluice_rollout_function_failures",
    "Samples that failed in rollout.function or rollout.environment, by reason",
    ["reason"],
)
EPISODE_TIMEOUTS = Counter(
    "sluice_rollout_episode_timeouts",
    "Episodes that reached rollout.limits.seconds. outcome: truncated, failed.",
    ["outcome"],
)
EPISODE_PROGRAMS = Gauge(
    "sluice_rollout_episode_programs", "Running programs of rollout.environment."
)
HOOK_FAILURES = Counter(
    "sluice_rollout_hook_failures", "Samples that failed in a hook, by hook", ["hook"]
)
TOOL_SECONDS = Histogram(
    "sluice_rollout_tool_seconds",
    "Time of a tool's call, including the wait for a thread.",
    ["tool"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
TOOL_CALLS = Counter(
    "sluice_rollout_tool_calls",
    "Calls of tools by the model. outcome: ok; raised, timeout, misunderstood (the model sees the "
    "error); unavailable (the sample fails).",
    ["tool", "outcome"],
)
HANGING_CALLS = Gauge(
    "sluice_rollout_hanging_calls",
    "Calls of user functions that still run after their time limit, by pool",
    ["pool"],
)
TEACHER = Counter(
    "sluice_rollout_teacher",
    "Samples that a teacher had to score. outcome: ok, timeout, refused, invalid.",
    ["outcome"],
)
TEACHER_SECONDS = Histogram(
    "sluice_rollout_teacher_seconds",
    "Time from a finished response to its teacher's log-probs.",
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)


GATEWAY_REQUESTS = Counter(
    "sluice_rollout_gateway_requests",
    "Requests at the gateway. endpoint: such as chat/completions. outcome: ok, refused (an error "
    "of the client), key, unavailable (the engine, or the end of the pod), gone (the client), "
    "failed (an error of the gateway).",
    ["endpoint", "outcome"],
)
GATEWAY_OVERHEAD = Histogram(
    "sluice_rollout_gateway_overhead_seconds",
    "Time of an answered request that was not spent on the engine or on waiting for it.",
    buckets=(0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1, 0.3, 1),
)
GATEWAY_TURNS = Counter(
    "sluice_rollout_gateway_turns",
    "Turns that the gateway has requested from the engine. history: new; continued (from the "
    "sampled tokens); rerendered (in part, from text).",
    ["history"],
)
GATEWAY_RERENDERED = Counter(
    "sluice_rollout_gateway_rerendered_tokens",
    "Tokens of histories that were encoded again from text, because a client or the chat template "
    "had changed them.",
)
GATEWAY_DROPPED = Counter(
    "sluice_rollout_gateway_dropped_results",
    "Results of tools that were dropped from too long histories (rollout.limits.overflow).",
)
GATEWAY_SUMMARIES = Counter(
    "sluice_rollout_gateway_summaries",
    "Summaries of too long histories (rollout.limits.overflow). outcome: ok; cut (the summary did "
    "not end, so the episode ends).",
    ["outcome"],
)
GATEWAY_BRANCHES = Counter(
    "sluice_rollout_gateway_branches",
    "Branches of conversations in episodes: sequences that are trained.",
)
GATEWAY_REFUSED_KEYS = Counter(
    "sluice_rollout_gateway_refused_keys",
    "Requests with a wrong key. reason: missing, unknown, expired.",
    ["reason"],
)
GATEWAY_OVERRIDDEN = Counter(
    "sluice_rollout_gateway_overridden_settings",
    "Requests whose sampling settings differ from the job's, which apply, by setting.",
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
    "Time that a verifier (rollout.environment.verifier) takes for an episode, or to fail.",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000),
)


def of_engine(url: str) -> bytes:
    """Return the engine's metrics.

    The worker serves them, so only the worker needs access to the engine, which obeys everyone who
    can reach it. Raises OSError.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=5.0) as answer:  # noqa: S310 - our engine
        return bytes(answer.read())
