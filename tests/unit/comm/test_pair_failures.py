"""The failure protocol of a pair of ranks alone: what fails, what is refused, and when numbers start again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdpcomm._core.comm import OUT_OF_STEP_ADVICE
from tests.harness.native import _testing

NUMBERS = st.integers(1, 12)
WRAP = 2**32


def pair() -> tuple[Any, Any]:
    return _testing.FailureEnd(0, 1), _testing.FailureEnd(1, 0)


def told(text: str, by: int) -> str:
    return f"{text} (told by rank {by})"


def refused(since: str, by: int | None = None) -> str:
    """The error of rank 0 for operations with rank 1."""
    since = since if by is None else told(since, by)
    return f"rank 0 is out of step with rank 1 since: {since}; {OUT_OF_STEP_ADVICE}"


def test_what_is_posted_fails_and_all_that_comes_later_is_refused() -> None:
    ours, theirs = pair()
    assert ours.out_of_step() is None
    later = {"send": ours.send(4), "waiting": ours.send(4, waits=True), "recv": ours.recv(8)}
    lost = {"send": ours.send(3), "waiting": ours.send(3, waits=True), "recv": ours.recv(7)}
    ours.hear(theirs.give_up("enough", 7, 3))  # its sends up to 7 are received here
    assert {ours.failure_of(each) for each in lost.values()} == {told("enough", 1)}
    assert {ours.failure_of(each) for each in later.values()} == {refused("enough", 1)}
    for of_it in (ours.send(2), ours.recv(7)):  # this rank comes late to what the peer gave up
        assert ours.failure_of(of_it) == told("enough", 1)
    for after in (ours.send(4), ours.recv(8), ours.send(1_000_000_000)):
        assert ours.failure_of(after) == refused("enough", 1)
    assert ours.out_of_step() == refused("enough", 1)


def test_the_rank_that_gives_up_is_out_of_step_too() -> None:
    ours, theirs = pair()
    waiting = [ours.send(2), ours.recv(2)]
    assert ours.give_up("enough", 1, 1) is not None
    requests = [*waiting, ours.send(ours.next_send()), ours.recv(ours.next_recv())]
    ours.hear(theirs.give_up("later", 9, 9))
    requests += [ours.send(3), ours.recv(3)]
    assert {ours.failure_of(each) for each in requests} == {refused("enough")}


def test_operations_that_have_taken_their_numbers_are_refused() -> None:
    ours, _ = pair()
    numbers = [(ours.next_send(), ours.next_recv()) for _ in range(5)]
    ours.give_up("enough", 1, 1)
    for send, recv in numbers[1:]:
        assert ours.failure_of(ours.send(send)) == ours.failure_of(ours.recv(recv)) == refused("enough")


def test_a_peer_gets_one_notice_and_more_for_earlier_messages() -> None:
    ours, _ = pair()
    assert ours.give_up("first", None, 4) is not None
    assert ours.give_up("second", 5, None) is not None  # withdraws its messages from there on
    assert ours.give_up("third", 6, 6) is None
    assert ours.give_up("fourth", 3, None) is not None


def test_numbers_start_again_with_resync() -> None:
    ours, theirs = pair()
    for _ in range(3):
        ours.next_send()
    ours.hear(theirs.give_up("enough", 7, 3))
    ours.restart()
    assert (ours.next_send(), ours.next_recv()) == (1, 1)
    assert ours.failure_of(ours.send(1)) is not None
    ours.resynced()
    assert ours.out_of_step() is None
    assert ours.failure_of(ours.send(1)) is None
    assert ours.lost(1, 7, True, None, None) is None  # nothing is left of the notice
    assert ours.give_up("again", 1, None) is not None


def test_operations_are_refused_until_resync_has_ended() -> None:
    ours, theirs = pair()
    ours.restart()
    ours.hear(theirs.give_up("late", 1, 1))  # the number of an old operation
    assert ours.failure_of(ours.send(ours.next_send())) == refused("rank 0 called resync()")
    assert ours.lost(1, 1, False, None, None) is None


def test_a_peer_gets_a_notice_when_resync_fails() -> None:
    ours, _ = pair()
    assert ours.give_up("first", 1, 1) is not None
    ours.restart()
    assert ours.give_up("rank 1 has not called resync()", None, None) is not None


def test_the_first_failure_of_a_request_counts() -> None:
    ours, theirs = pair()
    request = ours.recv(5)
    ours.hear(theirs.give_up("first", 5, None))
    ours.hear(theirs.give_up("second", 4, None))
    assert ours.failure_of(request) == told("first", 1)
    assert ours.failure_of(ours.recv(5)) == told("first", 1)
    assert ours.failure_of(ours.recv(6)) == refused("first", 1)


def test_a_notice_that_was_told_before_names_who_told_first() -> None:
    ours, theirs = pair()
    ours.hear(theirs.give_up("rank 2 died (told by rank 3)", 1, 1))
    assert ours.failure_of(ours.recv(1)) == "rank 2 died (told by rank 3)"


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
    assert (ours.failure_of(before), ours.failure_of(after)) == (told("enough", 1), refused("enough", 1))


@pytest.mark.parametrize(("started", "want"), [(0, ["enough", 5, 6]), (1, [5, "enough", 6]), (2, [5, 6, "enough"])])
def test_a_notice_goes_before_later_messages(started: int, want: list[int | str]) -> None:
    ours, _ = pair()
    for i, number in enumerate((5, 6)):
        ours.send(number, waits=True, started=i < started)
    ours.queue("enough", 4)
    assert ours.waiting() == want


def test_a_notice_goes_behind_its_own_messages_and_earlier_notices() -> None:
    ours, _ = pair()
    for number in (4, 5, 6):
        ours.send(number, waits=True)
    ours.queue("first", 4)
    ours.queue("second", 5)
    ours.queue("third", None)  # ends no sends: before all messages that have not begun
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
    ours.hear(pair()[1].give_up("later", 9, 9))
    assert ours.lost(9, None, False, gone, behind) == told("later", 1)  # this very operation
    assert ours.lost(3, None, True, gone, None) == refused("later", 1)
    assert ours.lost(3, 3, False, gone, None) is None
    assert ours.lost(None, None, True, gone, None) == gone  # resync() has no numbers


@given(st.lists(st.tuples(NUMBERS, st.booleans()), max_size=10), st.lists(NUMBERS, max_size=4))
def test_notices_never_overtake_what_they_end_nor_each_other(sends: list[tuple[int, bool]], ends: list[int]) -> None:
    ours, _ = pair()
    numbers = sorted(number for number, _ in sends)
    for number, (_, started) in zip(numbers, sorted(sends, key=lambda send: not send[1]), strict=True):
        ours.send(number, waits=True, started=started)
    for i, end in enumerate(sorted(ends)):
        ours.queue(f"{i:02} {end}", end)
    waiting = ours.waiting()
    assert [each for each in waiting if isinstance(each, int)] == numbers
    texts = [each for each in waiting if isinstance(each, str)]
    assert texts == sorted(texts)
    for at, each in enumerate(waiting):
        if isinstance(each, str):
            assert all(later > int(each.split()[1]) for later in waiting[at:] if isinstance(later, int))
