"""Transformers' FlashAttention 2 is chosen only if exactly that package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHOICE = """
import torch
torch.cuda.is_available = lambda: True
from transformers import Qwen3Config, Qwen3ForCausalLM
from sluice_trainer.fsdp import attention
attention.DEVICE = torch.device("cuda")
print(attention.attention(Qwen3ForCausalLM, Qwen3Config(), torch.bfloat16))
"""


@pytest.mark.parametrize(
    ("package", "release", "chosen"),
    [("flash-attn", "2.8.3", "flash_attention_2"), ("flash-attn-4", "4.0.0b36", "sluice_packed")],
)
def test_flash_attention_4_is_not_mistaken_for_flash_attention_2(
    tmp_path: Path, package: str, release: str, chosen: str
) -> None:
    """FlashAttention 4 is imported as flash_attn.cute."""
    code = tmp_path / "flash_attn/cute/__init__.py"
    about = tmp_path / f"{package.replace('-', '_')}-{release}.dist-info"
    code.parent.mkdir(parents=True)
    about.mkdir()
    code.write_text("")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    (about / "RECORD").write_text("flash_attn/cute/__init__.py,,\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run(
        [sys.executable, "-c", CHOICE], env=variables, capture_output=True, text=True, timeout=120
    )
    assert process.stdout.strip() == chosen, process.stderr[-2000:]
