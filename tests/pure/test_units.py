import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.ir.errors import BudgetError
from checkmate_tf.ir.units import format_bytes, parse_bytes


@pytest.mark.parametrize("text, expected", [
    ("2GB", 2 * 10**9), ("2GiB", 2 * 2**30), ("1.5 KiB", 1536), ("800mb", 800 * 10**6), (" 7 B ", 7),
    ("1e3KB", 10**6), (".5kb", 500), ("3TB", 3 * 10**12)])
def test_units_are_decimal_or_binary_as_written(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "12", "GB", "-2GB", "0GB", "0.2B", "2XB", "two GB", "2G", "nanGB", "1e999GB"])
def test_what_is_no_size_is_refused_with_what_was_received(text):
    with pytest.raises(BudgetError, match="Received"):
        parse_bytes(text)


@pytest.mark.parametrize("count, expected", [
    (0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (1536000000, "1.54 GB"), (12345678, "12.3 MB"), (999600, "1.00 MB"),
    (10**13, "10.00 TB")])
def test_sizes_print_with_three_digits(count, expected):
    assert format_bytes(count) == expected


@given(st.integers(1000, 10**15))
def test_what_is_printed_reads_back_to_half_a_percent(count):
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.0051 * count
