from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import snapshots
from snapshots import NOW

from distrun.dashboard import text, user, view
from distrun.dashboard.model import Model
from distrun.dashboard.user import ViewSelection

GOLDEN = Path(__file__).with_name("golden")
SIZES = [(80, 24), (200, 50)]
MAIN = ViewSelection()


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(time, "localtime", time.gmtime)


def recorded(workers: int, hosts: int = 4) -> Model:
    model = Model("calm-otter-7f3")
    model.take("state", {"state": snapshots.state(workers, hosts)}, NOW)
    for event in snapshots.events():
        model.take("event", {"event": event}, NOW)
    model.take("metrics", {"metrics": snapshots.metrics(workers, hosts)}, NOW)
    model.set_error(snapshots.ERROR)
    model.settle(NOW)
    return model


def shown(
    model: Model, look: ViewSelection = MAIN, size: tuple[int, int] = (80, 24), glyphs: text.Glyphs = text.ASCII
) -> list[str]:
    found = view.picture(model, look, view.Options(*size, glyphs), NOW + 1.0)
    assert len(found.lines) <= size[1]
    assert all(text.line_width(line) <= size[0] for line in found.lines)
    return [text.plain(line) for line in found.lines]


@pytest.mark.parametrize("workers", [40, 200])
@pytest.mark.parametrize("size", SIZES)
def test_screens_are_as_recorded(size: tuple[int, int], workers: int) -> None:
    hosts = workers // 10
    found = "\n".join(shown(recorded(workers, hosts), size=size)) + "\n"
    assert found.isascii()
    golden = GOLDEN / f"{size[0]}x{size[1]}-{workers}.txt"
    assert found == golden.read_text()


@pytest.mark.parametrize("columns", [10, 20, 40, 65, 66, 80])
@pytest.mark.parametrize("mode", [user.MAIN, user.DETAIL, user.LOG, user.STACK, user.HELP])
def test_a_job_of_which_no_task_is_shown_is_drawn_at_every_width(columns: int, mode: str) -> None:
    for model, look in (
        (Model("calm-otter-7f3"), ViewSelection(mode=mode)),
        (recorded(4), ViewSelection(mode=mode, wanted="nothing")),
    ):
        for rows in (1, 2, 6, 24):
            shown(model, look, (columns, rows))


@pytest.mark.parametrize("size", [(20, 6), (40, 12), (79, 24), (80, 23), (80, 24), (120, 40), (200, 50), (300, 100)])
@pytest.mark.parametrize(
    "look", [ViewSelection(), ViewSelection(is_folded=True), *(ViewSelection(panel=each) for each in user.PANELS)]
)
def test_every_size_is_filled_and_never_exceeded(size: tuple[int, int], look: ViewSelection) -> None:
    for glyphs in (text.ASCII, text.UNICODE):
        found = view.picture(recorded(40), look, view.Options(*size, glyphs), NOW)
        assert len(found.lines) == size[1]
        assert all(text.line_width(line) <= size[0] for line in found.lines)


@pytest.mark.parametrize("size", [(79, 24), (80, 23)])
def test_a_small_terminal_has_one_table_and_no_panels(size: tuple[int, int]) -> None:
    assert not [line for line in shown(recorded(40), size=size) if line.startswith("-- ")]
    assert [line for line in shown(recorded(40)) if line.startswith("-- ")]


def test_rows_that_are_hidden_are_counted() -> None:
    found = shown(recorded(40))
    rows = [line for line in found if line[2:].startswith(("worker-", "server-", "scheduler"))]
    (counted,) = [line for line in found if " more (" in line]
    assert counted == f"  {43 - len(rows)} more ({43 - len(rows)} running)"
    last = shown(recorded(40), ViewSelection(chosen="scheduler"))
    (counted,) = [line for line in last if " more (" in line]
    assert counted.endswith(", above")
    assert "1 failed" in counted


def test_a_problem_is_a_word_and_why_is_told() -> None:
    found = shown(recorded(40), size=(200, 50))
    (stalled,) = [line for line in found if line[2:].startswith("worker-3 ")]
    assert " stalled " in stalled
    assert stalled.endswith("no output, step, store call or CPU for 5m40s")


def test_why_of_the_chosen_row_has_a_line_where_its_column_is_too_narrow() -> None:
    found = shown(recorded(40), ViewSelection(chosen="worker-4"))
    assert found[-2] == "worker-4: last in 14 of 20 rounds, 0.31 s behind"


def test_the_chosen_row_has_a_mark() -> None:
    found = shown(recorded(40), ViewSelection(chosen="worker-7"))
    assert [line[:10] for line in found if line.startswith(">")] == ["> worker-7"]


def test_a_lost_coordinator_is_told_above_what_was_last_known() -> None:
    model = recorded(4)
    model.link = "its coordinator is gone"
    assert "! its coordinator is gone" in shown(model)


def test_metrics_that_are_old_are_said_to_be_so() -> None:
    found = view.picture(recorded(4), ViewSelection(), view.Options(80, 24, text.ASCII), NOW + 60)
    assert "! no metrics for 60 s" in [text.plain(line) for line in found.lines]


def test_text_of_tasks_cannot_control_the_terminal() -> None:
    model = recorded(4)
    model.error_lines = ("\x1b[2Jgone \x1b]0;title\x07\x9b31m\ttab\u202e",)
    look = ViewSelection(mode=user.LOG, chosen="worker-0")
    extra = view.TaskExtra(log=["\x1b[31mred\x1b[0m", "\x07bell\x1b"])
    for picture in (
        view.picture(model, ViewSelection(), view.Options(80, 24), NOW),
        view.picture(model, look, view.Options(80, 24), NOW, extra),
    ):
        for line in picture.lines:
            assert all(part.isprintable() for part, _ in line), line


def test_wide_characters_take_two_columns() -> None:
    model = recorded(4)
    model.error_lines = ("訓練" * 60,)
    shown(model, glyphs=text.UNICODE)
    assert text.only_ascii("訓x") == "??x"
    assert text.fit("訓練中", 5) == "訓練…"
    assert text.width(text.fit("訓練中", 4)) == 4


@pytest.mark.parametrize(
    ("line", "columns", "parts"),
    [
        ("訓練" * 4, 6, ["訓練訓", "練訓練", "訓練"]),
        ("訓練訓", 5, ["訓練", "訓"]),
        ("e\u0301e\u0301e\u0301", 2, ["e\u0301e\u0301", "e\u0301"]),
        ("訓", 1, ["訓"]),
        ("one two three", 8, ["one two", "three"]),
        ("one two three", 7, ["one two", "three"]),
        ("to /a/long/path", 8, ["to /a/lo", "ng/path"]),
        ("two /a/long/path", 3, ["two", "/a/", "lon", "g/p", "ath"]),
        ('  File "x"', 20, ['  File "x"']),
        ("    raise error", 12, ["    raise", "error"]),
        ("    raise error", 6, ["raise", "error"]),
        ("      raise error", 5, ["raise", "error"]),
        ("  /a/long/path", 5, ["  /a/", "long/", "path"]),
        ("hello  world foo", 5, ["hello", "world", "foo"]),
        ("aa  bbbb", 4, ["aa", "bbbb"]),
        ("to /a/long/path", 3, ["to", "/a/", "lon", "g/p", "ath"]),
        ("ok" + " " * 160, 80, ["ok"]),
        (" " * 160, 80, [""]),
        ("one \n two  ", 8, ["one", " two"]),
        ("\u2764\ufe0f" * 6, 5, ["\u2764\ufe0f\u2764\ufe0f"] * 3),
        ("\u2764\ufe0f" * 2, 1, ["\u2764\ufe0f"] * 2),
        ("one\n\n two", 8, ["one", "", " two"]),
        ("", 8, [""]),
    ],
)
def test_a_line_is_broken_by_its_columns_between_words_and_keeps_its_indent(
    line: str, columns: int, parts: list[str]
) -> None:
    assert text.wrapped(line, columns) == parts


def test_characters_that_are_wider_together_make_no_line_too_wide() -> None:
    line = "x\u2764\ufe0f" * 5
    assert "".join(text.wrapped(line, 3)) == line
    assert all(text.width(part) <= 3 for part in text.wrapped(line, 3))


def test_a_log_follows_its_end_and_is_scrolled_from_there() -> None:
    extra = view.TaskExtra(log=[f"line {number}" for number in range(100)])
    look = ViewSelection(mode=user.LOG, chosen="worker-0")
    options = view.Options(80, 24, text.ASCII)
    found = view.picture(recorded(4), look, options, NOW, extra)
    assert text.plain(found.lines[-2]) == "line 99"
    back = view.picture(recorded(4), replace(look, first=10), options, NOW, extra)
    assert text.plain(back.lines[-2]) == "line 89"
    assert text.plain(view.picture(recorded(4), replace(look, first=999), options, NOW, extra).lines[2]) == "line 0"


def test_detail_says_all_that_is_known_of_a_task() -> None:
    found = "\n".join(shown(recorded(8), ViewSelection(mode=user.DETAIL, chosen="worker-3")))
    for part in ("stalled", "no output, step", "gpu04", "pid         4006", "615 of 1000", "0.41", "of 2.0G", "H100"):
        assert part in found
    one = "\n".join(shown(recorded(8), ViewSelection(mode=user.DETAIL, chosen="worker-1")))
    assert "exit code  1" in one
    assert "worker-1 on gpu02: exit code 1" in one


def test_hosts_of_visible_tasks_are_looked_at() -> None:
    found = view.picture(recorded(200, 20), ViewSelection(wanted="gpu07"), view.Options(80, 24), NOW)
    assert found.hosts == ("gpu07",)


def test_a_chart_is_from_zero_to_its_maximum_and_shows_gaps() -> None:
    assert text.spark([0, 1, 2, None, 4], 10, text.UNICODE) == "▁▃▅ █"
    assert text.spark([0, 0], 10, text.ASCII) == "__"
    assert text.spark(range(100), 5, text.ASCII) == "#####"
    assert text.spark([1, 2], 0, text.ASCII) == ""


@pytest.mark.parametrize("columns", [20, 40, 80, 100, 110])
def test_keys_are_left_out_whole(columns: int) -> None:
    keys = shown(recorded(4), size=(columns, 30))[-1]
    whole = shown(recorded(4), size=(200, 30))[-1]
    assert whole.startswith(keys)
    assert keys == whole or whole[len(keys) :].startswith("  ")
    assert ("x stop" in keys) == (columns >= 80)


def test_lines_of_a_stack_keep_their_end() -> None:
    path = "/root/.cache/distrun/runtime/" + "0" * 64 + "/distrun_runtime/ps/role.py"
    extra = view.TaskExtra(
        stack=[f'  File "{path}", line 468 in select', '  File "train.py", line 3 in <module>', "x" * 90]
    )
    found = view.picture(
        recorded(4), ViewSelection(mode=user.STACK, chosen="worker-0"), view.Options(80, 24), NOW, extra
    )
    first, second, third = [text.plain(line) for line in found.lines[2:5]]
    assert first.startswith('  File "…0')
    assert first.endswith('/distrun_runtime/ps/role.py", line 468 in select')
    assert len(first) == 80
    assert second == '  File "train.py", line 3 in <module>'
    assert third.endswith("…")


def test_charts_fill_the_room_of_a_wide_terminal() -> None:
    metrics = snapshots.metrics(4)
    for name in ("push_s", "pull_s"):
        metrics["history"][name] = [float(number % 7) for number in range(200)]
    model = recorded(4)
    model.take("metrics", {"metrics": metrics}, NOW)
    model.settle(NOW)
    (store,) = [line for line in shown(model, ViewSelection(panel="store"), (200, 50)) if line.startswith("push/s")]
    assert store.index(" queue") == 131
    assert " " not in store[10:65]


def of_reports(count: int, name: str = "value") -> Model:
    """Return a model of a job that reports so many numbers."""
    metrics = snapshots.metrics(1)
    metrics["reports"] = {f"{name}-{each}": metrics["reports"]["loss"] for each in range(count)}
    model = recorded(1)
    model.take("metrics", {"metrics": metrics}, NOW)
    model.settle(NOW)
    return model


def test_what_scripts_report_is_drawn_as_wide_as_the_terminal_below_its_numbers() -> None:
    for columns in (80, 200):
        found = shown(of_reports(1), ViewSelection(panel="reports"), (columns, 50))
        at = found.index("value-0 0.1742   min 0.1742  max 2.3   step 0 to 610")
        drawn = found[at + 1 : at + 1 + view.CHART_ROWS]
        assert [line[0] for line in drawn] == ["#"] * view.CHART_ROWS
        assert drawn == sorted(drawn, key=len)
        assert len(drawn[-1]) == columns


def test_a_curve_of_a_single_point_is_its_number_and_no_chart() -> None:
    model = of_reports(0)
    model.take("reports", {"reports": {"loss": [[32, 1.0, 0.5]]}}, NOW)
    found = shown(model, ViewSelection(panel="reports"), (80, 50))
    at = found.index("loss 0.5   step 32")
    assert not any(line.strip("#_ ") == "" and line.strip() for line in found[at + 1 :])


@pytest.mark.parametrize("columns", [1, 20, 80])
def test_curves_for_which_there_is_little_room_have_a_line_each_and_others_are_counted(columns: int) -> None:
    for room in (0, 1, 2, 3, 15, 16, 31, 32, 200):
        lines = [text.plain(line) for line in view.reports(of_reports(16), room, columns, text.ASCII)]
        assert len(lines) <= room
        assert all(len(line) <= columns for line in lines)
        if columns == 80 and 0 < room < 16:
            assert lines[-1] == f"{17 - room} more"
        if columns == 80 and 16 <= room < 32:
            assert lines[3] == "value-11 0.1742     #*==---..........._____________________  min 0.1742  max 2.3"


def test_curves_take_the_room_of_a_large_terminal_that_other_panels_leave() -> None:
    found = shown(of_reports(16), size=(300, 80))
    at = [number for number, line in enumerate(found) if line.startswith("-- ")][:2]
    assert at[1] - at[0] == 1 + 3 * 16


def test_a_curve_whose_steps_went_back_is_told_by_its_time_and_odd_members_are_left_out() -> None:
    model, title = of_reports(0), "\x1b]0;x\x07\x1b[2Jc\n"
    reports = {"a": [[5, 1.0, 1.0], [1, 3700.0, 2.0]], title: [[None, 0.0, "nan"], [1, "x", 1], 7], "d": [], "e": 5}
    model.take("reports", {"reports": reports}, NOW)
    lines = [text.plain(line) for line in view.reports(model, 4, 60, text.ASCII)]
    assert lines[:2] == ["c nan   0:00:00", "a 2   min 1  max 2   0:00:01 to 1:01:40"]
    assert [len(line) for line in lines[2:]] == [60]


def test_a_chart_reaches_from_the_smallest_number_to_the_largest_and_marks_what_is_none() -> None:
    assert text.chart([1e308, 0.0, math.nan, -1e308], 2, text.ASCII) == ["#   ", "##!_"]
    assert text.chart([3.0, 3.0], 1, text.ASCII) == ["__"]
    assert text.chart([math.inf], 1, text.ASCII) == ["!"]


def test_columns_of_a_chart_are_means_of_their_points_and_what_lies_between_two() -> None:
    found = text.stretched([(0.0, 1.0), (10.0, 3.0), (10.0, 5.0), (20.0, math.nan)], 5)
    assert found[:4] == [1.0, 2.5, 4.0, 4.0]
    assert math.isnan(found[4])
    assert text.stretched([(7.0, 2.0)], 80) == [2.0]


def test_the_table_of_servers_has_a_heading_only_with_rows() -> None:
    for rows in range(24, 34):
        found = shown(recorded(4), ViewSelection(panel="store"), (80, rows))
        heads = [number for number, line in enumerate(found) if line.startswith("SERVER ")]
        assert all(found[number + 1].startswith("server-") for number in heads)
    model = recorded(4)
    lines = view.store(model, 3, 80, text.ASCII)
    assert not any(text.plain(line).startswith("SERVER ") for line in lines)


def test_of_a_young_job_the_chart_has_a_value_each_second() -> None:
    model = recorded(4)
    for second in range(1, 20):
        metrics = snapshots.metrics(4)
        metrics["history"] = {name: [1.0, 2.0] for name in metrics["history"]}
        model.take("metrics", {"metrics": metrics}, NOW + second)
    assert len(model.trace("push_s", 40)) == 20
    assert model.trace("push_s", 2) == (1.0, 2.0)


def test_the_first_error_shows_no_marks_below_its_lines() -> None:
    model = recorded(4)
    model.set_error(["    return batch.compute(step) + step", "           ~~~~~^^^^^^^^^", "AttributeError: ^ no"])
    found = "\n".join(shown(model))
    assert "batch.compute" in found
    assert "AttributeError: ^ no" in found
    assert "~^^^" not in found


def test_how_a_job_ended_is_seen_before_what_its_hosts_and_store_did_last() -> None:
    model = recorded(40)
    model.take("outcome", {"outcome": {"exit_code": 1, "reason": "task_failed", "message": "worker-1 failed"}}, NOW)
    model.take(
        "event", {"event": {"event": "finished", "exit_code": 1, "message": "no", "time": snapshots.moment(NOW)}}, NOW
    )
    model.settle(NOW)
    titles = [line for line in shown(model) if line.startswith("-- ")]
    assert [line.split()[1].rstrip(":") for line in titles] == ["first", "events", "reports"]
    assert any("job over, exit code 1" in line for line in shown(model))


def test_the_clock_of_a_host_is_never_off_by_minus_nothing() -> None:
    model = recorded(4)
    metrics = snapshots.metrics(4)
    for host in metrics["hosts"].values():
        host["clock_offset_s"] = -0.01
    model.take("metrics", {"metrics": metrics}, NOW)
    model.settle(NOW)
    found = "\n".join(shown(model, size=(200, 50)))
    assert "+0.0s" in found
    assert "-0.0s" not in found
