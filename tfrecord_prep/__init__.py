"""Stage 2: tokenize text and write it as TFRecord shards with a manifest.

Read the modules in this order:

- `prepare_tfrecord_shards`: the command.
- `split`: plans a split, lets local workers or `beam_pipeline` process its partitions, and sums up the results.
- `partition`: turns documents into shards, with `encoding`, `segment_pairs`, `chunking` and `records`.
- `split_folder` and `manifest`: the files in the folder of a split.
- `duplicates`: finds documents that occur more than once.
- `verify`: reads all shards again and compares them with their manifests.
- `hub_shards`: pushes shards to the Hub and fetches them from there.
- `import_bert_tfrecords`: a second command, which imports the files of BERT's create_pretraining_data.py.
"""
