"""Preparation: answers masked exactly, bad rows left out with a reason, nothing half-written."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.data.chat import load_tokenizer, tokenizer_fingerprint
from engine.data.documents import Documents, assert_disjoint, open_documents
from engine.data.fresh_folder import fresh_folder
from engine.data.preparation import prepare
from engine.data.report import Report
from engine.errors import DataError

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As templates of thinking models do: an empty thinking block before the last answer alone.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TEXTS = [
    "What is two and two? It is four, as everybody knows.",
    "the quick brown fox jumps over the lazy dog\n\nand the dog sleeps on, line after line",
    "def add(one, two):\n    return one + two\n",
    "system user assistant <think> </think>",
]


def make_tokenizer(folder: Path, template: str | None, *, nfc: bool = False) -> Path:
    """A byte-level BPE of 400 entries with ChatML's tokens, saved as people's folders are."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS * 5, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    special = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|pad|>")]
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>", model_max_length=64
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    templates = {
        "plain": PLAIN,
        "marked": MARKED,
        "thinking": THINKING,
        "none": None,
        "trimming": PLAIN.replace("message['content']", "message['content'] | trim"),
        "marked trimming": MARKED.replace("message['content']", "message['content'] | trim"),
        "marked widely": MARKED.replace("{% endgeneration %}", "\n{% endgeneration %}"),
        "marked wrongly": MARKED.replace("{% generation %}", "{% generation %}assistant: "),
        "refusing": "{{ raise_exception('only for machines') }}",
        "no end": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    }
    made = {name: make_tokenizer(base / name.replace(" ", "_"), text) for name, text in templates.items()}
    made["nfc"] = make_tokenizer(base / "nfc", PLAIN, nfc=True)
    return made


def chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]


def write_lines(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def run(tmp_path: Path, tokenizer: Path, rows: list[Any], **options: Any) -> tuple[Report, str]:
    screen = Console(file=io.StringIO(), width=200)
    source = write_lines(tmp_path / "in.jsonl", rows)
    report = prepare([source], tokenizer, tmp_path / "out", console=screen, **options)
    assert isinstance(screen.file, io.StringIO)
    return report, screen.file.getvalue()


def supervised_spans(documents: Documents, index: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    document = documents.document(index)
    spans: list[list[int]] = []
    before = False
    for token, supervised in zip(document.input_ids.tolist(), document.loss_mask.tolist(), strict=True):
        if supervised and not before:
            spans.append([])
        if supervised:
            spans[-1].append(token)
        before = supervised
    return [str(tokenizer.decode(span)) for span in spans]


CONVERSATIONS = [
    chat("What is two and two?", "four"),
    chat("Say x", "x"),
    chat("hi", "the quick\n\nbrown fox", "and then?", "  jumps over\tthe dog "),
    [{"role": "system", "content": "be brief"}, *chat("naïve question – 你好", "réponse – 再见 🙂")],
    chat("windows\r\nlines", "one\r\ntwo\r\n"),
    chat("non\u00a0breaking", "\u00a0four\u00a0and two\u2028"),
    chat("a marker in the answer", "he wrote <|im_end|> and assistant\n twice: assistant\n"),
    chat("the answer repeats the prompt", "the answer repeats the prompt"),
]


@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_exactly_the_answers_and_their_end_of_turn_are_supervised(
    tmp_path: Path, folders: dict[str, Path], kind: str
) -> None:
    rows = [{"messages": turns} for turns in CONVERSATIONS]
    report, _ = run(tmp_path, folders[kind], rows)
    assert report.kept == len(rows) and not report.skipped
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    documents = open_documents(tmp_path / "out")
    for index, turns in enumerate(CONVERSATIONS):
        answers = [turn["content"] + "<|im_end|>" for turn in turns if turn["role"] == "assistant"]
        assert supervised_spans(documents, index, tokenizer) == answers
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = documents.document(index).input_ids.tolist()
        assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_templates_with_and_without_marks_give_the_same_documents(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    rows = [{"messages": turns} for turns in CONVERSATIONS]
    for kind in ("plain", "marked"):
        (tmp_path / kind).mkdir()
        run(tmp_path / kind, folders[kind], rows)
    one, other = open_documents(tmp_path / "plain" / "out"), open_documents(tmp_path / "marked" / "out")
    assert one.fingerprint == other.fingerprint


def test_every_spelling_of_a_conversation_gives_the_same_document(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    messages = chat("What is two and two?", "four")
    shared = [
        {"from": name, "value": turn["content"]}
        for name, turn in zip(("human", "gpt"), messages, strict=True)
    ]
    spellings: list[Any] = [
        {"messages": messages},
        {"conversations": messages},
        {"conversations": shared},
        {"messages": json.dumps(messages)},
        {"conversations": json.dumps(shared), "messages": None, "id": 7},
        b"\xef\xbb\xbf" + json.dumps({"messages": messages}).encode(),
        json.dumps({"messages": messages}).encode() + b"\r",
        b"",
    ]
    spellings.insert(0, spellings.pop(5))  # a byte order mark stands at a file's start
    report, printed = run(tmp_path, folders["plain"], spellings)
    assert (report.rows, report.kept) == (7, 1)
    assert report.dropped == {"duplicate of an earlier row": 6}
    assert "duplicate of an earlier row" in printed


BAD_ROWS: list[tuple[Any, str, str]] = [
    (b'{"messages": [', "not JSON", ""),
    (b'{"messages": "\xff"}', "not JSON", ""),
    ([1, 2], "not a JSON object", "list"),
    ({"text": "hello"}, "no conversation", ""),
    ({"messages": []}, "conversation is no list", "empty"),
    ({"messages": "hello"}, "conversation is no list", "not JSON"),
    ({"messages": {"role": "user"}}, "conversation is no list", "dict"),
    ({"messages": ["hello"]}, "a turn is no object", "str"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role", "'wizard'"),
    ({"messages": [{"content": "x"}]}, "unknown role", "None"),
    ({"messages": [{"role": "user", "content": None}]}, "content is not text", "NoneType"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content is not text", "list"),
    ({"messages": chat("only a question")}, "no answer", ""),
    ({"messages": chat("a question", "")}, "empty answer", ""),
    ({"messages": chat("a question", " \n\u00a0")}, "empty answer", ""),
    ({"messages": chat("q", "a")[1:]}, "an answer without a prompt before it", ""),
    (
        {"messages": [*chat("q"), {"role": "assistant", "content": "a", "reasoning_content": "hm"}]},
        "part of an answer outside its content",
        "reasoning_content",
    ),
    ({"prompt_ids": [1, 2], "answer_ids": []}, "empty answer", ""),
    ({"prompt_ids": [], "answer_ids": [1]}, "empty prompt", ""),
    ({"prompt_ids": [1]}, "prompt_ids and answer_ids must be lists of integers", "answer_ids"),
    ({"prompt_ids": [1], "answer_ids": [True]}, "prompt_ids and answer_ids must be lists of integers", ""),
    ({"prompt_ids": [1], "answer_ids": [1.0]}, "prompt_ids and answer_ids must be lists of integers", ""),
    ({"prompt_ids": [1], "answer_ids": [99999]}, "token id outside the vocabulary", "99999"),
    ({"prompt_ids": [-1], "answer_ids": [1]}, "token id outside the vocabulary", "-1"),
]


@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_bad_rows_are_skipped_with_place_and_reason(
    tmp_path: Path, folders: dict[str, Path], kind: str
) -> None:
    good = [{"messages": chat(f"question {number}", f"answer {number}")} for number in range(3)]
    rows = [good[0], *(row for row, _, _ in BAD_ROWS), *good[1:]]
    report, printed = run(tmp_path, folders[kind], rows, max_bad=0.9)
    assert (report.rows, report.kept) == (len(rows), 3)
    for number, (skipped, (_, reason, detail)) in enumerate(zip(report.skipped, BAD_ROWS, strict=True), 2):
        assert skipped.where == f"{tmp_path / 'in.jsonl'}:{number}"
        assert skipped.reason == reason
        assert detail in skipped.detail
    assert sum(report.dropped.values()) + report.kept == report.rows
    for reason in report.dropped:
        assert f"dropped: {reason}" in printed
    assert "in.jsonl:2: not JSON" in printed and "and 14 more" in printed
    listed = (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["where"] for line in listed] == [bad.where for bad in report.skipped]
    assert len(open_documents(tmp_path / "out")) == 3


def test_more_bad_rows_than_allowed_stop_the_work_and_leave_nothing(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    good = [{"messages": chat(f"question {number}", f"answer {number}")} for number in range(98)]
    rows = [*good, b"nonsense", b"nonsense"]
    with pytest.raises(
        DataError, match=r"2 of 100 rows are bad, more than max_bad = 0.01 \(2 × not JSON"
    ) as found:
        run(tmp_path, folders["plain"], rows)
    assert "in.jsonl:99: not JSON" in str(found.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    report, _ = run(tmp_path, folders["plain"], rows, max_bad=0.02)
    assert report.kept == 98


@pytest.mark.parametrize(
    ("text", "complaint"), [(b"", "empty"), (b"\n \r\n", "no rows"), (b'{"a": 1}\n', "none of the 1 rows")]
)
def test_a_file_that_gives_no_row_is_named(
    tmp_path: Path, folders: dict[str, Path], text: bytes, complaint: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=rf"in.jsonl: .*{complaint}") as found:
        prepare([path], folders["plain"], tmp_path / "out", max_bad=1.0)
    assert found.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_missing_inputs_tokenizers_and_templates_are_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    good = write_lines(tmp_path / "in.jsonl", [{"messages": chat("q", "a")}])
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"none.jsonl: no such file"):
        prepare([tmp_path / "none.jsonl"], folders["plain"], out)
    with pytest.raises(DataError, match="no input file given"):
        prepare([], folders["plain"], out)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DataError, match=r"hollow: holds no \*.jsonl"):
        prepare([tmp_path / "hollow"], folders["plain"], out)
    with pytest.raises(DataError, match="nowhere: no such tokenizer folder"):
        prepare([good], tmp_path / "nowhere", out)
    with pytest.raises(DataError, match="hollow: holds no tokenizer"):
        prepare([good], tmp_path / "hollow", out)
    with pytest.raises(DataError, match="one chat template is needed and the tokenizer has none"):
        prepare([good], folders["none"], out)
    for name, value in (("max_bad", 1.5), ("max_length", 1), ("held_out", 0.0), ("held_out", 1.0)):
        options: dict[str, Any] = {name: value}
        with pytest.raises(DataError, match=f"{name} = {value}"):
            prepare([good], folders["plain"], out, **options)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["trimming", "marked trimming", "thinking", "marked wrongly"])
def test_a_template_that_rewrites_every_answer_is_an_error_that_names_it(
    tmp_path: Path, folders: dict[str, Path], kind: str
) -> None:
    rows = [{"messages": chat(f"question {number}", f"answer {number} \n")} for number in range(400)]
    with pytest.raises(DataError, match=r"template doesn't let .*the template changes the answer") as found:
        run(tmp_path, folders[kind], rows, max_bad=0.5)
    assert str(found.value).startswith(str(folders[kind]))
    assert "256 rows read" in str(found.value), "the first chunk is enough to tell"


@pytest.mark.parametrize("kind", ["trimming", "marked trimming"])
def test_a_row_whose_answer_the_template_rewrites_is_left_out(
    tmp_path: Path, folders: dict[str, Path], kind: str
) -> None:
    rows = [{"messages": chat("q", "a clean answer")}, {"messages": chat("q", "ends in white space \n")}]
    report, _ = run(tmp_path, folders[kind], rows, max_bad=0.5)
    assert report.dropped == {"the template changes the answer": 1}
    assert report.skipped[0].where.endswith(":2")


def test_a_template_that_refuses_conversations_is_quoted(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="only for machines"):
        run(tmp_path, folders["refusing"], [{"messages": chat("q", "a")}])


def test_thinking_blocks_need_the_option_and_multi_turn_rows_the_last_answer(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    rows = [{"messages": chat("one?", "first")}, {"messages": chat("one?", "first", "two?", "second")}]
    options = {"enable_thinking": False}
    report, _ = run(tmp_path, folders["thinking"], rows, max_bad=0.5, template_options=options)
    assert report.dropped == {"the template rewrites a prompt once answered": 1}
    report, _ = run(
        tmp_path, folders["thinking"], rows, template_options=options, answers="last", overwrite=True
    )
    assert report.kept == 2
    tokenizer = load_tokenizer(folders["thinking"])
    documents = open_documents(tmp_path / "out")
    assert supervised_spans(documents, 0, tokenizer) == ["first<|im_end|>"]
    assert supervised_spans(documents, 1, tokenizer) == ["second<|im_end|>"]


def test_the_last_answer_alone_can_be_supervised_with_marks_too(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    rows = [{"messages": chat("one?", "first", "two?", "second")}]
    run(tmp_path, folders["marked"], rows, answers="last")
    spans = supervised_spans(open_documents(tmp_path / "out"), 0, load_tokenizer(folders["marked"]))
    assert spans == ["second<|im_end|>"]


def test_a_tokenizer_that_normalises_an_answer_is_noticed(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = [{"messages": chat("q", "composed é")}, {"messages": chat("q", "decomposed e\u0301")}]
    report, _ = run(tmp_path, folders["nfc"], rows, max_bad=0.5)
    assert report.dropped == {"the tokenizer changes the answer": 1}


def test_an_answer_that_merges_with_its_prompt_is_noticed(tmp_path: Path, folders: dict[str, Path]) -> None:
    # The prompt ends in a space of its own token; before a word the space belongs to the word's token.
    rows = [{"messages": chat("q", "the quick brown fox")}, {"messages": chat("q", "\n\n")}]
    with pytest.raises(DataError, match="an answer starts inside a token"):
        run(tmp_path, folders["no end"], rows[:1])


def test_what_a_template_adds_after_the_end_of_a_turn_is_not_supervised(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    run(tmp_path, folders["plain"], [{"messages": chat("What is two and two?", "four")}])
    document = open_documents(tmp_path / "out").document(0)
    tokenizer = load_tokenizer(folders["plain"])
    assert str(tokenizer.decode(document.input_ids[-1:].tolist())) == "\n"
    assert document.loss_mask[-2] and not document.loss_mask[-1]


def test_marks_that_take_in_the_line_break_are_kept_as_they_are(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    run(tmp_path, folders["marked widely"], [{"messages": chat("q", "four")}])
    spans = supervised_spans(open_documents(tmp_path / "out"), 0, load_tokenizer(folders["marked widely"]))
    assert spans == ["four<|im_end|>\n"]


def test_token_rows_keep_their_ids_and_need_no_template(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = [{"prompt_ids": [5, 6, 7], "answer_ids": [8]}, {"prompt_ids": [5], "answer_ids": [9, 9, 2]}]
    report, _ = run(tmp_path, folders["none"], rows)
    documents = open_documents(tmp_path / "out")
    assert documents.document(0).input_ids.tolist() == [5, 6, 7, 8]
    assert documents.document(0).loss_mask.tolist() == [False, False, False, True]
    assert documents.document(1).input_ids.tolist() == [5, 9, 9, 2]
    manifest = report.manifests["train"]
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(folders["none"]))
    assert manifest.vocab_size == len(load_tokenizer(folders["none"]))


def test_long_rows_are_cut_at_the_end_and_dropped_when_nothing_is_left(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    rows = [
        {"prompt_ids": [1] * 4, "answer_ids": [2] * 20},
        {"prompt_ids": [1] * 10, "answer_ids": [2] * 20},
        {"prompt_ids": [1] * 4, "answer_ids": [3]},
    ]
    report, printed = run(tmp_path, folders["plain"], rows, max_length=10)
    assert (report.kept, report.cut) == (2, 1)
    assert report.dropped == {"no supervised token within max_length": 1}
    documents = open_documents(tmp_path / "out")
    assert documents.lengths.tolist() == [10, 5]
    assert documents.document(0).input_ids.tolist() == [1] * 4 + [2] * 6
    assert "no supervised token within max_length" in printed


def test_the_held_out_part_shares_no_answer_with_training(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = [{"messages": chat(f"question {place}", f"answer {place % 40}")} for place in range(300)]
    report, printed = run(tmp_path, folders["plain"], rows, held_out=0.2)
    train, held_out = (
        open_documents(tmp_path / "out" / "train"),
        open_documents(tmp_path / "out" / "held_out"),
    )
    assert_disjoint(train, held_out)
    assert len(train) + len(held_out) == report.kept == 300
    assert 10 <= len(held_out) <= 120
    assert set(report.manifests) == {"train", "held_out"}
    assert train.manifest is not None and held_out.manifest is not None
    assert "held_out" in printed
    assert (
        f"held out: {len(held_out)} of 300 documents, {len(held_out) / 300:.1%}; 20.0% were asked for"
        in printed
    )
    with pytest.raises(DataError, match="name one of the folders in it: held_out, train"):
        open_documents(tmp_path / "out")


def test_a_held_out_share_that_was_missed_by_far_is_told() -> None:
    few = summarised(3)
    report = Report(Path("out"), kept=100, held_out=0.02, manifests={"held_out": few})
    assert report.shares() == "held out: 3 of 100 documents, 3.0%; 2.0% were asked for"
    missed = attrs.evolve(report, held_out=0.2).shares()
    assert missed and "20.0% were asked for, and the split by answer misses it where" in missed
    assert attrs.evolve(report, held_out=None).shares() is None


def summarised(documents: int) -> Any:
    return type("Written", (), {"documents": documents})()


def test_what_a_killed_process_was_writing_goes_at_the_next_start(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from engine.data.fresh_folder import fresh_folder\n"
        "with fresh_folder(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'rows').write_text('x'); print(partial, flush=True); time.sleep(600)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        partial = Path(other.stdout.readline().strip())
        with fresh_folder(tmp_path / "out"):
            assert (partial / "rows").exists()  # its process lives
    finally:
        other.kill()
        other.wait()
    (tmp_path / "out" / "rows").touch()
    mine = tmp_path / ".out.partial-notes"
    mine.mkdir()
    assert partial.exists()
    with pytest.raises(DataError, match="holds files"), fresh_folder(tmp_path / "out"):
        pass
    with fresh_folder(tmp_path / "output"):
        assert partial.exists()  # of another name
    (tmp_path / "out" / "rows").unlink()
    with fresh_folder(tmp_path / "out"):
        assert not partial.exists() and mine.exists()


def test_a_held_out_share_that_leaves_a_side_empty_is_refused(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    with pytest.raises(DataError, match=r"held_out = 0.2 leaves (train|held_out) without"):
        run(tmp_path, folders["plain"], [{"messages": chat("q", "a")}], held_out=0.2)
    assert not (tmp_path / "out").exists()


def test_an_occupied_output_is_refused_before_any_row_is_read(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    rows = [{"messages": chat("q", "a")}]
    run(tmp_path, folders["plain"], rows)
    with pytest.raises(DataError, match="holds files already"):
        run(tmp_path, folders["plain"], [b"nonsense"])
    run(tmp_path, folders["plain"], rows * 2, overwrite=True, held_out=None)


def test_several_files_and_folders_are_read_in_order(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "many").mkdir()
    for name in ("b", "a"):
        write_lines(tmp_path / "many" / f"{name}.jsonl", [{"messages": chat("q", f"answer {name}")}])
    last = write_lines(tmp_path / "last.jsonl", [{"messages": chat("q", "answer c")}])
    prepare([tmp_path / "many", last], folders["plain"], tmp_path / "out", console=Console(quiet=True))
    documents = open_documents(tmp_path / "out")
    tokenizer = load_tokenizer(folders["plain"])
    spans = [supervised_spans(documents, index, tokenizer)[0] for index in range(3)]
    assert spans == [f"answer {name}<|im_end|>" for name in "abc"]


def test_show_marks_the_supervised_tokens(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = [{"messages": chat(f"[bold]question {place}[/bold]", f"answer {place}")} for place in range(5)]
    _, printed = run(tmp_path, folders["plain"], rows, show=2)
    assert printed.count("[[") == 2
    assert "[bold]question 0[/bold]<|im_end|>\n<|im_start|>assistant\n[[answer 0<|im_end|>]]" in printed
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    prepare(
        [tmp_path / "in.jsonl"], folders["plain"], tmp_path / "out", show=1, console=screen, overwrite=True
    )
    assert isinstance(screen.file, io.StringIO)
    assert "\x1b[4;32manswer 0<|im_end|>" in screen.file.getvalue()
    assert "[[" not in screen.file.getvalue()


def test_the_report_tells_the_lengths(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = [{"prompt_ids": [1] * length, "answer_ids": [2]} for length in (1, 3, 7)]
    report, printed = run(tmp_path, folders["plain"], rows)
    lengths = report.manifests["train"].lengths
    assert (lengths.min, lengths.median, lengths.max) == (2, 4, 8)
    rows_shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    for cells in (["documents", "3"], ["supervised tokens", "3"], ["length, p95", "7"], ["length, max", "8"]):
        assert cells in rows_shown
