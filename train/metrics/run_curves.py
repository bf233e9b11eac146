"""The recorded loss, time and tokens of runs, and plots of them."""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlm_common.cli.console import about, short_number
from mlm_common.errors import InputError
from mlm_common.figures import (
    COLORS,
    FAINT_ALPHA,
    MUTED,
    NOTE_POINTS,
    EndLabel,
    image_of,
    label_ends,
    new_figure,
    set_titles,
    without_box,
)
from mlm_common.storage import check_folder
from train.config.learning import EVALUATION_MLM_PROBABILITY
from train.metrics.log import TRAIN, VALIDATION, read_metrics
from train.runtime.plan import Plan
from train.runtime.run_folder import METRICS_NAME, RunFolder
from train.tasks.task import SOURCE_LOSS, TaskCard, shown_loss, source_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_NAME = 30
# Names of architectures as their papers write them, by `model_type`.
TITLES = {
    "albert": "ALBERT", "bert": "BERT", "camembert": "CamemBERT", "convbert": "ConvBERT", "deberta-v2": "DeBERTa-v2",
    "distilbert": "DistilBERT", "electra": "ELECTRA", "mobilebert": "MobileBERT", "modernbert": "ModernBERT",
    "mpnet": "MPNet", "rembert": "RemBERT", "roberta": "RoBERTa", "roberta-prelayernorm": "RoBERTa-PreLayerNorm",
    "roformer": "RoFormer", "xlm-roberta": "XLM-RoBERTa",
}  # fmt: skip


class Metric(NamedTuple):
    """The score that, in addition to the loss, shows how good a model is.

    Attributes:
        name: name of the score in `metrics.jsonl`.
        title: human-readable name of the score.
        guess: the score of guessing without reading the text; None if unknown.
        lower_is_better: whether a lower score is better.
    """

    name: str
    title: str
    guess: float | None = None
    lower_is_better: bool = False


# The metric of tasks whose cards list losses only.
ACCURACY = Metric("masked_accuracy", "accuracy")
# The task of runs of version 0.3, which had only this task and did not record it.
MASKED_LM_CARD = TaskCard(
    model_kind="masked language model",
    task_name="Masked language modeling",
    pipeline_tag="fill-mask",
    figures=(),
    loss_unit="nats per masked token",
    predicts_tokens=True,
)


@dataclass(frozen=True)
class RunCurves:
    """The data that a run has recorded so far.

    Attributes:
        name: a short name that distinguishes the run from the other runs.
        record: the run's `run.json`.
        lines: the lines of its `metrics.jsonl`, by step.
    """

    name: str
    record: dict[str, Any]
    lines: Sequence[dict[str, Any]]

    @property
    def unigram_entropy_nats(self) -> float | None:
        """The lowest loss, in nats, that guessing from token frequencies alone can reach on the validation rows.

        None if the run's loss cannot be compared with it.
        """
        eval_data = self.record["eval_data"] or {}
        return eval_data.get("unigram_entropy_nats") if self.card.predicts_tokens else None

    def source_entropy_nats(self, source: str) -> float | None:
        """`unigram_entropy_nats` of one source; None if the loss includes more than the masked-token loss."""
        source_data = ((self.record["eval_data"] or {}).get("sources") or {}).get(source) or {}
        is_token_loss = self.card.predicts_tokens and not any("mlm_loss" in line for line in self.lines)
        return source_data.get("unigram_entropy_nats") if is_token_loss else None

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(name for line in self.of_split(VALIDATION) for name in source_losses(line)))

    @property
    def tokens_per_second(self) -> float | None:
        """The median speed over the training lines; None before the first line."""
        rates = [line["tokens_per_second"] for line in self.of_split(TRAIN) if "tokens_per_second" in line]
        return statistics.median(rates) if rates else None

    @property
    def is_finetuned(self) -> bool:
        return self.card.training_verb != "pretrained"

    @functools.cached_property
    def card(self) -> TaskCard:
        return TaskCard.from_record(self.record["task"]["card"]) if "task" in self.record else MASKED_LM_CARD

    @property
    def metric(self) -> Metric:
        """The metric that decides which checkpoint is best; if this is the loss, the task's first other metric."""
        # Perplexity is left out, because it is a function of the loss.
        figures = (figure for figure in self.card.figures if figure.name not in ("loss", "perplexity"))
        titles = {figure.name: figure.title for figure in figures}
        task = self.record.get("task", {})
        name = task.get("metric", "loss")
        if name != "loss":
            title = titles.get(name, name.replace("_", " "))
            return Metric(name, title, task.get("guess"), bool(task.get("lower_is_better")))
        return next((Metric(name, title) for name, title in titles.items()), ACCURACY)

    @property
    def model(self) -> str:
        """The model in a few words: its preset, architecture and number of parameters."""
        model_type = self.record.get("model_config", {}).get("model_type", "")
        num_parameters = self.record.get("num_parameters")
        size = f"{short_number(num_parameters)} parameters" if num_parameters else ""
        description = ", ".join(filter(None, (TITLES.get(model_type, model_type), size))) or self.name
        settings = self.record.get("settings", {}).get("model", {})
        is_preset = settings.get("preset") and not (settings["init_from"] or settings["pretrained_model_config"])
        return f"{settings['preset']} ({description})" if is_preset else description

    @property
    def mask_rates(self) -> list[float]:
        """The fractions of tokens that training masks, in the order of the phases; empty for tasks without masks."""
        settings = [phase.get("settings", {}) for phase in self.record.get("phases") or [self.record]]
        masking = (phase_settings["masking"] for phase_settings in settings if "masking" in phase_settings)
        return list(dict.fromkeys(phase_masking["mlm_probability"] for phase_masking in masking))

    @property
    def mask_note(self) -> str:
        """A note that training and validation are not equally hard; empty if both mask the same fraction of tokens."""
        rates = self.mask_rates
        if not rates or rates == [EVALUATION_MLM_PROBABILITY]:
            return ""
        training = ", then ".join(map(percentage, rates))
        ease = " Validation is easier: more of the text is visible." if min(rates) > EVALUATION_MLM_PROBABILITY else ""
        return f"Validation masks {percentage(EVALUATION_MLM_PROBABILITY)} of the tokens, training {training}.{ease}"

    @functools.cached_property
    def plan(self) -> Plan:
        return Plan.from_record(self.record["plan"])

    @property
    def num_steps(self) -> int:
        last = (self.record.get("phases") or [self.record])[-1]
        return Plan.from_record(last["plan"]).num_steps

    def phase_name(self, number: int) -> str:
        phases = self.record.get("phases") or []
        return str(phases[number - 1]["name"]) if number <= len(phases) else f"phase {number}"

    def tokens_after(self, step: int) -> int:
        return self.plan.tokens_after(step)

    def of_split(self, split: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["split"] == split]

    def training_seconds(self, step: int) -> float:
        """Return the measured time of the steps up to `step`, without evaluations."""
        return float(np.interp(step, *self._clock))

    @functools.cached_property
    def _clock(self) -> tuple[list[int], list[float]]:
        """The steps of the training lines, and the seconds of training up to each of them."""
        lines = self.of_split(TRAIN)
        steps = [0, *(line["step"] for line in lines)]
        seconds = [
            (step - previous_step) * line.get("step_seconds", 0.0)
            for line, (previous_step, step) in zip(lines, pairwise(steps), strict=True)
        ]
        return steps, [0.0, *accumulate(seconds)]


def read_runs(folders: Sequence[str]) -> list[RunCurves]:
    """Read the runs in these folders; name each by the part of its path that differs from the other paths."""
    runs = [RunFolder(folder) for folder in folders]
    for folder in runs:
        if not folder.files.exists(METRICS_NAME):
            check_folder(folder.path, "--runs")
            raise InputError(
                f"--runs: {folder} has no {METRICS_NAME} yet. Name the --output-dir of a run of run_mlm.py or of "
                "fine-tuning."
            )
    curves = []
    for name, folder in zip(_short_names(folders), runs, strict=True):
        lines = read_metrics(folder)
        if not lines:
            raise InputError(f"--runs: {folder.files.path_of(METRICS_NAME)} has no complete line yet. Try again later.")
        curve = RunCurves(name, folder.read_record(), lines)
        with folder.guarded_record():
            Plan.from_record(curve.record["plan"])  # fails here, with the name of the file, if the record is damaged
        curves.append(curve)
    return curves


def short_name(name: str, max_length: int = MAX_NAME) -> str:
    end = (max_length - 1) // 2
    return name if len(name) <= max_length else f"{name[: max_length - 1 - end]}…{name[-end:]}"


def percentage(fraction: float) -> str:
    return f"{100 * fraction:.3g}%"


def _short_names(folders: Sequence[str]) -> list[str]:
    paths = [folder.rstrip("/").split("/") for folder in folders]
    num_shared = 0
    while all(len(path) > num_shared + 1 and path[num_shared] == paths[0][num_shared] for path in paths):
        num_shared += 1
    return ["/".join(path[num_shared:]) for path in paths]


RUN_INCHES, SCORED_RUN_INCHES, RUNS_INCHES = (8, 4.5), (10, 4.5), (12, 5)
# Up to this number of runs, labels are within the plot; for more runs they are next to it.
MAX_LABELS_WITHIN = 3
# The losses of sources are drawn only up to this number of sources.
MAX_SOURCES = 4
# Lines with up to this number of points have markers.
MAX_MARKERS = 40
BASELINE = "frequency baseline"
# Units of time: seconds, and name.
TIME_UNITS = ((3600, "hours"), (60, "minutes"))
Points = list[tuple[float, float]]


def draw_run(run: RunCurves, file_format: str = "png") -> bytes:
    """Draw training and validation loss over the steps and, for a fine-tuned model, the metric in a second panel.

    Dotted lines show the loss of a guess from token frequencies alone, and the metric of a guess without the text.
    """
    is_scored = run.is_finetuned and bool(_points(run, VALIDATION, run.metric.name))
    with new_figure(figsize=SCORED_RUN_INCHES if is_scored else RUN_INCHES) as figure:
        panels = figure.subplots(1, 2 if is_scored else 1, squeeze=False)[0]
        labels = [_draw_losses(run, panels[0]), *([_draw_metric(run, panels[1])] if is_scored else [])]
        for axes in panels:
            without_box(axes)
            axes.set_xlim(0, max(1, _last_step(run)))
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlabel("step")
        if not is_scored:
            _put_tokens_on_top(run, panels[0])
        set_titles(figure, _title(run), _subtitle(run), run.mask_note if run.of_split(VALIDATION) else "")
        for axes, panel_labels in zip(panels, labels, strict=True):
            label_ends(axes, panel_labels)
        return image_of(figure, file_format)


def draw_runs(runs: Sequence[RunCurves], note: str = "", file_format: str = "png") -> bytes:
    """Draw the losses of several runs over tokens and over time, one color per run. Draw a single run with `draw_run`.

    The bold line, with the run's name at its end, is the validation loss; the faint line is the training loss. The
    dotted line of the same color is the loss of a guess from token frequencies alone. `note` is printed under the plot.
    """
    if len(runs) == 1:
        return draw_run(runs[0], file_format)
    with new_figure(figsize=RUNS_INCHES) as figure:
        over_tokens, over_time = figure.subplots(1, 2, sharey=True)
        longest_seconds = max(run.training_seconds(_last_step(run)) for run in runs)
        size, unit = next((unit for unit in TIME_UNITS if longest_seconds >= 2 * unit[0]), (1, "seconds"))
        panels: tuple[tuple[Axes, str, Callable[[RunCurves, int], float]], ...] = (
            (over_tokens, "tokens, padding included", RunCurves.tokens_after),
            (over_time, f"{unit} of training", lambda run, step: run.training_seconds(step) / size),
        )
        labels = []
        for axes, x_label, x_of_step in panels:
            without_box(axes)
            axes.set_xlabel(x_label)
            colors = itertools.cycle(COLORS)
            panel_labels = [_draw_one_of_several(run, axes, next(colors), x_of_step) for run in runs]
            axes.set_xlim(left=0)
            labels.append([*filter(None, panel_labels), *_draw_baselines(runs, axes)])
        units = dict.fromkeys(run.card.loss_unit for run in runs)
        over_tokens.set_ylabel(f"loss, {' or '.join(units)}")
        over_tokens.xaxis.set_major_formatter(lambda value, _: short_number(value))
        set_titles(figure, f"Loss of {len(runs)} runs", f"Bold: validation. Faint: training. Dotted: {BASELINE}.", note)
        are_many = len(runs) > MAX_LABELS_WITHIN
        if not are_many:
            label_ends(over_tokens, labels[0])
        label_ends(over_time, labels[1], in_column=are_many)
        return image_of(figure, file_format)


def _draw_losses(run: RunCurves, axes: "Axes") -> list[EndLabel]:
    labels = []
    for split, title, color in ((TRAIN, "training", MUTED), (VALIDATION, "validation", COLORS[0])):
        if points := _points(run, split, "loss"):
            _draw_line(axes, points, color, is_main=split == VALIDATION)
            labels.append(EndLabel(*points[-1], f"{title} {shown_loss(points[-1][1])}", color))
    if len(run.sources) <= MAX_SOURCES:
        for name, color in zip(run.sources, COLORS[2:], strict=False):
            points = _points(run, VALIDATION, f"{SOURCE_LOSS}{name}")
            _draw_line(axes, points, color, is_main=False)
            label = f"{name} {shown_loss(points[-1][1])}"
            if entropy := run.source_entropy_nats(name):
                axes.axhline(entropy, linestyle=":", color=color, alpha=FAINT_ALPHA)
                label += f", baseline {entropy:.2f}"
            labels.append(EndLabel(*points[-1], label, color))
    if entropy := run.unigram_entropy_nats:
        axes.axhline(entropy, linestyle=":", color=COLORS[1])
        labels.append(EndLabel(max(1, _last_step(run)), entropy, f"{BASELINE} {entropy:.2f}", COLORS[1]))
    for previous_line, line in itertools.pairwise(run.of_split(TRAIN)):
        if previous_line.get("phase") != line.get("phase"):
            axes.axvline(previous_line["step"], linewidth=0.8, color=MUTED, alpha=FAINT_ALPHA)
            name, position = run.phase_name(line.get("phase", 1)), (previous_line["step"], 1)
            style: dict[str, Any] = {"va": "top", "color": MUTED, "size": NOTE_POINTS}
            axes.annotate(
                name, position, (4, 0), xycoords=("data", "axes fraction"), textcoords="offset points", **style
            )
    axes.set_ylabel(f"loss, {run.card.loss_unit}")
    return labels


def _draw_metric(run: RunCurves, axes: "Axes") -> list[EndLabel]:
    metric, color = run.metric, COLORS[2]
    points = _points(run, VALIDATION, metric.name)
    _draw_line(axes, points, color, is_main=True)
    best = _best(run, metric)
    labels = [EndLabel(*points[-1], f"{metric.title} {_shown_score(points[-1][1])}", color)]
    if best != points[-1]:
        axes.plot(*best, marker="o", color=color, markersize=8)
        text = f"best {_shown_score(best[1])}"
        axes.annotate(text, best, (0, 9), textcoords="offset points", ha="center", color=color, weight="bold")
    axes.margins(y=0.12)
    if metric.guess is not None:
        axes.axhline(metric.guess, linestyle=":", color=COLORS[1])
        text = f"guess {_shown_score(metric.guess)}"
        labels.append(EndLabel(max(1, _last_step(run)), metric.guess, text, COLORS[1]))
    axes.set_ylabel(f"validation {metric.title}")
    return labels


def _draw_one_of_several(
    run: RunCurves, axes: "Axes", color: str, x_of_step: Callable[[RunCurves, int], float]
) -> EndLabel | None:
    """Draw one run. Return the label of its validation curve, or else of its training curve; None without a curve."""
    label = None
    for split in (TRAIN, VALIDATION):
        if points := [(x_of_step(run, int(step)), loss) for step, loss in _points(run, split, "loss")]:
            _draw_line(axes, points, color, is_main=split == VALIDATION)
            label = EndLabel(*points[-1], f"{short_name(run.name)} {shown_loss(points[-1][1])}", color)
    return label


def _draw_baselines(runs: Sequence[RunCurves], axes: "Axes") -> list[EndLabel]:
    """Draw each run's frequency baseline in the run's color. If all baselines are equal, draw one with a label."""
    entropies = [run.unigram_entropy_nats for run in runs]
    if len({*entropies}) == 1 and (entropy := entropies[0]) is not None:
        axes.axhline(entropy, linestyle=":", color=MUTED)
        return [EndLabel(axes.get_xlim()[1], entropy, f"{BASELINE} {entropy:.2f}", MUTED)]
    for entropy, color in zip(entropies, itertools.cycle(COLORS), strict=False):
        if entropy is not None:
            axes.axhline(entropy, linestyle=":", color=color)
    return []


def _draw_line(axes: "Axes", points: Points, color: str, *, is_main: bool) -> None:
    marker = "o" if len(points) == 1 or (is_main and len(points) <= MAX_MARKERS) else ""
    style: dict[str, Any] = {"linewidth": 2, "markersize": 4.5} if is_main else {"linewidth": 1.2, "alpha": 0.45}
    axes.plot(
        *zip(*points, strict=True), marker=marker, color=color, clip_on=False, zorder=3 if is_main else 2, **style
    )


def _put_tokens_on_top(run: RunCurves, axes: "Axes") -> None:
    """Add a second axis with the number of tokens, which is not proportional to the step in a run with phases."""
    from matplotlib.ticker import MaxNLocator

    ends = [phase.num_steps for phase in run.plan.before]
    steps = [0, *(end for end in ends if end < _last_step(run)), max(1, _last_step(run))]
    tokens = [run.tokens_after(step) for step in steps]
    ticks = [tick for tick in MaxNLocator(6).tick_values(0, tokens[-1]) if tick <= tokens[-1]]
    top = axes.twiny()
    without_box(top)
    top.spines["bottom"].set_visible(False)
    top.tick_params(length=0)
    top.set_xlim(axes.get_xlim())
    top.set_xticks(np.interp(ticks, tokens, steps), [short_number(tick) for tick in ticks])
    top.set_xlabel("tokens, padding included", color=MUTED)


def _title(run: RunCurves) -> str:
    if run.is_finetuned and _points(run, VALIDATION, run.metric.name):
        best = _best(run, run.metric)
        is_last = best == _points(run, VALIDATION, run.metric.name)[-1]
        score = f"{'' if is_last else 'best '}{run.metric.title} {_shown_score(best[1])}"
        return f"{run.card.task_name}, {run.model}: {score}"
    for split, title in ((VALIDATION, "validation loss"), (TRAIN, "training loss")):
        if points := _points(run, split, "loss"):
            return f"{run.model}: {title} {shown_loss(points[-1][1])}"
    return run.model


def _subtitle(run: RunCurves) -> str:
    step, num_steps = _last_step(run), run.num_steps
    steps = f"{step:,} steps" if num_steps in (None, step) else f"{step:,} of {num_steps:,} steps"
    seconds = run.training_seconds(step)
    time = [f"{about(seconds)} of training"] if seconds else []
    return ", ".join([steps, f"{short_number(run.tokens_after(step))} tokens", *time])


def _points(run: RunCurves, split: str, name: str) -> Points:
    """Return (step, value) for the lines of a split in which the metric `name` is a finite number."""
    values = [(line["step"], line.get(name)) for line in run.of_split(split)]
    return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def _best(run: RunCurves, metric: Metric) -> tuple[float, float]:
    """Return (step, score) of the best evaluation; of equal scores, the lowest loss wins, then the earliest."""
    sign = -1 if metric.lower_is_better else 1
    losses = dict(_points(run, VALIDATION, "loss"))
    return max(
        _points(run, VALIDATION, metric.name), key=lambda point: (sign * point[1], -losses.get(point[0], math.inf))
    )


def _last_step(run: RunCurves) -> int:
    return int(run.lines[-1]["step"]) if run.lines else 0


def _shown_score(score: float) -> str:
    return f"{score:.3f}" if abs(score) <= 1 else f"{score:.1f}"
