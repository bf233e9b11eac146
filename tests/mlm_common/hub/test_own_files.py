"""A push sends what it is told to, deletes what an earlier one listed, and leaves what others put there."""

import json

import pytest

from mlm_common.errors import InputError
from mlm_common.hub.access import check_hub_access
from mlm_common.hub.own_files import LISTING_NAME, FormerPush
from mlm_common.hub.push import HubPushError, HubRepository, push_files
from tests.servers.fixtures import HubHandle

REPO = "alice/model"
FORMER = FormerPush("README.md", ("made by us",), r"README\.md|weights/\d")
REPOSITORY = HubRepository(REPO, former=FORMER)
CARD = "---\ntags:\n- ours\n---\n\nmade by us\n"
FILES = {"README.md": CARD.encode(), "weights/1": b"1"}


def push(repository: HubRepository = REPOSITORY, replaced: str | None = None, **files: bytes) -> None:
    named = {path.replace("_", "/"): content for path, content in files.items()} or FILES
    push_files(named, repository, commit_message="push", kept_in="folder", replaced=replaced)


def files(server: HubHandle, branch: str = "main") -> dict[str, bytes]:
    there = server.files(REPO, revision=branch)
    return {path: content for path, content in there.items() if path not in (".gitattributes", LISTING_NAME)}


def listed(server: HubHandle, branch: str = "main") -> list[str]:
    return json.loads(server.files(REPO, revision=branch)[LISTING_NAME])["files"]


@pytest.mark.parametrize(
    "there",
    [
        {"data.parquet": b"rows"},
        {"README.md": b"---\nlicense: mit\n---\n\n# Mine\n\nCite it.\n"},
        {"README.md": b"A card without metadata"},
        {LISTING_NAME: b'{"files": ["data.parquet"]}', "data.parquet": b"rows"},
        {LISTING_NAME: b"["},
        {"weights/1": b"somebody's"},
    ],
)
def test_a_repository_with_files_or_a_card_of_others_is_refused_and_untouched(
    there: dict[str, bytes], hub_here: HubHandle
) -> None:
    for path, content in there.items():
        hub_here.put(REPO, path, content)
    before = hub_here.repository(REPO)
    with pytest.raises(InputError, match=r"does not mix with the files of others.*--hub-revision"):
        check_hub_access(REPOSITORY)
    with pytest.raises(HubPushError, match="does not mix with the files of others"):
        push()
    assert hub_here.repository(REPO) == before


def test_the_branch_that_cures_it_begins_without_the_files_of_main(hub_here: HubHandle) -> None:
    hub_here.put(REPO, "data.parquet", b"rows")
    on_a_branch = HubRepository(REPO, branch="ours")
    check_hub_access(on_a_branch)
    push(on_a_branch)
    assert files(hub_here, "ours") == FILES
    assert files(hub_here) == {"data.parquet": b"rows"}
    check_hub_access(on_a_branch)


@pytest.mark.parametrize("card", [b"", b"---\nlicense: mit\n---\n", b"---\nlicense: mit\n---"])
def test_a_new_repository_with_the_card_of_the_hub_is_taken_and_its_license_kept(
    card: bytes, hub_here: HubHandle
) -> None:
    hub_here.put(REPO, "README.md", card)
    check_hub_access(REPOSITORY)
    for _ in range(2):
        push()
        pushed = files(hub_here)["README.md"].decode()
        assert pushed.replace("license: mit\n", "") == CARD
        assert ("license: mit" in pushed) == bool(card)
    assert len(hub_here.repository(REPO)["commits"]) == 3


def test_a_license_that_is_given_wins(hub_here: HubHandle) -> None:
    hub_here.put(REPO, "README.md", b"---\nlicense: mit\n---\n")
    card = b"---\nlicense: apache-2.0\n---\n\nmade by us\n"
    push_files({"README.md": card}, REPOSITORY, commit_message="push", kept_in="folder")
    assert files(hub_here) == {"README.md": card}


def test_what_others_added_or_wrote_into_the_card_stays(hub_here: HubHandle, caplog: pytest.LogCaptureFixture) -> None:
    push()
    hub_here.put(REPO, "LICENSE", b"theirs")
    hub_here.put(REPO, "weights/theirs", b"theirs")
    check_hub_access(REPOSITORY)
    assert "files that no push listed; they stay: LICENSE, weights/theirs" in caplog.text
    hub_here.put(REPO, "README.md", CARD.encode() + b"Cite it.\n")
    push(replaced="weights/", **{"README.md": b"---\ntags: []\n---\n\nnewer\n", "weights_2": b"2"})
    assert "was written there, so it stays as it is" in caplog.text
    theirs = {"LICENSE": b"theirs", "weights/theirs": b"theirs", "README.md": CARD.encode() + b"Cite it.\n"}
    assert files(hub_here) == theirs | {"weights/2": b"2"}
    with pytest.raises(HubPushError, match="weights/theirs on the Hub is not"):
        push(weights_theirs=b"ours")


def test_files_are_deleted_only_where_an_earlier_push_listed_them(hub_here: HubHandle) -> None:
    push()
    push(replaced="weights/", weights_2=b"2", other_1=b"other")
    assert listed(hub_here) == ["README.md", "other/1", "weights/2"]
    push(weights_3=b"3")
    assert set(files(hub_here)) == set(listed(hub_here)) == {"README.md", "other/1", "weights/2", "weights/3"}


def test_a_repository_of_a_version_without_listings_is_known_by_its_card(hub_here: HubHandle) -> None:
    for path, content in (FILES | {".env": b"pushed by mistake"}).items():
        hub_here.put(REPO, path, content)
    check_hub_access(REPOSITORY)
    push(replaced="weights/", weights_2=b"2")
    assert files(hub_here) == {"README.md": FILES["README.md"], ".env": b"pushed by mistake", "weights/2": b"2"}


@pytest.mark.parametrize("fault", [{"status": 503}, {"mode": "reset"}, {"mode": "lost_answer"}])
def test_a_repository_that_cannot_be_read_for_a_moment_is_not_taken_for_an_empty_one(
    fault: dict[str, object], hub_here: HubHandle
) -> None:
    push()
    for path in ("/tree/", LISTING_NAME):
        hub_here.fault(path, method="GET", **fault)
    push(weights_2=b"2")
    assert listed(hub_here) == ["README.md", "weights/1", "weights/2"]
