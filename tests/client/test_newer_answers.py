"""Answers of a newer service: they may have fields that this client does not know (api §0.2)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect as types

from topics.api import answers, segment_answers
from topics.client import calls, shift, walks


def structs() -> Iterator[type[msgspec.Struct]]:
    """All that the client decodes: answers, errors, and frames of event streams."""
    for module in (answers, segment_answers, shift, walks):
        for _, found in inspect.getmembers(module, inspect.isclass):
            if issubclass(found, msgspec.Struct) and found.__module__ == module.__name__:
                yield found


def value_of(kind: types.Type) -> Any:
    """Return a value of this type whose objects all have a field that is not in it."""
    match kind:
        case types.Metadata():
            return value_of(kind.type)
        case types.StructType():
            known = {field.encode_name: value_of(field.type) for field in kind.fields}
            return known | ({} if kind.tag is None else {kind.tag_field: kind.tag}) | {"newer": {"of": [1]}}
        case types.UnionType():
            return value_of(next(one for one in kind.types if not isinstance(one, types.NoneType)))
        case types.ListType() | types.VarTupleType() | types.SetType():
            return [value_of(kind.item_type)]
        case types.TupleType():
            return [value_of(item) for item in kind.item_types]
        case types.DictType():
            return {"key": value_of(kind.value_type)}
        case types.LiteralType():
            return kind.values[0]
        case types.BoolType():
            return True
        case types.IntType() | types.FloatType():
            return 1
        case types.StrType():
            return "text"
    return None  # Any, Raw


@pytest.mark.parametrize("struct", list(structs()), ids=lambda struct: struct.__name__)
def test_an_answer_may_have_more(struct: type[msgspec.Struct]) -> None:
    value = value_of(types.type_info(struct))
    assert value["newer"]
    assert isinstance(calls._decoder(struct)(msgspec.json.encode(value)), struct)
