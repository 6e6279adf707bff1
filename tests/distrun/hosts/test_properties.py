"""Sentences about all inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from distrun.errors import HostsError
from distrun.hosts import HostSpec, Inventory, parse, ranges
from distrun.hosts.grammar import FORMATS, Fault
from distrun_runtime.contract import gpus

EXAMPLE = (Path(__file__).parents[3] / "hosts.example").read_text("utf-8")

WORDS = st.text("abcdefgh0123456789", min_size=1, max_size=6)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp", "Zs")), min_size=1, max_size=8)
SPACED = st.one_of(TEXTS, TEXTS.map(lambda text: text + " \"\\'# // =" + text))


UUIDS = st.builds(
    "{}-{}".format, st.sampled_from(["GPU", "MIG"]), st.text("0123456789abcdef-", min_size=1, max_size=36)
)
NAMES_OF_GPUS = st.lists(st.integers(0, 9999).map(str), min_size=1, max_size=8, unique=True) | st.lists(
    UUIDS, min_size=1, max_size=3, unique=True
)
GPUS = st.just("") | st.integers(0, 9999).map(str) | NAMES_OF_GPUS.map(lambda names: ",".join([*names, ""]))


@st.composite
def specs(draw: st.DrawFn, name: str) -> HostSpec:
    slots = draw(st.none() | st.integers(2, 999))
    return HostSpec(
        name,
        user=draw(st.just("") | WORDS),
        port=draw(st.none() | st.integers(1, 65535)),
        slots=slots,
        max_slots=draw(st.none() | st.integers(slots or 2, 9999)),
        addr=draw(st.just("") | st.ip_addresses().map(str)),
        iface=draw(st.sampled_from(["", "eth0", "ib0.7"])),
        gpus=draw(GPUS),
        role=draw(st.sampled_from(["", "server", "worker", "scheduler"])),
        labels=tuple(draw(st.lists(WORDS, max_size=3))),
        python=draw(st.just("") | SPACED.filter(str.isprintable)),
        workdir=draw(st.just("") | SPACED.filter(str.isprintable)),
        identity=draw(st.just("") | SPACED.filter(str.isprintable)),
        jump=draw(st.sampled_from(["", "gate", "me@gate:22,other"])),
    )


@settings(deadline=None, max_examples=50)
@given(specs("h"))
def test_values_in_quotes_are_read_as_they_are(spec: HostSpec) -> None:
    given = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)[1:]}
    texts = {key: ",".join(value) if key == "labels" else str(value) for key, value in given.items() if value}
    escaped = {key: text.replace("\\", "\\\\").replace('"', '\\"') for key, text in texts.items()}
    line = " ".join(["h", *(f'{key}="{text}"' for key, text in escaped.items())])
    assert parse.parse(line, "hosts").specs == (spec,)


@settings(deadline=None)
@given(NAMES_OF_GPUS, st.booleans())
def test_gpus_that_are_listed_are_those_that_are_seen(names: list[str], is_open: bool) -> None:
    text = ",".join(names) + ("," if is_open or (len(names) == 1 and names[0].isdigit()) else "")
    (spec,) = parse.parse(f"h gpus={text}", "hosts").specs
    assert gpus.listed(spec.gpus) == tuple(names)
    assert spec.gpu_count == len(names)
    assert gpus.seen(",".join(names), gpus.HostGpus()) == tuple(names), "CUDA reads them so, too"


@settings(deadline=None)
@given(st.lists(NAMES_OF_GPUS.map(",".join) | st.sampled_from(["0", "00", "GPU-", "gpu-a", "-1", "x", ""]), max_size=4))
def test_any_other_list_of_gpus_is_an_error_at_its_place(parts: list[str]) -> None:
    text = ",".join(parts)
    items = [item.lower() for item in text.rstrip(",").split(",")] if text != "," else [""]
    kinds = {"number" if item.isdigit() else item[:4] for item in items}
    right = kinds == {"number"} or kinds <= {"gpu-", "mig-"}
    right = right and all(item[4:] or item.isdigit() for item in items) and not text.endswith(",,")
    alike = [int(item) if item.isdigit() else item for item in items]
    found = outcome(f"h gpus={text}", "auto", False)
    assert isinstance(found, Inventory) == (right and len(set(alike)) == len(alike)), text
    assert isinstance(found, Inventory) or str(found).startswith("hosts:1:3: E116: gpus must be a number, or different")


NUMBERS = st.builds(format, st.integers(0, 130), st.sampled_from(["d", "02d", "03d"]))
NAMES = st.builds("".join, st.lists(st.sampled_from(["a", "b-", ".n", "x"]) | NUMBERS, min_size=1, max_size=5))


@settings(deadline=None)
@given(st.lists(NAMES, max_size=30))
@example(["n9", "n10", "n09", "n010", "n0", "n00", "n1"])
@example(["r%dn%02d" % (rack, node) for rack in (1, 2) for node in range(8, 12)])
@example(["n" + "9" * 30, "n" + "9" * 29 + "8"])
def test_folding_and_expanding_are_each_others_inverse(names: list[str]) -> None:
    folded = ranges.fold(names)
    assert sorted(ranges.expand(folded)) == sorted(set(names))
    assert ranges.fold(ranges.expand(folded)) == folded
    assert ranges.fold(reversed(names)) == folded


LEGAL = [line for line in EXAMPLE.splitlines() if line.strip()]
MARKS = st.sampled_from(list(' \t@:[]-,/*="\\#%.0169azé\r\n\x00\ud800\u00a0²٣'))


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = "\n".join(draw(st.lists(st.sampled_from(LEGAL), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.integers(0, 3))
        text = text[:start] + draw(MARKS | st.text(max_size=3) | st.just("9" * 5000)) + text[end:]
    return text


def read(path: str) -> str:
    if "0" in path:
        raise Fault(0, "E100", "hosts file not found: %r" % path)
    return "@include %s\nd9" % path


def outcome(text: str, form: str, includes: bool) -> Inventory | HostsError:
    try:
        return parse.parse(text, "hosts", form=form, read=read if includes else None)
    except HostsError as err:
        return err


@settings(deadline=None)
@given(st.text() | mutated(), st.sampled_from(FORMATS), st.booleans())
def test_any_text_is_an_inventory_or_an_error_with_a_code(text: str, form: str, includes: bool) -> None:
    found = outcome(text, form, includes)
    if isinstance(found, Inventory):
        assert set(found.order) == set(found.names)
    else:
        assert re.match(r"[^\n]*(:[1-9]\d*:[1-9]\d*: E1\d\d|(?<!:0:0): E101): ", str(found))
        str(found).encode()


@settings(deadline=None)
@given(st.text() | mutated(), st.sampled_from(FORMATS))
def test_any_list_is_an_inventory_or_an_error(text: str, form: str) -> None:
    with contextlib.suppress(HostsError):
        parse.parse_list(text, form=form)
    with contextlib.suppress(HostsError):
        ranges.fold(ranges.expand(text))
    with contextlib.suppress(HostsError):
        parse.find(None, None, {"SLURM_JOB_NODELIST": text or "x", "SLURM_TASKS_PER_NODE": text})
