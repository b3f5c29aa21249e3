"""A GGUF file becomes a checkpoint with the same weights, tokens and template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.main import app
from sluice_trainer.model.gguf_checkpoint import gguf_to_hf
from tests.chat import PLAIN, tokenizer

LAYERS, HEADS, KV_HEADS, HIDDEN = 2, 4, 2, 32
BEGIN, END = "<|im_start|>", "<|im_end|>"
Write = Callable[..., LlamaForCausalLM]


def vocabulary() -> list[str]:
    tokens = tokenizer(PLAIN).get_vocab()
    return [*sorted(tokens, key=lambda token: tokens[token]), "ab", "cd"]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys in llama.cpp's order, which turns neighbours together."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, -1)


def write_gguf(path: Path, *, tied: bool = False, half: bool = False) -> LlamaForCausalLM:
    """Write a tiny Llama with random weights as llama.cpp's converter does."""
    words = vocabulary()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in (BEGIN, END) else 1 for word in words])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(words.index(BEGIN))
    writer.add_eos_token_id(words.index(END))
    writer.add_chat_template(PLAIN)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, HEADS if "q_proj" in name else KV_HEADS)
        values = values.astype(np.float16) if half and values.ndim > 1 else values
        renamed = names.get_name(name, try_suffixes=(".weight",))
        assert renamed is not None
        writer.add_tensor(renamed, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(
    ("tied", "half", "tolerance"),
    [(False, False, 0.0), (True, False, 0.0), (False, True, 0.02)],
    ids=["fp32", "tied", "fp16"],
)
def test_the_checkpoint_computes_what_the_file_does(
    tmp_path: Path, tied: bool, half: bool, tolerance: float
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", tied=tied, half=half)
    gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert read.dtype == (torch.bfloat16 if half else torch.float32)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        difference = (read(tokens).logits.float() - model(tokens).logits).abs().max()
    assert difference <= tolerance
    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1


def test_tokens_template_and_end_token_come_from_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    read = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (read.bos_token, read.eos_token, read.chat_template) == (BEGIN, END, PLAIN)
    text = f"ab , cd .{END}"
    assert read.decode(read.encode(text, add_special_tokens=False)) == text
    assert read.convert_tokens_to_ids(vocabulary()) == list(range(len(vocabulary())))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        pytest.param(lambda _: None, "no such file; expected a model that ends with", id="missing"),
        pytest.param(
            lambda file: file.write_bytes(b"GGUF" * 9), "transformers cannot read it", id="broken"
        ),
    ],
)
def test_an_unreadable_gguf_is_a_one_line_error(
    tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    harm(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigurationError, match=message):
        gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_directory_with_only_a_gguf_is_one_error_with_a_remedy(
    tmp_path: Path, written_task: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    words = ["validate", str(written_task / "job.yaml"), "--set", "model.init=pretrained", "--set"]
    for path in (tmp_path, tmp_path / "tiny.gguf"):
        result = CliRunner().invoke(app, [*words, f"model.path={path}"])
        assert result.exit_code == 2, result.output
        assert result.output.splitlines() == [
            f"error: spec.model.path: {path} holds the model as GGUF, which cannot be trained; "
            f"make a Hugging Face checkpoint of it (sluice convert gguf-to-hf {tmp_path}/tiny.gguf "
            "DIRECTORY), and name that directory"
        ]


def test_the_command_writes_a_checkpoint_that_is_valid(tmp_path: Path, written_task: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    source, target = tmp_path / "tiny.gguf", tmp_path / "hf"
    converted = CliRunner().invoke(app, ["convert", "gguf-to-hf", str(source), str(target)])
    assert converted.exit_code == 0, converted.output
    job = str(written_task / "job.yaml")
    changes = ["--set", "model.init=pretrained", "--set", f"model.path={target}"]
    result = CliRunner().invoke(app, ["validate", job, *changes])
    assert result.exit_code == 0, result.output
