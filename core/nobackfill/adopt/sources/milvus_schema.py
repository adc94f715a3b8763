"""What a collection of Milvus is made of, to make another like it."""

from collections.abc import Mapping
from typing import Any

from nobackfill.adopt.sources.milvus_place import asked

_KEPT = (
    "is_primary", "is_partition_key", "nullable", "default_value", "element_type", "max_capacity",
)  # fmt: skip
# Of an index, what Milvus tells beside its kind.
_PARAMS = ("M", "efConstruction", "nlist", "nbits", "m")


def schema_of(client: Any, fields: Mapping[str, Mapping[str, Any]], dims: Mapping[str, int]) -> Any:
    """Fields as they are, with other `dims` of some. Who puts an item gives its key; fields that no
    schema names are allowed: what carrying notes in an item need not be known."""
    made = client.create_schema(auto_id=False, enable_dynamic_field=True)
    for name, one in fields.items():
        params = dict(one.get("params") or {})
        if name in dims:
            params["dim"] = dims[name]
        kept = {what: one[what] for what in _KEPT if one.get(what)}
        made.add_field(name, one["type"], **(kept | params))
    return made


def make_partition(client: Any, collection: str, name: str) -> None:
    """It may be there."""
    if not asked(collection, lambda: client.has_partition(collection, name)):
        asked(collection, lambda: client.create_partition(collection, name))


def indexes_of(client: Any, collection: str) -> Any:
    """Those of all fields, to be made again."""
    made = client.prepare_index_params()
    for one in _indexes(client, collection):
        params = dict(one.get("params") or {})
        params |= {what: one[what] for what in _PARAMS if what in one}
        made.add_index(
            one["field_name"], index_type=one.get("index_type") or "AUTOINDEX",
            metric_type=one.get("metric_type") or "", params=params,
        )  # fmt: skip
    return made


def index_of(client: Any, collection: str, field: str) -> Mapping[str, Any]:
    """What is said of a field's index; nothing where there is none."""
    found = _indexes(client, collection)
    return next((one for one in found if one.get("field_name") == field), {})


def _indexes(client: Any, collection: str) -> list[dict[str, Any]]:
    names = asked(collection, lambda: client.list_indexes(collection))
    found = [
        asked(collection, lambda name=name: client.describe_index(collection, name))  # type: ignore[misc]
        for name in names
    ]
    return [dict(one) for one in found if one]
