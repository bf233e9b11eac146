"""Scores as tables on the terminal, as JSON, and as a plot of a learning curve."""

import math
import os.path
import re
from collections.abc import Sequence
from typing import Any

from mlm_common.figures import COLORS, FAINT_ALPHA, MUTED, EndLabel, image_of, label_ends, new_figure, without_box
from train.scoring.scores import (
    BETTER,
    LOWER_IS_BETTER,
    NO_CONTEXT,
    NO_DIFFERENCE,
    NORMAL_95,
    RANDOM_WEIGHTS,
    WORSE,
    Comparison,
    Score,
    Scored,
    ScoredModels,
    comparisons,
)

NUM_CONTROLS = 2
# Printed after the score of a model that is better than both controls, or worse than both controls.
MARKS = {BETTER: " *", WORSE: " !"}
PANEL_WIDTH_INCHES, HEIGHT_INCHES = 3.2, 2.8


def as_text(models: Sequence[ScoredModels], num_equal_pairs: int = 0) -> str:
    """Return Markdown tables of all scores and, except for a run's checkpoints, of scores by part and comparisons."""
    results = comparisons(models)
    all_scored = [scored for group in models for scored in (*group.models, *group.controls)]
    measures = list(all_scored[0].scores)
    marks = {
        (model.name, measure): _mark(model.name, measure, group, results)
        for group in models
        for model in group.models
        for measure in measures
    }
    rows = [
        [
            scored.name,
            *(_cell(scored.scores.get(measure)) + marks.get((scored.name, measure), "") for measure in measures),
        ]
        for scored in all_scored
    ]
    tables = [_table(["model", *measures], rows)]
    single_models = [group for group in models if len(group.models) == 1]
    columns = [scored for group in single_models for scored in (*group.models, *group.controls)]
    for title in columns[0].parts if columns else ():
        parts = dict.fromkeys(part for scored in columns for part in scored.parts.get(title, {}))
        rows = [[part, *(_cell(scored.parts.get(title, {}).get(part)) for scored in columns)] for part in parts]
        tables.append(_table([title, *_short_names(columns)], rows))
    single_names = {model.name for group in single_models for model in group.models}
    by_names = {
        (result.model, result.baseline, result.measure): result for result in results if result.model in single_names
    }
    pairs = list(dict.fromkeys((model, baseline) for model, baseline, _ in by_names))
    if pairs:
        rows = [
            [
                f"{model} compared with {baseline.removeprefix(f'{model}, ')}",
                *(_verdict(by_names[model, baseline, measure]) for measure in measures),
            ]
            for model, baseline in pairs
        ]
        tables.append(_table(["model", *measures], rows))
    return "\n\n".join([*tables, "\n".join(f"- {note}" for note in _notes(models, num_equal_pairs))])


def _short_names(columns: Sequence[Scored]) -> list[str]:
    """Return the names of columns without the folders that all models share; a single model is named "model"."""
    names = [scored.name for scored in columns]
    if len(names) == 1 + NUM_CONTROLS:
        return ["model", *(name.removeprefix(f"{names[0]}, ") for name in names[1:])]
    num_shared = os.path.commonprefix(names).rfind("/") + 1  # noqa: RUF071 (cut at a slash)
    return [name[num_shared:] for name in names]


def _mark(name: str, measure: str, group: ScoredModels, results: Sequence[Comparison]) -> str:
    """Return the mark of a model's score, if its comparisons with both controls have the same verdict."""
    controls = [control.name for control in group.controls]
    verdicts = {
        result.verdict
        for result in results
        if (result.model, result.measure) == (name, measure) and result.baseline in controls
    }
    return MARKS.get(verdicts.pop(), "") if len(verdicts) == 1 else ""


def _notes(models: Sequence[ScoredModels], num_equal_pairs: int) -> list[str]:
    num_networks = next(iter(models[0].random_weights.scores.values())).num_networks
    notes = [
        f"*: better than both {RANDOM_WEIGHTS} and {NO_CONTEXT}; !: worse than both",
        f"±: standard error over words or pairs; for {RANDOM_WEIGHTS}, standard deviation of {num_networks} networks",
    ]
    if num_equal_pairs:
        notes.append(f"pairs of two equal sentences: {num_equal_pairs:,}, each counted as half right")
    for group in models:
        if group.unread.bytes or group.unread.tokens:
            notes.append(
                f"{', '.join(model.name for model in group.models)}: {100 * group.unread.tokens:.1f}% of the text's "
                f"tokens are <unk>; {100 * group.unread.bytes:.1f}% of its bytes cannot be read: each of these costs 8 "
                "bits, and no word that contains one counts as right"
            )
    return notes


def _cell(score: Score | None) -> str:
    if score is None:
        return ""
    error = f" ± {score.standard_error:.3f}" if math.isfinite(score.standard_error) else ""
    return f"{score.value:.3f}{error}"


def _verdict(result: Comparison) -> str:
    error = f" ± {result.standard_error:.4f}" if math.isfinite(result.standard_error) else ""
    if result.verdict == NO_DIFFERENCE:
        return f"{NO_DIFFERENCE} ({result.value:+.4f}{error})"
    return f"{result.verdict} by {abs(result.value):.4f}{error}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def as_json(models: Sequence[ScoredModels], num_equal_pairs: int = 0) -> dict[str, Any]:
    """Return scores, errors and comparisons for a JSON file, with hashes of the models' weights.

    The standard error of a mean of one item is unknown, and is null in the file.
    """

    def finite(number: float) -> float | None:
        return number if math.isfinite(number) else None

    def record(score: Score) -> dict[str, float | None]:
        record = {"value": score.value, "standard_error": finite(score.standard_error), "items": score.num_items}
        return record | ({"networks": score.num_networks} if score.num_networks else {})

    return {
        "models": [
            {"name": model.name, "weights_sha256": group.weights_sha256[model.name]}
            | {"controls": [control.name for control in group.controls]}
            | {"unknown_tokens": group.unread.tokens, "unread_bytes": group.unread.bytes}
            for group in models
            for model in group.models
        ],
        "equal_pairs": num_equal_pairs,
        "scores": {
            scored.name: {measure: record(score) for measure, score in scored.scores.items()}
            | {title: {part: record(score) for part, score in parts.items()} for title, parts in scored.parts.items()}
            for group in models
            for scored in (*group.models, *group.controls)
        },
        "differences": [
            {"measure": result.measure, "of": result.model, "from": result.baseline, "value": result.value}
            | {"standard_error": finite(result.standard_error), "degrees_of_freedom": result.degrees_of_freedom}
            | {"verdict": result.verdict, "differs": result.verdict != NO_DIFFERENCE}
            for result in comparisons(models)
        ],
    }


def draw_curve(scored: ScoredModels, file_format: str) -> bytes:
    """Draw each score of the checkpoints over the step, with its 95% interval; dotted lines show the controls."""
    steps = [int(re.sub(r"\D", "", model.name.rpartition(", step ")[2])) for model in scored.models]
    measures = list(scored.models[0].scores)
    with new_figure(figsize=(PANEL_WIDTH_INCHES * len(measures), HEIGHT_INCHES)) as figure:
        for axes, measure in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True):
            scores = [model.scores[measure] for model in scored.models]
            values = [score.value for score in scores]
            axes.plot(steps, values, marker="o", markersize=3, color=COLORS[0], clip_on=False)
            errors = [score.standard_error if math.isfinite(score.standard_error) else 0.0 for score in scores]
            axes.fill_between(
                steps,
                [value - NORMAL_95 * error for value, error in zip(values, errors, strict=True)],
                [value + NORMAL_95 * error for value, error in zip(values, errors, strict=True)],
                color=COLORS[0],
                alpha=FAINT_ALPHA,
                linewidth=0,
            )
            without_box(axes)
            direction = "lower" if measure in LOWER_IS_BETTER else "higher"
            axes.set_title(f"{measure} ({direction} is better)", loc="left", size="small", color=MUTED)
            axes.set_xlabel("step")
            labels = []
            for control in scored.controls:
                value = control.scores[measure].value
                axes.axhline(value, linestyle=":", color=MUTED)
                labels.append(EndLabel(steps[-1], value, control.name.rpartition(", ")[2], MUTED))
            label_ends(axes, labels, in_column=True)
        return image_of(figure, file_format)
