"""Streaming a checkpoint's tensors from safetensors shards into a model that already stands.

The model is built at its final place and dtype first, then each tensor it needs is read from the
memory-mapped shard and copied into its parameter: no second copy of the weights ever exists, and
layers, towers and heads that were cut away are not read. Every parameter has to be filled, and
every tensor of a kept layer has to find its parameter: a checkpoint that almost fits would train a
drafter on a target that nobody serves.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.errors import NonFinite, TargetError
from engine.target.configuration import read_json

INDEX_FILE = "model.safetensors.index.json"

# Where checkpoints keep the base model's tensors; the text part of a multimodal one comes second.
_BASE_PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "transformer.",
    "",
)
_HEAD_PREFIXES = ("", "language_model.", "model.language_model.", "model.")

# Constants that old checkpoints carry along and that models compute for themselves.
_COMPUTED = re.compile(r"(inv_freq|\.masked_bias|\.attn\.bias)$")


def find_tensors(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a checkpoint folder, by the tensor's name there.

    Raises:
        TargetError: no safetensors in the folder, an index that names a missing file, or a file
            whose header is torn; names the file.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise TargetError(f"{index}: no weight_map in it")
        for shard in sorted(set(weight_map.values())):
            if not (folder / shard).is_file():
                raise TargetError(
                    f"{folder / shard}: not there, but {INDEX_FILE} puts tensors into it; download it"
                )
        return {name: folder / shard for name, shard in weight_map.items()}
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [
            path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern)
        ]
        if pickles:
            raise TargetError(
                f"{folder}: weights only as {', '.join(sorted(pickles)[:3])}; pickled files can run "
                "code and are never read, so convert the checkpoint to safetensors"
            )
        raise TargetError(
            f"{folder}: no *.safetensors in it; point target.path at a whole checkpoint, or set "
            'target.init = "random" to draw weights from the configuration'
        )
    return {name: path for path in files for name in _names(path)}


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise TargetError(_torn(path, error)) from error


def _torn(path: Path, error: Exception) -> str:
    return f"{path}: not readable as safetensors ({error}); corrupt or cut short, download it again"


def _sources(
    wanted: Mapping[str, Tensor], base_prefix: str, found: Mapping[str, Path]
) -> tuple[dict[str, str], str]:
    """Checkpoint name of every wanted model name, and the prefix the base model has in the checkpoint."""
    base_names = [name.removeprefix(base_prefix) for name in wanted if name.startswith(base_prefix)]
    prefix = max(_BASE_PREFIXES, key=lambda prefix: sum(prefix + name in found for name in base_names))
    sources = {}
    for name in wanted:
        if name.startswith(base_prefix):
            candidates = [prefix + name.removeprefix(base_prefix)]
        else:
            candidates = [head + name for head in _HEAD_PREFIXES]
        source = next((candidate for candidate in candidates if candidate in found), None)
        if source is not None:
            sources[name] = source
    return sources, prefix


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def fill_from_checkpoint(
    model: nn.Module,
    folder: Path,
    *,
    base_prefix: str,
    layers_prefix: str,
    progress: Callable[[str], None] | Progress | None = None,
) -> None:
    """Copy every parameter and stored buffer of `model` out of a checkpoint folder.

    Args:
        model: stands on its device in its dtype; tied parameters are filled once. Values are cast.
        folder: holds `model.safetensors`, or shards with their index.
        base_prefix: what the base model's names start with in `model`, `"model."` as a rule.
        layers_prefix: what follows it for decoder layers, `"layers."` as a rule.
        progress: a rich progress display, or a function that is given a line per file.

    Raises:
        TargetError: files missing or torn; tensors missing, of another shape, or without a place.
        NonFinite: a weight is NaN or infinite; names the first such tensor.
    """
    found = find_tensors(folder)
    stored = model.state_dict(keep_vars=True)
    wanted = {name: tensor for name, tensor in stored.items()}
    first_names: dict[int, str] = {}
    for name, tensor in stored.items():
        if first_names.setdefault(id(tensor), name) != name:
            del wanted[name]
    sources, prefix = _sources(wanted, base_prefix, found)

    missing = [name for name in wanted if name not in sources]
    if missing:
        hint = "is it whole, and does config.json belong to it?"
        if any(".experts." in name for name in missing) and any(".experts.0." in name for name in found):
            hint = "it keeps a mixture's experts in separate tensors, and those cannot be loaded yet"
        raise TargetError(
            f"{folder}: {len(missing)} of the {len(wanted)} tensors that the target needs are not in the "
            f"checkpoint: {_listed(missing)}; {hint}"
        )
    kept = tuple(
        {
            f"{prefix}{layers_prefix}{name.removeprefix(base_prefix + layers_prefix).split('.')[0]}."
            for name in wanted
            if name.startswith(base_prefix + layers_prefix)
        }
    )
    used = set(sources.values())
    homeless = (
        [n for n in found if n.startswith(kept) and n not in used and not _COMPUTED.search(n)] if kept else []
    )
    if homeless:
        raise TargetError(
            f"{folder}: the model built from config.json has no place for {len(homeless)} tensors of the "
            f"checkpoint: {_listed(homeless)}; is the checkpoint quantised, or config.json another model's?"
        )

    by_file: dict[Path, list[str]] = {}
    for name, source in sources.items():
        by_file.setdefault(found[source], []).append(name)
    total = sum(tensor.nbytes for tensor in wanted.values())
    report = _Report(progress, files=len(by_file), total=total)
    sums: dict[str, Tensor] = {}
    for path, names in sorted(by_file.items()):
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    tensor = file.get_tensor(sources[name])
                    _copy(tensor, wanted[name], sources[name], path)
                    # A sum is not finite if a term is not, in one pass without a mask of the tensor's size.
                    sums[sources[name]] = wanted[name].detach().sum(dtype=torch.float32)
                    report.advance(wanted[name].nbytes)
        except (SafetensorError, OSError) as error:
            raise TargetError(_torn(path, error)) from error
        report.file_done(path)
    # One synchronisation for all of them, after the last copy is under way.
    for source, total_weight in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True):
        if not math.isfinite(total_weight):
            raise NonFinite(f"{found[source]}: {source} holds NaN or infinite values in the target's dtype")


@torch.no_grad()
def _copy(tensor: Tensor, parameter: Tensor, source: str, path: Path) -> None:
    if tensor.shape != parameter.shape:
        raise TargetError(
            f"{path}: {source} has shape {list(tensor.shape)}, config.json asks for {list(parameter.shape)}"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise TargetError(
            f"{path}: {source} is {tensor.dtype}; quantised weights cannot be loaded, take a 16-bit one"
        )
    parameter.copy_(tensor)


class _Report:
    """Tells either kind of progress display how far the reading is, in bytes and files."""

    def __init__(self, progress: Callable[[str], None] | Progress | None, files: int, total: int) -> None:
        self.say = None if isinstance(progress, Progress) else progress
        self.bar = progress if isinstance(progress, Progress) else None
        self.task = None if self.bar is None else self.bar.add_task("target weights", total=total)
        self.files, self.total = files, total
        self.files_done = self.bytes_done = 0

    def advance(self, count: int) -> None:
        self.bytes_done += count
        if self.bar is not None and self.task is not None:
            self.bar.advance(self.task, count)

    def file_done(self, path: Path) -> None:
        self.files_done += 1
        if self.say is not None:
            share = f"{self.bytes_done / 2**30:.2f} of {self.total / 2**30:.2f} GiB"
            self.say(f"target weights: {self.files_done} of {self.files} files, {share} ({path.name})")
