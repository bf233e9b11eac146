"""Vectors of a corpus in a folder, as .npy files of float32, and the search among them.

`vectors.json` is written first and says which model and texts the folder belongs to. Each file is written whole, and
its vectors depend on its texts alone: an interrupted command continues with the first file that is missing.
"""

import functools
import hashlib
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.embedding import EmbeddingOptimization
from finetuning.config.prediction import SearchConfig
from finetuning.config.settings import ExamplesConfig
from finetuning.data.examples import Table, read_table, texts_of
from finetuning.data.inputs import ATTENTION_MASK, INDEX, INPUT_IDS, run_on_rows
from finetuning.loop.model import ReadModel
from finetuning.tasks.embedding import VECTOR, Embedding, Encoder
from finetuning.tasks.retrieval import search
from finetuning.tasks.sentence_transformer import COSINE, SentenceModel, read_json, read_sentence_model
from mlm_common.cli.console import progress_bar
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.storage import Folder, check_folder_or_hub, local_or_hub, open_folder
from mlm_common.storage.guard import guarded_read
from mlm_common.storage.reading import find_stored_files
from mlm_common.tokenizer import load_tokenizer, tokenizer_sha256
from train.model.architectures import check_architecture, learns_positions, max_positions
from train.model.pretrained_files import find_weights, read_config
from train.runtime.run_folder import exported_model

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger(__name__)

RECORD, VECTORS = "vectors.json", "vectors-"
TITLE, TEXT = "title", "text"
# Tokens of the longest text, where neither model nor tokenizer has a limit.
DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class TextEncoder(ReadModel):
    """A model that embeds texts, opened.

    max_length: tokens of the longest text.
    sha256: of all that decides what the vector of a passage is.
    """

    model: SentenceModel
    max_length: int
    task: Embedding
    network: Any
    sha256: str

    @classmethod
    def open(cls, name: str) -> "TextEncoder":
        """Open the export of a run, or a model of sentence-transformers.

        Raises:
            InputError: there is no such model, or it has modules or settings that are not supported.
            HubAwayError: the Hub cannot be reached.
        """
        check_folder_or_hub(name, "--model")
        with local_or_hub(exported_model(name)) as folder:
            model = read_sentence_model(folder, name)
            if model.transformer:
                require(
                    Path(folder).is_dir(),
                    "must be downloaded first, as its transformer is in a folder",
                    "--model",
                    name,
                )
                folder = str(Path(folder, model.transformer))
            read = ReadModel(read_config(folder), load_tokenizer(folder))
            check_architecture(read.model_config)
            model.check_widths(read.model_config.hidden_size, name)
            max_length = _max_length(folder, model, read)
            tokenizer_digest = tokenizer_sha256(read.tokenizer)
            if model.is_lower:
                _put_into_lower_case(read.tokenizer)
            plain = Encoder("mean", read.model_config.hidden_size, None, model.prompts, max_length)
            task = Embedding(plain, 1, EmbeddingOptimization(), **read.of_rows)
            from train.model.from_pretrained import load_model  # TensorFlow, not for bad input

            network = load_model(folder, task.model_class)
            digest = hashlib.sha256(Path(find_weights(folder).path).read_bytes())
        digest.update(json.dumps([tokenizer_digest, max_length, model.identity]).encode())
        return cls(read.model_config, read.tokenizer, model, max_length, task, network, digest.hexdigest())

    @functools.cached_property
    def _step(self) -> Any:
        import tensorflow as tf

        def vectors(rows: dict[str, "tf.Tensor"], prompt_length: "tf.Tensor") -> dict[str, "tf.Tensor"]:
            states = self.network(self.task.network_inputs(rows), training=False).last_hidden_state
            return {VECTOR: self.model.vectors(states, rows[ATTENTION_MASK], prompt_length), INDEX: rows[INDEX]}

        return tf.function(vectors, autograph=False)

    def encode(self, texts: Sequence[str], prompt: str, batch_rows: int) -> NDArray[np.float32]:
        """Compute the vectors of texts after a prompt as sentence-transformers does, (texts, width)."""
        rows = self.encode_texts(([prompt + text for text in texts],), self.max_length)
        lengths = ExamplesConfig(max_seq_length=self.max_length).lengths
        step = functools.partial(self._step, prompt_length=self._prompt_length(prompt))
        kept = run_on_rows(step, rows, self.task.predicted_features(self.max_length), lengths, batch_rows)
        vectors: NDArray[np.float32] = self.task.in_order(kept, VECTOR)
        return vectors

    def _prompt_length(self, prompt: str) -> Any:
        """Count the tokens of a prompt as sentence-transformers does: with all special tokens but one at the end."""
        import tensorflow as tf

        length = 0
        if prompt and not self.model.includes_prompt:
            ids = self.tokenizer(prompt, truncation=True, max_length=self.max_length)[INPUT_IDS]
            length = len(ids) - (ids[-1] in self.tokenizer.all_special_ids)
        return tf.constant(length)


def _max_length(folder: str, model: SentenceModel, read: ReadModel) -> int:
    """Return the length that the model's settings, else its tokenizer's, give, as far as the network can take it."""
    config = read.model_config
    limits = [max_positions(config) if learns_positions(config) else None, model.max_length]
    if model.max_length is None:
        of_tokenizer = read_json(folder, "tokenizer_config.json") or {}
        limits += [of_tokenizer.get("model_max_length"), getattr(config, "max_position_embeddings", None)]
    return min((int(one) for one in limits if one is not None and one > 0), default=DEFAULT_LENGTH)


def _put_into_lower_case(tokenizer: Any) -> None:
    from tokenizers import normalizers

    tokenizer = tokenizer.backend_tokenizer
    others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def read_corpus(pattern: str, columns: Sequence[str], delimiter: str | None = None) -> list[str]:
    """Read the texts of all files that match, those of several columns joined by a space.

    Raises:
        InputError: there is no such file or column, a file has no rows, or a value is no text.
    """
    texts: list[str] = []
    for path in [file.name for file in find_stored_files(pattern)] or [pattern]:
        table = read_table(path, "--corpus", delimiter=delimiter)
        names = list(columns) or [name for name in (TITLE, TEXT) if TEXT in table.columns and name in table.columns]
        if not names:
            names = [name for name, values in table.columns.items() if isinstance(values[0], str)]
            if len(names) != 1:
                raise InputError(
                    f"--text-column-names must name the text of {path}, which has no column text; it has "
                    f"{', '.join(table.columns)}."
                )
        if not columns and names[0] == TITLE:  # which a text may lack, as in BeIR's corpora
            titles = [title or "" for title in table.columns[TITLE]]
            table = Table(table.name, {**table.columns, TITLE: titles})
        texts += [" ".join(filter(None, row)) for row in zip(*texts_of(table, names), strict=True)]
    return texts


@dataclass(frozen=True)
class TextSearch:
    """Texts, their vectors, and the model that made them.

    vectors: float32 (texts, width), as the model makes them.
    """

    encoder: TextEncoder
    texts: Sequence[str]
    vectors: NDArray[np.float32]
    batch_rows: int

    def find(self, questions: Sequence[str], top_k: int = 10) -> list[list[tuple[str, float]]]:
        """Find the texts that are most similar to each question, with cosines or dot products, the best first."""
        if not questions:
            return []
        prompt = self.encoder.model.prompts[0]
        queries = self.encoder.encode(questions, prompt, min(self.batch_rows, len(questions)))
        passages = self._compared
        if self.encoder.model.similarity == COSINE:
            queries = _unit(queries)
        best, _ = search(queries, passages, top_k)
        similarities = np.einsum("qw,qkw->qk", queries, passages[best])
        return [
            [(self.texts[text], similarity) for text, similarity in zip(*row, strict=True)]
            for row in zip(best.tolist(), similarities.tolist(), strict=True)
        ]

    @functools.cached_property
    def _compared(self) -> NDArray[np.float32]:
        return _unit(self.vectors) if self.encoder.model.similarity == COSINE else self.vectors


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12, dtype=np.float32)


def open_search(config: SearchConfig) -> TextSearch:
    """Read the texts, open the model, and embed what is not in the folder yet.

    Raises:
        InputError: there is no such model, file or column, or the folder has vectors of others.
        HubAwayError: the Hub cannot be reached.
    """
    texts = read_corpus(config.corpus, config.text_column_names, config.delimiter)
    encoder = TextEncoder.open(config.model)
    corpus = hashlib.sha256(b"".join(hashlib.sha256(text.encode()).digest() for text in texts)).hexdigest()
    folder = open_folder(config.folder)
    record = {"model": encoder.sha256, "corpus": corpus, "--shard-rows": config.shard_rows}
    found: Any = {}
    if folder.exists(RECORD):
        with guarded_read(folder.path_of(RECORD), "a JSON file", hint="Delete it, and run the command again."):
            found = dict(json.loads(folder.read_text(RECORD)))
    if found and found != record and not config.overwrite:
        others = " and another ".join(name for name in record if found.get(name) != record[name])
        raise InputError(
            f"{folder} has the vectors of another {others}. Use another --vectors-dir, or replace them by --overwrite."
        )
    if found != record:
        folder.check_writable()
        folder.delete_files([name for name in folder.list_files() if name.startswith(VECTORS)])
        folder.write_json(RECORD, record)
    return TextSearch(encoder, texts, embed(folder, encoder, texts, config), config.per_replica_batch_size)


def embed(folder: Folder, encoder: TextEncoder, texts: Sequence[str], config: SearchConfig) -> NDArray[np.float32]:
    """Read the vectors of all texts; compute and write the files that are missing."""
    parts = {
        f"{VECTORS}{number:05d}.npy": texts[start : start + config.shard_rows]
        for number, start in enumerate(range(0, len(texts), config.shard_rows))
    }
    existing = folder.list_files()
    missing = {name: part for name, part in parts.items() if name not in existing}
    vectors: dict[str, NDArray[np.float32]] = {}
    for name, part in parts.items():
        if name not in missing:
            try:
                vectors[name] = np.load(io.BytesIO(folder.read_bytes(name))).reshape(len(part), -1)
            except (ValueError, EOFError) as error:
                raise InputError(f"{folder.path_of(name)} is damaged. Delete it, and run the command again.") from error
    if vectors:
        logger.info("%s vectors read from %s", f"{sum(map(len, vectors.values())):,}", folder)
    if missing:
        with progress_bar("Embedding the texts", "text", sum(map(len, missing.values()))) as bar:
            for name, part in missing.items():
                found = encoder.encode(part, encoder.model.prompts[1], config.per_replica_batch_size)
                content = io.BytesIO()
                np.save(content, found)
                folder.write_bytes(name, content.getvalue())
                vectors[name] = found
                bar.update(len(part))
    return np.concatenate([vectors[name] for name in parts])
