"""Images in a request to SGLang are written part by part, and read as one JSON object."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sluice.engines.protocol import PromptRefusedError
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.image_requests import data_url, with_images
from sluice.engines.vllm.client import Client as VllmClient
from sluice.images.image import Image

SMALL = Image("image/png", 2, 1, b"small")
LARGE = Image("image/jpeg", 20, 10, bytes(range(256)) * 5_000)
BODY = {"rid": "a", "input_ids": [1, 2], "sampling_params": {"stop": ["]"]}}
ANSWER = {
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 7, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
    }
}


@pytest.mark.parametrize("images", [[SMALL], [LARGE], [LARGE, SMALL, LARGE]], ids=len)
async def test_the_parts_of_a_body_are_one_object(images: list[Image]) -> None:
    parts = [part async for part in with_images(BODY, images)]
    assert max(map(len, parts)) < 300_000
    assert json.loads(b"".join(parts)) == BODY | {"image_data": [*map(data_url, images)]}


def test_a_data_url_has_the_files_bytes() -> None:
    head, _, text = data_url(LARGE).partition(",")
    assert head == "data:image/jpeg;base64"
    assert base64.b64decode(text) == LARGE.data


async def test_a_request_is_sent_again_whole_if_its_connection_ends() -> None:
    requests: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        requests.append(json.loads(await request.read()))
        if len(requests) == 1:
            assert request.transport
            request.transport.close()
        return web.json_response(ANSWER)

    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/generate", generate)
    async with TestServer(application) as server, Client(str(server.make_url(""))) as client:
        sampling = {"max_new_tokens": 1}
        answer = await client.generate("a", [1, 2], sampling, images=[LARGE, SMALL])
    assert answer.tokens == [7]
    urls = [data_url(LARGE), data_url(SMALL)]
    assert [request["image_data"] for request in requests] == [urls, urls]


async def test_another_engine_refuses_images() -> None:
    async with VllmClient("http://127.0.0.1:1") as client:
        with pytest.raises(PromptRefusedError, match="takes no images"):
            await client.generate("a", [1], {}, images=[SMALL])
