"""Fill the template `model_card.md` from the record of a run.

Metadata: https://huggingface.co/docs/hub/model-cards#model-card-metadata.
"""

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any

import huggingface_hub
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from mlm_common.cli.console import counted
from mlm_common.corpus.config import BUILTIN
from mlm_common.corpus.identity import HUB_ID, hub_dataset
from mlm_common.errors import error_summary
from mlm_common.tokenizer import vocabulary_size
from train.config.phases import OVERRIDES_PER_PHASE, PER_PHASE
from train.config.settings import MASK
from train.model.computation import describe_computation
from train.publishing.card_example import PLACEHOLDER, example_of
from train.publishing.pytorch_format import ModelSnapshot, num_parameters
from train.runtime.plan import Plan
from train.runtime.run_folder import CONFUSION_NAME, EARLIER_SCHEDULES, LOSS_CURVE_NAME, record_of_phase
from train.tasks.task import TaskCard, source_losses

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_suffix(".md")
PLOTS = {LOSS_CURVE_NAME: "Loss over the steps", CONFUSION_NAME: "Rows by label and prediction"}
# A card shows only the newest evaluations, at most this number.
MAX_EVALUATIONS = 10

# Settings that get no column in the table of phases, because other columns or other sections show them.
DESCRIBED_OTHERWISE = frozenset({
    "train_dataset", "eval_dataset", "max_length", "max_steps", "num_epochs", "global_batch_size",
    "per_replica_batch_size", "gradient_accumulation_steps", "learning_rate", "schedule", "warmup_steps",
    "warmup_ratio", "config_overrides",
})  # fmt: skip
# Code for a task that has no `usage`.
LOADING = """```python
from transformers import {auto_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model}{revision})
model = {auto_class}.from_pretrained({model}{revision})
```"""


def model_card(
    record: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    snapshot: ModelSnapshot,
    files: Collection[str],
    scores: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a model's README.md: metadata for the Hub, then sections for readers.

    Args:
        record: the run's `run.json`.
        tokenizer: the tokenizer that is exported with the model.
        snapshot: the model, and the log of its training.
        files: names of the files in the export; plots among them are shown on the card.
        scores: result of `read_scores` in `train.publishing.publisher`, if the model was scored.
    """
    hub, task, step = record["settings"]["hub"], TaskCard.from_record(record["task"]["card"]), snapshot.step
    name = hub["hub_model_id"].partition("/")[2] if hub["hub_model_id"] else task.model_kind.capitalize()
    example = _example(record, task, tokenizer)
    evaluations = [line for line in snapshot.metrics if line["split"] == "validation" and line["step"] <= step]
    result = evaluations[-1] if evaluations and evaluations[-1]["step"] == step else None
    was_best = any(line["step"] > step for line in snapshot.metrics)
    plots = "".join(f"\n\n![{title}]({plot})" for plot, title in PLOTS.items() if plot in files)
    return TEMPLATE.read_text(encoding="utf-8").format(
        metadata=_metadata(record, task, tokenizer, name, example, result),
        name=name,
        opening=_opening(record, task, step, was_best=was_best),
        architecture=f"{snapshot.class_name} (`{snapshot.config.model_type}`)",
        parameters=f"{num_parameters(snapshot, vocabulary_size(tokenizer)):,}",
        tokenizer=f"{tokenizer.backend_tokenizer.model.__class__.__name__}, {vocabulary_size(tokenizer):,} ids, "
        f"mask token `{tokenizer.mask_token}`",
        languages=", ".join(hub["hub_language"]) or "not stated",
        license=hub["hub_license"] or "not stated",
        usage=_usage(record, task, example or PLACEHOLDER.replace(MASK, tokenizer.mask_token)),
        corpus=_corpora(record),
        training=_procedure(record, task, step) + _phases_table(record, task),
        evaluation=_evaluation(record, task, evaluations, step) + _scores(scores) + plots,
        limits=task.limits.format(max_length=_plan(record).longest_row),
    )


def check_card(record: dict[str, Any], tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig) -> None:
    """Build the card of each phase with placeholder numbers; warn if that fails, or if a card lacks data for the Hub.

    This function runs before training, so that all problems of the card are known early.
    """
    hub, task = record["settings"]["hub"], TaskCard.from_record(record["task"]["card"])
    try:
        if hub["hub_model_id"] and task.predicts_tokens and _example(record, task, tokenizer) is None:
            logger.warning(
                "The model card has no example sentence, because text of a corpus that is not known to be public is "
                "never published. Pass one in the language of the model: --hub-example 'A sentence with one %s.'",
                MASK,
            )
        if hub["hub_model_id"] and not hub["hub_language"]:
            logger.warning("The model card does not state a language. Pass it, for example: --hub-language de")
        names = [figure.name for figure in task.figures]
        names += [name for _, name, _, _ in Formatter().parse(task.evaluation) if name]
        lines: list[dict[str, Any]] = []
        for index, phase in enumerate(_phases(record)):
            step = _plan(phase).num_steps
            if phase["eval_data"]:
                lines.append({"step": step, "split": "validation", "phase": index + 1} | dict.fromkeys(names, 1))
            model_card(record_of_phase(record, index), tokenizer, ModelSnapshot("", config, {}, step, lines), PLOTS)
    except Exception as error:
        message = "the model card cannot be built, so the export will have a minimal one: %s"
        logger.warning(message, error_summary(error))


def _metadata(
    record: dict[str, Any],
    task: TaskCard,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    example: str | None,
    evaluation: dict[str, Any] | None,
) -> str:
    """Return the YAML metadata that the Hub uses to find and show the model.

    Only a fine-tuned model names a `base_model`, because the Hub lists any model that names a base model as a fine-tune
    of it. `evaluation` is the evaluation at the model's step; None without an evaluation.
    """
    hub = record["settings"]["hub"]
    data_sets = (phase["train_data"] or {} for phase in _phases(record))
    sources = (source for data in data_sets for source in data.get("sources", {"": data}).values())
    corpora = (source.get("corpus", {}) for source in sources)
    dataset_names = [*map(hub_dataset, corpora), _hub_examples(record["train_data"])]
    data = huggingface_hub.ModelCardData(
        library_name=task.library,
        base_model=_base_model(record) if task.training_verb != "pretrained" else None,
        pipeline_tag=task.pipeline_tag,
        language=hub["hub_language"] or None,
        license=hub["hub_license"],
        datasets=list(dict.fromkeys(filter(None, dataset_names))) or None,
        tags=[*task.tags, "tensorboard"],
        mask_token=tokenizer.mask_token,
        widget=[{"text": example}] if example else None,
        model_name=name if evaluation else None,
        eval_results=_eval_results(record, task, evaluation) if evaluation else None,
    )
    return data.to_yaml()


def _base_model(record: dict[str, Any]) -> str | None:
    """Return the Hub id of the model that a run started from; None if it started from a folder or from scratch."""
    init_from = record["settings"]["model"]["init_from"]
    return init_from if init_from and HUB_ID.fullmatch(init_from) and not Path(init_from).exists() else None


def _hub_examples(data: Mapping[str, Any] | None) -> str | None:
    """Return the Hub id of the examples that a model was fine-tuned or evaluated on; None if they are files."""
    name = (data or {}).get("dataset_name")
    return name if name and HUB_ID.fullmatch(name) else None


def _eval_results(record: dict[str, Any], task: TaskCard, evaluation: dict[str, Any]) -> list[Any]:
    eval_data = _eval_data(record, evaluation)
    settings = eval_data.get("corpus", {}).get("settings", {}) or eval_data
    dataset = hub_dataset(eval_data.get("corpus", {})) or _hub_examples(eval_data)
    shared: dict[str, Any] = {
        "task_type": task.pipeline_tag,
        "task_name": task.task_name,
        "dataset_type": dataset or "text",
        "dataset_name": dataset or "held-out part of the corpus",
        "dataset_config": settings.get("dataset_config", settings.get("dataset_config_name")) if dataset else None,
        "dataset_split": eval_data.get("split"),
        "dataset_revision": settings.get("dataset_revision") if dataset else None,
    }
    return [
        huggingface_hub.EvalResult(
            **shared,
            metric_type=figure.metric_type,
            metric_name=figure.metric_name,
            metric_value=round(evaluation[figure.name], 4),
        )
        for figure in task.figures
        if math.isfinite(evaluation[figure.name])
    ]


def _opening(record: dict[str, Any], task: TaskCard, step: int, *, was_best: bool) -> str:
    init_from, num_steps = record["settings"]["model"]["init_from"], _plan(_phases(record)[-1]).num_steps
    start = "from scratch"
    if base_model := _base_model(record):
        revision = f", revision `{record['hub_revision']}`" if record["hub_revision"] else ""
        start = f"{task.start_words} `{base_model}`{revision}"
    elif init_from is not None:
        start = f"{task.start_words} a local checkpoint"  # the checkpoint's path is private
    progress = f"step {step:,} of {num_steps:,}"
    note = "" if step == num_steps else f" **Training is not finished: {progress}.**"
    if was_best:
        note = f" This is the checkpoint of {progress}, which had the best evaluation."
    if averaged := record.get("averaged_steps"):
        steps = ", ".join(f"{averaged_step:,}" for averaged_step in averaged)
        note += f" Its weights are the average of the checkpoints of steps {steps}."
    return f"A {task.model_kind}, {task.training_verb} {start}.{note}"


def _example(record: dict[str, Any], task: TaskCard, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return the example sentence, with the tokenizer's mask token; None if the card needs or has no example."""
    example = example_of(record, tokenizer) if task.usage and "{sentence}" in task.usage else None
    return example.replace(MASK, tokenizer.mask_token) if example else None


def _usage(record: dict[str, Any], task: TaskCard, sentence: str) -> str:
    hub = record["settings"]["hub"]
    packages = "torch transformers" if task.library == "transformers" else f"torch transformers {task.library}"
    where = "" if hub["hub_model_id"] else " Run it in the folder of this card."
    return f"It needs PyTorch: `pip install {packages}`.{where}\n\n" + (task.usage or LOADING).format(
        # A JSON string is also a Python string, with double quotes.
        model=json.dumps(hub["hub_model_id"] or "."),
        revision=f", revision={json.dumps(hub['hub_revision'])}" if hub["hub_revision"] else "",
        sentence=json.dumps(sentence, ensure_ascii=False),
        max_length=f"{_plan(record).longest_row:,}",
        auto_class=record["task"]["model_class"].removeprefix("TF"),
    )


def _corpora(record: dict[str, Any]) -> str:
    """Describe the text of each phase; phases with the same text are described together."""
    phases_by_corpus: dict[str, list[str]] = {}
    for index, phase in enumerate(_phases(record), start=1):
        phases_by_corpus.setdefault(_corpus(phase), []).append(str(index))
    if len(phases_by_corpus) == 1:
        return next(iter(phases_by_corpus))
    return "\n\n".join(f"In phase {' and '.join(indices)}:\n\n{table}" for table, indices in phases_by_corpus.items())


def _corpus(phase: dict[str, Any]) -> str:
    """Describe a phase's text: source, revision, license, size. Only count files, because their paths are private."""
    data = phase["train_data"]
    corpus, totals = data.get("corpus"), data["totals"]
    if sources := data.get("sources"):
        counts = ("num_rows", "num_tokens")
        return _table(
            ("source", "of the rows read", "rows", "tokens"),
            [
                [name, f"{source['weight']:.2%}", *(f"{source['totals'].get(count, 0):,}" for count in counts)]
                for name, source in sources.items()
            ],
        )
    if corpus is None:
        return _properties({"source": data.get("source", "not recorded"), "rows": f"{totals['num_rows']:,}"})
    settings, rows = corpus["settings"], {"source": "a data set of the author"}
    if settings["dataset_name"] == BUILTIN:
        rows["source"] = "docstrings of Python's standard library and of installed packages"
    elif dataset := hub_dataset(corpus):
        config = f", configuration `{settings['dataset_config']}`" if settings["dataset_config"] else ""
        rows["source"] = f"`{dataset}`{config}, split `{settings['split']}`"
        rows["revision"] = settings["dataset_revision"] or "not fixed; the main branch at the time of preparation"
    elif files := corpus.get("data_files"):
        num_megabytes = sum(file["num_bytes"] for file in files) / 1e6
        rows["source"] = f"{counted(len(files), 'file')} of the author, {num_megabytes:,.1f} MB"
    return _properties(
        {
            **rows,
            "license": "not recorded; see the source",
            **({"documents": f"{totals['num_documents']:,}"} if totals["num_documents"] else {}),
            "tokens": f"{totals['num_tokens']:,}",
            "rows": f"{totals['num_rows']:,} rows of {data['max_length']} tokens (chunking: `{data['chunking']}`)",
        }
    )


def _phases(record: dict[str, Any]) -> list[dict[str, Any]]:
    return record.get("phases") or [record]


def _plan(record: dict[str, Any]) -> Plan:
    return Plan.from_record(record["plan"])


def _procedure(record: dict[str, Any], task: TaskCard, step: int) -> str:
    plan, settings, varying = _plan(record), record["settings"], _varying(record, task)
    optimization = settings["optimization"]
    norm = optimization["max_grad_norm"]
    clipping = f"gradients clipped to norm {norm}" if norm else "gradients not clipped"
    optimizer = [
        optimization["optimizer"],
        *(f"{title} {optimization[f'adam_{title}']}" for title in ("beta1", "beta2", "epsilon")),
        *([f"weight decay {optimization['weight_decay_rate']}"] if "weight_decay_rate" not in varying else []),
        *([clipping] if "max_grad_norm" not in varying else []),
    ]
    one_phase_rows = {
        "epochs": f"{step * plan.global_batch_rows / plan.num_rows:.2f}",
        "batch": f"{plan.global_batch_rows:,} rows = {plan.batch_tokens:,} tokens per step",
        **{title: text.format(**settings) for title, text in task.procedure.items()},
        "learning rate": _learning_rate(record),
    }
    rows = {
        "steps": f"{step:,}",
        "tokens seen": f"{plan.tokens_after(step):,}, padding included",
        **({} if "phases" in record else one_phase_rows),
        **_earlier_schedules(record),
        "optimizer": ", ".join(optimizer),
        "precision": "bfloat16, weights in float32" if settings["hardware"]["bfloat16"] else "float32",
        "seed": str(settings["run"]["seed"]),
        "hardware": record["hardware"],
        "computation": describe_computation(record["computation"], on_tpu=record["hardware"].startswith("TPU")),
        "software": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    }
    if settings["model"]["block_attention"] and "block_attention" not in varying:
        rows["attention"] = "only within each document of a row"
    return _properties(rows)


def _phases_table(record: dict[str, Any], task: TaskCard) -> str:
    """Return a table of the settings that differ between a run's phases; empty if the run has no phases."""
    varying, rows = _varying(record, task), []
    for index, phase in enumerate(record.get("phases", ()), start=1):
        plan, settings = _plan(phase), _phase_settings(phase)
        rows.append(
            [
                str(index),
                f"{plan.num_steps:,}",
                f"{plan.max_length:,} tokens",
                f"{plan.global_batch_rows:,} rows",
                *(text.format(**phase["settings"]) for text in task.procedure.values()),
                _learning_rate(phase),
                *("default" if settings.get(name) is None else str(settings[name]) for name in varying),
            ]
        )
    titles = (name.replace("_", " ") for name in varying)
    header = ("phase", "up to step", "rows", "batch", *task.procedure, "learning rate", *titles)
    return f"\n\n{_table(header, rows)}" if rows else ""


def _varying(record: dict[str, Any], task: TaskCard) -> list[str]:
    """Return the names of the settings that differ between phases, except settings that the card shows elsewhere."""
    settings = [_phase_settings(phase) for phase in _phases(record)]
    procedure = "".join(task.procedure.values())
    return [
        name
        for name in sorted((PER_PHASE | OVERRIDES_PER_PHASE) - DESCRIBED_OTHERWISE)
        if f"[{name}]" not in procedure and any(phase.get(name) != settings[0].get(name) for phase in settings)
    ]


def _phase_settings(phase: dict[str, Any]) -> dict[str, Any]:
    return {
        **phase.get("model_config", {}),
        **{name: value for subject in phase["settings"].values() for name, value in subject.items()},
    }


def _earlier_schedules(record: dict[str, Any]) -> dict[str, str]:
    """Return the card's row about steps that followed the schedule of a longer or shorter run; empty if there are none.

    Such steps exist if the run was lengthened or shortened when it was resumed.
    """
    texts, first_step = [], _plan(record).first_schedule_step + 1
    for last_step, num_steps in record.get(EARLIER_SCHEDULES, ()):
        texts.append(f"steps {first_step:,} to {last_step:,} with the schedule of a run of {num_steps:,} steps")
        first_step = last_step + 1
    return {"earlier schedules": "; ".join(texts)} if texts else {}


def _learning_rate(record: dict[str, Any]) -> str:
    optimization = record["settings"]["optimization"]
    warmup = f"{_plan(record).num_warmup_steps:,} steps of warmup"
    return f"{optimization['learning_rate']}, schedule {optimization['schedule']}, {warmup}"


def _eval_data(record: dict[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    return _phases(record)[line.get("phase", 1) - 1]["eval_data"] or {}


def _evaluation(record: dict[str, Any], task: TaskCard, evaluations: Sequence[dict[str, Any]], step: int) -> str:
    """Return the newest evaluations, by evaluation data, with a note if the model of `step` was not evaluated."""
    if not evaluations:
        return "The model was not evaluated."
    newest_step, parts = evaluations[-1]["step"], []
    if newest_step != step:
        parts.append(f"The model of step {step:,} was not evaluated; the newest evaluation is of step {newest_step:,}.")
    has_several_data = any(phase["eval_data"] != record["eval_data"] for phase in _phases(record))
    for eval_data, group in groupby(evaluations[-MAX_EVALUATIONS:], lambda line: _eval_data(record, line)):
        lines = list(group)
        if has_several_data:
            parts.append(f"In phase {' and '.join(dict.fromkeys(str(line.get('phase', 1)) for line in lines))}:")
        text = task.evaluation.format(**lines[-1])
        entropy = eval_data.get("unigram_entropy_nats")
        if entropy is not None and task.predicts_tokens:
            text += f" Guessing from token frequencies alone gives a loss of {entropy:.4f}."
        rows = [
            [
                f"{line['step']:,}",
                *(f"{line[figure.name]:.{figure.num_decimals}f}" for figure in task.figures),
                *(f"{loss:.4f}" for loss in source_losses(line).values()),
            ]
            for line in lines
        ]
        sources = [f"loss of {name}" for name in source_losses(lines[-1])]
        if sources:
            text += " Scores without the name of a source are means over the sources, weighted by their shares."
        parts += [text, _table(("step", *(figure.title for figure in task.figures), *sources), rows)]
    return "\n\n".join(parts)


def _scores(scores: Mapping[str, Any] | None) -> str:
    """Describe the scores of the model and its controls before fine-tuning; empty if the model was not scored."""
    if scores is None:
        return ""
    model_scores = scores["scores"]["this model"]
    rows = [[title, *(_score(values[name]) for name in model_scores)] for title, values in scores["scores"].items()]
    text = (
        "Scores without fine-tuning, ± standard error: bits per byte of a text (lower is better), the fraction of its "
        "words that the model guesses when they are masked, and the fraction of minimal pairs in which it prefers the "
        "correct sentence. Random weights: the same network before training, ± standard deviation over several. No "
        "context: a guess from token frequencies alone; for pairs, the sentence with fewer tokens."
    )
    if scores["left_to_right"]:
        text += " With each scored token, the tokens after it in the same word are masked, too."
    for control, names in scores["chance"].items():
        text += f" The model does not differ from {control} in: {', '.join(names)}."
    header = ("", *(f"{name}, n = {score['items']:,}" for name, score in model_scores.items()))
    return f"\n\n{text}\n\n{_table(header, rows)}"


def _score(score: Mapping[str, Any]) -> str:
    """Return a score with its standard error, which is unknown if there was only one item."""
    error = score["standard_error"]
    return f"{score['value']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _properties(rows: Mapping[str, str]) -> str:
    return _table(("", ""), list(rows.items()))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
