"""Several clients that call Search all the time and note every answer, run as a process of its own:

`python -m demo.load ADDRESS GALLERY QUERIES CLIENTS`. Prints "ready" when every client has had an
answer, goes on until its standard input ends, then prints one line of JSON an answer, as Answer.
"""

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from demo.gateway import DEADLINE, images_in
from nobackfill.v1 import search_pb2, search_pb2_grpc
from nobackfill.wire.channel import open_channel

HITS = 10


@dataclass(frozen=True)
class Answer:
    """One call of Search."""

    start: float  # time.monotonic(), which all processes of a machine share
    seconds: float
    status: str  # "OK", a gRPC status code's name, or what was wrong with the answer
    release: int  # that answered; 0 where none did


def judge(response: search_pb2.SearchResponse) -> str:
    """What is wrong with an answer, or "OK": hits there must be, nearest first, each once."""
    if not response.hits:
        return "EMPTY"
    distances = [hit.distance for hit in response.hits]
    if distances != sorted(distances):
        return "UNSORTED"
    if len({hit.id for hit in response.hits}) < len(response.hits):
        return "DOUBLE"
    return "OK"


class Client:
    """One app with a connection of its own, asking one image after the other until told to stop."""

    def __init__(self, address: str, gallery: str, images: Sequence[bytes], first: int) -> None:
        self._address = address
        self._gallery = gallery
        self._images = images
        self._next = first
        self.answers: list[Answer] = []
        self.answered = threading.Event()

    def run(self, stop: threading.Event) -> None:
        with open_channel(self._address) as channel:
            search = search_pb2_grpc.SearchServiceStub(channel)
            while not stop.is_set():
                self.answers.append(self._ask(search))
                self.answered.set()

    def _ask(self, search: search_pb2_grpc.SearchServiceStub) -> Answer:
        image = self._images[self._next % len(self._images)]
        self._next += 1
        query = search_pb2.Query(image=image)
        request = search_pb2.SearchRequest(gallery=self._gallery, query=query, k=HITS)
        start = time.monotonic()
        release = 0
        try:
            response = search.Search(request, timeout=DEADLINE)
            status, release = judge(response), response.release
        except grpc.RpcError as error:
            status = error.code().name if isinstance(error, grpc.Call) else "NO_CALL"
        return Answer(start, time.monotonic() - start, status, release)


def main(address: str, gallery: str, queries: Path, clients: int) -> None:
    images = [path.read_bytes() for path in images_in(queries).values()]
    apps = [Client(address, gallery, images, 7 * number) for number in range(clients)]
    stop = threading.Event()
    threads = [threading.Thread(target=app.run, args=[stop], daemon=True) for app in apps]
    for thread in threads:
        thread.start()
    for app in apps:
        app.answered.wait()
    print("ready", flush=True)
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    for answer in sorted((a for app in apps for a in app.answers), key=lambda a: a.start):
        print(json.dumps(dataclasses.asdict(answer)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
