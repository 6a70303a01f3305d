"""From a schedule to what a run would do, before anything expensive.

Everything that can be found wrong by reading small files is found here: plugins, devices, stages,
target configuration, taps, mask id, documents, batches. `check` stops after it; `run` goes on.
"""

from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from engine.builtin import resolve
from engine.data.batches import BatchPlan
from engine.data.chat import load_tokenizer, tokenizer_fingerprint
from engine.data.documents import Documents, assert_disjoint, split_by_answer
from engine.devices import resolve_attention, resolve_devices
from engine.dflash.configuration import FULL, DrafterConfig
from engine.dflash.drafter import build_drafter
from engine.dflash.training import Recipe
from engine.errors import ScheduleError
from engine.memory_plan import MemoryPlan, plan_memory
from engine.plugin_host import PluginHost, load_plugins
from engine.plugin_stages import PluginStage, plugin_stages
from engine.randomness import stateless_hash
from engine.runtime.graph import Graph, LaneSpec, StageSpec, build_graph
from engine.schedule import Schedule
from engine.schedule_checks import check_against_manifest, check_against_target
from engine.schedule_stages import predecessors
from engine.target.configuration import TargetSummary, read_target_config
from engine.warm_start import check_warm_start


@attrs.frozen(kw_only=True)
class RunPlan:
    """What a schedule comes to on this machine."""

    schedule: Schedule
    """With the defaults that depend on the target filled in."""
    host: PluginHost
    summary: TargetSummary
    drafter_config: DrafterConfig
    graph: Graph
    recipe: Recipe
    train: BatchPlan
    held_out: BatchPlan | None
    data_fingerprint: str
    memory: MemoryPlan
    optimizer_bytes: int
    """Of the optimizer's state for all masters."""
    total_steps: int
    """Where the learning rate ends."""
    stages: Mapping[str, PluginStage]
    """What plugins run, by name."""

    @property
    def target_folder(self) -> Path:
        return resolve(self.schedule.target.path)

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.schedule.drafter.dtype)

    @property
    def on_gpus(self) -> bool:
        """Whether any lane is on one."""
        return any(device.type == "cuda" for device in self.devices)

    @property
    def devices(self) -> list[torch.device]:
        """Every device of the run, once."""
        return [torch.device(name) for name in dict.fromkeys(lane.device for lane in self.graph.lanes)]


def plan_run(schedule: Schedule, *, one_lane_each: bool = False) -> RunPlan:
    """Resolve and check a schedule against its target, its documents and this machine.

    Args:
        one_lane_each: plan for the first target's and the first drafter's device alone.

    Raises:
        InputError: of the kind that fits; names key, value, finding and cure.
    """
    host = load_plugins(schedule.plugin)
    targets, drafters = resolve_devices(
        schedule.devices, micro_batches=schedule.train.micro_batches, layout=schedule.layout
    )
    if one_lane_each:
        targets, drafters = targets[:1], drafters[:1]
    graph = _graph(schedule, targets, drafters)
    stages = plugin_stages(schedule, host)
    backend = resolve_attention(schedule.drafter.attention, *drafters)
    summary = read_target_config(resolve(schedule.target.path))
    schedule = check_against_target(schedule, summary)
    config = drafter_config(schedule, summary)
    if schedule.drafter.init != "fresh":
        check_warm_start(Path(schedule.drafter.init), config)
    recipe = Recipe(
        features=host.choose("make_feature_path", config=config),
        weights=host.choose_named(
            "make_objective", "train.objective", schedule.train.objective, train=schedule.train
        ),
        backend=backend,
        attention=host.choose("make_attention", config=config),
        chunk=schedule.train.loss_chunk,
        max_anchors=schedule.data.max_anchors,
        seed=schedule.run.seed,
        context_noise=schedule.train.context_noise,
        checkpointing=schedule.train.checkpointing,
    )
    train, held_out = _open_data(schedule, summary, host)
    plan = _batches(schedule, train)
    micro_batches = plan.per_epoch * (schedule.run.epochs or 0)
    total_steps = schedule.run.steps or micro_batches // schedule.train.micro_batches
    if not total_steps:
        raise ScheduleError(
            f"train.micro_batches = {schedule.train.micro_batches}: run.epochs = {schedule.run.epochs} gives "
            f"only {micro_batches} micro-batches, not one step; lower the first or raise the second"
        )
    state = optimizer_bytes(host, config)
    return RunPlan(
        schedule=schedule,
        host=host,
        summary=summary,
        drafter_config=config,
        graph=graph,
        recipe=recipe,
        train=plan,
        held_out=_batches(schedule, _for_evaluation(held_out, schedule)) if held_out else None,
        data_fingerprint=train.fingerprint,
        memory=plan_memory(
            schedule,
            summary,
            config,
            targets=targets,
            drafters=drafters,
            depth=graph.depth,
            shapes=plan.statistics().shapes,
            optimizer_bytes=state,
            wrapped=lambda memory, target, device: host.wrap(
                "wrap_target_memory", memory, target=target, device=device
            ),
            split_fc=any(plugin.name == "plugins.split_fc" for plugin in host.plugins),
            warms_up=not one_lane_each,
        ),
        optimizer_bytes=state,
        total_steps=total_steps,
        stages=stages,
    )


def optimizer_bytes(host: PluginHost, config: DrafterConfig) -> int:
    """What a run's optimizer will hold for all master weights of its drafter."""
    weights = build_drafter(config, torch.device("meta"), torch.float32).parameters()
    return sum(host.choose("optimizer_state_bytes", shape=weight.shape) for weight in weights)


def _graph(schedule: Schedule, targets: list[str], drafters: list[str]) -> Graph:
    before = predecessors(schedule.stage)
    stages = [
        StageSpec(stage.name, stage.lane, before[stage.name], stage.exclusive, stage.barrier, stage.depth)
        for stage in schedule.stage
    ]
    lanes = [LaneSpec("target", index, name) for index, name in enumerate(targets)]
    lanes += [LaneSpec("drafter", index, name) for index, name in enumerate(drafters)]
    return build_graph(stages, lanes, schedule.train.micro_batches)


def drafter_config(schedule: Schedule, summary: TargetSummary) -> DrafterConfig:
    """The drafter of a schedule. From the target come only what the two must share."""
    drafter = schedule.drafter
    return DrafterConfig(
        hidden_size=summary.hidden_size,
        intermediate_size=drafter.intermediate_size,
        heads=drafter.heads,
        kv_heads=drafter.kv_heads,
        head_dim=drafter.head_dim,
        vocab_size=summary.vocab_size,
        block_size=drafter.block_size,
        target_layer_ids=drafter.target_layer_ids or (),
        num_target_layers=summary.layers,
        mask_token_id=drafter.mask_token_id,
        layer_types=drafter.layer_types or (FULL,) * drafter.layers,
        sliding_window=drafter.sliding_window,
        is_causal=drafter.is_causal,
        rope_theta=summary.rope_theta,
        rms_norm_eps=summary.rms_norm_eps,
        max_position_embeddings=summary.max_position_embeddings,
        dtype=drafter.dtype,
    )


def _open_data(
    schedule: Schedule, summary: TargetSummary, host: PluginHost
) -> tuple[Documents, Documents | None]:
    def opened(path: str, key: str) -> Documents:
        documents: Documents = host.choose(
            "open_data_source",
            path=path,
            vocab_size=summary.vocab_size,
            mask_token_id=schedule.drafter.mask_token_id,
        )
        if documents.manifest:
            check_against_manifest(
                schedule,
                documents.manifest.ids,
                vocab_size=summary.vocab_size,
                manifest_vocab_size=documents.manifest.vocab_size,
                tokenizer=_tokenizer_of(summary) if documents.manifest.tokenizer_fingerprint else None,
                manifest_tokenizer=documents.manifest.tokenizer_fingerprint,
                key=key,
            )
        return documents

    documents = opened(schedule.data.path, "data.path")
    if schedule.data.held_out is None:
        return documents, None
    if isinstance(schedule.data.held_out, float):
        return split_by_answer(documents, schedule.data.held_out)
    held_out = opened(schedule.data.held_out, "data.held_out")
    assert_disjoint(documents, held_out)
    return documents, held_out


def _tokenizer_of(summary: TargetSummary) -> str | None:
    """Fingerprint of the target's tokenizer; None where its folder holds none, as for a bare shape."""
    folder = Path(summary.folder)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return tokenizer_fingerprint(load_tokenizer(folder))


def _for_evaluation(held_out: Documents, schedule: Schedule) -> Documents:
    """The first `max_eval_documents` in an order that depends on seed and content alone."""
    limit = schedule.data.max_eval_documents
    if limit is None or limit >= len(held_out):
        return held_out
    order = stateless_hash(schedule.run.seed, torch.from_numpy(held_out.content_ids)).argsort(stable=True)
    return held_out.select(order[:limit].sort().values.numpy())


def _batches(schedule: Schedule, documents: Documents) -> BatchPlan:
    data = schedule.data
    return BatchPlan(
        documents,
        token_budget=data.token_budget,
        max_length=data.max_length,
        length_bucket=data.length_bucket,
        seed=schedule.run.seed,
    )
