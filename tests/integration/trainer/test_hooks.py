"""Hooks of the trainer are called by both backends, with what they may change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer import preference_steps

pytestmark = pytest.mark.usefixtures("process_group")

CODE = """
import json
from pathlib import Path

LOG = Path(__file__).with_name("calls.jsonl")

def note(context):
    names = [name for module in context.modules for name, _ in module.named_parameters()]
    rate = context.optimizer and context.optimizer.param_groups[0]["lr"]
    call = [context.model, context.step, context.optimizer_step, len(names) > 5, rate is not None]
    with LOG.open("a") as log:
        log.write(json.dumps(call) + "\\n")

def freeze(context):
    note(context)
    for module in context.modules:
        for parameter in module.parameters():
            parameter.data.mul_(1.0)
"""


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_hooks_are_called_in_their_order(tmp_path: Path, backend: str) -> None:
    model = preference_steps.save_model(tmp_path / "model")
    rows = preference_steps.save_rows(tmp_path / "pairs.jsonl")
    (tmp_path / "own.py").write_text(CODE)
    own = f"{tmp_path}/own.py"
    hooks = {
        "init": f"{own}:note",
        "beforeLogProbs": f"{own}:note",
        "beforeTrainStep": f"{own}:freeze",
    }
    jobs: dict[str, Any] = {"loss": {"type": "dpo"}, "steps": 2, "stepsPerBatch": 2}
    with_hooks = preference_steps.train(str(model), str(rows), backend=backend, hooks=hooks, **jobs)
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert calls == [
        ["policy", 0, 0, False, False],
        *(
            call
            for step in (1, 2)
            for call in (
                ["reference", step, 0, True, True],
                ["policy", step, 0, True, True],
                ["policy", step, 1, True, True],
            )
        ),
    ]
    assert with_hooks == preference_steps.train(str(model), str(rows), backend=backend, **jobs)
