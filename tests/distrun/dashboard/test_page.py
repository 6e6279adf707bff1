"""What the page in the browser is given of a job."""

from __future__ import annotations

import json

import snapshots

from distrun.dashboard import page
from distrun.dashboard.model import Model
from distrun.dashboard.page import RowChoice, UsagePlots
from distrun_runtime.contract.dataclass import rfc3339

NOW = snapshots.NOW


def model(tasks: int = 6, **metrics: object) -> Model:
    made = Model("calm-otter-7f3")
    made.take("state", {"state": snapshots.state(tasks)}, NOW)
    made.take("metrics", {"metrics": {**snapshots.metrics(tasks), **metrics}}, NOW)
    made.settle(NOW)
    return made


def shown(made: Model, choice: RowChoice | None = None, usage: UsagePlots | None = None) -> dict:
    """Return what is sent: strict JSON."""
    value = page.job(made, choice or RowChoice(), usage or UsagePlots([]), NOW)
    return json.loads(json.dumps(value, allow_nan=False))


def test_tables_have_the_words_of_top_problems_first() -> None:
    found = shown(model())
    assert found["tasks"]["headings"][:4] == ["TASK", "HOST", "PID", "STATE"]
    assert [row[3] for row in found["tasks"]["rows"]][:3] == ["failed", "stalled", "straggler"]
    assert found["tasks"]["styles"][:3] == ["red", "red", "yellow"]
    assert found["counts"][0] == ["1 failed", "red"]
    assert found["error"]["title"] == "first error: worker-1 on gpu02, exit code 1"
    assert found["progress"]["parts"][:3] == ["step 610/1000 (61 %)", "0.84 steps/s", "ETA 0:07:42"]
    assert len(found["hosts"]["rows"]) == 4
    assert [row[0] for row in found["servers"]["rows"]] == ["server-0", "server-1"]


def test_a_user_chooses_words_an_order_and_folding() -> None:
    found = shown(model(40), RowChoice("worker running", "task", is_folded=True))
    assert [row[0] for row in found["tasks"]["rows"]] == ["worker-[0,2,6-39]"]


def test_rows_that_are_too_many_are_counted() -> None:
    found = shown(model(page.ROWS + 10))
    assert (len(found["tasks"]["rows"]), found["tasks_hidden"]) == (page.ROWS, 13)


def test_reports_are_plotted_over_steps_unless_these_went_back_or_did_not_go_on() -> None:
    reports = {"loss": [[10, 1.0, 2.5], [20, 2.0, "nan"], [30, 3.0, 0.5]], "a\x1b[1mb": [[5, 1.0, 1], [0, 2.0, 2]]}
    reports["still"] = [[5, 1.0, 1], [5, 2.0, 2]]
    loss, other, still = shown(model(reports=reports))["charts"]
    assert (loss["steps"], loss["times"], loss["series"]) == ([10, 20, 30], [1.0, 2.0, 3.0], [["", [2.5, None, 0.5]]])
    assert (loss["last"], loss["about"]) == ("0.5", "min 0.5  max 2.5")
    assert (other["name"], other["steps"], still["steps"]) == ("ab", None, None)


def test_what_a_job_uses_is_plotted_from_samples_then_history_then_what_came() -> None:
    samples = [{"time": rfc3339(NOW - each), "rss": 2.0**30, "net_rx": 1.0, "net_tx": 2.0} for each in (600, 125)]
    usage = UsagePlots(samples)
    usage.take(model())
    usage.take(model())
    found = {chart["name"]: chart for chart in shown(model(), usage=usage)["charts"]}
    times = found["memory"]["times"]
    assert times[:3] == [130.0, 605.0, 610.0], "history goes on after the last sample"
    assert times[-2:] == [720.0, 730.0], "what is known is not taken again"
    assert found["memory"]["series"][0][1][:3] == [2.0**30, 2.0**30, None]
    assert found["network"]["series"][0][1][:2] == [3.0, 3.0]
    assert [label for label, _ in found["store"]["series"]] == ["pushes", "pulls"]


def test_plots_of_a_long_job_keep_their_ends_and_get_coarser() -> None:
    usage = UsagePlots({"time": rfc3339(NOW - 60 * each), "cpu": float(each)} for each in range(20_000, 0, -1))
    (chart,) = usage.charts(NOW - 60 * 20_000)
    assert page.POINTS / 2 <= len(chart["times"]) <= page.POINTS
    assert (chart["times"][0], chart["times"][-1]) == (0.0, 60.0 * 19_999)


def test_a_job_that_is_over_has_no_time_left_and_its_numbers_are_not_taken() -> None:
    made, usage = model(), UsagePlots([])
    made.take("state", {"state": snapshots.state(6, state="failed", finished=snapshots.moment(NOW))}, NOW)
    made.settle(NOW)
    usage.take(made)
    found = shown(made, usage=usage)
    assert found["is_over"]
    assert not [part for part in found["progress"]["parts"] if "ETA" in part]
    assert "usage" not in [chart["kind"] for chart in found["charts"]]
