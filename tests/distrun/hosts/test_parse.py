# ruff: noqa: E501  (messages stand on one line, as they are printed)
from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from distrun.errors import HostsError
from distrun.hosts import HostSpec, Inventory, grammar, named
from distrun.hosts import parse as reading
from distrun.hosts.grammar import Fault


def parse(text: str, form: str = "auto", files: dict[str, str] | None = None) -> Inventory:
    def read(path: str) -> str:
        if path not in (files or {}):
            raise Fault(0, "E100", "hosts file not found: %r (cwd /x)" % path)
        return (files or {})[path]

    return reading.parse(text, "hosts", form=form, read=read)


def errors(text: str, form: str = "auto", files: dict[str, str] | None = None) -> list[str]:
    """Return the first line of every error."""
    with pytest.raises(HostsError) as caught:
        parse(text, form, files)
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    heads = [line for line in lines if re.match(r"[^ ]+(:[1-9]\d*:[1-9]\d*: [EW]\d+|: E101): ", line)]
    assert caught.value.count == len(heads)
    return heads


def one(text: str, form: str = "auto") -> HostSpec:
    (spec,) = parse(text, form).specs
    return spec


CODE = re.compile(r'"([EW]1\d\d)"')
LEGAL = [
    ("d1", HostSpec("d1")),
    ("node7.example.org", HostSpec("node7.example.org")),
    ("_odd-alias_", HostSpec("_odd-alias_")),
    ("10.0.0.17", HostSpec("10.0.0.17")),
    ("[2001:db8::17]", HostSpec("2001:db8::17")),
    ("2001:db8::17", HostSpec("2001:db8::17")),
    ("[fe80::1%eth0]", HostSpec("fe80::1%eth0")),
    ("ubuntu@[::1]:2222", HostSpec("::1", user="ubuntu", port=2222)),
    ("ubuntu@d1", HostSpec("d1", user="ubuntu")),
    ("DOM\\me@d1", HostSpec("d1", user="DOM\\me")),
    ("d1:22", HostSpec("d1", port=22)),
    ("d1:1024", HostSpec("d1", port=1024)),
    ("d1:65535", HostSpec("d1", port=65535)),
    ("d1 port=4", HostSpec("d1", port=4)),
    ("d1 slots=4 max_slots=8", HostSpec("d1", slots=4, max_slots=8)),
    ("d1\tcpu=4\tslots-max=8", HostSpec("d1", slots=4, max_slots=8)),
    ("d1 count=4 username=me", HostSpec("d1", slots=4, user="me")),
    ("d1 addr=10.0.0.1 iface=ib0", HostSpec("d1", addr="10.0.0.1", iface="ib0")),
    ("d1 addr=[2001:DB8::1]", HostSpec("d1", addr="2001:db8::1")),
    ("d1 gpus=4", HostSpec("d1", gpus="4")),
    ("d1 gpus=0,2", HostSpec("d1", gpus="0,2")),
    ("d1 gpus=2,", HostSpec("d1", gpus="2,")),
    ("d1 gpus=GPU-8f6d", HostSpec("d1", gpus="GPU-8f6d")),
    ("d1 gpus=MIG-GPU-8f6d/1/0,MIG-5f1c", HostSpec("d1", gpus="MIG-GPU-8f6d/1/0,MIG-5f1c")),
    ("d1 role=server", HostSpec("d1", role="server")),
    ("d1 role=any", HostSpec("d1")),
    ("d1 labels=a100,rack3", HostSpec("d1", labels=("a100", "rack3"))),
    ('d1 workdir="/a b/c" # x', HostSpec("d1", workdir="/a b/c")),
    (r'd1 workdir="a \"b\" \\ # no comment // neither"', HostSpec("d1", workdir='a "b" \\ # no comment // neither')),
    ("d1 workdir=a#b//c", HostSpec("d1", workdir="a#b//c")),
    ("d1 python=/opt/py/bin/python3 identity=~/.ssh/k", HostSpec("d1", python="/opt/py/bin/python3", identity="~/.ssh/k")),
    ("d1 jump=me@gate:2222,other", HostSpec("d1", jump="me@gate:2222,other")),
    ("  d1  // said so", HostSpec("d1")),
    ("d1 user=me port=22 user=me", HostSpec("d1", user="me", port=22)),
]  # fmt: skip


@pytest.mark.parametrize(("line", "spec"), LEGAL, ids=[line for line, _ in LEGAL])
def test_every_legal_line_means_what_it_says(line: str, spec: HostSpec) -> None:
    assert one(line) == spec


def test_comments_blanks_byte_order_mark_and_windows_line_ends_are_taken() -> None:
    found = parse("\ufeffd1\r\n\r\n# one\r\n\t// two\r\nd2 slots=2 # three\r\n")
    assert found == Inventory("hosts", (HostSpec("d1"), HostSpec("d2", slots=2)), ("d1", "d2"))
    assert found.warnings == ()


def test_ranges_give_hosts_that_share_what_the_line_says() -> None:
    found = parse("me@gpu[01-03,20]n[1-4/2]:2222 slots=2")
    assert found.names == tuple("gpu%sn%s" % (a, b) for a in ("01", "02", "03", "20") for b in "13")
    assert {dataclasses.replace(spec, name="") for spec in found.specs} == {HostSpec("", user="me", port=2222, slots=2)}


def test_a_host_that_stands_twice_is_one_with_both_slots_and_both_places() -> None:
    found = parse("a slots=2\nb\na slots=3\na\n")
    assert found.specs == (HostSpec("a", slots=6), HostSpec("b"))
    assert found.order == ("a", "b", "a", "a")
    assert found.warnings == ("hosts:4:1: W120: duplicate host 'a' (line 1): slots added, now 6",)
    assert parse("h1\nh2\n\n\nh1").warnings == ("hosts:5:1: W120: duplicate host 'h1' (line 1): slots added, now 2",)


def test_two_spellings_of_an_address_are_one_host() -> None:
    found = parse("2001:db8::1\n[2001:DB8:0::1]")
    assert found.order == ("2001:db8::1", "2001:db8::1")


def test_localhost_alone_is_taken_and_beside_others_with_an_address() -> None:
    assert one("localhost").name == "localhost"
    assert parse("localhost\n127.0.0.1\n[::1]").names == ("localhost", "127.0.0.1", "::1")
    assert parse("localhost addr=10.0.0.1\nd2").names == ("localhost", "d2")


def test_other_launchers_files_are_read_by_their_own_rule() -> None:
    assert one("d1:4", "dmlc") == HostSpec("d1", port=4)
    assert one("d1:4", "mpich") == one("d1:4", "horovod") == HostSpec("d1", slots=4)
    assert one("d1:2222", "mpich").slots == 2222
    text = "n1 4 all.q@n1 UNDEFINED\nn2 2 all.q@n2 <NULL>\nn1 1 gpu.q@n1 UNDEFINED\n"
    found = parse(text, "sge")
    assert found.specs == (HostSpec("n1", slots=5), HostSpec("n2", slots=2))
    assert found.warnings == ()


def test_an_included_file_is_relative_to_the_one_that_includes_it() -> None:
    files = {"more/rack": '@include "sub dir/x"\nb', "more/sub dir/x": "a # here"}
    found = parse("z\n@include more/rack # all of it", files=files)
    assert found.names == ("z", "a", "b")


TEXTS = [
    ("# only\n\n// this", "hosts: E101: no hosts in file (3 lines, all blank or comments)"),
    ("\n" * 12, "hosts: E101: no hosts in file (12 lines, all blank or comments)"),
    ("", "hosts: E101: no hosts in file (0 lines, all blank or comments)"),
    ("\n\ngpu_01!", "hosts:3:1: E102: invalid host name 'gpu_01!': allowed are letters, digits, '.', '-', '_'"),
    ("-oProxyCommand=x", "hosts:1:1: E102: invalid host name '-oProxyCommand=x': allowed are letters, digits, '.', '-', '_'"),
    ("me@-v", "hosts:1:4: E102: invalid host name '-v': it begins with '-'"),
    ("10.0.0.300", "hosts:1:1: E102: invalid host name '10.0.0.300': it is not an IPv4 address"),
    ("10.0.0.[1-300]", "hosts:1:1: E102: invalid host name '10.0.0.256': it is not an IPv4 address"),
    ("[2001:xyz]", "hosts:1:1: E102: invalid host name '2001:xyz': it is not an IPv6 address"),
    ("\n\nnode1:99999", "hosts:3:7: E103: port must be 1-65535, got '99999'"),
    ("node1:0", "hosts:1:7: E103: port must be 1-65535, got '0'"),
    ("d1 port=70000", "hosts:1:4: E103: port must be 1-65535, got '70000'"),
    ("\n\nnode1:abc", "hosts:3:7: E104: expected a port number after ':', got 'abc'. For several IPv6 colons use [addr]:port"),
    ("node1:", "hosts:1:7: E104: expected a port number after ':', got ''. For several IPv6 colons use [addr]:port"),
    ("a:b:c", "hosts:1:3: E104: expected a port number after ':', got 'b:c'. For several IPv6 colons use [addr]:port"),
    ("[::1]22", "hosts:1:6: E104: expected ':' and a port number after ']', got '22'"),
    ("[::1]2", "hosts:1:6: E104: expected ':' and a port number after ']', got '2'"),
    ("\n\nnode1:4", "hosts:3:6: E105: 'node1:4' is ambiguous: port 4 (dmlc style) or 4 slots (MPI style)? Write 'node1 slots=4' or 'node1 port=4', or pass --hostfile-format mpich for slots, dmlc for ports"),
    ("\n\nnode1 slots=-1", "hosts:3:7: E106: slots must be a positive integer, got '-1'"),
    ("d1 max_slots=0", "hosts:1:4: E106: max_slots must be a positive integer, got '0'"),
    ("\n\nnode1 slot=2", "hosts:3:7: E107: unknown attribute 'slot'. Did you mean 'slots'? Known: slots, max_slots, port, user, addr, iface, gpus, role, labels, python, workdir, identity, jump"),
    ("d1 xyzzy=2", "hosts:1:4: E107: unknown attribute 'xyzzy'. Known: slots, max_slots, port, user, addr, iface, gpus, role, labels, python, workdir, identity, jump"),
    ("#\nnode1:22" + "\n" * 7 + "node1:2222", "hosts:9:1: E108: 'node1' already listed on line 2 with different port (22 vs 2222)"),
    ("d1\nme@d1", "hosts:2:1: E108: 'd1' already listed on line 1 with different user (none vs me)"),
    ("d1 labels=a,b\nd1 labels=a", "hosts:2:1: E108: 'd1' already listed on line 1 with different labels (a,b vs a)"),
    ("\n\nnode[01-16", "hosts:3:5: E109: unclosed '[' in 'node[01-16'"),
    ("node01]", "hosts:1:7: E109: stray ']' in 'node01]'"),
    ("n[1[2]]", "hosts:1:2: E109: unclosed '[' in 'n[1[2]]'"),
    ("[::1", "hosts:1:1: E109: unclosed '[' in '[::1'"),
    ("\n\nnode[16-01]", "hosts:3:6: E110: range '16-01' is descending"),
    ("node[01-016]", "hosts:1:6: E110: range bounds '01-016' have different padding"),
    ("node[1-120000]", "hosts:1:6: E110: expands to 120000 hosts, limit 65536"),
    ("a[1-65536]\nb", "hosts:2:1: E110: expands to 65537 hosts, limit 65536"),
    ("n[1-]", "hosts:1:3: E110: range '1-' is none of N, N-M, N-M/STEP"),
    ("n[1-4/0]", "hosts:1:3: E110: range '1-4/0' has the step 0"),
    ("me@n[1,]", "hosts:1:8: E110: range '' is none of N, N-M, N-M/STEP"),
    ("\n\na@b@host", "hosts:3:1: E111: two '@' in 'a@b@host'"),
    ("localhost\nd2", "hosts:1:1: E112: 'localhost' mixed with remote host 'd2': other hosts cannot reach it. Use this machine's name or addr="),
    ("d2\n127.0.0.5", "hosts:2:1: E112: '127.0.0.5' mixed with remote host 'd2': other hosts cannot reach it. Use this machine's name or addr="),
    ("\n\n\nd1 foo", "hosts:4:4: E113: text after host is not key=value: 'foo'"),
    ("d1 slots = 4", "hosts:1:4: E113: text after host is not key=value: 'slots'"),
    ("d1 role=boss", "hosts:1:4: E116: role must be one of server, worker, scheduler, any, got 'boss'"),
    ("d1 addr=d1", "hosts:1:4: E116: addr must be an IP address, got 'd1'"),
    ("d1 gpus=1,1", "hosts:1:4: E116: gpus must be a number, or different numbers or UUIDs (GPU-..., MIG-...) with commas between, got '1,1'"),
    ("d1 gpus=1,GPU-8f6d", "hosts:1:4: E116: gpus must be a number, or different numbers or UUIDs (GPU-..., MIG-...) with commas between, got '1,GPU-8f6d'"),
    ("d1 gpus=GPU-8f6d,gpu-8F6D", "hosts:1:4: E116: gpus must be a number, or different numbers or UUIDs (GPU-..., MIG-...) with commas between, got 'GPU-8f6d,gpu-8F6D'"),
    ("d1 iface=a/b", "hosts:1:4: E116: iface must be the name of a network interface, got 'a/b'"),
    ("d1 jump=-x", "hosts:1:4: E116: jump must be [user@]host[:port], got '-x'"),
    ("d1 labels=a,,b", "hosts:1:4: E116: labels must be words with commas between, got 'a,,b'"),
    ("d1 workdir=", "hosts:1:4: E116: workdir must be printable text, got ''"),
    ('d1 workdir="/a b', "hosts:1:4: E116: unclosed quote in '\"/a b'"),
    ('d1 workdir="/a"b', "hosts:1:4: E116: text after the closing quote in '\"/a\"b'"),
    ("-x@d1", "hosts:1:1: E116: invalid user '-x': expected letters, digits, '.', '-', '_'"),
    ("d1:22 port=2222", "hosts:1:7: E116: port given twice: '22' and '2222'"),
    ("d1 slots=4 max_slots=2", "hosts:1:1: E116: slots must be at most max_slots=2, got '4'"),
    ("d[1-2] addr=10.0.0.1", "hosts:1:1: E116: addr=10.0.0.1 would be the address of 2 hosts"),
    ("@group", "hosts:1:1: E117: expected '@include' or a host, got '@group'"),
    ("@include", "hosts:1:1: E117: @include: expected one path, got 0"),
    (" @include a b", "hosts:1:2: E117: @include: expected one path, got 2"),
    ("d1\n@include none", "hosts:2:10: E100: hosts file not found: 'none' (cwd /x)"),
    ("@include hosts", "hosts:1:10: E117: @include: a file includes itself: 'hosts' -> 'hosts'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=[message[:40] for _, message in TEXTS])
def test_every_error_has_its_exact_text_and_place(text: str, message: str) -> None:
    assert errors(text) == [message]


def test_every_code_that_the_parser_can_give_has_a_text_here() -> None:
    tested = {message.split(": ")[1] for _, message in TEXTS}
    found = {code for file in Path(grammar.__file__).parent.glob("*.py") for code in CODE.findall(file.read_text())}
    assert tested >= found - {"E118", "W120", "W121"}  # test_find.py, and above


def test_the_line_and_a_caret_stand_below_the_message() -> None:
    with pytest.raises(HostsError) as caught:
        parse("d1\n\tnode1:4 # é\n")
    assert str(caught.value).splitlines()[1:] == ["   node1:4 # é", "        ^"]
    with pytest.raises(HostsError) as caught:
        parse("漢字 x")
    assert str(caught.value).splitlines()[4:] == ["  漢字 x", "       ^"]


def test_what_could_move_a_terminal_is_not_printed() -> None:
    with pytest.raises(HostsError) as caught:
        parse("d1 \x1b[2Jx=1\ud800")
    assert "\x1b" not in str(caught.value)
    str(caught.value).encode()


def test_a_long_line_is_shown_around_the_caret() -> None:
    with pytest.raises(HostsError) as caught:
        parse("d1 labels=%s slot=3 %s" % ("a" * 500, "b=" * 500))
    _, shown, caret = str(caught.value).splitlines()[:3]
    assert len(shown) < 140
    assert shown[caret.index("^") :].startswith("slot=3")


def test_all_errors_of_a_file_come_at_once_in_the_order_of_its_lines() -> None:
    text = "localhost\nnode1:4\nd2 slots=x slot=1 port=0\na@b@c foo\nd3\nd3 port=2222\n"
    codes = [re.findall(r":(\d+):\d+: (E\d+)", message)[0] for message in errors(text)]
    assert codes == [
        ("1", "E112"),
        ("2", "E105"),
        *(("3", code) for code in ("E106", "E107", "E103")),
        *(("4", code) for code in ("E111", "E113")),
        ("6", "E108"),
    ]


def test_a_file_that_is_none_does_not_fill_the_screen() -> None:
    with pytest.raises(HostsError) as caught:
        parse("what is this?!\n" * 1000)
    assert caught.value.count == 1000
    assert str(caught.value).endswith("... and 800 more errors")


def test_errors_of_an_included_file_name_that_file() -> None:
    assert errors("@include x\n@include y", files={"x": "d1", "y": "\nd1 user=me\nd2 slot=1"}) == [
        "y:2:1: E108: 'd1' already listed on line 1 of x with different user (none vs me)",
        "y:3:4: E107: unknown attribute 'slot'. Did you mean 'slots'? Known: " + ", ".join(grammar.SYNONYMS),
    ]


def test_files_that_include_each_other_or_too_deeply_are_refused() -> None:
    assert errors("@include a", files={"a": "@include b", "b": "@include ./a"}) == [
        "b:1:10: E117: @include: a file includes itself: 'a' -> 'b' -> 'a'"
    ]
    deep = {"f%d" % index: "@include f%d" % (index + 1) for index in range(20)}
    assert errors("@include f0", files=deep) == ["f8:1:10: E117: @include: deeper than 10 files"]
    wide = {"f%d" % index: "@include f%d\n" % (index + 1) * 10 for index in range(8)}
    assert "E117: @include: more than 1000 files" in errors("@include f0", files={**wide, "f8": "d1"})[0]


def test_text_alone_can_include_nothing() -> None:
    with pytest.raises(HostsError, match=r"hosts:1:10: E117: @include: not possible here"):
        reading.parse("@include x", "hosts")


def test_grid_engines_lines_are_checked_too() -> None:
    assert errors("n1\nn2 x\nn! 3\nn4 1 q UNDEFINED more", "sge") == [
        "hosts:1:1: E106: slots must be a positive integer, got ''",
        "hosts:2:4: E106: slots must be a positive integer, got 'x'",
        "hosts:3:1: E102: invalid host name 'n!': allowed are letters, digits, '.', '-', '_'",
        "hosts:4:18: E113: text after host is not slots, queue, processors: 'more'",
    ]


PEERS = {
    "launch.py": ("172.31.1.1\n172.31.1.2\n", "auto", 2),
    "launch.py with port": ("172.31.1.1:22\nd2:2222 slots=4\n", "auto", 2),
    "Horovod file": ("h1 slots=2\nh2 slots=4\n", "auto", 2),
    "DeepSpeed": ("# gpus\nworker-1 slots=4\nworker-2 slots=4\n", "auto", 2),
    "DeepSpeed, rest of the line": ("worker-1 slots=4 whatever\n", "auto", "E113"),
    "Open MPI": ("aa slots=2 max_slots=4\nbb cpu=2 username=me port=2222\nme@cc count=3 // x\n", "auto", 3),
    "Open MPI, long comment": ("/* hosts */\naa\n", "auto", "E102"),
    "Open MPI, relative": ("+n0\n", "auto", "E102"),
    "Open MPI, two at signs": ("a@b@c\n", "auto", "E111"),
    "MPICH": ("h1:4\nh2:2 # big\nh3\n", "mpich", 3),
    "MPICH, not told so": ("h1:4\n", "auto", "E105"),
    "MPICH with user": ("h1:4 user=me\n", "mpich", 1),
    "pdsh": ("node[1-4,7]\n", "auto", 5),
    "clush, step": ("node[0-8/2]\n", "auto", 5),
    "clush, group": ("@compute\n", "auto", "E117"),
    "clush, operators": ("node[1-9]!node5\n", "auto", "E102"),
    "Slurm": ("n[01-04]\nx1\n", "auto", 5),
    "Grid Engine": ("n1 4 all.q@n1 UNDEFINED\n", "sge", 1),
    "Grid Engine, not told so": ("n1 4 all.q@n1 UNDEFINED\n", "auto", "E113"),
    "YAML": ("hosts:\n  - d1\n", "auto", "E104"),
}


@pytest.mark.parametrize("peer", PEERS)
def test_every_peers_file_is_read_or_refused_with_a_code(peer: str) -> None:
    text, form, expected = PEERS[peer]
    if isinstance(expected, int):
        assert len(parse(text, form).specs) == expected
    else:
        assert ": %s: " % expected in errors(text, form)[0]


def test_the_list_of_the_command_line() -> None:
    found = reading.parse_list("a, me@b*4 ,c:2222,gpu[1-2,4]*2,[2001:db8::1]:22,2001:db8::2")
    assert found.source == "--hosts"
    assert found.specs == (
        HostSpec("a"),
        HostSpec("b", user="me", slots=4),
        HostSpec("c", port=2222),
        *(HostSpec("gpu%d" % index, slots=2) for index in (1, 2, 4)),
        HostSpec("2001:db8::1", port=22),
        HostSpec("2001:db8::2"),
    )
    assert reading.parse_list("h1:2,h2:4", form="horovod").specs == (HostSpec("h1", slots=2), HostSpec("h2", slots=4))
    assert reading.parse_list("a,a").warnings == ("--hosts:1:3: W120: duplicate host 'a' (line 1): slots added, now 2",)


def test_the_list_of_the_command_line_is_refused_in_its_own_words() -> None:
    with pytest.raises(HostsError) as caught:
        reading.parse_list("a:4,b*0,c!,d[1-2,e")
    assert [line for line in str(caught.value).splitlines() if ": E" in line] == [
        "--hosts:1:2: E105: 'a:4' is ambiguous: port 4 (dmlc style) or 4 slots (MPI style)? "
        "Write 'a*4' for slots, or pass --hostfile-format dmlc for the port",
        "--hosts:1:6: E106: slots must be a positive integer, got '0'",
        "--hosts:1:9: E102: invalid host name 'c!': allowed are letters, digits, '.', '-', '_'",
        "--hosts:1:13: E109: unclosed '[' in 'd[1-2,e'",
    ]
    with pytest.raises(HostsError, match=r"^--hosts: E101: no hosts in ' , '"):
        reading.parse_list(" , ")


def test_an_inventory_of_names_has_them_and_no_others() -> None:
    found = named(["here"])
    assert found.names == found.order == ("here",)
    assert found.spec("here") == HostSpec("here")
    with pytest.raises(KeyError):
        found.spec("there")


def test_gpus_are_counted() -> None:
    assert [HostSpec("d", gpus=text).gpu_count for text in ("", "0", "4", "0,2", "3,", "GPU-8f6d")] == [
        None,
        0,
        4,
        2,
        1,
        1,
    ]
