"""Stage 2: tokenize text and write it as TFRecord shards with a manifest.

In reading order: `prepare_tfrecord_shards` is the command; `split` plans a split, has its partitions worked on, here or
by `beam_pipeline`, and sums them up; `partition` turns documents into shards with `encoding`, `segment_pairs`,
`chunking` and `records`; `split_folder` and `manifest` are the files of a split. `verify` reads all of it again, and
`hub_shards` publishes it, and fetches what was published. `import_bert_tfrecords` is a command that makes shards of the
files of BERT's create_pretraining_data.py.
"""
