"""Schedules: what is read, what is refused and in which words."""

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.devices import available_devices, resolve_attention, resolve_devices
from engine.errors import ScheduleError
from engine.schedule import Devices, Layout, Schedule, load_schedule, structure
from engine.schedule_checks import check_against_manifest, check_against_target
from engine.schedule_stages import DEFAULT_STAGES, predecessors
from engine.toml_text import toml_value

MINIMAL: dict[str, dict[str, Any]] = {
    "run": {"steps": 10},
    "target": {"path": "some/target"},
    "drafter": {"heads": 8, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64, "mask_token_id": 99},
    "data": {"path": "some/data"},
}


def schedule_with(**sections: Any) -> Schedule:
    """The minimal schedule, keys of the given sections set on top; None removes a key."""
    tables: dict[str, Any] = {name: dict(table) for name, table in MINIMAL.items()}
    for section, values in sections.items():
        if isinstance(values, dict):
            merged = {**tables.get(section, {}), **values}
            tables[section] = {key: value for key, value in merged.items() if value is not None}
        else:
            tables[section] = values
    return structure(tables)


def refusal(**sections: Any) -> str:
    with pytest.raises(ScheduleError) as error:
        schedule_with(**sections)
    return str(error.value)


@pytest.fixture
def schedule_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(schedule_with().to_toml())
    return path


def test_a_minimal_schedule_has_the_documented_defaults() -> None:
    schedule = schedule_with()
    assert schedule.devices == "auto"
    assert schedule.run == attrs.evolve(
        schedule.run, output_dir="runs", seed=42, epochs=None, steps=10, log_every=1, save_every=200
    )
    assert (schedule.run.eval_every, schedule.run.cpu_threads) == (0, 1)
    assert (schedule.target.init, schedule.target.dtype) == ("checkpoint", "bfloat16")
    assert schedule.target.trust_remote_code is False
    assert (schedule.drafter.layers, schedule.drafter.block_size) == (5, 16)
    assert (schedule.drafter.init, schedule.drafter.attention) == ("fresh", "auto")
    assert (schedule.data.token_budget, schedule.data.max_length) == (8192, 3072)
    assert (schedule.data.length_bucket, schedule.data.max_anchors) == (256, 512)
    assert (schedule.train.lr, schedule.train.min_lr, schedule.train.warmup) == (6e-4, 6e-5, 0.04)
    assert schedule.train.betas == (0.9, 0.95)
    assert (schedule.train.clip, schedule.train.micro_batches, schedule.train.loss_chunk) == (1.0, 1, 1024)


def test_the_effective_configuration_reads_back_as_the_same_schedule() -> None:
    schedule = schedule_with(
        drafter={
            "layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 2048,
            "target_layer_ids": [1, 4],
            "init": 'a "quoted" \\ folder\nünïcödé \x7f🙂',
        },
        data={"held_out": 0.1},
        train={"lr": 1, "min_lr": 1e-30, "weight_decay": 1e22},
        devices={"targets": ["cuda:0"], "drafters": ["cpu"]},
    )
    assert isinstance(schedule.train.lr, float)
    assert structure(tomllib.loads(schedule.to_toml())) == schedule
    assert structure(tomllib.loads(schedule_with().to_toml())) == schedule_with()


@given(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(2**62), 2**62)
    | st.booleans()
)
def test_any_value_survives_being_written_as_toml(value: object) -> None:
    read = tomllib.loads(f"value = {toml_value(value)}")["value"]
    assert read == value and type(read) is type(value)


def test_the_name_is_the_files_stem_and_no_key(schedule_file: Path) -> None:
    assert load_schedule(schedule_file).name == "small"
    assert "name: unknown key" in refusal(name="mine")


def test_overrides_reach_any_field(schedule_file: Path) -> None:
    schedule = load_schedule(
        schedule_file,
        [
            "train.lr=3e-4",
            "train.betas=[0.8, 0.9]",
            "train.zero_taps = true",
            "data.path=other/data",
            'data.held_out="held=out"',
            "drafter.target_layer_ids=[1,2]",
            "devices.targets=['cpu']",
            'devices.drafters=["cpu"]',
        ],
    )
    assert schedule.train.lr == 3e-4
    assert schedule.train.betas == (0.8, 0.9)
    assert schedule.train.zero_taps is True
    assert schedule.data.path == "other/data"
    assert schedule.data.held_out == "held=out"
    assert schedule.drafter.target_layer_ids == (1, 2)
    assert schedule.devices == Devices(targets=("cpu",), drafters=("cpu",))
    back = load_schedule(schedule_file, ["devices.targets=['cpu']", "devices=auto"])
    assert back.devices == "auto"


def test_setting_steps_replaces_the_files_epochs_and_the_reverse(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(schedule_with(run={"steps": None, "epochs": 6}).to_toml())
    changed = load_schedule(path, ["run.steps=5"])
    assert (changed.run.steps, changed.run.epochs) == (5, None)
    path.write_text(changed.to_toml())
    assert load_schedule(path, ["run.epochs=2"]).run.steps is None
    with pytest.raises(ScheduleError, match="run.epochs = 2 is given too"):
        load_schedule(path, ["run.epochs=2", "run.steps=3"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lrr=3", "train.lrr: unknown key; did you mean train.lr?"),
        ("train.lr=fast", 'train.lr = "fast": expected a number'),
        ("train.betas=[0.9", "train.betas=[0.9: the value is not valid TOML"),
        ("train.lr", "expected section.key=value"),
        ("train.lr=", "gives no value"),
        ("train..lr=1", "expected section.key=value"),
        ("train=1", "train = 1: expected a table"),
        ("train.lr=1\nclip = 3", "an override sets one key"),
        ("data.path.sub=1", "data.path = {sub = 1}: expected a string"),
    ],
)
def test_a_bad_override_is_refused(schedule_file: Path, override: str, words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        load_schedule(schedule_file, [override])
    assert words in str(error.value)


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"absent\.toml: no such schedule"):
        load_schedule(tmp_path / "absent.toml")
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_schedule(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ScheduleError, match=r"broken\.toml: not a TOML file: .*line 1"):
        load_schedule(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="not a TOML file"):
        load_schedule(broken)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        # Unknown and misspelt keys, those of sections that this engine does not have included.
        ({"train": {"lrr": 1e-4}}, "train.lrr: unknown key; did you mean train.lr?"),
        ({"train": {"block_size": 8}}, "train.block_size: unknown key; did you mean drafter.block_size?"),
        ({"trian": {"lr": 1e-4}}, "trian: unknown key; did you mean train?"),
        ({"lr": 1e-4}, "lr: unknown key; did you mean train.lr?"),
        ({"train": {"qqq": 1}}, "train.qqq: unknown key; known here are lr, min_lr"),
        ({"serialise": {"launches": "stage"}}, "serialise: unknown key; did you mean serialize?"),
        ({"stages": [{"name": "pack"}]}, "stages: unknown key; did you mean stage?"),
        ({"plugins": [{"use": "x"}]}, "plugins: unknown key; did you mean plugin?"),
        ({"devices": {"targets": ["cpu"], "drafter": ["cpu"]}}, "devices.drafter: unknown key; did you mean"),
        # Missing keys.
        ({"target": {"path": None}}, "target.path: missing"),
        ({"drafter": {"heads": None}}, "drafter.heads: missing"),
        ({"drafter": {"mask_token_id": None}}, "drafter.mask_token_id: missing"),
        ({"data": {"path": None}}, "data.path: missing"),
        ({"run": {"steps": None}}, "run.epochs: missing, and so is run.steps; give one of the two"),
        ({"devices": {"targets": ["cpu"]}}, "devices.drafters: missing"),
        ({"run": {"steps": 5, "epochs": 1}}, "run.steps = 5: run.epochs = 1 is given too"),
        # Wrong types.
        ({"data": {"token_budget": "8k"}}, 'data.token_budget = "8k": expected a whole number'),
        ({"data": {"token_budget": 8e3}}, "data.token_budget = 8000.0: expected a whole number"),
        ({"data": {"max_anchors": True}}, "data.max_anchors = true: expected a whole number"),
        ({"train": {"lr": True}}, "train.lr = true: expected a number"),
        ({"train": {"lr": "6e-4"}}, 'train.lr = "6e-4": expected a number'),
        ({"train": {"zero_taps": 1}}, "train.zero_taps = 1: expected true or false"),
        ({"target": {"path": 3}}, "target.path = 3: expected a string"),
        ({"train": {"betas": 0.9}}, "train.betas = 0.9: expected a list"),
        ({"train": {"betas": [0.9]}}, "train.betas = [0.9]: expected a list of 2 values, found 1"),
        ({"drafter": {"target_layer_ids": [1, "2"]}}, 'drafter.target_layer_ids[1] = "2": expected a whole'),
        ({"train": 3}, "train = 3: expected a table"),
        ({"devices": "cuda:0"}, 'devices = "cuda:0": expected a table or "auto"'),
        ({"devices": {"targets": "cpu", "drafters": ["cpu"]}}, 'devices.targets = "cpu": expected a list'),
        ({"train": {"objective": 1}}, "train.objective = 1: expected a string"),
        ({"target": {"dtype": "float16"}}, 'target.dtype = "float16": expected "bfloat16" or "float32"'),
        (
            {"drafter": {"layers": 1, "layer_types": ["sliding"]}},
            'drafter.layer_types[0] = "sliding": expect',
        ),
        ({"data": {"held_out": True}}, "data.held_out = true: expected a string or a number"),
        # Wrong ranges.
        ({"run": {"steps": 0}}, "run.steps = 0: expected a whole number, at least 1"),
        ({"run": {"steps": None, "epochs": -1}}, "run.epochs = -1: expected a whole number, at least 1"),
        ({"run": {"seed": 2**63}}, "run.seed = 9223372036854775808: expected"),
        ({"run": {"save_every": -1}}, "run.save_every = -1: expected a whole number, at least 0"),
        ({"run": {"cpu_threads": 0}}, "run.cpu_threads = 0"),
        ({"train": {"lr": 0}}, "train.lr = 0: expected a number, above 0"),
        ({"train": {"lr": float("nan")}}, "train.lr = nan: expected a finite number"),
        ({"train": {"clip": float("inf")}}, "train.clip = inf: expected a finite number"),
        ({"train": {"clip": 10**400}}, "expected a finite number"),
        ({"train": {"clip": 0.0}}, "train.clip = 0.0: expected a number, above 0"),
        ({"train": {"warmup": 1.0}}, "train.warmup = 1.0: expected a number, at least 0 and below 1"),
        ({"train": {"betas": [0.9, 1.0]}}, "train.betas[1] = 1.0: expected a number, at least 0 and below 1"),
        (
            {"train": {"dpace_alpha": 1.5}},
            "train.dpace_alpha = 1.5: expected a number, at least 0 and at most",
        ),
        ({"train": {"min_lr": 1e-3}}, "train.min_lr = 0.001: larger than train.lr = 0.0006"),
        (
            {"train": {"gradient_dtype": "bfloat16"}, "drafter": {"dtype": "float32"}},
            'train.gradient_dtype = "bfloat16": drafter.dtype = "float32"',
        ),
        ({"train": {"micro_batches": 0}}, "train.micro_batches = 0"),
        ({"data": {"held_out": 1.0}}, "data.held_out = 1.0: expected a number, above 0 and below 1"),
        ({"data": {"held_out": 0}}, "data.held_out = 0: expected a number, above 0 and below 1"),
        ({"data": {"max_anchors": 0}}, "data.max_anchors = 0"),
        ({"data": {"length_bucket": 0}}, "data.length_bucket = 0"),
        ({"data": {"max_length": 8000, "length_bucket": 5000}}, "a row is padded to 10000 tokens"),
        ({"drafter": {"block_size": 1}}, "drafter.block_size = 1: expected a whole number, at least 2"),
        # Layout, serializer, plugins.
        (
            {"layout": "colocate"},
            'layout = "colocate": expected "sequential" or "pipelined" or "colocated"; did',
        ),
        (
            {"layout": "pipelined", "devices": {"targets": ["cpu"], "drafters": ["cpu"]}},
            'layout = "pipelined": shares out what devices = "auto" finds, and [devices] lists',
        ),
        ({"serialize": {"launches": "stag"}}, 'did you mean "stage"?'),
        ({"plugin": [{"slots": 2}]}, "plugin[0].use: missing"),
        ({"plugin": [{"use": "a"}, {"use": 3}]}, "plugin[1].use = 3: expected a string"),
        ({"plugin": {"use": "a"}}, 'plugin = {use = "a"}: expected a list'),
        ({"plugin": ["plugins.decay"]}, 'plugin[0] = "plugins.decay": expected a table'),
        # Drafter sizes that cannot be.
        ({"drafter": {"kv_heads": 3}}, "drafter.kv_heads = 3: drafter.heads = 8 is not a multiple"),
        (
            {"drafter": {"head_dim": 15}},
            "drafter.head_dim = 15: expected a whole number, at least 2 and a mul",
        ),
        (
            {"drafter": {"layers": 2, "layer_types": ["full_attention"]}},
            "names 1 layers, and drafter.layers = 2",
        ),
        ({"drafter": {"layers": 1, "layer_types": ["sliding_attention"]}}, "drafter.sliding_window: missing"),
        (
            {"drafter": {"sliding_window": 0}},
            "drafter.sliding_window = 0: expected a whole number, at least 1",
        ),
        ({"drafter": {"sliding_window": 64}}, "drafter.sliding_window = 64: no layer is sliding_attention"),
        ({"drafter": {"target_layer_ids": [1, 1]}}, "drafter.target_layer_ids = [1, 1]: expected distinct"),
        ({"drafter": {"target_layer_ids": [3, 1]}}, "drafter.target_layer_ids = [3, 1]: expected distinct"),
        ({"drafter": {"target_layer_ids": []}}, "drafter.target_layer_ids = []"),
        (
            {"drafter": {"mask_token_id": -1}},
            "drafter.mask_token_id = -1: expected a whole number, at least 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_key_and_value(sections: dict[str, Any], words: str) -> None:
    assert words in refusal(**sections)


def test_a_mixed_layout_does_not_state_causality() -> None:
    mixed = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    assert schedule_with(drafter=mixed).drafter.is_causal is None
    assert "drafter.is_causal = false" in refusal(drafter={**mixed, "is_causal": False})


def test_every_wrong_key_is_listed_not_only_the_first() -> None:
    message = refusal(train={"lrr": 1, "clip": -1, "betas": [2, "x"]}, data={"path": None}, extra={})
    assert len(message.splitlines()) == 6
    together = refusal(train={"min_lr": 1.0}, drafter={"kv_heads": 3, "sliding_window": 4})
    assert len(together.splitlines()) == 3


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_follows_the_block_size(block_size: int, gamma: float) -> None:
    assert schedule_with(drafter={"block_size": block_size}).train.gamma == gamma


def test_another_block_size_must_state_gamma_unless_the_objective_has_none() -> None:
    assert "train.gamma: missing; drafter.block_size = 12" in refusal(drafter={"block_size": 12})
    assert schedule_with(drafter={"block_size": 12}, train={"gamma": 6}).train.gamma == 6.0
    assert schedule_with(drafter={"block_size": 12}, train={"objective": "dpace"}).train.gamma is None


def test_reading_a_schedule_loads_no_torch() -> None:
    code = (
        "import sys, engine.schedule, engine.schedule_checks, engine.devices, engine.run_folder, engine.panel"
    )
    check = f"{code}\nsys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'jax')))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# Stages and plugins


def stages(**changes: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The five default stages as tables; `pack={"after": []}` adds keys, `pack=None` leaves it out."""
    tables = []
    for stage in DEFAULT_STAGES:
        change = changes.get(stage.name.replace("-", "_"), {})
        if change is not None:
            tables.append({**stage.table(), **change})
    return tables


def test_a_schedule_without_stages_has_the_five_and_a_list_replaces_them() -> None:
    schedule = schedule_with()
    assert schedule.stage == DEFAULT_STAGES
    assert [stage.name for stage in schedule.stage if stage.exclusive == "target-forward"] == [
        "target-forward"
    ]
    assert [stage.name for stage in schedule.stage if stage.barrier] == ["optimizer"]
    given = schedule_with(stage=stages(target_forward={"exclusive": "forward"}, transfer={"depth": 3}))
    assert given.stage[0].exclusive == "forward" and given.depth == 3 and schedule.depth == 1
    assert structure(tomllib.loads(given.to_toml())) == given


def test_a_stage_comes_after_the_one_above_it_unless_it_says_otherwise() -> None:
    assert list(predecessors(DEFAULT_STAGES).items()) == [
        ("target-forward", ()),
        ("pack", ("target-forward",)),
        ("transfer", ("pack",)),
        ("drafter-fwd-bwd", ("transfer",)),
        ("optimizer", ("drafter-fwd-bwd",)),
    ]
    tables = [*stages()[:2], {"name": "count", "lane": "target", "after": ["target-forward"]}, *stages()[2:]]
    tables[3]["after"] = ["pack", "count"]
    before = predecessors(schedule_with(stage=tables).stage)
    assert before["count"] == ("target-forward",) and before["transfer"] == ("pack", "count")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (stages() + stages()[1:2], 'stage[5].name = "pack": stands there twice'),
        (stages(pack=None), 'stage: "pack" is missing; a schedule that names stages names all of'),
        ([], 'stage: "target-forward" is missing'),
        (stages(pack={"after": ["pack"]}), "a stage cannot come after itself"),
        (
            stages(pack={"after": ["taget-forward"]}),
            'no stage "taget-forward"; did you mean "target-forward"?',
        ),
        (
            stages(pack={"lane": "traget"}),
            'stage[1].lane = "traget": expected "target" or "drafter"; did you mean',
        ),
        (stages(pack={"lane": "drafter"}), 'stage[1].lane = "drafter": pack runs on target lanes'),
        (stages(pack={"lan": "target"}), "stage[1].lan: unknown key; did you mean stage[1].lane?"),
        (
            stages(pack={"barrier": True}),
            "stage[1].barrier = true: pack runs once per micro-batch; write false",
        ),
        (
            stages(optimizer={"barrier": False}),
            "stage[4].barrier = false: optimizer runs once per step; write true",
        ),
        (
            stages(pack={"depth": 2}),
            "stage[1].depth = 2: pack takes nothing from another lane; give the depth to",
        ),
        (
            [stages()[1], stages()[0], *stages()[2:]],
            'stage[0].name = "pack": it does not come after "target-forward", whose result it takes',
        ),
        (
            [*stages()[:2], stages()[3], stages()[2], stages()[4]],
            'stage[2].name = "drafter-fwd-bwd": it does not come after "transfer"',
        ),
        (stages(transfer={"depth": 0}), "stage[2].depth = 0: expected a whole number, at least 1"),
        ([{"name": "pack"}], "stage[0].lane: missing"),
    ],
)
def test_stages_that_cannot_be_are_refused(tables: list[dict[str, Any]], words: str) -> None:
    assert words in refusal(stage=tables)


def test_plugins_keep_their_options_as_they_stand_and_round_trip() -> None:
    tables = [
        {"use": "plugins.async_copy", "slots": 3},
        {"use": "./mine.py", "name": "x", "odd key": {"a b": [1.5, {"c": True}]}, "options": 1},
    ]
    schedule = schedule_with(plugin=tables)
    assert [plugin.use for plugin in schedule.plugin] == ["plugins.async_copy", "./mine.py"]
    assert schedule.plugin[0].options == {"slots": 3}
    assert schedule.plugin[1].options["odd key"] == {"a b": [1.5, {"c": True}]}
    assert schedule.plugin[1].options["options"] == 1
    assert structure(tomllib.loads(schedule.to_toml())) == schedule


def test_overrides_reach_stages_and_plugins_by_name(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(schedule_with(plugin=[{"use": "plugins.async_copy", "slots": 2}]).to_toml())
    changed = load_schedule(path, ["stage.transfer.depth=2", "plugin.plugins.async_copy.slots=4"])
    assert changed.depth == 2 and changed.plugin[0].options == {"slots": 4}
    with pytest.raises(
        ScheduleError, match=r'stage.transfr.depth: "transfr" is not there; there are target-for'
    ):
        load_schedule(path, ["stage.transfr.depth=2"])
    bare = tmp_path / "bare.toml"
    bare.write_text(path.read_text().partition("[[stage]]")[0])
    assert load_schedule(bare, ["stage.transfer.depth=3"]).depth == 3
    assert load_schedule(bare, ['plugin=[{use="plugins.split_fc"}]']).plugin[0].use == "plugins.split_fc"


def test_overrides_reach_a_plugin_s_file_by_its_name_where_there_is_one_of_it(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    uses = ["./power.py", "plugins.async_copy", "a/twice.py", "b/twice.py"]
    path.write_text(schedule_with(plugin=[{"use": use} for use in uses]).to_toml())
    changed = load_schedule(path, ["plugin.power.exponent=0.2", "plugin.async_copy.slots=4"])
    assert [plugin.options for plugin in changed.plugin] == [{"exponent": 0.2}, {"slots": 4}, {}, {}]
    with pytest.raises(ScheduleError, match='"twice" is there more than once; there are ./power.py'):
        load_schedule(path, ["plugin.twice.slots=4"])


def test_setting_devices_replaces_the_files_layout_and_the_reverse(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(schedule_with(layout="pipelined").to_toml())
    assert load_schedule(path, ["devices=auto"]).layout == "pipelined"
    listed = load_schedule(path, ['devices={targets=["cpu"], drafters=["cpu"]}'])
    assert listed.layout is None
    path.write_text(listed.to_toml())
    back = load_schedule(path, ["layout=colocated"])
    assert (back.devices, back.layout) == ("auto", "colocated")


# Devices


def named(numbers: str) -> list[str]:
    return [f"cuda:{number}" for number in numbers]


@pytest.mark.parametrize(
    ("gpus", "layout", "targets", "drafters"),
    [
        (1, "sequential", "0", "0"),
        (2, "sequential", "01", "01"),
        (3, "sequential", "01", "2"),
        (4, "sequential", "01", "23"),
        (5, "sequential", "012", "34"),
        (6, "sequential", "012", "345"),
        (7, "sequential", "0123", "456"),
        (8, "sequential", "0123", "4567"),
        (1, "pipelined", "0", "0"),
        (2, "pipelined", "0", "1"),
        (3, "pipelined", "01", "2"),
        (4, "pipelined", "012", "3"),
        (5, "pipelined", "0123", "4"),
        (6, "pipelined", "0123", "45"),
        (7, "pipelined", "01234", "56"),
        (8, "pipelined", "01234", "567"),
        (1, "colocated", "0", "0"),
        (3, "colocated", "012", "012"),
        (8, "colocated", "01234567", "01234567"),
    ],
)
def test_auto_shares_gpus_out_by_layout(gpus: int, layout: Layout, targets: str, drafters: str) -> None:
    there = ["cpu", *named("01234567"[:gpus])]
    resolved = resolve_devices("auto", there, micro_batches=8, layout=layout, kinds=same_kind)
    assert resolved == (named(targets), named(drafters))


def same_kind(names: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(names, "one kind")


@pytest.mark.parametrize(
    ("layout", "lanes"), [("sequential", (2, 2)), ("pipelined", (2, 1)), ("colocated", (1, 1))]
)
def test_auto_without_a_gpu_opens_lanes_on_the_cpu(layout: Layout, lanes: tuple[int, int]) -> None:
    targets, drafters = resolve_devices("auto", ["cpu"], micro_batches=2, layout=layout)
    assert (targets, drafters) == (["cpu"] * lanes[0], ["cpu"] * lanes[1])
    assert "cpu" in available_devices()


def test_auto_caps_drafters_at_the_micro_batches_of_a_step() -> None:
    there = ["cpu", *named("01234567")]
    for layout, targets in (("sequential", "0123"), ("pipelined", "01234"), ("colocated", "01234567")):
        found = resolve_devices("auto", there, micro_batches=2, layout=layout, kinds=same_kind)  # type: ignore[arg-type]
        assert found[0] == named(targets) and len(found[1]) == 2
    assert resolve_devices("auto", ["cpu"], micro_batches=1) == (["cpu", "cpu"], ["cpu"])


def test_a_device_may_be_named_more_than_once() -> None:
    devices = Devices(targets=("cpu", "cuda:0", "cuda:0"), drafters=("cpu", "cpu"))
    assert resolve_devices(devices, ["cpu", "cuda:0"], micro_batches=2) == (
        ["cpu", "cuda:0", "cuda:0"],
        ["cpu", "cpu"],
    )


def test_gpus_of_two_kinds_in_one_run_are_refused_by_name() -> None:
    kinds = {"cuda:0": "H200", "cuda:1": "H200", "cuda:2": "A10", "cuda:10": "A10"}
    there = ["cpu", *kinds]

    def resolve(targets: list[str], drafters: list[str]) -> object:
        devices = Devices(targets=tuple(targets), drafters=tuple(drafters))
        return resolve_devices(
            devices, there, micro_batches=4, kinds=lambda names: {name: kinds[name] for name in names}
        )

    assert resolve(["cuda:0", "cuda:0", "cpu"], ["cuda:1"])
    assert resolve(["cuda:10"], ["cuda:2", "cpu"])
    with pytest.raises(ScheduleError, match="cuda:0 is H200, cuda:2 is A10, cuda:10 is A10"):
        resolve(["cuda:10", "cuda:0"], ["cuda:2"])
    with pytest.raises(ScheduleError, match="more than one kind"):
        resolve_devices("auto", there, micro_batches=4, kinds=lambda _: kinds)


@pytest.mark.parametrize(
    ("targets", "drafters", "words"),
    [
        (["cuda:3"], ["cpu"], 'devices.targets[0] = "cuda:3": no such device here; there are cpu, cuda:0'),
        (["cuda"], ["cpu"], 'devices.targets[0] = "cuda": expected a name such as'),
        (["cpu"], ["CPU:0"], 'devices.drafters[0] = "CPU:0": expected a name'),
        (["cpu"], [], "devices.drafters = []: names no device"),
        (["cpu"], ["cpu", "cpu", "cpu"], "3 drafters share train.micro_batches = 2 per step"),
    ],
)
def test_devices_that_cannot_be_are_refused(targets: list[str], drafters: list[str], words: str) -> None:
    devices = Devices(targets=tuple(targets), drafters=tuple(drafters))
    with pytest.raises(ScheduleError) as error:
        resolve_devices(devices, lambda: ["cpu", "cuda:0"], micro_batches=2)
    assert words in str(error.value)


def test_flex_attention_is_refused_on_a_cpu() -> None:
    assert resolve_attention("auto", "cpu") == "dense"
    assert resolve_attention("auto", "cuda:0") == "flex"
    assert resolve_attention("dense", "cuda:0") == "dense"
    assert resolve_attention("auto", "cuda:0", "cuda:1") == "flex"
    assert resolve_attention("auto", "cuda:0", "cpu") == "dense"  # one backend for all
    with pytest.raises(ScheduleError, match="no backward pass"):
        resolve_attention("flex", "cpu")


# Target and documents


@attrs.frozen
class Facts:
    layers: int = 8
    hidden_size: int = 32
    vocab_size: int = 100
    pad_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = (1, 2)


def target_refusal(**drafter: Any) -> str:
    with pytest.raises(ScheduleError) as error:
        check_against_target(schedule_with(drafter=drafter), Facts())
    return str(error.value)


def test_default_taps_are_filled_in() -> None:
    ids = check_against_target(schedule_with(), Facts()).drafter.target_layer_ids
    assert ids == (1, 2, 3, 4, 5)


def test_taps_out_of_the_targets_range_are_refused() -> None:
    message = target_refusal(target_layer_ids=[1, 7])
    assert "drafter.target_layer_ids[1] = 7" in message and "8 layers" in message
    assert check_against_target(schedule_with(drafter={"target_layer_ids": [0, 6]}), Facts())


@pytest.mark.parametrize(
    ("mask_token_id", "words"),
    [(0, "is the target's pad token"), (2, "is an EOS token"), (100, "the target's vocabulary has 100 ids")],
)
def test_a_mask_id_that_is_pad_or_eos_or_out_of_range_is_refused(mask_token_id: int, words: str) -> None:
    message = target_refusal(mask_token_id=mask_token_id)
    assert f"drafter.mask_token_id = {mask_token_id}: " in message and words in message


def test_mask_and_taps_are_reported_together() -> None:
    assert len(target_refusal(mask_token_id=100, target_layer_ids=[7]).splitlines()) == 2


def exported_config(**changes: Any) -> dict[str, Any]:
    """What an exporter writes for the minimal schedule's drafter."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 32,
        "vocab_size": 100,
        "num_target_layers": 8,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "block_size": 16,
        "layer_types": ["full_attention"] * 5,
        "dflash_config": {"target_layer_ids": [1, 2, 3, 4, 5], "mask_token_id": 99, "block_size": 16},
    }
    return {**config, **changes}


def test_a_drafter_to_go_on_from_fits_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    init = str(tmp_path)
    assert "no config.json there" in target_refusal(init=init)
    path.write_bytes(orjson.dumps(exported_config()))
    assert check_against_target(schedule_with(drafter={"init": init}), Facts())
    for name, value, words in [
        ("hidden_size", 64, "hidden_size = 64, and the target has 32"),
        ("vocab_size", 200, "vocab_size = 200, and the target has 100"),
        ("num_attention_heads", 4, "num_attention_heads = 4, and drafter.heads is 8"),
        ("head_dim", None, "head_dim = nothing, and drafter.head_dim is 16"),
    ]:
        path.write_bytes(orjson.dumps(exported_config(**{name: value})))
        assert words in target_refusal(init=init)
    path.write_bytes(orjson.dumps(exported_config(num_target_layers=None)))
    assert check_against_target(schedule_with(drafter={"init": init}), Facts()), "the speculators layout"
    path.write_bytes(orjson.dumps(exported_config()))
    message = target_refusal(init=init, mask_token_id=98, target_layer_ids=[0, 1, 2, 3, 4])
    assert "dflash_config.mask_token_id = 99, and drafter.mask_token_id is 98" in message
    assert "dflash_config.target_layer_ids = [1, 2, 3, 4, 5]" in message
    path.write_text("{")
    assert "is not JSON" in target_refusal(init=init)
    path.write_text('{"hidden_size": 32}')
    assert "no exported DFlash drafter" in target_refusal(init=init)


def test_documents_that_hold_the_mask_id_or_a_strange_vocabulary_are_refused() -> None:
    schedule = schedule_with()
    check_against_manifest(schedule, [3, 5, 98], vocab_size=100, manifest_vocab_size=100)
    for ids, known, words in [
        ([3, 99], {}, "drafter.mask_token_id = 99: occurs in the documents of data.path = "),
        ([3, 100], {}, "holds token 100, and the target's vocabulary ends at 99"),
        ([3], {"manifest_vocab_size": 200}, "a vocabulary of 200 ids, and the target has 100"),
        ([3], {"tokenizer": "a", "manifest_tokenizer": "b"}, "tokenizer b, and the target's is a"),
    ]:
        with pytest.raises(ScheduleError) as error:
            check_against_manifest(schedule, ids, vocab_size=100, **known)  # type: ignore[arg-type]
        assert words in str(error.value)
    check_against_manifest(schedule, [3], vocab_size=100, tokenizer="a", manifest_tokenizer=None)
