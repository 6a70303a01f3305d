"""Values and tables as TOML text, and single keys set from the command line.

The standard library reads TOML and does not write it; what a schedule needs of the other direction
fits here. `--set` takes the same notation for values, so both stand in one file.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from engine.errors import ScheduleError


def toml_value(value: object) -> str:
    """A string, number, truth value or list of them as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def shown(value: object) -> str:
    """`toml_value`, cut to a length that fits into an error message."""
    text = toml_value(value)
    return text if len(text) <= 80 else text[:77] + "..."


def toml_text(tables: Mapping[str, Any]) -> str:
    """A TOML file of plain values, tables and lists of tables; None stands for a key left out."""
    plain = {key: value for key, value in tables.items() if not _is_table(value) and not _are_tables(value)}
    lines = _toml_lines(plain)
    for name, value in tables.items():
        if _is_table(value):
            lines += ["", f"[{name}]", *_toml_lines(value)]
        elif _are_tables(value):
            for table in value:
                lines += ["", f"[[{name}]]", *_toml_lines(table)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml_lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_toml_key(key)} = {toml_value(value)}" for key, value in table.items() if value is not None]


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _are_tables(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(_is_table(item) for item in value)


def apply_override(tables: dict[str, Any], setting: str) -> str:
    """Set one key of nested tables from `section.key=value`; returns the key's full name.

    The value is TOML; a bare word that is none (`cuda`, `data/train`) is taken as a string. A table of
    a list of tables is reached by its name: `stage.transfer.depth=2`, or by what it uses, dots as
    they are: `plugin.plugins.async_copy.slots=3`, or by the last part of that, without `.py`:
    `plugin.power.exponent=2` for `use = "./power.py"`.

    Raises:
        ScheduleError: no `=`, a malformed name, or a value that starts like TOML and is not.
    """
    name, equals, text = setting.partition("=")
    name, text = name.strip(), text.strip()
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", name):
        raise ScheduleError(f"override {setting!r}: expected section.key=value, such as train.lr=3e-4")
    if not text:
        raise ScheduleError(f'{name}: the override gives no value; for an empty string write {name}=""')
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[0] in "\"'[{":
            raise ScheduleError(f"{name}={text}: the value is not valid TOML: {error}") from None
        parsed = {"value": text}
    if set(parsed) != {"value"}:
        raise ScheduleError(f"{name}={text!r}: an override sets one key")
    *parents, key = name.split(".")
    for depth, parent in enumerate(parents):
        if _are_tables(tables.get(parent)):
            _named_table(tables[parent], ".".join(parents[depth + 1 :]), name)[key] = parsed["value"]
            return name
        if not isinstance(tables.get(parent), dict):
            tables[parent] = {}
        tables = tables[parent]
    tables[key] = parsed["value"]
    return name


def _named_table(tables: list[dict[str, Any]], wanted: str, setting: str) -> dict[str, Any]:
    """The one of a list of tables whose `name` or `use`, or the last part of it, is `wanted`."""
    names = [str(table.get("name", table.get("use", ""))) for table in tables]
    short = [re.split(r"[/\\.]", name.removesuffix(".py"))[-1] for name in names]
    if names.count(wanted) == 0 and short.count(wanted) == 1:
        return tables[short.index(wanted)]
    if names.count(wanted) != 1:
        found = "is there more than once" if wanted in (*names, *short) else "is not there"
        raise ScheduleError(f"{setting}: {shown(wanted)} {found}; there are {', '.join(names)}")
    return tables[names.index(wanted)]
