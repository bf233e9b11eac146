"""The Hugging Face Hub on one port of 127.0.0.1, in memory.

It speaks the part of the API that huggingface_hub uses to create a repository, its branches and tags, to push a folder
(small files in the commit, large ones by LFS, never by Xet) and to list and download files. Run as
`python -m tests.servers.hub`.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote

import yaml

from tests.servers.hub_repositories import (
    DATE,
    MAIN,
    Account,
    HubFile,
    Repositories,
    Repository,
    describe_file,
    describe_folder,
    is_lfs_path,
)
from tests.servers.loopback import (
    Application,
    HttpError,
    LoopbackServer,
    Request,
    Response,
    content_response,
    json_response,
)

WRITE_TOKEN = "hf_write"
READ_TOKEN = "hf_read"
FINE_GRAINED_TOKEN = "hf_fine_grained"
ACCOUNTS = {
    WRITE_TOKEN: Account("alice", "write", {"lab": "write", "library": "read"}),
    READ_TOKEN: Account("alice", "read"),
    FINE_GRAINED_TOKEN: Account("alice", "fineGrained", writable=("alice/allowed",)),
}

# A few of those that the Hub knows.
LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "other", "unknown")

_REPO = r"/api/(?P<kind>models|datasets)/(?P<repo_id>[^/]+/[^/]+)"
_WEB_REPO = r"/(?:(?P<kind>datasets)/)?(?P<repo_id>[^/]+/[^/]+?)"


class Hub(Application):
    """The API; errors carry the headers by which huggingface_hub tells them apart."""

    def __init__(self) -> None:
        self.reset()
        self._routes: list[tuple[str, str, Callable[..., Response]]] = [
            ("GET", r"/api/whoami-v2", self.who_am_i),
            ("POST", r"/api/repos/create", self.create_repository),
            ("POST", r"/api/validate-yaml", self.validate_yaml),
            ("GET", _REPO + r"/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", self.list_tree),
            ("POST", _REPO + r"/paths-info/(?P<revision>[^/]+)", self.describe_paths),
            ("GET", _REPO + r"(?:/revision/(?P<revision>[^/]+))?", self.describe_repository),
            ("POST", _REPO + r"/preupload/(?P<revision>[^/]+)", self.choose_upload_modes),
            ("POST", _REPO + r"/commit/(?P<branch>[^/]+)", self.commit),
            ("GET", _REPO + r"/refs", self.list_refs),
            ("GET", _REPO + r"/commits/(?P<revision>[^/]+)", self.list_commits),
            ("POST", _REPO + r"/branch/(?P<name>[^/]+)", self.create_branch),
            ("POST", _REPO + r"/tag/(?P<revision>[^/]+)", self.create_tag),
            ("POST", _WEB_REPO + r"\.git/info/lfs/objects/batch", self.begin_lfs),
            ("PUT", r"/lfs/(?P<sha256>[0-9a-f]{64})", self.put_lfs),
            ("POST", r"/lfs/(?P<sha256>[0-9a-f]{64})/verify", self.verify_lfs),
            ("GET|HEAD", _WEB_REPO + r"/resolve/(?P<revision>[^/]+)/(?P<path>.+)", self.download),
        ]

    def reset(self) -> None:
        self.repositories = Repositories()

    def control(self, action: str, argument: dict[str, Any]) -> Any:
        key = (argument.get("kind", "models"), argument.get("repo_id", ""))
        if action == "repository":
            repository = self.repositories.by_name.get(key)
            if repository is None:
                return None
            revision = argument.get("revision", MAIN)
            files = repository.at(revision).files
            return {
                "private": repository.private,
                "sha": repository.at(revision).sha,
                "commits": [commit.title for commit in repository.branch(revision)],
                "tags": {name: commit.title for name, commit in repository.tags.items()},
                "branches": list(repository.branches),
                "files": {path: base64.b64encode(file.content).decode() for path, file in files.items()},
            }
        if action == "put":
            repository = self.repositories.by_name.get(key) or self.repositories.create(*key, private=False)
            content = base64.b64decode(argument["content"])
            file = HubFile(content, is_lfs_path(argument["path"], len(content)))
            branch = argument.get("revision", MAIN)
            if branch not in repository.branches:
                repository.add_branch(branch, MAIN)
            self.repositories.commit(repository, "put", repository.at(branch).files | {argument["path"]: file}, branch)
            return None
        return super().control(action, argument)

    def respond(self, request: Request) -> Response:
        for methods, pattern, answer in self._routes:
            match = re.fullmatch(pattern, request.path)
            if match and re.fullmatch(methods, request.method):
                parts = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
                return answer(request, **parts)
        raise HttpError(404, "", f"the stand-in has no {request.method} {request.path}")

    def error_response(self, request: Request, error: HttpError) -> Response:
        del request
        headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.reason} if error.reason else {})
        return json_response({"error": error.message}, error.status, headers | error.headers)

    # Accounts and repositories.

    def account(self, request: Request) -> Account | None:
        if request.token and request.token not in ACCOUNTS:
            raise HttpError(401, "", "Invalid credentials in Authorization header")
        return ACCOUNTS.get(request.token)

    def check_may_write(self, request: Request, repo_id: str) -> None:
        account = self.account(request)
        if account is None:
            raise HttpError(401, "", "Unauthorized")
        if not account.may_write(repo_id):
            raise HttpError(403, "", "You don't have the rights to write here")

    def repository(self, request: Request, kind: str, repo_id: str) -> Repository:
        account = self.account(request)
        repository = self.repositories.by_name.get((kind, repo_id))
        if repository is None or (repository.private and not (account and account.may_read_private(repo_id))):
            raise HttpError(404 if account else 401, "RepoNotFound", "Repository not found")
        return repository

    def who_am_i(self, request: Request) -> Response:
        account = self.account(request)
        if account is None:
            raise HttpError(401, "", "Unauthorized")
        token: dict[str, Any] = {"displayName": "token", "role": account.role}
        if account.role == "fineGrained":
            scopes = [{"entity": {"name": name}, "permissions": ["repo.write"]} for name in account.writable]
            token["fineGrained"] = {"global": [], "scoped": scopes}
        organizations = [{"name": name, "roleInOrg": role} for name, role in account.organizations.items()]
        auth = {"type": "access_token", "accessToken": token}
        return json_response({"type": "user", "name": account.user, "orgs": organizations, "auth": auth})

    def create_repository(self, request: Request) -> Response:
        wanted = request.json()
        account = self.account(request)
        repo_id = f"{wanted.get('organization') or (account.user if account else '')}/{wanted['name']}"
        kind = f"{wanted.get('type') or 'model'}s"
        self.check_may_write(request, repo_id)
        content = {"url": f"{address(request)}/{'' if kind == 'models' else kind + '/'}{repo_id}", "id": repo_id}
        if (kind, repo_id) in self.repositories.by_name:
            return json_response(content | {"error": "You already created this repo"}, 409)
        is_private = wanted.get("private") or wanted.get("visibility") == "private"
        self.repositories.create(kind, repo_id, bool(is_private))
        return json_response(content)

    # Reading.

    def describe_repository(self, request: Request, kind: str, repo_id: str, revision: str = "main") -> Response:
        repository = self.repository(request, kind, repo_id)
        commit = repository.at(revision)
        description = {
            "id": repo_id,
            "author": repo_id.partition("/")[0],
            "sha": commit.sha,
            "lastModified": DATE,
            "createdAt": DATE,
            "private": repository.private,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        }
        return json_response(description)

    def list_tree(self, request: Request, kind: str, repo_id: str, revision: str, folder: str = "") -> Response:
        commit = self.repository(request, kind, repo_id).at(revision)
        prefix = f"{folder}/" if folder else ""
        is_recursive = request.query.get("recursive", "").lower() in ("1", "true")
        entries: dict[str, dict[str, Any]] = {}
        for path, file in sorted(commit.files.items()):
            parts = path.removeprefix(prefix).split("/")
            if not path.startswith(prefix):
                continue
            for depth in range(1, len(parts) if is_recursive else min(len(parts), 2)):
                parent = prefix + "/".join(parts[:depth])
                entries[parent] = describe_folder(parent)
            if is_recursive or len(parts) == 1:
                entries[path] = describe_file(path, file)
        if folder and not entries:
            raise HttpError(404, "EntryNotFound", f"{folder} does not exist")
        return json_response(list(entries.values()))

    def describe_paths(self, request: Request, kind: str, repo_id: str, revision: str) -> Response:
        files = self.repository(request, kind, repo_id).at(revision).files
        is_form = not request.body.startswith(b"{")
        paths = parse_qs(request.body.decode()).get("paths", []) if is_form else request.json()["paths"]
        entries = [describe_file(path, files[path]) for path in paths if path in files]
        folders = [path for path in paths if any(name.startswith(f"{path.rstrip('/')}/") for name in files)]
        return json_response(entries + [describe_folder(path.rstrip("/")) for path in folders])

    def download(self, request: Request, repo_id: str, revision: str, path: str, kind: str = "models") -> Response:
        commit = self.repository(request, kind, repo_id).at(revision)
        headers = {"X-Repo-Commit": commit.sha}
        if path not in commit.files:
            raise HttpError(404, "EntryNotFound", "Entry not found", headers)
        file = commit.files[path]
        headers |= {"ETag": f'"{file.oid}"', "Content-Type": "application/octet-stream"}
        if file.is_lfs:
            headers |= {"X-Linked-Size": str(len(file.content)), "X-Linked-Etag": f'"{file.sha256}"'}
        return content_response(request, file.content, headers)

    # Pushing.

    def validate_yaml(self, request: Request) -> Response:
        match = re.match(r"\s*---\n(.*?)\n---\n", request.json()["content"], flags=re.DOTALL)
        if not match:
            return json_response({"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]})
        errors = [{"message": message} for message in metadata_errors(match[1], request.json()["repoType"])]
        return json_response({"errors": errors, "warnings": []}, 400 if errors else 200)

    def list_refs(self, request: Request, kind: str, repo_id: str) -> Response:
        repository = self.repository(request, kind, repo_id)
        newest = {name: commits[-1] for name, commits in repository.branches.items()}
        content = {
            key: [
                {"name": name, "ref": f"refs/{ref}/{name}", "targetCommit": commit.sha}
                for name, commit in named.items()
            ]
            for key, ref, named in (("branches", "heads", newest), ("tags", "tags", repository.tags))
        }
        return json_response(content | {"converts": []})

    def list_commits(self, request: Request, kind: str, repo_id: str, revision: str) -> Response:
        commits = self.repository(request, kind, repo_id).branch(revision)
        newest_first = [
            {"id": commit.sha, "title": commit.title, "message": "", "date": DATE, "authors": []}
            for commit in reversed(commits)
        ]
        return json_response(newest_first)

    def create_branch(self, request: Request, kind: str, repo_id: str, name: str) -> Response:
        self.check_may_write(request, repo_id)
        self.repository(request, kind, repo_id).add_branch(name, request.json().get("startingPoint", MAIN))
        return json_response({})

    def create_tag(self, request: Request, kind: str, repo_id: str, revision: str) -> Response:
        self.check_may_write(request, repo_id)
        self.repository(request, kind, repo_id).add_tag(request.json()["tag"], revision)
        return json_response({})

    def choose_upload_modes(self, request: Request, kind: str, repo_id: str, revision: str) -> Response:
        self.check_may_write(request, repo_id)
        files = self.repository(request, kind, repo_id).at(revision).files
        modes = []
        for wanted in request.json()["files"]:
            path, old = wanted["path"], files.get(wanted["path"])
            mode = "lfs" if is_lfs_path(path, wanted["size"]) else "regular"
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": old.oid if old else None})
        return json_response({"files": modes})

    def begin_lfs(self, request: Request, repo_id: str, kind: str = "models") -> Response:
        self.check_may_write(request, repo_id)
        self.repository(request, kind, repo_id)
        objects = []
        for wanted in request.json()["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.repositories.lfs_objects:
                link = f"{address(request)}/lfs/{wanted['oid']}"
                entry["actions"] = {"upload": {"href": link}, "verify": {"href": f"{link}/verify"}}
            objects.append(entry)
        # The word "basic" keeps clients that know Xet from using it.
        return json_response({"transfer": "basic", "objects": objects})

    def put_lfs(self, request: Request, sha256: str) -> Response:
        if hashlib.sha256(request.body).hexdigest() != sha256:
            raise HttpError(400, "", "the content does not match the oid")
        self.repositories.lfs_objects[sha256] = request.body
        return Response(200)

    def verify_lfs(self, request: Request, sha256: str) -> Response:
        if len(self.repositories.lfs_objects.get(sha256, b"")) != request.json()["size"]:
            raise HttpError(404, "", "Object does not exist")
        return json_response({})

    def commit(self, request: Request, kind: str, repo_id: str, branch: str) -> Response:
        self.check_may_write(request, repo_id)
        repository = self.repository(request, kind, repo_id)
        files, title = dict(repository.branch(branch)[-1].files), ""
        for operation in map(json.loads, request.body.splitlines()):
            value = operation["value"]
            if operation["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, repository.at(branch).sha):
                    raise HttpError(412, "", "A commit has happened since")
            elif operation["key"] == "file":
                files[value["path"]] = HubFile(base64.b64decode(value["content"]), is_lfs=False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.repositories.lfs_objects:
                    raise HttpError(400, "", f"LFS object {value['oid']} not uploaded")
                files[value["path"]] = HubFile(self.repositories.lfs_objects[value["oid"]], is_lfs=True)
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise HttpError(400, "", f"the stand-in has no operation {operation['key']}")
        sha = self.repositories.commit(repository, title, files, branch).sha
        link = f"{address(request)}/{repo_id}/commit/{sha}"
        return json_response({"success": True, "commitOid": sha, "commitUrl": link, "hookOutput": ""})


def metadata_errors(text: str, repo_type: str) -> list[str]:
    """List what the Hub would object to in the metadata of a card, as far as huggingface_hub's own classes know."""
    from huggingface_hub import DatasetCardData, ModelCardData  # slow to import; many want the server's tokens only

    try:
        metadata = yaml.safe_load(text)
        card_data = ModelCardData if repo_type == "model" else DatasetCardData
        card_data(**metadata)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        return [str(error)]
    values = (metadata.get(key) or [] for key in ("license", "language"))
    licenses, languages = ([value] if isinstance(value, str) else value for value in values)
    errors = [f'"license" must be one of [{", ".join(LICENSES)}]' for name in licenses if name not in LICENSES]
    unknown = [name for name in languages if not re.fullmatch("[a-z]{2,3}", name)]
    return errors + [f'"language" must be ISO 639: {name}' for name in unknown]


def address(request: Request) -> str:
    return f"http://{request.headers['Host']}"


if __name__ == "__main__":
    LoopbackServer(Hub()).serve_until_stdin_ends()
