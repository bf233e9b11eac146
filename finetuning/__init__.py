"""Stage 4, from a checkpoint to a score. Its chapters in reading order, each of which imports from those before it:

    run_classification.py   the command: texts or pairs of texts, in classes or with a number; GLUE and one's own
    run_tagging.py          likewise: words that have a tag each, such as names of people and places
    run_qa.py               likewise: questions about paragraphs, answered by a part of them: SQuAD
    run_task.py             likewise: a custom task, which is a class in a file
    predict.py              what a model of any of these predicts for given texts or a file
    glue_submission.py      the runs of GLUE's tasks as the file that its site takes
    config/                 all settings of a run: those of pretraining where they are the same, and where examples are
    data/                   tables of texts and labels, GLUE's among them; encoded, in buckets of a few lengths, batched
    scores/                 metrics, and what a guess without the text would score
    tasks/                  what is learned: the heads, their losses, their figures
    loop/                   a run opened, trained by `train`'s loop, and its results written

What trains is the stage before, `train`: step, checkpoints, resuming, devices, export. Nothing there knows of this one.
"""

import train  # noqa: F401  (before transformers and TensorFlow)
