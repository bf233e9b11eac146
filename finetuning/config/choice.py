"""Settings of a run that chooses one of several texts."""

from dataclasses import dataclass

from finetuning.config.optimization import SmoothedOptimization
from finetuning.config.settings import ExamplesConfig, FinetuningConfig
from mlm_common.cli.settings import flag
from train.config.learning import changeable

KNOWN = "Default: by the columns of SWAG, RACE or COPA."


@dataclass(frozen=True)
class ChoiceData(ExamplesConfig):
    """Which texts are chosen from, and which of them is right."""

    context_column_name: str | None = flag(None, f"Column with the text before every choice. {KNOWN}")
    question_column_name: str | None = flag(
        None,
        f"Column with the beginning of every choice, such as a question; where it has a blank, _, a choice fills it. "
        f"{KNOWN} Of other columns, choices stand alone.",
    )
    choice_column_names: list[str] = flag(
        list, f"Columns with the choices: one for each, or one with lists of them. {KNOWN}"
    )
    label_column_name: str | None = flag(
        None,
        "Column with the right choice: its number from 0, its letter, or the name of its column. Default: label, or "
        "answer as in RACE.",
    )
    metric_name: str | None = changeable(
        None, "Metric that decides which checkpoint is best: accuracy or loss. Default: accuracy."
    )


@dataclass(frozen=True)
class ChoiceConfig(FinetuningConfig):
    """All settings of one run of multiple choice."""

    data: ChoiceData
    optimization: SmoothedOptimization
