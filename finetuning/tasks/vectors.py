"""Vectors of a corpus in a folder, as .npy files of float16, and the search among them.

`vectors.json` is written first and says which model and texts the folder belongs to. Each file is written whole, and
its vectors depend on its texts alone: an interrupted command continues with the first file that is missing.
"""

import functools
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.embedding import EmbeddingOptimization
from finetuning.config.prediction import SearchConfig
from finetuning.config.settings import ExamplesConfig
from finetuning.data.examples import read_table, texts_of
from finetuning.data.inputs import run_on_rows
from finetuning.loop.model import ReadModel
from finetuning.tasks.embedding import VECTOR, Embedding, Encoder
from finetuning.tasks.retrieval import search
from mlm_common.cli.console import progress_bar
from mlm_common.errors import InputError
from mlm_common.storage import Folder, check_folder_or_hub, local_or_hub, open_folder
from mlm_common.storage.reading import find_stored_files
from mlm_common.tokenizer import load_tokenizer, tokenizer_sha256
from train.model.architectures import check_architecture
from train.model.pretrained_files import find_file, find_weights, read_config
from train.runtime.run_folder import exported_model

RECORD, VECTORS = "vectors.json", "vectors-"
TITLE, TEXT = "title", "text"
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
POOLINGS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}


@dataclass(frozen=True)
class TextEncoder(ReadModel):
    """A model that embeds texts, opened.

    sha256: of all that decides what the vector of a passage is.
    """

    task: Embedding
    network: Any
    sha256: str

    @classmethod
    def open(cls, name: str) -> "TextEncoder":
        """Open the export of a run, or a model of sentence-transformers with mean or first-token pooling.

        Raises:
            InputError: there is no such model, or it has modules that are not supported.
            HubAwayError: the Hub cannot be reached.
        """
        check_folder_or_hub(name, "--model")
        with local_or_hub(exported_model(name)) as folder:
            model = ReadModel(read_config(folder), load_tokenizer(folder))
            check_architecture(model.model_config)
            encoder = read_encoder(folder, name, model.model_config.hidden_size)
            task = Embedding(encoder, 1, EmbeddingOptimization(), **model.of_rows)
            from train.model.from_pretrained import load_model  # TensorFlow, not for bad input

            network = load_model(folder, task.model_class, adapt_network=task.adapt_network)
            digest = hashlib.sha256(Path(find_weights(folder).path).read_bytes())
        more = (tokenizer_sha256(model.tokenizer), encoder.pooling, encoder.prompts[1], encoder.max_length)
        digest.update(json.dumps(more).encode())
        return cls(model.model_config, model.tokenizer, task, network, digest.hexdigest())

    @functools.cached_property
    def _step(self) -> Any:
        import tensorflow as tf

        return tf.function(functools.partial(self.task.predicted, self.network), autograph=False)

    def encode(self, texts: Sequence[str], prompt: str, batch_rows: int) -> NDArray[np.float32]:
        """Compute the vectors of texts after a prompt, of length 1, (texts, width)."""
        length = self.task.encoder.max_length
        rows = self.encode_texts(([prompt + text for text in texts],), length)
        lengths = ExamplesConfig(max_seq_length=length).lengths
        kept = run_on_rows(self._step, rows, self.task.predicted_features(length), lengths, batch_rows)
        vectors: NDArray[np.float32] = self.task.in_order(kept, VECTOR)
        return vectors


def read_encoder(folder: str, name: str, width: int) -> Encoder:
    """Read how texts become vectors from the files that sentence-transformers reads; `name` is for errors."""

    def read(file: str) -> Any:
        path = find_file(folder, file)
        return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))

    modules = [one["type"].rpartition(".")[2] for one in read("modules.json")]
    if not modules:
        raise InputError(f"--model: {name} does not embed texts. Train it with finetuning/run_embedding.py first.")
    pooling, dense = read("1_Pooling/config.json"), read("2_Dense/config.json") if "Dense" in modules else {}
    modes = {key.removeprefix("pooling_mode_") for key, value in pooling.items() if value is True and "mode" in key}
    modes |= {pooling["pooling_mode"]} if "pooling_mode" in pooling else set()
    is_known = [kind for kind in MODULES if kind in modules] == modules and len(modes) == 1 and modes <= set(POOLINGS)
    if not is_known or not dense.get("activation_function", "Identity").endswith("Identity"):
        raise InputError(
            f"--model: {name} must have mean or first-token pooling, then at most a linear layer; it has "
            f"{', '.join(modules)} with {', '.join(sorted(modes)) or 'no'} pooling."
        )
    prompts = read("config_sentence_transformers.json").get("prompts") or {}
    passage = prompts.get("document") or prompts.get("passage") or ""
    length = read("sentence_bert_config.json").get("max_seq_length") or 512
    return Encoder(
        POOLINGS[modes.pop()], width, dense.get("out_features"), (prompts.get("query") or "", passage), length
    )


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
        prompt = self.encoder.task.encoder.prompts[0]
        queries = self.encoder.encode(questions, prompt, min(self.batch_rows, len(questions)))
        best, _ = search(queries, self.vectors, top_k)
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
    texts = read_corpus(config.corpus, config.text_column_names, config.delimiter)
    encoder = TextEncoder.open(config.model)
    corpus = hashlib.sha256(b"".join(hashlib.sha256(text.encode()).digest() for text in texts)).hexdigest()
    folder = open_folder(config.folder)
    record = {"model": encoder.sha256, "corpus": corpus, "--shard-rows": config.shard_rows}
    found = json.loads(folder.read_text(RECORD)) if folder.exists(RECORD) else {}
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


def embed(folder: Folder, encoder: TextEncoder, texts: Sequence[str], config: SearchConfig) -> NDArray[np.float16]:
    """Read the vectors of all texts; compute and write the files that are missing."""
    existing, read = folder.list_files(), []
    with progress_bar("Embedding the texts", "text", len(texts)) as bar:
        for number, start in enumerate(range(0, len(texts), config.shard_rows)):
            name, part = f"{VECTORS}{number:05d}.npy", texts[start : start + config.shard_rows]
            if name not in existing:
                vectors = encoder.encode(part, encoder.task.encoder.prompts[1], config.per_replica_batch_size)
                content = io.BytesIO()
                np.save(content, vectors.astype(np.float16))
                folder.write_bytes(name, content.getvalue())
            try:
                read.append(np.load(io.BytesIO(folder.read_bytes(name))).reshape(len(part), -1))
            except (ValueError, EOFError) as error:
                raise InputError(f"{folder.path_of(name)} is damaged. Delete it, and run the command again.") from error
            bar.update(len(part))
    return np.concatenate(read)
