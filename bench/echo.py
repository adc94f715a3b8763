"""A bare gRPC server that answers every call with the same bytes: what a search cannot be faster
than. `python bench/echo.py aio|sync ANSWER_BYTES` prints its port and serves until killed.
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

METHOD = "/bench.Echo/Call"
_THREADS = 8


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, behavior: Any) -> None:
        self._handler: Any = grpc.unary_unary_rpc_method_handler(behavior)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler


async def _aio(answer: bytes) -> None:
    async def call(request: bytes, context: Any) -> bytes:
        return answer

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(call),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def _sync(answer: bytes) -> None:
    def call(request: bytes, context: grpc.ServicerContext) -> bytes:
        return answer

    server = grpc.server(ThreadPoolExecutor(_THREADS))
    server.add_generic_rpc_handlers((_Handler(call),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    payload = bytes(int(sys.argv[2]))
    if sys.argv[1] == "aio":
        asyncio.run(_aio(payload))
    else:
        _sync(payload)
