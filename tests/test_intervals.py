"""Every operation of `Intervals` agrees with plain sets of integers."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlint.intervals import Int64, Intervals, union

# Small numbers touch, overlap and repeat often; a pair may be empty or reversed.
INSTANTS = st.integers(-12, 40)
PAIRS = st.lists(st.tuples(INSTANTS, INSTANTS), max_size=12)
# Times as long captures have them: near what int64 holds.
FAR = 2**62


def arrays(pairs: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def make(pairs: list[tuple[int, int]]) -> Intervals:
    return union(*arrays(pairs))


def model(pairs: list[tuple[int, int]]) -> set[int]:
    return {instant for start, end in pairs for instant in range(start, end)}


def members(intervals: Intervals) -> set[int]:
    """The instants of a set, after a check that it has the one canonical form."""
    starts, ends = intervals.starts, intervals.ends
    assert starts.dtype == ends.dtype == np.int64
    assert starts.shape == ends.shape == (len(intervals),)
    assert (starts < ends).all()
    assert (ends[:-1] < starts[1:]).all()
    return model(list(zip(starts.tolist(), ends.tolist(), strict=True)))


@given(PAIRS)
def test_union_holds_what_any_pair_holds(pairs: list[tuple[int, int]]) -> None:
    assert members(make(pairs)) == model(pairs)


@given(PAIRS, st.randoms(use_true_random=False))
def test_union_ignores_order(pairs: list[tuple[int, int]], random: Random) -> None:
    shuffled = pairs.copy()
    random.shuffle(shuffled)
    assert make(pairs) == make(shuffled)


@given(PAIRS)
def test_union_leaves_its_arguments_alone(pairs: list[tuple[int, int]]) -> None:
    starts, ends = arrays(pairs)
    before = starts.copy(), ends.copy()
    union(starts, ends)
    assert np.array_equal(starts, before[0])
    assert np.array_equal(ends, before[1])


@given(PAIRS)
def test_total_counts_the_instants(pairs: list[tuple[int, int]]) -> None:
    total = make(pairs).total_ns
    assert type(total) is int
    assert total == len(model(pairs))


@given(PAIRS, PAIRS)
def test_set_operators(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, other = make(a), make(b)
    assert members(one | other) == model(a) | model(b)
    assert members(one & other) == model(a) & model(b)
    assert members(one - other) == model(a) - model(b)


@given(PAIRS, PAIRS)
def test_equality_is_that_of_sets(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    assert (make(a) == make(b)) is (model(a) == model(b))
    assert make(a) == make(a)


@given(PAIRS, INSTANTS, INSTANTS)
def test_gaps_are_the_rest_of_the_window(
    pairs: list[tuple[int, int]], start: int, end: int
) -> None:
    gaps = make(pairs).gaps(start, end)
    assert members(gaps) == set(range(start, end)) - model(pairs)


@given(PAIRS, INSTANTS, INSTANTS)
def test_clip_is_the_part_in_the_window(
    pairs: list[tuple[int, int]], start: int, end: int
) -> None:
    clipped = make(pairs).clip(start, end)
    assert members(clipped) == model(pairs) & set(range(start, end))


@given(PAIRS, st.lists(INSTANTS, max_size=12))
def test_covered_before_counts_the_earlier_instants(
    pairs: list[tuple[int, int]], instants: list[int]
) -> None:
    covered = make(pairs).covered_before(np.array(instants, dtype=np.int64))
    inside = model(pairs)
    assert covered.dtype == np.int64
    assert covered.tolist() == [sum(i < at for i in inside) for at in instants]


@given(PAIRS, PAIRS)
def test_overlap_is_the_length_inside_each_window(
    pairs: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    overlap = make(pairs).overlap_ns(*arrays(windows))
    inside = model(pairs)
    assert overlap.dtype == np.int64
    assert overlap.tolist() == [len(inside & set(range(*w))) for w in windows]


@given(PAIRS, PAIRS, INSTANTS, INSTANTS)
def test_nothing_is_lost_far_from_zero(
    a: list[tuple[int, int]], b: list[tuple[int, int]], start: int, end: int
) -> None:
    def moved(intervals: Intervals) -> Intervals:
        return Intervals(intervals.starts + FAR, intervals.ends + FAR)

    one, other = moved(make(a)), moved(make(b))
    assert (one | other) == moved(make(a) | make(b))
    assert (one & other) == moved(make(a) & make(b))
    assert (one - other) == moved(make(a) - make(b))
    assert one.gaps(start + FAR, end + FAR) == moved(make(a).gaps(start, end))
    assert one.total_ns == make(a).total_ns
    starts, ends = arrays(b)
    far = one.overlap_ns(starts + FAR, ends + FAR)
    assert np.array_equal(far, make(a).overlap_ns(starts, ends))


def test_touching_pieces_become_one() -> None:
    assert len(make([(0, 5), (5, 9)])) == 1
    assert len(make([(0, 5), (6, 9)])) == 2


def test_shape_of_the_instants_is_kept() -> None:
    instants = np.array([[0, 3], [5, 9]], dtype=np.int64)
    assert make([(2, 6)]).covered_before(instants).tolist() == [[0, 1], [3, 4]]
    assert make([]).covered_before(instants).shape == (2, 2)


def test_sets_are_not_hashable_and_equal_only_sets() -> None:
    with pytest.raises(TypeError):
        hash(make([]))
    assert make([]) != "no set"
