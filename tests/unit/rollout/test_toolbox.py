"""Tools that ask servers and documents: real servers of this machine, and their errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from sluice.data.chat import render
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.toolbox import Http, Python, Retriever, Search, Tool
from sluice_rollout.toolbox.base import is_tool
from sluice_rollout.toolbox.search import Index, documents
from sluice_rollout.tools import ToolLoop, ToolUnavailableError
from tests import chat
from tests.unit.rollout.scripted_engine import PARAMS, Script, scripted_runner
from tests.vision_models import picture

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TEXTS = [
    "Lighthouse\nThe lighthouse of Amber stands on a red rock.",
    "Bridge\nThe bridge of Basalt has seven arches, and a red lamp on each.",
    "Mill\nThe mill of Cobalt turns at night.",
]


@contextlib.asynccontextmanager
async def served(**handlers: Handler) -> AsyncIterator[str]:
    """A server of these pages; its address."""
    app = web.Application()
    for name, handler in handlers.items():
        app.router.add_route("*", f"/{name}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def says(text: str, status: int = 200, **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status, headers=headers)

    return handler


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("lighthouse", [0]),
        ("RED rock?", [0, 1]),
        ("the mill of cobalt", [2, 0, 1]),
        ("elephant", []),
        ("", []),
    ],
    ids=["a word", "the rarer word first", "a word of all", "an unknown word", "no word"],
)
def test_the_best_documents(query: str, best: list[int]) -> None:
    assert Index(TEXTS).best(query, 3) == best


def test_scores_are_those_of_the_formula() -> None:
    """Two documents of 1 and 3 words: idf ln(1 + 0.5 / 2.5), mean length 2."""
    index = Index(["a", "a b b"])
    numbers, weights = index._postings["a"]
    idf = 0.1823215567939546
    expected = [idf * 2.5 / (1 + 1.5 * (0.25 + 0.75 * n / 2)) for n in (1, 3)]
    assert numbers.tolist() == [0, 1]
    assert weights.tolist() == pytest.approx(expected)


def test_a_corpus_of_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("".join(json.dumps({"id": "0", "contents": t}) + "\n" for t in TEXTS[:2]))
    second.write_text(json.dumps({"title": "Mill", "text": "It turns at night."}) + "\n\n")
    tool = Search([first, second], top_k=1)
    assert tool.session()(query="night") == "Doc 1 (Title: Mill) It turns at night."
    assert tool.session()(query="zebra") == "no document has these words"
    second.write_text('{"contents": "x"}\n{"name": "y"}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:2: expected an object with `contents`"):
        documents([second])


async def test_a_retriever_of_search_r1() -> None:
    requests = []

    async def retrieve(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        requests.append(body)
        best = [{"document": {"contents": text}, "score": 1.0} for text in TEXTS[:2]]
        return web.json_response({"result": [best]})

    async with served(retrieve=retrieve) as host:
        text = await Retriever(f"http://{host}/retrieve", top_k=2).session()(query="red")
    assert requests == [{"queries": ["red"], "topk": 2, "return_scores": True}]
    assert text.startswith("Doc 1 (Title: Lighthouse) The lighthouse of Amber")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (says("no", 500), "ClientResponseError"),
        (says('{"result": []}'), "expected search-R1's answer: IndexError"),
        (says("nothing"), "expected search-R1's answer"),
    ],
    ids=["an error", "another form", "no JSON"],
)
async def test_a_retriever_that_fails_fails_the_sample(handler: Handler, message: str) -> None:
    async with served(retrieve=handler) as host:
        with pytest.raises(ToolUnavailableError, match=message):
            await Retriever(f"http://{host}/retrieve").search("red")


async def test_a_page_of_an_allowed_host() -> None:
    async with served(page=says("a page"), missing=says("none", 404)) as host:
        fetch = Http([host]).session()
        assert await fetch(url=f"http://{host}/page") == "a page"
        assert await fetch(url=f"http://{host}/missing") == "error: HTTP 404: none"
        assert "left out" in await Http([host], longest=4).fetch(f"http://{host}/page")
        assert await Http([host], most_bytes=2).fetch(f"http://{host}/page") == "a "


@pytest.mark.parametrize(
    "url",
    [
        "http://{other}/page", "http://{host}@{other}/page", "ftp://{host}/page",
        "http://{host}.example/page", "file:///etc/passwd", "http://localhost:1/page",
        "http://{host}/moved", "{host}", "", "http://[x",
    ],
    ids=[
        "another host", "a name before it", "another scheme", "a longer name", "a file", "no name",
        "by a redirect", "no scheme", "nothing", "no address",
    ],
)  # fmt: skip
async def test_other_hosts_are_refused(url: str) -> None:
    requests: list[str] = []

    async def secret(request: web.Request) -> web.StreamResponse:
        requests.append(request.path)
        return web.Response(text="secret")

    async with served(page=secret) as other:
        moved = says("", 302, Location=f"http://{other}/page")
        async with served(page=says("a page"), moved=moved) as host:
            text = await Http([host]).fetch(url.format(host=host, other=other))
    assert str(text).startswith("error: ")
    assert not requests


async def test_an_image_is_fetched_as_its_file() -> None:
    file = picture(8, 8).data

    async def image(request: web.Request) -> web.StreamResponse:
        return web.Response(body=file)

    async with served(cat=image) as host:
        assert await Http([host]).fetch(f"http://{host}/cat") == file
        small = Http([host], most_bytes=len(file) - 1)
        refusal = await small.fetch(f"http://{host}/cat")
    assert refusal == f"error: an image of more than {len(file) - 1} bytes"


async def test_redirects_end() -> None:
    async with served(round=says("", 302, Location="/round")) as host:
        assert "more than 3 redirects" in await Http([host]).fetch(f"http://{host}/round")


async def test_a_page_that_hangs() -> None:
    async def hangs(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    async with served(page=hangs) as host:
        text = await Http([host], seconds=0.05).fetch(f"http://{host}/page")
    assert text == "error: no answer after 0.05 s"


@pytest.mark.parametrize(
    "tool", [Search("x"), Retriever("http://x"), Http(["x"])], ids=["search", "retriever", "http"]
)
def test_a_definition_is_shown_by_a_chat_template(tool: Tool) -> None:
    function = tool.definition["function"]
    assert (tool.definition["type"], function["name"]) == ("function", tool.name)
    assert function["parameters"]["required"] == list(function["parameters"]["properties"])
    assert is_tool(tool)
    assert not is_tool(render)


def ids(text: str) -> list[int]:
    return [int(i) for i in chat.tokenizer().encode(text, add_special_tokens=False)]


async def run(loop: ToolLoop, *turns: str) -> Sample:
    runner = scripted_runner(loop, Script(*map(ids, turns)))
    runner.tokenizer = chat.tokenizer()
    runner.generator.decode = runner.tokenizer.decode
    return await runner(Prompt(0, "?"), [1], Sample(0), PARAMS | {"max_new_tokens": 900})


async def test_a_loop_with_a_ready_made_tool(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"contents": TEXTS[0]}))
    call = '<tool_call>{"name": "search", "arguments": {"query": "amber"}}</tool_call>'
    sample = await run(ToolLoop([Search(tmp_path / "c.jsonl")]), call, "red")
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, "")
    text = chat.tokenizer().decode(sample.tokens[sample.prompt_length :].tolist())
    assert "The lighthouse of Amber stands" in text
    assert sample.trainable_tokens == len(ids(call)) + len(ids("red"))


async def test_calls_of_an_episode_are_limited() -> None:
    calls: list[int] = []

    def add(a: int) -> int:
        calls.append(a)
        return a

    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    sample = await run(ToolLoop([add], max_calls=2), call * 2, call, "never")
    assert (sample.status, calls) == (SampleStatus.COMPLETED, [1, 1])
    assert sample.metadata["tool_calls"] == 3


def test_a_python_that_is_not_used_starts_nothing() -> None:
    tool = Python(sandboxes=2)
    tool.session()
    tool.close()
