"""A part of the slow tests' cases is run at a time; after all parts every case has run once."""

from types import SimpleNamespace

import pytest

from few_cases import PARTS, few_cases


class Item:
    """The part of `pytest.Item` that the choice goes by."""

    def __init__(self, nodeid, *marks):
        self.nodeid = nodeid
        self.marks = marks

    def get_closest_marker(self, name):
        return name in self.marks


def chosen(items, part, conftest):
    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(getoption=lambda name: part, hook=hook)
    kept = list(items)
    conftest.pytest_collection_modifyitems(config, kept)
    assert sorted(id(item) for item in (*kept, *left_out)) == sorted(map(id, items))
    return kept


def names(items):
    return sorted(item.nodeid for item in items)


@pytest.fixture
def conftest(request):
    """This folder's conftest.py."""
    return next(plugin for plugin in request.config.pluginmanager.get_plugins()
                if hasattr(plugin, "pytest_addoption") and getattr(plugin, "PARTS", None) == PARTS)


def test_all_parts_together_run_every_test_once(conftest):
    matrix = [Item(f"tests/kernels/test_x.py::test_y[{n}]", "slow", "matrix") for n in range(300)]
    others = [Item("tests/test_z.py::test_slow", "slow"), Item("tests/test_z.py::test_fast")]
    runs = [chosen([*matrix, *others], part, conftest) for part in range(PARTS)]
    assert all(run[-2:] == others for run in runs)
    assert sorted(item.nodeid for run in runs for item in run[:-2]) == sorted(item.nodeid for item in matrix)
    assert min(map(len, runs)) > 8, "the parts are of about one size"
    assert chosen(matrix, PARTS + 3, conftest) == chosen(matrix, 3, conftest)
    assert chosen(matrix, None, conftest) == matrix


@pytest.mark.parametrize("most", [1, 2, 4, 10, 20])
def test_few_cases_of_each_test_and_in_the_end_all(most):
    cases = [Item(f"tests/test_x.py::test_a[{number}]") for number in range(10)]
    lone = Item("tests/test_x.py::test_b")
    turns = [list(few_cases([*cases, lone], most, turn)) for turn in range(-(-10 // most))]
    assert all(1 <= len(turn) - 1 <= most and lone in turn for turn in turns)
    assert names(case for turn in turns for case in turn if case is not lone) == names(cases)


def test_a_part_has_few_cases_of_each_slow_test(conftest):
    slow = [Item(f"tests/test_x.py::test_y[{n}]", "slow") for n in range(9)]
    runs = [chosen(slow, part, conftest) for part in range(5)]
    assert [len(run) for run in runs] == [2, 2, 2, 2, 1]
    assert names(item for run in runs for item in run) == names(slow)
    assert chosen(slow, None, conftest) == slow
