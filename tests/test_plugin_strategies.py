"""The built-in strategies: each computes what it says, and the variants agree with the defaults."""

from typing import Any

import pytest
import torch
from blocks import HIDDEN, recipe_of, row_of, shared_weights, small_config, small_drafter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.dflash.anchors import draw_anchors
from engine.dflash.drafter import Drafter
from engine.dflash.masters import Masters, read_norms, share_out, step_factor, total_norm
from engine.dflash.objective import decay_weights, dpace_weights
from engine.dflash.training import drafter_blocks
from engine.errors import InputError
from engine.plugin_host import load_plugins
from engine.runtime.graph import LaneSpec
from engine.runtime.lane import Lane
from engine.runtime.parcel import Parcel
from engine.runtime.serializer import Serializer
from engine.schedule import Plugin, Train
from plugins.async_copy import lanes_through_host
from plugins.lazy_compile import check_compiler
from plugins.split_fc import split_projection


def answer(hook: str, *uses: str, options: dict[str, Any] | None = None, **question: Any) -> Any:
    return load_plugins([Plugin(use=use, options=options or {}) for use in uses]).choose(hook, **question)


def cpu_lane(role: Any = "drafter") -> Lane:
    return Lane(LaneSpec(role, 0, "cpu"))


# Objective and optimizer


def test_both_objectives_are_those_of_the_contract() -> None:
    train = Train(gamma=3.0, dpace_alpha=0.3)
    cross_entropy, supervised = torch.rand(5, 7), torch.rand(5, 7) > 0.3
    for name, expected in (("decay", decay_weights(3.0)), ("dpace", dpace_weights(0.3))):
        weights = answer("make_objective", name=name, train=train)
        assert torch.equal(weights(cross_entropy, supervised), expected(cross_entropy, supervised))


def test_adamw_updates_a_share_of_the_parameters_as_it_updates_the_whole() -> None:
    train = Train(betas=(0.8, 0.9), weight_decay=0.1)

    def updated(shares: list[list[str]]) -> dict[str, Tensor]:
        parameters = dict(small_drafter(small_config()).named_parameters())
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(len(name))
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for share in shares:
            optimizer = answer(
                "make_optimizer", parameters={name: parameters[name] for name in share}, train=train
            )
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()
            state = [value for of_one in optimizer.state.values() for value in of_one.values()]
            assert state and all(isinstance(value, Tensor) for value in state)
        return parameters

    names = list(updated([]))
    vectors = [name for name in names if name.endswith("norm.weight")]
    whole = updated([names])
    apart = updated([vectors, [name for name in names if name not in vectors]])
    before = updated([])
    for name in names:
        assert torch.equal(whole[name], apart[name])
        assert not torch.equal(whole[name], before[name])
        decayed = whole[name] + 0.01 * before[name].grad.sign()  # type: ignore[union-attr]
        factor = 1.0 if name in vectors else 1 - 0.01 * 0.1
        torch.testing.assert_close(decayed, before[name] * factor, rtol=0, atol=1e-5)


def muon_masters(shares: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Masters]:
    """One drafter's masters under Muon, shared out over several optimizers."""

    def make_optimizer(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = answer(
            "make_optimizer", "plugins.muon", parameters=parameters, train=Train(weight_decay=0.1)
        )
        return optimizer

    drafters = [small_drafter(small_config(), seed).to(dtype) for _ in range(shares)]
    sizes = {name: parameter.numel() for name, parameter in drafters[0].named_parameters()}
    names = share_out(sizes, shares)
    return [Masters(drafter, make_optimizer, part) for drafter, part in zip(drafters, names, strict=True)]


def muon_step(masters: list[Masters], seed: int, lr: float = 0.01, clip: float = 1.0) -> None:
    """Update everything that is kept from random gradients of full rank."""
    generator = torch.Generator().manual_seed(seed)
    parameters = masters[0].parameters
    sums = {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
    norms: dict[str, float] = {}
    for one in masters:
        norms |= read_norms(one.receive([{name: sums[name].clone() for name in sums}]))
    norm = total_norm(norms, list(sums)) / 2.0
    for one in masters:
        one.update(step_factor(norm, 2.0, clip), lr=lr)


def state_of(masters: list[Masters]) -> dict[str, Tensor]:
    return {name: value.clone() for one in masters for name, value in one.state().items()}


def assert_same_state(one: list[Masters], other: list[Masters]) -> None:
    found, expected = state_of(one), state_of(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_updates_masters_that_are_shared_out_as_it_updates_the_whole(dtype: torch.dtype) -> None:
    whole, apart = muon_masters(1, dtype=dtype), muon_masters(2, dtype=dtype)
    assert all(one.weights for one in apart)
    before = state_of(whole)
    for step in range(3):
        muon_step(whole, step)
        muon_step(apart, step)
    assert_same_state(apart, whole)
    assert not any(
        torch.equal(before[name], value) for name, value in state_of(whole).items() if name in before
    )


def test_muon_keeps_a_momentum_per_matrix_and_adamws_moments_per_vector() -> None:
    masters = muon_masters(1)
    muon_step(masters, 0)
    state = state_of(masters)
    for name, parameter in masters[0].parameters.items():
        keys = {"momentum_buffer"} if parameter.dim() == 2 else {"step", "exp_avg", "exp_avg_sq"}
        assert {full.partition(".")[0] for full in state if full.partition(".")[2] == name} == {
            "master",
            *keys,
        }


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(1, 1), (1, 2), (2, 1)])
def test_muon_goes_on_from_a_saved_state_bit_for_bit_however_it_is_shared_out(
    saved_by: int, resumed_by: int
) -> None:
    unbroken = muon_masters(saved_by)
    for step in range(2):
        muon_step(unbroken, step)
    resumed = muon_masters(resumed_by, seed=9)
    muon_step(resumed, 77)  # what it held before is replaced
    saved = state_of(unbroken)
    for one in resumed:
        one.load(saved)
    assert_same_state(resumed, unbroken)
    for masters in (unbroken, resumed):
        muon_step(masters, 2)
        muon_step(masters, 3)
    assert_same_state(resumed, unbroken)


def test_muon_moves_every_matrix_as_far_as_adamw_does_at_the_same_learning_rate() -> None:
    def distances(lr: float) -> dict[str, float]:
        masters = muon_masters(1)
        before = {name: weight.detach().clone() for name, weight in masters[0].weights.items()}
        muon_step(masters, 0, lr=lr)
        # Decay goes its own way, by lr · 0.1 of a weight.
        kept = {name: 1 - lr * 0.1 if weight.dim() == 2 else 1.0 for name, weight in before.items()}
        return {
            name: float((weight.detach() - before[name] * kept[name]).square().mean().sqrt())
            for name, weight in masters[0].weights.items()
        }

    at, at_half = distances(0.01), distances(0.005)
    shapes = {tuple(p.shape) for p in muon_masters(1)[0].parameters.values() if p.dim() == 2}
    assert len({max(shape) for shape in shapes}) > 1  # else a wrong scale could hide
    for name, parameter in muon_masters(1)[0].parameters.items():
        # AdamW's updates have a root mean square of 0.2 to 0.4 of lr on the way, and of lr at first.
        expected = 0.2 * 0.01 if parameter.dim() == 2 else 0.01
        assert at[name] == pytest.approx(expected, rel=0.25), name
        assert at_half[name] == pytest.approx(at[name] / 2, rel=1e-2), name


# Feature paths


def projections(taps: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """One projection of random taps: tap by tap, of the concatenation, and the latter in float64."""
    generator = torch.Generator().manual_seed(taps)
    parts = [torch.randn(256, hidden, generator=generator) for _ in range(taps)]
    weight = torch.randn(hidden, taps * hidden, generator=generator) * 0.02
    whole = torch.cat(parts, dim=1)
    return split_projection(parts, weight), whole @ weight.t(), whole.double() @ weight.double().t()


def test_a_projection_tap_by_tap_equals_the_concatenated_one() -> None:
    split, whole, _ = projections(3, 192)  # the built-in target's sizes
    assert (split - whole).abs().max() <= 1.2e-7 * whole.abs().max()


@pytest.mark.parametrize(("taps", "hidden"), [(2, 32), (5, 96), (3, 500)])
def test_a_projection_tap_by_tap_is_as_exact_as_the_concatenated_one(taps: int, hidden: int) -> None:
    # Where the product's own blocks don't end at the taps' borders, both round, each in its order.
    split, whole, exact = projections(taps, hidden)
    assert (split - exact).abs().max() <= 1.5 * (whole - exact).abs().max()


def both_paths() -> tuple[Any, Any]:
    config = small_config()
    return (
        answer("make_feature_path", config=config),
        answer("make_feature_path", "plugins.split_fc", config=config),
    )


def test_both_feature_paths_give_the_same_context_and_gradients() -> None:
    row = row_of((9, 3), (5, 1))
    taps = [torch.randn(2, 9, HIDDEN) for _ in range(2)]
    found = []
    for path in both_paths():
        drafter = small_drafter(small_config())
        packed = path.pack(taps, row)
        assert all(len(part) == row.length and not part[row.tokens :].any() for part in packed)
        context = path.context(drafter, packed)
        (context * torch.arange(HIDDEN)).sum().backward()
        gradients = [drafter.fc.weight.grad, drafter.hidden_norm.weight.grad]
        found.append([torch.cat(path.tap_views(packed), dim=1), context.detach(), *gradients])
    for concatenated, split in zip(*found, strict=True):
        assert concatenated.shape == split.shape
        assert (concatenated - split).abs().max() <= 1e-6 * concatenated.abs().max()


def test_tap_views_write_through_to_what_is_projected() -> None:
    row = row_of((9, 3), (5, 1))
    for path in both_paths():
        packed = path.pack([torch.ones(2, 9, HIDDEN)] * 2, row)
        for view in path.tap_views(packed):
            assert view.shape == (row.length, HIDDEN)
            view.zero_()
        assert not any(part.any() for part in packed)


class WidestTensor(TorchDispatchMode):
    """Remembers the widest last dimension of any tensor with T rows that an operation makes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.width = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[0] == self.rows:
                self.width = max(self.width, tensor.shape[1])
        return out


def test_split_fc_never_holds_the_taps_side_by_side() -> None:
    row = row_of((9, 3), (5, 1))
    widths = []
    for path in both_paths():
        drafter = small_drafter(small_config())
        with WidestTensor(row.length) as widest:
            packed = path.pack([torch.randn(2, 9, HIDDEN) for _ in range(2)], row)
            path.context(drafter, packed).sum().backward()
        widths.append(widest.width)
    assert widths == [2 * HIDDEN, HIDDEN]


# Transfers


@pytest.mark.parametrize("use", ["plugins.plain_copy", "plugins.async_copy"])
def test_on_one_device_a_parcel_is_handed_over_uncopied(use: str) -> None:
    target, drafter = cpu_lane("target"), cpu_lane()
    transfer = answer(
        "make_transfer", use, target_lanes=[target], drafter_lanes=[drafter], parcel_bytes=1 << 20
    )
    tensor = torch.arange(6.0)
    received = transfer.receive(drafter, Parcel.made(target, (tensor,), note="row"))
    assert received.note == "row"
    (taken,) = received.take(drafter)
    assert taken.data_ptr() == tensor.data_ptr() and received.released


class Place:
    """What the choice of a path looks at in a lane."""

    def __init__(self, device: str) -> None:
        self.name, self.device = device, torch.device(device)


def through_host(through: Any, targets: str, drafters: str, apart: str = "") -> list[str]:
    """GPU numbers of target lanes that get a ring; `apart` are GPUs that reach no other."""
    lanes: Any = [[Place(f"cuda:{number}") for number in numbers] for numbers in (targets, drafters)]

    def can_peer(a: torch.device, b: torch.device) -> bool:
        return str(a.index) not in apart and str(b.index) not in apart

    return [str(lane.device.index) for lane in lanes_through_host(through, *lanes, can_peer)]


def test_async_copy_goes_through_host_memory_where_gpus_cannot_peer_or_it_is_asked() -> None:
    assert through_host("auto", "012", "3") == []
    assert through_host("auto", "012", "3", apart="1") == ["1"]
    assert through_host("auto", "012", "3", apart="3") == ["0", "1", "2"]
    assert through_host("host", "012", "23") == ["0", "1", "2"]
    assert through_host("host", "0", "0") == []  # nothing to copy
    assert through_host("peer", "012", "3") == []
    with pytest.raises(InputError, match="no direct copies between cuda:1 and cuda:3; use through"):
        through_host("peer", "01", "3", apart="1")
    assert lanes_through_host("peer", [cpu_lane("target")], [cpu_lane()]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("options", [None, {"through": "auto"}, {"through": "host", "slots": 2}])
def test_a_parcel_arrives_whole_on_another_device(options: dict[str, Any] | None) -> None:
    gpus = torch.cuda.device_count()
    devices = [("cuda:0", f"cuda:{gpus - 1}"), ("cpu", "cuda:0"), ("cuda:0", "cpu")]
    for source, destination in devices:
        target, drafter = Lane(LaneSpec("target", 0, source)), Lane(LaneSpec("drafter", 0, destination))
        use = "plugins.plain_copy" if options is None else "plugins.async_copy"
        transfer = answer(
            "make_transfer",
            use,
            options=options,
            target_lanes=[target],
            drafter_lanes=[drafter],
            parcel_bytes=1 << 22,
        )
        for number in range(20):
            with target.active():
                if source != "cpu":
                    torch.cuda._sleep(2_000_000)  # the copy would be early without the parcel's event
                parcel = Parcel.made(
                    target, (torch.full((1 << 18,), float(number), device=source),), note=number
                )
            with drafter.active():
                received = transfer.receive(drafter, parcel)
                (tensor,) = received.take(drafter)
                assert tensor.device == drafter.device and received.note == number
                assert bool((tensor == number).all())
            del parcel, received, tensor


# Compilation


def wrapped(backend: str = "aot_eager", seed: int = 0, serializer: Serializer | None = None) -> Drafter:
    drafter: Drafter = answer(
        "wrap_drafter",
        "plugins.lazy_compile",
        options={"backend": backend},
        drafter=small_drafter(small_config(), seed),
        lane=cpu_lane(),
        serializer=serializer or Serializer("stage"),
    )
    return drafter


def run(drafter: Drafter, *documents: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor]]:
    row = row_of(*documents)
    anchors = draw_anchors(row, seed=0, epoch=0, max_anchors=6)
    taps = torch.randn(row.length, 2 * HIDDEN, generator=torch.Generator().manual_seed(0))
    context = drafter.context(taps)
    hidden, _ = drafter_blocks(drafter, shared_weights(), context, row, anchors, recipe_of())
    drafter.zero_grad()
    hidden.square().sum().backward()
    return hidden.detach(), {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


def test_compiled_layers_compute_what_the_layers_compute_and_keep_their_parameters() -> None:
    plain, compiled = small_drafter(small_config()), wrapped()
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for documents in ([(9, 3), (5, 1)], [(20, 3)], [(700, 3), (700, 2)]):
        (expected, gradients), (found, found_gradients) = run(plain, *documents), run(compiled, *documents)
        torch.testing.assert_close(found, expected)
        assert gradients.keys() == found_gradients.keys()
        for name in gradients:
            torch.testing.assert_close(found_gradients[name], gradients[name])


def test_layers_are_compiled_once_for_a_shape_and_not_for_every_micro_batch() -> None:
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    drafter = wrapped()
    compiled = []
    for lengths in [(9, 5), (20, 7), (600, 600), (700, 650), (1500, 1500), (2500, 1500)]:
        before = stats["unique_graphs"]
        run(drafter, *((length, 2) for length in lengths))
        compiled.append(stats["unique_graphs"] - before)
    # Two pieces for the first layer, whose input needs no gradient, and two for all others; at the
    # second context length the piece that reads the context is compiled again, its length a variable.
    assert compiled == [4, 0, 2, 0, 0, 0]


def test_a_backward_pass_is_compiled_with_its_forward_and_never_later() -> None:
    torch._dynamo.reset()
    triggers = []

    def started(about: Any) -> None:
        triggers.append(about.callback_trigger.name)

    torch._dynamo.callback_handler.register_start_callback(started)
    try:
        run(wrapped(), (9, 3))
    finally:
        torch._dynamo.callback_handler.remove_start_callback(started)
    assert triggers and "LAZY_BACKWARD" not in triggers


def test_only_a_call_with_new_shapes_keeps_other_lanes_from_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serializer = Serializer("stage")
    lanes = []
    compiling = serializer.compiling
    monkeypatch.setattr(serializer, "compiling", lambda lane: lanes.append(lane.name) or compiling(lane))
    drafter = wrapped(serializer=serializer)
    run(drafter, (9, 3))
    assert lanes == [cpu_lane().name] * 2  # one for each layer
    run(drafter, (12, 3))
    assert len(lanes) == 2
    run(drafter, (600, 3), (600, 3))
    assert len(lanes) == 4


def test_a_missing_compiler_is_said_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler("cpu")
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(
        InputError, match=r"cpu device needs a C\+\+ compiler, and no-such-compiler is not on PATH"
    ):
        check_compiler("cpu")
    with pytest.raises(Exception, match=r"wrap_drafter failed: InputError.*C\+\+ compiler") as error:
        wrapped("inductor")
    assert getattr(error.value, "exit_code", None) == 2
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    for device in ("cpu", "cuda"):
        with pytest.raises(InputError, match="leave lazy_compile out"):
            check_compiler(device)


@pytest.mark.slow
def test_generated_code_computes_what_the_layers_compute() -> None:
    (expected, _), (found, _) = run(small_drafter(small_config()), (9, 3)), run(wrapped("inductor"), (9, 3))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
