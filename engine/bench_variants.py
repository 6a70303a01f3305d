"""A target as it is and as plugins make it, ready to be timed beside one another.

`as it is` is the Hugging Face module; `default` what the engine's default plugins make of it; then each
plugin that was named, on top of the defaults. Names joined by `+` stand on top of each other in that order.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from engine.bench import Bench
from engine.bench_measure import Work
from engine.builtin import resolve
from engine.plugin_host import load_plugins
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.schedule import Plugin
from engine.warm_up import ready_shape

AS_IT_IS = "Hugging Face"
DEFAULT = "default"


@attrs.frozen(eq=False)
class Variant:
    """One way to run a target's forward on one lane."""

    name: str
    target: Any
    lane: Lane

    def ready(self, rows: int, length: int) -> None:
        """Tune, compile or capture what a shape needs."""
        ready_shape(self.target, rows, length, self.lane.device)
        self.lane.synchronize()

    def work(self, rows: int, length: int) -> Work:
        """A forward over fresh random tokens."""
        device, vocabulary = self.lane.device, self.target.summary.vocab_size

        def inputs() -> torch.Tensor:
            return torch.randint(0, vocabulary, (rows, length), device=device)

        return Work(inputs=inputs, call=self.target.forward_taps)


def load_bare_target(bench: Bench, device: torch.device) -> Any:
    """The schedule's target with random weights, cut behind its last tap, as its loader makes it."""
    schedule = bench.schedule
    return load_plugins(schedule.plugin).choose(
        "load_target",
        target=schedule.target,
        folder=resolve(schedule.target.path),
        target_layer_ids=schedule.drafter.target_layer_ids,
        device=device,
        seed=schedule.run.seed,
        keep_head=False,
        progress=lambda line: None,
    )


def as_it_is(target: Any, lane: Lane) -> Variant:
    """The plain variant."""
    return Variant(AS_IT_IS, target, lane)


def default_variant(target: Any, lane: Lane, serializer: Serializer) -> Variant | None:
    """What the default plugins make of a target; None where they leave it as it is."""
    return _wrapped(DEFAULT, (), target, lane, serializer)


def plugin_variant(names: str, target: Any, lane: Lane, serializer: Serializer) -> Variant | None:
    """What named plugins, on top of the defaults, make of a target; None where they leave it as it is.

    Args:
        names: such as `graph_target`, `plugins.graph_target`, or two joined by `+`.
    """
    return _wrapped(names, [plugin_use(name) for name in names.split("+")], target, lane, serializer)


def plugin_use(name: str) -> str:
    """What a schedule would write under `use`: the short name of a file in plugins/ will do."""
    short = not set(name) & set("./\\") and (Path(__file__).parents[1] / "plugins" / f"{name}.py").exists()
    return f"plugins.{name}" if short else name


def _wrapped(
    name: str, uses: Sequence[str], target: Any, lane: Lane, serializer: Serializer
) -> Variant | None:
    host = load_plugins([Plugin(use=use) for use in uses])
    wrapped = host.wrap("wrap_target", target, lane=lane, serializer=serializer)
    return None if wrapped.walk is target.walk else Variant(name, wrapped, lane)


def weight_bytes(target: Any) -> int:
    """Bytes of a target's parameters: a plugin that takes them for its own form leaves fewer."""
    return sum(parameter.numel() * parameter.element_size() for parameter in target.model.parameters())
