"""docs/frameworks.md: its blocks as they stand, against a gateway that embeds texts."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nobackfill.adopt.sources.opening import open_searchable
from nobackfill.wire import Gateway
from tests.serve.shop import MADE, dual, files
from tests.support.documents import blocks, page

FIRST, LANGCHAIN, DUAL, LLAMA_INDEX, HAYSTACK = (
    content for _, content in blocks(page("docs/frameworks.md"), "python")
)


@pytest.fixture
def names(reader: Gateway) -> Iterator[dict[str, Any]]:
    """The names that the page's first block defines."""
    found: dict[str, Any] = {"reader": reader}
    run(FIRST, found)
    yield found
    found["gateway"].delete_gallery("notes")
    found["gateway"].close()


def run(block: str, names: dict[str, Any]) -> None:
    exec(block.replace("127.0.0.1:50051", names["reader"].address), names)


def test_langchain(names: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("langchain_core", reason="langchain-core is not installed")
    run(LANGCHAIN, names)
    assert names["found"][0].page_content in ("The ferry leaves at nine", "Bread needs a night")
    assert [one.id for one in names["documents"]] == ["2"]
    np.save(files(tmp_path) / "store" / "body.npy", np.array(["a text"] * len(MADE.old)))
    source = open_searchable(str(tmp_path / "store"))
    with closing(dual(tmp_path, source, None)) as search:
        old, new = (
            SimpleNamespace(embed_query=lambda query, of=of: of[0].tolist())
            for of in (MADE.queries_old, MADE.queries_new)
        )
        run(DUAL, names | {"dual": search, "source": source, "old_model": old, "new_model": new})


@pytest.mark.scale
def test_llama_index(names: dict[str, Any]) -> None:
    pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")
    run(LLAMA_INDEX, names)
    assert [one.node.node_id for one in names["nodes"]] == ["3"]


@pytest.mark.scale
def test_haystack(names: dict[str, Any]) -> None:
    pytest.importorskip("haystack", reason="haystack-ai is not installed")
    run(HAYSTACK, names)
    (document,) = names["answer"]["retriever"]["documents"]
    assert (document.content, document.meta) == ("Salt the water", {"year": 2026})
