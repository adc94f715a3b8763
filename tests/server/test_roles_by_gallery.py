"""Roles for some galleries: each call of the contract is about one, or is known not to be."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from nobackfill.errors import ConfigurationError, NotPermittedError
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc.context import RULES, UNBOUND, Principal, Role, Tokens, check_gallery
from nobackfill.v1 import gallery_pb2
from tests.server.support import Client, images, refused, running
from tests.server.test_rules import FILES, METHODS

MINE = Principal("app", Role.WRITER, frozenset({"mine", "other"}))
REQUESTS: dict[str, type[Message]] = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
BOUND = [
    method
    for method in METHODS
    if method not in UNBOUND and {Role.READER, Role.WRITER} & (RULES[method] or frozenset())
]


@pytest.mark.parametrize("method", BOUND)
def test_a_call_names_its_gallery(method: str) -> None:
    request = REQUESTS[method]
    field = "gallery" if "gallery" in request.DESCRIPTOR.fields_by_name else "name"
    check_gallery(method, MINE, request(**{field: "mine"}))
    check_gallery(method, Principal("app", Role.WRITER), request(**{field: "theirs"}))
    for name in ("theirs", "mine\n", "min", "MINE"):
        with pytest.raises(NotPermittedError):
            check_gallery(method, MINE, request(**{field: name}))


def test_what_names_no_gallery_is_refused_but_for_what_is_known() -> None:
    assert len(BOUND) >= 8
    assert set(METHODS) >= UNBOUND
    for method in set(METHODS) - set(BOUND):
        fields = REQUESTS[method].DESCRIPTOR.fields_by_name
        if method in UNBOUND or "gallery" in fields or "name" in fields:
            continue
        with pytest.raises(NotPermittedError):
            check_gallery(method, MINE, REQUESTS[method]())


@pytest.mark.parametrize("role", ["writer:", "reader:a,", "admin:photos", "device:a", "reader:A b"])
def test_a_role_that_cannot_be(tmp_path: Path, role: str) -> None:
    (tmp_path / "tokens").write_text(f"n {role} {'0' * 64}\n")
    with pytest.raises(ConfigurationError, match="line 1"):
        Tokens(tmp_path / "tokens")


@pytest.fixture(scope="module")
def gateway(
    stages: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayServer]:
    folder = tmp_path_factory.mktemp("bound")
    roles = {"app": "writer:mine", "look": "reader:mine,theirs", "boss": "admin"}
    lines = [f"{n} {role} {hashlib.sha256(n.encode()).hexdigest()}" for n, role in roles.items()]
    (folder / "tokens").write_text("\n".join(lines))
    with running(stages[1], folder / "data", tokens_file=folder / "tokens") as gateway:
        yield gateway


def test_over_the_wire(gateway: GatewayServer) -> None:
    boss, app, look = (Client(gateway.address, name) for name in ("boss", "app", "look"))
    for name in ("theirs", "nobodys"):
        boss.create_gallery(name)
    boss.put_images(images(2), "theirs")
    app.create_gallery("mine")
    app.put_images(images(2), "mine")
    assert app.find(images(2)[1], "mine").hits[0].id == "i1"
    assert look.find(images(2)[1], "theirs").hits[0].id == "i1"
    seen = [[g.name for g in client.list_galleries()] for client in (boss, app, look)]
    assert seen == [["mine", "nobodys", "theirs"], ["mine"], ["mine", "theirs"]]
    told = set()
    for name in ("theirs", "no"):
        with refused(NotPermittedError) as caught:
            app.find(images(1)[0], name)
        told.add(str(caught.value))
    assert len(told) == 1
    with refused(NotPermittedError):
        app.put_images(images(1), "theirs")
    with refused(NotPermittedError):
        app.create_gallery("new")
    with refused(NotPermittedError):
        app.delete_gallery("theirs")
    with refused(NotPermittedError):
        look.put_images(images(1), "mine")
    # The second message of a stream is looked at like the first.
    item = gallery_pb2.PutItem(id="x")
    messages = [
        gallery_pb2.PutItemsRequest(gallery="mine"),
        gallery_pb2.PutItemsRequest(gallery="theirs", items=[item]),
    ]
    with refused(NotPermittedError):
        list(app.raw.galleries.PutItems(iter(messages)))
    assert boss.get_gallery("theirs").items == 2
