"""What a run of fine-tuning starts from: where model and examples lie, the tokenizer, the configuration."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetuning.config.settings import ExamplesConfig, FinetuningConfig
from finetuning.data.glue import HUB_NAME
from finetuning.data.inputs import ExampleInputs
from finetuning.data.rows import EncodedRows
from finetuning.tasks.task import ExampleTask
from mlm_common.errors import InputError
from mlm_common.storage import local_or_hub
from tokenizer_training.corpus.published_corpus import HUB_ID
from tokenizer_training.tokenizer import load_tokenizer, special_ids
from train.loop.run import Run
from train.model.architectures import check_architecture, max_positions, uses_token_types
from train.model.config import resolve_model_config
from train.model.from_pretrained import WEIGHTS_SUFFIXES, read_config, set_labels
from train.runtime.cluster import Cluster
from train.runtime.run_folder import exported_model


@dataclass(frozen=True)
class Start:
    """The settings of a run, and the model that it starts from.

    config: of the run, `--init-from` a model.
    model_config: of that model.
    tokenizer: of the run.
    tokenizer_source: where that came from.
    """

    config: FinetuningConfig
    model_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerFast
    tokenizer_source: str

    @property
    def token_types(self) -> bool:
        """Whether the model tells a first text from a second."""
        return uses_token_types(self.model_config)

    @property
    def of_rows(self) -> dict[str, Any]:
        """What an `ExampleTask` is to know of the rows."""
        return {"pad_token_id": special_ids(self.tokenizer)["pad"], "token_types": self.token_types}

    def run(
        self,
        task: ExampleTask,
        train_rows: EncodedRows,
        eval_rows: EncodedRows | None,
        cluster: Cluster,
        labels: Mapping[int, str] | None = None,
        identities: Mapping[str, str] | None = None,
        described: Mapping[str, str] | None = None,
        recorded: Mapping[str, Any] | None = None,
    ) -> Run:
        """Make the run of a task.

        Args:
            task: what is learned.
            train_rows: to train on.
            eval_rows: to evaluate on.
            cluster: of the run.
            labels: what the head tells apart, {id: name}; by default the head is the task's own.
            identities: what else makes it this run, {name: value}.
            described: what the plan says of the examples, {title: text}.
            recorded: what `run.json` says of them, for later predictions.

        Raises:
            InputError: settings of the model that do not fit it.
        """
        data = self.config.data
        source = self.tokenizer_source
        inputs = ExampleInputs(
            train_rows,
            eval_rows,
            self.tokenizer,
            source,
            data.lengths,
            source_of(data) | dict(recorded or {}),
            identities or {},
            described or {},
        )
        resolved = resolve_model_config(self.config.model, inputs)
        if labels is not None:
            set_labels(resolved, labels)
        return Run(self.config, inputs, task, resolved, cluster)


def open_start(config: FinetuningConfig) -> Start:
    """Read the configuration of the model to start from, and its tokenizer.

    Raises:
        InputError: one of them is not there, or the architecture is not supported, or its rows are shorter than those
            asked for.
    """
    init_from, data = exported_model(str(config.model.init_from), "--init-from"), config.data
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, init_from=init_from))
    try:
        with local_or_hub(init_from, without=WEIGHTS_SUFFIXES) as name:
            model_config = read_config(name)
    except InputError as error:
        raise InputError(f"--init-from: {error}") from error
    check_architecture(model_config)
    positions = max_positions(model_config)
    if positions is not None and data.max_seq_length > positions:
        raise InputError(
            f"--max-seq-length must be at most the {positions} tokens that {init_from} takes; received "
            f"{data.max_seq_length}."
        )
    tokenizer = load_tokenizer(init_from)
    if data.tokenizer_name is None:
        return Start(config, model_config, tokenizer, init_from)
    named = load_tokenizer(data.tokenizer_name)
    if named.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"--tokenizer-name must have the vocabulary of {init_from}, since what was learned belongs to the ids; "
            f"{data.tokenizer_name} has another. Leave it out."
        )
    return Start(config, model_config, named, data.tokenizer_name)


def source_of(data: ExamplesConfig) -> dict[str, Any]:
    """Collect what `run.json` says of where the examples come from; `source` is in words for the card."""
    names = ("dataset_name", "dataset_config_name", "dataset_revision")
    source = {name: value for name in names if (value := getattr(data, name)) is not None}
    words = "tables of its author's"
    task_name = getattr(data, "task_name", None)
    if task_name is not None:
        source |= {"task_name": task_name, "dataset_name": HUB_NAME, "dataset_config_name": task_name}
        words = f"GLUE (Wang et al. 2018), task {task_name}"
    elif data.dataset_name is not None and HUB_ID.fullmatch(data.dataset_name):
        words = f"`{data.dataset_name}` of the Hub"
    return source | {"source": words}
