"""A tiny Qwen3-shaped model directory: configuration and a character tokenizer, no weights (the job draws them)."""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

ALPHABET = "0123456789 +=<>,abcdefghijklmnopqrstuvwxyz"


def main(directory: Path) -> None:
    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: number for number, token in enumerate([*special, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(directory)
    Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    ).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
