import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from tests.servers.fixtures import CloudStorageHandle
from tokenizer_training.tokenizer import (
    SPECIAL_TOKENS,
    load_tokenizer,
    save_tokenizer,
    special_ids,
    tokenizer_sha256,
    vocabulary_size,
)

WORDS = ["the", "model", "reads", "text"]


def make_tokenizer(scores: list[float] | None = None, **names: str | None) -> PreTrainedTokenizerFast:
    scores = scores or [-1.5, -2.123456789012345, -3.1, -1 / 3]
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS.values()]
    pieces += [(f"▁{word}", score) for word, score in zip(WORDS, scores, strict=True)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    all_names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()} | names
    return PreTrainedTokenizerFast(tokenizer_object=backend, **all_names)


def test_own_folders_load_without_all_models_classes(tmp_path: Path) -> None:
    save_tokenizer(make_tokenizer(), str(tmp_path))
    code = (
        "import sys; from tokenizer_training.tokenizer import load_tokenizer as load; tokenizer = load(sys.argv[1]); "
    )
    code += "assert 'transformers.models.auto.tokenization_auto' not in sys.modules; "
    code += "from transformers import AutoTokenizer; other = AutoTokenizer.from_pretrained(sys.argv[1]); "
    code += "assert (type(tokenizer), repr(tokenizer)) == (type(other), repr(other)); "
    code += "assert tokenizer.init_kwargs == other.init_kwargs, (tokenizer.init_kwargs, other.init_kwargs)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedTokenizerFast:
    save_tokenizer(tokenizer, str(folder))
    return load_tokenizer(str(folder))


def test_special_ids_and_vocabulary_size() -> None:
    tokenizer = make_tokenizer()
    assert special_ids(tokenizer) == {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
    assert vocabulary_size(tokenizer) == 9
    tokenizer.add_tokens(["new"])
    assert vocabulary_size(tokenizer) == 10


def test_saved_tokenizer_reads_the_same(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    loaded = saved(tokenizer, tmp_path / "new" / "folder")
    assert isinstance(loaded, PreTrainedTokenizerFast)
    text = "the model reads[MASK] unseen"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"] == [5, 6, 7, 4, 3]


def test_saved_files(tmp_path: Path) -> None:
    saved(make_tokenizer(), tmp_path)
    names = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "word_starts.npy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_hash_is_stable_through_saving_and_truncation(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    sha256 = tokenizer_sha256(tokenizer)
    tokenizer(["the model", "text"], truncation=True, max_length=1, padding="max_length")
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer_sha256(tokenizer) == sha256
    for number in range(3):
        tokenizer = saved(tokenizer, tmp_path / str(number))
        assert tokenizer_sha256(tokenizer) == sha256
        assert tokenizer.backend_tokenizer.truncation is None


def test_hash_survives_the_library_changing_a_last_bit() -> None:
    scores = [-2.1234567890123452, -13.786306381225586, -1 / 3, -9.87654321]
    tokenizer = make_tokenizer(scores)
    reread = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
        **{f"{name}_token": token for name, token in SPECIAL_TOKENS.items()},
    )
    assert tokenizer_sha256(reread) == tokenizer_sha256(tokenizer)


def test_hash_tells_tokenizers_apart() -> None:
    lowercased = make_tokenizer()
    lowercased.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    extended = make_tokenizer()
    extended.add_tokens(["new"])
    tokenizers = [
        make_tokenizer(),
        make_tokenizer([-1.5, -2.1, -3.1, -1.0]),
        make_tokenizer(mask_token="<unk>"),
        lowercased,
        extended,
    ]
    assert max(Counter(map(tokenizer_sha256, tokenizers)).values()) == 1


@pytest.mark.parametrize("missing", SPECIAL_TOKENS)
def test_tokenizer_without_a_special_token_is_refused(missing: str, tmp_path: Path) -> None:
    save_tokenizer(make_tokenizer(**{f"{missing}_token": None}), str(tmp_path))
    with pytest.raises(InputError, match=f"{tmp_path} lacks {missing}"):
        load_tokenizer(str(tmp_path))


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    with pytest.raises(InputError, match="cannot be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "missing"))


def test_cloud_storage(cloud_storage: CloudStorageHandle, tmp_path: Path) -> None:
    save_tokenizer(make_tokenizer(), str(tmp_path))
    program = (
        "import sys; from tokenizer_training.tokenizer import *\n"
        "save_tokenizer(load_tokenizer(sys.argv[1]), sys.argv[2])\n"
        "print(tokenizer_sha256(load_tokenizer(sys.argv[2])))\n"
        "from tokenizer_training.tokenizer import load_word_starts\n"
        "print(load_word_starts(sys.argv[2]).sum(), load_word_starts(sys.argv[2] + '/none'))"
    )
    remote = f"{cloud_storage.bucket_url}/tokenizers/first"
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), remote],
        env=os.environ | cloud_storage.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [tokenizer_sha256(make_tokenizer()), "9", "None"]
    for name in ("tokenizer.json", "word_starts.npy"):
        assert cloud_storage.objects()[f"tokenizers/first/{name}"] == (tmp_path / name).read_bytes()
