"""`python -m sluice.engines.transformers.server --model-path DIRECTORY --port PORT`.

One thread speaks HTTP, one computes tokens, and calls of a weight update run in a third.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import torch
from aiohttp import web

from sluice.engines.transformers.server.batch import Batch
from sluice.engines.transformers.server.calls import Server
from sluice.engines.transformers.server.model import ModelOptions, ServedModel
from sluice.runtime import pid1


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model with transformers.")
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--draw-weights", action="store_true", help="a trainer sends them")
    parser.add_argument("--fp32-lm-head", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args()
    pid1.run_under_init()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = ServedModel(
        ModelOptions(
            options.model_path,
            options.device,
            getattr(torch, options.dtype),
            options.draw_weights,
            options.fp32_lm_head,
            options.trust_remote_code,
        )
    )
    server = Server(model, Batch(model, options.max_running_requests))
    with contextlib.suppress(KeyboardInterrupt):
        web.run_app(
            server.application(),
            host=options.host,
            port=options.port,
            print=None,
            access_log=None,
            shutdown_timeout=1.0,
        )


if __name__ == "__main__":
    main()
