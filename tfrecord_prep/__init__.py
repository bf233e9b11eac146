"""Stage 2: tokenize text and write it as TFRecord shards with a manifest.

In reading order: `prepare_tfrecord_shards` is the command; `split` plans a split, has the partitions of its `work_list`
worked on, here or by `beam_pipeline`, and sums them up; `partition` turns documents into shards by way of `encoding`
(with `word_boundaries`), `chunking` (with `packing`) and `records`; `split_folder` and `manifest` are what stands on
the disk. `verify` reads all of it again, and `push_to_hub` publishes it.
"""
