"""Show the input of a model: a row of the shards, the same row masked, and the tokens to predict."""

from train.config.learning import DataConfig, MaskingConfig
from train.data.pipeline import evaluation_batches
from train.data.shards import open_inputs
from train.tasks.masked_lm import MaskedLanguageModeling


def show_masked_row(shards: str) -> None:
    """Print the first validation row as text, the row as it is masked for evaluation, and the tokens to predict.

    Args:
        shards: the folder with `train/` and `validation/`, local or gs://.
    """
    inputs = open_inputs(DataConfig(train_dataset=f"{shards}/train", eval_dataset=f"{shards}/validation"))
    task = MaskedLanguageModeling.of(inputs, MaskingConfig())
    features = task.features(inputs.max_length)
    assert inputs.eval_shards is not None
    (row,) = evaluation_batches(inputs.eval_shards, features, task.prepare_row, global_batch_rows=1).take(1)
    print("the row:   ", inputs.tokenizer.decode(row.original_ids[0]))
    print("as masked: ", inputs.tokenizer.decode(row.input_ids[0]))
    print("to predict:", *inputs.tokenizer.convert_ids_to_tokens(row.original_ids[row.is_masked].numpy().tolist()))
