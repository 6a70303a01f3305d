"""`generate` and the sample at a run's end: text as it comes, and who wrote what of it."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from served_runs import WORDS, served_project, served_run, write_tokenizer
from small_runs import MASK
from test_commands import engine

from engine import decoded_sample
from engine.builtin import TINY_HYBRID, resolve
from engine.data.chat import load_tokenizer
from engine.decoded_sample import AnswerPrinter, TextStream, print_sample
from engine.dflash.speculation import decode_alone, speculate
from engine.errors import DifferenceFound, TargetError
from engine.generate import generate, prompt_ids
from engine.run import run
from engine.schedule import load_schedule
from engine.served_pair import load_pair
from engine.training_parts import TrainingParts

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_run(tmp_path_factory.mktemp("served"))


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def texts(trained: Path, prompt: str, tokens: int, *, chat: bool = True) -> list[str]:
    """The words of the target's own answer."""
    pair = load_pair(trained, device="cpu")
    ids = prompt_ids(pair, prompt, chat=chat)
    return [
        WORDS[token] for token in decode_alone(pair.target, [ids], max_new_tokens=tokens, stop=pair.stop)[0]
    ]


def test_a_pipe_gets_the_targets_answer_and_nothing_else(capsys, monkeypatch, trained: Path) -> None:
    monkeypatch.setattr(
        "sys.argv",
        [
            "engine",
            "generate",
            str(trained),
            "--prompt",
            "w5 w9 w7",
            "--max-new-tokens",
            "20",
            "--device",
            "cpu",
        ],
    )
    from engine.cli import main

    with pytest.raises(SystemExit) as end:
        main()
    output = capsys.readouterr()
    assert end.value.code in (0, None)
    assert output.out == "".join(texts(trained, "w5 w9 w7", 20)) + "\n"
    assert "accepted length" in output.err and "of 20 tokens are the drafter's" in output.err
    assert "reached --max-new-tokens 20" in output.err


def test_a_terminal_sees_the_drafters_tokens_in_green(trained: Path) -> None:
    screen = terminal()
    decoded = generate(
        trained, "w5 w9 w7", max_new_tokens=20, device="cpu", output=screen, notes=Console(file=io.StringIO())
    )
    text = written(screen)
    assert text.count(GREEN) == sum(decoded.drafted) > 0
    coloured, at = [], 1  # the first is the prefill's
    for tokens, drafted in zip(decoded.acceptance, decoded.drafted, strict=True):
        coloured += [f"{GREEN}{WORDS[token]}{PLAIN}" for token in decoded.tokens[at : at + drafted]]
        coloured += [WORDS[token] for token in decoded.tokens[at + drafted : at + tokens]]
        at += tokens
    assert text == WORDS[decoded.tokens[0]] + "".join(coloured) + "\n"


def test_text_is_printed_before_the_answer_is_whole(trained: Path) -> None:
    pair = load_pair(trained, device="cpu")
    screen = Console(file=io.StringIO())
    printer = AnswerPrinter(screen, TextStream(pair.tokenizer, [5, 9, 7]), pair.stop)
    lengths = []

    def told(_: int, tokens: list[int], drafted: int) -> None:
        printer.add(tokens, drafted)
        lengths.append(len(written(screen)))

    (decoded,) = speculate(
        pair.target, pair.drafter, [[5, 9, 7]], max_new_tokens=12, stop=pair.stop, on_tokens=told
    )
    assert len(lengths) == 1 + len(decoded.acceptance) and lengths == sorted(set(lengths))


def test_the_prompt_is_rendered_by_the_chat_template_or_taken_as_it_is(trained: Path) -> None:
    pair = load_pair(trained, device="cpu")
    assert prompt_ids(pair, "w5 w9", chat=True) == [5, 9, 1]
    assert prompt_ids(pair, "w5 w9", chat=False) == [5, 9]


def test_sampling_repeats_with_its_seed(trained: Path) -> None:
    def sampled(seed: int) -> list[int]:
        console = Console(file=io.StringIO())
        return generate(
            trained,
            "w5",
            max_new_tokens=12,
            temperature=1.0,
            seed=seed,
            device="cpu",
            output=console,
            notes=console,
        ).tokens

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--prompt", ""], ["--prompt is empty"]),
        (["--prompt", "", "--no-chat"], ["--prompt is empty"]),
        (["--prompt", f"w5 {WORDS[MASK]}"], ["mask token 95"]),
        (["--prompt", "w5", "--max-new-tokens", "600"], ["--max-new-tokens 600", "512 positions"]),
        (["--prompt", "w5", "--no-chat", "--template", "a=1"], ["--template", "--no-chat"]),
        (["--prompt", "w5", "--device", "cuda:99"], ["cuda:99"]),
    ],
    ids=["empty", "empty without chat", "mask token", "too long", "template without chat", "device"],
)
def test_what_cannot_be_answered_ends_with_2(
    capsys, monkeypatch, trained: Path, options: list[str], words: list[str]
) -> None:
    code, output = engine(capsys, monkeypatch, "generate", trained, *options)
    assert code == 2 and all(word in output for word in words), output
    assert "Traceback" not in output


def test_a_tokenizer_without_a_template_needs_no_chat(
    capsys, monkeypatch, trained: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(trained.parent / "target", target)
    (target / "chat_template.jinja").unlink()
    write_tokenizer(target, template=None)
    options = ("generate", trained, "--prompt", "w5", "--target", target, "--device", "cpu")
    code, output = engine(capsys, monkeypatch, *options)
    assert code == 2 and "--no-chat" in output, output
    assert engine(capsys, monkeypatch, *options, "--no-chat", "--max-new-tokens", 3)[0] == 0


def test_characters_of_several_tokens_come_whole() -> None:
    tokenizer = load_tokenizer(resolve(TINY_HYBRID))
    text = "naïve – 漢字 🙂\n  end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, [1, 5, 6])
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) == text and stream.rest() == ""
    assert "" in pieces  # or no character was split
    assert not any("\ufffd" in piece for piece in pieces)
    half = TextStream(tokenizer, [])
    assert (
        "".join(half.add(token) for token in tokenizer("字", add_special_tokens=False)["input_ids"][:1]) == ""
    )
    assert half.rest() == "\ufffd"


def test_a_terminal_is_not_steered_by_what_a_model_writes(trained: Path) -> None:
    class Escapes(TextStream):
        def add(self, token: int) -> str:
            return "\x1b]0;title\x07"

    screen = terminal()
    printer = AnswerPrinter(screen, Escapes(load_pair(trained, device="cpu").tokenizer, []), stop=())
    printer.add([1], 0)
    assert "\x1b]" not in written(screen) and "title" in written(screen)


def test_a_run_ends_with_a_coloured_sample_and_its_acceptance(tmp_path: Path) -> None:
    path = served_project(tmp_path)
    settings = ["run.steps=30", "train.lr=2e-2"]
    screen = terminal()
    run(load_schedule(path, [*settings, "run.eval_every=30"]), output=tmp_path / "run", console=screen)
    _, _, sample = written(screen).rpartition("a held-out prompt and its answer with step_000030")
    assert "what the drafter said is in colour" in sample
    assert GREEN in sample and "accepted length" in sample and "of 4 over" in sample
    assert written(screen).rstrip().endswith(f"tokens/s{PLAIN}")


@pytest.mark.parametrize(
    "change, reason",
    [("run.eval_every=0", "with run.eval_every"), ("tokenizer", "holds no tokenizer")],
)
def test_a_run_that_cannot_decode_says_why(tmp_path: Path, change: str, reason: str) -> None:
    path = served_project(tmp_path)
    settings = ["run.steps=1", "run.eval_every=1"]
    if change == "tokenizer":
        for file in (tmp_path / "target").glob("tokenizer*"):
            file.unlink()
    else:
        settings.append(change)
    screen = Console(file=io.StringIO(), width=100)
    run(load_schedule(path, settings), output=tmp_path / "run", console=screen)
    assert "no decoded sample" in written(screen) and reason in written(screen)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingParts, Path]:
    """A run that has just ended, and its checkpoint."""
    root = tmp_path_factory.mktemp("finished")
    taken: list[tuple[TrainingParts, Path]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "engine.run.print_sample", lambda parts, checkpoint, _: taken.append((parts, checkpoint))
        )
        schedule = load_schedule(served_project(root), ["run.steps=1", "run.eval_every=1"])
        run(schedule, output=root / "run", console=Console(file=io.StringIO()))
    return taken[0]


def sampled(finished: tuple[TrainingParts, Path]) -> str:
    screen = Console(file=io.StringIO(), width=200)
    print_sample(*finished, screen)
    return written(screen)


def test_nothing_is_said_about_colour_where_there_is_none(finished: tuple[TrainingParts, Path]) -> None:
    text = sampled(finished)
    assert "a held-out prompt and its answer with step_000001:" in text and "colour" not in text


def fails(error: BaseException) -> Callable[..., Any]:
    def raises(*args: object, **options: object) -> None:
        raise error

    return raises


@pytest.mark.parametrize("part", ["_first_prompt", "load_tokenizer", "read_drafter_config", "speculate"])
def test_a_sample_that_cannot_be_decoded_fails_no_run(
    monkeypatch: pytest.MonkeyPatch, finished: tuple[TrainingParts, Path], part: str
) -> None:
    monkeypatch.setattr(decoded_sample, part, fails(TargetError("this target has chunked_attention")))
    assert sampled(finished).endswith("no decoded sample: this target has chunked_attention\n")


def test_a_sample_that_fails_half_way_ends_its_line(
    monkeypatch: pytest.MonkeyPatch, finished: tuple[TrainingParts, Path]
) -> None:
    def breaks(*args: object, on_tokens: Callable[[int, list[int], int], None], **options: object) -> None:
        on_tokens(0, [5, 9], 1)
        raise TargetError("lost")

    monkeypatch.setattr(decoded_sample, "speculate", breaks)
    assert sampled(finished).endswith("w5w9\nno decoded sample: lost\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DifferenceFound("x"), AssertionError("a defect")])
def test_an_interruption_or_a_defect_in_the_sample_is_not_talked_away(
    monkeypatch: pytest.MonkeyPatch, finished: tuple[TrainingParts, Path], error: BaseException
) -> None:
    monkeypatch.setattr(decoded_sample, "speculate", fails(error))
    with pytest.raises(type(error)):
        sampled(finished)


def test_a_sample_stays_within_the_targets_positions(
    monkeypatch: pytest.MonkeyPatch, finished: tuple[TrainingParts, Path]
) -> None:
    monkeypatch.setattr(decoded_sample, "_first_prompt", lambda held_out: [5] * 509)
    assert "of 3 tokens are the drafter's" in sampled(finished)
    monkeypatch.setattr(decoded_sample, "_first_prompt", lambda held_out: [5] * 512)
    assert "no decoded sample: a prompt of 512 tokens fills the target's 512 positions" in sampled(finished)
