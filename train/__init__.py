"""What TensorFlow and transformers read from the environment when they are first imported.

Import this module before `tensorflow`, `tf_keras` and transformers' TF classes. It imports none of them itself.
"""

import importlib.util
import os
import sys

from mlm_common.errors import InputError

IMPORT_UTILS = "transformers.utils.import_utils"


def prepare_environment() -> None:
    """Set the variables that make transformers' TF classes work with the TensorFlow installed.

    Raises:
        InputError: transformers was imported before, and took this TensorFlow for missing.
    """
    # transformers' TF classes are Keras 2 classes.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if importlib.util.find_spec("tensorflow") is None:
        return
    # transformers looks for a distribution of a name it knows, and `tensorflow-tpu` is none of them.
    os.environ["FORCE_TF_AVAILABLE"] = "1"
    import_utils = sys.modules.get(IMPORT_UTILS)
    if import_utils is not None and not import_utils.is_tf_available():
        raise InputError(
            "train must be imported before transformers; transformers was imported first and does not see "
            "the TensorFlow installed. Import train first, or set FORCE_TF_AVAILABLE=1."
        )


prepare_environment()
