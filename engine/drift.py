"""What decides a step's numbers, and how a run that is resumed differs in it.

Devices, lanes, depth, transfers and cadences may change between two parts of a run: its numbers stay.
Data, target, tokenizer, drafter, recipe, and the plugins that compute with them must not. Where files
lie is not among it: a folder may have moved to another disk, and its content is compared instead.
"""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from engine.errors import CheckpointError
from engine.planning import RunPlan
from engine.plugin_host import WRAPPING_HOOKS, changes_numbers
from engine.plugin_loading import LoadedPlugin
from engine.schedule import Data, Drafter, Target, Train
from engine.target.fingerprint import config_fingerprint, vocabulary_fingerprint, weights_fingerprint
from engine.toml_text import shown

DECIDING_SECTIONS = {
    name: {field.name: field.default for field in attrs.fields(section) if field.default is not attrs.NOTHING}
    for name, section in {"target": Target, "drafter": Drafter, "data": Data, "train": Train}.items()
}
"""With the defaults of their keys: a checkpoint older than a key was written under its default."""

WITHOUT_EFFECT = frozenset({"train.max_bad_steps"})
"""Keys of those sections that decide when a run ends, and no step."""

PLACES = frozenset({"target.path", "drafter.init", "data.path", "data.held_out"})
"""Paths; what they name has a fingerprint, and a drafter's first weights are in the checkpoint."""

DECIDING_HOOKS = ("make_objective", "make_optimizer", "make_attention", "load_target", "make_stage")
"""Transfers are left out: they move the same numbers."""

OPTIMIZER = "plugin for make_optimizer"


def run_facts(plan: RunPlan) -> dict[str, Any]:
    """Facts by name that a resumed run must share; small values that JSON keeps. Reads samples of files.

    Raises:
        TargetError: a weight file of the target is missing or torn.
    """
    run, folder = plan.schedule.run, plan.target_folder
    facts: dict[str, Any] = {
        "run.seed": run.seed,
        "total steps": plan.total_steps,
        "documents (fingerprint)": plan.data_fingerprint,
        "held-out documents (fingerprint)": plan.held_out.fingerprint if plan.held_out else None,
        "target configuration (fingerprint)": config_fingerprint(folder),
        "target weights (fingerprint)": "random"
        if plan.schedule.target.init == "random"
        else weights_fingerprint(folder),
        "tokenizer (fingerprint)": vocabulary_fingerprint(folder),
    }
    if not plan.on_gpus:
        facts["run.cpu_threads"] = run.cpu_threads  # they decide the last bits of a matrix product
    asked = {hook: plan.host.answering(hook) for hook in DECIDING_HOOKS}
    asked |= {hook: [*filter(changes_numbers, plan.host.answering(hook))] for hook in WRAPPING_HOOKS}
    return facts | {f"plugin for {hook}": _with_options(plugins) for hook, plugins in asked.items()}


def differences(
    schedule_then: str, facts_then: Mapping[str, Any], plan: RunPlan, facts: Mapping[str, Any]
) -> list[str]:
    """What is not as it was, one line each; empty where a resumed run continues the old one.

    Args:
        schedule_then: the effective schedule of a checkpoint, as TOML.
        facts_then: its `run_facts`; one that is not there was not compared then and is not now.

    Raises:
        CheckpointError: that schedule cannot be read.
    """
    try:
        then: dict[str, Any] = tomllib.loads(schedule_then)
    except tomllib.TOMLDecodeError as error:
        raise CheckpointError(f"the checkpoint holds no schedule that can be read: {error}") from error
    now = tomllib.loads(plan.schedule.to_toml())
    lines = []
    for section, defaults in DECIDING_SECTIONS.items():
        was, is_now = defaults | then.get(section, {}), defaults | now.get(section, {})
        for key in sorted(was.keys() | is_now.keys()):
            name, old, new = f"{section}.{key}", was.get(key), is_now.get(key)
            if old != new and name not in WITHOUT_EFFECT and not _place(name, old, new):
                lines.append(_line(name, old, new))
    compared = [name for name in facts if name in facts_then and facts[name] != facts_then[name]]
    return lines + [_line(name, facts_then[name], facts[name]) for name in compared]


def _place(key: str, was: Any, is_now: Any) -> bool:
    """Whether a key only says where files lie; `data.held_out` may be a share instead."""
    return key in PLACES and not any(isinstance(value, float) for value in (was, is_now))


def _line(name: str, was: Any, is_now: Any) -> str:
    return f"{name}: was {_shown(was)}, is {_shown(is_now)}"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):  # plugins by name
        each = [f"{name} ({_options(options)})" if options else name for name, options in value.items()]
        return ", ".join(each) or "the engine's own"
    return shown(value)


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {shown(value)}" for key, value in options.items())


def _with_options(plugins: Sequence[LoadedPlugin]) -> dict[str, dict[str, Any]]:
    """Plugins in their order, with their options; the engine's own are left out."""
    return {
        plugin.name: _plain(attrs.asdict(plugin.options)) for plugin in plugins if plugin.origin != "default"
    }


def _plain(value: Any) -> Any:
    """An option's value as it comes back from JSON, so that then and now can be compared."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
