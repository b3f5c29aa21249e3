"""`sluice convert`: checkpoints of training, and other formats, from and to Hugging Face's.

The work needs torch and Megatron, which the command line does without: the trainer's package does
it, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sluice_cli.exits import Exit

app = typer.Typer(
    help="Checkpoints of training, and GGUF, from and to Hugging Face's format.",
    no_args_is_help=True,
)


def _run(direction: str, *paths: Path, needs: Sequence[str] = ("torch", "megatron")) -> None:
    if any(importlib.util.find_spec(package) is None for package in needs):
        typer.echo(
            f"error: sluice convert {direction} needs the packages {', '.join(needs)}: install "
            "sluice's extra `trainer`",
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
        typer.Argument(
            help="Directory of checkpoints; iter_0000000 is written there.", show_default=False
        ),
    ],
) -> None:
    """Write a Hugging Face checkpoint as one of Megatron's (torch_dist). Memory: one parameter at a
    time.
    """
    _run("hf-to-dist", source, target)


@app.command()
def dist_to_hf(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, or a directory of them (the newest).", show_default=False
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
    """Write a checkpoint of either backend as a Hugging Face checkpoint. Memory: with megatron one
    layer and one file (5 GB) at a time, with fsdp the model.
    """
    _run("dist-to-hf", checkpoint, like, target)


@app.command()
def gguf_to_hf(
    source: Annotated[Path, typer.Argument(help="A model's .gguf file.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="New directory to write.", show_default=False)],
) -> None:
    """Write a GGUF model (llama.cpp's format) as a Hugging Face checkpoint that can be trained, by
    transformers' reader. Memory: the model in bf16.
    """
    _run("gguf-to-hf", source, target, needs=("torch", "transformers"))
