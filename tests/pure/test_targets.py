"""Targets: lower as long as plans take more than wanted, back up when one fits, higher where there is none."""

from checkmate_tf.targets import Targets


def test_a_plan_that_takes_more_lowers_the_target_by_as_much():
    targets = Targets(1000, 950, 10)
    assert targets.placed(940, 60) and targets.now == 940 - 60
    assert targets.placed(880, 2) and targets.now == 880 - 10          # but at least by so much


def test_once_one_fits_the_target_goes_half_way_back_up():
    targets = Targets(1000, 900, 10)
    targets.placed(900, 100)
    assert targets.now == 800
    assert targets.placed(790, -20) and targets.now == 850
    assert targets.placed(850, -1) and targets.now == 875
    assert targets.placed(870, 5) and targets.now == 860
    assert not targets.placed(860, -1)                                   # 870 does not fit, and that is near enough


def test_where_the_first_fits_there_is_nothing_to_try():
    assert not Targets(1000, 950, 10).placed(940, 0)


def test_where_there_is_no_plan_the_target_rises_twice_then_nothing_is_left():
    targets = Targets(1000, 800, 10)
    assert targets.no_plan() and targets.now == 900
    assert targets.no_plan() and targets.now == 1000
    assert not targets.no_plan()


def test_between_what_has_no_plan_and_what_takes_more_the_target_is_in_the_middle():
    targets = Targets(1000, 800, 10)
    targets.no_plan()
    assert targets.placed(900, 200) and targets.now == 850
    assert targets.no_plan() and targets.now == 875


def test_a_plan_below_what_seemed_too_low_shows_that_it_was_not():
    targets = Targets(1000, 950, 10)
    targets.no_plan()
    assert targets.placed(900, 50) and targets.now == 850
