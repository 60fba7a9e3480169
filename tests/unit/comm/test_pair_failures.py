"""The failure protocol of a pair of ranks alone: what fails, what is refused, and from where both count on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.native import _testing

NUMBERS = st.integers(1, 12)
SOME = st.one_of(st.none(), NUMBERS)
WRAP = 2**32


def pair() -> tuple[Any, Any]:
    return _testing.FailureEnd(0, 1), _testing.FailureEnd(1, 0)


def told(text: str, by: int) -> str:
    return f"{text} (told by rank {by})"


def test_what_is_posted_fails_and_what_comes_later_is_refused() -> None:
    ours, theirs = pair()
    kept = {"send": ours.send(4), "waiting": ours.send(4, waits=True), "recv": ours.recv(8)}
    lost = {"send": ours.send(3), "waiting": ours.send(3, waits=True), "recv": ours.recv(7)}
    ours.hear(theirs.give_up("enough", 7, 3))  # its sends up to 7 are received here
    assert {ours.failure_of(each) for each in lost.values()} == {told("enough", 1)}
    assert {ours.failure_of(each) for each in kept.values()} == {None}
    for refused in (ours.send(2), ours.recv(7)):
        assert ours.failure_of(refused) == told("enough", 1)
    for taken in (ours.send(4), ours.recv(8)):
        assert ours.failure_of(taken) is None


def test_the_first_failure_of_a_request_counts() -> None:
    ours, theirs = pair()
    request = ours.recv(5)
    ours.hear(theirs.give_up("first", 5, None))
    ours.hear(theirs.give_up("second", 6, None))
    assert ours.failure_of(request) == told("first", 1)
    assert ours.failure_of(ours.recv(5)) == told("second", 1)  # of the last that it heard


def test_a_notice_that_was_told_before_names_who_told_first() -> None:
    ours, theirs = pair()
    ours.hear(theirs.give_up("rank 2 died (told by rank 3)", 1, 1))
    assert ours.failure_of(ours.recv(1)) == "rank 2 died (told by rank 3)"


def test_messages_of_what_this_rank_gave_up_are_known() -> None:
    ours, _ = pair()
    assert not ours.gave_up(1)
    ours.give_up("enough", 9, None)
    assert not ours.gave_up(1)  # it still receives
    ours.give_up("enough", None, 4)
    assert [ours.gave_up(number) for number in (3, 4, 5)] == [True, True, False]


def test_a_peer_that_is_gone_fails_all() -> None:
    ours, _ = pair()
    requests = [ours.send(ours.next_send()) for _ in range(3)] + [ours.recv(ours.next_recv()) for _ in range(2)]
    waiting = ours.send(ours.next_send(), waits=True)
    ours.fail_all("rank 1 died")
    assert {ours.failure_of(each) for each in [*requests, waiting]} == {"rank 1 died"}


def test_numbers_may_wrap() -> None:
    ours, theirs = pair()
    before, after = ours.recv(WRAP - 1), ours.recv(3)
    ours.hear(theirs.give_up("enough", WRAP - 1, None))
    assert (ours.failure_of(before), ours.failure_of(after)) == (told("enough", 1), None)
    ours.hear(theirs.give_up("again", 2, None))
    assert ours.failure_of(after) is None
    assert ours.failure_of(ours.recv(WRAP - 5)) == ours.failure_of(ours.recv(2)) == told("again", 1)


@pytest.mark.parametrize(("started", "want"), [(0, ["enough", 5, 6]), (1, [5, "enough", 6]), (2, [5, 6, "enough"])])
def test_a_notice_goes_before_later_messages(started: int, want: list[int | str]) -> None:
    ours, _ = pair()
    for i, number in enumerate((5, 6)):
        ours.send(number, waits=True, started=i < started)
    ours.give_up("enough", 4, 4)
    assert ours.waiting() == want


def test_a_notice_goes_behind_its_own_messages_and_earlier_notices() -> None:
    ours, _ = pair()
    for number in (4, 5, 6):
        ours.send(number, waits=True)
    ours.give_up("first", 4, None)
    ours.give_up("second", 5, None)
    ours.give_up("third", None, 1)  # ends no sends: before all messages that have not begun
    assert ours.waiting() == [4, "first", 5, "second", "third", 6]


def test_what_a_waiting_rank_is_told() -> None:
    ours, theirs = pair()
    gone = "rank 1 closed"
    assert ours.lost(3, 3, True, None, None) is None
    assert ours.lost(3, 3, True, gone, None) == gone
    assert ours.lost(3, 3, False, gone, None) is None  # it has all that it needs of the peer
    behind = theirs.give_up("behind", 3, None)
    assert ours.lost(3, 3, False, gone, behind) == told("behind", 1)
    assert ours.lost(4, 4, True, gone, behind) == gone  # that counts for its own operation only
    ours.hear(theirs.give_up("later", 9, 9))
    assert ours.lost(9, None, False, gone, behind) == told("later", 1)  # this very operation
    assert ours.lost(3, None, True, gone, None) == told("later", 1)
    assert ours.lost(3, 3, False, gone, None) is None
    assert ours.lost(None, 10, True, gone, None) == gone


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_who_failed_in_the_same_operation_counts_alike(a: int, b: int, c: int, d: int) -> None:
    """Both gave up operation n of a direction, in calls that took other numbers of the other direction."""
    ours, theirs = pair()
    for _ in range(a):
        ours.next_send()
    for _ in range(a):
        theirs.next_recv()
    sent = [ours.next_send()] + [ours.next_send() for _ in range(c)]  # the failed one, and more of the same call
    received = [theirs.next_recv()] + [theirs.next_recv() for _ in range(d)]
    for _ in range(b):
        theirs.next_send()
        ours.next_recv()
    ours.send(sent[0])
    theirs.recv(received[0])
    from_us = ours.give_up("ours", sent[-1], b or None)
    from_them = theirs.give_up("theirs", b or None, received[-1])
    ours.hear(from_them)
    theirs.hear(from_us)
    assert ours.next_send() == theirs.next_recv()
    assert ours.next_recv() == theirs.next_send()


@dataclass
class Model:
    """The rules once more: every notice is kept, and each request asks all of them."""

    heard: list[tuple[str, int | None, int | None]] = field(default_factory=list)  # text, sends and receives here
    requests: list[tuple[bool, int, int]] = field(default_factory=list)  # is a send, number, notices heard before

    def hear(self, text: str, sends: int | None, recvs: int | None) -> None:
        self.heard.append((told(text, 1), recvs, sends))  # the peer's sends are received here

    def failure_of(self, request: int) -> str | None:
        send, number, before = self.requests[request]
        covering = [i for i, (_, sends, recvs) in enumerate(self.heard) if number <= ((sends if send else recvs) or 0)]
        if any(i < before for i in covering):
            return self.heard[before - 1][0]
        return self.heard[covering[0]][0] if covering else None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), NUMBERS, st.booleans()),
            st.tuples(st.just("recv"), NUMBERS),
            st.tuples(st.just("hear"), SOME, SOME),
        ),
        max_size=40,
    )
)
def test_any_order_of_requests_and_notices(steps: list[tuple[Any, ...]]) -> None:
    (ours, theirs), model = pair(), Model()
    for i, step in enumerate(steps):
        if step[0] == "hear":
            ours.hear(theirs.give_up(f"notice {i}", step[1], step[2]))
            model.hear(f"notice {i}", step[1], step[2])
        else:
            made = ours.send(step[1], waits=step[2]) if step[0] == "send" else ours.recv(step[1])
            assert made == len(model.requests)
            model.requests.append((step[0] == "send", step[1], len(model.heard)))
    for request in range(len(model.requests)):
        assert ours.failure_of(request) == model.failure_of(request)


@given(st.lists(st.tuples(NUMBERS, st.booleans()), max_size=10), st.lists(NUMBERS, max_size=4))
def test_notices_never_overtake_what_they_end_nor_each_other(sends: list[tuple[int, bool]], ends: list[int]) -> None:
    ours, _ = pair()
    numbers = sorted(number for number, _ in sends)
    for number, (_, started) in zip(numbers, sorted(sends, key=lambda send: not send[1]), strict=True):
        ours.send(number, waits=True, started=started)
    for i, end in enumerate(sorted(ends)):
        ours.give_up(f"{i:02} {end}", end, None)
    waiting = ours.waiting()
    assert [each for each in waiting if isinstance(each, int)] == numbers
    texts = [each for each in waiting if isinstance(each, str)]
    assert texts == sorted(texts)
    for at, each in enumerate(waiting):
        if isinstance(each, str):
            assert all(later > int(each.split()[1]) for later in waiting[at:] if isinstance(later, int))
