"""The scores of a run's checkpoints over its steps, as a plot."""

import re

from mlm_common.figures import COLORS, FAINT_ALPHA, MUTED, EndLabel, image_of, label_ends, new_figure, without_box
from train.scoring.scores import NORMAL_95, ScoredModels

INCHES_A_PANEL, INCHES_HIGH = 3.2, 2.8


def draw_curve(scored: ScoredModels, file_format: str) -> bytes:
    """Draw each score of the checkpoints, with its 95 % interval, over the step; controls as dotted lines."""
    steps = [int(re.sub(r"\D", "", model.name.rpartition(", step ")[2])) for model in scored.models]
    measures = list(scored.models[0].scores)
    with new_figure(figsize=(INCHES_A_PANEL * len(measures), INCHES_HIGH)) as figure:
        for axes, measure in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True):
            scores = [model.scores[measure] for model in scored.models]
            values = [score.value for score in scores]
            axes.plot(steps, values, marker="o", markersize=3, color=COLORS[0], clip_on=False)
            axes.fill_between(
                steps,
                [score.value - NORMAL_95 * score.standard_error for score in scores],
                [score.value + NORMAL_95 * score.standard_error for score in scores],
                color=COLORS[0],
                alpha=FAINT_ALPHA,
                linewidth=0,
            )
            without_box(axes)
            axes.set_title(measure, loc="left", size="medium", color=MUTED)
            axes.set_xlabel("step")
            labels = []
            for control in scored.controls:
                value = control.scores[measure].value
                axes.axhline(value, linestyle=":", color=MUTED)
                labels.append(EndLabel(steps[-1], value, control.name.rpartition(", ")[2], MUTED))
            label_ends(axes, labels, in_column=True)
        return image_of(figure, file_format)
