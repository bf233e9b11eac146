r"""Fine-tune a model to tag words: named entities, parts of speech, anything with one tag per word.

Examples:
    python finetuning/run_tagging.py --init-from work/model --train-file train.conll \
        --validation-file dev.conll --output-dir work/names
    python finetuning/run_tagging.py --init-from work/model \
        --dataset-name unimelb-nlp/wikiann --dataset-config-name de \
        --text-column-name tokens --label-column-name ner_tags --output-dir work/names
"""

try:
    import mlm_common.cli  # noqa: F401  (from here on Ctrl-C is one line)
    from finetuning.loop.command import finetuning_command
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None

from finetuning.config.settings import TaggingConfig
from mlm_common.cli.process import run_as_script

main = finetuning_command(TaggingConfig, "finetuning.tasks.tagging:TaggingJob", __file__, __doc__)

if __name__ == "__main__":
    run_as_script(main)
