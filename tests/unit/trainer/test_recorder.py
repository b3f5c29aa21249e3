"""Metrics of a batch, from the metadata of its sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sluice.images.image import Image
from sluice.samples.sample import Prompt, Sample, SampleGroup
from sluice.samples.turns import TIMED_OUT
from sluice.telemetry import run_directory
from sluice.wire import rpc
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.telemetry.recorder import Recorder, batch_metrics, merge_shards
from tests.images import png


def sequence(group: int, index: int, reward: float, **fields: object) -> pb.Sequence:
    values: dict[str, Any] = {
        "length": 7,
        "response_length": 2,
        "trainable_tokens": 2,
        "status": common.SAMPLE_STATUS_COMPLETED,
    }
    return pb.Sequence(group_id=group, index=index, reward=reward, **{**values, **fields})


def test_metrics_of_a_batch() -> None:
    batch = [
        sequence(1, 0, 1.0, min_version=3, max_version=4),
        sequence(
            1,
            1,
            1.0,
            min_version=4,
            max_version=4,
            response_length=6,
            status=common.SAMPLE_STATUS_TRUNCATED,
        ),
        sequence(2, 0, 0.0, min_version=4, max_version=4),
        sequence(2, 1, 1.0, response_length=0, status=common.SAMPLE_STATUS_FAILED),
    ]
    metrics = batch_metrics(batch, step=5)
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/response_len/mean"] == 2.5
    assert metrics["rollout/truncated_ratio"] == metrics["rollout/failed_ratio"] == 0.25
    assert metrics["rollout/zero_std/ratio"] == 0.5
    assert metrics["rollout/policy_lag"] == pytest.approx(1 / 3), (
        "what was never generated has no lag"
    )


def test_samples_with_an_old_cache_are_counted_if_pauses_keep_it() -> None:
    batch = [
        sequence(1, 0, 1.0, min_version=3, max_version=4),
        sequence(1, 1, 1.0, min_version=4, max_version=4),
    ]
    assert batch_metrics(batch, step=5, in_place=True)["rollout/old_cache_ratio"] == 0.5
    assert "rollout/old_cache_ratio" not in batch_metrics(batch, step=5)


def test_equal_rewards_are_counted_by_their_value_and_pass_rates_by_powers_of_two() -> None:
    rewards = [
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 0.0, 0.5],
    ]
    batch = [
        sequence(g, i, reward) for g, group in enumerate(rewards) for i, reward in enumerate(group)
    ]
    metrics = batch_metrics(batch, step=1)
    assert metrics["rollout/zero_std/ratio"] == 0.75
    assert {n: v for n, v in metrics.items() if "count_" in n} == {
        "rollout/zero_std/count_0.0": 2, "rollout/zero_std/count_1.0": 1,
    }  # fmt: skip
    rates = {n: v for n, v in metrics.items() if n.startswith("passrate/")}
    assert rates == {
        "passrate/pass@1": pytest.approx((1 + 0.5) / 4),
        "passrate/pass@2": pytest.approx((1 + 1 - 1 / 6) / 4),
        "passrate/pass@4": pytest.approx(0.5),
    }


def test_trained_tokens_are_counted_without_observations() -> None:
    metrics = batch_metrics([sequence(1, 0, 1.0, response_length=9, trainable_tokens=4)], step=1)
    assert (
        metrics["rollout/response_len/mean"],
        metrics["rollout/effective_response_len/mean"],
    ) == (
        9,
        4,
    )


def test_shards_are_merged_into_whole_groups() -> None:
    def part(group: int, *indices: int) -> SampleGroup:
        return SampleGroup(Prompt(group, "?"), [Sample(i) for i in indices])

    groups = merge_shards([[part(1, 2), part(3, 0)], [part(1, 0, 1), part(3, 1)]])
    assert [(g.group_id, [s.index for s in g.samples]) for g in groups] == [
        (1, [0, 1, 2]),
        (3, [0, 1]),
    ]


def test_groups_that_the_filter_drops_are_counted_by_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1)
    name = "rollout/dynamic_filter/drop_zero_std_1.0"
    assert recorder.dropped({"filtered_zero_std_1.0": 3, "commits": 9}) == {name: 3}
    assert recorder.dropped({"filtered_zero_std_1.0": 3}) == {}
    assert recorder.dropped({"filtered_zero_std_1.0": 5, "filtered_mine": 1}) == {
        name: 2, "rollout/dynamic_filter/drop_mine": 1,
    }  # fmt: skip
    recorder.step(1, {"rollout/raw_reward": 0.0})
    recorder.close()
    again = Recorder(tmp_path, 2)
    assert again.dropped({"filtered_zero_std_1.0": 7}) == {}, "their step is not known"
    assert again.dropped({"filtered_zero_std_1.0": 8}) == {name: 1}


def test_a_health_warning_is_given_once_even_across_restarts(tmp_path: Path) -> None:
    warnings = []
    for attempt in (1, 2):
        recorder = Recorder(tmp_path, attempt)
        with capture_logs() as entries:
            for step in range(3):
                recorder.step(3 * attempt + step, {"rollout/raw_reward": 0.0, "train/ppo_kl": 2.0})
        warnings.append([entry["kind"] for entry in entries])
        recorder.close()
    assert warnings == [["KL explosion"], []]


def test_images_of_sampled_prompts_have_a_thumbnail_each(tmp_path: Path) -> None:
    known, forgotten = png(seed=1), png(seed=2)
    asked: list[str] = []

    def fetch(digests: Sequence[str]) -> list[Image]:
        asked.extend(digests)
        if forgotten.digest in digests:
            raise rpc.RefusedError("GetImages: unknown")
        return [known]

    recorder = Recorder(tmp_path, 1, fetch_images=fetch)
    prompt = Prompt(0, "", images=[known.digest, forgotten.digest])
    for step in (1, 2):
        recorder.samples(step, [SampleGroup(prompt, [Sample(0)])])
    recorder.close()
    assert asked == [known.digest, forgotten.digest, forgotten.digest], "it is fetched once"
    assert [path.stem for path in (tmp_path / "samples/images").iterdir()] == [known.digest]


def test_images_of_an_agent_have_thumbnails_in_its_first_sample(tmp_path: Path) -> None:
    images = {image.digest: image for image in (png(seed=seed) for seed in range(7))}
    first, *others = images
    recorder = Recorder(tmp_path, 1, fetch_images=lambda digests: [images[d] for d in digests])
    samples = [Sample(0, images=[first, *others[:4]]), Sample(1, images=[first, others[5]])]
    recorder.samples(1, [SampleGroup(Prompt(0, "", images=[first]), samples)])
    recorder.close()
    written = {path.stem for path in (tmp_path / "samples/images").iterdir()}
    assert written == {first, *others[:3]}
    rows = [json.loads(line) for line in (tmp_path / "samples/step_0000001.jsonl").open()]
    assert [row["images"] for row in rows] == [sample.images for sample in samples]


def test_a_sample_says_at_which_limit_of_time_its_episode_was_cut_off(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1)
    samples = [Sample(0, metadata={TIMED_OUT: "took more than 60 s"}), Sample(1)]
    recorder.samples(1, [SampleGroup(Prompt(0, ""), samples)])
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "samples/step_0000001.jsonl").open()]
    assert [row.get(TIMED_OUT) for row in rows] == ["took more than 60 s", None]


def test_trackers_are_watched_at_each_step_and_ended_with_the_run(tmp_path: Path) -> None:
    calls: list[str] = []

    class Process:
        def watch(self) -> None:
            calls.append("watch")

        def finish(self) -> None:
            calls.append("finish")

        def wait(self, seconds: float) -> None:
            calls.append("wait")

    recorder = Recorder(tmp_path, 1, [Process()])  # type: ignore[list-item]
    recorder.step(1, {"rollout/raw_reward": 0.5})
    recorder.step(2, {"rollout/raw_reward": 0.5})
    recorder.close()
    assert calls == ["watch", "watch", "finish", "wait"]


def test_an_evaluation_is_written_down_after_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker that sees the record finds the samples."""
    recorder = Recorder(tmp_path, 1)
    there: list[bool] = []
    append = run_directory.append

    def recording(path: Path, record: dict[str, Any]) -> None:
        there.append((tmp_path / "samples/eval_math_0000001.jsonl").exists())
        append(path, record)

    monkeypatch.setattr(run_directory, "append", recording)
    metrics = {"reward": 0.25, "pass@4": 0.5}
    recorder.evaluation(pb.Evaluation(version=1, dataset="math", metrics=metrics), [])
    recorder.close()
    assert there == [True]
    [record] = run_directory.records(tmp_path / run_directory.EVALUATION)
    assert (record["eval/math"], record["eval/math/pass@4"]) == (0.25, 0.5)


def test_samples_without_rewards_are_written_without_them() -> None:
    metrics = batch_metrics([sequence(1, 0, 0.0), sequence(2, 0, 0.0)], step=1, judged=False)
    assert not [
        name for name in metrics if "reward" in name or "zero_std" in name or "passrate" in name
    ]
    assert metrics["rollout/response_len/mean"] == 2
