"""Checkpoints, samplers and metrics of programs that run alone, by an interpreter with torch: each case's outcome."""

from __future__ import annotations

import io
import itertools
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from cases import run_cases
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data import DistributedSampler as Torchs

import distrun_runtime.torch as dt
from distrun_runtime.errors import KVError
from distrun_runtime.torch import checkpoint

DATA = TensorDataset(torch.arange(96.0).reshape(24, 4).sin(), torch.arange(24.0).reshape(24, 1).cos())


def samplers(length: int, workers: int, **options) -> list[dt.DistributedSampler]:
    return [dt.DistributedSampler(range(length), workers, rank, **options) for rank in range(workers)]


def refused(act, said: str, error: type[Exception] = KVError) -> None:
    found = "nothing"
    try:
        act()
    except error as err:
        found = str(err)
    assert said in found, found


class Run:
    """A program that draws random numbers of all kinds, in batches that processes fetch in advance."""

    def __init__(self, seed: int, processes: int = 0) -> None:
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.opt = torch.optim.Adam(self.net.parameters(), 0.01)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, 0.1, total_steps=24)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.sampler = dt.DistributedSampler(DATA)
        self.loader = DataLoader(DATA, 3, sampler=self.sampler, num_workers=processes)
        self.parts = {"sampler": self.sampler, "scaler": self.scaler}

    def train(self, begin: int, save_at: tuple[int, int] = (-1, -1), path: Path = Path()) -> list[torch.Tensor]:
        """Train to the end of epoch 2, and save before an epoch (-1) or after a batch; return weights and draws."""

        def save(*place: int) -> None:
            if place == save_at:
                dt.save(path, self.net, self.opt, self.sched, epoch=epoch, best=np.float64(0.5), **self.parts)

        for epoch in range(begin, 3):
            self.sampler.set_epoch(epoch)
            save(epoch, -1)
            for number, (x, y) in enumerate(self.loader):
                noise = float(np.random.normal()) + random.gauss(0, 1)
                self.scaler.scale(((self.net(x) - y) ** 2).mean() * (1 + noise / 9)).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
                self.sched.step()
                self.opt.zero_grad()
                save(epoch, number)
        return [*self.net.state_dict().values(), torch.rand(2), torch.tensor([np.random.normal(), random.gauss(0, 1)])]


class Unreadable(io.FileIO):
    def readinto(self, _):
        raise OSError("no disk")


class Shorter(io.FileIO):
    def readinto(self, _):
        return 0


# --- the cases


def a_sampler_gives_the_positions_of_torchs() -> None:
    choices = itertools.product((1, 2, 7, 24, 25), (1, 2, 3), (True, False), (True, False))
    for length, workers, shuffle, drop_last in choices:
        for rank, ours in enumerate(samplers(length, workers, shuffle=shuffle, seed=5, drop_last=drop_last)):
            torchs = Torchs(range(length), workers, rank, shuffle, 5, drop_last)
            for epoch in (0, 3):
                ours.set_epoch(epoch), torchs.set_epoch(epoch)
                assert list(ours) == list(torchs)
                assert len(ours) == len(torchs)


def a_stopped_epoch_goes_on_with_any_number_of_workers() -> None:
    for before, after in itertools.product((1, 2, 3), repeat=2):
        first = samplers(24, before, seed=1)
        first[0].set_epoch(2)
        parts = [iter(each) for each in first]
        for each in first[1:]:
            each.set_epoch(2)
        seen = [next(part) for _ in range(12 // before) for part in parts]
        state = first[0].state_dict()
        assert (state["epoch"], state["consumed"]) == (2, 12)
        rest = samplers(24, after, seed=1)
        for each in rest:
            each.load_state_dict(state)
            each.set_epoch(2)
        left = [list(each) for each in rest]
        assert sorted([*seen, *itertools.chain(*left)]) == list(range(24))
        assert before != after or left == [list(part) for part in parts]
        state = rest[0].state_dict()
        assert len(list(rest[0])) == 24 // after, "the next pass is a whole one"
        for is_set, length in ((True, 0), (False, 24 // after)):
            rest[0].load_state_dict(state)
            if is_set:
                rest[0].set_epoch(2)
            assert len(list(rest[0])) == length, "nothing is left of the epoch that is set, else a new one begins"


def a_sampler_counts_what_the_loop_has_taken() -> None:
    for processes, persistent, size in ((0, False, 2), (2, False, 2), (2, True, 2), (2, False, None), (0, False, None)):
        (sampler, _) = samplers(24, 2)
        loader = DataLoader(DATA, size, sampler=sampler, num_workers=processes, persistent_workers=persistent)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for number, _batch in enumerate(loader, 1):
                assert sampler.state_dict()["consumed"] == number * (size or 1) * 2
                if number == 4:
                    break
            assert sampler.state_dict()["consumed"] == 4 * (size or 1) * 2, "also after the loop was left"
        for _ in loader:
            pass
        assert sampler.state_dict()["consumed"] == 24


def batches_that_cannot_be_counted_are_refused() -> None:
    class Singles:
        def __iter__(self):
            return ([position] for position in sampler)

    (sampler,) = samplers(24, 1)
    for _ in DataLoader(DATA, batch_sampler=Singles(), num_workers=1):
        refused(sampler.state_dict, "the batches of a Singles without a batch_size cannot be counted; fix: ")
        break


def batches_that_are_drawn_in_advance_are_not_counted() -> None:
    class Ahead:
        batch_size = 3

        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            yield from [batch for batch in self.batches]  # noqa: C416  # a frame more, before Python 3.12

    for processes in (0, 2):
        (sampler,) = samplers(24, 1)
        batches = Ahead(Ahead(Ahead(BatchSampler(sampler, 3, False))))
        for _ in itertools.islice(DataLoader(DATA, batch_sampler=batches, num_workers=processes), 2):
            pass
        assert sampler.state_dict()["consumed"] == 6


def a_state_of_other_data_is_refused() -> None:
    (sampler,) = samplers(24, 1)
    for other, said in ((samplers(25, 1), "length is 24, but 25"), (samplers(24, 1, seed=1), "seed is 0, but 1")):
        refused(lambda other=other: sampler.load_state_dict(other[0].state_dict()), said)


def a_resumed_run_goes_on_bit_by_bit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for processes, place in ((0, (1, 3)), (2, (1, 3)), (0, (1, 7)), (2, (2, 0)), (0, (0, -1)), (2, (1, -1))):
            path = Path(folder) / f"{processes}-{place}"
            path.with_name(f".{path.name}.1").touch()  # of a job that was killed while it saved
            expected = Run(0, processes).train(0, place, path)
            again = Run(1, processes)
            start = dt.resume(path, again.net, again.opt, again.sched, epoch=0, **again.parts)
            assert vars(start) == {"epoch": place[0], "best": 0.5}
            found = again.train(start.epoch)
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), (processes, place)
        assert not [name for name in Path(folder).iterdir() if name.name.startswith(".")]


def without_a_file_nothing_changes() -> None:
    net = nn.Linear(2, 1)
    before = net.weight.detach().clone()
    assert vars(dt.resume("/nowhere/file", net, epoch=3, best=None)) == {"epoch": 3, "best": None}
    assert torch.equal(net.weight, before)


def what_cannot_be_saved_or_loaded_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        net, path = nn.Linear(2, 1), Path(folder) / "file"
        opt = torch.optim.SGD(net.parameters(), 0.1)
        dt.save(path, net, epoch=1)
        whole = path.read_bytes()
        refused(lambda: dt.save(path, net, kind=np.float32), "could not save")
        refused(lambda: dt.save(path, net, array=np.ones(2)), "without unpickling code (numpy.")
        assert path.read_bytes() == whole
        refused(lambda: dt.save(Path(folder) / "no" / "file", net), "worker-0 could not save")
        refused(lambda: dt.save(path, net.parameters()), "model is an object with state_dict", TypeError)
        refused(lambda: dt.resume(path, net, opt), "has no state of optimizer; it has model. fix: save with the same")
        refused(lambda: dt.resume(folder, net), "could not read")
        part, other = samplers(8, 1)[0], samplers(9, 1)[0]
        next(iter(part)), dt.save(path, net, one=part, two=other)
        part.load_state_dict(samplers(8, 1)[0].state_dict())
        refused(lambda: dt.resume(path, net, one=part, two=samplers(7, 1)[0]), "length is 7, but 9")
        assert part.state_dict()["consumed"] == 0
        try:
            checkpoint.open = Unreadable
            refused(lambda: dt.resume(path, net), f"worker-0 could not read {path}: OSError: no disk")
            checkpoint.open = Shorter
            refused(lambda: dt.resume(path, net), "OSError: it became shorter while it was read")
        finally:
            del checkpoint.open
        path.write_bytes(b"something else")
        refused(lambda: dt.resume(path, net), "is not a checkpoint of distrun_runtime.torch.save: ")
        torch.save({"model": net.state_dict()}, path)
        refused(lambda: dt.resume(path, net), "is not a checkpoint of distrun_runtime.torch.save: ")


def metrics_of_one_worker_are_its_own() -> None:
    assert (dt.mean(3), dt.mean(0.5, weight=2), dt.any(False), dt.all(np.bool_(True))) == (3.0, 0.5, False, True)
    half = torch.ones(2, 2, dtype=torch.float16, requires_grad=True)
    assert (dt.mean(half).dtype, dt.mean(half, weight=70000).tolist()) == (torch.float16, [[1, 1], [1, 1]])
    assert not dt.mean(half).requires_grad
    assert dt.mean(torch.tensor(7)) == 7.0
    assert dt.any(torch.tensor([0.0, 2.0])).tolist() == [False, True]
    refused(lambda: dt.mean(torch.tensor(1j)), "expected real numbers, found torch.complex64", TypeError)
    refused(lambda: dt.mean([1.0]), "expected a number or a tensor, found [1.0], a list", TypeError)
    refused(lambda: dt.mean(1.0, weight=-1), "from 0, and not all are 0; this worker's is -1", ValueError)
    refused(lambda: dt.mean(1.0, weight=0), "this worker's is 0", ValueError)


CASES = [
    case for name, case in list(globals().items()) if callable(case) and case.__module__ == __name__ and "_" in name
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases(CASES)
