"""`training.json`, the record beside a tokenizer of how it was made; it is written last, so it says all is there."""

import json
import logging
import platform
import tempfile
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from tokenizer_training.tokenizer import save_tokenizer, tokenizer_sha256
from tokenizer_training.unigram.report import PICTURE_FILE, REPORT_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

RECORD_FILE = "training.json"
TOKENIZER_FILE = "tokenizer.json"
PACKAGES = ("mlm-pretraining", "datasets", "numpy", "regex", "sentencepiece", "tokenizers", "transformers")


def check_output_folder(folder: str, settings: dict[str, Any], overwrite: bool) -> None:
    """Refuse a folder with a tokenizer that was made with other settings, unless it may be overwritten.

    Raises:
        InputError: names the settings that differ.
    """
    files = open_folder(folder).list_files()
    if overwrite or not {RECORD_FILE, TOKENIZER_FILE} & set(files):
        return
    cure = "Give another --output-dir, or --overwrite."
    if RECORD_FILE not in files:
        raise InputError(f"--output-dir {folder} holds a {TOKENIZER_FILE} without a {RECORD_FILE}. {cure}")
    recorded = _leaves(json.loads(open_folder(folder).read_text(RECORD_FILE)))
    wanted = _leaves(json.loads(json.dumps(settings)))
    differing = [
        f"{name} {recorded.get(name)!r:.80}, not {value!r:.80}"
        for name, value in wanted.items()
        if recorded.get(name) != value
    ]
    if differing:
        raise InputError(f"--output-dir {folder} holds a tokenizer made with {'; '.join(differing)}. {cure}")
    logger.info("%s holds a tokenizer made with the same settings; it will be made again.", folder)


def save_with_record(
    tokenizer: "PreTrainedTokenizerFast",
    folder: str,
    settings: dict[str, Any],
    report: dict[str, Any],
    picture: bytes,
) -> None:
    """Publish the tokenizer, its report and picture, and last the record: settings, its hash, the packages' versions.

    Raises:
        InputError: the folder cannot be written to.
    """
    versions = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    record = settings | {"tokenizer_sha256": tokenizer_sha256(tokenizer), "versions": versions}
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as built:
        save_tokenizer(tokenizer, built)
        files = open_folder(built)
        files.write_text(REPORT_FILE, _as_json(report))
        files.write_bytes(PICTURE_FILE, picture)
        files.write_text(RECORD_FILE, _as_json(record))
        open_folder(folder).publish(built, last=RECORD_FILE)
    logger.info("Saved the tokenizer in %s.", folder)


def _as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def _leaves(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings, under their dotted names."""
    leaves: dict[str, Any] = {}
    for name, value in record.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves
