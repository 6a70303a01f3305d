"""Plugins: how they are found and refused, who answers first, and what the docs' example does."""

import io
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import typer
from rich.console import Console
from small_runs import ONE_LANE_EACH, plain_loop, small_project
from test_commands import engine
from test_schedule import schedule_with

from engine import plugin_loading
from engine.errors import InputError, NonFinite
from engine.plain import train_step
from engine.planning import plan_run
from engine.plugin_host import (
    DEFAULT_PLUGINS,
    PluginError,
    PluginHost,
    hook_names,
    load_plugins,
    register_installed_commands,
)
from engine.plugin_loading import PluginRefused
from engine.run import run
from engine.runtime.failure import StageFailure
from engine.schedule import Plugin, Train, load_schedule, structure

DOCS = Path(__file__).parent.parent / "docs" / "plugins.md"

HEAD = "import attrs\nfrom engine.hookspecs import hookimpl\n"
NO_OPTIONS = HEAD + "@attrs.frozen\nclass Options:\n    pass\ndef make(options):\n    return Mine()\n"
TRAIN = Train(gamma=4.0)


def write(folder: Path, name: str, *lines: str, head: str = NO_OPTIONS) -> str:
    """A plugin's file; returns what a schedule would `use`."""
    path = folder / name
    path.write_text(head + "\n".join(lines) + "\n")
    return str(path)


def mine(folder: Path, *methods: str, name: str = "mine.py") -> str:
    """A plugin without options, its methods on one line each."""
    methods = methods or ("def run_finished(self): pass",)
    lines = [line for method in methods for line in ("    @hookimpl", f"    {method}")]
    return write(folder, name, "class Mine:", *lines)


def host_with(*uses: str, **options: Any) -> PluginHost:
    return load_plugins([Plugin(use=use, options=options) for use in uses])


def refusal(*uses: str, **options: Any) -> str:
    with pytest.raises(PluginRefused) as error:
        host_with(*uses, **options)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Offers modules of a folder as installed plugins: `installed(name=code)`."""
    points: list[EntryPoint] = []

    def install(**modules: str) -> None:
        for name, code in modules.items():
            (tmp_path / f"installed_{name}.py").write_text(NO_OPTIONS + code)
            points.append(EntryPoint(name, f"installed_{name}", "dflash_engine.plugins"))

    def entry_points(group: str) -> list[EntryPoint]:
        return [point for point in points if point.group == group]

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugin_loading, "entry_points", entry_points)
    yield install
    for point in points:
        sys.modules.pop(point.value, None)


# Loading


def test_the_defaults_answer_what_a_run_needs() -> None:
    host = host_with()
    assert [plugin.name for plugin in host.plugins] == list(DEFAULT_PLUGINS)
    for hook in ("make_objective", "make_optimizer", "make_feature_path", "make_transfer", "make_attention"):
        assert host.answering(hook), hook
    for hook in ("open_data_source", "load_target"):
        assert host.answering(hook), hook
    assert host.choose("make_objective", name="decay", train=TRAIN) is not None
    assert host.choose("make_objective", name="nobody's", train=TRAIN) is None


def test_a_plugin_is_loaded_from_a_module_a_file_and_an_entry_point(tmp_path: Path, installed: Any) -> None:
    installed(theirs="class Mine:\n    @hookimpl\n    def run_finished(self): pass\n")
    path = mine(tmp_path, "def make_objective(self, name): return name.upper()")
    host = host_with("plugins.split_fc", path, "theirs")
    assert [(plugin.name, plugin.origin) for plugin in host.plugins[:3]] == [
        ("plugins.split_fc", "schedule"),
        (path, "schedule"),
        ("theirs", "schedule"),
    ]
    assert host.choose("make_objective", name="x", train=TRAIN) == "X"


def test_a_plugin_that_nothing_would_ever_call_is_refused(tmp_path: Path) -> None:
    hookless = write(tmp_path, "hookless.py", "class Mine:", "    pass")
    assert "has no hook, so nothing would ever call it; mark its methods with @hookimpl" in refusal(hookless)
    nothing = HEAD + "@attrs.frozen\nclass Options:\n    pass\ndef make(options):\n    Mine()\n"
    forgotten = write(tmp_path, "forgotten.py", "class Mine:", "    pass", head=nothing)
    assert f"plugin {forgotten}: make(options) returned None; return the plugin's object" in refusal(
        forgotten
    )


def test_a_hook_s_misspelt_argument_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = mine(tmp_path, "def step_finished(self, stp): pass")
    assert f"plugin {path}: step_finished has no argument stp; did you mean step?" in refusal(path)
    path = mine(tmp_path, "def step_finished(self, qq): pass", name="other.py")
    assert "step_finished has no argument qq; it may take step, row" in refusal(path)


STAGES = """
[[stage]]
name = "target-forward"
lane = "target"
[[stage]]
name = "pack"
lane = "target"
[[stage]]
name = "look"
lane = "target"
[[stage]]
name = "transfer"
lane = "drafter"
[[stage]]
name = "drafter-fwd-bwd"
lane = "drafter"
[[stage]]
name = "optimizer"
lane = "drafter"
barrier = true
"""


def staged(tmp_path: Path, *code: str) -> tuple[Path, str]:
    """A small schedule with a stage of a plugin's, whose `make_stage` ends in these lines."""
    schedule = small_project(tmp_path)
    plugin = write(
        tmp_path, "look.py", "class Mine:", "    @hookimpl", "    def make_stage(self, name):", *code
    )
    schedule.write_text(schedule.read_text() + STAGES + f'[[plugin]]\nuse = "{plugin}"\n')
    return schedule, plugin


def test_a_stage_that_nobody_runs_or_that_cannot_be_called_is_found_by_planning(tmp_path: Path) -> None:
    schedule, plugin = staged(tmp_path, "        return 3 if name == 'look' else None")
    with pytest.raises(PluginRefused, match="make_stage returned 3 for look; return a function of") as error:
        plan_run(load_schedule(schedule))
    assert plugin in str(error.value)
    schedule.write_text(schedule.read_text().replace('name = "look"', 'name = "trasnfer"'))
    with pytest.raises(
        InputError, match='"trasnfer": no plugin.s make_stage answers.*did you mean "transfer"'
    ):
        plan_run(load_schedule(schedule))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("raise ValueError('bad cargo')", "stage look failed: ValueError: bad cargo"),
        ("return None", "stage look failed: EngineError: it returned None; a stage returns the cargo"),
    ],
)
def test_a_plugin_s_stage_that_fails_is_named_with_its_plugin(tmp_path: Path, line: str, words: str) -> None:
    body = ["        if name != 'look': return None", "        def look(lane, micro_batch, cargo):"]
    schedule, plugin = staged(tmp_path, *body, f"            {line}", "        return look")
    with pytest.raises(StageFailure, match="look, micro-batch 0, step 1 on target.0@cpu") as error:
        run(load_schedule(schedule, [ONE_LANE_EACH]), steps=1, output=tmp_path / "out")
    assert f"plugin {plugin}: {words}" in str(error.value)


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "import sys; sys.exit()", "raise GeneratorExit"])
def test_a_plugin_that_leaves_is_a_failure_with_its_name(tmp_path: Path, line: str) -> None:
    path = mine(tmp_path, f"def run_finished(self): {line}")
    with pytest.raises(PluginError, match="run_finished failed: (SystemExit|GeneratorExit)") as error:
        host_with(path).tell("run_finished", step=1, folder=tmp_path)
    assert error.value.exit_code == 1 and path in str(error.value)


def test_a_plugin_that_leaves_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    assert "cannot be imported" in refusal(write(tmp_path, "leaves.py", "raise SystemExit(0)"))
    leaving = HEAD + "@attrs.frozen\nclass Options:\n    pass\ndef make(options):\n    raise SystemExit(0)\n"
    assert "make(options) failed" in refusal(write(tmp_path, "making.py", head=leaving))


def test_a_default_that_the_schedule_names_is_there_once() -> None:
    names = [plugin.name for plugin in host_with("plugins.concat").plugins]
    assert sorted(names) == sorted(DEFAULT_PLUGINS) and names[0] == "plugins.concat"


def test_two_files_of_one_name_are_two_plugins(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = mine(tmp_path / "a", "def make_objective(self, name): return 1 if name == 'a' else None")
    second = mine(tmp_path / "b", "def make_objective(self, name): return 2 if name == 'b' else None")
    host = host_with(first, second)
    assert host.choose("make_objective", name="a", train=TRAIN) == 1
    assert host.choose("make_objective", name="b", train=TRAIN) == 2
    for plugin in host.plugins[:2]:
        assert sys.modules[plugin.module.__name__] is plugin.module


def test_what_cannot_be_imported_is_named_with_file_and_line(tmp_path: Path) -> None:
    assert "did you mean plugins.async_copy?" in refusal("plugins.asinc_copy")
    assert "did you mean plugins.split_fc?" in refusal("split_fc")
    assert "there are plugins.adamw" in refusal("qqqqqq.xx")
    assert "no such file" in refusal(str(tmp_path / "absent.py"))
    broken = write(tmp_path, "broken.py", "import not_there_at_all", head="\n\n")
    message = refusal(broken)
    assert f"{broken}, line 3: ModuleNotFoundError" in message and "not_there_at_all" in message
    broken = write(tmp_path, "syntax.py", "x = 1", "def f(:", head="")
    assert f"{broken}, line 2: SyntaxError" in refusal(broken)
    broken = write(tmp_path, "raises.py", "def f():", "    return 1 / 0", "f()", head="")
    assert f"{broken}, line 2: ZeroDivisionError: division by zero" in refusal(broken)
    assert not [name for name in sys.modules if "syntax" in name and name.startswith("dflash_engine_plugin")]


def test_a_module_that_is_no_plugin_is_refused(tmp_path: Path) -> None:
    assert "has no make(options)" in refusal("json")
    lacking = write(tmp_path, "lacking.py", "def make(options): return 1", head="")
    assert "has no attrs class Options" in refusal(lacking)
    failing = write(
        tmp_path,
        "failing.py",
        "@attrs.frozen\nclass Options: pass",
        "def make(options):",
        "    1 / 0",
        head=HEAD,
    )
    assert f"make(options) failed: {failing}, line 6: ZeroDivisionError" in refusal(failing)
    assert "named twice" in refusal("plugins.split_fc", "plugins.split_fc")
    twice = mine(tmp_path)
    assert "named twice" in refusal(twice, f"{tmp_path}/../{tmp_path.name}/mine.py")


def test_options_are_checked_by_the_plugins_own_class(tmp_path: Path) -> None:
    def option_refusal(**options: Any) -> str:
        return refusal("plugins.async_copy", **options)

    assert host_with("plugins.async_copy", slots=3).plugins[0].options.slots == 3
    message = option_refusal(slotz=3)
    assert "plugin plugins.async_copy: option slotz: unknown key; did you mean slots?" in message
    assert "option slots = 0: expected a whole number, at least 1" in option_refusal(slots=0)
    assert 'did you mean "host"?' in option_refusal(through="hots")
    assert len(option_refusal(slotz=1, slots="x").splitlines()) == 2
    assert "no keys at all" in refusal("plugins.decay", gamma=3)
    with_future = "from __future__ import annotations\n" + NO_OPTIONS.replace("    pass", "    size: int")
    path = write(tmp_path, "later.py", "class Mine: pass", head=with_future)
    assert "option size: missing" in refusal(path)
    assert 'option size = "x": expected a whole number' in refusal(path, size="x")


# Hooks


def test_a_misspelt_hook_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = mine(tmp_path, "def make_optimiser(self, parameters, train): pass")
    assert f"plugin {path}: no hook is called make_optimiser; did you mean make_optimizer?" in refusal(path)


def test_a_hook_without_its_mark_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "bare.py", "class Mine:", "    def step_finished(self, step): pass")
    assert "step_finished is not marked" in refusal(path)


def test_an_argument_that_a_hook_does_not_have_is_refused(tmp_path: Path) -> None:
    message = refusal(mine(tmp_path, "def step_finished(self, stepp): pass"))
    assert "stepp" in message and "mine.py" in message


def test_a_hook_wrapper_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "wrapper.py",
        "class Mine:",
        "    @hookimpl(wrapper=True)",
        "    def step_finished(self): yield",
    )
    assert "step_finished is a hook wrapper" in refusal(path)


def test_the_schedule_goes_before_the_installed_and_those_before_the_defaults(
    tmp_path: Path, installed: Any
) -> None:
    code = "class Mine:\n    @hookimpl\n    def make_optimizer(self, train): return 'installed'\n"
    question = {"parameters": {}, "train": TRAIN}
    installed(theirs=code)
    assert host_with().choose("make_optimizer", **question) == "installed"
    named = mine(tmp_path, "def make_optimizer(self): return 'schedule'")
    assert host_with(named).choose("make_optimizer", **question) == "schedule"
    passing = mine(tmp_path, "def make_optimizer(self): return None")
    assert host_with(passing).choose("make_optimizer", **question) == "installed"


def test_two_plugins_of_a_schedule_with_one_answer_to_give_are_an_error(tmp_path: Path) -> None:
    first = mine(tmp_path, "def make_optimizer(self): return 1", name="first.py")
    second = mine(tmp_path, "def make_optimizer(self): return 2", name="second.py")
    assert f"plugins {first} and {second}: both answer make_optimizer" in refusal(first, second)
    third = mine(tmp_path, "def make_objective(self, name): return 3", name="third.py")
    fourth = mine(
        tmp_path, "def make_objective(self, name): return 4 if name == 'x' else None", name="fourth.py"
    )
    host = host_with(third, fourth)
    assert host.choose("make_objective", name="y", train=TRAIN) == 3
    with pytest.raises(PluginRefused, match=r"third.py and .*fourth.py: both answer make_objective"):
        host.choose("make_objective", name="x", train=TRAIN)


def test_wrappers_stand_around_each_other_with_the_schedule_s_outermost(
    tmp_path: Path, installed: Any
) -> None:
    def wrapping(name: str) -> str:
        return f"def wrap_target(self, target): return ({name!r}, target)"

    installed(theirs=f"class Mine:\n    @hookimpl\n    {wrapping('installed')}\n")
    first = mine(tmp_path, wrapping("first"), name="first.py")
    leaving = mine(tmp_path, "def wrap_target(self, target): return None", name="leaving.py")
    second = mine(tmp_path, wrapping("second"), name="second.py")
    host = host_with(first, leaving, second)
    cpu = SimpleNamespace(device=torch.device("cpu"))
    wrapped = host.wrap("wrap_target", "bare", lane=cpu, serializer=None)
    assert wrapped == ("second", ("first", ("installed", "bare")))
    asked = [plugin.name for plugin in host.answering("wrap_target")]
    assert asked == ["plugins.fused_target", "theirs", first, leaving, second]
    again = host_with(second, "plugins.fused_target", first).answering("wrap_target")
    assert [plugin.name for plugin in again][1:] == [second, "plugins.fused_target", first]


def test_watchers_are_told_in_the_order_of_the_schedule(tmp_path: Path) -> None:
    uses = [
        mine(tmp_path, f"def step_finished(self, row): row.append({n})", name=f"w{n}.py") for n in (1, 2, 3)
    ]
    told: list[int] = []
    host_with(*uses).tell("step_finished", step=1, row=told)
    assert told == [1, 2, 3]
    assert [plugin.name for plugin in host_with(*reversed(uses)).answering("step_finished")] == uses[::-1]


def test_an_exception_in_a_hook_names_plugin_and_hook_and_keeps_the_exit_code(tmp_path: Path) -> None:
    path = mine(
        tmp_path,
        "def step_finished(self, step): raise row_error(step)",
        "def run_failed(self, error): 1 / 0",
    )
    host = host_with(path)
    for error, code in [
        (ValueError("odd"), 1),
        (NonFinite("nan"), 4),
        (torch.OutOfMemoryError("CUDA out of memory"), 3),
    ]:
        vars(host.plugins[0].module)["row_error"] = lambda step, error=error: error
        with pytest.raises(PluginError) as raised:
            host.tell("step_finished", step=1, row={})
        assert str(raised.value) == f"plugin {path}: step_finished failed: {type(error).__name__}: {error}"
        assert raised.value.exit_code == code and raised.value.__cause__ is error
    failure = ValueError("the first")
    host.tell_failure(failure)
    assert "run_failed failed: ZeroDivisionError" in failure.__notes__[0]


def test_a_name_that_nobody_answers_to_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError) as error:
        host_with().choose_named("make_objective", "train.objective", "dpase", train=TRAIN)
    assert 'train.objective = "dpase": no plugin' in str(error.value)
    assert "asked were plugins.decay, plugins.dpace" in str(error.value)
    assert 'did you mean "dpace"?' in str(error.value)
    with pytest.raises(InputError, match='none of this run\'s plugins has that hook; did you mean "pack"'):
        host_with().choose_named("make_stage", "stage[1].name", "pak", known=("pack",), schedule=None)


# Commands


def test_installed_plugins_may_add_commands(installed: Any) -> None:
    app = typer.Typer()
    register_installed_commands(app)
    assert not app.registered_commands
    command = "    def register_commands(self, app): app.command('hello')(print)\n"
    installed(theirs="class Mine:\n    @hookimpl\n" + command)
    register_installed_commands(app)
    assert [command.name for command in app.registered_commands] == ["hello"]


def test_the_plugins_command_shows_who_answers_what(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(schedule_with(plugin=[{"use": "plugins.async_copy", "slots": 5}]).to_toml())
    code, output = engine(capsys, monkeypatch, "plugins", path, "--json")
    assert code == 0, output
    shown = json.loads(output)
    assert [hook["hook"] for hook in shown["hooks"]] == hook_names()
    transfer = next(hook for hook in shown["hooks"] if hook["hook"] == "make_transfer")
    assert transfer["single_answer"] and transfer["plugins"] == ["plugins.async_copy", "plugins.plain_copy"]
    first = shown["plugins"][0]
    assert (first["plugin"], first["from"], first["hooks"]) == (
        "plugins.async_copy",
        "schedule",
        ["make_transfer"],
    )
    assert first["options"][0]["value"] == 5
    assert first["options"][0]["about"].startswith("Pinned buffers of each target lane")
    code, output = engine(capsys, monkeypatch, "plugins", path)
    assert code == 0 and "plugins.async_copy (schedule): Transfer on copy streams" in output
    assert "slots = 5: Pinned buffers" in output
    code, output = engine(capsys, monkeypatch, "plugins")
    assert code == 0 and "async_copy" not in output and "plugins.adamw" in output
    code, output = engine(capsys, monkeypatch, "plugins", path, "--set", "plugin.plugins.async_copy.slots=0")
    assert code == 2 and "option slots = 0" in output and "Traceback" not in output
    code, output = engine(capsys, monkeypatch, "plugins", "--set", "train.lr=1")
    assert code == 2 and "give the schedule too" in output


# The documented example


def documented(kind: str) -> str:
    """The first block of a kind in the docs."""
    return DOCS.read_text().partition(f"```{kind}\n")[2].partition("```")[0]


def test_the_documented_example_swaps_the_objective_adds_a_stage_and_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "power.py").write_text(documented("python"))
    monkeypatch.chdir(tmp_path)
    tables = tomllib.loads(schedule_with().to_toml()) | tomllib.loads(documented("toml"))
    schedule = structure(tables)
    assert [stage.name for stage in schedule.stage].index("count") == 3
    host = load_plugins(schedule.plugin)
    weights = host.choose_named(
        "make_objective", "train.objective", schedule.train.objective, train=schedule.train
    )
    supervised = torch.tensor([[True, True, False, True]])
    found = weights(torch.rand(1, 4), supervised)
    torch.testing.assert_close(found, torch.tensor([[1.0, 2**-0.7, 0.0, 4**-0.7]]))
    count = host.choose_named("make_stage", "stage[3].name", "count", schedule=schedule)
    assert host.choose("make_stage", name="pack", schedule=schedule) is None
    lane, cargo = SimpleNamespace(name="drafter.0@cpu"), object()
    assert count(lane, 7, cargo) is cargo
    host.tell("step_finished", step=10, row={"loss": 2.5})
    assert capsys.readouterr().out == "step 10: loss 2.500, seen {'drafter.0@cpu': 1}\n"


def test_the_documented_example_runs_on_lanes_and_all_of_it_takes_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    project = small_project(tmp_path)
    assert not tmp_path.is_relative_to(DOCS.parent.parent)
    (tmp_path / "power.py").write_text(documented("python"))
    # Both end and begin with [train], so what stands behind the docs' heading goes on in the file's.
    assert "[" not in project.read_text().partition("[train]")[2]
    heading, _, rest = documented("toml").partition("\n")
    assert heading == "[train]"
    with_power = tmp_path / "with_power.toml"
    with_power.write_text(project.read_text() + rest + "print_every = 2\n")
    screen = io.StringIO()
    result = run(load_schedule(with_power, [ONE_LANE_EACH]), console=Console(file=screen, width=200))
    assert result.steps == 6 and (result.checkpoint / "model.safetensors").is_file()

    # Its objective: the losses are those of the plain loop with these weights, and not the default's.
    losses = [row["loss"] for row in rows_of(result.folder.path / "metrics.jsonl") if "loss" in row]
    assert losses == plain_losses(project, power_law) != plain_losses(project, None)

    # Its stage: every micro-batch, once, on the drafter's lane, between its neighbours.
    began: dict[str, dict[int, float]] = {}
    for row in rows_of(result.folder.path / "timings.jsonl"):
        if row["stage"] in ("transfer", "count", "drafter-fwd-bwd"):
            assert row["lane"] == "drafter.0@cpu"
            assert row["micro_batch"] not in began.setdefault(row["stage"], {})
            began[row["stage"]][row["micro_batch"]] = row["start"]
    assert sorted(began["count"]) == list(range(12))
    for index, start in began["count"].items():
        assert began["transfer"][index] <= start <= began["drafter-fwd-bwd"][index]
    assert re.search(r"\bcount\b", screen.getvalue())

    # Its watching: a line every second step; lanes may be ahead of a step, but not of the last.
    told = re.findall(r"step (\d): loss ([\d.]+), seen \{'drafter.0@cpu': (\d+)\}", capsys.readouterr().out)
    assert [(int(step), loss) for step, loss, _ in told] == [(n, f"{losses[n - 1]:.3f}") for n in (2, 4, 6)]
    assert all(int(seen) >= 2 * int(step) for step, _, seen in told) and told[-1][2] == "12"


def power_law(cross_entropy: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """What the documented objective weighs with the schedule's exponent, written another way."""
    return torch.tensor([1.0, 2.0, 3.0]).pow(-0.7).expand_as(cross_entropy) * supervised


def plain_losses(project: Path, weights: Any) -> list[float]:
    """Six steps of the plain loop, with other weights where some are given."""
    loop = plain_loop(project)
    if weights:
        recipe = attrs.evolve(loop.parts.recipe, weights=weights)
        plan = attrs.evolve(loop.parts.plan, recipe=recipe)
        loop = attrs.evolve(loop, parts=attrs.evolve(loop.parts, plan=plan))
    return [train_step(loop, step)["loss"] for step in range(6)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_docs_name_every_built_in_plugin_with_its_hooks_and_options() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `plugins.")]
    modules = sorted(f"plugins.{path.stem}" for path in (DOCS.parent.parent / "plugins").glob("[a-z]*.py"))
    assert set(DEFAULT_PLUGINS) <= set(modules)
    for name in modules:
        host = host_with(name)
        (row,) = (row for row in rows if f"`{name}`" in row)
        options = [field.name for field in attrs.fields(type(host.plugins[0].options))]
        for word in [*host.hooks_of(host.plugins[0]), *options]:
            assert f"`{word}`" in row, (name, word)
