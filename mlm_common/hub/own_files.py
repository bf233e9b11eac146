"""Which files of a repository on the Hub are ours: every push lists there what it sent, and touches nothing else."""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.errors import InputError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.hf_api import RepoFile

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
LISTING_NAME = "pushed_files.json"
PUSHED_BY = "mlm-pretraining"
# What the Hub makes itself.
ATTRIBUTES_NAME = ".gitattributes"
# A card of metadata alone, or of nothing: as the Hub makes it with a new repository.
DEFAULT_CARD = re.compile(r"\s*(---\n((?!---).*\n)*---\s*)?")
NUM_SHOWN = 3


@dataclass(frozen=True)
class FormerPush:
    """How the push of a version that kept no listing is known.

    proof: path of a file.
    marks: what stands in that file, all of it, if the push is ours.
    names: pattern of the paths of all that was sent.
    """

    proof: str
    marks: tuple[str, ...]
    names: str


@dataclass(frozen=True)
class OwnFiles:
    """The files of a branch, and which of them are ours.

    there: all, by path.
    listed: paths that our pushes sent or announced.
    card_sha1: git's id of the card as it was sent; None where none was.
    card: the README.md that is there.
    """

    there: Mapping[str, "RepoFile"] = field(default_factory=dict)
    listed: frozenset[str] = frozenset()
    card_sha1: str | None = None
    card: str = ""

    def operations(
        self, files: Mapping[str, Path | bytes], *, announced: Collection[str] = (), deleted: Collection[str] = ()
    ) -> "list[CommitOperationAdd | CommitOperationDelete]":
        """Make the operations of a commit that sends files and lists them.

        A card that was written on the Hub, or changed there, stays as it is. A license that the card there names is
        taken over by one that names none.

        Args:
            files: {path in the repository: what it is to hold}.
            announced: paths of files that other commits will send.
            deleted: paths of files to delete; those that are not ours, or not there, are passed over.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        files, card_sha1 = dict(files), self.card_sha1
        if CARD_NAME in files and self._has_another_card:
            logger.warning("the %s on the Hub was written there, so it stays as it is", CARD_NAME)
            del files[CARD_NAME]
        elif CARD_NAME in files:
            card = _with_license(_content(files[CARD_NAME]), self.card)
            files[CARD_NAME], card_sha1 = card, git_sha1(card)
        if foreign := sorted((files.keys() & self.there.keys()) - self.listed - {CARD_NAME, LISTING_NAME}):
            raise InputError(f"A push replaces only files of its own; {_shown(foreign)} on the Hub is not.")
        deleted = self.listed & set(deleted)
        listed = sorted((self.listed - deleted) | files.keys() | set(announced))
        listing = {"pushed_by": PUSHED_BY, "card_sha1": card_sha1, "files": listed}
        files[LISTING_NAME] = (json.dumps(listing, indent=2) + "\n").encode()
        additions = [CommitOperationAdd(path, content) for path, content in files.items()]
        return additions + [CommitOperationDelete(path) for path in sorted(deleted & self.there.keys())]

    @property
    def _has_another_card(self) -> bool:
        """Whether a card is there that we did not send."""
        if CARD_NAME not in self.there or DEFAULT_CARD.fullmatch(self.card):
            return False
        return self.there[CARD_NAME].blob_id != self.card_sha1


def read_own_files(api: "HfApi", target: Mapping[str, Any], former: FormerPush | None) -> OwnFiles:
    """Read which files of a branch are ours, and refuse one that was made by others.

    A branch is ours where a push has left its listing, or where a former version pushed; others may have added files
    since. A new one, with the card that the Hub makes, is as good.

    Args:
        api: of the Hub.
        target: repo_id, repo_type and revision of the branch.
        former: how pushes of former versions are known.

    Raises:
        InputError: it holds files, or a card, and none of them is ours.
    """
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(recursive=True, **target)
    there = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    card = _read(api, target, CARD_NAME) if CARD_NAME in there else ""
    listing = _parse_listing(_read(api, target, LISTING_NAME)) if LISTING_NAME in there else None
    if listing is not None:
        own = OwnFiles(there, frozenset(listing["files"]), listing["card_sha1"], card)
    elif former is not None and former.proof in there and _is_proven(_read(api, target, former.proof), former):
        listed = frozenset(path for path in there if re.fullmatch(former.names, path))
        own = OwnFiles(there, listed, there[CARD_NAME].blob_id if CARD_NAME in listed else None, card)
    else:
        own = OwnFiles(there, card=card)
        unknown = there.keys() - {ATTRIBUTES_NAME} - ({CARD_NAME} if DEFAULT_CARD.fullmatch(card) else set())
        if unknown:
            raise InputError(
                f"A push does not mix with the files of others; {target['repo_id']} has {_shown(sorted(unknown))}. "
                "Name another repository, or with --hub-revision a branch: a new one begins without files."
            )
    if others := sorted(there.keys() - own.listed - {ATTRIBUTES_NAME, LISTING_NAME, CARD_NAME}):
        logger.warning("%s has files that no push listed; they stay: %s", target["repo_id"], _shown(others))
    return own


def git_sha1(content: bytes) -> str:
    """Compute the id that git, and so the Hub, gives a small file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _read(api: "HfApi", target: Mapping[str, Any], path: str) -> str:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import get_session, hf_raise_for_status

    where = {"repo_type": target["repo_type"], "revision": target["revision"], "endpoint": api.endpoint}
    answer = get_session().get(hf_hub_url(target["repo_id"], path, **where), headers=api._build_hf_headers())
    hf_raise_for_status(answer)
    return answer.content.decode("utf-8", errors="replace")


def _parse_listing(text: str) -> dict[str, Any] | None:
    try:
        listing = json.loads(text)
        return listing if listing["pushed_by"] == PUSHED_BY else None
    except (ValueError, KeyError, TypeError):
        return None


def _is_proven(text: str, former: FormerPush) -> bool:
    return all(mark in text for mark in former.marks)


def _content(file: Path | bytes) -> bytes:
    return file if isinstance(file, bytes) else file.read_bytes()


def _with_license(card: bytes, there: str) -> bytes:
    """Give a card the license of the one that is there, unless it names one."""
    if not there.strip():
        return card
    import yaml
    from huggingface_hub import RepoCard

    old, new = (RepoCard(text, ignore_metadata_errors=True).data.to_dict() for text in (there, card.decode()))
    kept = {name: value for name, value in old.items() if name.startswith("license")}
    if not kept or "license" in new:
        return card
    return card.replace(b"---\n", b"---\n" + yaml.safe_dump(kept).encode(), 1)


def _shown(paths: list[str]) -> str:
    more = f" and {len(paths) - NUM_SHOWN:,} more" if len(paths) > NUM_SHOWN else ""
    return ", ".join(paths[:NUM_SHOWN]) + more
