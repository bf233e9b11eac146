"""Measure models and their controls, and keep the results in a file, so that a killed command can continue.

The controls show the scores that chance alone would give. The first control consists of networks of the same
architecture with random weights. There are several networks, since a single network may be lucky. The second control
guesses from the frequency of each token alone, and ignores the row.
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
from train.model.build import build_network
from train.model.from_pretrained import load_model
from train.model.pretrained_files import WEIGHTS_SUFFIXES, find_file, find_weights, read_config
from train.publishing.saved_model import transformers_folder
from train.runtime.runtime import Runtime
from train.scoring.answers import QueriedModel
from train.scoring.queries import Answers, Material, Query, Questions, lengths_up_to, total_by_item

NO_TOKEN = np.iinfo(np.int32).max
# Each random network is asked about a separate random sample of at most this number of units and pairs. More networks
# are more informative than more items.
MAX_RANDOM_UNITS, MAX_RANDOM_PAIRS = 500, 1000


class Measured(NamedTuple):
    """The measurements of one model.

    Attributes:
        sentences: float64 (sentences,), nats of each sentence of the pairs.
        units: float64 (units,), nats of each unit, whose tokens are masked one by one.
        ranks: int32 (units,), number of ids that are more probable than the right id when all words of the unit are
            masked at once; for several tokens, the largest of these numbers.
    """

    sentences: NDArray[np.float64]
    units: NDArray[np.float64]
    ranks: NDArray[np.int32]


class RandomNetwork(NamedTuple):
    """The questions that a network with random weights was asked, and its measurements."""

    questions: Questions
    material: Material
    measured: Measured


class KeptAnswers:
    """Measurements by a hash of the questions and of the model's weights, kept in a JSON file if there is a folder."""

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
        """Return the measurements kept under the key; if the key is new, measure and keep the result."""
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
    """Measures models of one architecture in a single network, so that its programs are compiled only once.

    Attributes:
        weights_sha256: hash of the `model.safetensors` of each measured model; None for a model without this file.
    """

    def __init__(self, questions: Questions, material: Material, runtime: Runtime, kept: KeptAnswers) -> None:
        self._questions, self._material, self._runtime, self._kept = questions, material, runtime, kept
        self._model: QueriedModel | None = None
        self.weights_sha256: dict[str, str | None] = {}

    def measure_models(self) -> dict[str, Measured]:
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

    def measure_random_networks(self, num_networks: int) -> list[RandomNetwork]:
        """Measure randomly initialized networks of the model's architecture.

        Each network is asked about a random sample of the units and pairs.
        """
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
                questions_part, material_part = questions.part(units, pairs), material.part(units, pairs)
                build = functools.partial(build_network, config, vocabulary_size=len(questions.frequencies), seed=seed)
                label = f"{questions.name}, random weights, network {seed + 1} of {num_networks}"
                measured = self._measure(
                    label, folder, build, [f"random {seed}"], questions=questions_part, material=material_part
                )
                networks.append(RandomNetwork(questions_part, material_part, measured))
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
        queries = (questions.sentence_queries, questions.token_queries, questions.word_queries)
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
                return measure_with(questions, material, answer)

        return self._kept.get(key.hexdigest(), measure)


def measure_with(questions: Questions, material: Material, answer: Callable[[Sequence[Query]], Answers]) -> Measured:
    """Measure a model, or a control, with its function `answer`.

    Text that the tokenizer cannot represent costs the nats of spelling the text out, and counts as not guessed.
    """
    ranks = np.full(len(material.units), NO_TOKEN, np.int32)
    for query, rank in zip(questions.word_queries, answer(questions.word_queries).ranks, strict=True):
        ranks[query.item] = rank
    token_nats, sentence_nats = answer(questions.token_queries).nats, answer(questions.sentence_queries).nats
    return Measured(
        questions.sentence_nats + total_by_item(questions.sentence_queries, sentence_nats, 2 * len(material.pairs)),
        questions.unit_nats + total_by_item(questions.token_queries, token_nats, len(material.units)),
        ranks,
    )


def measure_by_frequency(questions: Questions, material: Material) -> Measured:
    """Measure a guess without context: words by the frequency of their tokens, sentences by their number of tokens."""
    measured = measure_with(questions, material, functools.partial(by_frequency, frequencies=questions.frequencies))
    queries = questions.sentence_queries
    num_tokens = total_by_item(queries, np.ones(len(queries)), 2 * len(material.pairs))
    return measured._replace(sentences=num_tokens)


def by_frequency(queries: Sequence[Query], frequencies: NDArray[np.float64]) -> Answers:
    """Answer from the frequency of each token alone, ignoring the rest of the row."""
    with np.errstate(divide="ignore"):
        nats_of_id = -np.log(frequencies)
    num_better = np.searchsorted(np.sort(nats_of_id), nats_of_id).astype(np.int32)
    return Answers(
        np.array([nats_of_id[query.targets].sum() for query in queries]),
        np.array([num_better[query.targets].max() for query in queries], np.int32),
    )
