"""Calls that overtake requests at a real engine."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import ExitStack

from sluice.engines.sglang.client import Client
from tests.integration.engines import Sglang, until

REQUESTS = 256
PROBE = "GET /model_info"


def message(line: str, body: str = "") -> bytes:
    head = f"{line} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def test_a_call_that_comes_last_is_answered_before_most_of_many_requests(sglang: Sglang) -> None:
    """The engine, which knows all connections, is held until all calls have come. Its log has a
    line for each answer, in their order.
    """
    refused = {"input_ids": [5], "sampling_params": {"temperature": -1.0, "max_new_tokens": 1}}
    request = message(f"POST {Client.generate_path}", json.dumps(refused))

    def answers(number: int, since: int) -> list[str]:
        """The log's lines of answers, once there are so many."""
        lines = sglang.log.read_text()[since:].splitlines()
        answer_lines = [line for line in lines if PROBE in line or Client.generate_path in line]
        return answer_lines if len(answer_lines) >= number else []

    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", sglang.port), 30))
            for _ in range(REQUESTS + 1)
        ]
        start = len(sglang.log.read_text())
        for connection in connections:
            connection.sendall(message(PROBE))
        until(lambda: answers(REQUESTS + 1, start), 30.0, f"{REQUESTS + 1} answers to {PROBE}")
        start = len(sglang.log.read_text())
        os.kill(sglang.process.pid, signal.SIGSTOP)
        try:
            for connection in connections[:-1]:
                connection.sendall(request)
            connections[-1].sendall(message(PROBE))
        finally:
            os.kill(sglang.process.pid, signal.SIGCONT)
        answer_lines = until(
            lambda: answers(REQUESTS + 1, start), 60.0, f"{REQUESTS + 1} more answers"
        )
    place = next(number for number, line in enumerate(answer_lines) if PROBE in line)
    assert place < REQUESTS // 2
