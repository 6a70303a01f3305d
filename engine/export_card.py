"""The README that an exported drafter carries: what it is for, how it was trained, how to serve it.

Everything in it comes from the schedule and the rows that the run left; what is not known is left out.
"""

import json
from typing import Any

from engine.dflash.configuration import FULL, SLIDING, DrafterConfig
from engine.plugin_host import host_of
from engine.plugin_loading import PluginRefused, load_plugin
from engine.schedule import Schedule
from engine.served_pair import numbers_changed_by


def render_card(
    config: DrafterConfig,
    *,
    target: str,
    layout: str,
    hybrid: bool,
    schedule: Schedule | None,
    figures: dict[str, Any],
) -> str:
    """A card in Markdown.

    Args:
        target: the target's name as a server would be given it.
        layout: `dflash` or `speculators`.
        hybrid: whether the target has recurrent layers, which SGLang wants to be told about.
        schedule: the training's, if it is known.
        figures: of the newest evaluation until this checkpoint: `step`, `accepted_length`,
            `held_out_loss`; empty where none was made.
    """
    lines = [
        "---",
        f"base_model: {json.dumps(target)}",
        "tags: [dflash, speculative-decoding]",
        "---",
        "",
        f"# DFlash drafter for {target}",
        "",
        f"Proposes {config.block_size - 1} tokens at once for that model to check. It reads its hidden",
        "states and uses its embedding and head, so it is worth nothing beside another one.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _facts(config, figures)),
        "",
        "## Serving",
        "",
        *_serving(config, target=target, layout=layout, hybrid=hybrid),
        *_changed_target(schedule),
    ]
    if schedule is not None:
        lines += ["", "## Training", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in _recipe(schedule)]
    return "\n".join(lines) + "\n"


def _facts(config: DrafterConfig, figures: dict[str, Any]) -> list[tuple[str, Any]]:
    kinds = [
        f"{config.layer_types.count(kind)} {kind}" for kind in (SLIDING, FULL) if kind in config.layer_types
    ]
    facts: list[tuple[str, Any]] = [
        ("layers", f"{config.layers}: {', '.join(kinds)}"),
        ("block size", config.block_size),
        ("target layers that are read", ", ".join(map(str, config.target_layer_ids))),
        ("mask token", config.mask_token_id),
        ("weights", config.dtype),
    ]
    if config.sliding_window and SLIDING in config.layer_types:
        facts.append(("sliding window", f"{config.sliding_window} tokens"))
    if figures.get("accepted_length") is not None:
        accepted = f"{figures['accepted_length']:.2f} of {config.block_size}"
        facts.append(
            ("accepted length on held-out answers", f"{accepted} tokens per verification, greedy, walked")
        )
        if figures.get("held_out_loss") is not None:
            facts.append(("held-out loss", f"{figures['held_out_loss']:.4f} nats"))
        facts.append(("measured after", f"{figures['step']} steps"))
    return facts


def _serving(config: DrafterConfig, *, target: str, layout: str, hybrid: bool) -> list[str]:
    mixed = len(set(config.layer_types)) > 1
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""  # without it vLLM refuses a mix of layers
    speculative = {"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": config.block_size - 1}
    vllm = [
        "vLLM:",
        "",
        "```",
        f"{runner}vllm serve {target} \\",
        f"  --speculative-config '{json.dumps(speculative)}'",
        "```",
    ]
    if layout == "speculators":
        lead = ["`DRAFTER` stands for this folder, in the layout of the speculators library.", ""]
        return [*lead, *vllm, "", "or `vllm serve DRAFTER`, which finds the target by its name."]
    sglang = [
        "SGLang:",
        "",
        "```",
        f"python -m sglang.launch_server --model-path {target} \\",
        "  --speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER \\",
        f"  --speculative-num-draft-tokens {config.block_size}"
        + (" --mamba-scheduler-strategy extra_buffer" if hybrid else ""),
        "```",
    ]
    return ["`DRAFTER` stands for this folder.", "", *sglang, "", *vllm]


def _changed_target(schedule: Schedule | None) -> list[str]:
    """What a server has to know of target and drafter in training, if these were not the plain ones."""
    if schedule is None:
        return []
    try:
        changed_by = numbers_changed_by(
            host_of([load_plugin(one.use, one.options, "schedule") for one in schedule.plugin])
        )
    except PluginRefused as error:  # the drafter is served without it
        return ["", f"Whether a plugin changed numbers in training is not known here: {error}."]
    if not changed_by:
        return []
    return [
        "",
        f"In training {' and '.join(changed_by)} may have changed the numbers of target or drafter. Accepted",
        "length and loss above are of them as they were in training; a server runs them as their files have",
        "them. `evaluate` on this folder measures that.",
    ]


def _recipe(schedule: Schedule) -> list[tuple[str, Any]]:
    train, data, run = schedule.train, schedule.data, schedule.run
    weighting = train.objective
    if train.objective == "decay":
        weighting += f", gamma {train.gamma:g}"
    elif train.objective == "dpace":
        weighting += f", alpha {train.dpace_alpha:g}"
    plugins = ", ".join(plugin.use for plugin in schedule.plugin)
    recipe: list[tuple[str, Any]] = [
        ("length", f"{run.steps} steps" if run.steps else f"{run.epochs} epochs"),
        ("data", data.path),
        ("objective", weighting),
        ("learning rate", f"{train.lr:g} to {train.min_lr:g}, warm-up {train.warmup:g}, cosine"),
        ("per step", f"{train.micro_batches} micro-batches of {data.token_budget} tokens"),
        ("anchors per micro-batch", data.max_anchors),
        ("longest document", f"{data.max_length} tokens"),
        ("clip", train.clip),
        ("seed", run.seed),
    ]
    if train.context_noise:
        recipe.append(("context noise", train.context_noise))
    if schedule.drafter.init != "fresh":
        recipe.append(("begun from", schedule.drafter.init))
    return [*recipe, ("plugins", plugins)] if plugins else recipe
