"""Where a drafter's step spends its time: the Qwen3.6-27B drafter on one GPU, against its floor.

    python -m tools.profile_drafter_step                            # contexts of 8,192 and 4,096
    python -m tools.profile_drafter_step --context 8192 --tiles     # FlexAttention with other tiles, too

Weights and taps are random, every token is supervised, all anchor slots are used. Steps are launched one
behind the other, as lanes do, and the medians are of the device's time between their ends; milliseconds
of the host are those of launching one step on an idle device. The floor is the step's own products (no
recomputation, anchor slots skipped in the head, only pairs that a query sees in the attention) at the rate
of an 8192³ bfloat16 product in this process. Peak memory is all that is allocated, frozen embedding and
head included, gradients kept in the weights' dtype.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from torch.nn.attention.flex_attention import BlockMask

from engine.builtin import resolve
from engine.dflash.anchors import draw_anchors
from engine.dflash.attention import flex_on, prepare_attention
from engine.dflash.attention_mask import VisibleRuns, block_mask, visible_runs
from engine.dflash.configuration import DrafterConfig
from engine.dflash.drafter import Drafter, build_drafter
from engine.dflash.masters import Masters
from engine.dflash.objective import ChunkSoftmax, chunk_softmax, decay_weights, head_cross_entropy
from engine.dflash.packing import PackedRow, pack_row
from engine.dflash.training import Packed, Recipe, SharedWeights, training_loss
from engine.planning import drafter_config
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.serializer import Serializer
from engine.schedule import Train, load_schedule
from engine.target.configuration import read_target_config
from plugins.adamw import AdamW
from plugins.concat import ConcatenatedTaps
from plugins.lazy_compile import LazyCompile, Options

SCHEDULE = Path(__file__).parent.parent / "schedules" / "qwen3_6_27b_1gpu.toml"
ANCHORS, DOCUMENT = 512, 2048
WARM_UP, REPEATS, TRACED = 3, 8, 3
PRODUCT = 8192
CHUNKS = (1024, 1280, 1536, 1920, 2560, 3840)
SQUARE: dict[str, object] = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}
TILES: tuple[dict[str, object], ...] = (
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 8},
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_stages": 2, "fwd_num_warps": 8},
    SQUARE | {"bwd_num_stages": 3, "bwd_num_warps": 4},
    SQUARE | {"bwd_num_stages": 2, "bwd_num_warps": 4},
    {"PRESCALE_QK": True},
)
"""Options of FlexAttention's kernels that are tried beside the compiler's own choice."""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def median_ms(work: Callable[[], object], repeats: int = REPEATS, warm_up: int = WARM_UP) -> float:
    """Device milliseconds from one end of `work` to the next, launched back to back."""
    for _ in range(warm_up):
        work()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    ends[0].record()
    for end in ends[1:]:
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(ends, ends[1:], strict=False))


def host_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """Milliseconds of the calling thread to launch `work` on an idle device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def product_rate() -> float:
    """FLOP/s of a large bfloat16 product."""
    a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * PRODUCT**3 / (median_ms(lambda: a @ b, repeats=30, warm_up=10) / 1e3)


@attrs.frozen(eq=False)
class Setting:
    """What a step is run on."""

    drafter: Drafter
    shared: SharedWeights
    row: PackedRow
    packed: Packed
    recipe: Recipe

    def step(self) -> None:
        """Forward and backward; the gradients are dropped."""
        loss, _ = training_loss(self.drafter, self.shared, self.packed, self.row, epoch=0, recipe=self.recipe)
        loss.loss_sum.backward()
        self.drafter.zero_grad(set_to_none=True)


def packed_row(context: int, c: DrafterConfig) -> PackedRow:
    """Documents of equal length, all but their first token supervised."""
    rows = max(1, context // DOCUMENT)
    length = context // rows
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, c.mask_token_id, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[:, 0] = False
    return pack_row(ids, mask, torch.full((rows,), length), torch.arange(rows))


def pairs(runs: VisibleRuns) -> int:
    """Of a query and a key that it sees."""
    seen = (runs.context_end - runs.context_begin) + (runs.block_end - runs.block_begin)
    return int(seen.sum())


def floor_flop(row: PackedRow, c: DrafterConfig) -> dict[str, float]:
    """The products of one step, forward and backward, by part."""
    T, Q = row.length, ANCHORS * c.block_size
    H, F, A, K = c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = Q * (2 * H * A + 3 * H * F) + (T + Q) * 2 * H * K
    anchors = draw_anchors(row, seed=0, epoch=0, max_anchors=ANCHORS)
    runs = [visible_runs(anchors, row.starts, T, c, kind) for kind in c.layer_types]
    return {
        "projection of the taps": 2 * 2.0 * T * len(c.target_layer_ids) * H * H,  # taps need no gradient
        "layers": 3 * 2.0 * c.layers * layer,
        "head": 2 * 2.0 * ANCHORS * (c.block_size - 1) * H * c.vocab_size,  # nor does the head
        "attention": 3 * 4.0 * sum(map(pairs, runs)) * A,
    }


def table(work: Callable[[], object], rows: int = 25) -> None:
    """The kernels that a step spends most of its time in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(TRACED):
            work()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = kernels.setdefault(event.name, [0, 0.0])
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us() / 1e3
    total = sum(ms for _, ms in kernels.values()) / TRACED
    count = sum(number for number, _ in kernels.values()) / TRACED
    say(f"    kernels: {total:.1f} ms and {count:.0f} launches a step")
    for name, (number, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])[:rows]:
        say(f"    {ms / TRACED:8.2f} ms {number / TRACED:6.0f} ×  {name[:110]}")


def measure_step(setting: Setting, name: str, rate: float) -> None:
    """One context length, eager or compiled."""
    begin = time.perf_counter()
    setting.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    ms = median_ms(setting.step)
    torch.cuda.reset_peak_memory_stats()
    setting.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9
    floor = sum(floor_flop(setting.row, setting.drafter.config).values()) / rate * 1e3
    say(
        f"{name}, context {setting.row.length}: {ms:.1f} ms = {ms / floor:.2f} × floor ({floor:.1f} ms), "
        f"host {host_ms(setting.step):.1f} ms, peak {peak:.1f} GB, first step {first:.1f} s"
    )


def measure_mask(row: PackedRow, c: DrafterConfig, device: torch.device) -> None:
    """What precedes the drafter: anchors drawn on the CPU, masks made on the device."""
    anchors = draw_anchors(row, seed=0, epoch=0, max_anchors=ANCHORS)

    def masks() -> None:
        prepare_attention("flex", anchors, row.starts, row.length, c, device)

    def draw() -> None:
        draw_anchors(row, seed=0, epoch=0, max_anchors=ANCHORS)

    say(
        f"    block masks {median_ms(masks):.2f} ms of device, {host_ms(masks):.2f} ms of host; "
        f"anchors drawn in {host_ms(draw):.2f} ms of host"
    )


def measure_attention(
    row: PackedRow, c: DrafterConfig, device: torch.device, rate: float, tiles: bool
) -> None:
    """FlexAttention alone, forward and backward, by kind of layer and options of its kernels."""
    anchors = draw_anchors(row, seed=0, epoch=0, max_anchors=ANCHORS)
    queries, d = ANCHORS * c.block_size, c.head_dim
    q, k, v = (
        torch.randn(1, slots, heads, d, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for slots, heads in (
            (queries, c.heads),
            (row.length + queries, c.kv_heads),
            (row.length + queries, c.kv_heads),
        )
    )
    change = torch.randn_like(q)
    attend = flex_on(device, queries, row.length)
    moved = attrs.evolve(anchors, slot=anchors.slot.to(device), document=anchors.document.to(device))
    for kind in dict.fromkeys(c.layer_types):
        runs = visible_runs(moved, row.starts.to(device), row.length, c, kind)
        mask = block_mask(runs)
        floor = 12.0 * pairs(runs) * c.heads * d / rate * 1e3
        for options in ({}, *(TILES if tiles else ())):

            def both(mask: BlockMask = mask, options: dict[str, object] = options) -> None:
                given = {"kernel_options": options} if options else {}
                out = attend(q, k, v, block_mask=mask, enable_gqa=True, **given)
                torch.autograd.grad(out, (q, k, v), change)

            try:
                ms = median_ms(both)
            except Exception as error:  # a tile that does not fit into shared memory, for one
                say(f"{kind}, {options}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
                continue
            say(f"{kind} {options or ''}: {ms:.2f} ms (floor {floor:.2f} ms)")


def measure_optimizer(setting: Setting, gradient_dtype: torch.dtype) -> None:
    """A second micro-batch's gradients into the sums, and an update of everything."""
    train = Train()
    masters = Masters(
        setting.drafter,
        lambda parameters: AdamW().make_optimizer(parameters, train),
        gradient_dtype=gradient_dtype,
    )
    times: dict[str, list[float]] = {"accumulate": [], "step": [], "step's host": []}
    for _ in range(5):
        for _ in range(2):
            for parameter in setting.drafter.parameters():
                parameter.grad = torch.zeros_like(parameter)
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            events[0].record()
            masters.accumulate()
            events[1].record()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        events[2].record()
        masters.step(100.0, lr=0.0, clip=1.0)
        times["step's host"].append((time.perf_counter() - begin) * 1e3)
        events[3].record()
        torch.cuda.synchronize()
        times["accumulate"].append(events[0].elapsed_time(events[1]))
        times["step"].append(events[2].elapsed_time(events[3]))
    figures = ", ".join(f"{what} {statistics.median(ms):.1f} ms" for what, ms in times.items())
    say(f"optimizer, gradients in {str(gradient_dtype).removeprefix('torch.')}: {figures}")


def measure_chunks(setting: Setting, rate: float) -> None:
    """The head's share by the rows whose logits exist at a time."""
    c = setting.drafter.config
    rows = ANCHORS * (c.block_size - 1)
    hidden = torch.randn(rows, c.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, c.vocab_size, (rows,), device="cuda")
    floor = 4.0 * rows * c.hidden_size * c.vocab_size / rate * 1e3
    ways = [("fused", setting.drafter.softmax, chunk) for chunk in CHUNKS]
    for name, softmax, chunk in [*ways, ("eager", chunk_softmax, setting.recipe.chunk)]:

        def both(softmax: ChunkSoftmax = softmax, chunk: int = chunk) -> None:
            head_cross_entropy(hidden, setting.shared.lm_head, labels, chunk, softmax=softmax)

        ms = median_ms(both, repeats=4, warm_up=2)
        say(
            f"head and softmax, {name}, {chunk} rows: {ms:.1f} ms = {ms / floor:.2f} × floor ({floor:.1f} ms)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 4096])
    parser.add_argument("--compiled-only", action="store_true", help="leave the eager step out")
    parser.add_argument("--chunk", type=int, default=Train().loss_chunk, help="rows of logits at a time")
    parser.add_argument("--checkpointing", action="store_true", help="run layers again in the backward pass")
    parser.add_argument("--tiles", action="store_true", help="try FlexAttention with other tiles")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("measuring needs a GPU, and torch sees none\n")
        sys.exit(2)
    lane = Lane(LaneSpec("drafter", 0, "cuda:0"))
    with lane.active():
        measure(lane, options)


def measure(lane: Lane, options: argparse.Namespace) -> None:
    device, contexts = lane.device, options.context
    c = drafter_config(load_schedule(SCHEDULE), read_target_config(resolve("builtin:qwen3.6-27b")))
    rate = product_rate()
    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: {rate / 1e12:.0f} TFLOP/s")
    drafter = build_drafter(c, device, torch.bfloat16)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(float(parameter.dim() == 1), parameter.shape[-1] ** -0.5)
    drafter.requires_grad_(True)
    shape = (c.vocab_size, c.hidden_size)
    embedding, head = (torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02) for _ in "eh")
    recipe = Recipe(
        features=ConcatenatedTaps(c.hidden_size),
        weights=decay_weights(7.0),
        backend="flex",
        chunk=options.chunk,
        max_anchors=ANCHORS,
        seed=0,
        checkpointing=options.checkpointing,
    )

    def setting(context: int) -> Setting:
        row = packed_row(context, c)
        width = len(c.target_layer_ids) * c.hidden_size
        taps = torch.randn(row.length, width, device=device, dtype=torch.bfloat16)
        return Setting(drafter, SharedWeights(embedding, head), row, (taps,), recipe)

    for context in contexts:
        flop = floor_flop(packed_row(context, c), c)
        parts = ", ".join(f"{name} {value / rate * 1e3:.1f}" for name, value in flop.items())
        say(f"floor in ms at context {context}: {parts}")
        if not options.compiled_only:
            measure_step(setting(context), "eager", rate)
    LazyCompile(Options()).wrap_drafter(drafter, lane, Serializer("none"))
    for context in contexts:
        one = setting(context)
        measure_step(one, "compiled", rate)
        if context == contexts[0]:
            table(one.step)
    one = setting(contexts[0])
    measure_mask(one.row, c, device)
    measure_attention(one.row, c, device, rate, options.tiles)
    measure_chunks(one, rate)
    for dtype in (torch.bfloat16, torch.float32):
        measure_optimizer(one, dtype)


if __name__ == "__main__":
    main()
