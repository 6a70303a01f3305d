"""TOML tables into attrs classes, strictly: every key is used or refused, nothing is converted.

cattrs does the walking, because it already visits every field and collects the errors of all of
them; what is replaced here are its leaves, which by default would turn "8k" into an error that
nobody understands and `true` into 1. A field's range stands in its type (`Annotated[int,
Bounds(at_least=1)]`), so wrong types and wrong ranges anywhere in a file are listed in one go, each
with the full name of its key. The other direction, a value as TOML text, is in `toml_text.py`.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
from cattrs import ClassValidationError, Converter, override
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from engine.errors import ScheduleError
from engine.toml_text import shown, toml_value

T = TypeVar("T")

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@attrs.frozen(kw_only=True)
class Bounds:
    """The range of a number; stands in a field's type through `Annotated`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None

    def admit(self, value: float) -> bool:
        """Whether the number lies inside."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and (self.multiple_of is None or value % self.multiple_of == 0)
        )

    def __str__(self) -> str:
        words = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
        limits = {**words, "multiple_of": "a multiple of"}
        set_limits = attrs.asdict(self, filter=lambda _, value: value is not None)
        return " and ".join(f"{limits[name]} {limit}" for name, limit in set_limits.items())


class _Refused(Exception):
    """What is wrong with one value: texts that continue the name of its key."""

    def __init__(self, *continuations: str) -> None:
        super().__init__(*continuations)
        self.continuations = continuations


class _RefusedItems(Exception):
    """What is wrong with items of a list: (index, error) pairs."""

    def __init__(self, *items: tuple[int, Exception]) -> None:
        super().__init__(*items)
        self.items = items


def read_table(values: Mapping[str, Any], cls: type[T]) -> T:
    """Structure a table.

    Args:
        values: what tomllib returned.
        cls: an attrs class; its fields are numbers, strings, truth values, `Literal`s, tuples,
            attrs classes, unions of these, and numbers with `Bounds`. A field with the metadata
            `rest` takes every key that the class does not have, as it stands.

    Raises:
        ScheduleError: every unknown key, missing key, wrong type and wrong range, one a line.
    """
    try:
        return _converter().structure(dict(values), cls)
    except (ClassValidationError, _Refused, _RefusedItems) as error:
        raise ScheduleError("\n".join(_problems(error, "", key_names(cls)))) from None


def key_names(cls: type, prefix: str = "") -> list[str]:
    """Full names of every key that a class knows, tables included: `train`, `train.lr`, …"""
    names = []
    for field in attrs.fields(cls):
        if field.metadata.get("hidden") or field.metadata.get("rest"):
            continue
        names.append(prefix + field.name)
        for member in (field.type, *get_args(field.type)):  # inside unions and tuples as well
            if isinstance(member, type) and attrs.has(member):
                names += key_names(member, f"{prefix}{field.name}.")
    return names


def unknown_key(name: str, known: Sequence[str]) -> str:
    """The message for a key that nobody reads, with the nearest one that somebody does."""
    table, _, key = name.rpartition(".")
    plain = re.sub(r"\[\d+\]", "", table)  # stage[1] has the keys of stage
    own = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == plain]
    siblings = {other: f"{table}.{other}" if table else other for other in own}
    elsewhere = {other.rpartition(".")[2]: other for other in known}
    for candidates, cutoff in ((siblings, 0.6), (elsewhere, 0.8)):
        if nearest := difflib.get_close_matches(key, candidates, n=1, cutoff=cutoff):
            return f"{name}: unknown key; did you mean {candidates[nearest[0]]}?"
    return f"{name}: unknown key; known here are {', '.join(siblings) or 'no keys at all'}"


def _problems(error: BaseException, where: str, known: Sequence[str]) -> Iterator[str]:
    if isinstance(error, _Refused):
        yield from (where + continuation for continuation in error.continuations)
    elif isinstance(error, _RefusedItems):
        for index, problem in error.items:
            yield from _problems(problem, f"{where}[{index}]", known)
    elif isinstance(error, ClassValidationError):
        prefix = f"{where}." if where else ""
        with_field, about_the_table = error.group_exceptions()
        for problem, note in with_field:
            name = prefix + note.name
            if isinstance(problem, KeyError):
                yield f"{name}: missing; it has no default, so the schedule must give it"
            else:
                yield from _problems(problem, name, known)
        for problem in about_the_table:
            if not isinstance(problem, ForbiddenExtraKeysError):
                raise problem
            yield from (unknown_key(prefix + key, known) for key in sorted(problem.extra_fields))
    else:
        raise error


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _leaf_hook(kind))
    converter.register_structure_hook_factory(attrs.has, lambda cls: _table_hook(cls, converter))
    converter.register_structure_hook_factory(_is_literal, _literal_hook)
    converter.register_structure_hook_factory(_is_tuple, lambda hint: _tuple_hook(hint, converter))
    converter.register_structure_hook_factory(_is_union, lambda hint: _union_hook(hint, converter))
    converter.register_structure_hook_factory(_is_annotated, lambda hint: _bounds_hook(hint, converter))
    return converter


Hook = Callable[[Any, Any], Any]


def _leaf_hook(kind: type) -> Hook:
    def structure(value: Any, _: Any) -> Any:
        if not _fits(value, kind):
            raise _Refused(f" = {shown(value)}: expected {_KINDS[kind]}")
        if kind is float and not _is_finite(value):
            raise _Refused(f" = {shown(value)}: expected a finite number")
        return kind(value)

    return structure


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _table_hook(cls: type, converter: Converter) -> Hook:
    hidden: dict[str, Any] = {
        field.name: override(omit=True)
        for field in attrs.fields(cls)
        if field.metadata.get("hidden") or field.metadata.get("rest")
    }
    inner: Hook = make_dict_structure_fn(cls, converter, **hidden)
    names = {field.name for field in attrs.fields(cls)}
    rest = next((field.name for field in attrs.fields(cls) if field.metadata.get("rest")), None)

    def structure(value: Any, hint: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Refused(f" = {shown(value)}: expected a table")
        if rest is None:
            return inner(value, hint)
        table = inner({key: item for key, item in value.items() if key in names - {rest}}, hint)
        others = {key: item for key, item in value.items() if key not in names - {rest}}
        return attrs.evolve(table, **{rest: others})

    return structure


def _literal_hook(hint: Any) -> Hook:
    choices = get_args(hint)

    def structure(value: Any, _: Any) -> Any:
        if value in choices and isinstance(value, str):
            return value
        nearest = difflib.get_close_matches(str(value), choices, n=1)
        advice = f"; did you mean {toml_value(nearest[0])}?" if nearest else ""
        raise _Refused(f" = {shown(value)}: expected {_expected(hint)}{advice}")

    return structure


def _tuple_hook(hint: Any, converter: Converter) -> Hook:
    items = get_args(hint)
    open_ended = items[-1] is Ellipsis

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _Refused(f" = {shown(value)}: expected a list")
        if not open_ended and len(value) != len(items):
            raise _Refused(f" = {shown(value)}: expected a list of {len(items)} values, found {len(value)}")
        structured: list[Any] = []
        refused: list[tuple[int, Exception]] = []
        for index, item in enumerate(value):
            try:
                structured.append(converter.structure(item, items[0 if open_ended else index]))
            except (ClassValidationError, _Refused, _RefusedItems) as error:
                refused.append((index, error))
        if refused:
            raise _RefusedItems(*refused)
        return tuple(structured)

    return structure


def _union_hook(hint: Any, converter: Converter) -> Hook:
    members = [member for member in get_args(hint) if member is not NoneType]

    def structure(value: Any, _: Any) -> Any:
        if value is None and NoneType in get_args(hint):
            return None
        for member in members:
            # A single member is asked even if the value cannot fit: its own message says more.
            if len(members) == 1 or _fits(value, member):
                return converter.structure(value, member)
        raise _Refused(f" = {shown(value)}: expected {' or '.join(_expected(m) for m in members)}")

    return structure


def _bounds_hook(hint: Any, converter: Converter) -> Hook:
    kind, *bounds = get_args(hint)

    def structure(value: Any, _: Any) -> Any:
        number = converter.structure(value, kind)
        if not all(bound.admit(number) for bound in bounds):
            raise _Refused(f" = {shown(value)}: expected {_expected(hint)}")
        return number

    return structure


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value is of a type's kind, whatever its range."""
    if _is_annotated(hint):
        return _fits(value, get_args(hint)[0])
    if isinstance(value, bool):
        return hint is bool
    if isinstance(value, str):
        return hint is str or _is_literal(hint) and value in get_args(hint)
    if isinstance(value, Mapping):
        return attrs.has(hint)
    if isinstance(value, list):
        return _is_tuple(hint)
    return isinstance(value, int) and hint in (int, float) or isinstance(value, float) and hint is float


def _expected(hint: Any) -> str:
    if _is_annotated(hint):
        kind, *bounds = get_args(hint)
        return f"{_KINDS[kind]}, {' and '.join(str(bound) for bound in bounds)}"
    if _is_literal(hint):
        return " or ".join(toml_value(choice) for choice in get_args(hint))
    if _is_tuple(hint):
        return "a list"
    return _KINDS.get(hint, "a table")


def _is_annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def _is_literal(hint: Any) -> bool:
    return get_origin(hint) is Literal


def _is_tuple(hint: Any) -> bool:
    return get_origin(hint) is tuple


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)
