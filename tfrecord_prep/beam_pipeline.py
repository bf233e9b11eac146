"""Process the partitions of a split with Apache Beam, on this machine or on Dataflow.

Beam gets only the list of partitions, not their text. Each worker reads the byte ranges of a partition and writes the
partition's shards and sidecar.
"""

import importlib.util
import logging
import os
import re
import shlex
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mlm_common.corpus.corpus import Corpus
from mlm_common.corpus.text_files import ByteRange
from mlm_common.errors import InputError, RunFailedError
from tfrecord_prep.config import DATAFLOW_RUNNER, PrepareConfig
from tfrecord_prep.partition import NumberedPartition, SplitWork, work_on_partition

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

logger = logging.getLogger(__name__)

# Documents that workers cannot read from files become part of the pipeline's description, which Dataflow limits to
# 10 MB.
MAX_INLINE_BYTES = 4 << 20
REQUIRED_BY_DATAFLOW = ("project", "region", "temp_location")

# Beam may give a process several partitions at once, but the process's memory and cache of tokenized words suffice for
# only one partition.
_one_at_a_time = threading.Lock()


def check_beam(config: PrepareConfig, corpus: Corpus) -> "PipelineOptions":
    """Return Beam's options for these settings.

    Raises:
        InputError: apache_beam is not installed, Beam does not know an option, or Dataflow could not read the corpus.
    """
    modules = ["apache_beam"] + ["google.cloud.dataflow"] * (config.runner == DATAFLOW_RUNNER)
    if not all(map(importlib.util.find_spec, modules)):
        raise InputError(f"--runner {config.runner} needs Apache Beam: python3 install.py --with beam")
    from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
    from apache_beam.runners.runner import create_runner

    options = _pipeline_options(config)
    if config.runner != DATAFLOW_RUNNER:
        logging.getLogger("apache_beam").setLevel(logging.CRITICAL)  # its many log lines would bury this run's messages
    else:
        given = options.get_all_options()
        missing = [f"--{name}" for name in REQUIRED_BY_DATAFLOW if not given.get(name)]
        if missing:
            raise InputError(f"Dataflow needs {', '.join(missing)}. Pass --beam-options='--project=… --region=… …'.")
        offline = _pipeline_options(config, "--dry_run=true")  # otherwise the validator sends requests to Cloud Storage
        if problems := PipelineOptionsValidator(offline, create_runner(DATAFLOW_RUNNER)).validate():
            raise InputError(f"Dataflow rejects --beam-options: {' '.join(' '.join(problems).split())}")
        files = [file for source in corpus.sources.values() for file in source.files]
        local = [file.name for file in files if file.is_local]
        if local:
            raise InputError(
                f"Dataflow's machines can read gs:// files only; the corpus has the local file {local[0]}. Copy it to "
                "a bucket, or pass --runner local."
            )
    return options


def work_with_beam(
    work: SplitWork, partitions: Iterable[NumberedPartition], options: "PipelineOptions"
) -> Iterator[int]:
    """Process all partitions, and then yield their numbers in order.

    Raises:
        InputError: there are too many documents that workers cannot read from files. Also any error that
            `work_on_partition` raises.
        RunFailedError: the pipeline failed.
    """
    numbered = list(_without_much_text(partitions))
    if numbered:
        _run_pipeline(work, numbered, options)
    yield from (partition.index for partition in numbered)


def work_in_worker(numbered: NumberedPartition, work: SplitWork) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Beam has a process per core already
    with _one_at_a_time:
        work_on_partition(work, numbered)


def _pipeline_options(config: PrepareConfig, *extra_flags: str) -> "PipelineOptions":
    from apache_beam.options.pipeline_options import PipelineOptions

    defaults = ["--number_of_worker_harness_threads=1"]
    if config.runner != DATAFLOW_RUNNER:
        defaults = ["--direct_running_mode=multi_processing", f"--direct_num_workers={config.num_processes}"]
    flags = [*defaults, *shlex.split(config.beam_options), *extra_flags, f"--runner={config.runner}"]
    options = PipelineOptions(flags, save_main_session=False)  # workers need nothing from the program's main module
    unknown = options.get_all_options(retain_unknown_options=True).keys() - options.get_all_options().keys()
    if unknown:
        raise InputError(
            f"--beam-options has options that Apache Beam does not know: {', '.join(sorted(unknown))}. Check their "
            "spelling."
        )
    return options


def _without_much_text(partitions: Iterable[NumberedPartition]) -> Iterator[NumberedPartition]:
    num_bytes = 0
    for numbered in partitions:
        num_bytes += sum(len(item.encode()) for item in numbered.partition if not isinstance(item, ByteRange))
        if num_bytes > MAX_INLINE_BYTES:
            raise InputError(
                "Apache Beam's workers cannot read this corpus themselves, and can be sent at most "
                f"{MAX_INLINE_BYTES:,} bytes of documents. Pass --data-files without --limit, or --runner local."
            )
        yield numbered


def _run_pipeline(work: SplitWork, numbered: list[NumberedPartition], options: "PipelineOptions") -> None:
    import apache_beam as beam
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    runner_name = options.get_all_options()["runner"]
    # Beam's `DirectRunner` would first try to download another runner; `FnApiRunner` is the runner that it falls back
    # to.
    runner = runner_name if runner_name == DATAFLOW_RUNNER else FnApiRunner()
    logger.info("%s: %d partitions for %s", work.split_name, len(numbered), runner_name)
    pipeline = beam.Pipeline(runner=runner, options=options)
    partitions = pipeline | "partitions" >> beam.Create(numbered) | "spread" >> beam.Reshuffle()
    _ = partitions | "write shards" >> beam.Map(work_in_worker, work)
    how_to_resume = f"The complete partitions in {work.folder} are kept. Run the same command again to continue."
    try:
        state = pipeline.run().wait_until_finish()
    except Exception as error:  # the runners' errors have no common class
        described = "".join(traceback.format_exception_only(error))  # contains the traceback of the worker, as text
        message = re.search(r"\bInputError: (.+?)(?: \[while running|\n|$)", described)
        if message:
            raise InputError(message[1]) from error
        logger.error("%s", error)
        reason = str(error).strip().splitlines()[-1:] or [repr(error)]
        raise RunFailedError(f"{runner_name} failed: {reason[0]} {how_to_resume}") from error
    if state != "DONE":
        raise RunFailedError(f"{runner_name} ended in the state {state}. {how_to_resume}")
