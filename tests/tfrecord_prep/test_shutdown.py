import signal
import threading

import pytest

from mlm_common.errors import EXIT_STOPPED
from tfrecord_prep.shutdown import stoppable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_request_ends_in_one_line(
    number: signal.Signals, handler: signal.Handlers, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, handler)
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if (number, handler) == (signal.SIGINT, signal.SIG_IGN):
            with stoppable():
                signal.raise_signal(number)
            return
        with pytest.raises(SystemExit) as caught, stoppable():
            signal.raise_signal(number)
        assert caught.value.code == EXIT_STOPPED
        assert capsys.readouterr().err == "Stopped. Run the same command again to continue.\n"
        assert signal.getsignal(signal.SIGTERM) == sigterm
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_handle_no_signals() -> None:
    entered = []

    def work() -> None:
        with stoppable():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered
