"""Dashboard of weight updates, and of the engines that receive them."""

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
    above,
    below,
    lines,
    none,
    number,
)

_OTHER_MODEL = "sluice_rollout_gateway_other_model_seconds"


def dashboard() -> Dashboard:
    return frame(
        "engines",
        "Weight updates, and the engines that receive them.",
        {
            "Weights": _weights(),
            "Updates": _updates(),
            "Members": _members(),
            "Engine metrics": _engines(),
            "Workers": _workers(),
            "Agents at the gateway": _gateway(),
        },
        one="job",
    )


def _rendezvous(metric: str) -> str:
    return promql.newest(f"sluice_rendezvous_{metric}")


def _weights() -> list[Panel]:
    versions = f"min by (replica) (sluice_rollout_version{{{JOB}}})"
    # fmt: off
    return [
        number("Version", NUMBER, none(), "Newest weights, by the number of their step.",
               {"version": _rendezvous("version")}, height=8),
        number("Engines", COUNT, below(1), "Joined engines.",
               {"engines": _rendezvous("engines")}, height=8),
        number("Behind", COUNT, above(1),
               "Engines without the newest weights; normal during an update.",
               {"engines": _rendezvous("engines_behind")}, height=8),
        lines("Version by engine", NUMBER, none(),
              "Weight version of each engine (-1: no weights). All should follow the newest.",
              {"newest": _rendezvous("version"), "engine {{replica}}": versions}, width=12),
    ]
    # fmt: on


def _updates() -> list[Panel]:
    def mean(phase: str, *labels: str) -> str:
        selector = f"{JOB},{phase}"
        return promql.mean("sluice_trainer_weight_update_seconds", *labels, selector=selector)

    sent = promql.rate("sluice_trainer_weight_update_bytes_total")
    left = f"increase(sluice_trainer_weight_update_failures_total{{{JOB}}}[1h])"
    passed = promql.quantile(0.95, "sluice_rendezvous_update_seconds", "phase")
    # fmt: off
    return [
        lines("Update by phase", SECONDS, none(),
              "Mean time of the slowest rank in each phase of a weight update.",
              {"{{phase}}": mean('phase!~"whole|paused"', "phase")}, stacked=True),
        lines("Engines paused", SECONDS, above(10, 60),
              "Time that an update pauses generation, and time of the whole update.",
              {"paused": mean('phase="paused"'), "whole": mean('phase="whole"')}),
        lines("Engine time by phase", SECONDS, none(),
              "95th percentile of the time from an update's start until an engine ends a phase.",
              {"{{phase}}": passed}),
        lines("Weights sent", BYTES_PER_SECOND, none(),
              "Bytes of weights per second, over all engines.",
              {"sent": sent}),
        lines("Delta in the store", SHARE, none(),
              "Bytes of a version's delta to bytes of all weights (transport: store).",
              {"of all weights": f"sluice_trainer_weight_delta_ratio{{{JOB}}}"}),
        lines("Weights from the store", SECONDS, none(),
              "Mean time in which workers fetch a version, and engines load it.",
              {"{{step}}": promql.mean("sluice_rollout_store_seconds", "step", selector=JOB)}),
        lines("Engines left behind", COUNT, above(1, 5),
              "Engines that did not complete an update, within an hour.",
              {"engines": f"sum by (namespace, job) ({left})"}),
        lines("Versions behind", NUMBER, above(2),
              "Number of versions between each engine and the newest weights.",
              {"engine {{replica}}": f"{rec.ENGINE_LAG}{{{JOB}}}"}),
    ]
    # fmt: on


def _members() -> list[Panel]:
    def within_an_hour(metric: str, by: str) -> str:
        return f"sum by ({by}) (increase(sluice_rendezvous_{metric}{{{JOB}}}[1h]))"

    members = f"max by (member_role) (sluice_rendezvous_members{{{JOB}}})"
    # fmt: off
    return [
        lines("Members", COUNT, none(), "Joined processes, by role.",
              {"{{member_role}}": members}),
        lines("Joined and left", COUNT, none(),
              "Within an hour. A returning member joins again.",
              {"{{member_role}} joined": within_an_hour("joins_total", "member_role"),
               "{{member_role}} left": within_an_hour("leaves_total", "member_role")}),
        lines("Dropped", COUNT, above(1, 5),
              "Members dropped within an hour, by the phase in which they failed.",
              {"{{cause}}": within_an_hour("drops_total", "cause")}),
    ]
    # fmt: on


def _either(sglang: str, vllm: str) -> str:
    """Return the series of the job's engine, SGLang or vLLM, summed over its ranks."""
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
    # fmt: off
    return [
        lines("Running", COUNT, none(), "Requests that the engine is processing.",
              {"engine {{replica}}":
               _either("sglang:num_running_reqs", "vllm:num_requests_running")}),
        lines("Queued", COUNT, above(64, 256),
              "Requests that wait in the engine. If they persist, lower rollout.concurrency.",
              {"engine {{replica}}":
               _either("sglang:num_queue_reqs", "vllm:num_requests_waiting")}),
        lines("KV cache", SHARE, above(0.9, 0.98),
              "Share of the cache in use. If it is full, requests are evicted and recomputed.",
              {"engine {{replica}}": usage}, highest=1),
        lines("Generated tokens", PER_SECOND, none(), "Tokens per second counted by the engine.",
              {"engine {{replica}}": generated}),
        lines("Time to the first token", SECONDS, above(5, 30), "95th percentile.",
              {"engine {{replica}}": f"histogram_quantile(0.95, {first})"}),
        lines("Adapters", COUNT, none(),
              "Adapters in the engine's memory, with weightSync.lora: adapter; pauseMode: versions "
              "holds several.",
              {"engine {{replica}}":
               f"max by (replica) (sglang:lora_pool_slots_used{{{JOB}}})"}),
    ]
    # fmt: on


def _workers() -> list[Panel]:
    phases = promql.rate("sluice_rollout_phase_seconds_total", "phase")
    answered = promql.rate("sluice_rollout_requests_total", "finish")
    seconds = promql.quantile(0.95, "sluice_rollout_request_seconds", "replica")
    # fmt: off
    return [
        lines("Workers", COUNT, none(),
              "Workers by phase. Idle: no prompts or no weights. Tail: only the last few responses "
              "of a batch.",
              {"{{phase}}": phases}, stacked=True),
        lines("Requests answered", PER_SECOND, none(),
              "Requests per second by end. abort: a weight update, or the worker ended.",
              {"{{finish}}": answered}),
        lines("Request time", SECONDS, none(), "95th percentile at the engine.",
              {"engine {{replica}}": seconds}),
    ]
    # fmt: on


def _gateway() -> list[Panel]:
    def gateway(what: str, *labels: str) -> str:
        return promql.rate(f"sluice_rollout_gateway_{what}_total", *labels)

    other_models = (
        f"sum by (model) (rate({_OTHER_MODEL}_sum{{{JOB}}}[{RATE}])) / "
        f"sum by (model) (rate({_OTHER_MODEL}_count{{{JOB}}}[{RATE}]))"
    )
    # fmt: off
    return [
        lines("Agent requests", PER_SECOND, none(),
              "Requests per second by outcome. refused: a client error; unavailable: the engine "
              "failed or the worker ended; gone: the client hung up.",
              {"{{outcome}}": gateway("requests", "outcome")}),
        lines("Turn overhead", SECONDS, above(0.01, 0.1),
              "Time of an answered request outside the engine.",
              promql.spread("sluice_rollout_gateway_overhead_seconds")),
        lines("Turns and branches", PER_SECOND, none(),
              "Turns per second: new, continued from the sampled tokens, or rendered again "
              "from text. Branches are the sequences that are trained.",
              {"{{history}}": gateway("turns", "history"), "branches": gateway("branches")}),
        lines("Tokens encoded again", PER_SECOND, none(),
              "Tokens of histories that a client or the chat template changed. The sampled "
              "tokens are trained, but not continued.",
              {"tokens": gateway("rerendered_tokens")}),
        lines("Histories shortened", PER_SECOND, none(),
              "Histories that were too long (rollout.limits.overflow): dropped tool results, and "
              "summaries written by the model.",
              {"results": gateway("dropped_results"),
               "summaries, {{outcome}}": gateway("summaries", "outcome")}),
        lines("Overridden settings", PER_SECOND, none(),
              "Requests whose sampling settings differ from the job's, by setting.",
              {"{{setting}}": gateway("overridden_settings", "setting")}),
        lines("Requests to other models", SECONDS, none(),
              "Mean time of a request to a model of rollout.models.",
              {"{{model}}": other_models}),
        lines("Episode programs", COUNT, none(),
              "Running programs of rollout.environment, one per sample in work; if the "
              "environment has an image, its joined pods.",
              {"programs": f"sum(sluice_rollout_episode_programs{{{JOB}}})",
               "{{role}} pods, {{state}}":
               f"sum by (role, state) (sluice_rollout_episode_pods{{{JOB}}})"}),
        lines("Episodes out of time", PER_SECOND, none(),
              "Episodes that reached rollout.limits.seconds: their samples are truncated, or fail.",
              {"{{outcome}}": promql.rate("sluice_rollout_episode_timeouts_total", "outcome")}),
        lines("Refused keys", PER_SECOND, above(0.1, 10),
              "Requests with a missing, unknown or expired key: a program that outlives its "
              "episode, or an unauthorised client.",
              {"{{reason}}": gateway("refused_keys", "reason")}),
    ]
    # fmt: on
