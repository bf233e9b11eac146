"""Checkpoints of a run: model, optimizer and with it the step; the order of rows needs no state."""

import logging

import tensorflow as tf

from tokenizer_training import storage
from train.output_folder import CHECKPOINTS_FOLDER
from train.pretraining_model import PretrainingModel

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in `OUTPUT_DIR/checkpoints`, the newest `num_kept` of them; local or gs://.

    Every worker restores them; one writes them, which it can alone, since each worker has all weights and moments.
    """

    def __init__(self, output_dir: str, model: PretrainingModel, *, num_kept: int, is_chief: bool = True):
        self._is_chief = is_chief
        self._model = model
        self._checkpoint = tf.train.Checkpoint(masked_lm=model.masked_lm, optimizer=model.optimizer)
        # Made when first used, which would be by the chief alone, and in the strategy's scope workers make it together.
        self._checkpoint.save_counter  # noqa: B018
        self._manager = tf.train.CheckpointManager(
            self._checkpoint,
            storage.join(output_dir, CHECKPOINTS_FOLDER),
            max_to_keep=num_kept,
            checkpoint_name="step",
        )

    def restore_latest(self) -> int:
        """Restore the newest checkpoint, if there is one, and return the number of updates that the model has seen."""
        latest = self._manager.latest_checkpoint
        if latest is None:
            return 0
        status = self._checkpoint.restore(latest)
        status.assert_existing_objects_matched()
        step = int(self._model.optimizer.iterations.numpy())
        logger.info("going on after step %d, from %s", step, latest)
        return step

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`, then drop the oldest over the number kept; does nothing but on the chief."""
        if self._is_chief:
            self._manager.save(checkpoint_number=step)
