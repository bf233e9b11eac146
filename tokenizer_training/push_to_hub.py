"""Push a tokenizer to a repository on the Hugging Face Hub, without paths and excerpts of the text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlm_common.corpus.identity import published_bad_rows, published_corpus
from mlm_common.corpus.sources import corpora_of
from mlm_common.hub.push import HubRepository, push_files
from mlm_common.hub.redaction import redact_settings
from mlm_common.storage import open_folder
from mlm_common.tokenizer import PLOT_FILE, RECORD_FILE, REPORT_FILE, TOKENIZER_FILES
from tokenizer_training.unigram.config import NormalizationConfig, UnigramConfig

# Of `report.json`; its examples are excerpts of the text.
PUBLIC_FIGURES = ("vocabulary_size", "pieces", "input", "characters", "held_out", "sources", "longest_pieces")


def push_tokenizer(folder: str, repository: HubRepository, *, publish_details: bool) -> None:
    """Push the files that stage 1 wrote to its folder, local or `gs://`, and no others.

    Args:
        publish_details: push `training.json` and `report.json` as they are.

    Raises:
        HubPushError: it did not succeed.
    """
    output = open_folder(folder)
    summaries = {RECORD_FILE: published_record, REPORT_FILE: published_report}
    names = [name for name in output.list_files() if TOKENIZER_FILES.fullmatch(name)] + [PLOT_FILE, *summaries]
    with output.local_copy(names) as local_folder:
        files: dict[str, Path | bytes] = {name: Path(local_folder, name) for name in names}
        if not publish_details:
            for name, summarize in summaries.items():
                summary = summarize(json.loads(output.read_text(name)))
                files[name] = (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode()
        push_files(files, repository, commit_message="Add the tokenizer", kept_in=folder)


def published_record(record: Mapping[str, Any]) -> dict[str, Any]:
    corpora = {name: published_corpus(corpus) for name, corpus in corpora_of(record).items()}
    mixed = {name: record[name] for name in ("source_weights", "sampling_alpha") if name in record}
    return {
        "tokenizer_sha256": record["tokenizer_sha256"],
        **({"corpus": corpora[""]} if "" in corpora else {"sources": corpora}),
        **mixed,
        "bad_rows": published_bad_rows(record["bad_rows"]),
        "normalization": redact_settings(record["normalization"], [NormalizationConfig]),
        "unigram": redact_settings(record["unigram"], [UnigramConfig]),
        "versions": record["versions"],
    }


def published_report(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in PUBLIC_FIGURES if name in report} | {"examples": []}
