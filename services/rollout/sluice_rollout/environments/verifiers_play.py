"""Plays environments of verifiers (github.com/PrimeIntellect-ai/verifiers, 0.4.0).

    python verifiers_play.py rows CONFIG [N]   prints the (first N) tasks as rows: JSON lines
    python verifiers_play.py play CONFIG       plays the task of row.json, and writes result.json

CONFIG is verifiers' configuration of an environment, as JSON. A fork server (fork_server.py) calls
`load` and `play` to do the latter without starting Python for each episode.

This runs in an interpreter that has verifiers and may not have sluice. Apart from verifiers it
imports the standard library only. A task is made from its row, as verifiers' own servers do it, so
that an episode does not load the data set.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import env_config_type

TASK = "task"  # key of a row's metadata: the task's data
SCORE = "score"  # part of the reward that is the whole
_LOCAL_RUNTIME = {"type": "subprocess"}
# Modules that verifiers imports during an episode. Imported in each child, they would take three
# quarters of the episode's time.
_LATE_IMPORTS = ("anyio._backends._asyncio", "openai.resources", "verifiers.v1.utils.version")


def load(config: dict[str, Any]) -> Any:
    """Load the environment.

    Programs of its agents run in this pod by default; verifiers' own default is a service.
    """
    for module in _LATE_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    taskset, name = config["taskset"]["id"], config.get("id", "")
    roles = agent_config_fields(env_config_type(taskset, name)())
    local = {role: {"runtime": _LOCAL_RUNTIME, **config.get(role, {})} for role in roles}
    return vf.load_environment(vf.resolve_env_config({**config, **local}))


def row_of(data: Any) -> dict[str, Any]:
    """Make a row for data.prompts. Its metadata hold the task; its prompt is for people."""
    text = data.prompt_text or data.description or data.name or f"task {data.idx}"
    return {"prompt": text, "metadata": {TASK: data.model_dump(mode="json", exclude_none=True)}}


def task_of(env: Any, row: dict[str, Any]) -> Any:
    """Return the task of a row. Ends the program if it has no task."""
    if TASK not in row["metadata"]:
        raise SystemExit(
            f"the row has no metadata.{TASK}: expected rows of `sluice data from-verifiers`"
        )
    kind = type(env.taskset).task_type()
    data = kind.data_type().model_validate(row["metadata"][TASK])
    return kind(data, env.config.taskset.task)


def play(env: Any) -> None:
    """Play the task of row.json, and write result.json."""
    task = task_of(env, json.loads(Path("row.json").read_text()))
    episode = asyncio.run(episode_of(env, task))
    Path("result.json").write_text(json.dumps(result_of(episode)))


async def episode_of(env: Any, task: Any) -> Any:
    """Play one episode of a task at the gateway. Ends the program if it fails."""
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    context = vf.ModelContext(
        model=os.environ["SLUICE_MODEL"], client=client, sampling=vf.SamplingConfig()
    )
    async with env.serving():
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, context)
    if not episode.ok:
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        raise SystemExit("\n".join(f"{error.type}: {error.message}" for error in errors[-1:]))
    return episode


def result_of(episode: Any) -> dict[str, Any]:
    """Make the result of an episode: the mean reward of its traces, with parts and metrics."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    parts: dict[str, float] = {}
    for trace in traces:
        prefix = f"{trace.agent.name}/" if len(traces) > 1 else ""
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        parts |= {prefix + name: value for name, value in {**metrics, **rewards}.items()}
    stops = [trace.stop_condition for trace in traces]
    result: dict[str, Any] = {"metadata": {"stop_conditions": stops}}
    if any(trace.rewards for trace in traces):
        score = sum(trace.reward for trace in traces) / len(traces)
        result["reward"] = parts | {SCORE: score}
    return result


def main(command: str, config: str, rows: str = "") -> None:
    """Run a command. Output of packages while they load goes to standard error."""
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        env = load(json.loads(config))
    if command == "rows":
        for task in islice(env.taskset, int(rows) if rows else None):
            print(json.dumps(row_of(task.data)), file=output)
    else:
        play(env)


if __name__ == "__main__":
    main(*sys.argv[1:])
