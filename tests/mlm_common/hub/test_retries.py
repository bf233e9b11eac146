"""What is repeated, and what ends a request that gets no answer, whatever library sends the requests."""

import json
import re

import pytest
from huggingface_hub import constants

from mlm_common.hub import retries
from mlm_common.hub.push import HubRepository, check_hub_access
from mlm_common.hub.retries import HubAwayError, hub_error, is_away, repeat
from tests.mlm_common.test_retry import Failing

# What `hf_xet` raises, and what becomes of the page of a proxy.
PASSING = ConnectionError("Network error"), json.JSONDecodeError("Expecting value", "<html>", 0)


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_without_an_answer_of_the_hub_the_request_is_repeated(error, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert repeat(Failing(error, error), (0.0,) * 2) == 3
    with pytest.raises(OSError, match=re.escape(str(error))) as raised:
        repeat(Failing(error, error), (0.0,))
    assert is_away(raised.value)
    assert isinstance(hub_error("asked", raised.value), HubAwayError)


def test_nothing_is_repeated_where_it_is_forbidden_to_ask(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    function = Failing(*PASSING)
    with pytest.raises(ConnectionError):
        repeat(function, (0.0,) * 2)
    assert function.num_calls == 1


def test_a_request_that_gets_no_answer_ends(hub_here, monkeypatch):
    monkeypatch.setattr(retries, "READ_TIMEOUT_SECONDS", 0.2)
    hub_here.fault("whoami", mode="delay", delay_seconds=2.0)
    check_hub_access(HubRepository("alice/model"))
    hub_here.fault("whoami", mode="delay", delay_seconds=2.0, times=2)
    with pytest.raises(HubAwayError, match=r"[Tt]imed out"):
        check_hub_access(HubRepository("alice/model"))
