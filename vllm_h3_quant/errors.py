"""The one error type of the package, and the search for the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class H3QuantError(Exception):
    """A request that cannot be served as given. The message is one line and says what to do.

    No ValueError: the engine's pydantic models would wrap that in several lines of their own.
    """


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to ``name`` by :mod:`difflib` ratio, or None when nothing is close."""
    options = {option.lower(): option for option in valid}
    found = difflib.get_close_matches(name.lower(), options, n=1, cutoff=0.6)
    return options[found[0]] if found else None


def unknown(what: str, name: object, valid: Iterable[str], *, where: str) -> H3QuantError:
    """An error for ``name`` that is not among ``valid``: the value, the nearest one, all of them.

    Args:
        what: the kind of thing, such as ``"component"``.
        name: the value that was given.
        valid: what would have been accepted.
        where: where the value was given, such as ``"quantization config"``.
    """
    names = list(valid)
    close = nearest(str(name), names)
    hint = f"; did you mean {close!r}?" if close else ";"
    return H3QuantError(f"{where}: unknown {what} {name!r}{hint} valid: {', '.join(names)}")
