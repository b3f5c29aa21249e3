"""`sluice run` on the real engines: what it does, what it leaves, and that its variants train."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.run.laptop import Laptop, processes_of, values
from tests.integration.run.otlp import Receiver, Span

pytestmark = pytest.mark.timeout(600)
Make = Callable[..., Laptop]
# Groups of a step in the run that leaves its story.
GROUPS = 8


def check_sound(run: Laptop, steps: int, groups: int = 32) -> None:
    """Check that every group was trained once, and that no process is left."""
    summary = run.summary()
    assert summary["state"] == "Succeeded", run.text()[-2000:]
    assert summary["steps"] == steps
    assert (
        summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_failed"] == 0
    )
    assert summary["groups_trained"] == summary["groups_leased"] == steps * groups
    assert processes_of(run.directory) == []


def check_seconds(run: Laptop, records: list[dict[str, Any]]) -> None:
    """The trainer's seconds are whole: parts of a step, and start, steps and end of a run."""
    for record in records:
        parts = [value for name, value in record.items() if name.startswith("perf/seconds/")]
        assert sum(parts) == pytest.approx(record["perf/step_time"])
    summary = run.summary()
    reported = sum(summary["trainer_seconds"].values())
    states = summary["device_seconds"].items()
    assert summary["trainer_seconds"]["start"] > summary["trainer_seconds"]["end"] > 0
    assert reported < summary["wall_seconds"]
    assert reported == pytest.approx(
        sum(seconds for state, seconds in states if state.startswith("trainer/")), abs=3
    ), "by the rendezvous"


def test_a_run_trains_and_leaves_its_story(laptop: Make, example: Path, traces: Receiver) -> None:
    seeded = (f"rollout.batchSize={GROUPS}", "data.seed=3")
    run = laptop("trainer.steps=6", *seeded)
    assert run.run() == 0, run.text()[-3000:]
    check_sound(run, 6, GROUPS)
    check_traces(traces.spans, 6)
    records = list(run.steps().values())
    check_seconds(run, records)
    [engine] = (run.directory / "logs").glob("*.engine.log")
    assert " HTTP/1.1" not in engine.read_text(), "its log tells of each request"
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert max(map(abs, values(records, "train/ppo_kl"))) <= 1e-6
    assert max(values(records, "train/pg_clipfrac")) == 0
    assert max(values(records, "rollout/policy_lag")) == 0
    assert all(0 < busy <= 1 for busy in values(records, "rollout/worker_busy"))
    assert min(values(records, "train/grad_norm")) > 0
    expected = {
        "job.json",
        "metrics.jsonl",
        "evaluation.jsonl",
        "timeline.jsonl",
        "summary.json",
        "report.html",
    }
    assert expected <= {p.name for p in run.directory.iterdir()}
    assert list((run.directory / "tensorboard").glob("events*"))
    assert f"tensorboard --logdir {run.directory / 'tensorboard'}" in run.text()
    row = json.loads((run.directory / "samples/step_0000006.jsonl").read_text().splitlines()[0])
    assert {"prompt", "response", "label", "reward", "weight_versions"} <= row.keys()
    assert row["rollout_worker"] == "rollout-0"
    assert row["weight_versions"] in ([5], [])
    exported_model_answers(run.directory / "checkpoints/hf")
    again = laptop("trainer.steps=6", *seeded)
    assert again.run(60) == 0
    assert again.step() == 6, "a finished run is not run again"
    assert "this run has already succeeded, so nothing is left to train" in again.text()
    other = laptop("trainer.steps=7", *seeded, "data.seed=4")
    assert other.run(60) == 2
    assert "spec.data.seed: 3 -> 4: a run that goes on cannot change it" in other.text()
    longer = laptop("trainer.steps=7", *seeded, "evaluation.everySteps=7")
    assert longer.run() == 0, longer.text()[-3000:]
    assert "changed from the last checkpoint on: spec.trainer.steps: 6 -> 7" in longer.text()
    assert longer.text().count("nothing is left to train") == 1, "the run before printed it"
    check_sound(longer, 7, GROUPS)


def check_traces(spans: list[Span], steps: int) -> None:
    """Each group is one trace over three services, whose training is linked to its step."""
    roots = [span for span in spans if span.name == "prompt group"]
    trained = [span for span in roots if span.attributes["sluice.outcome"] == "trained"]
    assert len(trained) == steps * GROUPS
    of_step = {span.span_id: span for span in spans if span.name == "step"}
    assert sorted(s.attributes["sluice.step"] for s in of_step.values()) == [*range(1, steps + 1)]
    commits = {s.span_id: of_step[s.trace_root(spans)] for s in spans if s.name == "CommitStep"}
    for root in trained:
        below = [span for span in spans if span.trace_id == root.trace_id and span is not root]
        names = Counter((span.service, span.name) for span in below)
        assert names["sluice-rollout", "generate"] >= 8
        assert names["sluice-rollout", "reward"] >= 1
        once = ("rollout", "work"), ("rollout", "submit"), ("buffer", "in training")
        for service, span_name in once:
            assert names[f"sluice-{service}", span_name] == 1
        outside = [span for span in below if not root.began <= span.began <= root.ended]
        assert not outside, (root, outside)
        link = next(span for span in below if span.name == "in training").links[0]
        assert commits[link].attributes["sluice.step"] == root.attributes["sluice.step"]
    for span in spans:
        if span.name == "transfer":
            named = {other.name for other in spans if other.trace_id == span.trace_id}
            assert named >= {"weight update", "BeginUpdate", "pause", "verify", "resume"}
    updates = {s.attributes["sluice.version"] for s in spans if s.name == "weight update"}
    assert updates == {*range(steps + 1)}


def exported_model_answers(directory: Path) -> None:
    """The exported checkpoint is a Hugging Face model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = AutoTokenizer.from_pretrained(directory)("max 3 7 2 =", return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 5, 16)


@pytest.mark.long
def test_two_engines_make_half_of_a_step_each(laptop: Make) -> None:
    steps = 15
    run = laptop(f"trainer.steps={steps}", "rollout.replicas=2", f"rollout.batchSize={GROUPS}")
    assert run.run() == 0, run.text()[-3000:]
    check_sound(run, steps, GROUPS)
    # The first steps begin before both engines are there, and a worker that is held up for a second
    # leaves its part to the other.
    shared = [step for step in run.steps().values() if step["rollout/engine_share/max"] == 0.5]
    assert shared, values(run.steps().values(), "rollout/engine_share/max")
    for step in shared:
        assert step["rollout/engines"] == 2
        assert 0 < step["rollout/engine_latency/p25"] < step["rollout/engine_latency/max"] < 10
        assert step["rollout/slowest_engine"] in (0, 1)


@pytest.mark.long
def test_an_engine_that_becomes_slow_is_named(laptop: Make) -> None:
    run = laptop("trainer.steps=16", "rollout.replicas=2", f"rollout.batchSize={GROUPS}")
    run.start()
    run.until_step(4)
    with run.slowed("rollout-1", share=0.1):
        assert run.wait(400) == 0, run.text()[-3000:]
    assert "the engine of rollout-1 takes" in run.text()


def test_asynchronous_with_partial_rollouts_over_disk(laptop: Make) -> None:
    run = laptop(
        "trainer.steps=8",
        "rollout.mode=async",
        "rollout.maxStaleness=2",
        "rollout.partial.enabled=true",
        f"rollout.batchSize={GROUPS}",
        "weightSync.transport=disk",
        "trainer.epochs=null",
    )
    assert run.run() == 0, run.text()[-3000:]
    check = run.summary()
    assert check["state"] == "Succeeded"
    assert check["groups_trained"] == 8 * GROUPS
    assert check["groups_lost"] == check["groups_trained_twice"] == 0
    lags = values(run.steps().values(), "rollout/policy_lag")
    assert 0 < max(lags) <= 2, "generation runs ahead of training, within maxStaleness"
    apart = "train/train_rollout_logprob_abs_diff"
    same_weights = [
        step[f"{apart}_on_policy"] for step in run.steps().values() if f"{apart}_on_policy" in step
    ]
    assert max(values(run.steps().values(), apart)) > 1e-3, "samples are older than the policy"
    assert max(same_weights) < 1e-5, "each token was sampled by the weights that it says"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("row", "train.jsonl:3"),
        ("no-prompt", "train.jsonl:2"),
        ("reward", "has no function 'nothing'"),
        # All processes start before a worker finds it.
        pytest.param(
            *("import", "reward.py: ModuleNotFoundError: No module named 'no_such_package'"),
            id="import",
            marks=pytest.mark.long,
        ),
        ("architecture", "model_type 'mamba'"),
        ("weights", "has no weights (*.safetensors)"),
        ("missing", "no such prompt file"),
    ],
)
def test_bad_input_fails_at_once_with_one_message(
    laptop: Make, example: Path, tmp_path: Path, change: str, message: str
) -> None:
    import shutil

    broken = tmp_path / "example"
    shutil.copytree(example, broken)
    lines = (broken / "train.jsonl").read_text().splitlines()
    overrides: list[str] = []
    if change == "row":
        lines[2] = lines[2][:-3]
    elif change == "no-prompt":
        lines[1] = '{"question": "max 1 2 3 =", "label": "3"}'
    elif change == "reward":
        overrides = ["reward.function=reward.py:nothing"]
    elif change == "import":
        (broken / "reward.py").write_text(
            "import no_such_package\n" + (broken / "reward.py").read_text()
        )
    elif change == "architecture":
        (broken / "model/config.json").write_text(json.dumps({"model_type": "mamba"}))
    elif change == "weights":
        overrides = ["model.init=pretrained"]
    elif change == "missing":
        overrides = ["data.prompts[0].path=nowhere.jsonl"]
    (broken / "train.jsonl").write_text("\n".join(lines) + "\n")
    run = Laptop(broken, tmp_path / "run", "trainer.steps=2", *overrides)
    code = run.run(90)
    run.stop()
    assert code in (1, 2)
    assert message in run.text(), run.text()[-3000:]
    assert processes_of(run.directory) == []
