"""Hooks of the trainer: what they may be, and what happens if they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.policy.hooks import HookContext, HookError, TrainerHooks

CODE = """
import time

def good(context): context.spec.trainer.seen = True
def bad(context): raise ValueError("no such layer")
def wrong(context): return 3
def other(context, model): pass
async def late(context): pass
def hangs(context): time.sleep(600)
"""


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    (tmp_path / "own.py").write_text(CODE)

    def make(**hooks: Any) -> RLJobSpec:
        named = {
            name: f"{tmp_path}/own.py:{value}" if isinstance(value, str) else value
            for name, value in hooks.items()
        }
        return RLJobSpec.model_validate(
            {
                "model": {"path": "/m"},
                "data": {"prompts": [{"path": "/p.jsonl"}]},
                "reward": {"type": "math"},
                "trainer": {"steps": 1, "hooks": named},
            }
        )

    return make


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "has no function 'nothing'"),
        ("late", r"is async: expected `def hook\(context\)`"),
        ("other", "does not take one argument"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused(spec: Any, function: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"spec.trainer.hooks.init: .*{message}"):
        TrainerHooks.load(spec(init=function))


def test_a_hook_that_raises_is_named_with_its_line(spec: Any) -> None:
    job = spec(beforeTrainStep="bad")
    hooks = TrainerHooks.load(job)
    hooks.init(HookContext(job, 0, 1))
    hooks.before_log_probs(HookContext(job, 0, 1))
    with pytest.raises(
        HookError,
        match=r"spec.trainer.hooks.beforeTrainStep: .*own.py:bad raised ValueError: no such layer "
        r"\(own.py:5\)",
    ):
        hooks.before_train_step(HookContext(job, 0, 1, step=1))


def test_a_hook_returns_nothing(spec: Any) -> None:
    job = spec(beforeLogProbs="wrong")
    with pytest.raises(ConfigurationError, match=r"own.py:wrong returned int: expected"):
        TrainerHooks.load(job).before_log_probs(HookContext(job, 0, 1))


def test_a_hook_that_hangs_ends_its_process(spec: Any) -> None:
    job = spec(init="hangs", timeoutSeconds=0.5)
    program = (
        "import sys\n"
        "from sluice.api import RLJobSpec\n"
        "from sluice_trainer.policy.hooks import HookContext, TrainerHooks\n"
        "job = RLJobSpec.model_validate_json(sys.argv[1])\n"
        "TrainerHooks.load(job).init(HookContext(job, 0, 1))\n"
    )
    text = json.dumps(job.model_dump(mode="json", by_alias=True, exclude_none=True))
    ended = subprocess.run(
        [sys.executable, "-c", program, text], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert "own.py:hangs did not return within 0.5 s (trainer.hooks.timeoutSeconds)" in ended.stderr
    assert "in hangs" in ended.stderr, "the line at which it hangs"
