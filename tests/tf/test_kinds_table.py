"""The README's table of what works is the one that the tests give."""

import kinds


def test_the_readme_lists_the_kinds_that_are_tested():
    assert kinds.written() == kinds.table(), "run `python tests/tf/kinds.py`"
