"""A tokenizer in a repository on the Hugging Face Hub: the files that stage 1 wrote, without what is its owner's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlm_common.corpus.published_corpus import published_bad_rows, published_corpus
from mlm_common.hub.own_files import FormerPush
from mlm_common.hub.push import HubRepository, push_files
from mlm_common.hub.redaction import redact_except, withhold_settings
from mlm_common.storage import open_folder
from mlm_common.tokenizer import PICTURE_FILE, RECORD_FILE, REPORT_FILE, TOKENIZER_FILES
from tokenizer_training.unigram.config import UnigramConfig
from tokenizer_training.unigram.normalization import NormalizationConfig

FORMER_PUSH = FormerPush(
    proof=RECORD_FILE,
    marks=('"tokenizer_sha256"', '"normalization"', '"unigram"'),
    names=rf"{TOKENIZER_FILES.pattern}|training\.json|report\.(json|png)",
)


def push_tokenizer(folder: str, repository: HubRepository, *, publish_details: bool) -> None:
    """Push what stage 1 wrote to its folder, local or `gs://`, and no other file that is there.

    Args:
        folder: of the tokenizer.
        repository: where it goes.
        publish_details: push the records as they are.

    Raises:
        HubPushError: it did not succeed.
    """
    output = open_folder(folder)
    records = {RECORD_FILE: published_record, REPORT_FILE: published_report}
    names = [name for name in output.list_files() if TOKENIZER_FILES.fullmatch(name)] + [PICTURE_FILE, *records]
    with output.local_copy(names) as local_folder:
        files: dict[str, Path | bytes] = {name: Path(local_folder, name) for name in names}
        if not publish_details:
            for name, publish in records.items():
                published = publish(json.loads(output.read_text(name)))
                files[name] = (json.dumps(published, indent=2, ensure_ascii=False) + "\n").encode()
        push_files(files, repository, commit_message="Add the tokenizer", kept_in=folder)


def published_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Withhold of a `training.json` what is its owner's."""
    published = redact_except(record, ["tokenizer_sha256", "versions"])
    published["corpus"] = published_corpus(record["corpus"])
    published["bad_rows"] = published_bad_rows(record.get("bad_rows"))
    for name, config_class in (("normalization", NormalizationConfig), ("unigram", UnigramConfig)):
        published[name] = withhold_settings(record[name], [config_class])
    return published


def published_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Withhold of a `report.json` the excerpts of the text."""
    figures = ("vocabulary_size", "pieces", "input", "characters", "held_out", "longest_pieces")
    return redact_except(report, figures) | {"examples": []}
