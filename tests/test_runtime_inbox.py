"""Admission by credit never deadlocks; the plain bounded queue that it replaces does.

The simulation moves lanes through virtual time under either rule. The credit rule is the very
function that real inboxes call.
"""

import heapq
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.runtime.graph import LaneSpec, StageSpec, build_graph
from engine.runtime.inbox import Inbox, Stop, Stopped, admits

STAGES = (
    StageSpec("target-forward", "target"),
    StageSpec("drafter-fwd-bwd", "drafter", after=("target-forward",)),
    StageSpec("optimizer", "drafter", after=("drafter-fwd-bwd",), barrier=True),
)


def by_credit(position, taken, depth, waiting):
    return admits(position, taken, depth)


def by_free_place(position, taken, depth, waiting):
    return waiting < depth


def deadlocks(targets, drafters, micro_batches, depth, durations, admitted, steps=4):
    """Simulate `steps` steps; whether lanes end up waiting for each other for good.

    durations: positive ints, used in turn for every piece of work.
    """
    specs = [LaneSpec("target", n, "cpu") for n in range(targets)]
    specs += [LaneSpec("drafter", n, "cpu") for n in range(drafters)]
    graph = build_graph(STAGES, specs, micro_batches)
    work = [graph.micro_batches_of(lane, 0, steps) for lane in graph.target_lanes]
    expected = [graph.micro_batches_of(lane, 0, steps) for lane in graph.drafter_lanes]
    positions = [{i: position for position, i in enumerate(numbers)} for numbers in expected]
    taken = [0] * drafters
    inboxes = [set() for _ in range(drafters)]
    finished_steps = [0] * drafters
    has_made = [None] * targets  # made and not yet handed over
    made = [0] * targets
    idle = [True] * drafters
    clock, events, count = 0, [], 0

    def later(kind, lane):
        nonlocal count
        heapq.heappush(events, (clock + durations[count % len(durations)], count, kind, lane))
        count += 1

    def progress():
        for t in range(targets):
            i = has_made[t]
            if i is None:
                continue
            d = graph.drafter_lane_of(i).index
            if admitted(positions[d][i], taken[d], depth, len(inboxes[d])):
                inboxes[d].add(i)
                has_made[t] = None
                if made[t] < len(work[t]):
                    later("target", t)
                return True
        for d in range(drafters):
            if not idle[d] or taken[d] == len(expected[d]):
                continue
            due = expected[d][taken[d]]
            at_barrier = graph.step_of(due) > min(finished_steps)
            if due in inboxes[d] and not at_barrier:
                inboxes[d].remove(due)
                taken[d] += 1
                idle[d] = False
                later("drafter", d)
                return True
        return False

    for t in range(targets):
        if work[t]:
            later("target", t)
    while events:
        clock, _, kind, lane = heapq.heappop(events)
        if kind == "target":
            has_made[lane] = work[lane][made[lane]]
            made[lane] += 1
        else:
            idle[lane] = True
            rest = expected[lane][taken[lane] :]
            finished_steps[lane] = graph.step_of(rest[0]) if rest else steps
        while progress():
            pass
    return taken != [len(numbers) for numbers in expected]


@st.composite
def cases(draw):
    micro_batches = draw(st.integers(1, 6))
    return dict(
        targets=draw(st.integers(1, 6)),
        drafters=draw(st.integers(1, micro_batches)),
        micro_batches=micro_batches,
        depth=draw(st.integers(1, 3)),
        durations=draw(st.lists(st.integers(1, 50), min_size=1, max_size=12)),
    )


@settings(max_examples=3000, deadline=None)
@given(cases())
def test_credits_never_deadlock(case):
    assert not deadlocks(**case, admitted=by_credit)


def test_the_simulation_finds_the_deadlocks_of_a_plain_bounded_queue():
    five_and_three = [deadlocks(5, 3, m, 1, [3, 11, 7, 2, 13, 5, 1, 17], by_free_place) for m in (3, 4, 5, 6)]
    assert any(five_and_three)
    found = sum(
        deadlocks(targets, drafters, micro_batches, 1, [9, 1, 4, 30, 2, 7], by_free_place)
        for targets in range(1, 7)
        for micro_batches in range(1, 7)
        for drafters in range(1, micro_batches + 1)
    )
    assert found > 20


def test_the_due_micro_batch_enters_an_inbox_full_of_later_ones():
    inbox = Inbox([3, 5, 8], depth=3, stop=Stop())
    inbox.put(8, "c")
    inbox.put(5, "b")
    inbox.put(3, "a")
    assert [inbox.take()[:2] for _ in range(3)] == [(3, "a"), (5, "b"), (8, "c")]


def test_a_micro_batch_ahead_of_its_credit_waits_and_says_how_long():
    inbox, waited = Inbox([0, 1], depth=1, stop=Stop()), []
    thread = threading.Thread(target=lambda: waited.append(inbox.put(1, "b")))
    thread.start()
    time.sleep(0.1)
    assert not waited
    inbox.put(0, "a")
    assert inbox.take()[:2] == (0, "a")
    thread.join(2)
    assert 0.08 < waited[0] < 2


@pytest.mark.parametrize("wait", [lambda inbox: inbox.put(1, "b"), lambda inbox: inbox.take()])
def test_a_stop_ends_every_wait(wait):
    stop, seen = Stop(), []
    inbox = Inbox([0, 1], depth=1, stop=stop)

    def waiting():
        try:
            wait(inbox)
        except Stopped:
            seen.append(True)

    thread = threading.Thread(target=waiting)
    thread.start()
    time.sleep(0.05)
    stop.set()
    thread.join(2)
    assert seen


def test_a_micro_batch_of_another_lane_or_twice_the_same_is_an_error():
    inbox = Inbox([0, 2], depth=2, stop=Stop())
    with pytest.raises(EngineError, match="does not expect"):
        inbox.put(1, "x")
    inbox.put(0, "a")
    with pytest.raises(EngineError, match="twice"):
        inbox.put(0, "a")
    inbox.take()
    with pytest.raises(EngineError, match="twice"):
        inbox.put(0, "a")
    inbox.put(2, "b")
    inbox.take()
    with pytest.raises(EngineError, match="wants another"):
        inbox.take()
