"""What tasks on other hosts find in their environment: forwarded variables, and what --activate leaves."""

from __future__ import annotations

import os

from lab import Site, wait_until

SHOW = "import os, sys; print(*('%s=%s' % (n, os.environ.get(n)) for n in sys.argv[1:]))"


def test_tuning_variables_go_along_and_secrets_and_places_do_not(lab: Site) -> None:
    env = {
        "PS_VERBOSE": "1",
        "OMP_NUM_THREADS": "3",
        "NCCL_API_TOKEN": "hush",
        "AWS_REGION": "x",
        "TORCH_X": "a 'b' $c",
    }
    names = [*env, "LD_LIBRARY_PATH"]
    words = (
        "-n",
        "1",
        "-s",
        "0",
        "--hosts",
        "h1",
        "--no-prefix",
        "--env",
        "TORCH_Y=mine",
        "--env",
        "OMP_NUM_THREADS=5",
    )
    script = lab.work / "show.py"
    script.write_text(SHOW)
    done = lab.distrun(
        "launch", *words, "--sync-dst-dir", "/tmp/environment", "python3", "show.py", *names, "TORCH_Y",
        env={**env, "LD_LIBRARY_PATH": "/nowhere"},
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.out == (
        "PS_VERBOSE=1 OMP_NUM_THREADS=5 NCCL_API_TOKEN=None AWS_REGION=None TORCH_X=a 'b' $c LD_LIBRARY_PATH=None"
        " TORCH_Y=mine\n"
    )


def test_forwarded_values_are_on_no_command_line(lab: Site) -> None:
    words = ("-n", "1", "-s", "0", "--hosts", "h1", "--env", "MY_PASSWORD")
    (lab.work / "wait.py").write_text("import time; print('up', flush=True); time.sleep(60)")
    env = {"PS_SOMETHING": "value-4711", "MY_PASSWORD": "secret-4711"}
    running = lab.start("launch", *words, "--sync-dst-dir", "/tmp/environment", "python3", "wait.py", env=env)
    wait_until(lambda: "up" in running.out, 60, "the worker is up")
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open("/proc/%s/cmdline" % entry, "rb") as file:
                    line = file.read()
            except OSError:
                continue
            assert b"-4711" not in line, line
    running.signal(2)
    assert running.wait() == 130


def test_what_activation_leaves_is_what_tasks_start_from(lab: Site) -> None:
    (lab.work / "show.py").write_text(SHOW)
    words = ("-n", "2", "-s", "0", "--hosts", "h1,h2", "--no-prefix", "--sync-dst-dir", "/tmp/environment")
    command = ("python3", "show.py", "ONE", "TWO")
    done = lab.distrun(
        "launch", *words, "--activate", "export ONE=1", "--activate", 'TWO="$ONE & 2"; export TWO', *command
    )
    assert done.code == 0, done.err
    assert done.out == "ONE=1 TWO=1 & 2\n" * 2
    done = lab.distrun("launch", *words, "--activate", "venv:/not/there", *command)
    assert done.code == 3, done.err
    assert "there is no /not/there/bin/activate on this host" in done.err
    assert done.out == ""
