"""Devices, cuts, plans and ranks: what a placement decides, without torch."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.parallel import LayerCost, Stage, StageDevice, StagePlan, partition, stage_rank
from distrun_runtime.parallel.stages import copy_rate, copy_seconds, layer_costs

# --- devices


@pytest.mark.parametrize(
    ("text", "device", "name"),
    [
        ("cpu", StageDevice("cpu"), "cpu:0"),
        ("cpu:3", StageDevice("cpu", 3), "cpu:3"),
        ("cuda", StageDevice("cuda"), "cuda:0"),
        ("cuda:1", StageDevice("cuda", 1), "cuda:1"),
        ("gpu:0/0", StageDevice("cuda", 0, 0), "cuda:0"),
        ("gpu:0/1", StageDevice("cuda", 0, 1), "cuda:0/1"),
    ],
)
def test_devices_are_read_and_printed(text: str, device: StageDevice, name: str) -> None:
    assert StageDevice.parse(text) == device
    assert str(device) == name


@pytest.mark.parametrize("text", ["", "cdua:0", "cuda:-1", "cuda:0/", "0", "gpu0", "cuda:x", 1, None])
def test_no_device_is_an_error_that_shows_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"device .*: expected cpu, cpu:N, cuda:N or cuda:N/STREAM"):
        StageDevice.parse(text)


def test_a_device_that_is_nearly_one_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"'cdua:1'.*; did you mean 'cuda:1'\?"):
        StageDevice.parse("cdua:1")


def test_only_stages_in_one_memory_need_no_copy() -> None:
    devices = [StageDevice.parse(text) for text in ("cpu:0", "cpu:1", "cuda:0", "cuda:0/1", "cuda:1")]
    sharing = {(0, 1), (2, 3)}
    for left, right in itertools.combinations(range(5), 2):
        rate = copy_rate(devices[left], devices[right], None)
        assert (rate is None) == ((left, right) in sharing)
    assert copy_rate(devices[0], devices[1], 1e9) == 1e9  # stages on workers
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="bytes_per_s: expected more than 0"):
            copy_rate(devices[0], devices[1], wrong)
    assert copy_seconds(500, 1000.0) == 1.0  # the output, and its gradient
    assert copy_seconds(500, None) == 0.0


# --- the cut


def cuts(count: int, stages: int) -> list[list[int]]:
    """Return all ways to cut `count` layers into stages."""
    places = itertools.combinations(range(1, count), stages - 1)
    return [[end - begin for begin, end in itertools.pairwise([0, *inner, count])] for inner in places]


def judged(costs: list[int], sizes: list[int], rates: list[int], lengths: list[int]) -> tuple[int, int]:
    """Return the time of the slowest stage and the bytes between stages."""
    slowest = crossing = begin = 0
    for stage, length in enumerate(lengths):
        seconds = sum(costs[begin : begin + length])
        if stage:
            seconds += sizes[begin - 1] * rates[stage - 1]
            crossing += sizes[begin - 1]
        slowest, begin = max(slowest, seconds), begin + length
    return slowest, crossing


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Whole numbers: their sums are exact, so equally good cuts are equal."""
    count = draw(st.integers(1, 8))
    stages = draw(st.integers(1, count))
    numbers = st.integers(0, 9)
    return (
        draw(st.lists(numbers, min_size=count, max_size=count)),
        draw(st.lists(numbers, min_size=count, max_size=count)),
        draw(st.lists(st.integers(0, 2), min_size=stages - 1, max_size=stages - 1)),
    )


@given(problems())
def test_no_other_cut_is_faster_and_none_as_fast_sends_less(problem: tuple[list[int], list[int], list[int]]) -> None:
    costs, sizes, rates = problem
    stages = len(rates) + 1
    lengths = partition(costs, stages, sizes, rates)
    assert len(lengths) == stages
    assert sum(lengths) == len(costs)
    assert min(lengths) >= 1
    assert judged(costs, sizes, rates, lengths) == min(
        judged(costs, sizes, rates, other) for other in cuts(len(costs), stages)
    )


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.data())
def test_times_that_are_no_whole_numbers_are_cut_too(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def slowest(lengths: list[int]) -> float:
        ends = [0, *itertools.accumulate(lengths)]
        return max(math.fsum(costs[begin:end]) for begin, end in itertools.pairwise(ends))

    best = min(map(slowest, cuts(len(costs), stages)))
    assert slowest(partition(costs, stages)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_more_stages_than_layers_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match=f"3 layers cannot be cut into {stages} stages"):
        partition([1.0, 1.0, 1.0], stages)


# --- costs


def test_numbers_are_seconds() -> None:
    assert layer_costs(["a", "b"], {"b": LayerCost(1.0, 8), "a": 2}) == {"a": LayerCost(2.0), "b": LayerCost(1.0, 8)}


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ({"a": 1}, "no cost is given for layer 'bee'; costs are given for a"),
        ({"a": 1, "bee": 1, "be": 1}, "a cost is given for 'be', which is no layer; did you mean 'bee'?"),
        ({"a": 1, "bee": -1}, "layer 'bee': expected a cost of at least 0"),
        ({"a": 1, "bee": math.nan}, "layer 'bee': expected a cost of at least 0"),
    ],
)
def test_costs_of_other_layers_are_refused(costs: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        layer_costs(["a", "bee"], costs)


# --- plans


def plan(*seconds: float | None) -> StagePlan:
    return StagePlan(
        tuple(
            Stage(index, (f"l{index}", f"m{index}"), StageDevice("cpu", index), 1000 * index, one, 2048)
            for index, one in enumerate(seconds)
        )
    )


def test_a_plan_prints_as_a_table() -> None:
    stages = (
        Stage(0, ("embed", "lstm.0"), StageDevice("cuda", 0), 2_600_000, 0.0123, 204_800),
        Stage(1, ("decode",), StageDevice("cuda", 0, 1), 400, None, None),
    )
    assert str(StagePlan(stages)).splitlines() == [
        "stage  layers           device    parameters  expected time  bytes to the next",
        "    0  embed to lstm.0  cuda:0     2,600,000        12.3 ms            204,800",
        "    1  decode           cuda:0/1         400              -                  -",
    ]
    assert str(stages[0]) == "stage 0 (embed to lstm.0, on cuda:0)"


def test_the_slowest_stage_sets_the_pace_of_a_plan() -> None:
    assert plan(1.0, 3.0, 2.0).seconds == 3.0
    assert plan(1.0, None).seconds is None


@pytest.mark.parametrize(("stages", "parts", "share"), [(1, 1, 0.0), (2, 1, 0.5), (2, 4, 0.2), (4, 8, 3 / 11)])
def test_the_bubble_is_that_of_gpipe(stages: int, parts: int, share: float) -> None:
    assert plan(*[1.0] * stages).bubble(parts) == pytest.approx(share)


# --- ranks


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (1, 4), (2, 2), (3, 2), (4, 1)])
def test_each_stage_of_each_replica_has_one_worker(stages: int, replicas: int) -> None:
    size = stages * replicas
    ranks = [stage_rank(rank, size, stages) for rank in range(size)]
    assert {(one.stage, one.replica) for one in ranks} == set(itertools.product(range(stages), range(replicas)))
    for one in ranks:
        assert one.pipeline == [other.rank for other in ranks if other.replica == one.replica]
        assert one.members == [other.rank for other in ranks if other.stage == one.stage]


def test_neighbours_are_stages_of_one_replica() -> None:
    assert stage_rank(1, 4, 2).pipeline == [0, 1]
    assert stage_rank(2, 4, 2).members == [0, 2]


def test_workers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 workers cannot run replicas of 2 stages; fix: distrun launch -n"):
        stage_rank(0, 5, 2)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="expected 0 <= rank < 4"):
            stage_rank(rank, 4, 2)
