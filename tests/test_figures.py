"""Figures: the numbers that go into them, and that the files can be drawn and read."""

import json

import numpy as np
import pytest
from PIL import Image

from demyrl.analysis import figures, stats
from demyrl.analysis.charts import CHARTS
from demyrl.logs import METRICS


def rows_of(name, values):
    return [{"step": step, name: value} for step, value in enumerate(values)]


def write_run(folder, values, name="reward/avg_at_g"):
    folder.mkdir()
    lines = [json.dumps(row) + "\n" for row in rows_of(name, values)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def colours_of(path):
    with Image.open(path) as image:
        return {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}


def evaluation(right):
    rows = [
        {
            "problem_id": str(problem),
            "domain": "math",
            "sample": sample,
            "correct": sample < right,
            "answer": str(sample < right),
            "calls": 1,
        }
        for problem in range(3)
        for sample in range(4)
    ]
    return stats.summarize(rows, k=4)


def test_a_series_leaves_out_steps_without_a_number():
    rows = [{"step": 0, "x": 1.0}, {"step": 1}, {"step": 2, "x": None}, {"step": 3, "x": 4.0}]
    steps, values = figures.series(rows, "x")
    assert (steps.tolist(), values.tolist()) == ([0, 3], [1, 4])


def test_a_series_is_in_the_order_of_the_steps():
    steps, values = figures.series([{"step": 2, "x": 5.0}, {"step": 1, "x": 3.0}], "x")
    assert (steps.tolist(), values.tolist()) == ([1, 2], [3, 5])


def test_smoothing_averages_fewer_values_at_the_ends():
    smoothed = figures.smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3)
    np.testing.assert_allclose(smoothed, [1.5, 3.0, 3.0, 3.0])


def test_smoothing_keeps_a_constant():
    np.testing.assert_allclose(figures.smooth(np.full(9, 0.7), 5), 0.7)


def test_every_metric_of_a_chart_is_documented():
    assert {name for chart in CHARTS for name in chart.lines} - set(METRICS) == set()


def test_only_charts_with_numbers_are_drawn(tmp_path):
    drawn = figures.draw(rows_of("policy/entropy", [0.5, 0.4, 0.3]), tmp_path)
    assert list(drawn) == ["entropy"]
    assert [path.name for path in tmp_path.iterdir()] == ["entropy.png"]


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_chart_shows_its_line_however_short_the_run(tmp_path, count):
    drawn = figures.draw(rows_of("policy/entropy", np.linspace(0.5, 0.1, count)), tmp_path)
    assert len(colours_of(drawn["entropy"])) > 10
    assert (11, 107, 184) in colours_of(drawn["entropy"])


def test_a_logarithmic_chart_survives_zeros(tmp_path):
    drawn = figures.draw(rows_of("policy/sampler_gap", [0.0, 1e-6, 1e-5]), tmp_path)
    assert drawn["sampler_gap"].exists()


def test_the_dark_theme_has_a_dark_background(tmp_path):
    rows = rows_of("policy/entropy", [0.5, 0.4])
    drawn = figures.draw(rows, tmp_path, figures.DARK)
    with Image.open(drawn["entropy"]) as image:
        assert sum(image.convert("RGB").getpixel((2, 2))) < 150


def test_a_line_at_zero_beside_others_gets_no_label():
    chart = next(chart for chart in CHARTS if chart.name == "clipping")
    rows = [{"step": 0, "loss/clipped_high": 0.1, "loss/clipped_low": 0.0}]
    assert figures._worth_a_line(chart, rows) == [("loss/clipped_high", "upper clip")]


def test_before_and_after_is_drawn_with_and_without_intervals(tmp_path):
    without = {"k": 4, "domains": {"all": {m: {"value": 0.5} for m in ("avg_at_k", "pass_at_k")}}}
    runs = {"SFT": evaluation(1), "RL": evaluation(3), "RL without tool": without}
    path = figures.before_after(runs, tmp_path / "before_after.png")
    assert len(colours_of(path)) > 10


def test_seeds_are_compared_on_the_steps_all_of_them_reached(tmp_path):
    runs = [write_run(tmp_path / "a", [0.0, 0.2, 0.4]), write_run(tmp_path / "b", [0.2, 0.4])]
    steps, values = figures._over_seeds("recipe", runs, "reward/avg_at_g")
    assert (steps.tolist(), values.mean(axis=0).tolist()) == ([0, 1], pytest.approx([0.1, 0.3]))


def test_variants_are_compared_in_one_figure(tmp_path):
    runs = {
        "grpo": [write_run(tmp_path / "a", [0.1, 0.2])],
        "tcr": [write_run(tmp_path / "b", [0.1, 0.5]), write_run(tmp_path / "c", [0.2, 0.6])],
    }
    path = figures.compare(runs, "reward/avg_at_g", tmp_path / "out" / "compare.png")
    assert path.exists()


def test_a_variant_without_the_metric_is_named(tmp_path):
    runs = {"grpo": [write_run(tmp_path / "a", [0.1], name="reward/mean")]}
    with pytest.raises(ValueError, match="variant grpo: none of its 1 workdirs logged policy/entr"):
        figures.compare(runs, "policy/entropy", tmp_path / "compare.png")
