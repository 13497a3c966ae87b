"""The figures of a run, as PNG files: what `metrics.jsonl` and evaluations say at a glance.

One chart is one question. Raw points stand faint behind a light running mean; colours are told
apart by colour-blind readers too, in a light and a dark theme. Nothing global is changed.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from demyrl.analysis.charts import CHARTS, Chart
from demyrl.logs import read_rows

Rows = Sequence[Mapping[str, Any]]

INCHES = (5.8, 3.5)
WIDE_INCHES = (9.6, 4.0)
DPI = 150


@dataclasses.dataclass(frozen=True)
class Theme:
    """The colours of a figure; `lines` in the order in which they are used."""

    paper: str
    ink: str
    faint: str
    lines: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1d2433", "#d9dee7", ("#0b6bb8", "#d9541a", "#0a8f6a", "#9c4d97", "#8a6d00")
)
DARK = Theme(
    "#171c26", "#e4e8f0", "#343c4b", ("#5fb4f5", "#f79a5c", "#3ecf9e", "#dd9bd8", "#e3c558")
)


def series(rows: Rows, name: str) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The steps at which `name` was logged as a number, and its values."""
    found = {row["step"]: row[name] for row in rows if row.get(name) is not None}
    steps = np.array(sorted(found), np.float64)
    return steps, np.array([found[step] for step in steps], np.float64)


def smooth(values: Float[np.ndarray, " n"], window: int) -> Float[np.ndarray, " n"]:
    """The centred running mean, over fewer values at the ends."""
    if window <= 1:
        return values
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def draw(
    rows: Rows, folder: str | Path, theme: Theme = LIGHT, charts: Sequence[Chart] = CHARTS
) -> dict[str, Path]:
    """Draw each chart of which the rows have numbers; the files by chart name."""
    drawn = {}
    for chart in charts:
        if any(len(series(rows, name)[0]) for name in chart.lines):
            drawn[chart.name] = _draw_chart(chart, rows, Path(folder) / f"{chart.name}.png", theme)
    return drawn


def _draw_chart(chart: Chart, rows: Rows, path: Path, theme: Theme) -> Path:
    figure, axes = _canvas(chart.title, "step", chart.unit, theme)
    for (name, label), colour in zip(_worth_a_line(chart, rows), theme.lines, strict=False):
        steps, values = series(rows, name)
        values = np.maximum(values, 1e-12) if chart.log else values
        _line(axes, steps, values, label, colour, chart.log)
    if chart.points:
        _evaluations(axes, rows, theme)
    _scale(axes, chart)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        _legend(axes, theme)
    return _save(figure, path)


def _worth_a_line(chart: Chart, rows: Rows) -> list[tuple[str, str]]:
    """The metrics with numbers, without those that are 0 all along beside others that are not."""
    logged = [pair for pair in chart.lines.items() if len(series(rows, pair[0])[0])]
    moving = [pair for pair in logged if np.any(series(rows, pair[0])[1])]
    return moving or logged[:1]


def _line(
    axes: Axes,
    steps: Float[np.ndarray, " n"],
    values: Float[np.ndarray, " n"],
    label: str,
    colour: str,
    log: bool,
) -> None:
    """Draw a running mean over about a fifteenth of the run, and the raw values behind it."""
    few = len(values) < 12
    window = 1 if few else max(3, len(values) // 15 | 1)
    mean = np.exp(smooth(np.log(values), window)) if log else smooth(values, window)
    if not few:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
    marker = "o" if few else None
    axes.plot(steps, mean, color=colour, label=label, linewidth=2.2, marker=marker, markersize=4)


def _evaluations(axes: Axes, rows: Rows, theme: Theme) -> None:
    """Mark the held-out evaluations that were logged between the steps."""
    names = {name for row in rows for name in row if re.match(r"eval/all/(avg|pass)_at_", name)}
    for name, marker in zip(sorted(names, reverse=True), "Do", strict=False):
        steps, values = series(rows, name)
        label = "held-out " + name.removeprefix("eval/all/").replace("_at_", "@")
        axes.plot(steps, values, marker, color=theme.ink, label=label, markersize=5, zorder=5)


def _scale(axes: Axes, chart: Chart) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    if chart.log:
        axes.set_yscale("log")
    elif chart.share:
        high = axes.get_ylim()[1]
        axes.set_ylim(0, 1.03 if high > 0.55 else max(high * 1.1, 0.01))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    elif axes.get_ylim()[0] > 0:
        axes.set_ylim(bottom=0)


def before_after(
    evaluations: Mapping[str, Mapping[str, Any]], path: str | Path, theme: Theme = LIGHT
) -> Path:
    """Draw avg@k with its interval and pass@k, for each domain and each model in `evaluations`
    (name -> what `stats.summarize` gave)."""
    k = next(iter(evaluations.values()))["k"]
    domains = list(dict.fromkeys(d for e in evaluations.values() for d in e["domains"]))
    figure, axes = _canvas("Before and after", "share right", "", theme, wide=True)
    for index, (name, evaluation) in enumerate(evaluations.items()):
        colour = theme.lines[index % len(theme.lines)]
        shift = 0.22 * (index - (len(evaluations) - 1) / 2)
        for row, domain in enumerate(domains):
            if domain in evaluation["domains"]:
                label = name if row == 0 else None
                _estimate(axes, row + shift, evaluation["domains"][domain], colour, theme, label)
    ring = dict(marker="o", linestyle="", markerfacecolor=theme.paper)
    axes.plot([], [], color=theme.ink, label=f"avg@{k}, 95% interval", marker="o")
    axes.plot([], [], color=theme.ink, label=f"pass@{k}", **ring)
    axes.set_yticks(range(len(domains)), domains)
    axes.set_ylim(len(domains) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="x", color=theme.faint, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    _legend(axes, theme)
    return _save(figure, Path(path))


def _estimate(
    axes: Axes, y: float, domain: Mapping[str, Any], colour: str, theme: Theme, label: str | None
) -> None:
    average = domain["avg_at_k"]
    value, low, high = average["value"], average.get("low"), average.get("high")
    if low is not None:
        axes.plot([low, high], [y, y], color=colour, linewidth=3, solid_capstyle="round")
    passed = domain["pass_at_k"]["value"]
    axes.plot([passed], [y], "o", color=colour, markerfacecolor=theme.paper, markersize=7, zorder=4)
    axes.plot([value], [y], "o", color=colour, markersize=8, zorder=5, label=label)


def compare(
    runs: Mapping[str, Sequence[str | Path]],
    metric: str,
    path: str | Path,
    theme: Theme = LIGHT,
    title: str | None = None,
) -> Path:
    """Draw `metric` of several variants: the mean over the seeds' workdirs and their full range.

    Raises ValueError when a variant has not one workdir with the metric.
    """
    figure, axes = _canvas(title or metric, "step", metric, theme, wide=True)
    for index, (variant, workdirs) in enumerate(runs.items()):
        colour = theme.lines[index % len(theme.lines)]
        steps, values = _over_seeds(variant, workdirs, metric)
        style = "-" if index < len(theme.lines) else "--"
        label = f"{variant} ({len(values)})" if len(values) > 1 else variant
        axes.plot(steps, values.mean(axis=0), style, color=colour, label=label, linewidth=2.2)
        if len(values) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    _legend(axes, theme)
    return _save(figure, Path(path))


def _over_seeds(
    variant: str, workdirs: Sequence[str | Path], metric: str
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "seeds n"]]:
    """The steps that every seed reached, and the smoothed metric of each seed there."""
    found = [series(read_rows(Path(workdir) / "metrics.jsonl"), metric) for workdir in workdirs]
    found = [(steps, values) for steps, values in found if len(steps)]
    if not found:
        raise ValueError(
            f"variant {variant}: none of its {len(workdirs)} workdirs logged {metric}."
        )
    common = found[0][0]
    for steps, _ in found[1:]:
        common = np.intersect1d(common, steps)
    window = max(1, len(common) // 15 | 1)
    values = [smooth(values[np.isin(steps, common)], window) for steps, values in found]
    return common, np.stack(values)


def _canvas(title: str, x: str, y: str, theme: Theme, wide: bool = False) -> tuple[Figure, Axes]:
    figure = Figure(figsize=WIDE_INCHES if wide else INCHES, layout="constrained")
    axes = figure.subplots()
    figure.set_facecolor(theme.paper)
    axes.set_facecolor(theme.paper)
    _entitle(axes, title, theme)
    axes.set_xlabel(x, color=theme.ink)
    axes.set_ylabel(y, color=theme.ink)
    axes.tick_params(colors=theme.ink, length=0, labelsize=9.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)
    axes.grid(axis="y", color=theme.faint, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: Axes, theme: Theme) -> None:
    """Put the labels in rows between the title and the plot."""
    handles, labels = axes.get_legend_handles_labels()
    columns = _columns(labels, axes.get_figure().get_size_inches()[0] * 72 - 60)
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.99),
        ncols=columns,
        frameon=False,
        labelcolor=theme.ink,
        fontsize=9.5,
        handlelength=1.3,
        columnspacing=1.2,
        borderpad=0.2,
    )
    _entitle(axes, axes.get_title(loc="left"), theme, math.ceil(len(labels) / columns))


def _columns(labels: Sequence[str], width_pt: float) -> int:
    """The most columns in which the labels of a legend fit."""
    for columns in range(len(labels), 1, -1):
        parts = np.array_split(np.array([len(label) for label in labels]), columns)
        if sum(36 + 5.3 * max(part) for part in parts) < width_pt:  # a handle, letters of 9.5 pt
            return columns
    return 1


def _entitle(axes: Axes, title: str, theme: Theme, legend_rows: int = 0) -> None:
    """Set the title above as many rows of a legend."""
    font = {"fontsize": 12.5, "fontweight": "bold"}
    axes.set_title(title, font, loc="left", color=theme.ink, pad=10 + 15 * legend_rows)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # 96 colours are enough for lines and text, and a third of the size.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(96).save(
        path, optimize=True
    )
    return path
