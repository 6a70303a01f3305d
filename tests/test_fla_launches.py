"""FLA's gated delta rule from several threads, through its own code and Triton's, over a stub driver."""

import pytest
from stub_process import findings_of

MEMOS = 17
"""Functions of FLA 0.6 with a memo."""


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """From a process of its own, since FLA cannot be imported here without deceiving every later test."""
    return findings_of("fla_launches.py", tmp_path_factory.mktemp("empty"))


def test_without_a_serializer_threads_that_meet_unknown_keys_lose_their_arguments(findings):
    assert any("'NoneType' object is not a mapping" in error for error in findings["none"]["raised"])


@pytest.mark.parametrize("interval", [5000, 10])
@pytest.mark.parametrize("threads", [2, 4, 8])
@pytest.mark.parametrize("mode", ["tune", "launch", "stage"])
def test_every_key_is_tuned_once_and_nobody_fails(findings, mode, threads, interval):
    found = findings[f"{mode}, {threads} threads, {interval} µs"]
    assert found["raised"] == [] and found["tuned_twice"] == []
    assert found["cold_keys"] == 12
    assert found["launches"] == [threads * 21] * 2  # three forwards of seven kernels
    assert found["cold_later"] == 0
    if mode != "launch":
        assert found["waited_later"] == 0


def test_without_a_serializer_threads_break_each_others_memo(findings):
    bare = findings["memo, none"]
    assert "deque mutated during iteration" in bare["race"]
    assert bare["lengths of changed boundaries"] == [10, 20]  # of the boundaries before the change
    assert bare["inference tensor behind inference mode"] is True


@pytest.mark.parametrize("when", ["before", "after"])
def test_with_one_installed_before_or_after_flas_import_they_do_not(findings, when):
    assert findings[f"rings, installed {when} FLA"] == [MEMOS, 0]
    assert findings[f"memo, {when}"] == {
        "race": None,
        "lengths of changed boundaries": [20, 10],
        "inference tensor behind inference mode": False,
    }


def test_the_memo_still_saves_its_thread_the_work(findings):
    assert findings["memo is found again"] is True


def test_removal_leaves_fla_as_it_was(findings):
    assert findings["rings, removed"] == [0, MEMOS]
    assert findings["decorator, removed"] == "fla.utils.decorators"
    assert findings["finders left"] == []
