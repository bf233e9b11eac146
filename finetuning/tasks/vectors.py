"""Vectors of a corpus in a folder, as .npy files of float16, and the search among them.

`vectors.json` is written first and says which model and texts the folder belongs to. Each file is written whole, and
its vectors depend on its texts alone: an interrupted command continues with the first file that is missing.
"""

import functools
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.embedding import EmbeddingOptimization
from finetuning.config.search import SearchConfig
from finetuning.config.settings import ExamplesConfig
from finetuning.data import buckets
from finetuning.data.examples import texts_of
from finetuning.data.inputs import batches_of_rows
from finetuning.data.tables import read_table
from finetuning.loop.model import ReadModel
from finetuning.tasks.embedding import VECTOR, Embedding, Encoder
from finetuning.tasks.retrieval import rank
from mlm_common.cli.console import progress_bar
from mlm_common.cli.local_paths import check_folder_or_hub
from mlm_common.cli.settings import describe_differences, require
from mlm_common.errors import InputError
from mlm_common.storage import Folder, local_or_hub, open_folder
from mlm_common.storage.reading import find_stored_files
from mlm_common.tokenizer import load_tokenizer, tokenizer_sha256
from train.model.architectures import check_architecture, max_positions
from train.model.pretrained_files import find_file, find_weights, read_config
from train.runtime.run_folder import exported_model

RECORD, SHARD = "vectors.json", "vectors-{:05d}.npy"
TITLE, TEXT = "title", "text"
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True)
class TextEncoder(ReadModel):
    """A model that embeds texts, opened.

    identity: of the weights, the tokenizer and the settings that decide what a vector is.
    """

    task: Embedding
    network: Any
    identity: dict[str, Any]

    @classmethod
    def open(cls, name: str, max_seq_length: int | None) -> "TextEncoder":
        """Open the export of a run, or a model of sentence-transformers with mean or first-token pooling.

        Raises:
            InputError: there is no such model, or it has modules that are not supported.
            HubAwayError: the Hub cannot be reached.
        """
        from train.model.from_pretrained import load_model

        check_folder_or_hub(name, "--model")
        with local_or_hub(exported_model(name)) as folder:
            model_config = read_config(folder)
            check_architecture(model_config)
            tokenizer = load_tokenizer(folder)
            encoder = read_encoder(folder, name, model_config.hidden_size, max_seq_length)
            longest = max_positions(model_config) or encoder.max_length
            require(encoder.max_length <= longest, f"must be at most {longest}", "--max-seq-length", encoder.max_length)
            model = ReadModel(model_config, tokenizer)
            task = Embedding(encoder, 1, EmbeddingOptimization(), **model.of_rows)
            network = load_model(folder, task.model_class, adapt_network=task.adapt_network)
            sha256 = hashlib.sha256(Path(find_weights(folder).path).read_bytes()).hexdigest()
        identity = {
            "weights_sha256": sha256,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "pooling": encoder.pooling,
            "prompt": encoder.prompts[1],
            "max_seq_length": encoder.max_length,
        }
        return cls(model_config, tokenizer, task, network, identity)

    @functools.cached_property
    def _step(self) -> Any:
        import tensorflow as tf

        return tf.function(functools.partial(self.task.predicted, self.network), autograph=False)

    def encode(self, texts: Sequence[str], prompt: str, batch_rows: int) -> NDArray[np.float32]:
        """Compute the vectors of texts after a prompt, of length 1, (texts, width)."""
        import tensorflow as tf

        length, nothing = self.task.encoder.max_length, np.zeros(len(texts), np.int32)
        rows = self.encode_texts(([prompt + text for text in texts],), length, nothing)
        lengths = ExamplesConfig(max_seq_length=length).lengths
        batches = buckets.evaluation_batches(rows.lengths, lengths, batch_rows=batch_rows)
        features = self.task.predicted_features(length)
        kept = [self._step(batch) for batch in batches_of_rows(rows, batches, features, tf.distribute.InputContext())]
        joined = {name: np.concatenate([one[name].numpy() for one in kept]) for name in kept[0]}
        vectors: NDArray[np.float32] = self.task.in_order(joined, VECTOR)
        return vectors


def read_encoder(folder: str, name: str, width: int, max_seq_length: int | None) -> Encoder:
    """Read how texts become vectors from the files that sentence-transformers reads; `name` is for errors."""

    def read(file: str) -> Any:
        path = find_file(folder, file)
        return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))

    listed = [(one["type"].rpartition(".")[2], one["path"]) for one in read("modules.json")]
    if not listed:
        raise InputError(f"--model: {name} does not embed texts. Train it with finetuning/run_embedding.py first.")
    paths = dict(listed)
    pooling, dense = (read(f"{paths[kind]}/config.json") if kind in paths else {} for kind in ("Pooling", "Dense"))
    modes = {key.removeprefix("pooling_mode_") for key, value in pooling.items() if value is True and "mode" in key}
    modes |= {pooling["pooling_mode"]} if "pooling_mode" in pooling else set()
    is_known = [kind for kind in MODULES if kind in paths] == [kind for kind, _ in listed]
    is_linear = dense.get("activation_function", "Identity").endswith("Identity")
    if not is_known or not modes <= {"cls", "cls_token", "mean", "mean_tokens"} or len(modes) != 1 or not is_linear:
        raise InputError(
            f"--model: {name} must have mean or first-token pooling, then at most a linear layer; it has "
            f"{', '.join(kind for kind, _ in listed)} with {', '.join(sorted(modes)) or 'no'} pooling."
        )
    prompts = read("config_sentence_transformers.json").get("prompts") or {}
    passage = next((prompts[key] for key in ("document", "passage") if prompts.get(key)), "")
    return Encoder(
        modes.pop().removesuffix("_token").removesuffix("_tokens"),
        width,
        dense.get("out_features"),
        (prompts.get("query") or "", passage),
        max_seq_length or read("sentence_bert_config.json").get("max_seq_length") or 512,
    )


def read_corpus(pattern: str, columns: Sequence[str]) -> list[str]:
    """Read the texts of all files that match, those of several columns joined by a space.

    Raises:
        InputError: there is no such file or column, a file has no rows, or a value is no text.
    """
    texts: list[str] = []
    for path in [file.name for file in find_stored_files(pattern)] or [pattern]:
        table = read_table(path, "--corpus")
        names = list(columns) or [name for name in (TITLE, TEXT) if TEXT in table.columns and name in table.columns]
        if not names:
            names = [name for name, values in table.columns.items() if isinstance(values[0], str)]
            if len(names) != 1:
                raise InputError(
                    f"--text-column-names must name the text of {path}, which has no column text; it has "
                    f"{', '.join(table.columns)}."
                )
        texts += [" ".join(filter(None, row)) for row in zip(*texts_of(table, names), strict=True)]
    return texts


@dataclass(frozen=True)
class TextSearch:
    """Texts, their vectors, and the model that made them.

    vectors: float16 (texts, width), of length 1.
    """

    encoder: TextEncoder
    texts: Sequence[str]
    vectors: NDArray[np.float16]
    batch_rows: int

    def find(self, questions: Sequence[str], top_k: int = 10) -> list[list[tuple[str, float]]]:
        """Find the texts with the highest cosines for each question, with these, the best first."""
        import tensorflow as tf

        prompt = self.encoder.task.encoder.prompts[0]
        queries = self.encoder.encode(questions, prompt, min(self.batch_rows, len(questions)))

        def compare(block: slice) -> Callable[[slice], tf.Tensor]:
            among = tf.cast(self.vectors[block], tf.float32)
            return lambda rows: tf.matmul(queries[rows], among, transpose_b=True)

        best, _ = rank(compare, len(queries), len(self.texts), top_k)
        cosines = np.einsum("qw,qkw->qk", queries, self.vectors[best].astype(np.float32))
        return [
            [(self.texts[text], cosine) for text, cosine in zip(*row, strict=True)]
            for row in zip(best.tolist(), cosines.tolist(), strict=True)
        ]


def open_search(config: SearchConfig) -> TextSearch:
    """Read the texts, open the model, and embed what is not in the folder yet.

    Raises:
        InputError: there is no such model, file or column, or the folder has vectors of others.
        HubAwayError: the Hub cannot be reached.
    """
    texts = read_corpus(config.corpus, config.text_column_names)
    folder = open_folder(config.folder)
    encoder = TextEncoder.open(config.model, config.max_seq_length)
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    corpus = {"texts_sha256": digest.hexdigest(), "num_texts": len(texts)}
    check_identity(folder, {"model": encoder.identity, "corpus": corpus, "shard_rows": config.shard_rows}, config)
    return TextSearch(encoder, texts, embed(folder, encoder, texts, config), config.per_replica_batch_size)


def check_identity(folder: Folder, record: dict[str, Any], config: SearchConfig) -> None:
    """Check that the folder has vectors of this model and these texts, or write that it will have."""
    try:
        found = json.loads(folder.read_text(RECORD))
    except (FileNotFoundError, ValueError) as error:
        if any(name.endswith(".npy") for name in folder.list_files()):
            rule = f"{folder} has .npy files, but no readable {RECORD}"
            raise InputError(f"{rule}. Delete them, or name another --vectors-dir.") from error
        found = {}
    if found == record:
        return
    if found and not config.overwrite:
        parts = {"model": "another model", "corpus": "other texts", "shard_rows": "another --shard-rows"}
        others = " and ".join(words for name, words in parts.items() if found.get(name) != record[name])
        raise InputError(
            f"{folder} has the vectors of {others} ({describe_differences(found, record)}). Name another "
            "--vectors-dir, or replace them with --overwrite."
        )
    folder.delete_files([name for name in folder.list_files() if name.endswith(".npy")])
    folder.check_writable()
    folder.write_json(RECORD, record)


def embed(folder: Folder, encoder: TextEncoder, texts: Sequence[str], config: SearchConfig) -> NDArray[np.float16]:
    """Read the vectors of all texts; compute and write the files that are missing."""
    starts, there = range(0, len(texts), config.shard_rows), folder.list_files()
    parts = {SHARD.format(number): texts[start : start + config.shard_rows] for number, start in enumerate(starts)}
    missing = {name: part for name, part in parts.items() if name not in there}
    if missing:
        with progress_bar("Embedding the texts", "text", sum(map(len, missing.values()))) as bar:
            for name, part in missing.items():
                vectors = encoder.encode(part, encoder.task.encoder.prompts[1], config.per_replica_batch_size)
                content = io.BytesIO()
                np.save(content, vectors.astype(np.float16))
                folder.write_bytes(name, content.getvalue())
                bar.update(len(part))
    read = []
    for name, part in parts.items():
        try:
            read.append(np.load(io.BytesIO(folder.read_bytes(name))).reshape(len(part), -1))
        except (ValueError, EOFError) as error:
            raise InputError(f"{folder.path_of(name)} is damaged. Delete it, and run the command again.") from error
    return np.concatenate(read)
