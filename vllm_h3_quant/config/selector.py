"""Selectors of layers and steps: ``"0-3,46-49"``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

EXAMPLE = "0-3,46-49"
LARGEST = 9999
"""Above any layer or step, so that a mistyped range stays small."""


def canonical(value: object) -> str:
    """A selector in one spelling: ascending, without overlaps, neighbours joined, ``""`` for none.

    Args:
        value: text of indices and ranges between commas, both ends of a range included; a list, tuple or
            set of indices; or None.

    Raises:
        ValueError: something else, or a token that is no index or no ascending range.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return _spell(index for token in value.split(",") if token.strip() for index in _range(token.strip()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return _spell(_index(item) for item in value)
    raise ValueError(f"expected indices and ranges such as {EXAMPLE!r}, or a list of indices")


def indices(selector: str) -> frozenset[int]:
    """The indices of a canonical selector."""
    return frozenset(index for token in selector.split(",") if token for index in _range(token))


def _range(token: str) -> range:
    first, dash, last = (part.strip() for part in token.partition("-"))
    ends = [first, last] if dash else [first, first]
    if not all(end.isdecimal() for end in ends):
        raise ValueError(f"{token!r} is no index or range, write for example {EXAMPLE!r}")
    start, stop = (_index(int(end)) for end in ends)
    if start > stop:
        raise ValueError(f"the range {token!r} does not ascend, write '{stop}-{start}', for example {EXAMPLE!r}")
    return range(start, stop + 1)


def _index(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError(f"{value!r} is no index from 0 to {LARGEST}, write for example {EXAMPLE!r}")
    return value


def _spell(selected: Iterable[int]) -> str:
    ascending = sorted(set(selected))
    # Neighbours share the difference of index and position.
    runs = [[index for _, index in run] for _, run in groupby(enumerate(ascending), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
