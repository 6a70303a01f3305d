"""What a schedule may say: one attrs class per section, a docstring under each key.

A schedule is a TOML file that holds a whole run: model, data, recipe, devices, stages and plugins. It
is read before anything expensive, so this module knows neither torch nor the target; what can only be
judged against those is in `schedule_checks.py` and `devices.py`, and a plugin's options by the plugin,
when it is loaded (`plugin_host.py`). Types and ranges stand in the
fields' types, agreement between keys in `schedule_agreement.py`, and both list everything that is
wrong rather than the first find. A schedule that was read is complete: `to_toml` gives the effective
configuration, which reads back as the same schedule.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs

from engine.errors import ScheduleError
from engine.schedule_agreement import GAMMA_BY_BLOCK_SIZE, disagreements
from engine.schedule_stages import DEFAULT_STAGES, Stage, credit_depth
from engine.toml_tables import Bounds, read_table
from engine.toml_text import apply_override, toml_text

Count = Annotated[int, Bounds(at_least=1)]
CountOrZero = Annotated[int, Bounds(at_least=0)]
Seed = Annotated[int, Bounds(at_least=0, at_most=2**63 - 1)]
HeadSize = Annotated[int, Bounds(at_least=2, multiple_of=2)]
BlockSize = Annotated[int, Bounds(at_least=2)]
Positive = Annotated[float, Bounds(above=0)]
PositiveOrZero = Annotated[float, Bounds(at_least=0)]
Share = Annotated[float, Bounds(at_least=0, at_most=1)]
ShareBelowOne = Annotated[float, Bounds(at_least=0, below=1)]
Fraction = Annotated[float, Bounds(above=0, below=1)]

Dtype = Literal["bfloat16", "float32"]
LayerType = Literal["full_attention", "sliding_attention"]
Layout = Literal["sequential", "pipelined", "colocated"]


@attrs.frozen(kw_only=True)
class Run:
    """[run]: where results go, how long training lasts, what is reported when."""

    output_dir: str = "runs"
    """Each run makes a new folder `<output_dir>/<schedule>-<n>`; `latest` beside it points there."""
    seed: Seed = 42
    """Decides order, anchors, noise and fresh weights."""
    epochs: Count | None = None
    """Passes over the training documents. Either this or `steps`."""
    steps: Count | None = None
    """Optimizer steps. Either this or `epochs`; the learning rate ends with whichever is set."""
    log_every: Count = 1
    """Steps between two printed lines where there is no terminal."""
    save_every: CountOrZero = 200
    """Steps between two checkpoints; 0: only at the end."""
    keep_last: CountOrZero = 0
    """Newest checkpoints that are kept; older ones are removed once a newer is whole; 0: all are kept."""
    keep_every: CountOrZero = 0
    """Checkpoints whose step is a multiple of this are kept besides; 0: none."""
    eval_every: CountOrZero = 0
    """Steps between two evaluations on held-out text; 0: never while training, and the target is cut."""
    cpu_threads: Count = 1
    """Threads of one CPU operation. A matrix product's last bits may depend on it."""
    gpu_memory_gb: Positive | None = None
    """The most that this process takes of each GPU, 10^9 bytes; left out: all of it."""
    stall_seconds: Positive = 600.0
    """A lane that gets no further for so long, or 20 times what a stage usually takes, ends the run."""
    check_every: CountOrZero = 50
    """Steps between two comparisons of the drafters' weights, by checksum; 0: never."""
    nvtx: bool = False
    """Whether stages are NVTX ranges too, by stage and micro-batch, for traces of Nsight Systems."""


@attrs.frozen(kw_only=True)
class Target:
    """[target]: the frozen model that is to be sped up."""

    path: str
    """A Hugging Face folder, or `builtin:tiny-hybrid`."""
    init: Literal["checkpoint", "random"] = "checkpoint"
    """`random`: weights from the configuration alone, for benchmarks."""
    dtype: Dtype = "bfloat16"
    """Of weights and activations, given at loading."""
    trust_remote_code: bool = False
    """Whether Python code inside the target's folder may run."""


@attrs.frozen(kw_only=True)
class Drafter:
    """[drafter]: the model that is trained. Sizes are its own, never copied from the target."""

    layers: Count = 5
    """Number of decoder layers."""
    layer_types: tuple[LayerType, ...] | None = None
    """Attention of each layer; left out: all `full_attention`."""
    sliding_window: Count | None = None
    """A key is visible to a sliding layer when query position - key position is below this."""
    heads: Count
    """Query heads."""
    kv_heads: Count
    """Key and value heads; divides `heads`."""
    head_dim: HeadSize
    """Size of a head; even, because rotary embedding turns pairs."""
    intermediate_size: Count
    """Width of the SwiGLU MLP."""
    block_size: BlockSize = 16
    """Slots of a block, the anchor's own included."""
    target_layer_ids: tuple[CountOrZero, ...] | None = None
    """Tapped target layers, increasing, in [0, target layers - 2]; left out: spread evenly."""
    mask_token_id: CountOrZero
    """The token of every slot to be filled; neither pad, nor EOS, nor in the data."""
    is_causal: bool | None = None
    """Whether a block is causal inside; left out: sliding layers are, full ones are not."""
    init: str = "fresh"
    """`fresh`, or a folder to go on from: ours, a published one, or of speculators or TorchSpec."""
    dtype: Dtype = "bfloat16"
    """Of the computation; master weights are float32 always."""
    attention: Literal["auto", "dense", "flex"] = "auto"
    """`dense` runs anywhere, `flex` on GPUs; `auto` takes flex where it can."""


@attrs.frozen(kw_only=True)
class Data:
    """[data]: prepared documents and how they are batched."""

    path: str
    """A folder written by `prepare`, or Arrow or Parquet files with its columns."""
    held_out: str | Fraction | None = None
    """Documents for evaluation: a path, or the fraction of `path` to split off by answer."""
    token_budget: Count = 8192
    """Padded tokens of a micro-batch, at most."""
    max_length: Count = 3072
    """Tokens of a document; longer ones are cut at the end and counted."""
    length_bucket: Count = 256
    """Rows are padded to a multiple of this, so that few shapes occur."""
    max_anchors: Count = 512
    """Anchor slots of a micro-batch, used or not."""
    max_eval_documents: Count | None = None
    """Held-out documents to evaluate; left out: all."""


@attrs.frozen(kw_only=True)
class Train:
    """[train]: objective and optimizer."""

    lr: Positive = 6e-4
    """Peak learning rate."""
    min_lr: PositiveOrZero = 6e-5
    """Where the cosine ends."""
    warmup: ShareBelowOne = 0.04
    """Share of all steps over which the learning rate rises."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    """AdamW's decay of first and second moment."""
    weight_decay: PositiveOrZero = 0.0
    """AdamW's decoupled decay."""
    clip: Positive = 1.0
    """Largest norm of the whole gradient."""
    objective: str = "decay"
    """How slots are weighted: `decay`, a fixed one; `dpace`, D-PACE's expected acceptance; or a plugin's."""
    gamma: Positive | None = None
    """Decay constant of the slots; left out: 7, 5, 4 for block size 16, 10, 8."""
    dpace_alpha: Share = 0.5
    """D-PACE's smoothing towards certain acceptance."""
    context_noise: PositiveOrZero = 0.0
    """Scale of the noise added to the context features; 0: none."""
    micro_batches: Count = 1
    """Micro-batches per optimizer step, over all drafters."""
    max_bad_steps: Count = 3
    """Steps in a row skipped for a tap, loss or gradient that is not finite; so many end the run."""
    zero_taps: bool = False
    """Train without context: the control that shows what the taps are worth."""
    loss_chunk: Count = 1024
    """Slots whose logits over the vocabulary exist at a time."""
    gradient_dtype: Dtype = "float32"
    """Of gradients summed over a step's micro-batches; `bfloat16`: of a bfloat16 drafter, less memory."""
    checkpointing: bool = False
    """Whether a layer's activations are computed again in the backward pass: less memory, more time."""


@attrs.frozen(kw_only=True)
class Devices:
    """[devices]: names such as "cpu" or "cuda:0", one lane each."""

    targets: tuple[str, ...]
    """Devices that run the target."""
    drafters: tuple[str, ...]
    """Devices that train the drafter; no more than `train.micro_batches`."""


@attrs.frozen(kw_only=True)
class Serialize:
    """[serialize]: which kernel launches are kept apart."""

    launches: Literal["tune", "launch", "stage", "none"] = "tune"
    """`tune`: one thread at a time tunes a kernel; `launch`: one launches at a time; `stage`: as `tune`,
    and a whole target forward at a time; `none`: nothing, for debugging."""


@attrs.frozen(kw_only=True)
class Plugin:
    """[[plugin]]: a strategy of somebody's, and its own options."""

    use: str
    """A module such as `plugins.async_copy`, a file such as `./mine.py`, or an installed entry point."""
    options: Mapping[str, Any] = attrs.field(factory=dict, metadata={"rest": True})
    """Every other key of the table; the plugin's own class checks them when it is loaded."""


@attrs.frozen(kw_only=True)
class Schedule:
    """A whole schedule; `name` is the file's stem and no key of it."""

    layout: Layout | None = None
    """How `devices = "auto"` shares devices out; left out: `sequential`. None where devices are listed."""

    devices: Devices | Literal["auto"] = "auto"
    """`devices = "auto"` above all tables, or a table."""
    run: Run
    target: Target
    drafter: Drafter
    data: Data
    train: Train = attrs.field(factory=Train)
    serialize: Serialize = attrs.field(factory=Serialize)
    stage: tuple[Stage, ...] = DEFAULT_STAGES
    """In order; left out altogether: the five."""
    plugin: tuple[Plugin, ...] = ()
    """In order of precedence."""
    name: str = attrs.field(default="schedule", eq=False, metadata={"hidden": True})

    @property
    def depth(self) -> int:
        """How many micro-batches a drafter lane may have waiting."""
        return credit_depth(self.stage)

    @property
    def keeps_whole_target(self) -> bool:
        """Whether the run's targets keep the layers behind the last tap, so that they can decode."""
        return bool(self.run.eval_every) and self.data.held_out is not None

    def to_toml(self) -> str:
        """The effective configuration, defaults included; reads back as an equal schedule."""
        fields = attrs.fields(Schedule)
        tables = attrs.asdict(self, filter=attrs.filters.exclude(fields.name, fields.plugin))
        plugins = [{"use": plugin.use, **plugin.options} for plugin in self.plugin]
        return toml_text(tables | ({"plugin": plugins} if plugins else {}))


def load_schedule(path: str | Path, overrides: Sequence[str] = ()) -> Schedule:
    """Read a schedule and apply overrides such as `train.lr=3e-4` or `devices=auto`, in order.

    Setting one of `run.epochs` and `run.steps` replaces the other where the file has it, and so it is
    with `layout` and a table of `devices`.

    Raises:
        ScheduleError: no such file, not TOML, or anything that `structure` refuses.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScheduleError(f"{path}: no such schedule; give the path of a TOML file") from None
    except OSError as error:
        raise ScheduleError(f"{path}: the schedule cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: not a TOML file: {error}") from None
    if any(override.startswith("stage.") for override in overrides):
        tables.setdefault("stage", [stage.table() for stage in DEFAULT_STAGES])
    changed = {apply_override(tables, override) for override in overrides}
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        if f"run.{given}" in changed and f"run.{other}" not in changed:
            tables["run"].pop(other, None)
    if isinstance(tables.get("devices"), dict):
        if "layout" not in changed and any(name.startswith("devices") for name in changed):
            tables.pop("layout", None)
        elif "layout" in changed and not any(name.startswith("devices") for name in changed):
            tables["devices"] = "auto"
    return structure(tables, name=path.stem)


def structure(values: Mapping[str, Any], name: str = "schedule") -> Schedule:
    """A schedule from nested dictionaries, as tomllib returns them.

    Raises:
        ScheduleError: everything that is wrong, one problem a line.
    """
    # A section left out is an empty one, so that its missing keys are named rather than itself.
    required = [field.name for field in attrs.fields(Schedule) if field.default is attrs.NOTHING]
    sections: dict[str, Any] = {section: {} for section in required}
    schedule = attrs.evolve(read_table(sections | dict(values), Schedule), name=name)
    if problems := list(disagreements(schedule)):
        raise ScheduleError("\n".join(problems))
    if schedule.train.gamma is None and schedule.drafter.block_size in GAMMA_BY_BLOCK_SIZE:
        gamma = GAMMA_BY_BLOCK_SIZE[schedule.drafter.block_size]
        schedule = attrs.evolve(schedule, train=attrs.evolve(schedule.train, gamma=gamma))
    if schedule.devices == "auto" and schedule.layout is None:
        schedule = attrs.evolve(schedule, layout="sequential")
    return schedule
