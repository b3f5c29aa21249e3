"""Tokens a second of a vision-language model in trainer and engine, with images and without.

    python benchmarks/vision.py [--shape qwen3-vl-4b] [--side 896] [--tokens 2048] [--samples 8]
        [--prompts 4] [--parts trainer engine] [--json FILE]

Weights are random. A prompt has one image of `--side` x `--side` pixels, or as many tokens of text.
The trainer (FSDP2, frozen tower) takes steps over sequences of `--tokens` tokens, `--samples` of
each prompt; the first pass over an image is in each step, because its images are new. The engine
generates responses of `--response` tokens to prompts that no cache knows. Both count the tokens
that the model sees. Needs one GPU; without one a tiny model is the rehearsal.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import platform
import runpy
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image as Pillow

from benchmarks.processes import small_engine
from sluice.api import RLJobSpec
from sluice.engines.protocol import EngineError
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.launch import IMAGE_ENV, image_args
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.images.image import Image
from sluice.images.processor import ImageProcessor
from sluice.runtime.pod_env import free_port
from sluice.samples.sample import Prompt, Sample, SampleGroup, SampleStatus, WeightSpan
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.backend_registry import backend_class
from sluice_trainer.batch.images import ImageExpansion
from sluice_trainer.batch.sequences import TrainSequence

GPUS = torch.cuda.device_count()
MAKER = Path(__file__).parents[1] / "examples/vision/make_model.py"
# Text and tower of Qwen3-VL-4B. The tiny tokenizer of the example stays: only sizes matter.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {"text_config": {}, "vision_config": {}},
    "qwen3-vl-4b": {
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2560,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
            "dtype": "bfloat16",
        },
    },
}
LARGEST = 16_777_216  # pixels, as in Qwen3-VL's preprocessor_config.json
WORDS = 256  # of the tokenizer that are no special tokens
_names = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-vl-4b" if GPUS else "tiny")
    parser.add_argument("--side", type=int, default=896 if GPUS else 128)
    parser.add_argument("--tokens", type=int, default=2048 if GPUS else 96)
    parser.add_argument("--prompts", type=int, default=8 if GPUS else 2)
    parser.add_argument("--samples", type=int, default=8 if GPUS else 2)
    parser.add_argument("--response", type=int, default=256 if GPUS else 16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--parts", nargs="+", default=["trainer", "engine"])
    parser.add_argument("--json", type=Path, help="file of the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", options.shape)
        processor = ImageProcessor(model)
        of_image = processor.tokens_of(options.side, options.side)
        rows: dict[str, list[float]] = {}
        if "engine" in options.parts:
            rows |= asyncio.run(engine_rates(options, model, of_image))
            print("the engine's part is done:", rows, flush=True)
        if "trainer" in options.parts:
            rows |= trainer_rates(options, model, processor)
    machine = torch.cuda.get_device_name() if GPUS else platform.machine()
    print(
        f"{options.shape}, {machine}, torch {torch.__version__}: images of {options.side} x "
        f"{options.side} pixels, {of_image} tokens; medians of {options.rounds} rounds"
    )
    print("| | tokens/s | least | most |\n|---|---|---|---|")
    for name, rates in rows.items():
        print(
            f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f} | {max(rates):,.0f} |"
        )
    if options.json:
        result = vars(options) | {"machine": machine, "image_tokens": of_image, "rates": rows}
        options.json.write_text(json.dumps(result, default=str, indent=2) + "\n")


def make_model(directory: Path, shape: str) -> Path:
    """Write the example's tokenizer and processor, and the configuration of a shape."""
    runpy.run_path(str(MAKER))["make_model"](directory)
    changes = SHAPES[shape]
    if not changes["text_config"]:
        return directory
    for file in directory.glob("*.safetensors"):
        file.unlink()
    config = json.loads((directory / "config.json").read_text())
    for part, values in changes.items():
        config[part] |= values
    config["dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((directory / name).read_text())
        settings["size"]["longest_edge"] = LARGEST
        (directory / name).write_text(json.dumps(settings))
    return directory


def picture(side: int, seed: int) -> Image:
    """Return an image that no other seed has."""
    draws = np.random.default_rng(seed)
    coarse = draws.integers(0, 256, (8, 8, 3), np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(coarse).resize((side, side), Pillow.Resampling.BICUBIC).save(file, "PNG")
    return Image("image/png", side, side, file.getvalue())


async def engine_rates(
    options: argparse.Namespace, model: Path, of_image: int
) -> dict[str, list[float]]:
    """Return the rates of an engine, with images and without."""
    words = [
        word
        for name, value in image_args(on_cpu=not GPUS).items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    if GPUS:  # the default may need kernels that a build of SGLang lacks
        words += ["--mm-attention-backend", "triton_attn"]
    requests = options.prompts * options.samples
    room = str(2 * requests * (of_image + options.response + 64))
    port = free_port()
    os.environ |= IMAGE_ENV
    server = small_engine(
        model,
        port,
        *("--load-format", "dummy", "--max-total-tokens", room, *words),
        way=f"{PATH}/launch_server.py",
        cpu=not GPUS,
    )
    rates: dict[str, list[float]] = {"engine, images": [], "engine, text": []}
    try:
        async with Client(f"http://127.0.0.1:{port}") as client:
            await server.ready(client, 400)
            for turn in range(options.rounds + 1):
                for name, found in rates.items():
                    rate = await generate(options, client, of_image, images="images" in name)
                    if turn:  # the first one warms up
                        found.append(rate)
    except (EngineError, OSError) as error:
        message = f"error: {error}; the engine's last words:\n{server.last_words()}"
        raise SystemExit(message) from error
    finally:
        server.terminate()
        server.wait(60)
    return rates


async def generate(
    options: argparse.Namespace, client: Client, of_image: int, *, images: bool
) -> float:
    """Return the tokens a second, of prompts and responses, of one round."""
    draws = np.random.default_rng()
    sampling = {"max_new_tokens": options.response, "ignore_eos": True, "temperature": 1.0}
    asked: list[tuple[list[int], list[Image]]] = []
    for _ in range(options.prompts):
        opening = draws.integers(0, WORDS, 16).tolist()
        if images:
            seed = int(draws.integers(2**31))
            prompt = ([*opening, 259, 262, 260], [picture(options.side, seed)])
        else:
            prompt = (opening + draws.integers(0, WORDS, of_image + 2).tolist(), [])
        asked += [prompt] * options.samples
    started = time.perf_counter()
    await asyncio.gather(
        *(
            client.generate(f"vision-{next(_names)}", tokens, sampling, images=given)
            for tokens, given in asked
        )
    )
    seconds = time.perf_counter() - started
    return len(asked) * (18 + of_image + options.response) / seconds


def trainer_rates(
    options: argparse.Namespace, model: Path, processor: ImageProcessor
) -> dict[str, list[float]]:
    """Return the rates of a trainer's steps, with images and without."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if GPUS:
        torch.cuda.set_device(0)
    job = spec(options, model)
    policy = backend_class(job)(
        job, model_dir=model, timeout=timedelta(seconds=300), total_steps=1000
    )
    rates: dict[str, list[float]] = {"trainer, images": [], "trainer, text": []}
    steps = itertools.count()
    for turn in range(options.rounds + 2):
        for name, found in rates.items():
            groups, images = make_groups(options, processor, next(steps), images="images" in name)
            expansion = ImageExpansion(processor, partial(fetch, images))
            wait()
            started = time.perf_counter()
            shard = sequences(expansion.expand(groups))
            responses = sum(sequence.response_length for sequence in shard)
            totals = BatchTotals(len(shard), responses, options.tokens)
            policy.train([shard], [totals])
            wait()
            seconds = time.perf_counter() - started
            if turn > 1:  # the first ones compile kernels
                found.append(sum(len(sequence.tokens) for sequence in shard) / seconds)
    dist.destroy_process_group()
    return rates


def fetch(images: Mapping[str, Image], digests: Sequence[str]) -> list[Image]:
    return [images[digest] for digest in digests]


def spec(options: argparse.Namespace, model: Path) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "model": {"path": str(model), "init": "random"},
            "data": {"prompts": [{"path": "none.jsonl"}], "images": {}},
            "reward": {"type": "random"},
            "rollout": {"batchSize": options.prompts, "gpusPerReplica": min(GPUS, 1)},
            "trainer": {
                "backend": "fsdp",
                "gpusPerNode": min(GPUS, 1),
                "steps": 1000,
                "maxTokensPerGpu": max(4 * options.tokens, 512),
            },
        }
    )


def make_groups(
    options: argparse.Namespace, processor: ImageProcessor, step: int, *, images: bool
) -> tuple[list[SampleGroup], dict[str, Image]]:
    """Return groups whose expanded sequences have `--tokens` tokens, and their images by digest."""
    draws = np.random.default_rng(step)
    added = processor.tokens_of(options.side, options.side) - 1
    groups, files = [], {}
    for number in range(options.prompts):
        digests: list[str] = []
        prompt = draws.integers(0, WORDS, 16).tolist()
        if images:
            image = picture(options.side, 1000 * step + number)
            files[image.digest] = image
            digests, prompt = [image.digest], [*prompt, 259, processor.placeholder, 260]
        else:
            prompt += draws.integers(0, WORDS, added + 3).tolist()
        response = options.tokens - len(prompt) - (added if images else 0)
        samples = [
            sample(index, prompt, draws.integers(0, WORDS, response).tolist(), digests, added)
            for index in range(options.samples)
        ]
        groups.append(SampleGroup(Prompt(number, "", images=digests), samples))
    return groups, files


def sample(
    index: int, prompt: list[int], answer: list[int], digests: list[str], added: int
) -> Sample:
    size = len(answer)
    return Sample(
        index=index,
        tokens=np.array(prompt + answer, np.int32),
        response_length=size,
        loss_mask=np.ones(size, np.uint8),
        rollout_log_probs=np.full(size, -5.0, np.float32),
        weight_versions=[WeightSpan(0, 0, size)],
        reward=float(index % 2),
        status=SampleStatus.COMPLETED,
        images=list(digests),
        image_tokens=added if digests else 0,
    )


def sequences(groups: Sequence[SampleGroup]) -> list[TrainSequence]:
    return [
        sequence
        for group in groups
        for one in group.samples
        for sequence in TrainSequence.from_sample(group.group_id, one, (one.reward or 0.0) - 0.5)
    ]


def wait() -> None:
    if GPUS:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
