"""Loading a frozen target: a Hugging Face causal language model, cut behind its last tap.

The model is built empty on its device and in its dtype, so that 27 B parameters need neither a
second copy nor a pass through the CPU, and so that rotary frequencies, which are computed while
building, stay float32; casting a finished module would round them as well. Then the weights are
streamed in, or drawn there. The text part of a multimodal checkpoint is built from its nested
configuration as the causal model it is; no other tower is built or read. Nothing here reaches the
network.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
import torch
from rich.progress import Progress
from torch import Tensor, nn

from engine.errors import EngineError, TargetError
from engine.target.configuration import TargetSummary, read_target_config
from engine.target.kernels import bound_kernels, gpu_packages_hidden, route_cpu_calls_to_torch
from engine.target.taps import check_target_layer_ids
from engine.target.truncation import (
    captured_taps,
    decoder_layers,
    drop_final_norm,
    install_taps,
    truncated_settings,
    truncated_view,
)
from engine.target.weights import fill_from_checkpoint

__all__ = ["Target", "TargetSummary", "bound_kernels", "load_target", "read_target_config"]


class TapWalk(Protocol):
    """Another way through a target's layers."""

    def __call__(self, input_ids: Tensor) -> list[Tensor]:
        """As `Target.forward_taps`."""

    def kernels(self) -> Mapping[str, str]:
        """What its operations run as, under the names of `bound_kernels`."""


@attrs.frozen(eq=False)
class Target:
    """A frozen target on one device. Threads may share it: a forward changes nothing in it."""

    summary: TargetSummary
    model: Any
    """The Hugging Face causal model; without `keep_head` its layers end at the last tap."""
    target_layer_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    has_head: bool
    """Whether all layers and the final norm are there, so that `logits` can be computed."""
    trust_remote_code: bool
    _view: nn.Module = attrs.field(alias="view", repr=False)
    walk: TapWalk | None = attrs.field(default=None, repr=False)
    """What runs the layers in place of the Hugging Face modules, if something does."""
    notes: Mapping[str, str] = attrs.field(factory=dict)
    """By topic, what those who replaced the forward, or would not, have to say about it."""

    @property
    def embed_tokens(self) -> Tensor:
        """The token embedding [V, H], frozen; the drafter shares it."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def lm_head(self) -> Tensor:
        """The output matrix [V, H], frozen; the same tensor as `embed_tokens` where they are tied."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def forward_taps(self, input_ids: Tensor) -> list[Tensor]:
        """Outputs of the tapped layers for right-padded rows.

        Args:
            input_ids: int64 [rows, length] on the target's device, padded on the right with any id.

        Returns:
            One [rows, length, H] per tap, in the target's dtype, without gradient. What stands at
            padded positions means nothing.
        """
        if self.walk is not None:
            return self.walk(input_ids)
        return captured_taps(self._view, input_ids, len(self.target_layer_ids))

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> Tensor:
        """The whole target's next-token logits [rows, length, V] for right-padded rows.

        Raises:
            EngineError: the target was loaded without `keep_head`.
        """
        if not self.has_head:
            raise EngineError(
                "logits were asked of a target that was cut behind its last tap; load it with keep_head"
            )
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits

    def kernels(self) -> dict[str, str]:
        """Which implementation each operation runs as, and the notes; see `bound_kernels`."""
        replaced = {} if self.walk is None else self.walk.kernels()
        return {**bound_kernels(self.model), **replaced, **self.notes}


def load_target(
    folder: Path | str,
    *,
    target_layer_ids: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    init: Literal["checkpoint", "random"] = "checkpoint",
    keep_head: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] | Progress | None = None,
) -> Target:
    """Load a target, or draw one with the sizes that its `config.json` gives.

    Args:
        folder: a Hugging Face model folder; for `init="random"` it need only hold `config.json`.
        target_layer_ids: the taps, distinct, increasing, in [0, layers - 2].
        dtype: of weights and states; rotary frequencies are float32 whatever it is.
        init: where the weights come from. Drawn ones follow the model's own initialisation and
            depend on `seed`, dtype and kind of device.
        keep_head: keep the layers behind the last tap and the final norm, for `logits` and decoding.
            The embedding and the head's matrix are there in any case.
        trust_remote_code: run model code that stands in the folder.
        progress: a rich progress display, or a function that is given a line per file read.

    Raises:
        TargetError: the folder, its configuration or its weights cannot be used.
        ScheduleError: taps that cannot be.
        NonFinite: a weight is NaN or infinite.
    """
    summary = read_target_config(folder)
    check_target_layer_ids(target_layer_ids, summary.layers)
    if init == "checkpoint" and summary.quantization is not None:
        raise TargetError(
            f"{summary.folder}: its weights are quantised ({summary.quantization}) and their scales "
            "would be lost; point target.path at a 16-bit checkpoint"
        )
    device = torch.empty(0, device=device).device  # "cuda" becomes the numbered device it stands for

    def fill(model: Any, layers_prefix: str) -> None:
        if init == "random":
            _draw(model, device, seed)
        else:
            fill_from_checkpoint(
                model,
                summary.folder,
                base_prefix=f"{model.base_model_prefix}.",
                layers_prefix=layers_prefix,
                progress=progress,
            )

    return _assemble(summary, target_layer_ids, dtype, device, keep_head, trust_remote_code, fill)


def copy_target(
    target: Target, device: torch.device, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> Target:
    """The same target on another device: weights travel from device to device, nothing is read from disk.

    Args:
        copy: `copy(to, from)`, of tensors on two devices.
    """

    @torch.no_grad()
    def fill(model: Any, layers_prefix: str) -> None:
        for parameter, original in zip(model.parameters(), target.model.parameters(), strict=True):
            copy(parameter, original)

    return _assemble(
        target.summary,
        target.target_layer_ids,
        target.dtype,
        device,
        target.has_head,
        target.trust_remote_code,
        fill,
    )


def _assemble(
    summary: TargetSummary,
    target_layer_ids: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    keep_head: bool,
    trust_remote_code: bool,
    fill: Callable[[Any, str], None],
) -> Target:
    """Build a target's modules on a device, let `fill(model, layers_prefix)` give them weights, tap them."""
    kept = summary.layers if keep_head else max(target_layer_ids) + 1
    whole = _text_config(summary, trust_remote_code)
    model = _empty_model(_with_layers(whole, summary.layers, kept), dtype, device, trust_remote_code, summary)
    base = model.base_model
    layers_name, _ = decoder_layers(base, kept)
    if not keep_head:
        drop_final_norm(base)
    fill(model, f"{layers_name}.")
    model.eval().requires_grad_(False)
    _check_built(model, summary, device)
    if device.type == "cpu":
        route_cpu_calls_to_torch(model)

    taps = max(target_layer_ids) + 1
    view = truncated_view(base, _with_layers(whole, summary.layers, taps), kept, taps)
    install_taps(decoder_layers(view, taps)[1], target_layer_ids)
    return Target(
        summary=attrs.evolve(summary, tie_word_embeddings=bool(model.config.tie_word_embeddings)),
        model=model,
        target_layer_ids=tuple(target_layer_ids),
        device=device,
        dtype=dtype,
        has_head=keep_head,
        trust_remote_code=trust_remote_code,
        view=view,
    )


def _text_config(summary: TargetSummary, trust_remote_code: bool) -> Any:
    """The Hugging Face configuration of the text model."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            summary.folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise TargetError(
            f"{summary.folder / 'config.json'}: transformers cannot make a configuration of model_type "
            f"{summary.model_type!r} from it ({error})"
        ) from error
    text = config.get_text_config(decoder=True)
    # Small multimodal checkpoints state tying beside the text section only.
    if summary.tie_word_embeddings:
        text.tie_word_embeddings = True
    return text


def _with_layers(config: Any, layers: int, kept: int) -> Any:
    return type(config).from_dict(truncated_settings(config.to_dict(), layers, kept))


def _empty_model(
    config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, summary: TargetSummary
) -> Any:
    """The causal model on its device: parameters allocated and not filled, buffers computed, ties tied."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with gpu_packages_hidden(), no_init_weights(), device, _seeded(device, 0):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise TargetError(
            f"{summary.folder / 'config.json'}: no causal language model can be built for model_type "
            f"{summary.model_type!r} ({error})"
        ) from error
    model.tie_weights()
    # The same exceptions that `from_pretrained` makes for a model's delicate parts.
    in_float32 = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        in_float32.update(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if in_float32.intersection(name.split(".")):
            parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def _draw(model: Any, device: torch.device, seed: int) -> None:
    """Weights by the model's own initialisation; those that are there do not depend on where it was cut."""
    with _seeded(device, seed):
        model.init_weights()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        # Drawn last, it would follow from the number of layers before it.
        with _seeded(device, seed + 1):
            head.weight.normal_(std=getattr(model.config, "initializer_range", 0.02))


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from `seed` on this device inside the block; the generators' states are put back after it."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _check_built(model: Any, summary: TargetSummary, device: torch.device) -> None:
    """What would make taps or the shared matrices silently wrong."""
    path = summary.folder / "config.json"
    head = model.get_output_embeddings()
    expected = (summary.vocab_size, summary.hidden_size)
    for what, part in (("embedding", model.get_input_embeddings()), ("head", head)):
        if part is None or tuple(part.weight.shape) != expected:
            found = "none" if part is None else list(part.weight.shape)
            raise TargetError(
                f"{path}: the model's {what} is {found}, [{expected[0]}, {expected[1]}] was expected"
            )
    if getattr(head, "bias", None) is not None:
        raise TargetError(
            f"{path}: the model's head has a bias, which drafters that share its matrix do not have"
        )
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise TargetError(f"{path}: {name} is {buffer.dtype}; rotary frequencies have to stay float32")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device != device:
            raise TargetError(f"{path}: {name} stands on {tensor.device}, {device} was asked for")
