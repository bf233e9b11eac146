"""Objects as Cloud Storage keeps them: generations, preconditions, checksums, listings, resumable uploads."""

import base64
import dataclasses
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import google_crc32c

from tests.servers.loopback import HttpError


@dataclasses.dataclass(frozen=True)
class StoredObject:
    content: bytes
    metadata: dict[str, Any]


@dataclasses.dataclass
class UploadSession:
    """A resumable upload; `finished` is the object's metadata once all bytes are there."""

    bucket: str
    name: str
    conditions: Mapping[str, str]
    metadata: dict[str, Any]
    received: bytearray = dataclasses.field(default_factory=bytearray)
    finished: dict[str, Any] | None = None


class Buckets:
    """All content of the stand-in."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, StoredObject]] = {}
        self.sessions: dict[str, UploadSession] = {}
        self._generation = 0

    def objects(self, bucket: str) -> dict[str, StoredObject]:
        if bucket not in self.by_name:
            raise HttpError(404, "notFound", "The specified bucket does not exist.")
        return self.by_name[bucket]

    def get(self, bucket: str, name: str, query: Mapping[str, str]) -> StoredObject:
        stored = self.objects(bucket).get(name)
        if stored is None or query.get("generation") not in (None, stored.metadata["generation"]):
            raise HttpError(404, "notFound", f"No such object: {bucket}/{name}")
        check_conditions(stored, query)
        return stored

    def put(
        self, bucket: str, name: str, content: bytes, conditions: Mapping[str, str], metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Store an object and return its metadata, with an MD5 where the upload had one."""
        objects = self.objects(bucket)
        check_conditions(objects.get(name), conditions)
        checksums = {"crc32c": crc32c(content)}
        if "md5Hash" in metadata:
            checksums["md5Hash"] = as_base64(hashlib.md5(content).digest())
        for field, actual in checksums.items():
            if metadata.get(field) not in (None, actual):
                raise HttpError(
                    400, "invalid", f"Provided {field} {metadata[field]} doesn't match calculated {actual}."
                )
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        stored = {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "id": f"{bucket}/{name}/{self._generation}",
            "generation": str(self._generation),
            "metageneration": "1",
            "size": str(len(content)),
            "etag": as_base64(str(self._generation).encode()),
            "contentType": metadata.get("contentType") or "application/octet-stream",
            "timeCreated": now,
            "updated": now,
            "storageClass": "STANDARD",
            **checksums,
        }
        objects[name] = StoredObject(content, stored)
        return stored

    def delete(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        self.get(bucket, name, query)
        del self.by_name[bucket][name]

    def list(self, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
        """List one page of names after `pageToken`, those with a delimiter after the prefix cut and grouped."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        entries: dict[str, dict[str, Any] | None] = {}
        for name, stored in sorted(self.objects(bucket).items()):
            if name.startswith(prefix):
                head, separator, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
                entries[prefix + head + separator if separator else name] = None if separator else stored.metadata
        remaining = [entry for entry in entries.items() if entry[0] > page_start(query)]
        page = remaining[: int(query.get("maxResults", 1000))]
        listing: dict[str, Any] = {"kind": "storage#objects"}
        listing["items"] = [metadata for _, metadata in page if metadata is not None]
        listing["prefixes"] = [name for name, metadata in page if metadata is None]
        if len(page) < len(remaining):
            listing["nextPageToken"] = as_base64(page[-1][0].encode())
        return {key: value for key, value in listing.items() if value}

    def begin_upload(
        self, bucket: str, name: str, conditions: Mapping[str, str], metadata: dict[str, Any]
    ) -> tuple[str, UploadSession]:
        """Begin a resumable upload, and return its id and the upload."""
        check_conditions(self.objects(bucket).get(name), conditions)
        session_id = f"session-{len(self.sessions) + 1}"
        self.sessions[session_id] = UploadSession(bucket, name, conditions, metadata)
        return session_id, self.sessions[session_id]

    def finish_upload(self, session: UploadSession, checksums: Mapping[str, str]) -> None:
        metadata = session.metadata | dict(checksums)
        session.finished = self.put(session.bucket, session.name, bytes(session.received), session.conditions, metadata)


def check_conditions(stored: StoredObject | None, query: Mapping[str, str]) -> None:
    """Raise HttpError 412 where a precondition of the query does not hold; 0 stands for an object not there."""
    asked = {name.lower(): value for name, value in query.items()}
    for field in ("generation", "metageneration"):
        actual = stored.metadata[field] if stored else "0"
        if asked.get(f"if{field}match") not in (None, actual) or asked.get(f"if{field}notmatch") == actual:
            raise HttpError(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")


def page_start(query: Mapping[str, str]) -> str:
    return base64.b64decode(query.get("pageToken", "")).decode()


def crc32c(content: bytes) -> str:
    return as_base64(google_crc32c.Checksum(content).digest())


def as_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
