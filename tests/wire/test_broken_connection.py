"""A gateway that is killed while it answers."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from nobackfill.errors import UnavailableError
from nobackfill.wire import connection

SERVER = """
import time
from concurrent.futures import ThreadPoolExecutor
import grpc

def answers(request, context):
    yield b"one"
    time.sleep(60)

server = grpc.server(ThreadPoolExecutor(1))
handler = grpc.unary_stream_rpc_method_handler(answers)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", {"C": handler}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
server.wait_for_termination()
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def test_a_killed_gateway_is_told_in_a_sentence(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = server
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_stream("/a.B/C")
        stream = call(b"", timeout=30)
        assert next(stream) == b"one"
        process.kill()
        with (
            pytest.raises(UnavailableError, match="connection broke before the answer"),
            connection.translate_errors(address),
        ):
            next(stream)
