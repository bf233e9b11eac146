"""What models and their controls answered, kept in a file: scoring that was killed continues with the next model.

The controls say what chance would score: networks of the same architecture with random weights, several since each has
its luck, and a guess that knows how frequent each token is, but nothing of the rest of the row.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers.utils import SAFE_WEIGHTS_NAME

from mlm_common.cli.console import progress_bar
from mlm_common.storage import Folder
from mlm_common.storage.guard import guarded_read
from train.config.learning import ModelConfig
from train.model.build import build_network
from train.model.from_pretrained import load_model
from train.model.pretrained_files import WEIGHTS_SUFFIXES, find_file, find_weights, read_config
from train.publishing.saved_model import transformers_folder
from train.runtime.runtime import Runtime
from train.scoring.answers import QueriedModel
from train.scoring.queries import Answers, Material, Query, Questions, lengths_up_to, total_by_item

NO_TOKEN = np.iinfo(np.int32).max
# What each random network is asked: other units and pairs than the next, since more networks say more than more items.
MAX_RANDOM_UNITS, MAX_RANDOM_PAIRS = 500, 1000


class Measured(NamedTuple):
    """What one model answered.

    sentences: float64 (sentences,), nats of each sentence of the pairs.
    units: float64 (units,), nats of the tokens of each unit, masked one by one.
    ranks: int32 (units,), ids more probable than the right one, of the worst token of the words masked as a whole.
    """

    sentences: NDArray[np.float64]
    units: NDArray[np.float64]
    ranks: NDArray[np.int32]


class RandomNetwork(NamedTuple):
    """What a network with random weights was asked, and answered."""

    questions: Questions
    material: Material
    measured: Measured


class KeptAnswers:
    """Measurements in a file of JSON, by a hash of what was asked and of the weights; without a file only in memory."""

    def __init__(self, folder: Folder | None, name: str) -> None:
        self._folder, self._name = folder, name
        self._kept: dict[str, Measured] = {}
        if folder is not None and folder.exists(name):
            hint = "Delete it, and run the command again."
            with guarded_read(folder.path_of(name), "a file of answers of score_mlm.py", flag="--output", hint=hint):
                content = json.loads(folder.read_text(name))
                for key, kept in content.items():
                    parts = zip(Measured._fields, "ddi", strict=True)
                    self._kept[key] = Measured(*(np.array(kept[part], dtype) for part, dtype in parts))

    def get(self, key: str, measure: Callable[[], Measured]) -> Measured:
        """Look up what is kept under the key; if nothing is, measure and keep it."""
        if key not in self._kept:
            self._kept[key] = measure()
            if self._folder is not None:
                lists = {
                    key: {part: values.tolist() for part, values in kept._asdict().items()}
                    for key, kept in self._kept.items()
                }
                self._folder.write_bytes(self._name, json.dumps(lists).encode())
        return self._kept[key]


class Measurer:
    """Asks questions of models of one architecture, in one network: the programs are compiled once.

    weights_sha256: hash of the `model.safetensors` of each model that was measured; None where it has no such file.
    """

    def __init__(self, questions: Questions, material: Material, runtime: Runtime, kept: KeptAnswers) -> None:
        self._questions, self._material, self._runtime, self._kept = questions, material, runtime, kept
        self._model: QueriedModel | None = None
        self.weights_sha256: dict[str, str | None] = {}

    def of_models(self) -> dict[str, Measured]:
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
                load = functools.partial(load_model, folder)
                measured[name] = self._measure(
                    name, folder, load, hashes.values(), questions=self._questions, material=self._material
                )
        return measured

    def of_random_weights(self, num_networks: int) -> list[RandomNetwork]:
        """Measure networks as the model would be before its training, each on some of the units and pairs."""
        questions, material = self._questions, self._material
        networks = []
        with transformers_folder(next(iter(questions.models.values()))) as folder:
            config = read_config(folder)
            for seed in range(num_networks):
                random = np.random.default_rng(seed)
                units, pairs = (
                    np.sort(random.choice(number, min(number, limit), replace=False))
                    for number, limit in (
                        (len(material.units), MAX_RANDOM_UNITS),
                        (len(material.pairs), MAX_RANDOM_PAIRS),
                    )
                )
                asked, of_material = questions.part(units, pairs), material.part(units, pairs)
                build = functools.partial(
                    build_network, config, ModelConfig(), vocabulary_size=len(questions.frequencies), seed=seed
                )
                label = f"{questions.name}, random weights, network {seed + 1} of {num_networks}"
                measured = self._measure(
                    label, folder, build, [f"random {seed}"], questions=asked, material=of_material
                )
                networks.append(RandomNetwork(asked, of_material, measured))
        return networks

    def _measure(
        self,
        label: str,
        folder: str,
        load: Callable[[], Any],
        weights: Iterable[str],
        *,
        questions: Questions,
        material: Material,
    ) -> Measured:
        queries = (questions.of_sentences, questions.of_tokens, questions.of_words)
        costs = (questions.sentence_nats.tolist(), questions.unit_nats.tolist())
        key = hashlib.sha256(json.dumps((questions.max_length, *queries, *costs)).encode())
        key.update(Path(str(find_file(folder, "config.json"))).read_bytes())
        key.update("".join(weights).encode())

        def measure() -> Measured:
            with self._runtime.scope():
                network = load()
            if self._model is None:
                num_ids = len(questions.frequencies)
                self._model = QueriedModel(network, self._runtime, num_ids, questions.pad_token_id)
            else:
                self._model.network.set_weights(network.get_weights())
            with progress_bar(label, " masked rows", sum(map(len, queries))) as bar:
                lengths = lengths_up_to(questions.max_length)
                answer = functools.partial(self._model.answer, lengths=lengths, advance=bar.update)
                return measured_of(questions, material, answer)

        return self._kept.get(key.hexdigest(), measure)


def measured_of(questions: Questions, material: Material, answer: Callable[[Sequence[Query]], Answers]) -> Measured:
    """Ask everything of what answers; what the tokenizer cannot read costs its spelling, and is no word guessed."""
    ranks = np.full(len(material.units), NO_TOKEN, np.int32)
    for query, rank in zip(questions.of_words, answer(questions.of_words).ranks, strict=True):
        ranks[query.item] = rank
    of_tokens, of_sentences = answer(questions.of_tokens), answer(questions.of_sentences)
    return Measured(
        questions.sentence_nats + total_by_item(questions.of_sentences, of_sentences.nats, 2 * len(material.pairs)),
        questions.unit_nats + total_by_item(questions.of_tokens, of_tokens.nats, len(material.units)),
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
