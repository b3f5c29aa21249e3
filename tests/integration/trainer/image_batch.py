"""Batches with images for the tiny vision-language models, and transformers' answers for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sluice.api import RLJobSpec
from sluice.images.image import Image
from sluice.images.processor import ImageProcessor
from sluice.samples.sample import Prompt, Sample, SampleGroup, SampleStatus, WeightSpan
from sluice_trainer.batch.images import ImageExpansion
from sluice_trainer.batch.sequences import TrainSequence
from tests.integration.trainer import tiny
from tests.vision_models import picture

# Words of the tiny tokenizer that are no special tokens.
WORDS = 256
SIZES = ((64, 64), (100, 40), (33, 130), (224, 30))
DATA = {"prompts": [{"path": "prompts.jsonl"}], "seed": 1, "images": {}}


def spec(directory: Path, /, **changes: Any) -> RLJobSpec:
    """Return the spec of a vision job for a CPU trainer."""
    trainer = {"backend": "fsdp", "maxTokensPerGpu": 256, **changes.pop("trainer", {})}
    return tiny.spec(directory, data=DATA, trainer=trainer, **changes)


class Batch:
    """Groups with compact tokens, and their images."""

    def __init__(self, model: Path, groups: int, seed: int, samples: int = 2) -> None:
        self.processor = ImageProcessor(model)
        self.images: dict[str, Image] = {}
        self._random = np.random.default_rng(seed)
        # In turn one image, two and none.
        self.groups = [self._group(number, (number + 1) % 3, samples) for number in range(groups)]

    def sequences(self) -> list[TrainSequence]:
        """Return the expanded sequences with an advantage each."""
        expanded = ImageExpansion(self.processor, self.fetch).expand(self.groups)
        return [
            sequence
            for group in expanded
            for sample in group.samples
            for sequence in TrainSequence.from_sample(
                group.group_id, sample, (sample.reward or 0.0) - 0.5
            )
        ]

    def fetch(self, digests: Sequence[str]) -> list[Image]:
        return [self.images[digest] for digest in digests]

    def _group(self, number: int, images: int, samples: int) -> SampleGroup:
        chosen = [
            picture(*SIZES[(number + i) % len(SIZES)], seed=10 * number + i) for i in range(images)
        ]
        self.images |= {image.digest: image for image in chosen}
        prompt = self._words(5)
        for _ in chosen:
            prompt += [259, self.processor.placeholder, 260, *self._words(2)]
        digests = [image.digest for image in chosen]
        return SampleGroup(
            Prompt(number, "", images=digests),
            [self._sample(index, prompt, digests) for index in range(samples)],
        )

    def _sample(self, index: int, prompt: list[int], digests: list[str]) -> Sample:
        answer = self._words(int(self._random.integers(3, 12)))
        size = len(answer)
        return Sample(
            index=index,
            tokens=np.array(prompt + answer, np.int32),
            response_length=size,
            loss_mask=(self._random.random(size) > 0.2).astype(np.uint8),
            rollout_log_probs=(-5 - self._random.random(size)).astype(np.float32),
            weight_versions=[WeightSpan(0, 0, size)],
            reward=float(self._random.random()),
            status=SampleStatus.COMPLETED,
            images=list(digests),
            image_tokens=self.processor.added([_size(self.images[d]) for d in digests]),
        )

    def _words(self, count: int) -> list[int]:
        return [int(word) for word in self._random.integers(0, WORDS, count)]


def _size(image: Image) -> tuple[int, int]:
    return image.width, image.height


def hf_model(directory: Path) -> Any:
    import transformers

    kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(directory, attn_implementation="sdpa").eval()


def hf_log_probs(model: Any, sequence: TrainSequence) -> torch.Tensor:
    """Return transformers' log-probs [response] of one unpacked sequence with its images."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    of_image = torch.zeros(len(tokens), dtype=torch.int32)
    more: dict[str, Any] = {}
    if sequence.images:
        pixels = [placed.image.pixels() for placed in sequence.images]
        for placed in sequence.images:
            of_image[placed.start : placed.start + placed.image.tokens] = 1
        more = {
            "pixel_values": torch.from_numpy(np.concatenate([p.values for p in pixels])),
            "image_grid_thw": torch.from_numpy(np.concatenate([p.grids for p in pixels])),
        }
    logits = model(input_ids=tokens[None], mm_token_type_ids=of_image[None], **more).logits[0, :-1]
    log_p = torch.log_softmax(logits.float(), -1)
    chosen: torch.Tensor = log_p.gather(-1, tokens[1:, None]).squeeze(-1)
    return chosen[-sequence.response_length :]


def hf_answer_loss(directory: Path, text: str, images: Sequence[Image], answers: str) -> float:
    """Return transformers' loss of a conversation, as its processor of Qwen's models writes it.

    Parameters
    ----------
    directory
        The model.
    text
        The rendered conversation, with one placeholder for each image.
    images
        Its images.
    answers
        The part of the text that is trained, which occurs once.

    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    placeholder = "<|image_pad|>"
    before, trained, after = text.partition(answers)
    assert trained
    more: dict[str, Any] = {}
    if images:
        pixels = ImageProcessor(directory).pixels(images)
        counts = iter(pixels.grids.prod(1) // 4)
        head, *tails = before.split(placeholder)
        before = head + "".join(placeholder * next(counts) + tail for tail in tails)
        more = {
            "pixel_values": torch.from_numpy(pixels.values),
            "image_grid_thw": torch.from_numpy(pixels.grids),
        }
    parts = [
        torch.tensor(tokenizer.encode(part), dtype=torch.int64) for part in (before, trained, after)
    ]
    tokens = torch.cat(parts)
    labels = torch.full_like(tokens, -100)
    start = len(parts[0])
    labels[start : start + len(parts[1])] = parts[1]
    of_image = (tokens == tokenizer.convert_tokens_to_ids(placeholder)).int()
    with torch.no_grad():
        output = hf_model(directory)(
            input_ids=tokens[None], labels=labels[None], mm_token_type_ids=of_image[None], **more
        )
    return float(output.loss)


def plain_loss(model: Any, shard: Sequence[TrainSequence]) -> torch.Tensor:
    """Return the on-policy GRPO loss, one unpacked sequence at a time."""
    total = torch.zeros(())
    for sequence in shard:
        log_probs = hf_log_probs(model, sequence)
        mask = torch.from_numpy(sequence.loss_mask).float()
        terms = -(log_probs - log_probs.detach()).exp() * sequence.advantage
        total = total + (terms * mask).sum() / mask.sum().clamp(min=1) / len(shard)
    return total
