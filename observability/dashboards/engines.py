"""Weights on their way, and the engines that serve them."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from observability import promql
from observability import recording as rec
from observability.dashboards.frame import frame
from observability.panels import (
    BYTES_PER_SECOND,
    COUNT,
    JOB,
    NUMBER,
    PER_SECOND,
    RATE,
    SECONDS,
    SHARE,
    Panel,
    Query,
    above,
    below,
    lines,
    none,
    number,
)

OTHER = "sluice_rollout_gateway_other_model_seconds"


def dashboard() -> Dashboard:
    return frame(
        "engines",
        "Weights on their way from the trainer, and the engines that serve them.",
        {
            "Weights": _weights(),
            "Updates": _updates(),
            "Members": _members(),
            "Engines, as they see themselves": _engines(),
            "Workers": _workers(),
            "Agents at the gateway": _gateway(),
        },
        one_job=True,
    )


def _rendezvous(metric: str) -> str:
    return promql.newest(f"sluice_rendezvous_{metric}")


def _weights() -> list[Panel]:
    versions = f"min by (replica) (sluice_rollout_version{{{JOB}}})"
    return [
        number(
            "Version",
            "Newest weights: those after the step of this number.",
            NUMBER,
            none(),
            Query(_rendezvous("version"), "version"),
            height=8,
        ),
        number(
            "Engines",
            "Engines that are there.",
            COUNT,
            below(1),
            Query(_rendezvous("engines"), "engines"),
            height=8,
        ),
        number(
            "Behind",
            "Engines that do not serve the newest weights; normal for moments.",
            COUNT,
            above(1),
            Query(_rendezvous("engines_behind"), "engines"),
            height=8,
        ),
        lines(
            "Version of each engine",
            "-1: it has none. All should follow the newest.",
            NUMBER,
            none(),
            Query(_rendezvous("version"), "newest"),
            Query(versions, "engine {{replica}}"),
            width=12,
        ),
    ]


def _updates() -> list[Panel]:
    def mean(phase: str, *labels: str) -> str:
        selector = f"{JOB},{phase}"
        return promql.mean("sluice_trainer_weight_update_seconds", *labels, selector=selector)

    sent = promql.rate("sluice_trainer_weight_update_bytes_total")
    left = f"increase(sluice_trainer_weight_update_failures_total{{{JOB}}}[1h])"
    passed = promql.quantile(0.95, "sluice_rendezvous_update_seconds", "phase")
    return [
        lines(
            "Update by phase",
            "Mean time of each phase of a weight update, of the slowest rank.",
            SECONDS,
            none(),
            Query(mean('phase!~"whole|paused"', "phase"), "{{phase}}"),
            stacked=True,
        ),
        lines(
            "Engines paused",
            "For how long an update keeps engines from generating; and the whole update.",
            SECONDS,
            above(10, 60),
            Query(mean('phase="paused"'), "paused"),
            Query(mean('phase="whole"'), "whole"),
        ),
        lines(
            "Until engines have passed a phase",
            "95th percentile, from an update's beginning.",
            SECONDS,
            none(),
            Query(passed, "{{phase}}"),
        ),
        lines(
            "Weights sent",
            "Bytes of weights in a second, over all engines.",
            BYTES_PER_SECOND,
            none(),
            Query(sent, "sent"),
        ),
        lines(
            "Engines left behind",
            "Engines that an update had to leave behind, within an hour.",
            COUNT,
            above(1, 5),
            Query(f"sum by (namespace, job) ({left})", "engines"),
        ),
        lines(
            "Versions behind",
            "By how many versions each engine is older than the newest weights.",
            NUMBER,
            above(2),
            Query(f"{rec.ENGINE_LAG}{{{JOB}}}", "engine {{replica}}"),
        ),
    ]


def _members() -> list[Panel]:
    def within_an_hour(metric: str, by: str) -> str:
        return f"sum by ({by}) (increase(sluice_rendezvous_{metric}{{{JOB}}}[1h]))"

    members = f"max by (member_role) (sluice_rendezvous_members{{{JOB}}})"
    return [
        lines(
            "Members",
            "Processes that are joined, by role.",
            COUNT,
            none(),
            Query(members, "{{member_role}}"),
        ),
        lines(
            "Joined and left",
            "Within an hour. A member that comes back joins again.",
            COUNT,
            none(),
            Query(within_an_hour("joins_total", "member_role"), "{{member_role}} joined"),
            Query(within_an_hour("leaves_total", "member_role"), "{{member_role}} left"),
        ),
        lines(
            "Dropped",
            "Members that were dropped within an hour, by the phase in which they failed.",
            COUNT,
            above(1, 5),
            Query(within_an_hour("drops_total", "cause"), "{{cause}}"),
        ),
    ]


def _either(sglang: str, vllm: str) -> str:
    """Series of the engine that the job has, summed over its ranks."""
    return f"sum by (replica) ({sglang}{{{JOB}}} or {vllm}{{{JOB}}})"


def _engines() -> list[Panel]:
    usage = f"max by (replica) (sglang:token_usage{{{JOB}}} or vllm:kv_cache_usage_perc{{{JOB}}})"
    generated = (
        f"sum by (replica) (rate(sglang:generation_tokens_total{{{JOB}}}[{RATE}]) or "
        f"rate(vllm:generation_tokens_total{{{JOB}}}[{RATE}]))"
    )
    first = (
        f"sum by (le, replica) (rate(sglang:time_to_first_token_seconds_bucket{{{JOB}}}[{RATE}]) "
        f"or rate(vllm:time_to_first_token_seconds_bucket{{{JOB}}}[{RATE}]))"
    )
    return [
        lines(
            "Running",
            "Requests that the engine works on.",
            COUNT,
            none(),
            Query(
                _either("sglang:num_running_reqs", "vllm:num_requests_running"),
                "engine {{replica}}",
            ),
        ),
        lines(
            "Queued",
            "Requests that wait in the engine. For long: rollout.concurrency is too high.",
            COUNT,
            above(64, 256),
            Query(
                _either("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
                "engine {{replica}}",
            ),
        ),
        lines(
            "KV cache",
            "Share of the cache that is used. Full: requests are put back and computed again.",
            SHARE,
            above(0.9, 0.98),
            Query(usage, "engine {{replica}}"),
            highest=1,
        ),
        lines(
            "Generated tokens",
            "As the engine counts them.",
            PER_SECOND,
            none(),
            Query(generated, "engine {{replica}}"),
            width=12,
        ),
        lines(
            "Time to the first token",
            "95th percentile.",
            SECONDS,
            above(5, 30),
            Query(f"histogram_quantile(0.95, {first})", "engine {{replica}}"),
            width=12,
        ),
    ]


def _workers() -> list[Panel]:
    phases = promql.rate("sluice_rollout_phase_seconds_total", "phase")
    answered = promql.rate("sluice_rollout_requests_total", "finish")
    seconds = promql.quantile(0.95, "sluice_rollout_request_seconds", "replica")
    return [
        lines(
            "Workers",
            "Workers by what they do. Idle: no prompts, or no weights. Tail: only the last few "
            "responses of a batch.",
            COUNT,
            none(),
            Query(phases, "{{phase}}"),
            stacked=True,
        ),
        lines(
            "Requests answered",
            "By how they ended. abort: a weight update, or the worker's end.",
            PER_SECOND,
            none(),
            Query(answered, "{{finish}}"),
        ),
        lines(
            "Time of a request",
            "95th percentile, at the engine.",
            SECONDS,
            none(),
            Query(seconds, "engine {{replica}}"),
        ),
    ]


def _gateway() -> list[Panel]:
    def gateway(what: str, *labels: str) -> str:
        return promql.rate(f"sluice_rollout_gateway_{what}_total", *labels)

    overhead = promql.spread("sluice_rollout_gateway_overhead_seconds")
    return [
        lines(
            "Requests of agents",
            "By how they ended. refused: the client's mistake; unavailable: the engine, or the "
            "worker's end; gone: the client hung up.",
            PER_SECOND,
            none(),
            Query(gateway("requests", "outcome"), "{{outcome}}"),
        ),
        lines(
            "Overhead of a turn",
            "Time of an answered request that the engine did not take.",
            SECONDS,
            above(0.01, 0.1),
            *overhead,
        ),
        lines(
            "Turns and branches",
            "Turns by how they go on: new, continued from the sampled tokens, or rerendered from "
            "text. Branches: sequences that are trained.",
            PER_SECOND,
            none(),
            Query(gateway("turns", "history"), "{{history}}"),
            Query(gateway("branches"), "branches"),
        ),
        lines(
            "Tokens encoded again",
            "Of histories that a client or the chat template has changed: what was sampled there "
            "is trained, but not gone on from.",
            PER_SECOND,
            none(),
            Query(gateway("rerendered_tokens"), "tokens"),
        ),
        lines(
            "Histories shortened",
            "They were too long (rollout.limits.overflow): results of tools that the model no "
            "longer sees, and summaries that it has written.",
            PER_SECOND,
            none(),
            Query(gateway("dropped_results"), "results"),
            Query(gateway("summaries", "outcome"), "summaries, {{outcome}}"),
        ),
        lines(
            "Settings that do not hold",
            "Requests that ask for another sampling than the job's, by setting.",
            PER_SECOND,
            none(),
            Query(gateway("overridden_settings", "setting"), "{{setting}}"),
        ),
        lines(
            "Other models that agents ask",
            "Mean time of a request to a model of rollout.models.",
            SECONDS,
            none(),
            Query(
                f"sum by (model) (rate({OTHER}_sum{{{JOB}}}[{RATE}])) / "
                f"sum by (model) (rate({OTHER}_count{{{JOB}}}[{RATE}]))",
                "{{model}}",
            ),
        ),
        lines(
            "Programs of episodes",
            "Of rollout.environment, running now: one for each sample in work. With an image: its "
            "pods that have joined.",
            COUNT,
            none(),
            Query(f"sum(sluice_rollout_episode_programs{{{JOB}}})", "programs"),
            Query(
                f"sum by (role, state) (sluice_rollout_episode_pods{{{JOB}}})",
                "{{role}} pods, {{state}}",
            ),
        ),
        lines(
            "Refused keys",
            "Requests with a key that is missing, unknown or expired: a program that outlives its "
            "episode, or somebody who has none.",
            PER_SECOND,
            above(0.1, 10),
            Query(gateway("refused_keys", "reason"), "{{reason}}"),
        ),
    ]
