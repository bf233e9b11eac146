"""The parent's side of the TPU's compiler: what it asks, and what it makes of each way that the process can end."""

import json
import math
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.errors import InputError, RunFailedError
from train.checks.preflight.tpu_compiler import (
    SIZES,
    DoesNotFitError,
    MemoryUse,
    check_compiler,
    compile_for_tpu,
    largest_fitting,
    tpu_slice,
)
from train.checks.preflight.tpu_compiler_process import host_bounds

RESULT = {
    "argument_bytes": 400, "output_bytes": 90, "alias_bytes": 80, "temp_bytes": 1000, "generated_code_bytes": 7,
    "peak_bytes": 1200, "num_flops": 1e6, "num_bytes_accessed": 2e6, "versions": {"jax": "1", "libtpu": "2"},
}  # fmt: skip
TOO_LARGE = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (18.50G) exceeds available HBM (15.75G). HLO module: step."
)
TOO_LARGE_BEFORE = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm. Exceeded by"


@pytest.fixture
def interpreter(tmp_path):
    """Make a function that makes an `interpreter` of a shell script; $6 is the folder it answers in."""

    def make(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def answering(result, folder):
    (folder / "answer.json").write_text(json.dumps(result), encoding="utf-8")
    return f"cp '{folder}/answer.json' \"$6/result.json\"; echo 'ENTRY' > \"$6/compiled.hlo\""


def test_what_the_compiler_is_asked_and_answers(interpreter, tmp_path, monkeypatch):
    script = f"echo \"$2 $3 $4 $(cat $5) $JAX_PLATFORMS $TPU_SKIP_MDS_QUERY [$TPU_LIBRARY_PATH]\" > '{tmp_path}/asked'"
    python = interpreter(f"{script}\n{answering(RESULT, tmp_path)}")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/somewhere/libtpu.so")
    compiled = compile_for_tpu("module", tpu_slice("v4-8"), python=python)
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "v4:2x2x1 megacore 4 module cpu 1 []\n"
    assert compiled.memory_bytes == 400 + 90 - 80 + 1000 + 7
    assert compiled.peak_bytes == 1200
    assert compiled.hlo == "ENTRY\n"


@pytest.mark.parametrize("message", [TOO_LARGE, TOO_LARGE_BEFORE])
def test_a_step_that_does_not_fit_is_told_by_how_much(interpreter, tmp_path, message):
    python = interpreter(answering({"versions": {}, "error": message}, tmp_path))
    with pytest.raises(DoesNotFitError, match=r"needs 18\.50 GiB .* 2\.75 GiB more than the 15\.75 GiB") as caught:
        compile_for_tpu("module", tpu_slice("v5e-8"), python=python)
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (int(18.5 * 2**30), int(15.75 * 2**30))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo \'{"error": "UNIMPLEMENTED: such"}\' > "$6/result.json"', "for this TPU: UNIMPLEMENTED: such"),
        ("echo no such import >&2; exit 3", r"(?s)status 3.*no such import"),
        ("kill -9 $$", r"(?s)status -9.*too little memory"),
    ],
)
def test_a_step_that_does_not_compile_and_a_compiler_that_dies(interpreter, script, message):
    with pytest.raises(RunFailedError, match=message):
        compile_for_tpu("module", tpu_slice("v5e-8"), python=interpreter(script))


def test_a_missing_compiler_is_named_with_the_fix(interpreter):
    python = interpreter("echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'libtpu'\" >&2; exit 1")
    message = r"No module named 'libtpu'\. .*python3 install\.py --extra preflight.*--compiler-python"
    with pytest.raises(InputError, match=message):
        check_compiler(python)
    check_compiler(interpreter("exit 0"))
    with pytest.raises(InputError, match=r"--compiler-python: /nowhere is not a Python interpreter \(No such file"):
        check_compiler("/nowhere")


@pytest.mark.parametrize(
    ("name", "num_chips", "compiler_name", "chip_config"),
    [
        ("v3-8", 4, "v3:2x2", "default"),
        ("v4-8", 4, "v4:2x2x1", "megacore"),
        ("v4-32", 16, "v4:2x2x4", "megacore"),
        ("v5p-8", 4, "v5p:2x2x1", "default"),
        ("v5litepod-8", 8, "v5e:2x4", "default"),
        ("v6e-8", 8, "v6e:2x4", "default"),
    ],
)
def test_slices_as_the_compiler_sees_them(name, num_chips, compiler_name, chip_config):
    topology = tpu_slice(name)
    assert (topology.num_chips, topology.compiler_name, topology.chip_config) == (num_chips, compiler_name, chip_config)


@pytest.mark.parametrize("generation", SIZES)
def test_every_slice_is_known(generation):
    for size in SIZES[generation]:
        topology = tpu_slice(f"{generation}-{size}")
        sides = [int(side) for side in topology.compiler_name.partition(":")[2].split("x")]
        assert math.prod(sides) == topology.num_chips
        assert topology.num_replicas == size // (2 if generation in ("v4", "v5p") else 1)


@pytest.mark.parametrize("name", ["v5e-2", "v6e", "v6e-0", "h100-8", ""])
def test_a_mistyped_slice_gets_the_list(name):
    with pytest.raises(InputError, match=rf"no TPU slice {name}\. .* v5e-1/4/8/16/.*, v6e-1"):
        tpu_slice(name)


def test_a_host_has_at_most_the_chips_of_its_slice():
    bounds = {"v5e:1x1": [1, 1, 1], "v5e:2x2": [2, 2, 1], "v5e:2x4": [2, 2, 1], "v4:2x2x2": [2, 2, 1]}
    assert {topology: host_bounds(topology) for topology in bounds} == bounds


LIMIT = 1000


def use(rows, fixed, per_row, saved_above):
    below = rows if saved_above is None or rows <= saved_above else saved_above + (rows - saved_above) / 10
    return fixed + per_row * below


def search(fixed, per_row, first_rows, saved_above=None):
    """Find (answer, the batches measured) where memory is affine, but past `saved_above` rows grows at a tenth."""
    measured = []

    def used(rows):
        return use(rows, fixed, per_row, saved_above)

    def measure(rows):
        measured.append(rows)
        return MemoryUse(used(rows) <= LIMIT, int(used(rows)), fixed, LIMIT)

    return largest_fitting(measure, first_rows), measured


def test_few_compilations_where_memory_is_affine():
    assert search(fixed=100, per_row=9, first_rows=16) == (96, [16, 64, 96, 104])
    assert search(fixed=100, per_row=9, first_rows=96) == (96, [96, 104])
    assert search(fixed=100, per_row=9, first_rows=400) == (96, [400, 96, 104])


def test_memory_that_shrinks_does_not_cause_a_leap():
    """As libtpu 0.0.42.1 has it for a RoBERTa-base on a v6e, in hundredths of GiB (392 rows: between 384 and 400)."""
    used = {344: 2938, 360: 3106, 368: 3069, 376: 3157, 384: 3158, 392: 3221}
    measured = []

    def measure(rows):
        measured.append(rows)
        return MemoryUse(rows <= 376, used[rows], 145, 3125)

    assert largest_fitting(measure, 344) == 376
    assert measured == [344, 360, 368, 392, 376, 384]


@given(
    fixed=st.integers(0, 1100),
    per_row=st.floats(0.01, 200),
    first_rows=st.integers(1, 2000),
    saved_above=st.none() | st.integers(1, 500),
)
def test_the_answer_fits_and_the_next_does_not(fixed, per_row, first_rows, saved_above):
    answer, measured = search(fixed, per_row, first_rows, saved_above)
    assert len(measured) == len(set(measured))
    assert (answer or 0) + 8 in measured
    assert answer is None or answer in measured
    assert answer is None or use(answer, fixed, per_row, saved_above) <= LIMIT
    assert use((answer or 0) + 8, fixed, per_row, saved_above) > LIMIT
    assert len(measured) <= 32
