"""A notebook cell that fails can be run again, with the other workers waiting or failing too.

Real processes; each script runs its cells one after the other, as a notebook does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from manual import ManualJob

CELLS = """
    import os, signal, sys, threading, time
    import numpy as np
    from distrun_runtime import kvstore
    from distrun_runtime.trainer import Parameter, Trainer, fit

    def cell(work, *arguments, **options):
        try:
            print("done", work(*arguments, **options), flush=True)
        except (Exception, KeyboardInterrupt) as err:
            print("failed", type(err).__name__, err, flush=True)

    def until(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    rank = int(os.environ["DMLC_WORKER_ID"])
    folder = os.environ["FOLDER"]
"""

TRAINERS = """
    def train(**wrong):
        weight = np.zeros(2, np.float32)
        options = {"optimizer": "sgd", "optimizer_params": {"learning_rate": 1.0}, "kvstore": "dist_sync"}
        trainer = Trainer([Parameter(weight, np.ones(2, np.float32), name="w")], **{**options, **wrong})
        trainer.step(1)
        return weight[0]

    def fitted(**wrong):
        weight = np.zeros(2, np.float32)
        one = Parameter(weight, name="w")

        def step(batch):
            one.grad = np.ones(2, np.float32)

        options = {"optimizer_params": {"learning_rate": 1.0}, "kvstore": "dist_sync", "batch_size": 1}
        fit(step, [one], [0], **{**options, **wrong})
        return weight[0]

    WRONG = [
        {"compression_params": {"type": "2bitt"}},
        {"compression_params": {"type": "2bit", "treshold": 1}},
        {"compression_params": [("type", "2bit")]},
        {"optimizer_params": {"learning_rat": 1.0}},
        {"optimizer_params": {"wd": 0, "weight_decay": 0}},
        {"optimizer": "sdg"},
        {"optimizer": "no_module:Rule"},
        {"optimizer": "no_module:Rule", "update_on_kvstore": False},
        {"update_on_kvstore": "yes"},
        {"kvstore": "dist_sinc"},
    ]
    BOTH = len(sys.argv) > 1
    for wrong in WRONG:
        # Whether servers know a rule turns out when all workers make the trainer: another rule on one is all's error.
        if rank == 0 or BOTH or wrong == {"optimizer": "no_module:Rule"}:
            cell(train, **wrong)
        cell(train)
    for wrong in ({"batch_size": "all"}, {"batch_size": 0}, {"after_epoch": 5}):
        if rank == 0 or BOTH:
            cell(fitted, **wrong)
        cell(fitted)
"""


@pytest.mark.parametrize("both", [False, True])
def test_a_trainer_with_a_wrong_argument_can_be_made_again(both: bool) -> None:
    """It told the others that this worker had failed, and every later call here that it had left the job."""
    with ManualJob(2, 1, FOLDER="") as job:
        script = job.script(CELLS + TRAINERS)
        job.start("scheduler")
        job.start("server")
        for rank in range(2):
            job.start("worker", script, *(["both"] if both else []), DMLC_WORKER_ID=str(rank))
        assert set(job.wait()) == {0}, job.report()
        for name in ("worker-0", "worker-1"):
            lines = job.out(name).splitlines()
            failed = [line for line in lines if line.startswith("failed")]
            assert len(failed) == (13 if both or name == "worker-0" else 1), job.report()
            assert all("KVError" in line for line in failed), job.report()
            # Batches are summed, and not divided by the number of workers, but in fit.
            assert [line for line in lines if line.startswith("done")] == ["done -2.0"] * 10 + ["done -1.0"] * 3, (
                job.report()
            )


INTERRUPTED = """
    def store(**changed):
        kv = kvstore.create("dist_sync")
        if changed:
            kv.set_gradient_compression(changed)
        kv.init("w", np.ones(2, np.float32))
        out = np.zeros(2, np.float32)
        kv.pushpull("w", np.ones(2, np.float32), out=out)
        return out[0]

    def train():
        weight = np.zeros(2, np.float32)
        one = Parameter(weight, np.ones(2, np.float32), name="w")
        Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore="dist_sync").step(1)
        return weight[0]

    kv = kvstore.create("dist_sync")

    def init():
        kv.init("w", np.ones(2, np.float32))
        return "init"

    def barrier():
        kv.barrier()
        return "barrier"

    for number, work in enumerate((store, train, init, barrier)):
        mark = os.path.join(folder, "interrupted-%d" % number)
        if rank == 0:
            # The other one is not there before this has happened: so it waits.
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            cell(work)
            open(mark, "w").close()
        else:
            until(mark)
        cell(work)
"""


def test_a_cell_that_was_interrupted_can_be_run_again(tmp_path: Path) -> None:
    """Ctrl-C while it waits for the other worker, which comes only then: they were never in step again."""
    with ManualJob(2, 1, FOLDER=str(tmp_path)) as job:
        script = job.script(CELLS + INTERRUPTED)
        job.start("scheduler")
        job.start("server")
        for rank in range(2):
            job.start("worker", script, DMLC_WORKER_ID=str(rank))
        assert set(job.wait()) == {0}, job.report()
        expected = ["done 2.0", "done -2.0", "done init", "done barrier"]
        assert job.out("worker-1").splitlines() == expected, job.report()
        lines = job.out("worker-0").splitlines()
        assert [line.rstrip() for line in lines[::2]] == ["failed KeyboardInterrupt"] * 4, job.report()
        assert lines[1::2] == expected, job.report()


REGISTERED = """
    def create():
        kv = kvstore.create("dist_sync")
        kv.init("w", np.ones(2, np.float32))
        return kv.num_workers

    os.environ.update(first)
    if interrupt:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    cell(create)
    for name in first:
        os.environ.pop(name)
    os.environ.update(second)
    until(os.path.join(folder, "now"))
    cell(create)
"""


@pytest.mark.parametrize("why", ["no scheduler", "wrong token", "interrupted"])
def test_a_create_that_could_not_join_the_job_can_be_called_again(why: str, tmp_path: Path) -> None:
    """The first failure was the answer to every later call."""
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("one secret")
    wrong.write_text("another")
    both = {"DISTRUN_TOKEN_FILE": str(token)}
    first = {
        "no scheduler": {"DISTRUN_START_TIMEOUT": "1", **both},
        "wrong token": {"DISTRUN_TOKEN_FILE": str(wrong)},
        "interrupted": both,
    }[why]
    said = {
        "no scheduler": "TimedOut no scheduler answered",
        "wrong token": "Refused",
        "interrupted": "KeyboardInterrupt",
    }
    with ManualJob(1, 1, FOLDER=str(tmp_path)) as job:
        text = "\n    first, second, interrupt = %r, %r, %r\n" % (first, both, why == "interrupted")
        if why == "wrong token":
            job.start("scheduler", **both)
        job.start("worker", job.script(CELLS + text + REGISTERED), DMLC_WORKER_ID="0")
        job.until("worker-0", "failed " + said[why])
        if why != "wrong token":
            job.start("scheduler", **both)
        job.start("server", **both)
        (tmp_path / "now").touch()
        assert set(job.wait()) == {0}, job.report()
        assert job.out("worker-0").splitlines()[-1] == "done 1", job.report()
