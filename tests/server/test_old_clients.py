"""A client made from the contract as it was first (contracts/first.binpb: types and search): what
was added since must not be in its way, and no number may mean something else."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from nobackfill.gallery.filters import All, AnyOf, Exists, Not, OneOf
from nobackfill.release.manifest import Manifest
from nobackfill.v1 import gallery_pb2, search_pb2
from nobackfill.v1.types_pb2 import Value
from nobackfill.wire.values import OLD_GATEWAY_KEY, filter_message
from tests.server.support import TIMEOUT_S, Client, embedding, images
from tests.support.blocks import png

FIRST = Path(__file__).parent / "contracts" / "first.binpb"
COUNT = 8


@pytest.fixture(scope="module")
def files() -> descriptor_pb2.FileDescriptorSet:
    return descriptor_pb2.FileDescriptorSet.FromString(FIRST.read_bytes())


@pytest.fixture(scope="module")
def old(files: descriptor_pb2.FileDescriptorSet) -> dict[str, Any]:
    """The first contract's messages by name."""
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{file.package}.{message.name}")
        )
        for file in files.file
        for message in file.message_type
    }


@pytest.fixture(scope="module")
def filled(shared: Client) -> str:
    """Items with what old clients know, and with what came later."""
    shared.create_gallery("old-clients")
    items = []
    for i, image in enumerate(images(COUNT)):
        item = gallery_pb2.PutItem(id=f"i{i}", image=png(image), metadata={"n": Value(number=i)})
        item.metadata["exact"].integer = i
        item.metadata["tags"].texts.texts.append("all")
        items.append(item)
    assert not shared.put_items("old-clients", items)
    return "old-clients"


def ask(client: Client, old: dict[str, Any], name: str, request: Any) -> Any:
    call = client.raw.channel.unary_unary(
        f"/nobackfill.v1.SearchService/{name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=old[f"{name}Response"].FromString,
    )
    return call(request, timeout=TIMEOUT_S)


def test_an_old_client_searches(
    shared: Client, filled: str, old: dict[str, Any], one: Manifest
) -> None:
    by = old["Embedding"](**{f.name: v for f, v in embedding(one, images(COUNT)[3]).ListFields()})
    asked = old["Query"](embeddings=old["Embeddings"](embeddings=[by]))
    request = old["SearchRequest"](gallery=filled, query=asked, k=COUNT)
    answer = ask(shared, old, "Search", request)
    assert answer.hits[0].id == "i3" and len(answer.hits) == COUNT
    assert (answer.release, answer.space, answer.hits[0].origin) == (1, one.space, 1)
    assert answer.hits[0].metadata["n"].number == 3
    # Kinds that it does not know are there, and nothing that it could take for another value.
    assert answer.hits[0].metadata["exact"].WhichOneof("kind") is None
    condition = request.filter.conditions.add(key="n")
    condition.range.at_least, condition.range.less_than = 2, 5
    assert {hit.id for hit in ask(shared, old, "Search", request).hits} == {"i2", "i3", "i4"}


def test_in_a_batch_an_old_client_sees_a_refused_query_without_hits(
    shared: Client, filled: str, old: dict[str, Any]
) -> None:
    """Before `SearchResponse.error`, one bad query refused them all."""
    queries = [old["Query"](image=image) for image in (png(images(COUNT)[5]), b"no image")]
    request = old["SearchBatchRequest"](gallery=filled, queries=queries, k=2)
    good, bad = ask(shared, old, "SearchBatch", request).responses
    assert good.hits[0].id == "i5" and good.release == 1
    assert (len(bad.hits), bad.release, bad.space) == (0, 0, "")
    # What it sends on, a newer one reads.
    again = search_pb2.SearchResponse.FromString(bad.SerializeToString())
    assert "image" in again.error


def test_no_field_was_renumbered(files: descriptor_pb2.FileDescriptorSet) -> None:
    today = descriptor_pool.Default()
    for file in files.file:
        for message in file.message_type:
            now = today.FindMessageTypeByName(f"{file.package}.{message.name}")
            for field in message.field:
                found = now.fields_by_number[field.number]
                assert (found.name, found.type) == (field.name, field.type), message.name


def test_an_old_gateway_refuses_what_it_does_not_know(old: dict[str, Any]) -> None:
    """It answered an expression as if there were no filter. A condition without a test is refused
    by every gateway."""
    asked = filter_message(Not(OneOf("year", (2026,))))
    read = old["Filter"].FromString(asked.SerializeToString())
    assert [one.WhichOneof("test") for one in read.conditions] == [None]
    assert "update it" in read.conditions[0].key
    # And what every gateway knows is asked as ever.
    plain = old["Filter"].FromString(filter_message({"year": 2026}).SerializeToString())
    assert [one.WhichOneof("test") for one in plain.conditions] == ["equals"]


def test_a_gateway_between_lets_all_pass_by_what_tells_it(shared: Client, filled: str) -> None:
    """One that knows expressions, and takes that mark for a condition."""
    marked = Not(Exists(OLD_GATEWAY_KEY))
    assert shared.count(filled, where=marked) == shared.count(filled) == COUNT
    none = All((marked, AnyOf(())))
    assert shared.count(filled, where=none) == 0
