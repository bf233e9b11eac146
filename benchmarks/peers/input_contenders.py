"""The inputs that benchmarks/input_pipeline.py compares, as programs that read one epoch of a folder of shards.

    python benchmarks/peers/input_contenders.py ours shards --length 512 --batch-rows 256

`tutorial` is the input of transformers' TPU tutorial: a TFRecordDataset whose records are parsed one by one, a shuffle
buffer of 2**18 rows, then batches that the collator of transformers masks. `ours` is the input of run-mlm, which draws
the masks on the training device; `ours-masked` draws the same masks on the host. `tutorial-unmasked` lacks the masks.
`ours-10` and `ours-100` are `ours` with the shards divided among 10 and 100 sources of a mixture.
"""

import argparse
import functools
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    import tensorflow as tf

    from tfrecord_prep.manifest import ShardSet

START_LINE = "TensorFlow is ready."
TUTORIAL_BUFFER_ROWS = 1 << 18
# Ids of the special tokens in tokenizers of train-unigram.
CLS_ID, PAD_ID, SEP_ID, UNK_ID, MASK_ID = range(5)


def tutorial_batches(
    shards: "ShardSet", length: int, batch_rows: int, vocab_size: int, is_masked: bool = True
) -> "tf.data.Dataset":
    """Build one epoch of dictionaries with `input_ids` and `labels`, int64 (batch_rows, length)."""
    import tensorflow as tf
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({})), mask_token="[MASK]")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    feature = tf.io.FixedLenFeature((length,), tf.int64)

    def parse(record: tf.Tensor) -> dict[str, tf.Tensor]:
        return tf.io.parse_single_example(record, {"input_ids": feature, "attention_mask": feature})

    def mask(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        ids = batch["input_ids"]
        is_special = ~tf.cast(batch["attention_mask"], tf.bool) | (ids == CLS_ID) | (ids == SEP_ID)
        inputs, labels = collator.tf_mask_tokens(
            ids, vocab_size=vocab_size, mask_token_id=MASK_ID, special_tokens_mask=is_special
        )
        return {**batch, "input_ids": inputs, "labels": labels}

    paths = tf.data.Dataset.from_tensor_slices(list(shards.paths)).shuffle(len(shards.paths))
    dataset = tf.data.TFRecordDataset(paths, num_parallel_reads=tf.data.AUTOTUNE)
    dataset = dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE).shuffle(TUTORIAL_BUFFER_ROWS)
    dataset = dataset.batch(batch_rows, drop_remainder=True)
    if is_masked:
        dataset = dataset.map(mask, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.prefetch(tf.data.AUTOTUNE)


def our_batches(
    shards: "ShardSet", length: int, batch_rows: int, vocab_size: int, is_masked: bool, num_sources: int = 1
) -> "tf.data.Dataset":
    """Build one epoch of batches with run-mlm's defaults; `MaskedRows` if they are masked on the host."""
    import tensorflow as tf

    from train.config.learning import DataConfig
    from train.data.inputs import Feature
    from train.data.pipeline import MixtureOrder, SampleOrder, training_batches
    from train.data.sources import Interleaving
    from train.layers.random_bits import row_keys
    from train.tasks.masking import MaskedRows, mask_rows
    from train.tasks.masking_rule import MaskingRule

    window_rows = default_of(DataConfig, "shuffle_buffer_size") // num_sources
    sources = [
        SampleOrder(shards.paths[index::num_sources], shards.num_rows_per_shard[index::num_sources], 0, window_rows)
        for index in range(num_sources)
    ]
    order = Interleaving(tuple(source.num_rows for source in sources))
    dataset = training_batches(
        MixtureOrder(sources, order, [0] * num_sources),
        {"input_ids": Feature((length,))},
        global_batch_rows=batch_rows,
        start_step=0,
        # More steps than are read, so that the pipeline still reads ahead at the last step, as it does at the first
        # step.
        num_steps=2 * (shards.num_rows // batch_rows),
    )
    if not is_masked:
        return dataset
    rule = MaskingRule(MASK_ID, (CLS_ID, PAD_ID, SEP_ID, UNK_ID, MASK_ID), vocab_size)

    def mask(step: tf.Tensor, batch: dict[str, tf.Tensor]) -> MaskedRows:
        return mask_rows(batch["input_ids"], row_keys((0, step), batch_rows), rule)

    return dataset.enumerate().map(mask, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def default_of(config: type, name: str) -> Any:
    return config.__dataclass_fields__[name].default  # type: ignore[attr-defined]


CONTENDERS: dict[str, tuple[Any, bool]] = {
    "ours": (our_batches, False),
    "ours-10": (functools.partial(our_batches, num_sources=10), False),
    "ours-100": (functools.partial(our_batches, num_sources=100), False),
    "ours-masked": (our_batches, True),
    "tutorial": (tutorial_batches, True),
    "tutorial-unmasked": (tutorial_batches, False),
}


def main() -> None:
    """Read an epoch, and print seconds and rows as JSON in the last line. CPU seconds count from the first batch on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("folder")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-rows", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=16_000)
    arguments = parser.parse_args()
    import tensorflow as tf

    from tfrecord_prep.manifest import open_shards

    shards = open_shards(arguments.folder)
    make_batches, is_masked = CONTENDERS[arguments.contender]
    # The first use of a graph allocates memory that should not count for any contender.
    next(iter(tf.data.Dataset.range(1).map(lambda value: value + 1)))
    time.sleep(0.3)  # so that memory is sampled now
    print(START_LINE, flush=True)
    start_seconds = time.perf_counter()
    batches = iter(make_batches(shards, arguments.length, arguments.batch_rows, arguments.vocab_size, is_masked))
    next(batches)
    first_seconds, start_cpu_seconds = time.perf_counter() - start_seconds, time.process_time()
    num_batches = sum(1 for _ in itertools.islice(batches, shards.num_rows // arguments.batch_rows))
    cpu_seconds, rows = time.process_time() - start_cpu_seconds, num_batches * arguments.batch_rows
    print(json.dumps({"first_seconds": first_seconds, "cpu_seconds": cpu_seconds, "rows": rows}))


if __name__ == "__main__":
    main()
