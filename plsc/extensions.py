"""Registries by name, which other packages extend through entry points; docs/extending.md has one of each kind.

A registry holds what plsc brings. The installed packages are asked when a name is not among these, or when an error
lists the names, so that no command pays for extensions that it does not use.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from plsc.errors import UsageError, first_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint  # imported where packages are asked: it takes 70 ms

T = TypeVar("T")


class Registry(dict[str, T]):
    """What plsc brings by name; ``registry[name]`` also finds what an installed package adds, and keeps it.

    Iteration and ``in`` see what plsc brings and what was found already; :meth:`every_name` asks all packages.

    Args:
        group: of entry points, "plsc.margins"; its last word names the kind in errors.
        ours: what plsc brings.
        accepts: whether an object that an entry point names is of the kind.
        expected: what it has to be, in words.
    """

    def __init__(self, group: str, ours: Mapping[str, T], accepts: Callable[[Any], bool], expected: str) -> None:
        super().__init__(ours)
        self.group, self._accepts, self._expected = group, accepts, expected

    def __missing__(self, name: str) -> T:
        """Load the extension ``name``; KeyError where no package has it, UsageError where its package is broken."""
        points = _points(self.group).get(name, ())
        if not points:
            raise KeyError(name)
        if len(points) > 1:
            packages = " and ".join(sorted(_package(point) for point in points))
            raise UsageError(f"{self.group}: {name} comes from {packages}; uninstall all but one of them")
        self[name] = found = self._loaded(points[0])
        return found

    def find(self, name: str) -> T | None:
        """Return what has this name, None where nothing has it; UsageError as of :meth:`__missing__`."""
        try:
            return self[name]
        except KeyError:
            return None

    def every_name(self) -> tuple[str, ...]:
        """The names that plsc brings, then those of extensions; none of these is loaded."""
        return tuple(dict.fromkeys([*self, *sorted(_points(self.group))]))

    def with_name(self, name: str) -> "Registry[T | str]":
        """Return names to choose from: these, and one more, which stands for nothing of the kind itself."""
        return Registry(self.group, {**self, name: name}, self._accepts, self._expected)

    def _loaded(self, point: "EntryPoint") -> T:
        where = f"{self.group}: {point.name} of the package {_package(point)}"
        try:
            found: T = point.load()
        except Exception as error:  # whatever a stranger's module does when it is imported
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UsageError(f"{where} cannot be loaded ({reason}); mend it, or uninstall it") from None
        if not self._accepts(found):
            raise UsageError(f"{where} is {found!r}, and has to be {self._expected}; mend it, or uninstall it")
        return found


def is_subclass(base: type) -> Callable[[Any], bool]:
    """Return a test for classes that are derived from ``base``."""
    return lambda found: isinstance(found, type) and issubclass(found, base)


@functools.cache
def _points(group: str) -> "Mapping[str, tuple[EntryPoint, ...]]":
    """The entry points of a group by their names. A package that is found twice, on two paths, counts once."""
    from importlib.metadata import entry_points

    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, {}).setdefault(_package(point), point)
    return {name: tuple(points.values()) for name, points in found.items()}


def _package(point: "EntryPoint") -> str:
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"
