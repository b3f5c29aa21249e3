"""`sluice convert`: convert checkpoints from and to the Hugging Face format.

The conversion needs torch and Megatron, which the command line does not import. It runs in the
trainer's package, in a separate process.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sluice_cli.exits import Exit

app = typer.Typer(
    help="Convert training checkpoints and GGUF from and to the Hugging Face format.",
    no_args_is_help=True,
)


def _run(direction: str, *paths: Path | str, needs: Sequence[str] = ("torch", "megatron")) -> None:
    if any(importlib.util.find_spec(package) is None for package in needs):
        typer.echo(
            f"error: sluice convert {direction} needs {' and '.join(needs)}: install sluice's "
            "extra `trainer`",
            err=True,
        )
        raise typer.Exit(Exit.INVALID)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "sluice_trainer.convert",
        direction,
        *map(str, paths),
    ]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise typer.Exit(code)


@app.command()
def hf_to_dist(
    source: Annotated[Path, typer.Argument(help="Hugging Face checkpoint.", show_default=False)],
    target: Annotated[
        Path,
        typer.Argument(help="Directory in which iter_0000000 is written.", show_default=False),
    ],
) -> None:
    """Convert a Hugging Face checkpoint to Megatron's torch_dist format.

    Only one parameter at a time is in memory.
    """
    _run("hf-to-dist", source, target)


@app.command()
def dist_to_hf(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, or a directory of checkpoints: the newest. Or its URI in an "
            "object store.",
            show_default=False,
        ),
    ],
    target: Annotated[Path, typer.Argument(help="Directory to write.", show_default=False)],
    like: Annotated[
        Path,
        typer.Option(
            help="Hugging Face directory with the model's config and tokenizer.", show_default=False
        ),
    ],
) -> None:
    """Convert a training checkpoint to the Hugging Face format.

    Memory: one layer and one file (5 GB) for a checkpoint of megatron, the whole model for fsdp.
    """
    _run("dist-to-hf", checkpoint, like, target)


@app.command()
def merge_adapter(
    adapter: Annotated[
        str,
        typer.Argument(
            help="A PEFT adapter, or a checkpoint of trainer.lora, or its URI in an object store.",
            show_default=False,
        ),
    ],
    target: Annotated[Path, typer.Argument(help="Directory to write.", show_default=False)],
    like: Annotated[
        Path,
        typer.Option(help="Hugging Face checkpoint of the base model.", show_default=False),
    ],
) -> None:
    """Add an adapter to its base model, and write a Hugging Face checkpoint."""
    _run("merge-adapter", adapter, like, target, needs=("torch", "peft"))


@app.command()
def extract_adapter(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A checkpoint of trainer.lora, or a directory of them (the newest). Or its URI "
            "in an object store.",
            show_default=False,
        ),
    ],
    target: Annotated[Path, typer.Argument(help="Directory to write.", show_default=False)],
) -> None:
    """Copy the PEFT adapter out of a checkpoint, without the optimizer."""
    _run("extract-adapter", checkpoint, target, needs=("torch", "peft"))


@app.command()
def gguf_to_hf(
    source: Annotated[Path, typer.Argument(help="The model's .gguf file.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="New directory to write.", show_default=False)],
) -> None:
    """Convert a GGUF model (llama.cpp) to a Hugging Face checkpoint that can be trained.

    Transformers reads the file. Memory: the whole model in bf16.
    """
    _run("gguf-to-hf", source, target, needs=("torch", "transformers"))


@app.command()
def dequantize(
    source: Annotated[
        Path, typer.Argument(help="Quantized Hugging Face checkpoint.", show_default=False)
    ],
    target: Annotated[Path, typer.Argument(help="New directory to write.", show_default=False)],
) -> None:
    """Convert a quantized Hugging Face checkpoint to bf16, which can be trained.

    FP8 in blocks (DeepSeek, Qwen), MXFP4 (gpt-oss), and INT4, INT8 and FP8 of
    compressed-tensors (Kimi). Memory: one tensor and one file (5 GB).
    """
    _run("dequantize", source, target, needs=("torch",))


class QuantizedForm(StrEnum):
    """A form of quantized weights."""

    FP8_BLOCK = "fp8-block"
    FP8 = "fp8"
    INT8 = "int8"


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Hugging Face checkpoint.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="New directory to write.", show_default=False)],
    to: Annotated[
        QuantizedForm,
        typer.Option(
            help="fp8-block: E4M3 with a scale for each block of 128 x 128, as DeepSeek-V3. "
            "fp8, int8: a scale for each row, as compressed-tensors.",
            show_default=False,
        ),
    ],
) -> None:
    """Quantize the matrices of a checkpoint's layers, for engines of your own.

    Embedding, output layer, norms, routers and towers stay as they are. This is for serving a
    trained model: jobs train bf16, and rollout.precision quantizes what their engines get. Memory:
    one tensor and one file (5 GB).
    """
    _run(to.value, source, target, needs=("torch",))
