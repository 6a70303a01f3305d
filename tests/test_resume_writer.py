"""Checkpoints are written beside the training, one at a time, whole or not at all."""

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import orjson
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_runs import plain_loop, small_project, write_config

from engine import checkpoint, checkpoint_writer
from engine.checkpoint import read_checkpoint
from engine.checkpoint_writer import CheckpointWriter, Written
from engine.errors import CheckpointError, DiskError, EngineError
from engine.plain import PlainLoop, train_step
from engine.run import run
from engine.run_folder import RunFolder
from engine.runtime.background import Background
from engine.runtime.host_copy import HostCopy
from engine.runtime.inbox import Stop
from engine.schedule import load_schedule
from engine.target.fingerprint import config_fingerprint, vocabulary_fingerprint, weights_fingerprint
from engine.tensor_file import read_header, write_tensors

TENSORS = {
    "a": torch.randn(5, 7),
    "b": torch.randn(3).bfloat16(),
    "c": torch.tensor(4.0),
    "d": torch.arange(6).reshape(2, 3).T,
    "e": torch.tensor([True]),
    "f": torch.empty(0, 2),
}


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> PlainLoop:
    """After a step, so that the optimizer has its state."""
    one = plain_loop(small_project(tmp_path_factory.mktemp("project")))
    train_step(one, 0)
    return one


@attrs.define
class Opened:
    writer: CheckpointWriter
    folder: RunFolder
    told: list[Written]
    said: list[str]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.checkpoints.iterdir())


@pytest.fixture
def opened(loop: PlainLoop, tmp_path: Path) -> Opened:
    return open_writer(loop, tmp_path)


def open_writer(loop: PlainLoop, path: Path, **keep: int) -> Opened:
    schedule = loop.parts.plan.schedule
    schedule = attrs.evolve(schedule, run=attrs.evolve(schedule.run, **keep))
    parts = attrs.evolve(loop.parts, plan=attrs.evolve(loop.parts.plan, schedule=schedule))
    told: list[Written] = []
    said: list[str] = []
    folder = RunFolder(path)
    writer = CheckpointWriter(folder, parts, facts={}, drift=[], told=told.append, say=said.append)
    return Opened(writer, folder, told, said)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every write of a training state until it is set."""
    may_go = threading.Event()
    write = checkpoint.write_tensors

    def gated(path, tensors, *, between, **rest):  # type: ignore[no-untyped-def]
        while not may_go.wait(0.01):
            between()
        write(path, tensors, between=between, **rest)

    monkeypatch.setattr(checkpoint, "write_tensors", gated)
    yield may_go
    may_go.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_show_in_it(
    loop: PlainLoop, opened: Opened, gate: threading.Event
) -> None:
    before = {name: value.clone() for name, value in loop.parts.state().items()}
    path = opened.writer.save(1)
    train_step(loop, 1)
    opened.writer.check()
    assert not opened.told and not path.exists(), "nothing bears the name while it is written"
    gate.set()
    opened.writer.close()
    assert [written.step for written in opened.told] == [1]
    state = load_file(path / checkpoint.STATE)
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)
    assert not torch.equal(loop.parts.state()["master.fc.weight"], before["master.fc.weight"])


def test_a_second_save_waits_for_the_first(opened: Opened, gate: threading.Event) -> None:
    opened.writer.save(1)
    threading.Timer(0.3, gate.set).start()
    begin = time.perf_counter()
    opened.writer.save(2)
    assert time.perf_counter() - begin > 0.25
    opened.writer.close()
    assert [written.step for written in opened.told] == [1, 2]
    assert opened.told[1].waited_s > 0.2 and "waiting for the one before" in str(opened.told[1])
    assert opened.names() == ["latest", "step_000001", "step_000002"]


def test_a_dropped_write_ends_soon_and_the_one_before_stands(opened: Opened, gate: threading.Event) -> None:
    gate.set()
    opened.writer.save(1, wait=True)
    gate.clear()
    opened.writer.save(2)
    begin = time.perf_counter()
    with pytest.raises(ZeroDivisionError), opened.writer:
        raise ZeroDivisionError
    assert time.perf_counter() - begin < 1
    assert opened.names() == ["latest", "step_000001"]
    assert read_checkpoint(opened.folder.checkpoints / "latest")["step"] == 1


def test_a_disk_that_fails_in_the_background_ends_the_run_at_a_step_border(
    loop: PlainLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = small_project(tmp_path)
    write = checkpoint.write_tensors

    def failing(path, tensors, **rest):  # type: ignore[no-untyped-def]
        if "000008" in str(path):
            raise OSError(28, "No space left on device")
        write(path, tensors, **rest)

    monkeypatch.setattr(checkpoint, "write_tensors", failing)
    settings = ["run.save_every=4", "run.eval_every=0", "run.steps=50"]
    with pytest.raises(EngineError, match="step_000008: could not write it: No space left") as found:
        run(load_schedule(project, settings), output=tmp_path / "run", console=Console(file=io.StringIO()))
    assert found.value.exit_code == DiskError.exit_code
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / "latest").resolve().name == "step_000004" and read_checkpoint(
        checkpoints / "latest"
    )
    rows = [orjson.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_bytes().splitlines()]
    assert 8 <= rows[-1]["step"] < 12, "before the next save would have found out"


@pytest.mark.parametrize(
    "lost, said", [("a byte", "reads back torn"), ("a shape", "reads back other tensors")]
)
def test_a_file_that_does_not_read_back_as_it_was_written_never_gets_its_name(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, lost: str, said: str
) -> None:
    write = checkpoint.write_tensors

    def losing(path, tensors, **rest):  # type: ignore[no-untyped-def]
        if lost == "a shape":
            tensors = tensors | {"master.fc.weight": tensors["master.fc.weight"].reshape(-1)}
        write(path, tensors, **rest)
        if lost == "a byte":
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - 1)

    monkeypatch.setattr(checkpoint, "write_tensors", losing)
    opened.writer.save(1)
    with pytest.raises(DiskError, match=said):
        opened.writer.close()
    assert opened.names() == []


def test_old_checkpoints_go_once_a_newer_one_is_whole(loop: PlainLoop, tmp_path: Path) -> None:
    opened = open_writer(loop, tmp_path, keep_last=2, keep_every=4)
    foreign = opened.folder.checkpoints / "step_000001"
    foreign.mkdir(parents=True)
    for step in range(2, 8):
        opened.writer.save(step, wait=True)
    opened.writer.close()
    assert opened.names() == ["latest", "step_000001", "step_000004", "step_000006", "step_000007"]
    assert opened.told[-1].removed == ["step_000005"]


def test_lanes_wait_for_the_write_where_memory_has_no_room_for_a_copy(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "available_ram", lambda: 1000)
    opened.writer.prepare()
    path = opened.writer.save(1)
    assert read_checkpoint(path) and [written.step for written in opened.told] == [1]
    assert len(opened.said) == 1 and "while the lanes wait" in opened.said[0]


def test_a_state_that_no_checkpoint_can_hold_is_named(loop: PlainLoop, opened: Opened) -> None:
    masters = loop.parts.drafters[0].masters
    assert masters.optimizer is not None
    state = masters.optimizer.state[masters.weights["fc.weight"]]
    state["history"] = [1, 2]
    try:
        with pytest.raises(EngineError, match=r"history\.fc\.weight is a list"):
            opened.writer.save(1)
    finally:
        del state["history"]


def test_a_checkpoints_figures_are_told(opened: Opened) -> None:
    opened.writer.prepare()
    opened.writer.save(1, wait=True)
    written = opened.told[0]
    files = [file.stat().st_size for file in written.path.rglob("*") if file.is_file()]
    assert written.nbytes == sum(files) and 0 < written.copied_s < 1 and 0 < written.written_s < 10
    assert str(written).startswith("checkpoint step_000001: 0.")


# A file of tensors


def test_a_tensor_file_is_the_librarys_own(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours", TENSORS, metadata={"format": "pt"})
    save_file(
        {name: value.contiguous() for name, value in TENSORS.items()},
        tmp_path / "theirs",
        metadata={"format": "pt"},
    )
    loaded = load_file(tmp_path / "ours")
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype
        assert loaded[name].shape == value.shape
    ours, theirs = (
        {name: (entry.dtype, entry.shape) for name, entry in read_header(tmp_path / file).items()}
        for file in ("ours", "theirs")
    )
    assert ours == theirs


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_tensor_file_cut_anywhere_is_told_from_a_whole_one(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "file"
    write_tensors(path, TENSORS)
    assert len(read_header(path)) == 6
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match="file"):
        read_header(path)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError):
        read_header(path)


def test_a_host_copy_stays_as_it_was_and_takes_no_new_memory(tmp_path: Path) -> None:
    room = HostCopy()
    originals = {name: value.clone() for name, value in TENSORS.items()}
    copies = room.take(originals)
    held, place = room.nbytes, copies["a"].data_ptr()
    for value in originals.values():
        value.zero_()
    for name, value in TENSORS.items():
        assert torch.equal(copies[name], value) and copies[name].is_contiguous()
    assert room.take(TENSORS)["a"].data_ptr() == place and room.nbytes == held
    room.close()
    assert room.nbytes == 0


@pytest.mark.gpu
def test_a_host_copy_of_a_gpus_tensors_is_pinned_and_whole() -> None:
    room = HostCopy()
    originals = {str(i): torch.randn(3_000_001, device="cuda") for i in range(8)}
    for _ in range(2):
        copies = room.take(originals)
        assert all(torch.equal(copies[name], value.cpu()) for name, value in originals.items())
        assert room.pinned and copies["0"].is_pinned()
        for value in originals.values():
            value.neg_()
    room.close()
    assert not room.pinned


# The background


def test_what_a_background_job_raises_is_kept_until_asked_for() -> None:
    background = Background("test")
    background.check()

    def failing(stop: Stop) -> None:
        raise DiskError("full")

    background.start(failing)
    for ask in (background.wait, background.check, lambda: background.start(lambda stop: None)):
        with pytest.raises(DiskError, match="full"):
            ask()


def test_a_background_job_that_sits_in_the_disk_holds_nobody_up() -> None:
    background, released = Background("test"), threading.Event()
    background.start(lambda stop: released.wait() and None)
    assert not background.drop(grace_s=0.1) and background.busy
    released.set()
    background.wait()
    assert not background.busy


# Fingerprints of a target


def test_a_changed_target_has_another_fingerprint_and_a_moved_one_has_not(tmp_path: Path) -> None:
    weights = {f"layer.{i}": torch.randn(64, 64) for i in range(3)}
    prints = []
    for place, change in (("one", None), ("moved", None), ("tuned", "layer.1"), ("typed", "dtype")):
        folder = write_config(tmp_path / place)
        changed = dict(weights)
        if change == "layer.1":
            changed["layer.1"] = weights["layer.1"] + 1e-3
        if change == "dtype":
            changed["layer.2"] = weights["layer.2"].view(torch.int32)
        save_file(changed, folder / "model.safetensors")
        prints.append(weights_fingerprint(folder))
    assert prints[0] == prints[1] and len(set(prints)) == 3
    assert config_fingerprint(tmp_path / "one") == config_fingerprint(tmp_path / "moved")
    write_config(tmp_path / "moved", rms_norm_eps=1e-5)
    assert config_fingerprint(tmp_path / "one") != config_fingerprint(tmp_path / "moved")
    assert vocabulary_fingerprint(tmp_path / "one") is None
    (tmp_path / "one/tokenizer.json").write_text("{}")
    first = vocabulary_fingerprint(tmp_path / "one")
    (tmp_path / "one/tokenizer.json").write_text('{"a": 1}')
    assert first and vocabulary_fingerprint(tmp_path / "one") != first
