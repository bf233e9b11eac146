"""Runs as curves: what each has recorded of its loss, its time and its tokens, and what its model is."""

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mlm_common.errors import InputError
from train.config.learning import EVALUATION_MLM_PROBABILITY
from train.metrics.log import TRAIN, read_metrics
from train.runtime.plan import tokens_after
from train.runtime.run_folder import METRICS_NAME, RunFolder

MAX_NAME = 30


class Metric(NamedTuple):
    """The figure beside the loss that says how good a model is.

    name: in the lines of the log.
    title: human-readable.
    guess: what a guess without the text would score, None where that is not known.
    lower_is_better: whether it is an error.
    """

    name: str
    title: str
    guess: float | None = None
    lower_is_better: bool = False


# Of runs whose record names no other.
ACCURACY = Metric("masked_accuracy", "accuracy")


@dataclass(frozen=True)
class RunCurves:
    """What a run has recorded so far.

    record: its `run.json`. lines: its `metrics.jsonl`, by step.
    """

    name: str
    record: dict[str, Any]
    lines: Sequence[dict[str, Any]]

    @property
    def unigram_entropy_nats(self) -> float | None:
        """The best loss of a guess from the frequencies of the validation rows; None where the loss is another one."""
        eval_data = self.record["eval_data"] or {}
        return eval_data.get("unigram_entropy_nats") if self._card.get("predicts_tokens", True) else None

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the lines of training; None before there is one."""
        rates = [line["tokens_per_second"] for line in self.of_split(TRAIN) if "tokens_per_second" in line]
        return statistics.median(rates) if rates else None

    @property
    def is_finetuned(self) -> bool:
        return bool(self._card.get("training_verb", "pretrained") != "pretrained")

    @property
    def loss_unit(self) -> str:
        return str(self._card.get("loss_unit", "nats per masked token"))

    @property
    def task_name(self) -> str:
        return str(self._card.get("task_name", "Masked language modeling"))

    @property
    def metric(self) -> Metric:
        """The metric that checkpoints are compared by; where that is the loss, the first other one."""
        task = self.record.get("task") or {}
        # Perplexity says the same as the loss.
        titles = {
            name: title for name, title, *_ in self._card.get("figures", ()) if name not in ("loss", "perplexity")
        }
        name = task.get("metric", "loss")
        if name != "loss":
            is_error = bool(task.get("lower_is_better"))
            return Metric(name, titles.get(name, name.replace("_", " ")), task.get("guess"), is_error)
        return next((Metric(*one) for one in titles.items()), ACCURACY)

    @property
    def model(self) -> str:
        """The model in a few words: its preset, architecture and number of parameters."""
        from transformers.models.auto.configuration_auto import MODEL_NAMES_MAPPING

        kind = self.record.get("model_config", {}).get("model_type", "")
        number = self.record.get("num_parameters")
        about = [MODEL_NAMES_MAPPING.get(kind, kind), f"{short_number(number)} parameters" if number else ""]
        described = ", ".join(filter(None, about)) or self.name
        settings = self.record.get("settings", {}).get("model", {})
        is_of_preset = settings.get("preset") and not (settings["init_from"] or settings["pretrained_model_config"])
        return f"{settings['preset']} ({described})" if is_of_preset else described

    @property
    def mask_rates(self) -> list[float]:
        """The fraction of the tokens that training masks, of one phase after the other; none for other tasks."""
        settings = [phase.get("settings", {}) for phase in self.record.get("phases") or [self.record]]
        return list(dict.fromkeys(one["masking"]["mlm_probability"] for one in settings if "masking" in one))

    @property
    def mask_note(self) -> str:
        """Why training and validation are not equally hard; nothing where both mask the same number of tokens."""
        rates = self.mask_rates
        if not rates or rates == [EVALUATION_MLM_PROBABILITY]:
            return ""
        training = ", then ".join(map(percentage, rates))
        ease = " Validation is easier: more of the text is visible." if min(rates) > EVALUATION_MLM_PROBABILITY else ""
        return f"Validation masks {percentage(EVALUATION_MLM_PROBABILITY)} of the tokens, training {training}.{ease}"

    @property
    def num_steps(self) -> int | None:
        """Steps that the run will have at its end; None where that is not recorded."""
        last = (self.record.get("phases") or [self.record])[-1]
        return last["plan"].get("num_steps")

    def phase_name(self, number: int) -> str:
        """Look up the name of a phase, counted from 1."""
        phases = self.record.get("phases") or []
        return str(phases[number - 1]["name"]) if number <= len(phases) else f"phase {number}"

    def tokens_after(self, step: int) -> int:
        """Count the tokens of the steps up to `step`, padding included."""
        return tokens_after(self.record["plan"], step)

    def of_split(self, split: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["split"] == split]

    def training_seconds(self, step: int) -> float:
        """Add up the time that the steps up to `step` took, as far as it was measured; evaluations are not in it."""
        return float(np.interp(step, *self._clock))

    @functools.cached_property
    def _clock(self) -> tuple[list[int], list[float]]:
        """The steps of the lines of training, and the seconds that training had taken by then."""
        lines = self.of_split(TRAIN)
        steps = [0, *(line["step"] for line in lines)]
        seconds = [
            (step - before) * line.get("step_seconds", 0.0)
            for line, (before, step) in zip(lines, pairwise(steps), strict=True)
        ]
        return steps, [0.0, *accumulate(seconds)]

    @property
    def _card(self) -> dict[str, Any]:
        """What the record says of the task for the model's card."""
        return (self.record.get("task") or {}).get("card") or {}


def read_runs(folders: Sequence[str]) -> list[RunCurves]:
    """Read the runs in these output folders, each named by what tells its folder from the others."""
    runs = [RunFolder(folder) for folder in folders]
    for folder in runs:
        if not folder.files.exists(METRICS_NAME) or not folder.files.read_text(METRICS_NAME).strip():
            raise InputError(
                f"--runs: {folder} has no {METRICS_NAME} yet. Name the --output-dir of a run of run_mlm.py or of "
                "fine-tuning."
            )
    return [
        RunCurves(name, folder.read_record(), read_metrics(folder))
        for name, folder in zip(_short_names(folders), runs, strict=True)
    ]


def short_name(name: str, max_length: int = MAX_NAME) -> str:
    """Leave out the middle of a name that is too long."""
    end = (max_length - 1) // 2
    return name if len(name) <= max_length else f"{name[: max_length - 1 - end]}…{name[-end:]}"


def short_number(number: float) -> str:
    """Write a number with two or three digits and its unit: 950, 1.7 M, 88 M, 2.1 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{_two_digits(number / size)} {unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Write a time with the unit that suits it: 12 s, 3.5 min, 7.2 h, 2.1 days."""
    for size, unit in ((2 * 86400, "days"), (2 * 3600, "h"), (2 * 60, "min")):
        if seconds >= size:
            return f"{_two_digits(seconds / (size / 2))} {unit}"
    return f"{seconds:.0f} s"


def percentage(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def _two_digits(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0") if number < 9.95 else f"{number:.0f}"


def _short_names(folders: Sequence[str]) -> list[str]:
    """Cut from the folders the part of the path that all share."""
    paths = [folder.rstrip("/").split("/") for folder in folders]
    num_shared = 0
    while all(len(path) > num_shared + 1 and path[num_shared] == paths[0][num_shared] for path in paths):
        num_shared += 1
    return ["/".join(path[num_shared:]) for path in paths]
