"""Pictures of every odd kind as queries: answered, or INVALID_ARGUMENT, and the gateway goes on."""

from nobackfill.errors import InvalidInputError
from tests.server.support import Client, ids, images
from tests.support.odd_pictures import ODD


def test_each_is_answered_or_refused(shared: Client, gallery: str) -> None:
    shared.put_images(images(3), gallery)
    answered = 0
    for name, data in ODD.items():
        try:
            answered += len(shared.search(gallery, image=data, k=3).hits) == 3
        except InvalidInputError as error:
            assert str(error), name
    assert 8 < answered < len(ODD) - 8
    assert ids(shared.find(images(3)[1], gallery))[0] == "i1"
