"""Embed the texts of a corpus as float32 vectors, store them in .npy files in a folder, and search them.

`vectors.json` is written first, and identifies the model and the texts. Each vector file is written atomically, and its
vectors depend only on its texts. So an interrupted command continues with the first missing file.
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
from train import load_tensorflow
from train.model.architectures import check_architecture, learns_positions, max_positions
from train.model.pretrained_files import find_weights, read_config
from train.runtime.run_folder import exported_model

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger(__name__)

RECORD, VECTORS = "vectors.json", "vectors-"
TITLE, TEXT = "title", "text"
# Maximum number of tokens per text, if neither the model nor the tokenizer has a limit.
DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class TextEncoder(ReadModel):
    """A loaded model that embeds texts.

    Attributes:
        model: settings of the model in sentence-transformers' format.
        max_length: maximum number of tokens per text; longer texts are cut.
        task: computes the network's inputs.
        network: the transformer.
        sha256: digest of everything that determines the vector of a passage.
    """

    model: SentenceModel
    max_length: int
    task: Embedding
    network: Any
    sha256: str

    @classmethod
    def open(cls, name: str) -> "TextEncoder":
        """Load the export of a run, or a model of sentence-transformers.

        Args:
            name: folder of the run, of its export or of the model, or a Hub id.

        Raises:
            InputError: the model does not exist, or it has modules or settings that are not supported.
            HubAwayError: the Hub cannot be reached.
        """
        check_folder_or_hub(name, "--model")
        with local_or_hub(exported_model(name)) as folder:
            model = read_sentence_model(folder, name)
            if model.transformer:
                require(
                    Path(folder).is_dir(),
                    "must be downloaded first, because its transformer is in a subfolder",
                    "--model",
                    name,
                )
                folder = str(Path(folder, model.transformer))
            transformer = ReadModel(read_config(folder), load_tokenizer(folder))
            check_architecture(transformer.model_config)
            model.check_widths(transformer.model_config.hidden_size, name)
            max_length = _max_length(folder, model, transformer)
            tokenizer_digest = tokenizer_sha256(transformer.tokenizer)
            if model.is_lower:
                _add_lower_casing(transformer.tokenizer)
            plain = Encoder("mean", transformer.model_config.hidden_size, None, model.prompts, max_length)
            task = Embedding(plain, 1, EmbeddingOptimization(), **transformer.task_arguments)
            load_tensorflow()  # only after the input is checked
            from train.model.from_pretrained import load_model

            network = load_model(folder, task.model_class)
            digest = hashlib.sha256(Path(find_weights(folder).path).read_bytes())
        digest.update(json.dumps([tokenizer_digest, max_length, model.identity]).encode())
        config, tokenizer = transformer.model_config, transformer.tokenizer
        return cls(config, tokenizer, model, max_length, task, network, digest.hexdigest())

    @functools.cached_property
    def _step(self) -> Any:
        import tensorflow as tf

        def vectors(rows: dict[str, "tf.Tensor"], prompt_length: "tf.Tensor") -> dict[str, "tf.Tensor"]:
            states = self.network(self.task.network_inputs(rows), training=False).last_hidden_state
            return {VECTOR: self.model.vectors(states, rows[ATTENTION_MASK], prompt_length), INDEX: rows[INDEX]}

        return tf.function(vectors, autograph=False)

    def encode(self, texts: Sequence[str], prompt: str, batch_rows: int) -> NDArray[np.float32]:
        """Compute the vectors of texts as sentence-transformers does, (texts, width).

        Args:
            texts: texts to embed.
            prompt: text to prepend to each text.
            batch_rows: texts per batch.
        """
        rows = self.encode_texts(([prompt + text for text in texts],), self.max_length)
        lengths = ExamplesConfig(max_seq_length=self.max_length).lengths
        step = functools.partial(self._step, prompt_length=self._prompt_length(prompt))
        outputs = run_on_rows(step, rows, self.task.prediction_features(self.max_length), lengths, batch_rows)
        vectors: NDArray[np.float32] = self.task.in_order(outputs, VECTOR)
        return vectors

    def _prompt_length(self, prompt: str) -> Any:
        """Count the tokens of a prompt that are not pooled.

        Like sentence-transformers, count all special tokens, except for the last token if it is special.
        """
        import tensorflow as tf

        length = 0
        if prompt and not self.model.includes_prompt:
            ids = self.tokenizer(prompt, truncation=True, max_length=self.max_length)[INPUT_IDS]
            length = len(ids) - (ids[-1] in self.tokenizer.all_special_ids)
        return tf.constant(length)


def _max_length(folder: str, model: SentenceModel, transformer: ReadModel) -> int:
    """Return the maximum number of tokens per text from the model's settings, or else from the tokenizer's settings.

    The number is never more than the network can take.
    """
    config = transformer.model_config
    limits = [max_positions(config) if learns_positions(config) else None, model.max_length]
    if model.max_length is None:
        tokenizer_settings = read_json(folder, "tokenizer_config.json") or {}
        limits += [tokenizer_settings.get("model_max_length"), getattr(config, "max_position_embeddings", None)]
    return min((int(limit) for limit in limits if limit is not None and limit > 0), default=DEFAULT_LENGTH)


def _add_lower_casing(tokenizer: Any) -> None:
    """Make a tokenizer convert texts to lower case before all other steps."""
    from tokenizers import normalizers

    tokenizer = tokenizer.backend_tokenizer
    others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def read_corpus(pattern: str, columns: Sequence[str], delimiter: str | None = None) -> list[str]:
    """Read the texts of all matching files.

    Args:
        pattern: path or glob of the files.
        columns: columns with the text; several columns are joined with a space. If no columns are given, the columns
            are `title` and `text`, or `text`, or the only column of text.
        delimiter: delimiter of .csv files; None to detect it.

    Raises:
        InputError: a file or a column does not exist, a file has no rows, or a value is not text.
    """
    texts: list[str] = []
    for path in [file.name for file in find_stored_files(pattern)] or [pattern]:
        table = read_table(path, "--corpus", delimiter=delimiter)
        names = list(columns) or [name for name in (TITLE, TEXT) if TEXT in table.columns and name in table.columns]
        if not names:
            names = [name for name, values in table.columns.items() if isinstance(values[0], str)]
            if len(names) != 1:
                raise InputError(
                    f"--text-column-names must name the column of {path} with the text, because there is no column "
                    f"text; it has {', '.join(table.columns)}."
                )
        if not columns and names[0] == TITLE:  # titles may be missing, as in BeIR's corpora
            titles = [title or "" for title in table.columns[TITLE]]
            table = Table(table.name, {**table.columns, TITLE: titles})
        texts += [" ".join(filter(None, row)) for row in zip(*texts_of(table, names), strict=True)]
    return texts


@dataclass(frozen=True)
class TextSearch:
    """Texts to search, and their vectors.

    Attributes:
        encoder: the model.
        texts: texts to search.
        vectors: the vectors of the texts, float32 (texts, width).
        batch_rows: questions per batch.
    """

    encoder: TextEncoder
    texts: Sequence[str]
    vectors: NDArray[np.float32]
    batch_rows: int

    def find(self, questions: Sequence[str], top_k: int = 10) -> list[list[tuple[str, float]]]:
        """Find the texts that are most similar to each question.

        Returns:
            For each question, up to `top_k` texts with their cosine or dot product, the most similar text first.
        """
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
        """The vectors whose dot product with a question's vector is the similarity of text and question."""
        return _unit(self.vectors) if self.encoder.model.similarity == COSINE else self.vectors


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12, dtype=np.float32)


def open_search(config: SearchConfig) -> TextSearch:
    """Read the texts, load the model, and embed the texts whose vectors are not in the folder yet.

    Raises:
        InputError: the model, a file or a column does not exist, or the folder has vectors of another model or of other
            texts.
        HubAwayError: the Hub cannot be reached.
    """
    texts = read_corpus(config.corpus, config.text_column_names, config.delimiter)
    encoder = TextEncoder.open(config.model)
    corpus = hashlib.sha256(b"".join(hashlib.sha256(text.encode()).digest() for text in texts)).hexdigest()
    folder = open_folder(config.folder)
    record = {"model": encoder.sha256, "corpus": corpus, "--shard-rows": config.shard_rows}
    existing: Any = {}
    if folder.exists(RECORD):
        with guarded_read(folder.path_of(RECORD), "a JSON file", hint="Delete it, and run the command again."):
            existing = dict(json.loads(folder.read_text(RECORD)))
    if existing and existing != record and not config.overwrite:
        others = " and another ".join(name for name in record if existing.get(name) != record[name])
        raise InputError(
            f"{folder} has the vectors of another {others}. Use another --vectors-dir, or replace them with "
            "--overwrite."
        )
    if existing != record:
        folder.check_writable()
        folder.delete_files([name for name in folder.list_files() if name.startswith(VECTORS)])
        folder.write_json(RECORD, record)
    return TextSearch(encoder, texts, embed(folder, encoder, texts, config), config.per_replica_batch_size)


def embed(folder: Folder, encoder: TextEncoder, texts: Sequence[str], config: SearchConfig) -> NDArray[np.float32]:
    """Return the vectors of all texts, (texts, width). Missing files are computed and written."""
    texts_by_file = {
        f"{VECTORS}{number:05d}.npy": texts[start : start + config.shard_rows]
        for number, start in enumerate(range(0, len(texts), config.shard_rows))
    }
    existing = folder.list_files()
    missing = {name: file_texts for name, file_texts in texts_by_file.items() if name not in existing}
    vectors: dict[str, NDArray[np.float32]] = {}
    for name, file_texts in texts_by_file.items():
        if name not in missing:
            try:
                vectors[name] = np.load(io.BytesIO(folder.read_bytes(name))).reshape(len(file_texts), -1)
            except (ValueError, EOFError) as error:
                raise InputError(f"{folder.path_of(name)} is damaged. Delete it, and run the command again.") from error
    if vectors:
        logger.info("%s vectors read from %s", f"{sum(map(len, vectors.values())):,}", folder)
    if missing:
        with progress_bar("Embedding the texts", "text", sum(map(len, missing.values()))) as bar:
            for name, file_texts in missing.items():
                vectors[name] = encoder.encode(file_texts, encoder.model.prompts[1], config.per_replica_batch_size)
                content = io.BytesIO()
                np.save(content, vectors[name])
                folder.write_bytes(name, content.getvalue())
                bar.update(len(file_texts))
    return np.concatenate([vectors[name] for name in texts_by_file])
