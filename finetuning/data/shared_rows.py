"""Rows that training shares with the parts that are scored: refused if they are most of a part, else counted."""

import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from mlm_common.errors import InputError

logger = logging.getLogger(__name__)

# The fraction of the different texts of a part that may be in the training part, as real data have duplicates.
MAX_SHARED = 0.5


def check_shared_rows(
    texts: Mapping[str, Sequence[Hashable]], names: Mapping[str, str], unscored: Sequence[str] = ()
) -> None:
    """Check that the parts to evaluate and predict have other texts than the training part.

    Texts that the training part repeats, such as short answers or commands, are only counted: any part has them.

    Args:
        texts: of each row of each part, {train, or a part: texts of the rows}.
        names: of the tables of the parts.
        unscored: parts without labels, whose shared rows are only counted.

    Raises:
        InputError: most of the different texts of a part with labels are in exactly one row of the training part.
    """
    known = Counter(texts["train"])
    unrepeated = {text for text, num_rows in known.items() if num_rows == 1}
    for part in [part for part in texts if part != "train"]:
        num_rows, num_shared = len(texts[part]), sum(text in known for text in texts[part])
        different = set(texts[part])
        if len(different & unrepeated) > MAX_SHARED * len(different) and part not in unscored:
            raise InputError(
                f"{names[part]} must have other rows than the training part, {names['train']}; {num_shared:,} of "
                f"{num_rows:,} are in both, so its scores would say nothing of new texts. Use other rows, or none."
            )
        if num_shared:
            logger.warning(
                "%s of %s rows of %s are also in the training part; scores on them are better than on new texts.",
                *(f"{num_shared:,}", f"{num_rows:,}", names[part]),
            )
