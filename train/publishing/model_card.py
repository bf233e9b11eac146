"""The card of a model, README.md: what it is and how it was made, from the run's own record.

Metadata: https://huggingface.co/docs/hub/model-cards#model-card-metadata.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tokenizer_training.corpus.config import BUILTIN
from tokenizer_training.corpus.published_corpus import HUB_ID, hub_dataset
from tokenizer_training.tokenizer import vocabulary_size
from train.config.settings import MASK
from train.model.computation import describe_computation
from train.publishing.publisher import Publication
from train.publishing.pytorch_format import num_parameters
from train.runtime.plan import batch_tokens, longest_row, tokens_after
from train.runtime.run_folder import CONFUSION_NAME, LOSS_CURVE_NAME
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.task import TaskCard, task_record

PICTURES = {LOSS_CURVE_NAME: "Loss over the steps", CONFUSION_NAME: "Rows by label and prediction"}
# Newest evaluations that are shown.
MAX_EVALUATIONS = 10

# Of a task that has no usage of its own.
LOADING = """```python
from transformers import {auto_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model}{revision})
model = {auto_class}.from_pretrained({model}{revision})
```"""

BLOCK_ATTENTION = "within each document of a row, as if it had a row of its own; positions begin anew in each"
LIMITS = """- {limits}
- It knows what its corpus holds, and repeats what is wrong or unfair there.
- Nothing but the figures above was measured: neither tasks built on it, nor texts of another kind."""


def recorded_task(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read from a `run.json` what `task_record` tells; one without it is of masked language modelling."""
    return record.get("task") or task_record(MaskedLanguageModeling)


def model_card(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerFast, publication: Publication, files: Collection[str]
) -> str:
    """Write the README.md of a publication: metadata for the Hub, then text for people.

    Args:
        record: the run's `run.json`.
        tokenizer: the model's.
        publication: the model and the figures that the card is about.
        files: names of what lies beside the card; pictures among them are shown.
    """
    hub, config = record["settings"]["hub"], publication.model.config
    task = TaskCard.from_record(recorded_task(record)["card"])
    num_weights = num_parameters(publication.model, vocabulary_size(tokenizer))
    step = publication.step
    evaluations = [line for line in publication.metrics if line["split"] == "validation" and line["step"] <= step]
    was_best = any(line["step"] > step for line in publication.metrics)
    about = {
        "architecture": f"{publication.model.class_name.removeprefix('TF')} (`{config.model_type}`)",
        "parameters": f"{num_weights:,}",
        "tokenizer": f"{tokenizer.backend_tokenizer.model.__class__.__name__}, {vocabulary_size(tokenizer):,} ids, "
        f"mask token `{tokenizer.mask_token}`",
        "languages": ", ".join(hub["hub_language"]) or "not stated",
        "license": hub["hub_license"] or "not stated",
    }
    sections = {
        "Use": _usage(record, task, tokenizer),
        "Corpus": _corpora(record),
        "Training": markdown_table(procedure_table(record, task, step)) + _phases_table(record, task),
        "Evaluation": evaluation_table(record, task, evaluations)
        + "".join(f"\n\n![{title}]({name})" for name, title in PICTURES.items() if name in files),
        "Limits": LIMITS.format(limits=task.limits.format(max_length=longest_row(record["plan"]))),
    }
    text = [f"# {_name(hub, task)}", _opening(record, task, step, was_best=was_best), markdown_table(about)]
    text += [f"## {title}\n\n{content}" for title, content in sections.items()]
    return f"---\n{metadata(record, task, tokenizer, evaluations)}\n---\n\n" + "\n\n".join(text) + "\n"


def metadata(
    record: dict[str, Any], task: TaskCard, tokenizer: PreTrainedTokenizerFast, evaluations: list[dict[str, Any]]
) -> str:
    """Write the YAML by which the Hub finds and shows the model.

    Only a model that was fine-tuned has a `base_model`: the Hub would call any model with one a fine-tune of it.
    """
    from huggingface_hub import ModelCardData

    hub = record["settings"]["hub"]
    corpora = ((phase["train_data"] or {}).get("corpus", {}) for phase in _phases(record))
    named = [*map(hub_dataset, corpora), hub_examples(record["train_data"])]
    datasets = list(dict.fromkeys(filter(None, named)))
    data = ModelCardData(
        library_name="transformers",
        base_model=base_model(record) if task.training_verb != "pretrained" else None,
        pipeline_tag=task.pipeline_tag,
        language=hub["hub_language"] or None,
        license=hub["hub_license"],
        datasets=datasets or None,
        tags=[*task.tags, "tensorboard"],
        mask_token=tokenizer.mask_token,
        widget=[{"text": _example(hub, tokenizer)}] if task.usage else None,
        model_name=_name(hub, task),
        eval_results=_eval_results(record, task, evaluations[-1]) if evaluations else None,
    )
    if not evaluations:
        data.pop("model_name")
    return data.to_yaml()


def base_model(record: dict[str, Any]) -> str | None:
    """Name the model of the Hub that a run started from; None where that was a folder."""
    init_from = record["settings"]["model"]["init_from"]
    return init_from if init_from and HUB_ID.fullmatch(init_from) and not Path(init_from).exists() else None


def hub_examples(data: Mapping[str, Any] | None) -> str | None:
    """Name the data set of the Hub that examples are of; None where they are of none."""
    name = (data or {}).get("dataset_name")
    return name if name and HUB_ID.fullmatch(name) else None


def _eval_results(record: dict[str, Any], task: TaskCard, evaluation: dict[str, Any]) -> list[Any]:
    from huggingface_hub import EvalResult

    settings = record["eval_data"].get("corpus", {}).get("settings", {})
    dataset = hub_dataset(record["eval_data"].get("corpus", {})) or hub_examples(record["eval_data"])
    settings = settings or record["eval_data"]
    about = {
        "task_type": task.pipeline_tag,
        "task_name": task.task_name,
        "dataset_type": dataset or "text",
        "dataset_name": dataset or "held-out part of the corpus",
        "dataset_config": settings.get("dataset_config", settings.get("dataset_config_name")) if dataset else None,
        "dataset_split": record["eval_data"].get("split"),
        "dataset_revision": settings.get("dataset_revision") if dataset else None,
    }
    return [
        EvalResult(
            **about,
            metric_type=figure.metric_type,
            metric_name=figure.metric_name,
            metric_value=round(evaluation[figure.name], 4),
        )
        for figure in task.figures
        if math.isfinite(evaluation[figure.name])
    ]


def _name(hub: dict[str, Any], task: TaskCard) -> str:
    return hub["hub_model_id"].partition("/")[2] if hub["hub_model_id"] else task.model_kind.capitalize()


def _opening(record: dict[str, Any], task: TaskCard, step: int, *, was_best: bool) -> str:
    init_from, num_steps = record["settings"]["model"]["init_from"], _phases(record)[-1]["plan"]["num_steps"]
    start = "from scratch"
    if init_from is not None:
        is_on_hub = base_model(record) is not None
        revision = f", revision `{record['hub_revision']}`" if is_on_hub and record["hub_revision"] else ""
        # The path of a folder is nobody's business but its owner's.
        start = f"{task.start_words} {f'`{init_from}`' if is_on_hub else 'a checkpoint of its author'}{revision}"
    place = f"step {step:,} of {num_steps:,}"
    note = "" if step == num_steps else f" **Training is not finished: {place}.**"
    if was_best:
        note = f" It is as after {place}, whose evaluation was the best."
    return f"A {task.model_kind}, {task.training_verb} {start}.{note}"


def _example(hub: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> str:
    return hub["hub_example"].replace(MASK, tokenizer.mask_token)


def _usage(record: dict[str, Any], task: TaskCard, tokenizer: PreTrainedTokenizerFast) -> str:
    """Write lines that work with PyTorch, for the model on the Hub, or else for the folder of the card."""
    hub = record["settings"]["hub"]
    # JSON's strings are Python's, with the quotes that people write.
    model, sentence = (
        json.dumps(text, ensure_ascii=False) for text in (hub["hub_model_id"] or ".", _example(hub, tokenizer))
    )
    revision = f", revision={json.dumps(hub['hub_revision'])}" if hub["hub_revision"] else ""
    if task.usage is not None:
        return task.usage.format(model=model, revision=revision, sentence=sentence)
    auto_class = recorded_task(record)["model_class"].removeprefix("TF")
    return LOADING.format(auto_class=auto_class, model=model, revision=revision)


def markdown_table(rows: Mapping[str, str]) -> str:
    """Write {title: text} as a table of two columns."""
    return _table(("", ""), [(title, text) for title, text in rows.items()])


def corpus_table(record: dict[str, Any]) -> dict[str, str]:
    """Describe what is known of the text: its source, revision, license, size."""
    data = record["train_data"]
    corpus, totals = data.get("corpus"), data["totals"]
    if corpus is None:
        return {"source": data.get("source", "not recorded"), "rows": f"{totals['num_rows']:,}"}
    settings = corpus["settings"]
    rows = {"source": _source(corpus)}
    if hub_dataset(corpus):
        rows["revision"] = settings["dataset_revision"] or "not fixed: the main branch at that time"
    return rows | {
        "license": "not recorded: see where the corpus comes from",
        "documents": f"{totals['num_documents']:,}",
        "tokens": f"{totals['num_tokens']:,}",
        "rows": f"{totals['num_rows']:,} of {data['max_length']} tokens, cut by `{data['chunking']}`",
    }


def _corpora(record: dict[str, Any]) -> str:
    """Describe the text of each phase; of phases that share theirs, once."""
    phases_of: dict[str, list[str]] = {}
    for index, phase in enumerate(_phases(record), start=1):
        phases_of.setdefault(markdown_table(corpus_table(phase)), []).append(str(index))
    if len(phases_of) == 1:
        return next(iter(phases_of))
    return "\n\n".join(f"In phase {' and '.join(indices)}:\n\n{table}" for table, indices in phases_of.items())


def _phases(record: dict[str, Any]) -> list[dict[str, Any]]:
    """List the record as it is in each phase; a run without phases is one."""
    return record.get("phases") or [record]


def _phases_table(record: dict[str, Any], task: TaskCard) -> str:
    """Describe what differs between the phases of a run; nothing without any."""
    header = ("phase", "up to step", "rows", "batch", *task.procedure, "learning rate")
    rows = [
        (
            str(index),
            f"{(plan := phase['plan'])['num_steps']:,}",
            f"{plan['max_length']:,} tokens",
            f"{plan['global_batch_rows']:,} rows",
            *(text.format(**phase["settings"]) for text in task.procedure.values()),
            _learning_rate(phase),
        )
        for index, phase in enumerate(record.get("phases", ()), start=1)
    ]
    return f"\n\n{_table(header, rows)}" if rows else ""


def procedure_table(record: dict[str, Any], task: TaskCard, step: int) -> dict[str, str]:
    """Describe how the model was trained, up to `step`, but for what differs between phases."""
    plan, settings = record["plan"], record["settings"]
    optimization = settings["optimization"]
    rows = {
        "steps": f"{step:,}",
        "tokens seen": f"{tokens_after(plan, step):,}, padding included",
        "epochs": f"{step * plan['global_batch_rows'] / plan['num_rows']:.2f}",
        "batch": f"{plan['global_batch_rows']:,} rows = {batch_tokens(plan):,} tokens a step",
        **({"attention": BLOCK_ATTENTION} if settings["model"].get("block_attention") else {}),
        **{title: text.format(**settings) for title, text in task.procedure.items()},
        "optimizer": f"{optimization['optimizer']}, beta1 {optimization['adam_beta1']}, beta2 "
        f"{optimization['adam_beta2']}, epsilon {optimization['adam_epsilon']}, weight decay "
        f"{optimization['weight_decay_rate']}, gradients clipped to norm {optimization['max_grad_norm']}",
        "learning rate": _learning_rate(record),
        "precision": "bfloat16, weights in float32" if settings["hardware"]["bfloat16"] else "float32",
        "seed": str(settings["run"]["seed"]),
        "hardware": record["hardware"],
        **_computed(record),
        "software": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    }
    of_a_phase = ("epochs", "batch", *task.procedure, "learning rate") if "phases" in record else ()
    return {title: text for title, text in rows.items() if title not in of_a_phase}


def _learning_rate(record: dict[str, Any]) -> str:
    optimization = record["settings"]["optimization"]
    warmup = f"{record['plan']['num_warmup_steps']:,} steps of warmup"
    return f"{optimization['learning_rate']}, schedule {optimization['schedule']}, {warmup}"


def _computed(record: dict[str, Any]) -> dict[str, str]:
    """Describe how steps were computed, where that was recorded."""
    if "computation" not in record:
        return {}
    on_tpu = record["hardware"].startswith("TPU")
    return {"computation": describe_computation(record["computation"], on_tpu=on_tpu)}


def evaluation_table(record: dict[str, Any], task: TaskCard, evaluations: Sequence[dict[str, Any]]) -> str:
    """Write the figures of the newest evaluations and what they are."""
    if not evaluations:
        return "The model was not evaluated."
    rows = [
        (f"{line['step']:,}", *(f"{line[figure.name]:.{figure.num_decimals}f}" for figure in task.figures))
        for line in evaluations[-MAX_EVALUATIONS:]
    ]
    table = _table(("step", *(figure.title for figure in task.figures)), rows)
    text = task.evaluation.format(**evaluations[-1])
    entropy = record["eval_data"].get("unigram_entropy_nats")
    if entropy is not None and task.predicts_tokens:
        text += f" Knowing the frequencies of the tokens only gives a loss of {entropy:.4f}."
    return f"{text}\n\n{table}"


def _source(corpus: dict[str, Any]) -> str:
    """Describe where the text comes from; of files their number and size, since paths are their owner's business."""
    settings = corpus["settings"]
    if settings["dataset_name"] == BUILTIN:
        return "docstrings of Python's standard library and of installed packages"
    if hub_dataset(corpus):
        config = f", configuration `{settings['dataset_config']}`" if settings["dataset_config"] else ""
        return f"`{settings['dataset_name']}`{config}, split `{settings['split']}`"
    files = corpus.get("data_files", [])
    if not files:
        return "a data set of its author's"
    return f"files of its author's: {len(files):,}, {sum(file['num_bytes'] for file in files) / 1e6:,.1f} MB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
