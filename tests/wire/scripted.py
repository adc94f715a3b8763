"""A gateway's SearchService that answers as a test says."""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc

from nobackfill.v1 import search_pb2, search_pb2_grpc

Behaviour = Callable[[int, grpc.ServicerContext], None]


class Scripted(search_pb2_grpc.SearchServiceServicer):
    """Answers Search after `behave(call number, context)`, which may abort or dawdle."""

    def __init__(self) -> None:
        self.calls = 0
        self.behave: Behaviour = lambda call, context: None

    def Search(  # noqa: N802
        self, request: search_pb2.SearchRequest, context: grpc.ServicerContext
    ) -> search_pb2.SearchResponse:
        self.calls += 1
        self.behave(self.calls, context)
        return search_pb2.SearchResponse(release=7)

    def SearchBatch(  # noqa: N802
        self, request: search_pb2.SearchBatchRequest, context: grpc.ServicerContext
    ) -> search_pb2.SearchBatchResponse:
        return search_pb2.SearchBatchResponse()

    def Feedback(  # noqa: N802
        self, request: search_pb2.FeedbackRequest, context: grpc.ServicerContext
    ) -> search_pb2.FeedbackResponse:
        return search_pb2.FeedbackResponse()


@contextmanager
def serving() -> Iterator[tuple[Scripted, str]]:
    """The service, and the address where it answers."""
    scripted = Scripted()
    running = grpc.server(futures.ThreadPoolExecutor(8))
    search_pb2_grpc.add_SearchServiceServicer_to_server(scripted, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    try:
        yield scripted, f"127.0.0.1:{port}"
    finally:
        running.stop(None).wait()
