"""The tables of a model's card, in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizer_training.corpus_config import BUILTIN

MAX_EVALUATIONS = 10


def markdown_table(rows: Mapping[str, str]) -> str:
    """Return {title: text} as a table of two columns."""
    return _table(("", ""), [(title, text) for title, text in rows.items()])


def corpus_table(record: dict[str, Any]) -> dict[str, str]:
    """Return what is known of the text: its source, revision, license, size."""
    data = record["train_data"]
    corpus, totals = data.get("corpus"), data["totals"]
    if corpus is None:
        return {"source": "not recorded", "rows": f"{totals['num_rows']:,}"}
    settings = corpus["settings"]
    rows = {"source": _source(corpus)}
    if settings["dataset_name"] not in (None, BUILTIN):
        rows["revision"] = settings["dataset_revision"] or "not fixed: the main branch at that time"
    return rows | {
        "license": "not recorded: see where the corpus comes from",
        "documents": f"{totals['num_documents']:,}",
        "tokens": f"{totals['num_tokens']:,}",
        "rows": f"{totals['num_rows']:,} of {data['max_length']} tokens, cut by `{data['chunking']}`",
    }


def procedure_table(record: dict[str, Any], step: int) -> dict[str, str]:
    """Return how the model was trained, up to update `step`."""
    plan, settings = record["plan"], record["settings"]
    optimization, masking = settings["optimization"], settings["masking"]
    batch_tokens = plan["global_batch_rows"] * plan["max_length"]
    return {
        "updates": f"{step:,}",
        "tokens seen": f"{step * batch_tokens:,}, padding included",
        "epochs": f"{step * plan['global_batch_rows'] / plan['num_rows']:.2f}",
        "batch": f"{plan['global_batch_rows']:,} rows = {batch_tokens:,} tokens an update",
        "masking": f"{masking['masking']}, {masking['mlm_probability']:.0%} of the tokens: "
        f"{masking['mask_token_rate']:.0%} masked, {masking['random_token_rate']:.0%} random, the rest kept",
        "optimizer": f"{optimization['optimizer']}, beta1 {optimization['adam_beta1']}, beta2 "
        f"{optimization['adam_beta2']}, epsilon {optimization['adam_epsilon']}, weight decay "
        f"{optimization['weight_decay_rate']}, gradients clipped to norm {optimization['max_grad_norm']}",
        "learning rate": f"{optimization['learning_rate']}, schedule {optimization['schedule']}, "
        f"{plan['num_warmup_steps']:,} updates of warmup",
        "precision": "bfloat16, weights in float32" if settings["hardware"]["bfloat16"] else "float32",
        "seed": str(settings["run"]["seed"]),
        "hardware": record["hardware"],
        "software": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    }


def evaluation_table(record: dict[str, Any], evaluations: Sequence[dict[str, Any]]) -> str:
    """Return the figures of the newest evaluations and what they are."""
    if not evaluations:
        return "The model was not evaluated."
    rows = [
        (
            f"{line['step']:,}",
            f"{line['loss']:.4f}",
            f"{line['perplexity']:.2f}",
            f"{line['masked_accuracy']:.4f}",
        )
        for line in evaluations[-MAX_EVALUATIONS:]
    ]
    table = _table(("update", "loss (nats)", "perplexity", "accuracy"), rows)
    num_masked = evaluations[-1]["num_masked_tokens"]
    text = f"Over {num_masked:,} masked tokens of rows that were not trained on, 15 % of each row, always the same."
    entropy = record["eval_data"].get("unigram_entropy_nats")
    if entropy is not None:
        text += f" Knowing the frequencies of the tokens only gives a loss of {entropy:.4f}."
    return f"{text}\n\n{table}"


def _source(corpus: dict[str, Any]) -> str:
    """Return where the text comes from; of files their number and size, since paths are their owner's business."""
    settings = corpus["settings"]
    if settings["dataset_name"] == BUILTIN:
        return "docstrings of Python's standard library and of installed packages"
    if settings["dataset_name"] is not None:
        config = f", configuration `{settings['dataset_config']}`" if settings["dataset_config"] else ""
        return f"`{settings['dataset_name']}`{config}, split `{settings['split']}`"
    files = corpus.get("data_files", [])
    return f"files of its author's: {len(files):,}, {sum(file['num_bytes'] for file in files) / 1e6:,.1f} MB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
