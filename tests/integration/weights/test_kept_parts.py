"""An engine of a checkpoint for pictures gets the language model, and keeps its own tower."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from sluice.engines.protocol import UNKNOWN_VERSION
from sluice_trainer.fsdp.conversion import dist_to_hf
from sluice_trainer.weights.disk import Disk, VersionDirectories
from tests.integration.engines import Sglang, call, distance, tensors
from tests.integration.trainer import tiny
from tests.integration.trainer.multimodal import save_multimodal
from tests.integration.weights.test_sender import JoinEngine, MakeSender
from tests.integration.weights.tools import publish, serves

TEXT = "w010 w020 <start_of_image> w030 w040"
SPECIAL = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
IMAGE = 7
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
# Engine and transformers scale a picture in different orders.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 for pictures, with tokenizer and processor."""
    directory = tmp_path_factory.mktemp("pictures") / "model"
    save_multimodal("gemma3-pictures", directory)
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "<x>", *SPECIAL.values()]
    words += [f"w{number:03d}" for number in range(tiny.VOCAB - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", extra_special_tokens=SPECIAL
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 16, "width": 16})
    transformers.Gemma3Processor(images, fast, image_seq_length=1).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def pictures(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """An engine that was told, as each is, that the trainer brings the weights."""
    arguments = "--load-format dummy --enable-multimodal --mm-attention-backend sdpa"
    server = Sglang(source, tmp_path_factory.mktemp("engine") / "log", *arguments.split())
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def sees(server: Sglang, weights: Path) -> bool:
    """Return True if the engine answers to a picture as transformers does with these weights."""
    png = io.BytesIO()
    PICTURE.save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    sampling = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    body = {"text": TEXT, "image_data": [url], "sampling_params": sampling, "return_logprob": True}
    status, answer = call(server.url + "/generate", body)
    assert status == 200, answer
    output = answer["output_ids"]
    values = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
    return distance(values, log_probs_of_picture(weights, output)) < TOLERANCE


def log_probs_of_picture(weights: Path, output: list[int]) -> list[float]:
    processor = transformers.AutoProcessor.from_pretrained(weights)
    inputs = processor(images=[PICTURE], text=TEXT, return_tensors="pt")
    tokens = torch.cat([inputs["input_ids"], torch.tensor([output])], 1)
    model = tiny.hf_model(weights, "eager").float()
    with torch.no_grad():
        logits = model(
            input_ids=tokens,
            pixel_values=inputs["pixel_values"],
            token_type_ids=(tokens == IMAGE).long(),
        ).logits[0, -len(output) - 1 : -1]
    values: list[float] = (
        logits.log_softmax(-1).gather(1, tokens[0, -len(output) :, None])[:, 0].tolist()
    )
    return values


@pytest.mark.long
async def test_it_serves_what_was_trained_and_keeps_its_tower(
    source: Path,
    pictures: Sglang,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    tmp_path: Path,
) -> None:
    job = {
        "model": str(source),
        "steps": 2,
        "save_at": 2,
        "algorithm": {},
        "trainer": {"backend": "fsdp", "optimizer": {"lr": 1e-2}},
        "checkpoints": str(tmp_path / "checkpoints"),
        "dump": str(tmp_path / "sent.safetensors"),
    }
    tiny.run("train_steps.py", json.dumps(job))
    # In the precision of the checkpoint, for which the export rounds.
    sent = [(n, t.bfloat16()) for n, t in sorted(load_file(tmp_path / "sent.safetensors").items())]
    dist_to_hf(tmp_path / "checkpoints", source, tmp_path / "trained")
    assert sees(pictures, source)
    assert await serves(pictures.url, source, UNKNOWN_VERSION)
    await join_engine("rollout-0", pictures.address)

    update = await publish(make_sender(), 1, sent)
    assert (list(update.engines), update.failed) == (["rollout-0"], {})
    assert await serves(pictures.url, tmp_path / "trained", 1)
    assert sees(pictures, tmp_path / "trained")
    assert not sees(pictures, source)

    before = dict(tensors(source))
    disk = Disk(VersionDirectories(tmp_path / "weights", 1), source, drawn=False)
    await publish(make_sender(disk, transport="disk"), 2, [(n, before[n]) for n, _ in sent])
    assert await serves(pictures.url, source, 2)
    assert sees(pictures, source)
