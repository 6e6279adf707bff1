"""Which GPUs a task sees, for all that a hosts file, an engine and a driver may say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.contract import gpus
from distrun_runtime.contract.gpus import Gpu, GpusUnfit, HostGpus, View

NONE = HostGpus()
FOUR = HostGpus("nvml", "550", tuple(Gpu(number, f"GPU-{number}abc", "H100", 80 << 30) for number in range(4)))
MIG = HostGpus("smi", "550", (Gpu(0, "GPU-0", instances=("MIG-a", "MIG-b")), Gpu(1, "GPU-1"), Gpu(2, instances=())))


def test_the_device_of_a_server_has_one_spelling() -> None:
    spelled = {"auto": "auto", "cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "gpu:0": "gpu:0", "cuda:007": "gpu:7"}
    assert {text: gpus.server_device(text) for text in spelled} == spelled
    for wrong in ("", "GPU", "gpu:", "gpu0", "gpu:-1", "gpu:x", "cpu:0", "auto:1", "gpu:0/1", "gpu:0,1", " gpu"):
        assert gpus.server_device(wrong) == ""


@pytest.mark.parametrize(
    ("said", "inherited", "found", "seen"),
    [
        # Nothing is said: all that is there.
        ("", None, FOUR, "0,1,2,3"),
        ("", None, MIG, "MIG-a,MIG-b,1"),
        ("", None, NONE, ""),
        # The hosts file.
        ("2", None, FOUR, "0,1"),
        ("0", None, FOUR, ""),
        ("3,1", None, FOUR, "3,1"),
        ("1,", None, FOUR, "1"),
        ("GPU-2,GPU-0abc", None, FOUR, "GPU-2,GPU-0abc"),
        ("MIG-b", None, MIG, "MIG-b"),
        # Nobody can look: it is believed.
        ("4", None, NONE, "0,1,2,3"),
        ("5,7", None, NONE, "5,7"),
        # An engine has set it: it is narrowed, by its own numbers.
        ("", "2,3", FOUR, "2,3"),
        ("", "2,3", NONE, "2,3"),
        ("1", "2,3", FOUR, "2"),
        ("3,", "2,3", FOUR, "3"),
        ("GPU-3", "2,3", FOUR, "3"),
        ("3,2", "GPU-2abc,GPU-3abc", FOUR, "GPU-3abc,GPU-2abc"),
        ("GPU-2", "gpu-2ABC", NONE, "gpu-2ABC"),
        ("0", "2,3", FOUR, ""),
        # As CUDA reads it: up to what is no GPU.
        ("", "", FOUR, ""),
        ("", "-1", FOUR, ""),
        ("", "NoDevFiles", FOUR, ""),
        ("", "0, 2,-1,3", FOUR, "0,2"),
        ("", "1,7,2", FOUR, "1"),
        ("", "1,1,2", FOUR, "1"),
        ("", "GPU-9,1", FOUR, ""),
    ],
)
def test_what_is_there_is_narrowed_to_what_the_hosts_file_says(
    said: str, inherited: str | None, found: HostGpus, seen: str
) -> None:
    assert ",".join(gpus.view(said, inherited, found, "d1").names) == seen


@pytest.mark.parametrize(
    ("said", "inherited", "found", "text"),
    [
        ("8", None, FOUR, "gpus=8 for d1 (hosts:3), but there are 4 GPUs (0,1,2,3, NVIDIA's driver 550)"),
        ("0,4", None, FOUR, "gpus=0,4 for d1 (hosts:3), but there are 4 GPUs (0,1,2,3, NVIDIA's driver 550)"),
        ("1", None, HostGpus("smi", "550"), "gpus=1 for d1 (hosts:3), but there is no GPU (NVIDIA's driver 550)"),
        (
            "4",
            "2,3",
            FOUR,
            "gpus=4 for d1 (hosts:3), but there are 2 GPUs (2,3, CUDA_VISIBLE_DEVICES=2,3 of its agent)",
        ),
        ("0,2", "2,", NONE, "gpus=0,2 for d1 (hosts:3), but there is 1 GPU (2, CUDA_VISIBLE_DEVICES=2, of its agent)"),
        ("1", "", FOUR, "gpus=1 for d1 (hosts:3), but there is no GPU (CUDA_VISIBLE_DEVICES= of its agent)"),
    ],
)
def test_a_host_that_has_not_what_the_hosts_file_says_is_refused_with_expected_and_found(
    said: str, inherited: str | None, found: HostGpus, text: str
) -> None:
    with pytest.raises(GpusUnfit) as caught:
        gpus.view(said, inherited, found, "d1", "hosts:3")
    assert text in str(caught.value)
    assert "gpus= in the hosts file" in caught.value.fix


NAMES = st.lists(st.integers(0, 9).map(str), max_size=6, unique=True)


@given(
    NAMES, st.lists(st.integers(0, 9).map(str), min_size=1, max_size=4, unique=True) | st.integers(0, 6), st.booleans()
)
def test_what_an_engine_gave_is_never_widened(given_: list[str], said: list[str] | int, can_look: bool) -> None:
    found = HostGpus("nvml", "1", tuple(Gpu(at, f"GPU-{at}") for at in range(10))) if can_look else NONE
    text = str(said) if isinstance(said, int) else ",".join(said) + ","
    try:
        seen = gpus.view(text, ",".join(given_), found, "d1").names
    except GpusUnfit:
        assert said > len(given_) if isinstance(said, int) else not set(said) <= set(given_)
        return
    assert set(seen) <= set(given_)
    assert list(seen) == (given_[:said] if isinstance(said, int) else said)


def view(*names: str) -> View:
    return View(names, "the hosts file")


def test_each_worker_sees_its_own_gpus_numbered_from_0() -> None:
    seen = view("0", "2", "5", "7")
    assert [gpus.variables(seen, at, 2)[gpus.VISIBLE] for at in (0, 2)] == ["0,2", "5,7"]
    assert gpus.variables(seen, 0, 2)[gpus.ORDER] == "PCI_BUS_ID"
    assert gpus.variables(seen, 0, 0) == {gpus.VISIBLE: ""}, "there is nothing to number"


def test_numbers_that_a_place_was_given_stay_in_the_order_that_it_was_given_with_them() -> None:
    seen = gpus.view("", "2,3", FOUR, "d1")
    assert gpus.variables(seen, 1, 1, "FASTEST_FIRST") == {gpus.VISIBLE: "3", gpus.ORDER: "FASTEST_FIRST"}
    assert gpus.variables(seen, 1, 1)[gpus.ORDER] == "PCI_BUS_ID"
    assert gpus.variables(gpus.view("", None, FOUR, "d1"), 1, 1, "FASTEST_FIRST")[gpus.ORDER] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("workers", "each", "names", "text", "fix"),
    [
        (
            *(4, 2, ("0", "1", "2", "3")),
            "4 workers on d1 with --gpus-per-worker 2 need 8 GPUs, but there are 4 GPUs (0,1,2,3, the hosts file)",
            "--gpus-per-worker 1, or at most 2 workers there (-n, or slots=2 with --placement pack),"
            " or hosts with more GPUs",
        ),
        (
            *(1, 2, ("0",)),
            "one worker on d1 with --gpus-per-worker 2 needs 2 GPUs, but there is 1 GPU (0, the hosts file)",
            "--gpus-per-worker 1, or hosts with more GPUs",
        ),
        (
            *(3, 1, ()),
            "3 workers on d1 with --gpus-per-worker 1 need 3 GPUs, but there is no GPU (the hosts file)",
            "hosts with more GPUs",
        ),
        (
            *(1, 2, ("MIG-a", "MIG-b")),
            "--gpus-per-worker 2 on d1, whose GPUs are divided (MIG): a process sees one instance only",
            "--gpus-per-worker 1",
        ),
    ],
)
def test_too_few_gpus_for_the_workers_of_a_host_are_refused_with_need_and_found(
    workers: int, each: int, names: tuple[str, ...], text: str, fix: str
) -> None:
    with pytest.raises(GpusUnfit) as caught:
        gpus.check_room("d1", workers, each, view(*names))
    assert (str(caught.value), caught.value.fix) == (text, fix)


def test_as_many_gpus_as_workers_need_are_enough() -> None:
    gpus.check_room("d1", 2, 2, view("0", "1", "2", "3"))
    gpus.check_room("d1", 2, 1, view("MIG-a", "MIG-b"))


@pytest.mark.parametrize("value", [None, {}, [], {"how": "smi"}, {"how": "smi", "gpus": [{}]}, {"how": 1, "gpus": "x"}])
def test_what_is_no_answer_of_a_driver_tells_nothing(value: object) -> None:
    assert gpus.found_of(value) == HostGpus(error="what it tells of its GPUs cannot be read")


def test_kinds_of_gpus_are_counted() -> None:
    assert FOUR.kinds == "4 x H100, 80 GiB"
    assert (
        MIG.kinds == "1 x of unknown kind, 2 MIG instances; 1 x of unknown kind; 1 x of unknown kind, 0 MIG instances"
    )
