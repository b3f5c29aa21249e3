"""Jobs as the client submits them: paths, functions and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJob, load_job, manifest
from sluice_client.cluster_jobs import CODE_DIR, step_of
from sluice_client.errors import ClientError
from sluice_client.submission import PROMPTS_FILE, Submission, prepare_submission

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples/quickstart/job.yaml"
ROWS = [{"prompt": "max 1 2 3 =", "label": "3"}]


def submitted(job: Any = QUICKSTART, *, local: bool = True, **more: Any) -> Submission:
    arguments: dict[str, Any] = {"name": None, "overrides": {}, "reward": None, "prompts": None}
    return prepare_submission(job, local=local, **arguments | more)


def test_paths_are_absolute_only_for_a_local_job() -> None:
    spec = submitted(name="mine", overrides={"trainer.steps": 3}).document()["spec"]
    assert spec["model"]["path"] == str(QUICKSTART.parent / "model")
    assert spec["trainer"]["steps"] == 3
    assert submitted(local=False).document()["spec"]["model"]["path"] == "model"


@pytest.mark.parametrize("kind", ["path", "text", "job", "built", "plain"])
def test_a_job_may_be_a_path_a_model_or_plain_data(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(QUICKSTART.parent)
    job = load_job(QUICKSTART)
    typed = {"apiVersion": "sluice.dev/v1alpha1", "kind": "RLJob", **manifest(job)}
    built = RLJob(metadata=job.metadata, spec=job.spec)
    forms = {
        "path": QUICKSTART, "text": str(QUICKSTART), "job": job, "built": built, "plain": typed,
    }  # fmt: skip
    sent = submitted(forms[kind], name="other")
    assert sent.job.metadata.name == "other"
    assert sent.document()["spec"] == submitted().document()["spec"]


def test_rows_and_functions_become_files() -> None:
    sent = submitted(prompts=ROWS, reward="reward.py:positions", local=False)
    assert sent.files == {PROMPTS_FILE: '{"prompt": "max 1 2 3 =", "label": "3"}\n'}
    placed = sent.placed(CODE_DIR)
    assert isinstance(placed, RLJob)
    assert [source.path for source in placed.spec.data.prompts] == [f"{CODE_DIR}/{PROMPTS_FILE}"]
    assert placed.spec.reward is not None
    assert placed.spec.reward.function == "reward.py:positions"


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(ClientError, match=r"trainer\.stepz"):
        submitted(overrides={"trainer.stepz": 3})


def test_steps_are_parsed_from_the_log_of_a_trainer() -> None:
    line = '{"event": "step 3/10", "raw_reward": "0.5", "loss": "-0.01", "role": "trainer"}'
    assert step_of(line) == {"step": 3, "raw_reward": 0.5, "loss": -0.01}
    assert step_of("Traceback (most recent call last):") is None
    assert step_of('{"event": "training starts", "step": 0}') is None
