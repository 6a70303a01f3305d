"""The default target loader: a Hugging Face causal model, cut behind its last tap where nobody decodes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import torch
from rich.progress import Progress

from engine.hookspecs import hookimpl
from engine.schedule import Target as TargetSection
from engine.target.loading import Target
from engine.target.loading import load_target as load_huggingface_target


@attrs.frozen(kw_only=True)
class Options:
    """None: the model's path and dtype stand in [target]."""


class HuggingFaceTarget:
    @hookimpl
    def load_target(
        self,
        target: TargetSection,
        folder: Path,
        target_layer_ids: Sequence[int],
        device: torch.device,
        seed: int,
        keep_head: bool,
        progress: Callable[[str], None] | Progress,
    ) -> Target:
        return load_huggingface_target(
            folder,
            target_layer_ids=target_layer_ids,
            dtype=getattr(torch, target.dtype),
            device=device,
            init=target.init,
            keep_head=keep_head,
            trust_remote_code=target.trust_remote_code,
            seed=seed,
            progress=progress,
        )


def make(options: Options) -> HuggingFaceTarget:
    return HuggingFaceTarget()
