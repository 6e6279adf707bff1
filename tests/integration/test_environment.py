"""What tasks on other hosts find in their environment: forwarded variables, and what --activate leaves."""

from __future__ import annotations

from lab import Site

SHOW = "import os, sys; print(*('%s=%s' % (n, os.environ.get(n)) for n in sys.argv[1:]))"


KEYS = {"AWS_ACCESS_KEY_ID": "AKIA-4711", "AWS_SECRET_ACCESS_KEY": "aws-4711", "AWS_SESSION_TOKEN": "session-4711"}


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
        env=env,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.out == (
        "PS_VERBOSE=1 OMP_NUM_THREADS=5 NCCL_API_TOKEN=None AWS_REGION=None TORCH_X=a 'b' $c LD_LIBRARY_PATH=None"
        " TORCH_Y=mine\n"
    )


def test_what_launch_py_gave_its_tasks_arrives(lab: Site) -> None:
    (lab.work / "show.py").write_text(SHOW)
    words = ("launch", "-n", "1", "-s", "0", "--hosts", "h1", "--no-prefix", "--sync-dst-dir", "~/environment")
    show = ("python3", "show.py", *KEYS, "LD_LIBRARY_PATH")
    env = {**KEYS, "LD_LIBRARY_PATH": "/mine/lib:/opt/cuda/lib64:"}
    arrived = " ".join("%s=%s" % pair for pair in KEYS.items())
    done = lab.distrun(*words, *show, env=env)
    assert (done.code, done.out) == (0, arrived + " LD_LIBRARY_PATH=/mine/lib:/opt/cuda/lib64\n"), done.err
    # What the host's own activation sets comes first; what it does not touch comes last.
    activate = ("--activate", "export LD_LIBRARY_PATH=/venv/lib:/opt/cuda/lib64")
    done = lab.distrun(*words, *activate, *show, env=env)
    assert done.out == arrived + " LD_LIBRARY_PATH=/venv/lib:/opt/cuda/lib64:/mine/lib\n", done.err
    done = lab.distrun(*words, "--env", "LD_LIBRARY_PATH=/only", *activate, *show, env=env)
    assert done.out == arrived + " LD_LIBRARY_PATH=/only\n", done.err
    done = lab.distrun(*words, "--no-forward", *show, env=env)
    assert done.out == " ".join("%s=None" % name for name in (*KEYS, "LD_LIBRARY_PATH")) + "\n", done.err
    done = lab.distrun(*words, "--dry-run", *show, env=env)
    assert "env: AWS_SECRET_ACCESS_KEY=***\n" in done.out
    assert "-4711" not in done.out + done.err
