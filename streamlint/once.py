"""What is made once, by whichever thread asks first; others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, Generic, TypeVar, cast, overload

_T = TypeVar("_T")
_Self = TypeVar("_Self")


class once(Generic[_T]):
    """A property that is computed when first asked for and then kept.

    `functools.cached_property` lets several threads compute it from Python 3.12 on.
    Each value has a lock of its own: what it is computed from may be one too, in a
    circle never.
    """

    def __init__(self, make: Callable[[Any], _T]) -> None:
        """Wrap the method that computes the value."""
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[_T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...

    def __get__(self, instance: object | None, owner: type) -> once[_T] | _T:
        if instance is None:
            return self
        kept = instance.__dict__  # where the next one finds the value, not this
        lock = f"{self._name} is being made"
        with kept.setdefault(lock, RLock()):
            if self._name not in kept:
                kept[self._name] = self._make(instance)
        kept.pop(lock, None)
        return cast(_T, kept[self._name])


class Kept:
    """Values by key, each made when first asked for; see `once`."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._values: dict[object, object] = {}
        self._locks: dict[object, Any] = {}

    def get(self, key: object, make: Callable[[], _T]) -> _T:
        """The value of ``key``, made by ``make`` if there is none yet."""
        if key not in self._values:
            with self._locks.setdefault(key, RLock()):
                if key not in self._values:
                    self._values[key] = make()
        return cast(_T, self._values[key])

    def put(self, key: object, value: object) -> None:
        """Replace the value of ``key``."""
        self._values[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def items(self) -> list[tuple[Any, Any]]:
        """All keys with their values."""
        return [*self._values.items()]

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
