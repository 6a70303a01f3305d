"""Stages of the plugins' own: asked for while a run is planned, checked, and named when they fail."""

from collections.abc import Mapping
from typing import Any

import attrs

from engine.errors import EngineError
from engine.hookspecs import StageWork
from engine.plugin_host import PluginError, PluginHost
from engine.plugin_loading import LoadedPlugin, PluginRefused
from engine.schedule import Schedule
from engine.schedule_stages import DEFAULT_STAGES


@attrs.frozen(eq=False)
class PluginStage:
    """A plugin's stage, called as it wants to be called; what it raises bears the plugin's name."""

    plugin: LoadedPlugin
    name: str
    barrier: bool
    work: StageWork

    def __call__(self, lane: Any, number: int, given: Any) -> Any:
        """`given` is the cargo, or a barrier's meeting.

        Raises:
            PluginError: the stage raised, or gave no cargo on; the exit code is that of the cause.
        """
        hook = f"stage {self.name}"
        try:
            result = self.work(lane, number, given)
            if result is None and given is not None and not self.barrier:
                raise EngineError("it returned None; a stage returns the cargo that the next one gets")
        except Exception as error:
            raise PluginError(self.plugin, hook, error) from error
        return result


def plugin_stages(schedule: Schedule, host: PluginHost) -> Mapping[str, PluginStage]:
    """The stages of a schedule that its plugins run, by name; the five may be among them.

    Raises:
        InputError: a stage that nobody runs.
        PluginRefused: what a plugin gave for a stage cannot be called.
    """
    own = [stage.name for stage in DEFAULT_STAGES]
    stages = {}
    for index, stage in enumerate(schedule.stage):
        found = host.choose_from("make_stage", name=stage.name, schedule=schedule)
        if found is None:
            if stage.name not in own:
                host.choose_named(
                    "make_stage", f"stage[{index}].name", stage.name, known=own, schedule=schedule
                )
            continue
        plugin, work = found
        if not callable(work):
            raise PluginRefused(
                f"plugin {plugin.name}: make_stage returned {work!r} for {stage.name}; return a function "
                "of (lane, micro_batch, cargo)"
            )
        stages[stage.name] = PluginStage(plugin, stage.name, stage.barrier, work)
    return stages
