r"""Fine-tune a model that embeds texts, for search, clustering and comparison: from pairs, or from plain text.

Examples:
    python finetuning/run_embedding.py --init-from work/model \
        --train-file squad/train-v1.1.json.gz \
        --validation-file squad/dev-v1.1.json.gz --output-dir work/embedding
    python finetuning/run_embedding.py --init-from work/model --unsupervised \
        --dropout 0.1 --train-file passages.txt --validation-file pairs.jsonl \
        --output-dir work/simcse
"""

try:
    import mlm_common.cli  # noqa: F401  (from here on Ctrl-C is one line)
    from finetuning.loop.command import finetuning_command
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None

from finetuning.config.embedding import EmbeddingConfig
from mlm_common.cli.process import run_as_script

main = finetuning_command(EmbeddingConfig, "finetuning.tasks.embedding:EmbeddingJob", __file__, __doc__)

if __name__ == "__main__":
    run_as_script(main)
