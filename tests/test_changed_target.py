"""A plugin that changes numbers in training is told wherever target and drafter are measured without it."""

from pathlib import Path

import orjson
import pytest
from served_runs import served_project
from test_commands import engine

from engine.export import export
from engine.plugin_host import changes_numbers, host_of, load_plugins
from engine.plugin_loading import load_plugin
from engine.run import run
from engine.schedule import Plugin, load_schedule
from engine.served_pair import numbers_changed_by
from tools.quality_curve import evaluations

SAID = "plugins.fp8_target may change numbers in training"
EIGHT_BITS = """
[[plugin]]
use = "plugins.fused_target"
on = "all"
[[plugin]]
use = "plugins.fp8_target"
on = "all"
"""
WRAPPER = """
import attrs
from engine.hookspecs import hookimpl
{line}
@attrs.frozen
class Options: pass
class Wrapper:
    @hookimpl
    def {hook}(self): return None
def make(options): return Wrapper()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("changed")
    project = served_project(root)
    project.write_text(project.read_text() + EIGHT_BITS)
    schedule = load_schedule(project, ["run.steps=4", "run.eval_every=4", "train.lr=2e-2"])
    return run(schedule, output=root / "run").folder.path


@pytest.mark.parametrize("hook", ["wrap_target", "wrap_drafter", "make_feature_path"])
def test_a_plugin_changes_numbers_unless_its_module_says_that_it_keeps_them(
    tmp_path: Path, hook: str
) -> None:
    for line, changes in (("", True), ("KEEPS_NUMBERS = False", True), ("KEEPS_NUMBERS = True", False)):
        path = tmp_path / f"wrapper{len(line)}.py"
        path.write_text(WRAPPER.format(line=line, hook=hook))
        plugin = load_plugin(str(path), {}, "schedule")
        assert changes_numbers(plugin) == changes
        assert numbers_changed_by(host_of([plugin])) == ((str(path),) if changes else ())
    keep = ("fused_target", "graph_target", "lazy_compile", "split_fc", "muon")
    kept = [f"plugins.{name}" for name in keep]
    assert numbers_changed_by(load_plugins([Plugin(use=use) for use in kept])) == ()


def test_evaluate_says_and_writes_it(capsys, monkeypatch, trained: Path, tmp_path: Path) -> None:
    code, output = engine(
        capsys, monkeypatch, "evaluate", trained, "--device", "cpu", "--prompts", 3, "--max-new-tokens", 4,
        "--json", tmp_path / "f.json",
    )  # fmt: skip
    assert code == 0 and SAID in " ".join(output.split()), output
    assert orjson.loads((tmp_path / "f.json").read_bytes())["numbers_changed_by"] == ["plugins.fp8_target"]
    assert len(evaluations(trained)) == 2  # through the 8-bit walk, its own tokens included


def test_generate_says_it(capsys, monkeypatch, trained: Path) -> None:
    code, output = engine(
        capsys,
        monkeypatch,
        "generate",
        trained,
        "--device",
        "cpu",
        "--prompt",
        "w5 w6",
        "--max-new-tokens",
        4,
    )
    assert code == 0 and SAID in " ".join(output.split()), output


def test_the_card_says_it_under_serving(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    serving = card[card.index("## Serving") : card.index("## Training")]
    assert "In training plugins.fp8_target may have changed the numbers of target or drafter" in serving
