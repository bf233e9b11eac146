"""Stage 4, from a checkpoint to a score. Read the modules in this order:

    run_classification.py   command: classify or rate texts or pairs of texts, from GLUE or from your files
    run_tagging.py          command: tag words, such as names of people and places
    run_multiple_choice.py  command: choose one of several texts, as in SWAG, RACE and COPA
    run_qa.py               command: find answers to questions in paragraphs, as in SQuAD
    run_task.py             command: train a custom task, which is a class in a Python file
    run_embedding.py        command: embed texts, so that related texts get similar vectors
    predict.py              command: predict with a fine-tuned model, for given texts or a file
    search.py               command: embed a corpus once, and find the texts that answer a question
    glue_submission.py      command: collect the predictions of GLUE runs in the file that gluebenchmark.com accepts
    config/                 all settings of a run: the settings shared with pretraining, and the origin of examples
    data/                   read tables of texts and labels, encode them, and batch them by length
    loop/                   open the model to start from, train with the loop of `train`, predict, score and write
                            results; the interface of a task
    tasks/                  one task per file: reading and encoding of examples, heads, losses, scores; predictions

The previous stage, `train`, provides the training itself: step, checkpoints, resuming, devices, export. `train` does
not depend on this stage.
"""

import train  # noqa: F401  (before transformers and TensorFlow)
