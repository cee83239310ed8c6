"""The rules of style of `make lint`: what they refuse, and what they let pass."""

from pathlib import Path

import pytest

from style_rules import MOST_WALRUSES, check, library_files

GOOD = '''"""Sizes of messages."""

class Size:
    """Bytes of a message."""

    def __init__(self, rows, width):
        """Take the sizes. What is missing is zero."""
        self.rows, self.width = rows, width
        first, second, third = rows

def total(sizes):
    """Asynchronously add sizes."""
    if (first := next(sizes)) is None:
        return 0
    return first
'''


def problems(tmp_path, source):
    path = tmp_path / "module.py"
    path.write_text(source)
    return [str(each) for each in check([path], tmp_path)]


def test_good_code_passes(tmp_path):
    assert problems(tmp_path, GOOD) == []


@pytest.mark.parametrize("old, new, expected", [
    ("Sizes of", "What sizes", "module.py:1: a docstring begins with 'What'"),
    ("Bytes of", "Of", "module.py:3: a docstring begins with 'Of'"),
    ("Take the", "Those,", "module.py:6: a docstring begins with 'Those'"),
    ("self.rows, self.width = rows, width", "self.a, self.b, self.c = rows",
     "module.py:8: a tuple assignment to 3 attributes; use a line for each"),
    ("Asynchronously add", "Add one's own, of one's own,", "module.py:12: \"of one's own\"; name the thing"),
])
def test_a_rule_is_broken(tmp_path, old, new, expected):
    assert old in GOOD
    (problem,) = problems(tmp_path, GOOD.replace(old, new))
    assert problem.startswith(expected), problem


def test_walruses_are_counted_over_all_files(tmp_path):
    line = "if (size := len(rows)) > 1: print(size)\n"
    assert problems(tmp_path, "rows = []\n" + line * MOST_WALRUSES) == []
    (problem,) = problems(tmp_path, "rows = []\n" + line * (MOST_WALRUSES + 1))
    assert f"{MOST_WALRUSES + 1} walruses in the library, at most {MOST_WALRUSES}" in problem
    assert problem.endswith(": module.py 31")


def test_the_library_keeps_the_rules():
    files = library_files()
    assert len(files) > 200
    root = Path(__file__).parents[1]
    assert check(files, root) == []
