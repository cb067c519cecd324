"""Values that several threads ask for are made once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from streamlint.once import Kept, once

_T = TypeVar("_T")


class Slow:
    """Counts how often its values are made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    @once
    def inner(self) -> object:
        """Takes a while."""
        time.sleep(0.05)
        self.made.append("inner")
        return object()

    @once
    def outer(self) -> tuple[object]:
        """Needs the other one."""
        self.made.append("outer")
        return (self.inner,)

    @once
    def broken(self) -> object:
        """Can't be made the first time."""
        self.made.append("broken")
        if len(self.made) == 1:
            raise ValueError("not yet")
        return 7


def asked_by_eight(ask: Callable[[], _T]) -> list[_T]:
    with ThreadPoolExecutor(8) as pool:
        return [one.result() for one in [pool.submit(ask) for _ in range(8)]]


def test_a_property_is_made_once_and_is_the_same_for_all() -> None:
    slow = Slow()
    outer = asked_by_eight(lambda: slow.outer)
    inner = asked_by_eight(lambda: slow.inner)
    assert len({id(value) for value in outer}) == 1
    assert {id(value) for value in inner} == {id(outer[0][0])}
    assert sorted(slow.made) == ["inner", "outer"]
    assert vars(slow).keys() == {"made", "inner", "outer"}


def test_each_object_has_its_own_value() -> None:
    assert Slow().inner is not Slow().inner
    assert Slow.inner.__doc__ == "Takes a while."


def test_what_failed_is_tried_again() -> None:
    slow = Slow()
    with pytest.raises(ValueError, match="not yet"):
        _ = slow.broken
    assert slow.broken == 7


def test_values_by_key_are_made_once() -> None:
    kept, made = Kept(), []

    def make() -> object:
        time.sleep(0.05)
        made.append(1)
        return object()

    values = asked_by_eight(lambda: kept.get("a", make))
    assert len({id(value) for value in values}) == len(made) == 1
    kept.put("b", 3)
    assert kept.get("b", lambda: 4) == 3
    assert kept.items() == [("a", values[0]), ("b", 3)]
    kept.clear()
    assert kept.get("b", lambda: 4) == 4
