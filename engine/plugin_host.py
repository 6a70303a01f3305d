"""The plugins of a run: who is there, who answers what, and asking them.

Precedence is decided here and not by pluggy's order of registration alone: for a hook that chooses,
the schedule's plugins are asked before the installed ones and those before the defaults, and two
plugins of the schedule that both answer are an error rather than a race. A hook that wraps goes the
other way round, so that the schedule's plugins stand outermost and see what the defaults made. The
built-in strategies are plugins in a plain tuple and come through the same door as a stranger's.
"""

import difflib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import attrs
import pluggy

from engine import hookspecs
from engine.errors import EngineError, InputError, exit_code_of, words
from engine.hookspecs import PROJECT
from engine.plugin_loading import (
    LoadedPlugin,
    Origin,
    PluginRefused,
    find_module,
    installed_plugins,
    load_plugin,
)
from engine.schedule import Plugin
from engine.toml_text import shown

DEFAULT_PLUGINS = (
    "plugins.decay",
    "plugins.dpace",
    "plugins.adamw",
    "plugins.concat",
    "plugins.plain_copy",
    "plugins.block_attention",
    "plugins.prepared_documents",
    "plugins.huggingface_target",
    "plugins.fused_target",
)
"""Asked last, in this order; where a hook wraps, first."""

ANSWERED_BY_NAME = frozenset({"make_objective", "make_stage", "open_data_source", "load_target"})
"""Hooks whose question names something: two plugins may have them, for different names."""

WRAPPING_HOOKS = ("wrap_target", "wrap_drafter", "make_feature_path")
"""Hooks that move, group or fuse what is computed, and may change it: see `changes_numbers`."""

Thing = TypeVar("Thing")

ORIGINS: tuple[Origin, ...] = ("schedule", "installed", "default")


class PluginError(EngineError):
    """An exception inside a hook; the exit code is that of its cause."""

    def __init__(self, plugin: LoadedPlugin, hook: str, cause: BaseException) -> None:
        super().__init__(f"plugin {plugin.name}: {hook} failed: {type(cause).__name__}: {words(cause)}")
        self.plugin = plugin.name
        self.hook = hook
        self.exit_code = exit_code_of(cause)


@attrs.frozen(eq=False)
class PluginHost:
    """The plugins of a run, in order of precedence, and the three ways to call them."""

    plugins: tuple[LoadedPlugin, ...]
    _manager: pluggy.PluginManager = attrs.field(alias="manager", repr=False)

    def choose(self, hook: str, **question: Any) -> Any:
        """Ask a hook that chooses. None where nobody answers.

        Raises:
            PluginRefused: two plugins named in the schedule answer.
            PluginError: one of them raised.
        """
        found = self.choose_from(hook, **question)
        return None if found is None else found[1]

    def choose_from(self, hook: str, **question: Any) -> tuple[LoadedPlugin, Any] | None:
        """`choose`, with the plugin that answered."""
        for origin in ORIGINS:
            answers = []
            for plugin, implementation in self._implementations(hook):
                if plugin.origin != origin:
                    continue
                answer = _call(plugin, implementation, hook, question)
                if answer is None:
                    continue
                if origin != "schedule":
                    return plugin, answer
                answers.append((plugin, answer))
            if len(answers) > 1:
                raise PluginRefused(_two_answers(hook, [plugin for plugin, _ in answers]))
            if answers:
                return answers[0]
        return None

    def choose_named(
        self, hook: str, key: str, name: str, *, known: Sequence[str] = (), **question: Any
    ) -> Any:
        """`choose` for what a schedule names under a key, such as `train.objective`.

        Args:
            name: the value of the key, and part of the question.
            known: names that are right without any plugin, for advice.

        Raises:
            InputError: nobody answers to `name`. Otherwise as `choose`.
        """
        answer = self.choose(hook, name=name, **question)
        if answer is None:
            asked = self.answering(hook)
            stems = [plugin.name.removesuffix(".py").rpartition(".")[2] for plugin in asked]
            nearest = difflib.get_close_matches(name, [*known, *stems], n=1)
            advice = f"did you mean {shown(nearest[0])}?" if nearest else "name its plugin under [[plugin]]"
            listed = ", ".join(plugin.name for plugin in asked)
            found = f"asked were {listed}" if asked else "none of this run's plugins has that hook"
            raise InputError(f"{key} = {shown(name)}: no plugin's {hook} answers to it: {found}; {advice}")
        return answer

    def wrap(self, hook: str, thing: Thing, **question: Any) -> Thing:
        """Let every plugin that has a wrapping hook put something around `thing`, from the inside out.

        Raises:
            PluginError: one of them raised.
        """
        given = next(iter(inspect.signature(getattr(hookspecs, hook)).parameters))
        for plugin, implementation in self._implementations(hook):
            wrapped = _call(plugin, implementation, hook, {given: thing, **question})
            thing = thing if wrapped is None else wrapped
        return thing

    def tell(self, hook: str, **news: Any) -> None:
        """Tell every plugin that watches.

        Raises:
            PluginError: the first that raised; those after it are not told.
        """
        for plugin, implementation in self._implementations(hook):
            _call(plugin, implementation, hook, news)

    def tell_failure(self, error: BaseException) -> None:
        """Tell of the failure that ends the run; what is raised meanwhile becomes a note of `error`."""
        for plugin, implementation in self._implementations("run_failed"):
            try:
                _call(plugin, implementation, "run_failed", {"error": error})
            except PluginError as second:
                error.add_note(str(second))

    def answering(self, hook: str) -> list[LoadedPlugin]:
        """Who has a hook, in the order in which they are asked, told or let wrap."""
        return [plugin for plugin, _ in self._implementations(hook)]

    def hooks_of(self, plugin: LoadedPlugin) -> list[str]:
        """The hooks that a plugin has."""
        return [hook for hook in hook_names() if plugin in self.answering(hook)]

    def _implementations(self, hook: str) -> Iterator[tuple[LoadedPlugin, pluggy.HookImpl]]:
        by_instance = {id(plugin.instance): plugin for plugin in self.plugins}
        found = [
            (by_instance[id(implementation.plugin)], implementation)
            for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls())
        ]
        if kind_of(hook) == "wrap":  # stable, so that plugins of one origin keep the order they are named in
            found.sort(key=lambda pair: ORIGINS.index(pair[0].origin), reverse=True)
        yield from found


def load_plugins(named: Sequence[Plugin] = ()) -> PluginHost:
    """Load a schedule's plugins, the installed ones and the defaults.

    A plugin that the schedule names is not loaded a second time as an installed or a default one.

    Raises:
        PluginRefused: a plugin cannot be used; names it, and hook, option or line.
    """
    plugins = [load_plugin(plugin.use, plugin.options, "schedule") for plugin in named]
    _refuse_repeated(plugins)
    others: list[tuple[str, Origin]] = [(name, "installed") for name in installed_plugins()]
    others += [(name, "default") for name in DEFAULT_PLUGINS]
    for name, origin in others:
        if find_module(name) not in {plugin.module for plugin in plugins}:
            plugins.append(load_plugin(name, {}, origin))
    return host_of(plugins)


def host_of(plugins: Sequence[LoadedPlugin]) -> PluginHost:
    """Register plugins, in order of precedence, and check their hooks.

    Raises:
        PluginRefused: a misspelt or unmarked hook, an argument it does not have, a hook wrapper, or two
            plugins of the schedule with one single-answer hook.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for plugin in reversed(plugins):  # pluggy calls the last registered first
        _refuse_unmarked(plugin)
        try:
            manager.register(plugin.instance, name=f"{plugin.origin}:{plugin.name}")
            manager.check_pending()
            if not manager.get_hookcallers(plugin.instance):
                raise PluginRefused(
                    f"plugin {plugin.name}: what make(options) returned has no hook, so nothing would ever "
                    "call it; mark its methods with @hookimpl (from engine.hookspecs)"
                )
        except pluggy.PluginValidationError as error:
            raise PluginRefused(_wrong_hook(plugin, manager, error)) from None
        except ValueError as error:
            raise PluginRefused(f"plugin {plugin.name}: make(options) returned an object twice") from error
    host = PluginHost(tuple(plugins), manager)
    for hook in hook_names():
        for plugin, implementation in host._implementations(hook):
            if implementation.hookwrapper or implementation.wrapper:
                raise PluginRefused(
                    f"plugin {plugin.name}: {hook} is a hook wrapper, which would stand outside the order of "
                    "precedence; write it as a plain hook"
                )
        if kind_of(hook) == "choose" and hook not in ANSWERED_BY_NAME:
            rivals = [plugin for plugin in host.answering(hook) if plugin.origin == "schedule"]
            if len(rivals) > 1:
                raise PluginRefused(_two_answers(hook, rivals))
    return host


def hook_names() -> list[str]:
    """Every hook, in the order of `hookspecs.py`."""
    return [name for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT}_spec")]


def kind_of(hook: str) -> Literal["choose", "wrap", "watch"]:
    """What a hook is for, and with that who is asked or told, and in which order."""
    if getattr(getattr(hookspecs, hook), f"{PROJECT}_spec")["firstresult"]:
        return "choose"
    return "wrap" if hook.startswith("wrap_") else "watch"


def changes_numbers(plugin: LoadedPlugin) -> bool:
    """Whether what a plugin has for one of `WRAPPING_HOOKS` computes other numbers, by more than rounding.

    So it is taken to be unless its module says `KEEPS_NUMBERS = True`.
    """
    return not getattr(plugin.module, "KEEPS_NUMBERS", False)


def register_installed_commands(app: Any) -> None:
    """Let installed plugins add commands to a typer application; without any, nothing is loaded."""
    installed = [load_plugin(name, {}, "installed") for name in installed_plugins()]
    if installed:
        host_of(installed).tell("register_commands", app=app)


def _call(plugin: LoadedPlugin, implementation: pluggy.HookImpl, hook: str, given: dict[str, Any]) -> Any:
    try:
        return implementation.function(*(given[name] for name in implementation.argnames))
    except InputError as error:
        if plugin.origin == "default":
            raise  # what the user gave is wrong, and nobody's plugin is
        raise PluginError(plugin, hook, error) from error
    except (Exception, SystemExit, GeneratorExit) as error:  # a plugin that leaves is a run that failed
        raise PluginError(plugin, hook, error) from error


def _two_answers(hook: str, rivals: Sequence[LoadedPlugin]) -> str:
    names = " and ".join(plugin.name for plugin in rivals)
    return f"plugins {names}: both answer {hook}, which has one answer; keep one of them in the schedule"


def _refuse_repeated(plugins: Sequence[LoadedPlugin]) -> None:
    for index, plugin in enumerate(plugins):
        for earlier in plugins[:index]:
            if earlier.file == plugin.file:  # a file is a new module each time it is loaded
                raise PluginRefused(
                    f"plugin {plugin.name}: named twice under [[plugin]], as {earlier.name} before; keep one"
                )


def _refuse_unmarked(plugin: LoadedPlugin) -> None:
    for hook in hook_names():
        method = getattr(plugin.instance, hook, None)
        if callable(method) and not hasattr(method, f"{PROJECT}_impl"):
            raise PluginRefused(
                f"plugin {plugin.name}: {hook} is not marked, so it would never be called; write @hookimpl "
                "(from engine.hookspecs) above it"
            )


def _wrong_hook(
    plugin: LoadedPlugin, manager: pluggy.PluginManager, error: pluggy.PluginValidationError
) -> str:
    for caller in manager.get_hookcallers(plugin.instance) or ():
        if not caller.has_spec():
            nearest = difflib.get_close_matches(caller.name, hook_names(), n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(hook_names())}"
            return f"plugin {plugin.name}: no hook is called {caller.name}; {advice}"
    for hook in hook_names():
        method = getattr(type(plugin.instance), hook, None)
        if not callable(method):
            continue
        known = list(inspect.signature(getattr(hookspecs, hook)).parameters)
        for name in inspect.signature(method).parameters:
            if name not in (*known, "self"):
                nearest = difflib.get_close_matches(name, known, n=1)
                advice = f"did you mean {nearest[0]}?" if nearest else f"it may take {', '.join(known)}"
                return f"plugin {plugin.name}: {hook} has no argument {name}; {advice}"
    return f"plugin {plugin.name}: {str(error).splitlines()[-1].strip()}"
