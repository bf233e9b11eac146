"""Stage 4, from a checkpoint to a score. Its chapters in reading order:

    run_classification.py   command: classify or rate texts or pairs of texts, from GLUE or from your files
    run_tagging.py          command: tag words, such as names of people and places
    run_multiple_choice.py  command: choose one of several texts, as in SWAG, RACE and COPA
    run_qa.py               command: find answers to questions in paragraphs, as in SQuAD
    run_task.py             command: a custom task, which is a class in a Python file
    run_embedding.py        command: embed texts, so that those that belong together are close
    predict.py              command: predict with a model of any of these, for given texts or a file
    search.py               command: embed a corpus once, and find the texts that answer a question
    glue_submission.py      command: the predictions of GLUE runs as the file that its site accepts
    config/                 all settings of a run: those shared with pretraining, and where the examples are
    data/                   tables of texts and labels; encoded, in buckets of a few lengths, batched
    loop/                   open the model to start from, train with the loop of `train`, predict and score, write
                            results; what is asked of a task for that
    tasks/                  one task a file: how examples are read and encoded, heads, losses, scores; predictions

What trains is the stage before, `train`: step, checkpoints, resuming, devices, export. Nothing there knows of this one.
"""

import train  # noqa: F401  (before transformers and TensorFlow)
