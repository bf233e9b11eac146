"""What a run of fine-tuning starts from: where model and examples lie, the tokenizer, the configuration."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetuning.config.settings import ExamplesConfig, FinetuningConfig
from finetuning.data.buckets import fitted_lengths
from finetuning.data.glue import HUB_NAME
from finetuning.data.inputs import EncodedRows, ExampleInputs, encode_texts
from finetuning.loop.task import ExampleTask, Part
from mlm_common.corpus.identity import HUB_ID
from mlm_common.errors import InputError
from mlm_common.storage import check_folder_or_hub, local_or_hub
from mlm_common.tokenizer import load_tokenizer, special_ids
from train.loop.run import Phase, Run
from train.model.architectures import (
    check_architecture,
    check_computable,
    learns_positions,
    max_positions,
    position_offset,
    uses_token_types,
)
from train.model.config import parse_overrides, resolve_model_config
from train.model.pretrained_files import WEIGHTS_SUFFIXES, read_config, set_labels
from train.runtime.machines import Cluster
from train.runtime.run_folder import exported_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadModel:
    """The configuration of a model, and the tokenizer that makes its rows."""

    model_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerFast

    @property
    def token_types(self) -> bool:
        """Whether the model tells a first text from a second."""
        return uses_token_types(self.model_config)

    @property
    def of_rows(self) -> dict[str, Any]:
        """The arguments of an `ExampleTask` that describe its rows."""
        return {"pad_token_id": special_ids(self.tokenizer)["pad"], "token_types": self.token_types}

    def encode_texts(
        self, texts: Sequence[Sequence[str]], max_length: int, labels: NDArray[np.generic] | None = None
    ) -> EncodedRows:
        return encode_texts(self.tokenizer, texts, max_length=max_length, token_types=self.token_types, labels=labels)

    def labels_of(self, kind: str) -> dict[int, str] | None:
        """Return the labels of a model with a head of this kind, {id: name}; None where it has another head."""
        has_head = any(f"For{kind}" in name for name in self.model_config.architectures or ())
        return self.model_config.id2label if has_head else None


@dataclass(frozen=True)
class Start(ReadModel):
    """The model that a run starts from, its settings, where the tokenizer came from, and a warning for the plan."""

    config: FinetuningConfig
    tokenizer_source: str
    note: str = ""

    def run(
        self,
        task: ExampleTask,
        train_rows: EncodedRows,
        validation: Part | None,
        cluster: Cluster,
        labels: Mapping[int, str] | None = None,
        identities: Mapping[str, str] | None = None,
        described: Mapping[str, str] | None = None,
        recorded: Mapping[str, Any] | None = None,
        inputs_class: type[ExampleInputs] = ExampleInputs,
    ) -> Run:
        """Make the run of a task.

        Args:
            validation: the part that decides which checkpoint is best.
            labels: what the head tells apart, {id: name}; by default the task makes the head.
            identities: what else makes it this run, {name: value}.
            described: what the plan says of the examples, {title: text}.
            recorded: what `run.json` says of them, for later predictions.
        """
        task.evaluated = validation
        config = self.config
        if self.note:
            logger.warning("%s", self.note)
        if inputs_class.fits_lengths and not config.data.length_buckets:
            # In the settings, so that they are a part of the run's identity, and predictions have them, too.
            lengths = fitted_lengths(train_rows.lengths, config.data.max_seq_length)
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, length_buckets=lengths))
        data = config.data
        inputs = inputs_class(
            train_rows,
            validation.rows if validation else None,
            self.tokenizer,
            self.tokenizer_source,
            data.lengths,
            source_of(data) | dict(recorded or {}),
            identities or {},
            described or {},
        )
        resolved = resolve_model_config(config.model, inputs)
        if labels is not None:
            set_labels(resolved, labels)
        return Run((Phase(config, inputs, task, resolved),), cluster)


def open_start(config: FinetuningConfig) -> Start:
    """Read the configuration of the model to start from, and its tokenizer.

    Raises:
        InputError: one of them is not there, or the architecture is not supported, or its rows are shorter than
            --max-seq-length.
    """
    data, given = config.data, str(config.model.init_from)
    check_folder_or_hub(given, "--init-from")
    init_from = exported_model(given, "--init-from")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, init_from=init_from))
    try:
        with local_or_hub(init_from, without=WEIGHTS_SUFFIXES) as name:
            model_config = read_config(name)
            model_config.name_or_path = init_from  # not that of a copy
    except InputError as error:
        raise InputError(f"--init-from: {error}") from error
    check_architecture(model_config)
    check_computable(model_config)
    note = note_of_longer_rows(config, model_config)
    config = with_positions(config, model_config, given)
    tokenizer = load_tokenizer(init_from)
    if data.tokenizer_name is None:
        return Start(model_config, tokenizer, config, init_from, note)
    named = load_tokenizer(data.tokenizer_name)
    if named.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"--tokenizer-name must have the vocabulary of {init_from}, since what was learned belongs to the ids; "
            f"{data.tokenizer_name} has another. Leave it out."
        )
    return Start(model_config, named, config, data.tokenizer_name, note)


def note_of_longer_rows(config: FinetuningConfig, model_config: PretrainedConfig) -> str:
    """Say that rotary positions extend to rows that are longer than those of pretraining; empty where none are."""
    positions, longest = max_positions(model_config), config.data.max_seq_length
    is_asked_for = "max_position_embeddings" in parse_overrides(config.model.config_overrides)
    if positions is None or longest <= positions or is_asked_for or learns_positions(model_config):
        return ""
    return (
        f"The model was pretrained on rows of {positions} tokens, and --max-seq-length is {longest}: the score may be "
        f"lower. Compare it with that of --max-seq-length {positions}."
    )


def with_positions(config: FinetuningConfig, model_config: PretrainedConfig, name: str) -> FinetuningConfig:
    """Make settings in which the model has positions for the longest rows, if need be by one more override.

    Rotary positions, which are computed, extend to longer rows. Tables of positions do not, unless `--config-overrides`
    says so.

    Raises:
        InputError: the rows are longer than a table of positions.
    """
    positions, longest = max_positions(model_config), config.data.max_seq_length
    overrides = config.model.config_overrides
    if positions is None or longest <= positions:
        return config
    if "max_position_embeddings" in parse_overrides(overrides):
        if learns_positions(model_config):
            logger.warning("The positions of %s after the first %d are initialized randomly.", name, positions)
        return config
    if learns_positions(model_config):
        raise InputError(
            f"{name} takes rows of at most {positions} tokens, but --max-seq-length is {longest}. Use --max-seq-length "
            f"{positions}, or pretrain with longer rows (--max-length {longest} of prepare_tfrecord_shards.py)."
        )
    more = f"max_position_embeddings={longest + position_offset(model_config)}"
    model = dataclasses.replace(config.model, config_overrides=",".join(filter(None, (overrides, more))))
    return dataclasses.replace(config, model=model)


def source_of(data: ExamplesConfig) -> dict[str, Any]:
    """Collect what `run.json` says of where the examples come from; `source` is in words for the card."""
    names = ("dataset_name", "dataset_config_name", "dataset_revision")
    source = {name: value for name in names if (value := getattr(data, name)) is not None}
    words = "files of the author"
    task_name = getattr(data, "task_name", None)
    if task_name is not None:
        source |= {"task_name": task_name, "dataset_name": HUB_NAME, "dataset_config_name": task_name}
        words = f"GLUE (Wang et al. 2018), task {task_name}"
    elif data.dataset_name is not None and HUB_ID.fullmatch(data.dataset_name):
        words = f"`{data.dataset_name}` on the Hub"
    return source | {"source": words}
