"""Compilations of an FSDP2 trainer of a model with sliding windows, step by step on one GPU.

    python tests/gpu/recompilations.py         a model of Gemma 3's 270M shape, random weights
    python tests/gpu/recompilations.py --cpu   the rehearsal, without compilation

Rows grow from step to step, past the window, as a run's responses do. The exit code is 1 if a step
after the second one compiles anything.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

# Tokens of each step's longest sequence; the window is 512.
LONGEST = (60, 130, 260, 400, 520, 700, 1100, 2000)
# Steps that may compile: the first one, and the one whose rows first hold several sequences.
WARM_UP = 2
GEMMA_270M: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "layer_types": [
        "full_attention" if number % 6 == 5 else "sliding_attention" for number in range(18)
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0"}
    os.environ.update(variables, WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from sluice_trainer.distributed.process_group import join
    from sluice_trainer.fsdp.policy import ShardedPolicy
    from tests.integration.trainer import tiny

    join(timedelta(seconds=120))
    cuda = torch.cuda.is_available()
    small = {
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "layer_types": GEMMA_270M["layer_types"][4:6],
    }
    changes = GEMMA_270M | ({} if cuda else small)
    with tempfile.TemporaryDirectory() as name:
        directory = tiny.save_kind("Gemma3Text", changes, Path(name) / "model")
        spec = tiny.spec(
            directory,
            trainer={"backend": "fsdp", "gpusPerNode": int(cuda), "maxTokensPerGpu": 4096}
            | ({"precision": "bf16"} if cuda else {}),
        )
        policy = ShardedPolicy(spec, model_dir=directory, timeout=timedelta(seconds=300))
        late = 0
        print("step | longest | seconds | compiled in all")
        for step, longest in enumerate(LONGEST, start=1):
            before = counters["stats"]["unique_graphs"]
            batch = tiny.batch(16, seed=step, longest=longest)
            started = time.perf_counter()
            policy.log_probs(batch)
            policy.train([batch], [tiny.totals(batch)])
            seconds = time.perf_counter() - started
            compiled = counters["stats"]["unique_graphs"]
            late += compiled - before if step > WARM_UP else 0
            print(f"{step:4} | {longest:7} | {seconds:7.2f} | {compiled:3}", flush=True)
    torch.distributed.destroy_process_group()
    print(f"{late} compilations after step {WARM_UP}" + (": FAILED" if late else ""))
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
