"""Check that validation and test splits do not repeat the training split. If only a few rows are shared, warn."""

import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from mlm_common.errors import InputError

logger = logging.getLogger(__name__)

# Fraction of a split's distinct texts that may also be in the training split, because real data have duplicates.
MAX_SHARED = 0.5


def check_shared_rows(
    texts: Mapping[str, Sequence[Hashable]], names: Mapping[str, str], unscored: Sequence[str] = ()
) -> None:
    """Check that the texts of the other splits differ from the texts of the training split.

    Texts that occur several times in the training split, such as short answers or commands, are expected in any split,
    so these texts never cause an error.

    Args:
        texts: {split: text of each row}, with the key "train" for the training split.
        names: {split: name of its table}.
        unscored: splits without labels, for which shared rows only cause a warning.

    Raises:
        InputError: most of the distinct texts of a labelled split occur in exactly one row of the training split.
    """
    train_counts = Counter(texts["train"])
    unrepeated = {text for text, num_rows in train_counts.items() if num_rows == 1}
    for split in [split for split in texts if split != "train"]:
        num_rows, num_shared = len(texts[split]), sum(text in train_counts for text in texts[split])
        distinct = set(texts[split])
        if len(distinct & unrepeated) > MAX_SHARED * len(distinct) and split not in unscored:
            raise InputError(
                f"{num_shared:,} of {num_rows:,} rows of {names[split]} are also in the training split, "
                f"{names['train']}, so scores on them would not show how the model does on new texts. Use other rows, "
                "or leave the split out."
            )
        if num_shared:
            logger.warning(
                "%s of %s rows of %s are also in the training split; scores on them are better than on new texts.",
                *(f"{num_shared:,}", f"{num_rows:,}", names[split]),
            )
