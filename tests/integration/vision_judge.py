"""transformers as the judge of an engine's numbers for prompts with images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from sluice.images.image import Image
from sluice.images.processor import ImageProcessor
from sluice.samples.sample import Int32


class Judge:
    """transformers' model and tokenizer of a checkpoint, in float32."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.processor = ImageProcessor(directory)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def ids(self, images: int) -> list[int]:
        """Return a prompt's tokens with one placeholder for each image."""
        parts = [{"type": "text", "text": "See "}, *({"type": "image"} for _ in range(images))]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": [*parts, {"type": "text", "text": " What is it?"}]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def log_probs(
        self, prompt: Sequence[int] | Int32, images: Sequence[Image], response: list[int]
    ) -> list[float]:
        """Return the log-probs of a response to a prompt with one placeholder for each image."""
        sizes = [(image.width, image.height) for image in images]
        expanded, _ = self.processor.expand(np.asarray(prompt, np.int32), sizes)
        tokens = torch.tensor([[*expanded.tolist(), *response]])
        kinds = torch.zeros_like(tokens)
        kinds[0, : len(expanded)] = torch.from_numpy(expanded == self.processor.placeholder).long()
        vision = {}
        if images:
            pixels = self.processor.pixels(images)
            vision = {
                "pixel_values": torch.from_numpy(pixels.values),
                "image_grid_thw": torch.from_numpy(pixels.grids),
                "mm_token_type_ids": kinds,
            }
        with torch.no_grad():
            logits = self.model(input_ids=tokens, **vision).logits[0, -len(response) - 1 : -1]
        chosen = tokens[0, -len(response) :, None]
        values: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        return values
