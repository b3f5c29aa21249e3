"""Dashboard of a pool of engines, and of the jobs that share it."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from observability import promql
from observability.dashboards.frame import frame
from observability.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    POOL,
    SECONDS,
    SHARE,
    Panel,
    above,
    below,
    lines,
    none,
    number,
)

# An engine's series of a job that has left stay, with 0 versions of its adapter.
_JOBS = f"(max by (job) (sluice_adapter_versions{{{POOL}}}) > 0)"
_GENERATED = f'{POOL},kind="generated"'
_PROMPT = f'{POOL},kind="prompt"'


def dashboard() -> Dashboard:
    return frame(
        "pools",
        "A pool of engines, and the jobs that share it.",
        {"Now": _now(), "Jobs": _jobs(), "Adapters": _adapters(), "Engines": _engines()},
        one="pool",
    )


def _now() -> list[Panel]:
    generated = promql.rate("sluice_pool_tokens_total", "pool", selector=_GENERATED)
    # fmt: off
    return [
        number("Engines", COUNT, below(1), "Engines that answer Prometheus.",
               {"engines": f"sum(up{{{POOL}}})"}),
        number("Jobs", COUNT, none(), "Jobs that have an adapter in an engine.",
               {"jobs": f"count({_JOBS}) or vector(0)"}),
        number("Generated tokens", PER_SECOND, none(), "Tokens per second of all jobs.",
               {"tokens": generated}),
        number("Waiting requests", COUNT, none(), "Requests that have not begun.",
               {"requests": f"sum(sluice_pool_requests_waiting{{{POOL}}})"}),
        number("Versions held", COUNT, none(),
               "Versions of adapters in the memory of the engine that has most.",
               {"versions": f"max(sum by (replica) (sluice_adapter_versions{{{POOL}}}))"}),
        number("Memory of adapters", BYTES, none(),
               "Memory of adapters in a GPU of the engine that has most, without SGLang's slots.",
               {"memory": f"max(sum by (replica) (sluice_adapter_bytes{{{POOL}}}))"}),
    ]
    # fmt: on


def _jobs() -> list[Panel]:
    generated = promql.rate("sluice_pool_tokens_total", "job", selector=_GENERATED)
    prompt = promql.rate("sluice_pool_tokens_total", "job", selector=_PROMPT)
    # The engines' measure of a share (FairShares of the plugin).
    had = f"({prompt} + 2 * {generated})"
    weight = f"(max by (job) (sluice_pool_job_weight{{{POOL}}}) and {_JOBS})"
    waiting = f"sum by (job) (sluice_pool_requests_waiting{{{POOL}}})"
    # fmt: off
    return [
        lines("Tokens by job", PER_SECOND, none(), "Tokens per second that the engines generated.",
              {"{{job}}": f"{generated} and {_JOBS}"}, stacked=True),
        lines("Share and weight", SHARE, none(),
              "Share of all tokens that a job has had; a generated token counts as two of a "
              "prompt, and the share by its weight. A job gets more while others have no requests.",
              {"{{job}}": f"({had} and {_JOBS}) / scalar(sum({had}) > 0)",
               "{{job}}, by weight": f"{weight} / scalar(sum({weight}))"}, highest=1),
        lines("Waiting requests by job", COUNT, none(),
              "Requests that have not begun, in all engines. A job that gets less than its share "
              "and has none sends too few: raise its rollout.concurrency or batchSize.",
              {"{{job}}": f"{waiting} and {_JOBS}"}),
    ]
    # fmt: on


def _adapters() -> list[Panel]:
    def within_an_hour(metric: str) -> str:
        return f"max by (job) (increase(sluice_adapter_{metric}_total{{{POOL}}}[1h])) and {_JOBS}"

    # fmt: off
    return [
        lines("Versions of adapters", COUNT, none(),
              "Versions that an engine holds: the newest ones, and older ones while requests use "
              "them.",
              {"{{job}}": _JOBS}),
        lines("Memory by job", BYTES, none(),
              "Memory of a job's adapter in one GPU, with memory for the next version, and "
              "without SGLang's slots.",
              {"{{job}}": f"max by (job) (sluice_adapter_bytes{{{POOL}}}) and {_JOBS}"},
              stacked=True),
        lines("Loaded and dropped", COUNT, none(),
              "Versions that came and went in an engine within an hour. A job whose drops stay "
              "behind has responses that take many updates.",
              {"{{job}} loaded": within_an_hour("loads"),
               "{{job}} dropped": within_an_hour("drops")}),
    ]
    # fmt: on


def _engines() -> list[Panel]:
    def sglang(metric: str) -> str:
        return f"max by (replica) (sglang:{metric}{{{POOL}}})"

    first = promql.rate("sglang:time_to_first_token_seconds_bucket", "le", "replica", selector=POOL)
    used, slots = sglang("lora_pool_slots_used"), sglang("lora_pool_slots_total")
    # fmt: off
    return [
        lines("Running", COUNT, none(), "Requests that the engine is processing.",
              {"engine {{replica}}": sglang("num_running_reqs")}),
        lines("KV cache", SHARE, above(0.9, 0.98),
              "Share of the cache in use. If it is full, requests are evicted and recomputed.",
              {"engine {{replica}}": sglang("token_usage")}, highest=1),
        lines("Adapters in use", SHARE, above(0.95),
              "Share of SGLang's slots, of which each running version takes one. If all are in "
              "use, requests of other adapters wait: raise maxAdapters.",
              {"engine {{replica}}": f"{used} / {slots}"}, highest=1),
        lines("Tokens by engine", PER_SECOND, none(), "Tokens per second that it generated.",
              {"engine {{replica}}": promql.rate(
                  "sluice_pool_tokens_total", "replica", selector=_GENERATED)}),
        lines("Time to the first token", SECONDS, above(5, 30), "95th percentile.",
              {"engine {{replica}}": f"histogram_quantile(0.95, {first})"}),
        lines("Versions by engine", COUNT, none(), "Versions of adapters of all jobs.",
              {"engine {{replica}}":
               f"sum by (replica) (sluice_adapter_versions{{{POOL}}})"}),
    ]
    # fmt: on
