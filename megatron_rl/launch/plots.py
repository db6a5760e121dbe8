"""PNG plots of metrics.jsonl, in plots/: one per question, and overview.png with all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.launch import metrics_file
from megatron_rl.launch.metrics_file import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASES = (
    ("time/wait_batch", "wait for batch"),
    ("time/forward_backward", "forward and backward"),
    ("time/optimizer", "optimizer"),
    ("time/weight_update", "weight update"),
    ("time/checkpoint", "checkpoint"),
)
BLUE, ORANGE, GREY = "#1f77b4", "#d95f02", "#888888"
Panel = Callable[["Axes", list[Line], list[Line]], bool]


def draw(run_dir: Path) -> list[Path]:
    """Draw what there is data for; returns the files."""
    steps, evals = metrics_file.read(run_dir / "metrics.jsonl")
    if not steps and not evals:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out = run_dir / "plots"
    out.mkdir(exist_ok=True)
    files, drawn = [], []
    for name, panel in PANELS.items():
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        if panel(axes, steps, evals):
            drawn.append(panel)
            figure.savefig(out / f"{name}.png", dpi=120)
            files.append(out / f"{name}.png")
        pyplot.close(figure)
    if drawn:
        rows = -(-len(drawn) // 3)
        figure, grid = pyplot.subplots(
            rows, min(3, len(drawn)), figsize=(5 * min(3, len(drawn)), 3.2 * rows), layout="constrained", squeeze=False
        )
        for axes, panel in zip(grid.flat, drawn, strict=False):
            panel(axes, steps, evals)
        for axes in list(grid.flat)[len(drawn) :]:
            axes.set_axis_off()
        figure.suptitle(run_dir.name)
        figure.savefig(out / "overview.png", dpi=110)
        files.append(out / "overview.png")
        pyplot.close(figure)
    return files


def _series(lines: list[Line], key: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[key]) for line in lines if key in line]
    return [step for step, _ in found], [value for _, value in found]


def _label(axes: "Axes", title: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def reward(axes: "Axes", steps: list[Line], evals: list[Line]) -> bool:
    """Training reward: mean, and one standard deviation around it."""
    x, mean = _series(steps, "reward/mean")
    axes.plot(x, mean, color=BLUE, label="mean")
    spread_x, spread = _series([line for line in steps if "reward/mean" in line], "reward/std")
    if spread_x == x:
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=BLUE, alpha=0.15, label="± 1 std")
        axes.legend(frameon=False, fontsize=8)
    _label(axes, "training reward", "reward")
    return bool(x)


def accuracy(axes: "Axes", steps: list[Line], evals: list[Line]) -> bool:
    """Exact match and pass@k of each source."""
    keys = list(
        dict.fromkeys(key for line in evals for key in line if key.startswith("eval/") and ("/exact_match" in key or "/pass@" in key))
    )
    for key in keys:
        x, y = _series(evals, key)
        axes.plot(x, y, marker="o", markersize=4, label=key.removeprefix("eval/").replace("/", " "))
    if keys:
        axes.legend(frameon=False, fontsize=8)
        axes.set_ylim(-0.02, 1.02)
    _label(axes, "held-out accuracy", "fraction of tasks")
    return bool(keys)


def mismatch(axes: "Axes", steps: list[Line], evals: list[Line]) -> bool:
    """KL between the sampler's and the trainer's distribution, log scale."""
    x, y = _series(steps, "mismatch_kl/mean")
    axes.plot(x, y, color=ORANGE)
    if any(value > 0 for value in y):
        axes.set_yscale("log")
    _label(axes, "mismatch of engine and trainer", "KL per token (nats)")
    return bool(x)


def staleness(axes: "Axes", steps: list[Line], evals: list[Line]) -> bool:
    """How many steps behind the sampling weights were."""
    x, mean = _series(steps, "staleness/mean")
    axes.plot(x, mean, color=BLUE, label="mean")
    top_x, top = _series(steps, "staleness/max")
    axes.plot(top_x, top, color=GREY, linestyle="--", label="max")
    axes.set_ylim(0, max([*mean, *top, 0.0]) + 0.5)
    axes.legend(frameon=False, fontsize=8)
    _label(axes, "staleness of samples", "optimizer steps")
    return bool(x)


def loss(axes: "Axes", steps: list[Line], evals: list[Line]) -> bool:
    """Loss, and the gradient norm on an axis of its own."""
    x, y = _series(steps, "loss/total")
    axes.plot(x, y, color=BLUE)
    _label(axes, "loss and gradient norm", "loss")
    norm_x, norm = _series(steps, "grad_norm")
    if norm_x:
        right = axes.twinx()
        right.plot(norm_x, norm, color=ORANGE, alpha=0.7)
        right.set_ylabel("gradient norm", color=ORANGE)
        right.spines["top"].set_visible(False)
    return bool(x)


def step_time(axes: "Axes", steps: list[Line], evals: list[Line]) -> bool:
    """Seconds of each phase of a step, stacked."""
    x = [line["step"] for line in steps if "time/step" in line]
    lines = [line for line in steps if "time/step" in line]
    shown = [(key, label) for key, label in PHASES if any(key in line for line in lines)]
    if not x or not shown:
        return False
    axes.stackplot(x, [[line.get(key, 0.0) for line in lines] for key, _ in shown], labels=[label for _, label in shown], alpha=0.85)
    whole = [line["time/step"] for line in lines]
    axes.plot(x, whole, color="black", linewidth=0.8, label="whole step")
    axes.set_ylim(0, max(whole) * 1.35)  # room for the legend
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
    _label(axes, "time per step", "seconds")
    return True


PANELS: dict[str, Panel] = {
    "reward": reward,
    "accuracy": accuracy,
    "loss": loss,
    "mismatch_kl": mismatch,
    "staleness": staleness,
    "step_time": step_time,
}
