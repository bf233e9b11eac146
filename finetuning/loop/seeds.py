"""Several runs that differ in their seed, and their scores on one table."""

import dataclasses
import json
import statistics
from collections.abc import Callable
from typing import Any

from finetuning.config.sources import Settings
from finetuning.loop.training import Job, finetune
from finetuning.tasks.task import shown_score
from mlm_common.storage import open_folder
from train.loop.run_record import print_table

# How the names of the figures of `eval_results.json` begin that are no scores, or do not depend on the seed.
NO_SCORES = ("eval_samples", "eval_is_", "eval_num_", "eval_guess_", "epoch")


def finetune_seeds(config: Settings, new_job: Callable[[], Job[Settings]]) -> None:
    """Make the run of the settings; with `--seeds` one for each, in a separate folder, and the table of all.

    A complete run is not repeated, so the same command resumes after a stop.

    Raises:
        InputError: as `finetune`; with `--seeds` also that there is no validation part.
    """
    if not config.run.seeds:
        finetune(config, new_job())
        return
    for seed in config.run.seeds:
        finetune(with_seed(config, seed), new_job(), needs_validation=True)
        if config.run.dry_run:
            return
    root = open_folder(str(config.run.output_dir))
    results = {
        seed: json.loads(root.subfolder(folder_of(seed)).read_text("eval_results.json")) for seed in config.run.seeds
    }
    table = seeds_table(results)
    root.write_text("seeds_results.json", json.dumps(table, indent=4) + "\n")
    print()
    print_table(
        {
            name.removeprefix("eval_").replace(
                "_", " "
            ): f"{shown_score(figures['mean'])}, deviation {shown_score(figures['deviation'])}, "
            f"of {', '.join(map(shown_score, figures['values']))}"
            for name, figures in table["scores"].items()
        }
        | {"seeds": ", ".join(map(str, config.run.seeds)), "models": root.path_of("seed-…/export")}
    )


def with_seed(config: Settings, seed: int) -> Settings:
    """Make the settings of the run with that seed."""
    output_dir = open_folder(str(config.run.output_dir)).path_of(folder_of(seed))
    run: Any = dataclasses.replace(config.run, seed=seed, seeds=[], output_dir=output_dir)
    return dataclasses.replace(config, run=run)


def folder_of(seed: int) -> str:
    """Name the folder of the run with that seed, in `--output-dir`."""
    return f"seed-{seed}"


def seeds_table(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Collect the scores of runs {seed: content of eval_results.json}: values, mean, and standard deviation (n - 1)."""
    names = [name for name in next(iter(results.values())) if not name.startswith(NO_SCORES)]
    scores = {}
    for name in names:
        values = [one[name] for one in results.values()]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        scores[name] = {"values": values, "mean": statistics.mean(values), "deviation": deviation}
    return {"seeds": list(results), "scores": scores}
