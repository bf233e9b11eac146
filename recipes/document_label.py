"""Train on masked tokens, and on a label of each row: which of several folders of shards its document comes from.

    python recipes/document_label.py work/labelled/train books=work/books/train news=work/news/train
    python recipes/document_label.py work/labelled/validation books=work/books/validation news=work/news/validation
    python train/run_mlm.py --task recipes/document_label.py:DocumentLabel --preset tiny-cpu \\
        --train-dataset work/labelled/train --eval-dataset work/labelled/validation --output-dir work/model

The first two commands copy shards, and add to each row the number of its label in alphabetical order. The loss is the
mean over masked tokens plus a tenth of the mean over rows. The head's input is the mean of the encoder's states. The
export is a masked language model, with the head in the same file.
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlm_common.cli.command_line import command
from mlm_common.cli.process import run_as_script
from mlm_common.errors import InputError
from mlm_common.mixture import named_folders
from mlm_common.storage import open_folder, read_file
from tfrecord_prep.manifest import open_shards
from tfrecord_prep.records import read_records
from train.data.inputs import Feature
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.task import Mean

LABEL, NAMES = "document_label", "labels.txt"
LABEL_WEIGHT = 0.1
NO_LABEL = -1  # label of rows of padding, and of rows without a label


class Rows(NamedTuple):
    """Masked rows with their labels, int32 (batch,), and the weights of the labels, float32 (batch,)."""

    masked: Any
    labels: Any
    weights: Any


class DocumentLabel(MaskedLanguageModeling):
    """Learns the label of each row in addition to its masked tokens."""

    allows_new_head = True
    names: Sequence[str]
    means = (
        Mean("loss", "loss", "num_masked"),
        Mean("mlm_loss", "mlm_loss", "num_masked"),
        Mean("masked_accuracy", "num_correct", "num_masked"),
        Mean("label_loss", "label_loss", "num_labels"),
        Mean("label_accuracy", "num_right", "num_labels"),
    )

    @classmethod
    def of(cls, inputs: Any, masking: Any) -> "DocumentLabel":
        labels = {}
        for folder in (open_folder(shards.folder) for shards in (*inputs.train_sets, *inputs.eval_sets)):
            if not folder.exists(NAMES):
                raise InputError(f"--task needs shards of recipes/document_label.py; {folder.path} has no {NAMES}.")
            labels[folder.path] = folder.read_text(NAMES).split()
        task = super().of(inputs, masking)
        assert isinstance(task, cls)
        task.names = next(iter(labels.values()))
        for path, names in labels.items():
            if names != task.names:
                raise InputError(f"All shards must have the labels {task.names}; {path} has {names}.")
        return task

    def features(self, length: int) -> dict[str, Feature]:
        return {**super().features(length), LABEL: Feature(padding=NO_LABEL)}

    def adapt_network(self, network: Any) -> Any:
        import tensorflow as tf
        from tf_keras import layers

        from train.tasks.heads import put_head

        states = tf.zeros((1, network.config.hidden_size))
        network = super().adapt_network(network)
        return put_head(network, lambda: [layers.Dense(len(self.names))], lambda _: network.custom_head(states))

    def prepare_batch(self, batch: dict[str, Any], row_keys: Any) -> Any:
        return self.labelled(super().prepare_batch(batch, row_keys), batch[LABEL])

    def prepare_row(self, row: dict[str, Any]) -> Any:
        return self.labelled(super().prepare_row(row), row[LABEL])

    def labelled(self, masked: Any, labels: Any) -> Rows:
        """Join masked rows with their labels. Missing labels get the weight 0."""
        import tensorflow as tf

        return Rows(masked, tf.maximum(labels, 0), tf.where(labels == NO_LABEL, 0.0, LABEL_WEIGHT))

    def apply_global_weights(self, rows: Any, add_up: Callable[[Any], Any]) -> Any:
        """Scale the weights of the labels to the number of masked tokens, by which the whole loss is divided later.

        The label loss then contributes a tenth of its mean over rows.
        """
        import tensorflow as tf

        num_masked = add_up(tf.reduce_sum(tf.cast(rows.masked.is_masked, tf.float32)))
        num_labels = add_up(tf.reduce_sum(tf.cast(rows.weights > 0, tf.float32)))
        return rows._replace(weights=rows.weights * tf.math.divide_no_nan(num_masked, num_labels))

    def sums(self, network: Any, rows: Any, *, training: bool) -> dict[str, Any]:
        import tensorflow as tf

        from train.tasks.heads import mean_state

        _, states, sums = self.outputs_and_sums(network, rows.masked, {}, training=training)
        pooled = mean_state(states, rows.masked.input_ids != self.pad_token_id)
        logits = tf.cast(network.custom_head(pooled, training=training), tf.float32)  # (batch, labels)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(rows.labels, logits)
        is_right = tf.argmax(logits, axis=-1, output_type=tf.int32) == rows.labels
        counts = tf.cast(rows.weights > 0, tf.float32)
        return sums | {
            "loss": sums["loss"] + tf.reduce_sum(losses * rows.weights),
            "mlm_loss": sums["loss"],
            "label_loss": tf.reduce_sum(losses * counts),
            "num_right": tf.reduce_sum(tf.cast(is_right, tf.float32) * counts),
            "num_labels": tf.reduce_sum(counts),
        }

    def derived_figures(self, means: Mapping[str, float]) -> dict[str, float]:
        perplexity = super().derived_figures({"loss": means["mlm_loss"]})
        return perplexity | {"loss": means["mlm_loss"] + LABEL_WEIGHT * means["label_loss"]}

    def describe_row(self, rows: Any, tokenizer: Any) -> dict[str, str]:
        return super().describe_row(rows.masked, tokenizer) | {"label": self.names[int(rows.labels[0])]}


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Copy the shards of several folders, NAME=DIR …, into one folder, and add the number of its label to each row."""
    import tensorflow as tf

    output_dir, *named = (sys.argv[1:] if argv is None else argv) or [""]
    if len(named) < 2 or not all("=" in word for word in named) or Path(output_dir).exists():
        raise InputError("Name a new folder and two or more folders of shards: OUTPUT_DIR NAME=DIR NAME=DIR …")
    folders = named_folders(shlex.join(named), "NAME=DIR")
    # Sorted, so that the numbers of the labels do not depend on the order of the arguments.
    sources, index = {name: open_shards(folders[name]) for name in sorted(folders)}, 0
    manifests = [shards.manifest for shards in sources.values() if shards.manifest]
    if len({(manifest.tokenizer.sha256, manifest.max_length) for manifest in manifests}) > 1:
        names = ", ".join(sources)
        raise InputError(f"All folders must have the same tokenizer and the same --max-length; {names} do not.")
    Path(output_dir).mkdir(parents=True)
    for label, shards in enumerate(sources.values()):
        for path, num_rows in zip(shards.paths, shards.num_rows_per_shard, strict=True):
            with tf.io.TFRecordWriter(f"{output_dir}/dataset-{index:05d}-{num_rows}.tfrecord") as writer:
                for record in read_records(read_file(path)):
                    example = tf.train.Example.FromString(record)
                    example.features.feature[LABEL].int64_list.value.append(label)
                    writer.write(example.SerializeToString())
            index += 1
    shutil.copytree(str(shards.tokenizer_folder), f"{output_dir}/tokenizer")
    Path(output_dir, NAMES).write_text("\n".join(sources), encoding="utf-8")


if __name__ == "__main__":
    run_as_script(main)
