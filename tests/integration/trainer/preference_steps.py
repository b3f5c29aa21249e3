"""Train on rows of preferences, in their order, on one rank or several.

As a program it makes the run whose options are its argument.
"""

from __future__ import annotations

import json
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file

from sluice.api import RLJobSpec
from sluice.api.groups.data import Evaluation
from sluice.data import answers, chat
from sluice.data.checking import reader_of
from sluice.data.files import read_file
from sluice.data.preferences import named_answers, preference_of
from sluice.samples.sample import Prompt, Sample, SampleGroup, TokenSequence
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_buffer.sources.answers import sample_of
from sluice_trainer.backend import BackendClass
from sluice_trainer.backend_registry import backend_class
from sluice_trainer.batch.preparation import prepare
from sluice_trainer.loop.held_out import HeldOut
from sluice_trainer.megatron import parallel
from sluice_trainer.policy.learning_policy import LearningPolicy
from tests.chat import save
from tests.integration.trainer import tiny

STEPS, PAIRS = 10, 4
# A token for each byte, and the special ones.
_VOCABULARY = 258
_WORDS = ("red", "green", "blue", "one", "two", "three", "four", "tall", "small", "round", "wide")


def save_model(directory: Path, kind: str = "Qwen3", **changes: Any) -> Path:
    """Save a tiny model with a tokenizer of bytes. kind, changes: as of `tiny.save_kind`."""
    tiny.save_kind(kind, {"head_dim": 32, "vocab_size": _VOCABULARY, **changes}, directory)
    config = json.loads((directory / "config.json").read_text())
    save(directory)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_reward_model(directory: Path, base: Path) -> Path:
    """Save a reward model of the shape and with the tokenizer of `base`, as transformers does."""
    import transformers

    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(2)
    model = transformers.Qwen3ForSequenceClassification.from_pretrained(base, num_labels=1)
    model.score.weight.data.normal_(0, 0.1)
    model.save_pretrained(directory)
    return directory


def save_rows(path: Path, count: int = STEPS * PAIRS) -> Path:
    """Write pairs of texts of uneven lengths, the same on every machine."""
    words = len(_WORDS)
    rows = []
    for i in range(count):
        picked = [_WORDS[(i * 7 + j * j + j) % words] for j in range(9)]
        rows.append(
            {
                "prompt": f"{i}: {' '.join(picked[: 1 + i % 3])}?",
                "chosen": " " + " ".join(picked[3 : 4 + i % 4]),
                "rejected": " " + " ".join(picked[7 - i % 3 :]),
                "margin": i % 3 / 4,
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec_of(model: str, loss: dict[str, Any], **trainer: Any) -> RLJobSpec:
    """Return a job's spec; `trainer` is merged with the group."""
    optimizer = {"lr": 1e-3, "eps": tiny.EPS, **trainer.pop("optimizer", {})}
    return tiny.spec(
        Path(model),
        algorithm={"loss": loss},
        reward=None,
        rollout={"batchSize": PAIRS},
        trainer={"stepsPerBatch": 1, "maxTokensPerGpu": 128, "optimizer": optimizer, **trainer},
    )


def samples_of(spec: RLJobSpec, rows: Path) -> list[Sample]:
    """Return the rows as the buffer makes samples of them."""
    tokenizer, read, source = (
        chat.load_tokenizer(Path(spec.model.path)),
        reader_of(spec),
        spec.data.prompts[0],
    )
    parsed = [read(located.row, source) for located in read_file(rows)]
    samples = [
        sample_of(
            *(answers.encode(tokenizer, answer) for _, answer in named_answers(row)),
            preference=preference_of(row),
        )
        for row in parsed
    ]
    if spec.algorithm.loss.type == "kto":
        for sample, other in zip(samples, (samples[1], *samples), strict=False):
            sample.branches = [with_answer_of(sample, other)]
    return samples


def with_answer_of(sample: Sample, other: Sample) -> TokenSequence:
    """Return the prompt of a sample with the answer of another one, as the buffer does."""
    answer = other.tokens[other.prompt_length :]
    return TokenSequence(
        tokens=np.concatenate([sample.tokens[: sample.prompt_length], answer]),
        response_length=other.response_length,
        loss_mask=other.loss_mask,
        rollout_log_probs=other.rollout_log_probs,
    )


def train(
    model: str,
    rows: str,
    loss: dict[str, Any],
    *,
    dump: str | None = None,
    steps: int = STEPS,
    held_out: int = 0,
    kind: BackendClass | None = None,
    **trainer: Any,
) -> list[dict[str, float]]:
    """Train and return the metrics of each step.

    `dump` is a file for the weights; `kind` is by default the backend that `trainer` names. So many
    of the last rows are held out, and measured after each step.
    """
    spec = spec_of(model, loss, **trainer)
    timeout = timedelta(seconds=tiny.TIMEOUT)
    policy = (kind or backend_class(spec))(spec, model_dir=Path(model), timeout=timeout)
    assert isinstance(policy, LearningPolicy)
    samples = samples_of(spec, Path(rows))
    measured = HeldOutRows(policy, samples[-held_out:]) if held_out else None
    history = []
    for number in range(steps):
        metrics = step(policy, samples[number * PAIRS : (number + 1) * PAIRS], number)
        history.append(metrics | (measured.metrics() if measured else {}))
    tensors = dict(policy.hf_tensors())
    if dump and policy.ranks.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, dump)
    return history


class HeldOutRows:
    """Held-out rows of a buffer that has nothing else, and what is recorded of them."""

    def __init__(self, policy: LearningPolicy, samples: list[Sample], page: int = 256) -> None:
        self._groups = [SampleGroup(Prompt(i, "p"), [sample]) for i, sample in enumerate(samples)]
        self._metrics: dict[str, float] = {}
        self._page = page
        settings = Evaluation.model_validate({"heldOut": [{"path": "rows"}]})
        double = cast("Any", self)
        self._rows = HeldOut(policy, double, double, settings)

    def metrics(self) -> dict[str, float]:
        """Return the metrics with the present weights."""
        self._rows.measure(0)
        return self._metrics

    def held_out(self, *call: Any) -> list[SampleGroup] | None:
        if isinstance(call[0], str):  # the recorder's
            self._metrics = call[2]
            return None
        _, first = call
        return self._groups[first : first + self._page]


def step(policy: LearningPolicy, samples: list[Sample], number: int = 0) -> dict[str, float]:
    """Make one training step."""
    rank, size = policy.ranks.data_parallel_rank, policy.ranks.data_parallel_size
    steps = policy.spec.trainer.steps_per_batch
    batch = [
        pb.Sequence(
            group_id=number * PAIRS + place,
            length=sum(len(s.tokens) for s in sample.sequences),
            response_length=sample.response_length,
            trainable_tokens=sample.trainable_tokens,
            status=common.SAMPLE_STATUS_COMPLETED,
            rank=place % size,
            optimizer_step=place * steps // len(samples),
        )
        for place, sample in enumerate(samples)
    ]
    groups = [
        SampleGroup(Prompt(sequence.group_id, "p"), [sample])
        for sequence, sample in zip(batch, samples, strict=True)
        if sequence.rank == rank
    ]
    prepared = prepare(policy, batch, groups)
    return prepared.metrics | policy.train(prepared.shard, prepared.totals)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(**json.loads(sys.argv[1]))))
    parallel.shutdown()
