"""Finding a plugin's module, reading its options, making its object; every failure has the plugin's name.

A plugin is asked for as a schedule writes it: a file (`./mine.py`), the name of an installed entry
point, or a module (`plugins.async_copy`), in this order. Its code is foreign: whatever it raises
while it is imported or made becomes one sentence with the file and the line that did it.
"""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import attrs

from engine.errors import InputError, ScheduleError, words
from engine.hookspecs import ENTRY_POINTS
from engine.toml_tables import read_table

Origin = Literal["schedule", "installed", "default"]


class PluginRefused(InputError):
    """A plugin cannot be used: not found, not importable, wrong options, or hooks that cannot be."""


@attrs.frozen(eq=False, kw_only=True)
class LoadedPlugin:
    """A plugin that is ready to be asked."""

    name: str
    """As the schedule or the entry point writes it."""
    origin: Origin
    module: ModuleType
    options: Any
    """An instance of the module's `Options`."""
    instance: Any
    """What the module's `make` returned; its marked methods are the hooks."""

    @property
    def file(self) -> str:
        return self.module.__file__ or self.module.__name__


def installed_plugins() -> dict[str, EntryPoint]:
    """Installed plugins by name.

    Raises:
        PluginRefused: two distributions offer plugins of one name.
    """
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        if point.name in found and found[point.name].value != point.value:
            raise PluginRefused(
                f"plugin {point.name}: two installed packages offer it, as {found[point.name].value} and as "
                f"{point.value}; uninstall one, or name the module in the schedule"
            )
        found[point.name] = point
    return found


def load_plugin(use: str, options: Mapping[str, Any], origin: Origin) -> LoadedPlugin:
    """Import a plugin, check its options and make its object.

    Args:
        use: a file, the name of an installed entry point, or a module.
        options: the raw table of its own keys.

    Raises:
        PluginRefused: names the plugin, what is wrong, and the file and line where there is one.
    """
    module = find_module(use)
    options_class, make = getattr(module, "Options", None), getattr(module, "make", None)
    if not isinstance(options_class, type) or not attrs.has(options_class) or not callable(make):
        lacking = "make(options)" if not callable(make) else "attrs class Options"
        raise PluginRefused(
            f"plugin {use}: {module.__file__} has no {lacking}; a plugin is a module with an attrs class "
            "Options, which may be empty, and a function make(options)"
        )
    try:
        structured = read_table(options, attrs.resolve_types(options_class))
    except ScheduleError as error:
        lines = [f"plugin {use}: option {line}" for line in str(error).splitlines()]
        raise PluginRefused("\n".join(lines)) from None
    except Exception as error:
        # Bad annotations and the class's own validators: both are the plugin's, not the schedule's.
        raise PluginRefused(f"plugin {use}: its options were refused: {_where(error, module)}") from error
    try:
        instance = make(structured)
    except InputError as error:
        raise PluginRefused(f"plugin {use}: {error}") from error
    except (Exception, SystemExit) as error:
        raise PluginRefused(f"plugin {use}: make(options) failed: {_where(error, module)}") from error
    if instance is None:
        raise PluginRefused(f"plugin {use}: make(options) returned None; return the plugin's object")
    return LoadedPlugin(name=use, origin=origin, module=module, options=structured, instance=instance)


def find_module(use: str) -> ModuleType:
    """Import the module of a plugin.

    Raises:
        PluginRefused: there is none, or it fails to import; with file and line.
    """
    installed = installed_plugins()
    try:
        if use.endswith(".py") or "/" in use or os.sep in use:
            return _from_file(use)
        if use in installed:
            found = installed[use].load()
            if not isinstance(found, ModuleType):
                raise PluginRefused(
                    f"plugin {use}: its entry point {installed[use].value} names a "
                    f"{type(found).__name__}; it has to name a module"
                )
            return found
        return importlib.import_module(use)
    except PluginRefused:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if use not in installed and not use.endswith(".py") and f"{use}.".startswith(f"{missing}."):
            raise PluginRefused(_not_found(use, installed)) from None
        raise PluginRefused(f"plugin {use}: cannot be imported: {_where(error)}") from error
    except (Exception, SystemExit) as error:
        raise PluginRefused(f"plugin {use}: cannot be imported: {_where(error)}") from error


def _from_file(use: str) -> ModuleType:
    path = Path(use).expanduser().resolve()
    if not path.is_file():
        raise PluginRefused(f"plugin {use}: no such file: {path}; a path starts where the engine is started")
    # Two files of one name are two modules, and neither hides a module that is installed.
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    name = f"dflash_engine_plugin_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginRefused(f"plugin {use}: {path} is no Python file; its name has to end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # attrs looks a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _not_found(use: str, installed: Mapping[str, EntryPoint]) -> str:
    own = sorted(
        f"plugins.{path.stem}"
        for path in (Path(__file__).parent.parent / "plugins").glob("*.py")
        if path.stem != "__init__"
    )
    known = [*own, *installed]
    nearest = difflib.get_close_matches(use, known, n=1) or difflib.get_close_matches(
        use, {name.rpartition(".")[2]: name for name in known}, n=1
    )
    matches = [name for name in known if nearest and nearest[0] in (name, name.rpartition(".")[2])]
    advice = f"did you mean {matches[0]}?" if matches else f"there are {', '.join(known)}"
    return f"plugin {use}: no module and no installed entry point of this name; {advice}"


def _where(error: BaseException, module: ModuleType | None = None) -> str:
    """What happened, with the last line of code outside this file and the import system."""
    said = f"{type(error).__name__}: {words(error)}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    if module is not None:  # an error deep in a library is the plugin's line that called it
        frames = [frame for frame in frames if frame.filename == module.__file__] or frames
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {said}" if frames else said
