"""Values of the metadata server that each machine of Google Cloud has for itself.

https://cloud.google.com/compute/docs/metadata/overview
"""

import logging
import os
import urllib.request

logger = logging.getLogger(__name__)

HOST_VARIABLE = "GCE_METADATA_HOST"
HOST = "metadata.google.internal"


def read_metadata(name: str, timeout_seconds: float = 5.0) -> str | None:
    """Return a value such as `instance/zone`, None where there is none or no server answers."""
    url = f"http://{os.environ.get(HOST_VARIABLE) or HOST}/computeMetadata/v1/{name}"
    # The metadata server is on the machine itself, so no proxy reaches it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            text: str = answer.read().decode().strip()
            return text
    except (OSError, ValueError) as error:
        logger.debug("no answer from %s: %s", url, error)
        return None
