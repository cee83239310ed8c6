"""Sizes in bytes: parsing and formatting."""

import pytest

from dualpipe.runtime.printing import format_bytes, parse_bytes


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("77", 77)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0", "5GB!"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="a size must be such as 5GB"):
        parse_bytes(text)


@pytest.mark.parametrize("size, text", [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (2 * 10**12, "2.0 TB")])
def test_sizes_as_text(size, text):
    assert format_bytes(size) == text
