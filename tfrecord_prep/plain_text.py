"""A tokenizer for plain text: what reads like a special token in a document is text, too."""

import json

# A noncharacter of Unicode, which stands for nothing in text.
_NOT_IN_TEXT = "\U0010ffff"


def plain_text_tokenizer_json(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` with the same ids, whose special tokens no text can produce.

    `encode_special_tokens` of the library does less: a unigram model holds its special tokens among its pieces, and
    goes on finding them in text. Here they get names that text does not contain.
    """
    settings = json.loads(tokenizer_json)
    special_tokens = {token["content"] for token in settings["added_tokens"] if token["special"]}

    def renamed(token: str) -> str:
        return _NOT_IN_TEXT + token if token in special_tokens else token

    for token in settings["added_tokens"]:
        token["content"] = renamed(token["content"])
    model = settings["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed(token): index for token, index in vocabulary.items()}
    else:
        model["vocab"] = [[renamed(token), score] for token, score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = renamed(model["unk_token"])
    settings["truncation"] = settings["padding"] = settings["post_processor"] = None
    return json.dumps(settings, ensure_ascii=False)
