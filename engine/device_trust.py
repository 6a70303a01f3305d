"""Whether this machine's devices can be trusted, asked before a run spends hours on them.

Three things go wrong in silence: copies between GPUs that arrive changed, kernels that compute wrong
numbers on a GPU they were not tried on, and attention that was compiled wrongly. Copies are probed
before weights are loaded, since weights travel by them; a pair that fails is copied through host memory
in this run. Kernels are compared once the target is in place, unless a fused target in bfloat16 brought its
own and had them compared, and attention once it is compiled; there is no way around those, so a difference
ends the run. On CPUs nothing is probed and nothing is compared.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from engine.copy_probe import COPY_SIZES, copy_differences, patterns
from engine.dflash.anchors import draw_anchors
from engine.dflash.attention_check import attention_errors, tolerance
from engine.dflash.packing import pack_row
from engine.errors import DifferenceFound
from engine.runtime.links import Links, Pair, peer_access
from engine.target.kernel_check import KERNEL_TOLERANCE, compared_already, has_kernels, kernel_errors
from engine.target.loading import Target
from engine.training_parts import TrainingParts
from engine.warm_up import packed_rows

Say = Callable[[str], None]
Copy = Callable[[Tensor, Tensor], object]
"""`copy(to, from)`"""


def probed_links(devices: Iterable[torch.device], say: Say) -> Links:
    """How a run's devices copy to each other, after trying every pair of its GPUs both ways.

    Args:
        say: takes a line about each pair that is copied through host memory, and one about the rest.

    Raises:
        DifferenceFound: copies arrive changed through host memory as well.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    return probe_pairs([(one, other) for one in gpus for other in gpus if one != other], say)


def probe_pairs(
    pairs: Sequence[Pair],
    say: Say,
    *,
    copy: Copy | None = None,
    staged_copy: Copy | None = None,
    can_peer: Callable[[torch.device, torch.device], bool] = peer_access,
    sizes: Sequence[int] = COPY_SIZES,
) -> Links:
    """`probed_links` for given (source, destination).

    Args:
        copy: how a pair is copied directly; torch's by default. staged_copy: how through host memory;
            the links' own by default.
        sizes: bytes of the patterns.
    """
    if not pairs:
        return Links()
    begin = time.perf_counter()
    sent = patterns(sizes)
    reasons: dict[Pair, str] = {}
    for source, destination in pairs:
        if not can_peer(source, destination):
            reasons[source, destination] = "no peer access"
        elif wrong := copy_differences(str(source), str(destination), sent, copy=copy):
            reasons[source, destination] = f"copies arrive corrupted ({_counted(wrong)})"
    links = Links(reasons)
    for (source, destination), reason in reasons.items():
        if wrong := copy_differences(str(source), str(destination), sent, copy=staged_copy or links.copy):
            raise DifferenceFound(
                f"{source} → {destination}: copies through host memory arrive corrupted ({_counted(wrong)}), "
                f"and direct ones cannot be used: {reason}; look for faults of memory or bus with "
                "`python -m engine doctor`, or run on other devices"
            )
        say(f"{source} → {destination}: {reason}; copied through host memory from here on")
    direct = len(pairs) - len(reasons)
    seconds = time.perf_counter() - begin
    say(f"copies between devices: {direct} of {len(pairs)} ways direct, bit for bit right, {seconds:.1f} s")
    return links


def _counted(wrong: dict[int, int]) -> str:
    return "; ".join(f"{count:,} of {size:,} bytes" for size, count in wrong.items())


def check_kernels(parts: TrainingParts, say: Say, loaded: Sequence[Target] = ()) -> None:
    """Compare the kernels of each target device with plain PyTorch.

    Args:
        loaded: the targets as they were before plugins wrapped them, where they have. The modules of those
            that became a fused walk, which is compared by itself, are left out.

    Raises:
        DifferenceFound: names operation, kernel, device and error.
        EngineError: a kernel failed.
    """
    begin = time.perf_counter()
    pairs = list(zip(loaded or parts.targets, parts.targets, strict=True))
    targets = {target.device: target for target, used in pairs if not compared_already(used)}
    left_out = {target.device for target, used in pairs if compared_already(used) and has_kernels(target)}
    if left_out := left_out - targets.keys():
        where = ", ".join(sorted(map(str, left_out)))
        say(
            f"kernels of the Hugging Face module on {where}: not compared; the fused target that runs in its "
            "place was, with float32"
        )
    errors = [error for target in targets.values() for error in kernel_errors(target)]
    if bad := [error for error in errors if error.bad]:
        raise DifferenceFound(
            f"kernels compute wrong numbers: {'; '.join(map(str, bad))}; install versions that support this "
            "GPU (`python -m engine doctor` names pairs), or uninstall the package for PyTorch's own, slower"
        )
    if errors:
        worst = {
            error.operation: max(e.error for e in errors if e.operation == error.operation)
            for error in errors
        }
        shown = ", ".join(f"{operation} {error:.1e}" for operation, error in worst.items())
        say(
            f"kernels against plain PyTorch: {shown} (at most {KERNEL_TOLERANCE:g}), "
            f"{time.perf_counter() - begin:.1f} s"
        )


def check_attention(parts: TrainingParts, say: Say, *, backward: bool = True) -> None:
    """Compare compiled attention of each drafter device with the dense one, on the run's shortest row.

    A warm-up has compiled that row's code; without one it is compiled here.

    Args:
        backward: compare gradients too; FlexAttention has none on a CPU.

    Raises:
        DifferenceFound: names layer type, what differs, device and error.
    """
    recipe, plan = parts.recipe, parts.plan
    if recipe.backend == "dense":
        return
    begin = time.perf_counter()
    batch = packed_rows(plan.train)[-1]
    row = pack_row(batch.input_ids, batch.loss_mask, batch.lengths, batch.document_ids)
    anchors = draw_anchors(row, seed=recipe.seed, epoch=0, max_anchors=recipe.max_anchors)
    worst = 0.0
    for device in dict.fromkeys(part.shared.lm_head.device for part in parts.drafters):
        errors = attention_errors(
            recipe.attention,
            recipe.backend,
            row,
            anchors,
            plan.drafter_config,
            device,
            plan.compute_dtype,
            backward=backward,
        )
        for (kind, what), error in errors.items():
            if not error <= tolerance(what):
                raise DifferenceFound(
                    f"{recipe.backend} attention on {device}: {what} of a {kind} layer is {error:.2g} from "
                    f'the dense one (at most {tolerance(what):g}); set drafter.attention = "dense", or '
                    "install another torch and Triton"
                )
            worst = max(worst, error)
    say(
        f"{recipe.backend} attention against the dense one: {worst:.1e} at most, "
        f"{time.perf_counter() - begin:.1f} s"
    )
