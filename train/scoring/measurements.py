"""What models answered, item by item, kept in a file: scoring that was killed continues with the next model."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from transformers.utils import SAFE_WEIGHTS_NAME

from mlm_common.storage import Folder
from train.config.learning import ModelConfig
from train.model.build import build_network
from train.model.from_pretrained import load_model
from train.model.pretrained_files import WEIGHTS_SUFFIXES, find_file, find_weights, read_config
from train.publishing.saved_model import transformers_folder
from train.scoring.answers import Answers, QueriedModel
from train.scoring.material import Material
from train.scoring.queries import Query, Questions, lengths_up_to, total_by_item
from train.tasks.masked_lm_head import gather_before_head

RANDOM_SEED = 0
NO_TOKEN = np.iinfo(np.int32).max


class Measured(NamedTuple):
    """What one model answered.

    sentences: float64 (sentences,), nats of each sentence of the pairs.
    words: float64 (words,), nats of the tokens of each word, masked one by one.
    ranks: int32 (words,), ids more probable than the right one, of the worst token of each word masked as a whole.
    """

    sentences: NDArray[np.float64]
    words: NDArray[np.float64]
    ranks: NDArray[np.int32]


class KeptAnswers:
    """Measurements in a file of JSON, by a hash of what was asked and of the weights; without a file only in memory."""

    def __init__(self, folder: Folder | None, name: str) -> None:
        self._folder, self._name = folder, name
        self._content: dict[str, dict[str, list[float]]] = {}
        if folder is not None and folder.exists(name):
            self._content = json.loads(folder.read_text(name))

    def get(self, key: str, measure: Callable[[], Measured]) -> Measured:
        """Look up what is kept under the key; if nothing is, measure and keep it."""
        if key not in self._content:
            self._content[key] = {part: values.tolist() for part, values in measure()._asdict().items()}
            if self._folder is not None:
                self._folder.write_bytes(self._name, json.dumps(self._content).encode())
        kept = self._content[key]
        return Measured(*(np.array(kept[part], dtype) for part, dtype in zip(Measured._fields, "ddi", strict=True)))


class Measurer:
    """Asks questions of models of one architecture, in one network: the programs are compiled once.

    weights_sha256: hash of the `model.safetensors` of each model that was measured; None where it has no such file.
    """

    def __init__(
        self, questions: Questions, material: Material, strategy: tf.distribute.Strategy, kept: KeptAnswers
    ) -> None:
        self._questions, self._material, self._strategy, self._kept = questions, material, strategy, kept
        self._model: QueriedModel | None = None
        self.weights_sha256: dict[str, str | None] = {}
        asked = (questions.max_length, questions.of_sentences, questions.of_tokens, questions.of_words)
        self._asked = json.dumps(asked).encode()

    def of_models(self) -> dict[str, Measured]:
        """Measure each model, {name: measured}."""
        measured = {}
        for name, path in self._questions.models.items():
            with transformers_folder(path) as folder:
                files = sorted(Path(find_weights(folder).path).parent.iterdir())
                hashes = {
                    file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                    for file in files
                    if file.suffix in WEIGHTS_SUFFIXES
                }
                self.weights_sha256[name] = hashes.get(SAFE_WEIGHTS_NAME)
                measured[name] = self._measure(folder, load_model, hashes.values())
        return measured

    def of_random_weights(self) -> Measured:
        """Measure the network as it would be before its training."""
        num_ids = len(self._questions.frequencies)
        with transformers_folder(next(iter(self._questions.models.values()))) as folder:
            build = functools.partial(
                build_network, read_config(folder), ModelConfig(), vocabulary_size=num_ids, seed=RANDOM_SEED
            )
            return self._measure(folder, lambda _: build(), ["random"])

    def _measure(self, folder: str, load: Callable[[str], Any], weights: Iterable[str]) -> Measured:
        key = hashlib.sha256(self._asked + Path(str(find_file(folder, "config.json"))).read_bytes())
        key.update("".join(weights).encode())

        def measure() -> Measured:
            with self._strategy.scope():
                network = load(folder)
            if self._model is None:
                gather_before_head(network)
                num_ids = len(self._questions.frequencies)
                self._model = QueriedModel(network, self._strategy, num_ids, self._questions.pad_token_id)
            else:
                self._model.network.set_weights(network.get_weights())
            answer = functools.partial(self._model.answer, lengths=lengths_up_to(self._questions.max_length))
            return measured_of(self._questions, self._material, answer)

        return self._kept.get(key.hexdigest(), measure)


def measured_of(questions: Questions, material: Material, answer: Callable[[Sequence[Query]], Answers]) -> Measured:
    """Ask all questions, and collect the answers by item."""
    ranks = np.full(len(material.words), NO_TOKEN)
    for query, rank in zip(questions.of_words, answer(questions.of_words).ranks, strict=True):
        ranks[query.item] = rank
    of_tokens, of_sentences = answer(questions.of_tokens), answer(questions.of_sentences)
    return Measured(
        total_by_item(questions.of_sentences, of_sentences.nats, 2 * len(material.pairs)),
        total_by_item(questions.of_tokens, of_tokens.nats, len(material.words)),
        ranks,
    )


def measure_by_frequency(questions: Questions, material: Material) -> Measured:
    """Measure a guess without context: from the frequencies of tokens; of sentences, by their number of tokens."""
    by_token = measured_of(questions, material, functools.partial(by_frequency, frequencies=questions.frequencies))
    num_tokens = total_by_item(questions.of_sentences, np.ones(len(questions.of_sentences)), 2 * len(material.pairs))
    return by_token._replace(sentences=num_tokens)


def by_frequency(queries: Sequence[Query], frequencies: NDArray[np.float64]) -> Answers:
    """Answer as one would who knows how frequent each token is, and nothing of the rest of the row."""
    with np.errstate(divide="ignore"):
        of_ids = -np.log(frequencies)
    num_better = np.searchsorted(np.sort(of_ids), of_ids).astype(np.int32)
    return Answers(
        np.array([of_ids[query.targets].sum() for query in queries]),
        np.array([num_better[query.targets].max() for query in queries], np.int32),
    )
