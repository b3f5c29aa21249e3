"""Vision-language models under FSDP2: the numbers of transformers, and nothing of a checkpoint
lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.api.groups.data import PromptSource
from sluice.data import chat
from sluice.data.checking import reader_of
from sluice.images.processor import ImageProcessor
from sluice.runtime.pod_env import ConfigurationError
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_buffer.sources.answers import Answers
from sluice_buffer.sources.prompts import Prompts
from sluice_trainer.batch.images import ImageExpansion
from sluice_trainer.batch.preparation import learn
from sluice_trainer.fsdp import loading
from sluice_trainer.fsdp.attention import PACKED_ATTENTION
from sluice_trainer.fsdp.conversion import dist_to_hf
from sluice_trainer.fsdp.families import backbone
from sluice_trainer.fsdp.policy import ShardedPolicy
from sluice_trainer.fsdp.sharding import gathered
from sluice_trainer.kernels import flash_attention
from sluice_trainer.lora.merging import merge_adapter
from sluice_trainer.model.unsupported import UnsupportedModelError
from tests.cases import slow
from tests.integration.trainer import image_batch, tiny
from tests.integration.trainer.image_batch import Batch
from tests.vision_models import TRAINED_FAMILIES, make_model, picture

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=TRAINED_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    return Batch(model, groups=3, seed=0)


def policy_of(model: Path, /, **changes: object) -> ShardedPolicy:
    spec = image_batch.spec(model, **changes)
    return ShardedPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


@pytest.fixture(scope="module")
def policy(model: Path) -> ShardedPolicy:
    return policy_of(model)


@pytest.mark.support("fsdp", "images")
def test_packed_log_probs_are_those_of_transformers(
    model: Path, batch: Batch, policy: ShardedPolicy
) -> None:
    shard = batch.sequences()
    rows = policy._learner.micro_batches(shard, tiny.totals(shard))
    # One row holds an image, two images of other sizes, and a sequence without one, unless layers
    # of the family would carry their state from one sequence to the next.
    assert [len(row.members) for row in rows] == ([6] if policy._learner.net.packs else [1] * 6)
    assert [len(sequence.images) for sequence in shard] == [1, 1, 2, 2, 0, 0]
    reference = image_batch.hf_model(model)
    with torch.no_grad():
        expected = [image_batch.hf_log_probs(reference, sequence) for sequence in shard]
    for actual, wanted in zip(policy.log_probs(shard), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-6)


def test_another_image_gives_another_number(batch: Batch, policy: ShardedPolicy) -> None:
    shard = batch.sequences()
    before = policy.log_probs(shard)
    other = Batch(policy.model_dir, groups=3, seed=0)
    for group in other.groups:
        for sample in group.samples:
            for place, digest in enumerate(sample.images):
                changed = picture(*_size(other, digest), seed=99)
                other.images[changed.digest] = changed
                sample.images[place] = changed.digest
    after = policy.log_probs(other.sequences())
    for sequence, first, second in zip(shard, before, after, strict=True):
        distance = float((first - second).abs().max())
        assert distance > 1e-3 if sequence.images else distance < 1e-6


def _size(batch: Batch, digest: str) -> tuple[int, int]:
    image = batch.images[digest]
    return image.width, image.height


@pytest.mark.support("fsdp", "trains")
@pytest.mark.parametrize("freeze", [None, [], ["vision"]], ids=["both", "none", "vision"])
def test_gradients_are_those_of_transformers(
    model: Path, batch: Batch, freeze: list[str] | None
) -> None:
    changes = {} if freeze is None else {"freeze": freeze}
    policy = policy_of(model, trainer={"optimizer": {"lr": 0.0, "clipGrad": 0.0}, **changes})
    shard = batch.sequences()
    actual: dict[str, Tensor] = {}
    net = policy._learner.net
    step = policy._learner.optimizer.step

    def keep_gradients() -> None:
        actual.update(
            {
                name: gathered(p.grad)
                for name, p in net.model.named_parameters()
                if p.grad is not None
            }
        )
        step()

    policy._learner.optimizer.step = keep_gradients
    policy.train([shard], [tiny.totals(shard)])
    reference = image_batch.hf_model(model)
    image_batch.plain_loss(reference, shard).backward()
    parameters = dict(reference.named_parameters())
    assert actual.keys() <= parameters.keys()
    for name, parameter in parameters.items():
        part = "projector" if "merger" in name else "vision" if ".visual." in name else ""
        if part and part in (["vision", "projector"] if freeze is None else freeze):
            assert name not in actual
        else:
            torch.testing.assert_close(actual[name], parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("freeze", [None, []], ids=["frozen", "trained"])
def test_an_export_has_all_tensors_and_loads(
    model: Path, batch: Batch, tmp_path: Path, freeze: list[str] | None
) -> None:
    policy = policy_of(model, trainer={} if freeze is None else {"freeze": freeze})
    shard = batch.sequences()
    policy.train([shard], [tiny.totals(shard)])
    policy.export_hf(tmp_path / "hf")
    before, after = (
        load_file(model / "model.safetensors"),
        load_file(tmp_path / "hf/model.safetensors"),
    )
    assert before.keys() == after.keys()
    sent = dict(policy.engine_tensors())
    for name, tensor in before.items():
        in_tower = "visual." in name
        assert (name in sent) == (freeze == [] or not in_tower)
        assert torch.equal(tensor, after[name]) == (in_tower and freeze is None), name
        if name in sent:
            assert torch.equal(sent[name], after[name])
    exported = image_batch.hf_model(tmp_path / "hf")
    with torch.no_grad():
        expected = [image_batch.hf_log_probs(exported, sequence) for sequence in shard]
    for actual, wanted in zip(policy.log_probs(shard), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("freeze", [None, []], ids=["frozen", "trained"])
def test_an_image_is_decoded_once_for_all_samples_and_passes(
    model: Path, monkeypatch: pytest.MonkeyPatch, freeze: list[str] | None
) -> None:
    batch = Batch(model, groups=2, seed=5, samples=4)
    decoded = count_calls(monkeypatch, type(batch.processor), "pixels")
    policy = policy_of(model, trainer={"maxTokensPerGpu": 60, "freeze": freeze})
    tower = count_calls(
        monkeypatch, type(backbone(policy._learner.net.model)), "get_image_features"
    )
    shard = batch.sequences()
    first = policy.log_probs(shard)
    assert len(policy._learner.micro_batches(shard, tiny.totals(shard))) > 1
    again = policy.log_probs(shard)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(decoded) == len(batch.images) == 3
    # What a frozen tower makes of an image is kept, too.
    assert len(tower) <= 3 if freeze is None else len(tower) > 3


def count_calls(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str) -> list[str]:
    """Return a list that grows with each call of a method."""
    calls: list[str] = []
    original = getattr(kind, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return original(*arguments, **named)

    monkeypatch.setattr(kind, name, counted)
    return calls


JOBS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"trainer": {"freeze": [], "recompute": "full"}},
    "kl": {
        "trainer": {"stepsPerBatch": 1},
        "algorithm": {"kl": {"coef": 0.0, "lossCoef": 0.1}},
    },
}


@pytest.mark.parametrize("job", slow(JOBS, "kl"))
def test_two_ranks_learn_the_same_as_one(model: Path, tmp_path: Path, job: str) -> None:
    exported = []
    histories = []
    for world in (1, 2):
        out = tmp_path / str(world)
        arguments = {"model": str(model), "out": str(out), "steps": 5, **JOBS[job]}
        results = tiny.run("train_images.py", json.dumps(arguments), world=world)
        exported.append(load_file(out / "model.safetensors"))
        histories.append(results[0]["history"])
    for first, second in zip(*histories, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name
    source = load_file(model / "model.safetensors")
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name], tensor, atol=2e-5, rtol=1e-4)
        in_tower = "visual." in name
        assert torch.equal(tensor, source[name]) == (in_tower and job != "trained"), name


QUESTION, ANSWER = "<image>What is it?", "a cat"
ANSWERED: dict[str, dict[str, Any]] = {
    "one": {"messages": [{"role": "user", "content": QUESTION}], "images": ["0.png"]},
    "two": {"messages": [{"role": "user", "content": 2 * QUESTION}], "images": ["1.png", "0.png"]},
    "none": {"messages": [{"role": "user", "content": "What is a cat?"}]},
}


@pytest.mark.parametrize("row", ANSWERED.values(), ids=ANSWERED)
def test_the_loss_of_given_answers_is_that_of_transformers(
    model: Path, tmp_path: Path, row: dict[str, Any]
) -> None:
    files = {"0.png": picture(64, 64, 1), "1.png": picture(100, 40, 2)}
    for name, image in files.items():
        (tmp_path / name).write_bytes(image.data)
    messages = [*row["messages"], {"role": "assistant", "content": ANSWER}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row | {"messages": messages}) + "\n")
    spec = image_batch.spec(
        model,
        algorithm={"loss": {"type": "sft"}},
        reward=None,
        rollout={"batchSize": 1},
        trainer={"stepsPerBatch": 1},
    )
    data = spec.data.model_copy(update={"prompts": [PromptSource(path=str(rows))]})
    spec = spec.model_copy(update={"data": data})
    source = Answers.load(spec, Prompts(data, None, tmp_path, reader_of(spec)))
    prepared = source._prepared(0)
    source.close()
    group = codec.group_from_message(prepared.group)
    (sample,) = group.samples
    images = {image.digest: image for image in prepared.prompt.images.values()}
    assert sample.images == [files[name].digest for name in row.get("images", [])]

    policy = ShardedPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))
    expansion = ImageExpansion(ImageProcessor(model), lambda names: [images[n] for n in names])
    batch = [pb.Sequence(group_id=0, trainable_tokens=sample.trainable_tokens)]
    metrics = expansion.before(partial(learn, policy, None))(batch, [group])

    text = chat.render(
        source.tokenizer, source.prompts.training(0)[1].prompt, chat=True, opened=False
    )
    expected = image_batch.hf_answer_loss(
        model, text, [images[name] for name in sample.images], f"{ANSWER}<|im_end|>"
    )
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-5, rel=1e-5)


def test_a_checkpoint_restores_and_converts(model: Path, batch: Batch, tmp_path: Path) -> None:
    shard = batch.sequences()
    policy = policy_of(model, trainer={"freeze": []})
    policy.train([shard], [tiny.totals(shard)])
    tiny.save(policy, tmp_path / "checkpoints", 1)
    policy.export_hf(tmp_path / "hf")
    policy.train([shard], [tiny.totals(shard)])
    resumed = policy_of(model, trainer={"freeze": []})
    assert resumed.load_latest(tmp_path / "checkpoints") == 1
    resumed.train([shard], [tiny.totals(shard)])
    for (name, tensor), (_, again) in zip(policy.hf_tensors(), resumed.hf_tensors(), strict=True):
        assert torch.equal(tensor, again), name
    dist_to_hf(tmp_path / "checkpoints", model, tmp_path / "converted")
    expected = load_file(tmp_path / "hf/model.safetensors")
    converted = load_file(tmp_path / "converted/model.safetensors")
    assert expected.keys() == converted.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())


@pytest.mark.support("fsdp", "lora")
def test_an_adapter_is_added_to_the_language_model_alone(
    model: Path, batch: Batch, tmp_path: Path
) -> None:
    policy = policy_of(model, trainer={"lora": {"rank": 4}})
    names = policy.adapter_tensors()
    assert names
    assert not [name for name in names if ".visual." in name]
    shard = batch.sequences()
    policy.train([shard], [tiny.totals(shard)])
    policy.export_hf(tmp_path / "hf")
    policy.export_adapter(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", model, tmp_path / "merged")
    merged, exported = (
        load_file(tmp_path / name / "model.safetensors") for name in ("merged", "hf")
    )
    assert merged.keys() == exported.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6)
    # What each of them computes is what the trainer does.
    with_peft = PeftModel.from_pretrained(image_batch.hf_model(model), tmp_path / "adapter")
    for reference in (image_batch.hf_model(tmp_path / "hf"), with_peft):
        with torch.no_grad():
            expected = [image_batch.hf_log_probs(reference, sequence) for sequence in shard]
        for actual, wanted in zip(policy.log_probs(shard), expected, strict=True):
            torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)
    adapted = {name for name, _ in with_peft.named_parameters() if ".lora_" in name}
    assert adapted
    assert not [name for name in adapted if ".visual." in name]


def other_weights(model: Path, directory: Path) -> Path:
    """Return a copy of a model with other weights."""
    shutil.copytree(model, directory)
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    changed = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("whole", [False, True], ids=["sampled tokens", "all logits"])
def test_a_teacher_sees_the_images(
    model: Path, batch: Batch, tmp_path: Path, *, whole: bool
) -> None:
    teacher = other_weights(model, tmp_path / "teacher")
    distillation = {
        "teacher": {"path": str(teacher)},
        **({"divergence": "reverse_kl"} if whole else {}),
    }
    policy = policy_of(model, algorithm={"distillation": distillation})
    assert policy._teacher is not None
    shard = batch.sequences()
    reference = image_batch.hf_model(teacher)
    with torch.no_grad():
        expected = [image_batch.hf_log_probs(reference, sequence) for sequence in shard]
    for actual, wanted in zip(policy._teacher.log_probs(shard), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-6)
    metrics = policy.train([shard], [tiny.totals(shard)])
    assert metrics["train/opd_reverse_kl"] != 0


def test_a_teacher_that_sees_other_pixels_is_refused(model: Path, tmp_path: Path) -> None:
    teacher = other_weights(model, tmp_path / "teacher")
    file = teacher / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"]["longest_edge"] //= 2
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigurationError, match=r"teacher.path: images of .* differ in size from"):
        policy_of(model, algorithm={"distillation": {"teacher": {"path": str(teacher)}}})


def test_a_critic_sees_the_images(model: Path, batch: Batch) -> None:
    policy = policy_of(model, algorithm={"estimator": "ppo"})
    shard = batch.sequences()
    values = policy.values(shard)
    assert values is not None
    assert all(float(value.abs().max()) == 0 for value in values)
    targets = [
        replace(sequence, values=value, returns=torch.ones_like(value))
        for sequence, value in zip(shard, values, strict=True)
    ]
    for _ in range(3):
        policy.train([targets], [tiny.totals(shard)])
    learned = policy.values(shard)
    assert learned is not None
    assert all(float(value.abs().max()) > 0 for value in learned)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": {"init": "random"}}, id="drawn"),
        pytest.param(
            {"trainer": {"colocate": True}, "rollout": {"mode": "sync", "gpusPerReplica": 0}},
            id="colocated",
        ),
    ],
)
def test_engines_without_a_tower_get_all_weights(model: Path, changes: dict[str, Any]) -> None:
    policy = policy_of(
        model, **{**changes, "model": {"path": str(model), **changes.get("model", {})}}
    )
    names = {name for name, _ in policy.engine_tensors()}
    assert names == load_file(model / "model.safetensors").keys()


def attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute what FlashAttention does for packed sequences on a GPU, one sequence at a time."""
    assert window is None
    starts = bounds[0].tolist()
    assert max(b - a for a, b in pairwise(starts)) == longest[0]
    parts = []
    for start, end in pairwise(starts):
        query, key, value = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def test_attention_of_packed_sequences_on_a_gpu_sees_the_same(
    model: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "attention", lambda *_, **__: PACKED_ATTENTION)
    monkeypatch.setattr(flash_attention, "attend2", attend_each)
    policy = policy_of(model)
    config = policy._learner.net.model.config
    assert config._attn_implementation == PACKED_ATTENTION
    assert config.vision_config._attn_implementation == "sdpa"
    shard = batch.sequences()
    reference = image_batch.hf_model(model)
    with torch.no_grad():
        expected = [image_batch.hf_log_probs(reference, sequence) for sequence in shard]
    for actual, wanted in zip(policy.log_probs(shard), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-6)


def test_a_tied_output_layer_follows_the_embedding(
    model: Path, batch: Batch, tmp_path: Path
) -> None:
    """As Qwen3-VL-4B has it: stored once, under the name of the embedding."""
    tied = tmp_path / "tied"
    shutil.copytree(model, tied)
    config = json.loads((tied / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (tied / "config.json").write_text(json.dumps(config))
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    policy = policy_of(tied)
    shard = batch.sequences()
    policy.train([shard], [tiny.totals(shard)])
    policy.export_hf(tmp_path / "hf")
    assert load_file(tmp_path / "hf/model.safetensors").keys() == tensors.keys()
    exported = image_batch.hf_model(tmp_path / "hf")
    with torch.no_grad():
        expected = [image_batch.hf_log_probs(exported, sequence) for sequence in shard]
    for actual, wanted in zip(policy.log_probs(shard), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_bf16_differs_by_rounding_alone(model: Path, batch: Batch) -> None:
    shard = batch.sequences()
    reference = image_batch.hf_model(model)
    with torch.no_grad():
        expected = [image_batch.hf_log_probs(reference, sequence) for sequence in shard]
    trained: tuple[list[str] | None, ...] = (None, [])
    for freeze in trained:
        policy = policy_of(model, trainer={"precision": "bf16", "freeze": freeze})
        for actual, wanted in zip(policy.log_probs(shard), expected, strict=True):
            difference = (actual - wanted).abs()
            # The router of a mixture chooses other experts for a few tokens.
            off = difference.mean() if "moe" in model.name else difference.max()
            assert float(off) < 0.1
        policy.train([shard], [tiny.totals(shard)])


def test_a_release_with_other_positions_is_refused(
    model: Path, policy: ShardedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(backbone(policy._learner.net.model))
    original = kind.get_rope_index

    def later(*arguments: Any, **named: Any) -> Any:
        positions, deltas = original(*arguments, **named)
        return positions + (positions > 3), deltas

    monkeypatch.setattr(kind, "get_rope_index", later)
    with pytest.raises(UnsupportedModelError, match="counts the positions of their tokens"):
        policy_of(model)
