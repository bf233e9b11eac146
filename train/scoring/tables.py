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
# Behind the score of a model that is better, or worse, than both its controls.
MARKS = {BETTER: " *", WORSE: " !"}
INCHES_A_PANEL, INCHES_HIGH = 3.2, 2.8


def as_text(models: Sequence[ScoredModels], num_equal_pairs: int = 0) -> str:
    """Write tables in Markdown: scores, those of parts, and comparisons; of several checkpoints the scores alone."""
    compared = comparisons(models)
    all_scored = [one for group in models for one in (*group.models, *group.controls)]
    measures = list(all_scored[0].scores)
    marks = {
        (model.name, measure): _mark(model.name, measure, group, compared)
        for group in models
        for model in group.models
        for measure in measures
    }
    rows = [
        [one.name, *(_cell(one.scores.get(measure)) + marks.get((one.name, measure), "") for measure in measures)]
        for one in all_scored
    ]
    tables = [_table(["model", *measures], rows)]
    whole = [group for group in models if len(group.models) == 1]
    columns = [one for group in whole for one in (*group.models, *group.controls)]
    for title in columns[0].parts if columns else ():
        parts = dict.fromkeys(part for one in columns for part in one.parts.get(title, {}))
        rows = [[part, *(_cell(one.parts.get(title, {}).get(part)) for one in columns)] for part in parts]
        tables.append(_table([title, *_short_names(columns)], rows))
    shown = {model.name for group in whole for model in group.models}
    names = list(dict.fromkeys((one.of, one.beside) for one in compared if one.of in shown))
    if names:
        by_names = {(one.of, one.beside, one.measure): one for one in compared}
        rows = [
            [
                f"{of} compared with {beside.removeprefix(f'{of}, ')}",
                *(_verdict(by_names[of, beside, measure]) for measure in measures),
            ]
            for of, beside in names
        ]
        tables.append(_table(["model", *measures], rows))
    return "\n\n".join([*tables, "\n".join(f"- {note}" for note in _notes(models, num_equal_pairs))])


def _short_names(columns: Sequence[Scored]) -> list[str]:
    """Name columns without the folders that all models share, and a single model not at all."""
    names = [one.name for one in columns]
    if len(names) == 1 + NUM_CONTROLS:
        return ["model", *(name.removeprefix(f"{names[0]}, ") for name in names[1:])]
    num_shared = os.path.commonprefix(names).rfind("/") + 1  # noqa: RUF071 (cut at a slash)
    return [name[num_shared:] for name in names]


def _mark(name: str, measure: str, group: ScoredModels, compared: Sequence[Comparison]) -> str:
    controls = [control.name for control in group.controls]
    of_both = {one.verdict for one in compared if (one.of, one.measure) == (name, measure) and one.beside in controls}
    return MARKS.get(of_both.pop(), "") if len(of_both) == 1 else ""


def _notes(models: Sequence[ScoredModels], num_equal_pairs: int) -> list[str]:
    num_networks = next(iter(models[0].random_weights.scores.values())).num_networks
    notes = [
        f"*: better than both {RANDOM_WEIGHTS} and {NO_CONTEXT}; !: worse than both",
        f"±: standard error over words or pairs; of {RANDOM_WEIGHTS}, standard deviation of {num_networks} networks",
    ]
    if num_equal_pairs:
        notes.append(f"pairs of two equal sentences: {num_equal_pairs:,}, each counted as half right")
    for group in models:
        if group.unread.bytes or group.unread.tokens:
            notes.append(
                f"{', '.join(model.name for model in group.models)}: {100 * group.unread.tokens:.1f}% of the text's "
                f"tokens are <unk>; {100 * group.unread.bytes:.1f}% of its bytes cannot be read, which cost 8 bits "
                "each, and no word with one counts as right"
            )
    return notes


def _cell(score: Score | None) -> str:
    if score is None:
        return ""
    error = f" ± {score.standard_error:.3f}" if math.isfinite(score.standard_error) else ""
    return f"{score.value:.3f}{error}"


def _verdict(compared: Comparison) -> str:
    error = f" ± {compared.standard_error:.4f}" if math.isfinite(compared.standard_error) else ""
    if compared.verdict == NO_DIFFERENCE:
        return f"{NO_DIFFERENCE} ({compared.value:+.4f}{error})"
    return f"{compared.verdict} by {abs(compared.value):.4f}{error}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def as_json(models: Sequence[ScoredModels], num_equal_pairs: int = 0) -> dict[str, Any]:
    """Collect scores, errors and comparisons for a file, and by which weights a model is known.

    The standard error of a mean of one item is not known: null.
    """

    def finite(number: float) -> float | None:
        return number if math.isfinite(number) else None

    def record(score: Score) -> dict[str, float | None]:
        record = {"value": score.value, "standard_error": finite(score.standard_error), "items": score.num_items}
        return record | ({"networks": score.num_networks} if score.num_networks else {})

    return {
        "models": [
            {"name": one.name, "weights_sha256": group.weights_sha256[one.name]}
            | {"controls": [control.name for control in group.controls]}
            | {"unknown_tokens": group.unread.tokens, "unread_bytes": group.unread.bytes}
            for group in models
            for one in group.models
        ],
        "equal_pairs": num_equal_pairs,
        "scores": {
            one.name: {measure: record(score) for measure, score in one.scores.items()}
            | {title: {part: record(score) for part, score in parts.items()} for title, parts in one.parts.items()}
            for group in models
            for one in (*group.models, *group.controls)
        },
        "differences": [
            {"measure": one.measure, "of": one.of, "from": one.beside, "value": one.value}
            | {"standard_error": finite(one.standard_error), "degrees_of_freedom": one.degrees_of_freedom}
            | {"verdict": one.verdict, "differs": one.verdict != NO_DIFFERENCE}
            for one in comparisons(models)
        ],
    }


def draw_curve(scored: ScoredModels, file_format: str) -> bytes:
    """Draw each score of the checkpoints, with its 95% interval, over the step; controls as dotted lines."""
    steps = [int(re.sub(r"\D", "", model.name.rpartition(", step ")[2])) for model in scored.models]
    measures = list(scored.models[0].scores)
    with new_figure(figsize=(INCHES_A_PANEL * len(measures), INCHES_HIGH)) as figure:
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
