"""`meta` of many records as one Arrow column, MAP<STRING, STRING>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

META: Final = pa.map_(pa.string(), pa.string())
_encode = msgspec.json.Encoder().encode


def meta_array(count: int, numbers: npt.NDArray[np.int64], metas: Sequence[Mapping[str, Any]]) -> pa.Array:
    """A column of `count`, null but for `metas` at the ascending `numbers`. A value that is no string becomes JSON:
    an exactly_once router writes an object (api §6).
    """
    if not len(numbers):
        return pa.nulls(count, META)
    sizes = np.zeros(count, np.int64)
    sizes[numbers] = np.fromiter(map(len, metas), np.int64, len(metas))
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    missing = np.ones(count + 1, np.bool_)
    missing[numbers] = False
    missing[-1] = False
    values = list(chain.from_iterable(meta.values() for meta in metas))
    try:
        texts = pa.array(values, pa.string())
    except pa.ArrowTypeError:
        texts = pa.array(
            [value if isinstance(value, str) else _encode(value).decode() for value in values], pa.string()
        )
    names = pa.array(list(chain.from_iterable(metas)), pa.string())
    return pa.MapArray.from_arrays(pa.array(offsets, mask=missing), names, texts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode()
