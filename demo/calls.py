"""How a client of the closed loop makes its calls: each way as bytes in, bytes out."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import grpc

from nobackfill.wire.connection import call_until_success, open_channel

Call = Callable[[bytes], Awaitable[bytes]]
# Before an address: requests are bodies to POST, `method` the path.
HTTP = "http://"
# Before a socket's path, `?` and its hnsw.ef_search: requests are messages to the statement of this
# name, `method` is its SQL.
POSTGRESQL, STATEMENT = "postgresql://", b"asked\0"
TIMEOUT = 60
_OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


async def _grpc_call(stack: AsyncExitStack, address: str, method: str) -> Call:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
    call: Any = channel.unary_unary(method)
    return lambda request: call(request, timeout=TIMEOUT)


async def _several_call(stack: AsyncExitStack, addresses: str, method: str) -> Call:
    """In a thread, for the client of several gateways waits in its own."""
    channel = stack.enter_context(open_channel(addresses))
    thread = stack.enter_context(ThreadPoolExecutor(1))
    ask: Any = channel.unary_unary(method)

    def once(request: bytes) -> bytes:
        answer: bytes = call_until_success(
            lambda t: ask(request, timeout=t),
            addresses,
            seconds=TIMEOUT,
            gateway_count=addresses.count(",") + 1,
        )
        return answer

    loop = asyncio.get_running_loop()
    return lambda request: loop.run_in_executor(thread, once, request)


async def _http_call(stack: AsyncExitStack, address: str, path: str) -> Call:
    """One kept-alive connection, and no more of HTTP than it takes."""
    host, port = address.removeprefix(HTTP).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stack.callback(writer.close)
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"

    async def call(request: bytes) -> bytes:
        writer.write(f"{head}content-length: {len(request)}\r\n\r\n".encode() + request)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length:")[2].partition("\r\n")[0])
        body = await reader.readexactly(length)
        if not answer.startswith("http/1.1 200"):
            raise RuntimeError(f"{answer}{body!r}")
        return body

    return call


async def _postgresql_call(stack: AsyncExitStack, address: str, sql: str) -> Call:
    """One connection of its own protocol, with one prepared statement."""
    path, _, ef = address.removeprefix(POSTGRESQL).partition("?")
    reader, writer = await asyncio.open_unix_connection(path)
    stack.callback(writer.close)
    options = f"-c hnsw.ef_search={ef}".encode()
    named = (b"user", b"postgres", b"database", b"postgres", b"options", options, b"")
    start = struct.pack(">i", 196_608) + b"\0".join(named) + b"\0"
    prepare = STATEMENT + sql.encode() + b"\0\0\0"

    async def call(request: bytes) -> bytes:
        writer.write(request)
        answer = await reader.readuntil(b"Z\0\0\0\5I")
        if answer.startswith(b"E"):
            raise RuntimeError(f"PostgreSQL: {answer!r}")
        return answer

    await call(struct.pack(">i", 4 + len(start)) + start)
    await call(b"P" + struct.pack(">i", 4 + len(prepare)) + prepare + b"S\0\0\0\4")
    return call


def make_connector(address: str) -> Callable[[AsyncExitStack, str, str], Awaitable[Call]]:
    """What makes a client's way to an address: its connection goes with the stack."""
    ways = {HTTP: _http_call, POSTGRESQL: _postgresql_call}
    otherwise = _several_call if "," in address else _grpc_call
    return ways.get(f"{address.partition('://')[0]}://", otherwise)
