"""The exit statuses: each has a meaning, which the site's page and the supervisor's choice follow."""

from mlm_common import errors


def test_each_status_has_a_meaning_and_no_other():
    assert set(errors.MEANINGS) == {0} | {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert set(errors.MEANINGS) >= errors.FINAL_STATUSES
