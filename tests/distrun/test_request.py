from __future__ import annotations

import pytest

from distrun import options, request
from distrun.errors import UsageError
from distrun.request import JobRequest, Setting
from distrun_runtime.contract.plan import Limits


def make(**more: object) -> JobRequest:
    members: dict[str, object] = {"command": ("true",), "workers": 1, "servers": 0, "cwd": "/w", **more}
    return JobRequest(**members)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"workers": 0}, "-n/--num-workers: expected a whole number from 1 to 65536, found '0'"),
        ({"workers": -2}, "found '-2'"),
        ({"servers": -1}, "-s/--num-servers: expected a whole number from 0 to 65536, found '-1'"),
        ({"command": ()}, "no command"),
        ({"command": ("",)}, "no command"),
        ({"command": ("a\0b",)}, "NUL"),
        ({"ps": "both"}, "--ps: expected bundled or command, found 'both'"),
        ({"limits": Limits(grace_s=-1)}, "--grace: expected a time in seconds, from 0 to 31536000"),
        ({"limits": Limits(timeout_s=0)}, "--timeout: .* more than 0"),
        ({"limits": Limits(timeout_s=float("nan"))}, "--timeout"),
        ({"limits": Limits(start_s=-1)}, "--start-timeout"),
        ({"op_timeout_s": 0.0}, "--op-timeout"),
        ({"name": "a b"}, "--name"),
        ({"name": "../x"}, "--name"),
        ({"port_range": "9-1"}, "--port-range"),
        ({"port_range": "0-5"}, "--port-range"),
        ({"subnet": "bogus"}, "--subnet: expected a network such as 10.0.0.0/8 or fd00::/8, found 'bogus'"),
        ({"server_imports": ("rules.py",)}, "--server-import: expected a module's name .*; found 'rules.py'"),
        ({"server_imports": ("a/b",)}, "--server-import: expected a module's name"),
        ({"server_imports": ("",)}, "--server-import: expected a module's name"),
        ({"server_imports": ("rules",), "servers": 0}, "no servers of distrun's own that could import rules"),
        ({"server_imports": ("rules",), "ps": "command"}, "no servers of distrun's own"),
        ({"server_device": "gpu0"}, r"--server-device: expected auto, cpu, gpu or gpu:N .*, found 'gpu0'"),
        ({"server_device": "gpu:0", "servers": 0}, r"--server-device gpu:0: this job has no servers \(-s 0\)"),
        ({"server_device": "cpu", "ps": "command"}, "--server-device cpu: with --ps command the servers are your"),
        ({"port_range": "80"}, "--port-range: expected FIRST-LAST within 1-65535, found '80'"),
    ],
)
def test_a_wrong_wish_is_refused_in_words(members: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**members)


def test_no_grace_is_a_legal_wish() -> None:
    assert make(limits=Limits(grace_s=0)).limits.grace_s == 0


def test_env_takes_values_names_and_patterns() -> None:
    outer = {"HOME": "/h", "MY_A": "1", "MY_B": "2", "DMLC_ROLE": "server", "DMLC_X": "x"}
    settings, notes = request.parse_env(["A=b=c", "HOME", "MY_*", "DMLC_*", "GONE", "NO_*"], outer)
    assert [(s.name, s.value, s.hidden) for s in settings] == [
        ("A", "b=c", False),
        ("HOME", "/h", True),
        ("MY_A", "1", True),
        ("MY_B", "2", True),
        ("DMLC_X", "x", True),
    ]
    assert len(notes) == 2
    assert "GONE" in notes[0]
    assert "NO_*" in notes[1]


def test_values_may_be_empty_and_of_any_bytes() -> None:
    settings, _ = request.parse_env(["A=", "B=\n \udcff$'\""], {})
    assert [s.value for s in settings] == ["", "\n \udcff$'\""]


@pytest.mark.parametrize("word", ["DMLC_ROLE=server", "RANK", "DISTRUN_JOB_ID=x"])
def test_what_distrun_sets_itself_cannot_be_given(word: str) -> None:
    with pytest.raises(UsageError, match="is set by distrun itself"):
        request.parse_env([word], {"RANK": "1"})


@pytest.mark.parametrize("word", ["=x", "A B=c"])
def test_a_variable_needs_a_name(word: str) -> None:
    with pytest.raises(UsageError, match="expected a variable's name"):
        request.parse_env([word], {})


def test_role_env_takes_equals_and_launch_pys_colon() -> None:
    settings = request.parse_role_env("worker", ["OMP_NUM_THREADS:3", "URL=http://x", "PATHS:a=b"])
    assert [(s.name, s.value, s.role) for s in settings] == [
        ("OMP_NUM_THREADS", "3", "worker"),
        ("URL", "http://x", "worker"),
        ("PATHS", "a=b", "worker"),
    ]
    with pytest.raises(UsageError, match="--env-worker: expected NAME=VALUE, found 'X'"):
        request.parse_role_env("worker", ["X"])


def test_a_setting_for_the_role_wins_and_the_later_one_wins() -> None:
    settings = [Setting("A", "role", role="worker"), Setting("A", "1"), Setting("A", "2"), Setting("B", "s", "server")]
    assert {n: s.value for n, s in request.given(settings, "worker").items()} == {"A": "role"}
    assert {n: s.value for n, s in request.given(settings, "server").items()} == {"A": "2", "B": "s"}


def test_env_file_knows_comments_export_and_quotes() -> None:
    text = """
# a comment
A=1
export B = two words   # said here
C='single $ "#" \\n'
D="double \\"q\\" \\n \\$ \\\\ end"  # said
E=
F=a#b
G="ü"
"""
    values = {s.name: s.value for s in request.parse_env_file(text, "my.env")}
    assert values == {
        "A": "1",
        "B": "two words",
        "C": 'single $ "#" \\n',
        "D": 'double "q" \n $ \\ end',
        "E": "",
        "F": "a#b",
        "G": "ü",
    }


def test_values_of_an_env_file_are_hidden() -> None:
    assert all(s.hidden for s in request.parse_env_file("A=1\n", "f"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("A", r"my.env:2: expected KEY=VALUE, found 'A'"),
        ('A="hidden', r"my.env:2: the value's \" is not closed"),
        ("A='x' y", "is not closed, or something follows"),
        ("=x", "expected a variable's name"),
        ("RANK=1", "set by distrun itself"),
    ],
)
def test_a_wrong_line_of_an_env_file_names_file_and_line(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        request.parse_env_file("OK=1\n%s\n" % line, "my.env")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "secret"),
    [("API_KEY", True), ("my_password", True), ("HF_TOKEN", True), ("AWS_SECRET_ACCESS_KEY", True), ("OMP_X", False)],
)
def test_secret_names_are_recognised(name: str, secret: bool) -> None:
    assert request.is_secret(name) is secret


def test_wrong_tuning_variables_are_named_with_what_would_be_right() -> None:
    outer = {"PS_VERBOSE": "3", "PS_RESEND": "yes"}
    with pytest.raises(UsageError) as caught:
        request.check_tuning([Setting("MXNET_KVSTORE_BIGARRAY_BOUND", "big", role="server")], outer)
    text = str(caught.value)
    assert "PS_VERBOSE='3'" in text
    assert "from 0 to 2" in text
    assert "PS_RESEND='yes'" in text
    assert "MXNET_KVSTORE_BIGARRAY_BOUND='big'" in text
    assert len(text.splitlines()) == 3


def test_what_the_user_gives_repairs_what_is_outside() -> None:
    request.check_tuning([Setting("PS_VERBOSE", "1")], {"PS_VERBOSE": "3"})


def test_addresses_of_the_coordinator_are_addresses_or_names_without_a_port() -> None:
    assert options.parse_addresses("--coordinator-address", "") == ()
    assert options.parse_addresses("--coordinator-address", "10.0.0.1, head-0.example,fd00::1,10.0.0.1") == (
        "10.0.0.1",
        "head-0.example",
        "fd00::1",
    )
    for wrong in ("10.0.0.1:4711", "a,,b", "-x", "a b", "[::1]"):
        with pytest.raises(UsageError, match="--coordinator-address: expected addresses or host names"):
            options.parse_addresses("--coordinator-address", wrong)


def test_signals_to_forward_are_those_that_distrun_does_not_act_on() -> None:
    assert options.parse_signals("--forward-signal", "") == ()
    assert options.parse_signals("--forward-signal", "USR2, sigusr1,USR2") == ("USR2", "USR1")
    for wrong in ("TERM", "10", "USR1,", "USR1 USR2"):
        with pytest.raises(UsageError, match="--forward-signal: expected some of USR1, USR2 with commas between"):
            options.parse_signals("--forward-signal", wrong)


def test_seconds_with_their_unit_are_refused_with_what_to_type() -> None:
    with pytest.raises(UsageError) as caught:
        options.BY_KEY["stall_after"].read("20s")
    assert caught.value.hint == "without the unit: --stall-after 20"
