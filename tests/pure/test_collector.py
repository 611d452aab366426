"""The collector of reference cycles, set aside for a while."""

import gc

import pytest

from checkmate_tf.collector import without_collecting


def test_the_collector_is_off_within_and_on_again_after_whatever_happens():
    with without_collecting():
        assert not gc.isenabled()
        with without_collecting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), without_collecting():
        1 / 0
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with without_collecting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
