"""A checkpoint's drafter and the whole target it was trained for, on one device, ready to decode.

Which target that is, and in which dtype the two computed, stands in the schedule that a run writes into
every checkpoint; a folder that came from elsewhere has none, and then the target must be named. A drafter
is worth nothing beside another target, and nothing fails there but its acceptance, so the target's
weights are compared with those of the training.
"""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import orjson
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from engine.builtin import resolve
from engine.checkpoint import CURSOR
from engine.data.chat import load_tokenizer
from engine.data.documents import Documents, split_by_answer
from engine.devices import available_devices
from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.export import fill_drafter, read_drafter_config, read_drafter_weights
from engine.errors import CheckpointError, InputError
from engine.plugin_host import WRAPPING_HOOKS, PluginHost, changes_numbers, load_plugins
from engine.randomness import stateless_hash
from engine.run_folder import resolve_checkpoint
from engine.runtime.launch_state import ColdKey
from engine.runtime.serializer import Serializer
from engine.runtime.tuning_cache import TuningCache, cache_folder, fingerprint
from engine.schedule import Schedule, structure
from engine.schedule import Target as TargetSection
from engine.target.configuration import TargetSummary, read_target_config
from engine.target.fingerprint import weights_fingerprint
from engine.target.loading import Target

Say = Callable[[str], None]

WEIGHTS_FACT = "target weights (fingerprint)"


@attrs.define(eq=False, kw_only=True, slots=False)
class ServedPair:
    """What speculative decoding needs, and what training left written about it."""

    checkpoint: Path
    schedule: Schedule | None
    """That the drafter was trained by; None where its folder holds none."""
    host: PluginHost
    target: Target
    """With its head."""
    drafter: Drafter
    """In the dtype that it was trained to compute in."""

    @property
    def config(self) -> DrafterConfig:
        return self.drafter.config

    @property
    def stop(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return self.target.summary.eos_token_ids

    @property
    def changed_by(self) -> tuple[str, ...]:
        """As `numbers_changed_by`; here target and drafter are as their files have them."""
        return numbers_changed_by(self.host)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's; DataError where its folder holds none."""
        return load_tokenizer(self.target.summary.folder)


def chosen_device(name: str | None) -> str:
    """A device of this machine; without a name the first GPU, or the CPU where there is none.

    Raises:
        InputError: there is no such device.
    """
    known = available_devices()
    if name is not None and name not in known:
        raise InputError(f"--device {name}: no such device here; there are {', '.join(known)}")
    return name or (known[1] if len(known) > 1 else known[0])


@contextmanager
def earlier_tuning(device: str, say: Say) -> Iterator[None]:
    """What this machine's runs tuned is used on a GPU, and added to: tuning takes longer than decoding.

    Each key that is tuned all the same is told, and kept at once, so that a command that is broken off,
    by whatever signal, need not tune it again.
    """
    if device == "cpu":
        yield
        return
    tuned = TuningCache(fingerprint(), cache_folder(), say)
    serializer = Serializer("tune")  # which tells of cold keys; no other thread launches anything here

    def keep(cold: ColdKey) -> None:
        say(f"tuned {cold.kernel} {cold.key}, {cold.seconds:.1f} s")
        tuned.save()

    serializer.on_cold = keep
    with ExitStack() as stack:
        tuned.install()
        stack.callback(tuned.uninstall)
        stack.callback(tuned.save)
        serializer.install()
        stack.callback(serializer.uninstall)
        yield


def load_pair(
    path: Path,
    *,
    target: str | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
    say: Say = lambda line: None,
) -> ServedPair:
    """Load the drafter of a checkpoint, or of a run's latest, and its target.

    Args:
        target: a folder or a built-in name, instead of the one that the schedule names.
        trust_remote_code: run model code that stands in that folder; of its own the schedule says it.
        device: `cpu` or `cuda:<n>`; by default the first GPU, or the CPU.
        say: takes lines about progress.

    Raises:
        InputError: of the kind that fits, where checkpoint, target or device cannot be used.
    """
    name = chosen_device(device)
    checkpoint = resolve_checkpoint(path)
    config = read_drafter_config(checkpoint)
    schedule, facts = trained_by(checkpoint)
    section = _target_section(checkpoint, schedule, config, target, trust_remote_code)
    folder = resolve(section.path)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder, and {checkpoint} needs its target; give --target FOLDER")
    _check_fit(checkpoint, config, read_target_config(folder))
    if section.init == "checkpoint":
        _check_weights(checkpoint, folder, facts, say, given=target is not None)
    host = load_plugins(schedule.plugin if schedule else ())
    # On a CPU it would say that packages are not installed, which they are.
    transformers.logging.set_verbosity_error()
    place = torch.device(name)
    loaded: Target = host.choose(
        "load_target",
        target=section,
        folder=folder,
        target_layer_ids=config.target_layer_ids,
        device=place,
        seed=schedule.run.seed if schedule else 0,
        keep_head=True,
        progress=say,
    )
    dtype = getattr(torch, schedule.drafter.dtype if schedule else config.dtype)
    drafter = build_drafter(config, place, dtype)
    fill_drafter(drafter, read_drafter_weights(checkpoint, config), str(checkpoint))
    drafter.requires_grad_(False).eval()
    pair = ServedPair(checkpoint=checkpoint, schedule=schedule, host=host, target=loaded, drafter=drafter)
    if pair.changed_by:
        say(of_plain_models(pair.changed_by))
    return pair


def numbers_changed_by(host: PluginHost) -> tuple[str, ...]:
    """Plugins that may change what target, drafter or feature path compute in training; named once each."""
    asked = [plugin for hook in WRAPPING_HOOKS for plugin in host.answering(hook)]
    named = [plugin.name for plugin in asked if plugin.origin != "default" and changes_numbers(plugin)]
    return tuple(dict.fromkeys(named))


def of_plain_models(changed_by: Sequence[str]) -> str:
    """What is to be said of figures of models as their files have them, where training's may be others."""
    return (
        f"{' and '.join(changed_by)} may change numbers in training, and so those of metrics.jsonl; figures "
        "here are of target and drafter as their files have them"
    )


def trained_by(checkpoint: Path) -> tuple[Schedule | None, dict[str, Any]]:
    """The effective schedule of a checkpoint, its own or its run's, and the facts it noted about its inputs.

    Raises:
        CheckpointError: they are there and cannot be read.
    """
    cursor, beside = checkpoint / CURSOR, checkpoint.resolve().parent.parent / "schedule.toml"
    try:
        if cursor.is_file():
            written = orjson.loads(cursor.read_bytes())
            text, facts = written["schedule"], written.get("facts", {})
        elif beside.is_file() and checkpoint.name.startswith("step_"):
            text, facts = beside.read_text(encoding="utf-8"), {}
        else:
            return None, {}
        return structure(tomllib.loads(text), name=checkpoint.name), facts
    except (KeyError, TypeError, ValueError) as error:  # of either format, and of bytes that are no text
        raise CheckpointError(
            f"{checkpoint}: the schedule that it was trained by cannot be read ({error}); "
            "copy the checkpoint again"
        ) from error


def held_out_documents(pair: ServedPair, data: str | None, limit: int | None) -> Documents:
    """Documents with an answer that the drafter was not trained on.

    Args:
        data: a path instead of the schedule's `data.held_out`.
        limit: at most so many, the first in an order by seed and content, as evaluation while training
            takes them.

    Raises:
        InputError: neither names any; or, as DataError, they cannot be used.
    """
    schedule = pair.schedule
    section = schedule.data if schedule else None

    def opened(path: str) -> Documents:
        documents: Documents = pair.host.choose(
            "open_data_source",
            path=path,
            vocab_size=pair.config.vocab_size,
            mask_token_id=pair.config.mask_token_id,
        )
        return documents

    held_out = data or (section.held_out if section else None)
    if isinstance(held_out, str):
        documents = opened(held_out)
    elif section is not None and held_out is not None:
        _, documents = split_by_answer(opened(section.path), held_out)
    else:
        raise InputError(f"{pair.checkpoint}: no held-out documents stand in its schedule; give --data PATH")
    answered = documents.first_labels > 0
    if not answered.any():
        raise InputError(f"{documents.path}: none of its {len(documents)} documents has an answer")
    seed = schedule.run.seed if schedule else 0
    order = stateless_hash(seed, torch.from_numpy(documents.content_ids)).argsort(stable=True).numpy()
    chosen = order[answered[order]][:limit]
    return documents.select(np.sort(chosen))


def _target_section(
    checkpoint: Path, schedule: Schedule | None, config: DrafterConfig, target: str | None, trust: bool
) -> TargetSection:
    if trust and target is None:
        raise InputError("--trust-remote-code: goes with --target FOLDER, whose code it lets run")
    if schedule is None and target is None:
        raise InputError(
            f"{checkpoint}: holds no schedule, so the target that it was trained for is not known; "
            "give --target FOLDER"
        )
    if schedule is None:
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if config.dtype == "bfloat16" else "float32"
        return TargetSection(path=str(target), dtype=dtype, trust_remote_code=trust)
    if target is None:
        return schedule.target
    trust = trust or schedule.target.trust_remote_code
    return attrs.evolve(schedule.target, path=target, init="checkpoint", trust_remote_code=trust)


def _check_fit(checkpoint: Path, config: DrafterConfig, summary: TargetSummary) -> None:
    """Sizes that a drafter has from its target."""
    for name, has, wanted in (
        ("hidden_size", summary.hidden_size, config.hidden_size),
        ("vocab_size", summary.vocab_size, config.vocab_size),
        ("layers", summary.layers, config.num_target_layers),
    ):
        if has != wanted:
            raise CheckpointError(
                f"{checkpoint}: was trained for a target of {name} {wanted}, and {summary.folder} has {has}; "
                "give its own with --target FOLDER"
            )


def _check_weights(checkpoint: Path, folder: Path, facts: dict[str, Any], say: Say, *, given: bool) -> None:
    then = facts.get(WEIGHTS_FACT)
    if then is None or then == weights_fingerprint(folder):
        return
    told = f"{folder} holds other weights than the target that {checkpoint} was trained for"
    if not given:
        raise CheckpointError(f"{told}; give the right one with --target, or this one to go on with it")
    say(told)
