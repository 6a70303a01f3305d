"""What a plugin may replace, add or watch: the engine's public interface, top to bottom.

A plugin is a module with two names: an attrs class `Options` (its keys in a schedule's `[[plugin]]`
table, each with a docstring) and `make(options)`, which returns an object. Methods of that object that
are marked with `@hookimpl` and bear a name from here are called; arguments are matched by name, and
those that a method does not need may be left out. docs/plugins.md has a complete example.

Hooks that **choose** have one answer. They are asked in the order of precedence (plugins named in
the schedule, installed ones, the defaults) and None passes the question on. They are called in the
main thread while a run is set up, never during it; what they return is what lanes call later, so
each says in which thread that is. Hooks that **wrap** are asked likewise, all of them and from the
inside out: the defaults first, then installed plugins, then the schedule's in the order in which they
are named; each is given what the one before returned, and None leaves it as it is. Hooks that **watch**
are told, all of them, in the main thread, in the order of precedence; what they return is ignored.

Locks, events and streams come from the lane that a strategy is given, and from nowhere else. An
exception in a hook ends the run and names plugin and hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    import torch
    import typer
    from rich.progress import Progress
    from torch import Tensor

    from engine.data.documents import Documents
    from engine.dflash.anchors import Anchors
    from engine.dflash.attention import Attention, Backend
    from engine.dflash.configuration import DrafterConfig
    from engine.dflash.drafter import Drafter
    from engine.dflash.objective import BlockWeights
    from engine.dflash.packing import PackedRow
    from engine.memory_sizes import TargetMemory
    from engine.runtime.lane import Lane
    from engine.runtime.parcel import Parcel
    from engine.runtime.serializer import Serializer
    from engine.schedule import Schedule, Train
    from engine.schedule import Target as TargetSection
    from engine.target.loading import Target

PROJECT = "dflash_engine"
"""The name under which pluggy keeps these hooks."""

ENTRY_POINTS = "dflash_engine.plugins"
"""The entry-point group of installed plugins; each entry names a module."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a method of a plugin as the implementation of the hook whose name it bears."""

hookspec = pluggy.HookspecMarker(PROJECT)


# Strategies that a hook returns


class FeaturePath(Protocol):
    """From taps to the context features that every drafter layer reads.

    What stands between `pack` and `context` is the strategy's own, a tuple of tensors whose first
    dimension is T; the engine moves it and does not look inside.
    """

    def pack(self, taps: Sequence[Tensor], row: PackedRow) -> tuple[Tensor, ...]:
        """Gather the real tokens' taps into a row.

        Called on a target's lane, for every micro-batch. `taps`: one [rows, length, H] per tapped
        layer. Returns new tensors on the same device and in the same dtype, zeros in the row's tail.
        """

    def tap_views(self, packed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The packed taps one by one, as views [T, H]: context noise is added through them."""

    def context(self, drafter: Drafter, packed: tuple[Tensor, ...]) -> Tensor:
        """`hidden_norm(fc(concat(taps)))`, [T, H], differentiable in the drafter's parameters.

        Called on a drafter's lane, with `packed` on its device and in its compute dtype.
        """


class Transfer(Protocol):
    """How a micro-batch comes to the drafter's device."""

    def receive(self, lane: Lane, parcel: Parcel) -> Parcel:
        """A parcel whose tensors lie on `lane.device`.

        Called on the drafter's lane, for every micro-batch. It may return before the copies are done
        if the new parcel's event says when they are. The old parcel's tensors have to live until then:
        `parcel.take(lane)` and `lane.copy_in(parcel)` see to it. Where they lie on the lane's device
        already, the parcel itself comes back. Some GPUs cannot be trusted with direct copies: `copy_in` and
        `lane.links` know which, a plain `.to` does not.
        """


class AttentionBuilder(Protocol):
    """Builds the masks of one micro-batch, and the function that attends with them."""

    def __call__(
        self,
        backend: Backend,
        anchors: Anchors,
        starts: Tensor,
        context_length: int,
        config: DrafterConfig,
        device: torch.device,
    ) -> Attention:
        """As `engine.dflash.attention.prepare_attention`; called on a drafter's lane."""


StageWork = Callable[..., Any]
"""A stage per micro-batch: `work(lane, micro_batch, cargo) -> cargo`, where `micro_batch` counts from the
start of the run and `cargo` is what the stage before returned; a stage that only looks returns it.
A barrier: `work(lane, step, meeting) -> Any`. Called on each of the stage's lanes, from several
threads at once unless the schedule says `exclusive`."""


# Hooks that choose


@hookspec(firstresult=True)
def make_objective(name: str, train: Train) -> BlockWeights | None:
    """The slot weights of the schedule's `train.objective`, if `name` is this plugin's.

    Returns a function of (cross_entropy float32 [N, B-1], detached; supervised bool [N, B-1]) to
    weights float32 [N, B-1], zero where not supervised. It is called on drafter lanes, from several
    threads, and keeps no state. The engine divides by the sum of all weights of a step.
    """


@hookspec(firstresult=True)
def make_optimizer(parameters: dict[str, torch.nn.Parameter], train: Train) -> torch.optim.Optimizer | None:
    """The optimizer of some float32 master weights, by the drafter's parameter names.

    Drafters may share the masters out, so it is called once per share and an update may not depend
    on other parameters. Its state is one dictionary of tensors per parameter, which is what a
    checkpoint keeps. The engine sums, divides and clips gradients, sets `lr` in every parameter group
    before a step, and calls `step` on a drafter's lane: once, or with `train.gradient_dtype = "bfloat16"`
    several times, with the gradients of some parameters each time and None at the others.
    """


@hookspec(firstresult=True)
def optimizer_state_bytes(shape: torch.Size) -> int | None:
    """What the optimizer of `make_optimizer` holds for a master weight of a shape, once it has stepped.

    The plans of memory and disk count with it; whoever leaves it out is taken to hold what AdamW does, two
    float32 numbers per element.
    """


@hookspec(firstresult=True)
def make_feature_path(config: DrafterConfig) -> FeaturePath | None:
    """How taps are packed and projected. One object serves all lanes; it keeps no state of a micro-batch."""


@hookspec(firstresult=True)
def make_transfer(
    target_lanes: Sequence[Lane], drafter_lanes: Sequence[Lane], parcel_bytes: int
) -> Transfer | None:
    """How parcels come to a drafter's lane. One object serves all lanes.

    `parcel_bytes`: the largest parcel of the run, each tensor's bytes rounded up to 256. What it
    allocates, it allocates here.
    """


@hookspec(firstresult=True)
def make_attention(config: DrafterConfig) -> AttentionBuilder | None:
    """Masks and attention of the blocks. The rules of visibility are the contract's, whatever builds them."""


@hookspec(firstresult=True)
def open_data_source(path: str, vocab_size: int, mask_token_id: int) -> Documents | None:
    """The documents at a schedule's `data.path` or `data.held_out`, if this plugin knows such paths.

    Token ids lie in [0, vocab_size) and are never `mask_token_id`; documents have content ids that
    derive from their content alone.
    """


@hookspec(firstresult=True)
def load_target(
    target: TargetSection,
    folder: Path,
    target_layer_ids: Sequence[int],
    device: torch.device,
    seed: int,
    keep_head: bool,
    progress: Callable[[str], None] | Progress,
) -> Target | None:
    """The frozen target on one device, with forward hooks at its taps.

    `keep_head`: with the layers behind the last tap and the final norm, so that it can decode.
    `progress` takes a line per file read, or is rich's display, for a bar. `folder` is `target.path`
    resolved. Copies for further lanes are the engine's; it calls this once.
    """


@hookspec(firstresult=True)
def make_stage(name: str, schedule: Schedule) -> StageWork | None:
    """What a `[[stage]]` of this name does, if it is this plugin's; one of the five may be replaced."""


# Hooks that wrap: their first argument is what the plugin before returned


@hookspec
def wrap_drafter(drafter: Drafter, lane: Lane, serializer: Serializer) -> Drafter | None:
    """The drafter as one lane will call it, compiled for example.

    Called once per drafter lane, when its weights are in place. Parameters keep their names and their
    identity: the optimizer and the exporter hold them. Compiling may wait for the first call, which
    comes on the lane's thread; `serializer.compiling(lane)` keeps other lanes from compiling meanwhile.
    """


@hookspec
def wrap_target(target: Target, lane: Lane, serializer: Serializer) -> Target | None:
    """The target as one lane will call it: fused kernels, 8-bit products, CUDA graphs.

    Called once per target lane, when its weights are in place; lanes on one device are given the same
    target. `forward_taps` of what comes back returns tensors that later calls leave alone. A module whose
    wrapper keeps the taps but for rounding says `KEEPS_NUMBERS = True`; with another a resumed run drifts.
    """


@hookspec
def wrap_target_memory(memory: TargetMemory, target: Target, device: torch.device) -> TargetMemory | None:
    """What the target takes on a device once `wrap_target` has wrapped it, for the plan.

    `target` has shapes and no numbers: its weights lie on the meta device. Left out: nothing changes.
    """


# Hooks that watch


@hookspec
def run_started(schedule: Schedule, folder: Path, first_step: int, last_step: int) -> None:
    """Everything is loaded and checked; steps `first_step + 1` to `last_step` follow.

    `folder` is the run's; `schedule` the effective one.
    """


@hookspec
def step_finished(step: int, row: dict[str, Any]) -> None:
    """A step is done, counted from 1. `row` is its row of metrics.jsonl; read it, don't change it."""


@hookspec
def evaluated(step: int, row: dict[str, Any]) -> None:
    """The drafter after `step` steps was evaluated; `row` has `held_out_loss`, `accepted_length`, …"""


@hookspec
def checkpoint_written(step: int, path: Path) -> None:
    """A whole checkpoint lies at `path`. Later ones may replace it; copy what has to stay."""


@hookspec
def run_finished(step: int, folder: Path) -> None:
    """The run came to its end, or to the end it was asked to stop at; `step` is the last one done."""


@hookspec
def run_failed(error: BaseException) -> None:
    """The run ended with an error. Called before it is raised on; an exception in here is added to it."""


# Commands


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add commands to `python -m engine`. Of installed plugins only: no schedule is read yet."""
