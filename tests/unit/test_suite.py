"""The settings of the test suite itself."""

from tests.conftest import LONGEST, TESTS


def test_the_files_that_come_first_are_there() -> None:
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []
