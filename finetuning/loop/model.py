"""The starting point of a fine-tuning run: the model's configuration and tokenizer, and the run made from them."""

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
from finetuning.loop.task import ExampleTask, Split
from mlm_common.corpus.identity import HUB_ID
from mlm_common.errors import InputError
from mlm_common.storage import check_folder_or_hub, local_or_hub
from mlm_common.tokenizer import load_tokenizer, special_ids
from train.loop.phase import Phase
from train.loop.run import Run
from train.model.architectures import (
    check_architecture,
    check_computable,
    learns_positions,
    max_positions,
    position_offset,
    uses_token_types,
)
from train.model.config import parse_overrides, resolve_finetuned_config
from train.model.pretrained_files import WEIGHTS_SUFFIXES, read_config, set_labels
from train.runtime.machines import Cluster
from train.runtime.run_folder import exported_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadModel:
    """The configuration of a model, and the tokenizer that encodes its rows."""

    model_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerFast

    @property
    def token_types(self) -> bool:
        """Whether the model distinguishes the first text of a pair from the second by token type ids."""
        return uses_token_types(self.model_config)

    @property
    def task_arguments(self) -> dict[str, Any]:
        """The arguments of `ExampleTask` that the model determines."""
        return {"pad_token_id": special_ids(self.tokenizer)["pad"], "token_types": self.token_types}

    def encode_texts(
        self, texts: Sequence[Sequence[str]], max_length: int, labels: NDArray[np.generic] | None = None
    ) -> EncodedRows:
        return encode_texts(self.tokenizer, texts, max_length=max_length, token_types=self.token_types, labels=labels)

    def labels_of(self, kind: str) -> dict[int, str] | None:
        """Return the labels {id: name} of the model's head, or None if the model has no head of this kind.

        Args:
            kind: kind of head, as in the name of the model's class, such as `SequenceClassification`.
        """
        has_head = any(f"For{kind}" in name for name in self.model_config.architectures or ())
        return self.model_config.id2label if has_head else None


@dataclass(frozen=True)
class Start(ReadModel):
    """The model to fine-tune, and the settings of the run.

    Attributes:
        tokenizer_source: folder or Hub id of the tokenizer.
        note: a warning to log before training, or empty.
    """

    config: FinetuningConfig
    tokenizer_source: str
    note: str = ""

    def run(
        self,
        task: ExampleTask,
        train_rows: EncodedRows,
        validation: Split | None,
        cluster: Cluster,
        labels: Mapping[int, str] | None = None,
        identities: Mapping[str, str] | None = None,
        plan_lines: Mapping[str, str] | None = None,
        run_info: Mapping[str, Any] | None = None,
        inputs_class: type[ExampleInputs] = ExampleInputs,
        problem_type: str | None = None,
    ) -> Run:
        """Make the run of a task.

        Args:
            task: the task to learn.
            train_rows: the encoded rows to train on.
            validation: the split that decides which checkpoint is best, if there is one.
            cluster: the workers of the run.
            labels: the names of the head's outputs, {id: name}. Without labels, the task makes the head.
            identities: further values that distinguish this run from other runs, {name: value}.
            plan_lines: lines about the examples for the printed plan, {title: text}.
            run_info: facts about the examples to store in `run.json`, for later predictions.
            inputs_class: the class of the input pipeline.
            problem_type: kind of the labels, as transformers names it in a model's configuration.
        """
        task.evaluated = validation
        config = self.config
        task.layer_lr_decay = config.optimization.layer_lr_decay
        if self.note:
            logger.warning("%s", self.note)
        if inputs_class.fits_lengths and not config.data.length_buckets:
            # Store the lengths in the settings, so that they belong to the run's identity, and predictions also use
            # them.
            lengths = fitted_lengths(train_rows.lengths, config.data.max_seq_length)
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, length_buckets=lengths))
        data = config.data
        inputs = inputs_class(
            train_rows,
            validation.rows if validation else None,
            self.tokenizer,
            self.tokenizer_source,
            data.lengths,
            source_of(data) | dict(run_info or {}),
            identities or {},
            plan_lines or {},
        )
        resolved = resolve_finetuned_config(config.model, inputs)
        if labels is not None:
            set_labels(resolved, labels)
        if problem_type is not None:
            resolved.problem_type = problem_type
        return Run((Phase(config, inputs, task, resolved),), cluster, exports_best=config.run.load_best_model_at_end)


def open_start(config: FinetuningConfig) -> Start:
    """Read the configuration of the model to start from, and its tokenizer.

    Raises:
        InputError: the model or the tokenizer does not exist, the architecture is not supported, or the model takes
            only rows that are shorter than --max-seq-length.
    """
    data, given_name = config.data, str(config.model.init_from)
    check_folder_or_hub(given_name, "--init-from")
    init_from = exported_model(given_name, "--init-from")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, init_from=init_from))
    try:
        with local_or_hub(init_from, without=WEIGHTS_SUFFIXES) as name:
            model_config = read_config(name)
            model_config.name_or_path = init_from  # instead of the path of the temporary copy
    except InputError as error:
        raise InputError(f"--init-from: {error}") from error
    check_architecture(model_config)
    check_computable(model_config)
    note = note_of_longer_rows(config, model_config)
    config = with_positions(config, model_config, given_name)
    model_tokenizer = load_tokenizer(init_from)
    if data.tokenizer_name is None:
        return Start(model_config, model_tokenizer, config, init_from, note)
    tokenizer = load_tokenizer(data.tokenizer_name)
    if tokenizer.get_vocab() != model_tokenizer.get_vocab():
        raise InputError(
            f"--tokenizer-name must have the vocabulary of {init_from}, because the model has learned its token ids; "
            f"{data.tokenizer_name} has a different vocabulary. Leave the flag out."
        )
    return Start(model_config, tokenizer, config, data.tokenizer_name, note)


def note_of_longer_rows(config: FinetuningConfig, model_config: PretrainedConfig) -> str:
    """Return a warning if rotary positions are extended to rows longer than in pretraining, or else an empty string."""
    positions, longest = max_positions(model_config), config.data.max_seq_length
    is_requested = "max_position_embeddings" in parse_overrides(config.model.config_overrides)
    if positions is None or longest <= positions or is_requested or learns_positions(model_config):
        return ""
    return (
        f"The model was pretrained on rows of {positions} tokens, but --max-seq-length is {longest}, so the score may "
        f"be lower. Compare it with the score of --max-seq-length {positions}."
    )


def with_positions(config: FinetuningConfig, model_config: PretrainedConfig, name: str) -> FinetuningConfig:
    """Return settings with which the model has positions for the longest rows.

    Rotary positions are computed, so an added override extends them to longer rows. Learned position embeddings are
    extended only if `--config-overrides` says so.

    Args:
        name: the model as the user named it, used in messages.

    Raises:
        InputError: the model's position embeddings are learned, and are fewer than the tokens of the longest row.
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
    longer = f"max_position_embeddings={longest + position_offset(model_config)}"
    model = dataclasses.replace(config.model, config_overrides=",".join(filter(None, (overrides, longer))))
    return dataclasses.replace(config, model=model)


def source_of(data: ExamplesConfig) -> dict[str, Any]:
    """Return the origin of the examples for `run.json`; its `source` is the text for the model card."""
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
