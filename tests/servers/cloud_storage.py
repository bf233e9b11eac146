"""Google Cloud Storage on one port of 127.0.0.1, in memory, in three parts.

- The JSON API, and the XML API's download, which TensorFlow reads through.
- A proxy with TLS for Google's host names, which TensorFlow's client has built in. Any other host is refused, so that a
  program with this environment reaches nothing outside.
- The metadata server of a cloud machine, from which both clients get their credentials.

Run as `python -m tests.servers.cloud_storage FOLDER`; the folder gets `certificate.pem`.
"""

import base64
import datetime
import json
import re
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.servers.cloud_objects import Buckets, StoredObject
from tests.servers.loopback import (
    Application,
    Handler,
    HttpError,
    LoopbackServer,
    Request,
    Response,
    content_response,
    json_response,
)

CERTIFICATE_NAME = "certificate.pem"
GOOGLE_HOSTS = ("www.googleapis.com", "storage.googleapis.com", "oauth2.googleapis.com")
MAX_COMPOSED_OBJECTS = 32
TOKEN = "token-of-the-stand-in"
MACHINE = {"project-id": "stand-in", "universe-domain": "googleapis.com"}

_BUCKET = r"/storage/v1/b/(?P<bucket>[^/]+)"
_OBJECT = _BUCKET + r"/o/(?P<name>[^/]+)"


class CloudStorage(Application):
    """The APIs; `accepted_tokens` None lets everybody in, and `denied_buckets` nobody.

    `denied_permissions` are what nobody may do in any bucket, such as `storage.objects.delete`.
    """

    def __init__(self) -> None:
        self.reset()
        self._routes: list[tuple[str, str, Callable[..., Response]]] = [
            ("GET", r"/", self.metadata_root),
            ("GET", r"/computeMetadata/v1/(?P<name>.*)", self.machine_metadata),
            ("GET", _BUCKET, self.get_bucket),
            ("GET", _BUCKET + r"/o", self.list_objects),
            ("GET", r"(?:/download)?" + _OBJECT, self.get_object),
            ("DELETE", _OBJECT, self.delete_object),
            ("POST", _OBJECT + r"/compose", self.compose_object),
            ("POST|PUT", "/upload" + _BUCKET + r"/o", self.upload),
            ("GET", r"/(?P<bucket>[^/]+)/(?P<name>.+)", self.get_object_xml),
        ]

    def reset(self) -> None:
        self.buckets = Buckets()
        self.accepted_tokens: list[str] | None = None
        self.denied_buckets: list[str] = []
        self.denied_permissions: list[str] = []

    def control(self, action: str, argument: dict[str, Any]) -> Any:
        if action == "make_bucket":
            self.buckets.by_name.setdefault(argument["bucket"], {})
        elif action == "put":
            content = base64.b64decode(argument["content"])
            self.buckets.put(argument["bucket"], argument["name"], content, {}, {})
        elif action == "delete":
            self.buckets.delete(argument["bucket"], argument["name"], {})
        elif action == "objects":
            objects = self.buckets.objects(argument["bucket"])
            return {name: base64.b64encode(stored.content).decode() for name, stored in objects.items()}
        elif action == "authorize":
            self.accepted_tokens, self.denied_buckets = argument["accepted_tokens"], argument["denied_buckets"]
            self.denied_permissions = argument["denied_permissions"]
        else:
            return super().control(action, argument)
        return None

    def respond(self, request: Request) -> Response:
        for methods, pattern, answer in self._routes:
            match = re.fullmatch(pattern, request.path)
            if match and re.fullmatch(methods, request.method):
                parts = {name: unquote(value) for name, value in match.groupdict().items()}
                if "bucket" in parts:
                    self.check_access(request, parts["bucket"])
                return answer(request, **parts)
        raise HttpError(501, "notImplemented", f"the stand-in has no {request.method} {request.path}")

    def check_access(self, request: Request, bucket: str) -> None:
        if self.accepted_tokens is not None and request.token not in self.accepted_tokens:
            raise HttpError(401, "authError", "Invalid Credentials")
        if bucket in self.denied_buckets:
            raise HttpError(403, "forbidden", "the account does not have storage.objects access to the bucket.")
        permission = permission_needed(request)
        if permission in self.denied_permissions:
            raise HttpError(403, "forbidden", f"the account does not have {permission} access to the object.")

    def error_response(self, request: Request, error: HttpError) -> Response:
        if not re.match(r"/(storage|upload|download|computeMetadata|_control)/", request.path):
            text = f"<?xml version='1.0'?><Error><Code>{error.reason}</Code><Message>{error.message}</Message></Error>"
            return Response(error.status, text.encode(), {"Content-Type": "application/xml"} | error.headers)
        detail = {"domain": "global", "reason": error.reason, "message": error.message}
        content = {"error": {"code": error.status, "message": error.message, "errors": [detail]}}
        return json_response(content, error.status, error.headers)

    # The metadata server of a cloud machine.

    def metadata_root(self, _request: Request) -> Response:
        return Response(200, b"OK", {"Metadata-Flavor": "Google"})

    def machine_metadata(self, _request: Request, name: str) -> Response:
        flavor = {"Metadata-Flavor": "Google"}
        if name.endswith("/token"):
            return json_response({"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600}, headers=flavor)
        if "/service-accounts/" in name:
            account = {"aliases": ["default"], "email": "account@stand-in.invalid", "scopes": []}
            return json_response(account, headers=flavor)
        value = MACHINE.get(name.rpartition("/")[2].replace("_", "-"))
        return Response(404 if value is None else 200, (value or "").encode(), flavor | {"Content-Type": "text/plain"})

    # Reading.

    def get_bucket(self, _request: Request, bucket: str) -> Response:
        self.buckets.objects(bucket)
        return json_response({"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "US-CENTRAL1"})

    def list_objects(self, request: Request, bucket: str) -> Response:
        return json_response(self.buckets.list(bucket, request.query))

    def get_object(self, request: Request, bucket: str, name: str) -> Response:
        stored = self.buckets.get(bucket, name, request.query)
        wants_content = request.query.get("alt") == "media"
        return object_response(request, stored) if wants_content else json_response(stored.metadata)

    def get_object_xml(self, request: Request, bucket: str, name: str) -> Response:
        return object_response(request, self.buckets.get(bucket, name, request.query))

    # Writing.

    def delete_object(self, request: Request, bucket: str, name: str) -> Response:
        self.buckets.delete(bucket, name, request.query)
        return Response(204)

    def compose_object(self, request: Request, bucket: str, name: str) -> Response:
        sources = [self.buckets.get(bucket, source["name"], {}) for source in request.json()["sourceObjects"]]
        if len(sources) > MAX_COMPOSED_OBJECTS:
            raise HttpError(400, "invalid", f"The number of source components must be at most {MAX_COMPOSED_OBJECTS}.")
        content = b"".join(source.content for source in sources)
        metadata = request.json()["destination"]
        return json_response(self.buckets.put(bucket, name, content, request.query, metadata))

    def upload(self, request: Request, bucket: str) -> Response:
        if "upload_id" in request.query:
            return self.continue_upload(request)
        kind = request.query.get("uploadType")
        if kind == "multipart":
            metadata, content = multipart_parts(request)
            return json_response(self.buckets.put(bucket, metadata["name"], content, request.query, metadata))
        if kind == "resumable":
            metadata = request.query | request.json()
            session_id, _ = self.buckets.begin_upload(bucket, metadata["name"], request.query, metadata)
            base = f"https://{request.host}" if request.host else f"http://{request.headers['Host']}"
            query = "&".join(f"{name}={value}" for name, value in request.query.items() if name != "name")
            return Response(200, headers={"Location": f"{base}{request.path}?{query}&upload_id={session_id}"})
        raise HttpError(400, "invalid", f"bad uploadType {kind!r}")

    def continue_upload(self, request: Request) -> Response:
        session = self.buckets.sessions.get(request.query["upload_id"])
        if session is None:
            raise HttpError(404, "notFound", "No such upload session")
        content_range = request.headers.get("Content-Range") or f"bytes 0-*/{len(request.body)}"
        match = re.fullmatch(r"bytes (?:(?P<start>\d+)-[\d*]+|\*)/(?P<total>\d+|\*)", content_range)
        if not match:
            raise HttpError(400, "invalid", f"bad Content-Range {content_range}")
        if not session.finished:
            if match["start"] is not None:
                if int(match["start"]) > len(session.received):
                    raise HttpError(503, "backendError", "bytes are missing before these")
                session.received[int(match["start"]) :] = request.body
            if match["total"] == str(len(session.received)):
                self.buckets.finish_upload(session, hash_header(request))
        if session.finished:
            return json_response(session.finished)
        num_received = len(session.received)
        return Response(308, headers={"Range": f"bytes=0-{num_received - 1}"} if num_received else {})

    def interrupted(self, request: Request) -> None:
        """Keep what had come of a resumable upload, as Cloud Storage does."""
        session = self.buckets.sessions.get(request.query.get("upload_id", ""))
        if session and not session.finished:
            session.received += request.body


def permission_needed(request: Request) -> str:
    """Name the permission for a request to an object, one that does not replace another."""
    reading = "get" if "/o/" in request.path else "list"
    return "storage.objects." + {"DELETE": "delete", "POST": "create", "PUT": "create"}.get(request.method, reading)


def object_response(request: Request, stored: StoredObject) -> Response:
    """Answer with the object's bytes, or those that the `Range` header asks for."""
    metadata = stored.metadata
    headers = {
        "Content-Type": metadata["contentType"],
        "ETag": metadata["etag"],
        "X-Goog-Generation": metadata["generation"],
        "X-Goog-Stored-Content-Length": metadata["size"],
        "X-Goog-Hash": f"crc32c={metadata['crc32c']}" + (f",md5={md5}" if (md5 := metadata.get("md5Hash")) else ""),
    }
    return content_response(request, stored.content, headers)


def multipart_parts(request: Request) -> tuple[dict[str, Any], bytes]:
    """Read the metadata and the content of a multipart upload."""
    boundary = re.search(r"boundary=[\"']?([^\"';]+)", request.headers["Content-Type"])
    assert boundary
    parts = (b"\r\n" + request.body).split(b"\r\n--" + boundary[1].encode())
    metadata_part, content_part = (part.split(b"\r\n\r\n", 1)[1] for part in parts[1:3])
    return json.loads(metadata_part), content_part


def hash_header(request: Request) -> dict[str, str]:
    """Read the checksums that a resumable upload announces, under the names of the object's fields."""
    pairs = (part.strip().partition("=") for part in (request.headers.get("X-Goog-Hash") or "").split(","))
    return {{"md5": "md5Hash"}.get(name, name): value for name, _, value in pairs if name}


def write_certificate(folder: Path, hosts: Sequence[str]) -> Path:
    """Write a key and its self-signed certificate for the hosts, valid for a day; return the file's path."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stand-in")])
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    host_names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
    builder = builder.add_extension(host_names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    encoding, key_format = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path = folder / CERTIFICATE_NAME
    path.write_bytes(
        key.private_bytes(encoding, key_format, serialization.NoEncryption()) + certificate.public_bytes(encoding)
    )
    return path


class ProxyHandler(Handler):
    """Opens a tunnel to Google's host names that ends here: requests out of it are served like all others."""

    server: "CloudStorageServer"

    def do_CONNECT(self) -> None:  # noqa: N802
        host, _, port = self.path.rpartition(":")
        if host not in GOOGLE_HOSTS or port != "443":
            self.send_error(403, f"the stand-in opens no tunnel to {self.path}")
            self.close_connection = True
            return
        self.send_response_only(200, "Connection established")
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.host, self.close_connection = host, False

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            if self.host:
                self.connection.close()


class CloudStorageServer(LoopbackServer):
    """The server, with the certificate that its tunnels show."""

    def __init__(self, folder: Path) -> None:
        super().__init__(CloudStorage(), ProxyHandler)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(write_certificate(folder, GOOGLE_HOSTS))


if __name__ == "__main__":
    CloudStorageServer(Path(sys.argv[1])).serve_until_stdin_ends()
